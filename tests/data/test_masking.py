"""Masking: counts, shares, what is never chosen or drawn, whole words, packed rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.data.masking import MaskingSpec, _choose_tokens, choose, mask_tokens, packed_predictions, prediction_count
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = (PAD, UNK, CLS, SEP, MASK)
VOCABULARY = 60


def spec(max_predictions=77, **settings):
    settings.setdefault("replacement_ids", np.arange(5, VOCABULARY, dtype=np.int32))
    return MaskingSpec(MASK, SPECIAL, max_predictions=max_predictions, **settings)


def masker(settings):
    """mask_tokens with these settings, compiled once for all keys and rows of a shape."""
    return jax.jit(lambda key, ids, mask: mask_tokens(key, ids, mask, settings))


MASK_TOKENS = {predictions: masker(spec(predictions)) for predictions in (2, 20, 77)}


def rows(tokens, length=None, count=1, seed=0):
    """`count` rows of `tokens` tokens, [CLS] and [SEP] included, padded to `length`."""
    length = length or tokens
    ids = np.zeros((count, length), np.int32)
    ids[:, :tokens] = np.random.default_rng(seed).integers(5, VOCABULARY, (count, tokens))
    ids[:, 0], ids[:, tokens - 1] = CLS, SEP
    return jnp.asarray(ids), jnp.asarray((ids != PAD).astype(np.int32))


# Python's int(round(n * 0.15)), the original's own expression, evaluated by hand.
GOLDEN_COUNTS = {3: 1, 6: 1, 7: 1, 10: 2, 20: 3, 23: 3, 30: 4, 50: 8, 128: 19, 512: 77}


@pytest.mark.parametrize("tokens, expected", GOLDEN_COUNTS.items())
def test_number_of_predictions(tokens, expected):
    ids, mask = rows(tokens, length=512)
    masked = MASK_TOKENS[77](jax.random.key(tokens), ids, mask)
    assert masked.weights.sum() == expected == prediction_count(tokens, 0.15, 77)
    assert masked.positions.shape == masked.labels.shape == (1, 77)
    capped = MASK_TOKENS[2](jax.random.key(tokens), ids, mask)
    assert capped.weights.sum() == min(2, expected)


def test_slots_hold_the_original_ids_in_ascending_order_and_nothing_else_changes():
    ids, mask = rows(50, 64, count=32)
    masked = MASK_TOKENS[20](jax.random.key(0), ids, mask)
    original, changed = np.asarray(ids), np.asarray(masked.input_ids)
    for row in range(32):
        used = np.asarray(masked.weights[row]) == 1
        assert used.tolist() == sorted(used.tolist(), reverse=True)
        positions = np.asarray(masked.positions[row])
        assert (np.diff(positions[used]) > 0).all()
        assert (positions[~used] == 0).all()
        assert (np.asarray(masked.labels[row])[used] == original[row, positions[used]]).all()
        untouched = np.setdiff1d(np.arange(64), positions[used])
        assert (changed[row, untouched] == original[row, untouched]).all()


def test_specials_and_padding_are_never_chosen_and_all_other_tokens_are_equally_likely():
    ids, mask = rows(20, 24)
    ids = ids.at[0, 7].set(UNK).at[0, 9].set(SEP)
    draws = 4000
    keys = jax.random.split(jax.random.key(1), draws)
    chosen = jax.jit(jax.vmap(lambda k: choose(k, ids, mask, spec())[0]))(keys)
    share = np.asarray(chosen).mean(0)
    forbidden = np.isin(np.asarray(ids[0]), SPECIAL)
    assert (share[forbidden] == 0).all()
    expected = 3 / 16  # 3 of the 20 tokens, 16 of which are ordinary
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert np.abs(share[~forbidden] - expected).max() < 4.5 * deviation


def kinds(settings, draws=20_000):
    """Masked id of `w1` in [CLS] w1 [SEP] over many keys; vocabulary: 5 specials, w1, w2."""
    ids, mask = jnp.array([[CLS, 5, SEP]]), jnp.ones((1, 3), jnp.int32)
    keys = jax.random.split(jax.random.key(2), draws)
    return np.asarray(jax.jit(jax.vmap(lambda k: mask_tokens(k, ids, mask, settings).input_ids[0, 1]))(keys))


def test_unknown_words_are_predicted_and_only_cls_sep_and_padding_are_not():
    # create_pretraining_data.py, create_masked_lm_predictions: skips "[CLS]" and "[SEP]" alone.
    tokenizer = WordPieceTokenizer([*SPECIALS, "a", "##b"], True)
    settings = MaskingSpec.from_tokenizer(tokenizer, 8, rate=0.99)
    assert settings.special_ids == (PAD, CLS, SEP)
    ids = jnp.array([[CLS, UNK, 5, MASK, 6, SEP, PAD, PAD]])
    masked = jax.jit(lambda key: mask_tokens(key, ids, (ids != PAD).astype(jnp.int32), settings))(jax.random.key(0))
    assert masked.labels[0, :4].tolist() == [UNK, 5, MASK, 6] and masked.weights.sum() == 4


def test_shares_of_mask_kept_and_random_and_no_special_is_drawn():
    drawn = kinds(spec(replacement_ids=np.array([5, 6])))
    assert set(drawn) == {MASK, 5, 6}
    assert (drawn == MASK).mean() == pytest.approx(0.8, abs=0.01)
    # 10 % random over two words: half of it is w1 itself.
    assert (drawn == 6).mean() == pytest.approx(0.05, abs=0.01)
    assert (drawn == 5).mean() == pytest.approx(0.15, abs=0.01)


def test_whole_range_reproduces_the_original_draw_of_specials():
    drawn = kinds(spec(replacement_ids=np.arange(7)))
    others = np.isin(drawn, (PAD, UNK, CLS, SEP)).mean()
    assert others == pytest.approx(0.1 * 4 / 7, abs=0.01)


def test_the_draw_is_a_function_of_the_key_and_differs_between_rows_and_keys():
    ids, mask = rows(64, count=8)
    ids = jnp.broadcast_to(ids[:1], ids.shape)
    first, again, other = (MASK_TOKENS[20](jax.random.key(k), ids, mask) for k in (0, 0, 1))
    np.testing.assert_array_equal(first.input_ids, again.input_ids)
    assert (first.positions != other.positions).any()
    assert len({tuple(np.asarray(p)) for p in first.positions}) == 8


def test_pairs_packed_in_a_row_have_their_own_counts():
    lengths = (10, 30, 3, 50)
    ids = np.concatenate([np.asarray(rows(n, seed=n)[0][0]) for n in lengths] + [[PAD] * 7])
    mask = np.concatenate([[k + 1] * n for k, n in enumerate(lengths)] + [[0] * 7])
    slots = packed_predictions(100, 4, 0.15)
    draw = masker(spec(20, predictions_per_row=slots))
    for seed in range(20):
        masked = draw(jax.random.key(seed), ids[None], mask[None])
        used = np.asarray(masked.positions[0])[np.asarray(masked.weights[0]) == 1]
        counts = np.bincount(mask[used], minlength=5)
        assert counts.tolist() == [0, 2, 4, 1, 8]
        assert not np.isin(ids[used], SPECIAL).any()


def test_packed_predictions_bounds_every_packing():
    rng = np.random.default_rng(0)
    for _ in range(500):
        lengths = rng.integers(3, 60, rng.integers(1, 12))
        need = sum(prediction_count(int(n), 0.15, 20) for n in lengths)
        assert need <= packed_predictions(int(lengths.sum()), len(lengths), 0.15)


def test_row_with_more_predictions_than_slots_keeps_the_rest_unmasked():
    ids, mask = rows(60)
    masked = masker(spec(20, predictions_per_row=4, mask_prob=1.0, random_prob=0.0))(jax.random.key(0), ids, mask)
    assert masked.weights.sum() == 4
    assert (np.asarray(masked.input_ids) == MASK).sum() == 4


CONTINUES = np.arange(VOCABULARY) >= 40


def words_of(ids):
    """Words as sets of positions, found by a plain loop."""
    words = []
    for i, token in enumerate(ids):
        if token in SPECIAL:
            continue
        if CONTINUES[token] and i and ids[i - 1] not in SPECIAL:
            words[-1].append(i)
        else:
            words.append([i])
    return words


def test_whole_words_are_chosen_whole_and_the_budget_is_filled():
    ids, mask = rows(128, count=256, seed=3)
    settings = spec(20, whole_word=True, is_continuation=CONTINUES)
    chosen = np.asarray(jax.jit(lambda k: choose(k, ids, mask, settings))(jax.random.key(0)))
    for row, tokens in zip(chosen, np.asarray(ids), strict=True):
        words = words_of(tokens.tolist())
        for word in words:
            assert row[word].all() or not row[word].any()
        # Greedy never stops while a word that is left still fits.
        left = 19 - row.sum()
        assert left >= 0
        assert all(row[w[0]] or len(w) > left for w in words)


def greedy(words, budget, rng):
    """The original's loop over shuffled words."""
    taken = []
    for i in rng.permutation(len(words)):
        if len(taken) + len(words[i]) > budget:
            continue
        taken += words[i]
        if len(taken) == budget:
            break
    return taken


def test_whole_word_choice_has_the_distribution_of_the_sequential_greedy_walk():
    ids, mask = rows(30, seed=5)
    settings = spec(20, whole_word=True, is_continuation=CONTINUES)
    draws = 6000
    keys = jax.random.split(jax.random.key(4), draws)
    share = np.asarray(jax.jit(jax.vmap(lambda k: choose(k, ids, mask, settings)[0]))(keys)).mean(0)
    words, rng = words_of(np.asarray(ids[0]).tolist()), np.random.default_rng(0)
    expected = np.zeros(30)
    for _ in range(draws):
        expected[greedy(words, 4, rng)] += 1 / draws
    deviation = np.sqrt(2 * np.maximum(expected * (1 - expected), 1e-3) / draws)
    assert (np.abs(share - expected) < 4.5 * deviation).all()


def test_a_vocabulary_without_words_to_draw_is_refused():
    with pytest.raises(ValueError, match="replacement_ids is empty"):
        spec(replacement_ids=np.array([], np.int32))


@pytest.mark.parametrize("length, predictions", [(128, 20), (512, 77), (16, 3)])
def test_rows_of_one_pair_are_masked_as_by_the_general_method(length, predictions):
    # predictions_per_row, though it changes nothing here, asks for the method of packed rows.
    rng = np.random.default_rng(0)
    ids = rng.integers(100, 110, (64, length)).astype(np.int32)  # a third of them special
    mask = (np.arange(length) < rng.integers(0, length + 1, (64, 1))).astype(np.int32)
    spec = MaskingSpec(
        mask_id=103,
        special_ids=(0, 100, 101, 102, 103),
        max_predictions=predictions,
        replacement_ids=np.arange(104, 110),
    )
    general = masker(dataclasses.replace(spec, predictions_per_row=predictions))
    special = masker(spec)
    for seed in range(3):
        key = jax.random.key(seed)
        jax.tree.map(np.testing.assert_array_equal, special(key, ids, mask), general(key, ids, mask))


def test_equal_random_numbers_do_not_add_predictions():
    spec = MaskingSpec(mask_id=4, special_ids=(0, 2, 3), replacement_ids=np.arange(5, 9), max_predictions=3)
    order = jnp.full((1, 20), 0xFFFFFFFF, jnp.uint32).at[0, 9].set(1)
    candidate = (jnp.arange(20) > 4)[None]
    chosen = _choose_tokens(order, candidate, jnp.array([20]), spec)
    assert np.flatnonzero(chosen[0]).tolist() == [5, 6, 9]
