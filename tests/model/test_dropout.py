"""Dropout: shares, scale, independence of sites and shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bertjax.model.dropout import dropout, random_words, site_keys

GENERATORS = ("threefry", "hash")


@pytest.mark.parametrize("generator", GENERATORS)
def test_share_and_scale(generator):
    n = 400_000
    out = np.asarray(dropout(jnp.ones((400, 1000)), 0.1, jax.random.key(0), generator))
    kept = (out != 0).sum()
    keep = 1 - 6554 / 65536  # 0.1 is not a multiple of 1 / 65536
    assert abs(kept - n * keep) < 4 * np.sqrt(n * keep * (1 - keep))
    # Kept values carry the exact inverse of the true keep probability, not of the asked one.
    assert np.unique(out[out != 0]) == np.float32(1 / keep)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_what_is_kept_is_as_large_on_average_in_every_type(dtype):
    x = jax.random.uniform(jax.random.key(1), (400, 1000), jnp.float32, 1.0, 2.0).astype(dtype)
    out = np.float64(dropout(x, 0.1, jax.random.key(0), "hash"))
    ratio = out[out != 0].mean() / np.float64(x)[out != 0].mean()
    # Each value is rounded once, by at most 2^-8 of it in bfloat16, as often up as down.
    assert abs(ratio * (1 - 6554 / 65536) - 1) < 1e-4


@pytest.mark.parametrize("generator", GENERATORS)
def test_no_correlation_between_neighbours_rows_keys_and_halves(generator):
    shape = (512, 512)
    first = np.asarray(random_words(jax.random.key(1), shape, generator)) < 32768
    second = np.asarray(random_words(jax.random.key(2), shape, generator)) < 32768
    pairs = {
        "next column": (first[:, 1:], first[:, :-1]),
        "next row": (first[1:], first[:-1]),
        "half a row away": (first[:, :256], first[:, 256:]),
        "half the rows away": (first[:256], first[256:]),
        "other key": (first, second),
        "other key, shifted": (first[:, 1:], second[:, :-1]),
    }
    for name, (a, b) in pairs.items():
        agree = (a == b).mean()
        assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(a.size), name


@pytest.mark.parametrize("generator", GENERATORS)
def test_words_are_uniform_over_all_16_bits(generator):
    words = np.asarray(random_words(jax.random.key(5), (1024, 1000), generator))
    assert words.min() >= 0 and words.max() < 65536
    counts = np.bincount(words.ravel() >> 8, minlength=256)
    expected = words.size / 256
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 255 + 4 * np.sqrt(2 * 255)
    bits = (words.ravel()[:, None] >> np.arange(16)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 4 * 0.5 / np.sqrt(words.size)


def test_site_keys_equal_fold_in_and_differ():
    key = jax.random.key(7)
    keys = site_keys(key, 5)
    for site in range(5):
        expected = jax.random.fold_in(key, site)
        assert (jax.random.key_data(keys[site]) == jax.random.key_data(expected)).all()
    assert len({tuple(np.asarray(jax.random.key_data(k))) for k in keys}) == 5


@pytest.mark.parametrize("generator", GENERATORS)
def test_mask_of_a_sharded_batch_equals_the_one_device_mask_and_shards_differ(generator):
    x = jnp.ones((8, 6))
    key = jax.random.key(0)
    alone = dropout(x, 0.1, key, generator)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    function = jax.jit(lambda v: dropout(v, 0.5, key, generator), in_shardings=sharding, out_shardings=sharding)
    sharded = function(jax.device_put(x, sharding))
    np.testing.assert_array_equal(sharded, dropout(x, 0.5, key, generator))
    shards = np.asarray(sharded).reshape(4, 12)
    assert len({tuple(s) for s in shards}) == 4
    assert not np.array_equal(alone, dropout(x, 0.1, jax.random.key(1), generator))


def test_identity_without_a_key_or_rate():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_rate_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        dropout(jnp.ones(3), 1.0, jax.random.key(0))
