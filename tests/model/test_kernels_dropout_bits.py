"""Dropout bits: pure functions of their indices, and indistinguishable from fair draws."""

import functools

import jax
import numpy as np
import pytest

from bertjax.model.kernels import dropout_bits as bits

RATE = 0.1


tile_keep_mask = jax.jit(bits.tile_keep_mask, static_argnums=(3, 4))
rows_keep_mask = jax.jit(bits.rows_keep_mask, static_argnums=(4, 5))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def keep_masks(key, rows, heads, length):
    return bits.tile_keep_mask(bits.stream_seeds(key, rows, heads), 0, 0, (length, length), RATE)


def _masks(key, rows=4, heads=3, length=128):
    return np.asarray(keep_masks(key, rows, heads, length))


def test_share_of_kept_elements_is_the_stated_probability():
    masks = np.concatenate([_masks(jax.random.key(s)).ravel() for s in range(8)])
    deviation = np.sqrt(RATE * (1 - RATE) / masks.size)
    assert abs(masks.mean() - bits.keep_probability(RATE)) < 4 * deviation


@pytest.mark.parametrize("shift", [(0, 1), (0, 8), (1, 0), (8, 0), (8, 8), (3, 5), (64, 0)])
def test_neighbours_in_a_mask_are_uncorrelated(shift):
    # (0,8), (8,0) and (8,8) share a hash, the others do not.
    m = _masks(jax.random.key(7), 16, 4).astype(np.float64) - bits.keep_probability(RATE)
    di, dj = shift
    a = m[..., : 128 - di, : 128 - dj]
    b = m[..., di:, dj:]
    correlation = (a * b).mean() / (RATE * (1 - RATE))
    assert abs(correlation) < 4 / np.sqrt(a.size)


def test_rows_heads_and_keys_are_uncorrelated():
    first = _masks(jax.random.key(1), 8, 8) - bits.keep_probability(RATE)
    second = _masks(jax.random.key(2), 8, 8) - bits.keep_probability(RATE)
    pairs = {"rows": (first[:-1], first[1:]), "heads": (first[:, :-1], first[:, 1:]), "keys": (first, second)}
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean() / (RATE * (1 - RATE))
        assert abs(correlation) < 4 / np.sqrt(a.size), name


def test_kept_counts_of_query_rows_scatter_like_a_binomial():
    counts = _masks(jax.random.key(3), 16, 12).sum(-1)
    expected = 128 * RATE * (1 - RATE)
    # Variance of the sample variance of n draws is about 2/n: n = 24,576.
    assert abs(counts.var() / expected - 1) < 4 * np.sqrt(2 / counts.size)


def test_a_tile_holds_the_bits_of_its_place_in_the_whole_mask():
    seeds = bits.stream_seeds(jax.random.key(0), 1, 1)
    whole = tile_keep_mask(seeds, 0, 0, (96, 96), RATE)
    tile = tile_keep_mask(seeds, 32, 48, (16, 32), RATE)
    np.testing.assert_array_equal(tile, whole[..., 32:48, 48:80])


def test_the_form_for_tpus_has_the_same_bits():
    seeds = bits.stream_seeds(jax.random.key(5), 1, 1)[0, 0]
    whole = tile_keep_mask(seeds, 0, 0, (64, 48), 0.3)
    for start, queries in ((0, 64), (16, 32), (48, 16)):
        part = rows_keep_mask(*seeds, start, 0, (queries, 48), 0.3)
        np.testing.assert_array_equal(part, whole[start : start + queries])


def test_bits_of_a_row_do_not_depend_on_the_batch_around_it():
    small = _masks(jax.random.key(5), 2, 2, 32)
    large = _masks(jax.random.key(5), 6, 4, 64)
    np.testing.assert_array_equal(small, large[:2, :2, :32, :32])


def test_typed_and_raw_keys_of_either_generator_give_words():
    typed, raw = jax.random.key(3), jax.random.PRNGKey(3)
    np.testing.assert_array_equal(bits.key_words(typed), bits.key_words(raw))
    for key in (typed, jax.random.key(3, impl="rbg")):
        other = jax.random.fold_in(key, 1)
        assert not np.array_equal(bits.key_words(key), bits.key_words(other))


def test_hidden_words_are_uniform_and_uncorrelated():
    words = np.asarray(bits.hidden_words(jax.random.key(11), (8, 64, 256))).astype(np.float64)
    assert abs(words.mean() / 32767.5 - 1) < 4 / np.sqrt(12 * words.size) * 2
    keep = (words >= bits.threshold(RATE)) - bits.keep_probability(RATE)
    for a, b in (
        (keep[..., :-1], keep[..., 1:]),
        (keep[..., :-4], keep[..., 4:]),
        (keep[:, :-1], keep[:, 1:]),
        (keep[:-1], keep[1:]),
    ):
        assert abs((a * b).mean() / (RATE * (1 - RATE))) < 4 / np.sqrt(a.size)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(ValueError, match="dropout rate"):
        bits.threshold(rate)
