"""Dynamic masking on the device: which tokens are predicted and what stands in their place.

Unmasked ids [B, T] go in; masked ids, and positions, labels and weights of a fixed number P of predictions a row come
out. The draw is a pure function of the key, so that a step can be repeated, and runs inside the compiled step.

The rules are the original's (create_pretraining_data.py, create_masked_lm_predictions): of each pair,
min(max_predictions, max(1, round(0.15 n))) tokens, n counting special tokens; 80 % become [MASK], 10 % a random word,
10 % stay. One rule differs by default: the original draws random words from the whole vocabulary, [PAD], [CLS] and
[unused] included; see `MaskingSpec.replacement_ids`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import Config, max_predictions
from bertjax.tokenization import Tokenizer

# Greedy passes over the words of a row. Each takes every word that fits in turn, up to the first that does not; what it
# leaves is shorter than that word. With real words four fill practically every row; an empty slot has weight 0.
WHOLE_WORD_PASSES = 4


class Masked(NamedTuple):
    """A masked batch. Positions ascend; unused slots come last and have position, label and weight 0."""

    input_ids: jax.Array  # int32 [B, T], some tokens replaced
    positions: jax.Array  # int32 [B, P]
    labels: jax.Array  # int32 [B, P], the original ids at the positions
    weights: jax.Array  # float32 [B, P], 1 for predictions


@dataclasses.dataclass(frozen=True, eq=False)
class MaskingSpec:
    """How to mask.

    Attributes:
      special_ids: ids that are never predicted.
      replacement_ids: ids that random words are drawn from: no specials and no [unused]. `np.arange(vocab_size)` is the
        original's draw.
      max_predictions: the most predictions a pair (`max_predictions_per_seq`).
      predictions_per_row: P; None means max_predictions, and that every row holds one pair. Rows of several pairs need
        more; see `packed_predictions`. What exceeds P in a row loses its last positions.
      rate: share of a pair's tokens that is predicted.
      mask_prob, random_prob: shares of predictions that become [MASK] or a random word; the rest keeps its token.
      whole_word: predict all pieces of a word or none.
      is_continuation: bool [V], needed for whole words: pieces that continue a word.
    """

    mask_id: int
    special_ids: tuple[int, ...]
    replacement_ids: np.ndarray
    max_predictions: int
    predictions_per_row: int | None = None
    rate: float = 0.15
    mask_prob: float = 0.8
    random_prob: float = 0.1
    whole_word: bool = False
    is_continuation: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.random_prob > 0 and len(self.replacement_ids) == 0:
            raise ValueError(
                "replacement_ids is empty: the vocabulary has no ordinary word to draw; set "
                "random_prob to 0 or give a larger vocabulary"
            )
        if self.whole_word and self.is_continuation is None:
            raise ValueError("whole_word masking needs is_continuation: this tokenizer does not mark pieces of words")

    @property
    def slots(self) -> int:
        return self.predictions_per_row or self.max_predictions

    @classmethod
    def of(
        cls, config: Config, tokenizer: Tokenizer, length: int, pairs: int = 1, rate: float | None = None
    ) -> MaskingSpec:
        """As config.masking says, for rows of `length` tokens with up to `pairs` pairs; a setting whose name is that
        of a field here sets it.

        rate: share of the tokens that is predicted; None = that of training.
        """
        named = {
            field.name: getattr(config.masking, field.name)
            for field in dataclasses.fields(cls)
            if hasattr(config.masking, field.name) and field.name != "max_predictions"
        }
        named["rate"] = rate = rate or config.masking.rate
        return cls.from_tokenizer(
            tokenizer,
            max_predictions(config, length, rate),
            original_replacements=config.masking.replace_with_special,
            predictions_per_row=packed_predictions(length, pairs, rate) if pairs > 1 else None,
            **named,
        )

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, max_predictions: int, original_replacements: bool = False, **settings
    ) -> MaskingSpec:
        """For a tokenizer of bertjax.tokenization; `original_replacements` draws random words from the whole
        vocabulary, as the original. Settings are other fields.
        """
        vocabulary = np.arange(tokenizer.vocab_size, dtype=np.int32)
        layout = tokenizer.layout
        return cls(
            mask_id=tokenizer.mask_id,
            special_ids=tuple(dict.fromkeys((tokenizer.pad_id, *layout.prefix, *layout.middle, *layout.suffix))),
            replacement_ids=vocabulary if original_replacements else tokenizer.replacement_ids,
            max_predictions=max_predictions,
            is_continuation=tokenizer.is_continuation,
            **settings,
        )


def prediction_count(tokens: int, rate: float, max_predictions: int) -> int:
    """Predictions of a pair of `tokens` tokens, specials included: rounded half to even, >= 1."""
    return min(max_predictions, max(1, int(round(tokens * rate))))


def packed_predictions(seq_length: int, pairs: int, rate: float) -> int:
    """P that holds the predictions of any `pairs` pairs packed in a row of `seq_length` tokens: rounding adds at most a
    half to each, and the minimum of 1 less than 1 to a short one.
    """
    shortest = prediction_count(3, rate, seq_length) - 3 * rate  # [CLS] [SEP] [SEP] and no word
    return int(np.ceil(seq_length * rate + pairs * max(0.5, shortest)))


def mask_tokens(key: jax.Array, input_ids: jax.Array, attention_mask: jax.Array, spec: MaskingSpec) -> Masked:
    """Draws the predictions of every pair and replaces their tokens; P = spec.slots.

    Args:
      key: the draw is a pure function of it and of the inputs.
      input_ids: int [B, T], unmasked.
      attention_mask: int [B, T]; 0 is padding, 1..K number the pairs of a row.
    """
    choice_key, kind_key, word_key = jax.random.split(key, 3)
    chosen = choose(choice_key, input_ids, attention_mask, spec)

    share = jax.random.uniform(kind_key, input_ids.shape)
    draw = jax.random.randint(word_key, input_ids.shape, 0, max(1, len(spec.replacement_ids)))
    words = jnp.asarray(spec.replacement_ids, input_ids.dtype)[draw] if spec.random_prob else 0
    replaced = jnp.where(
        share < spec.mask_prob, spec.mask_id, jnp.where(share < spec.mask_prob + spec.random_prob, words, input_ids)
    )

    length, slots = input_ids.shape[1], spec.slots
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), input_ids.shape)
    ordered = jnp.sort(jnp.where(chosen, index, length), axis=1)
    if slots > length:
        ordered = jnp.pad(ordered, ((0, 0), (0, slots - length)), constant_values=length)
    ordered = ordered[:, :slots]
    used = ordered < length
    # A chosen token beyond the last slot is not predicted, so it keeps its id.
    chosen &= index <= jnp.max(jnp.where(used, ordered, -1), axis=1, keepdims=True)

    positions = jnp.where(used, ordered, 0)
    labels = jnp.where(used, jnp.take_along_axis(input_ids, positions, axis=1), 0)
    return Masked(
        input_ids=jnp.where(chosen, replaced, input_ids).astype(jnp.int32),
        positions=positions,
        labels=labels.astype(jnp.int32),
        weights=used.astype(jnp.float32),
    )


def next_tokens(input_ids: jax.Array, attention_mask: jax.Array) -> Masked:
    """The predictions of a left-to-right model: at every position the token after it, P = T - 1. Nothing is replaced,
    and the last token of a text predicts nothing.
    """
    batch, length = input_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length - 1, dtype=jnp.int32), (batch, length - 1))
    text, following = attention_mask[:, :-1], attention_mask[:, 1:]
    predicted = (text == following) & (following > 0)
    labels = jnp.where(predicted, input_ids[:, 1:], 0)
    return Masked(input_ids, positions, labels.astype(jnp.int32), predicted.astype(jnp.float32))


def choose(key: jax.Array, input_ids: jax.Array, attention_mask: jax.Array, spec: MaskingSpec) -> jax.Array:
    """Which tokens are predicted -> bool [B, T].

    The original shuffles the words of a row (a word is one token unless whole_word), walks through them and takes each
    that still fits into the pair's budget.
    """
    special = jnp.zeros(input_ids.shape, bool)
    for special_id in spec.special_ids:
        special |= input_ids == special_id
    candidate = (attention_mask > 0) & ~special
    order = jax.random.bits(key, input_ids.shape, jnp.uint32)
    if spec.predictions_per_row is None and not spec.whole_word:
        return _choose_tokens(order, candidate, jnp.sum(attention_mask > 0, axis=1), spec)
    continues = jnp.asarray(spec.is_continuation)[input_ids] if spec.whole_word else None
    return _choose_words(order, candidate, continues, attention_mask, spec)


def _choose_tokens(order: jax.Array, candidate: jax.Array, tokens: jax.Array, spec: MaskingSpec) -> jax.Array:
    """`choose` for rows of one pair and single tokens: those of smallest random numbers `order`, uint32 [B, T].

    The same tokens as of `_choose_words`, found by sorting one array instead of seven (a quarter of the time).
    `tokens`, int [B], are those of the pair, specials included.
    """
    candidates = jnp.sum(candidate, axis=1)
    take = jnp.minimum(_budgets(order.shape[1], spec)[tokens], candidates)[:, None]
    keys = jnp.where(candidate, order, jnp.uint32(0xFFFFFFFF))
    ascending = jnp.sort(keys, axis=1)
    largest = jnp.take_along_axis(ascending, jnp.maximum(take - 1, 0), axis=1)
    below = candidate & (keys < largest)
    equal = candidate & (keys == largest)  # nearly always one; else the first of them
    room = take - jnp.sum(below, axis=1, keepdims=True)
    return (take > 0) & (below | (equal & (jnp.cumsum(equal, axis=1) <= room)))


def _choose_words(
    order: jax.Array, candidate: jax.Array, continues: jax.Array | None, attention_mask: jax.Array, spec: MaskingSpec
) -> jax.Array:
    """`choose` for rows of several pairs, and for words of several tokens, which have the number `order` of the first.

    `continues`, bool [B, T], says which tokens continue a word; None: none does.

    The tokens are sorted by (pair, random number of their word, position), and the walk is done for all rows at once
    with sums inside the sorted segments.
    """
    shape = order.shape
    length = shape[1]
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape)
    same_pair = attention_mask[:, :, None] == attention_mask[:, None, :]
    budget = _budgets(length, spec)[jnp.sum(same_pair, axis=-1)]
    if continues is not None:
        word, size = _words(continues, candidate, attention_mask, index)
        order = jnp.take_along_axis(order, word, axis=1)
    else:
        word, size = index, jnp.ones_like(index)

    group = jnp.where(candidate, attention_mask, jnp.iinfo(jnp.int32).max)
    group, _, word, index, size, left, candidate = jax.lax.sort(
        (group, order, word, index, size, budget, candidate), dimension=1, num_keys=4
    )
    running = _running_sums(group)
    taken = jnp.zeros(shape, bool)
    for _ in range(1 if continues is None else WHOLE_WORD_PASSES):
        alive = candidate & ~taken & (size <= left)
        so_far, _ = running(alive)
        to_word_end = size - 1 - (index - word)
        fits = alive & (so_far + to_word_end <= left)
        taken |= fits
        left = left - running(fits)[1]

    _, chosen = jax.lax.sort((index, taken), dimension=1, num_keys=1)
    return chosen


def _running_sums(group: jax.Array) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """x [B, T] -> its sum up to each place and its total, both within a segment of equal numbers of `group`."""
    length = group.shape[1]
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), group.shape)
    starts = jnp.pad(group[:, 1:] != group[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, place, length), axis=1, reverse=True)

    def running(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = jnp.cumsum(x.astype(jnp.int32), axis=1)
        before = jnp.take_along_axis(sums - x, first, axis=1)
        return sums - before, jnp.take_along_axis(sums, last, axis=1) - before

    return running


def _words(
    continues: jax.Array, candidate: jax.Array, attention_mask: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(position of the first piece, number of pieces) of each token's word, int32 [B, T]; what is not a candidate is a
    word of its own.
    """
    before = jnp.pad(candidate[:, :-1], ((0, 0), (1, 0)))
    pair_before = jnp.pad(attention_mask[:, :-1], ((0, 0), (1, 0)))
    joined = continues & candidate & before & (pair_before == attention_mask)
    word = jax.lax.cummax(jnp.where(joined, -1, index), axis=1)
    followed = jnp.pad(joined[:, 1:], ((0, 0), (0, 1)))
    end = jax.lax.cummin(jnp.where(followed, index.shape[1], index), axis=1, reverse=True)
    return word, end - word + 1


def _budgets(length: int, spec: MaskingSpec) -> jax.Array:
    """Predictions of pairs of 0 .. length tokens, int32 [length+1].

    Made on the host in float64: 0.15 * 30 is exactly 4.5 there, and the original's counts depend on how such halves are
    rounded.
    """
    table = [prediction_count(n, spec.rate, spec.max_predictions) for n in range(length + 1)]
    return jnp.asarray(table, jnp.int32)
