"""Texts to rows of a model: one text, a pair, and overlapping windows over what is longer.

In: texts or words and a tokenizer. Out: ids and segment types, specials included, and where in a row the tokens of a
passage, or the words, stand.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertjax.model.presets import BertConfig
from bertjax.tokenization import Tokenizer, encode_words

MANY = 500  # texts from which on the tokenizer's compiled code is worth its start


def require_segments(config: BertConfig, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the tokenizer numbers the two texts of a pair and the model has one segment only."""
    if config.type_vocab_size == 1 and tokenizer.layout.second:
        raise ValueError(
            "this model has one segment (type_vocab_size=1), so it cannot read pairs "
            "of texts; join the two into one text, or take another model"
        )


# --- texts and pairs


def trim_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two segments cut to fit `room`: the longer one is cut first, the second one if they are equal.

    Source: _truncate_seq_pair of the original run_classifier.py.
    """
    over = max(0, first + second - room)
    from_first, from_second = min(over, max(0, first - second)), min(over, max(0, second - first))
    rest = over - from_first - from_second  # both are equally long now
    return first - from_first - rest // 2, second - from_second - (rest + 1) // 2


def segment_row(
    tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and segment types, int32, of [CLS] A [SEP] or [CLS] A [SEP] B [SEP], trimmed to max_length.

    Other tokenizers lay them out in their own way. The first [SEP] belongs to segment 0. An empty B stays a segment:
    [CLS] A [SEP] [SEP].
    """
    layout = tokenizer.layout
    specials = layout.count(pair=second is not None)
    if max_length <= specials:
        raise ValueError(f"max_length={max_length} has no room for text beside {specials} special tokens")
    n, m = trim_lengths(len(first), 0 if second is None else len(second), max_length - specials)
    return layout.join(first[:n], None if second is None else second[:m])


def pair_rows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str | None]], max_length: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The row of each (text, second text or None); the tokenizer sees all texts at once."""
    first = _encoded(tokenizer, [a for a, _ in pairs])
    second = iter(_encoded(tokenizer, [b for _, b in pairs if b is not None]))
    return [
        segment_row(tokenizer, ids, None if b is None else next(second), max_length)
        for ids, (_, b) in zip(first, pairs, strict=True)
    ]


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> Sequence[Sequence[int]]:
    if len(texts) < MANY:
        return tokenizer.encode_batch(texts)
    flat, lengths = tokenizer.encode_flat(texts)
    ends = np.cumsum(lengths).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# --- windows


def window_starts(tokens: int, room: int, stride: int) -> list[int]:
    """First token of each window of `room` tokens; every token is in at least one.

    A stride above the room is reduced to it. Raises ValueError if windows could not advance.
    """
    if room < 1:
        raise ValueError(f"room={room}: a window must hold at least one token")
    if stride < 1:
        raise ValueError(f"stride={stride} must be at least 1, or windows do not advance")
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(stride, room))
    return starts


def most_context(starts: Sequence[int], room: int, tokens: int) -> np.ndarray:
    """[tokens]: for each token the window with the most context around it, the first of equal ones.

    Worth of a window to a token: the smaller of its left and right context plus 0.01 of the window's length
    (run_squad.py of google-research/bert, _check_is_max_context).
    """
    best, owner = np.full(tokens, -np.inf), np.zeros(tokens, int)
    for number, start in enumerate(starts):
        seen = np.arange(min(room, tokens - start))
        worth = np.minimum(seen, seen[::-1]) + 0.01 * len(seen)
        mine = start + seen[worth > best[start : start + room]]
        best[mine], owner[mine] = worth[mine - start], number
    return owner


class WordRow(NamedTuple):
    """[CLS] pieces [SEP]: the row answers for `words` [n], whose first pieces are at `positions` [n]."""

    ids: np.ndarray
    types: np.ndarray
    words: np.ndarray
    positions: np.ndarray


def word_rows(tokenizer: Tokenizer, words: Sequence[str], max_length: int, all_present: bool) -> list[WordRow]:
    """One row or more; each word is answered in exactly one, the one with the most context around it.

    Windows overlap by half. A word of characters that the tokenizer drops is in none of them, or, with all_present, is
    an unknown token.
    """
    pieces = encode_words(tokenizer, words)
    if all_present:
        pieces = [ids or [tokenizer.unk_id] for ids in pieces]
    present = np.flatnonzero([len(ids) > 0 for ids in pieces])
    ids = [token for word in pieces for token in word]
    firsts = np.cumsum([0, *(len(pieces[word]) for word in present)])[:-1]
    layout = tokenizer.layout
    room = max_length - layout.count(pair=False)
    starts = window_starts(len(ids), room, max(1, room // 2))
    owner = most_context(starts, room, len(ids))[firsts]
    rows = []
    ends = np.searchsorted(owner, np.arange(len(starts)), "right")  # a later word has no earlier window
    for start, *mine in zip(starts, [0, *ends], ends, strict=False):
        mine = np.arange(*mine)
        if len(mine) or not rows:
            row = layout.join(ids[start : start + room])
            rows.append(WordRow(*row, present[mine], firsts[mine] - start + len(layout.prefix)))
    return rows


@dataclass(frozen=True)
class Window:
    """Which part of a passage a row shows; host-side companion of its ids.

    `first` is the row's position of the first passage token, `offsets` [n, 2] the characters of the n passage tokens,
    `best` [n] whether this window gives the token the most context.
    """

    first: int
    offsets: np.ndarray
    best: np.ndarray


def passage_tokens(tokenizer: Tokenizer, passage: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [n], the code points [start, end) of each, int32 [n, 2]).

    Characters that the tokenizer drops (combining marks, vowel signs, variation selectors, joiners) belong to the token
    that they touch, the one before them where it touches both: an answer that ends in one is found whole. Tokens made
    of one letter all get the span of that letter, so an answer that ends inside a letter is labelled, and predicted,
    with the whole letter.
    """
    ids, offsets = tokenizer.encode_with_offsets(passage)
    spans = np.array(offsets, np.int32).reshape(-1, 2)
    if not len(spans):
        return np.array(ids, np.int32), spans
    spans[:, 0] = np.minimum(_past_blanks(passage)[spans[:, 0]], spans[:, 1])  # pieces may hold the blank before a word
    reached = np.maximum.accumulate(spans[:, 1])  # a token of no width may end before others
    lefts, rights = np.append(0, reached), np.append(spans[:, 0], len(passage))
    starts, ends = np.arange(len(passage) + 1), np.arange(len(passage) + 1)  # where each boundary moves to
    for number in np.flatnonzero(lefts < rights):  # between two tokens, before the first, after the last
        left, right = lefts[number], rights[number]
        gap = passage[left:right]
        if gap.isspace():
            continue
        after = 0 if number == 0 else _leading(gap)
        ends[left] += after
        starts[right] -= _leading(gap[after:][::-1])
    return np.array(ids, np.int32), np.stack([starts[spans[:, 0]], ends[spans[:, 1]]], 1).astype(np.int32)


def _past_blanks(passage: str) -> np.ndarray:
    """[len(passage) + 1]: the place of each character or, if it is white space, of the next one that is not."""
    places = np.arange(len(passage) + 1)
    for run in re.finditer(r"\s+", passage):
        places[run.start() : run.end()] = run.end()
    return places


def _leading(gap: str) -> int:
    """How many characters come before the first white space."""
    return next((i for i, char in enumerate(gap) if char.isspace()), len(gap))


def passage_windows(
    tokenizer: Tokenizer, query: Sequence[int], ids: np.ndarray, offsets: np.ndarray, max_length: int, stride: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Window]]:
    """(ids, segment types, Window) of every row [CLS] query [SEP] part of the passage [SEP].

    Raises ValueError if the query leaves the passage no room, or windows could not advance.
    """
    layout = tokenizer.layout
    before = len(layout.prefix) + len(query) + len(layout.middle)
    room = max_length - before - len(layout.suffix)
    starts = window_starts(len(ids), room, stride)
    best = most_context(starts, room, len(ids))
    for number, start in enumerate(starts):
        part = slice(start, start + room)
        yield *layout.join(query, ids[part]), Window(before, offsets[part], best[part] == number)
