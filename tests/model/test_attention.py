"""The reference attention against plain numpy, padding, packing and the dispatch table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model.kernels import ATTENTION
from bertjax.model.kernels.attention_reference import attention
from bertjax.model.kernels.choice import attention_kernel

reference = jax.jit(attention)


def inputs(batch=2, length=6, heads=3, size=4):
    drawn = np.random.default_rng(0).normal(size=(3, batch, length, heads, size))
    return [jnp.asarray(x, jnp.float32) for x in drawn]


def numpy_attention(q, k, v, mask):
    """Independent: loops, float64, only the visible positions take part at all."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = np.flatnonzero(mask[b] == mask[b, i])
            for a in range(q.shape[2]):
                s = k[b, seen, a] @ q[b, i, a] / np.sqrt(q.shape[3])
                p = np.exp(s - s.max())
                out[b, i, a] = (p / p.sum()) @ v[b, seen, a]
    return out


def test_reference_equals_loops_in_float64_with_padding_and_packing():
    q, k, v = inputs()
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 2, 0]])
    got = reference(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(got, numpy_attention(q, k, v, mask), atol=1e-6)


def test_values_of_padding_and_of_other_pairs_do_not_matter():
    q, k, v = inputs()
    mask = jnp.array([[1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 0]])
    base = reference(q, k, v, mask)
    other = (mask != 1)[..., None, None]
    changed = reference(q, k + 100.0 * other, v - 7.0 * other, mask)
    np.testing.assert_array_equal(base[0, :3], changed[0, :3])
    np.testing.assert_array_equal(base[1, :2], changed[1, :2])


def test_all_padding_row_is_finite_in_value_and_gradient():
    q, k, v = inputs()
    mask = jnp.zeros((2, 6), jnp.int32)

    def total(q, k, v):
        return jnp.sum(attention(q, k, v, mask, 0.1, jax.random.key(0)) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


def test_dropout_preserves_the_expectation_and_repeats_for_the_same_key():
    q, k, v = inputs(1, 16, 2, 8)
    mask = jnp.ones((1, 16), jnp.int32)
    clean = reference(q, k, v, mask)
    keys = jax.random.split(jax.random.key(3), 4000)

    def attend(key):
        return attention(q, k, v, mask, 0.3, key)

    draws = jax.jit(jax.vmap(attend))(keys)
    error = np.asarray(draws.mean(0) - clean)
    assert np.abs(error / (draws.std(0) / np.sqrt(len(keys)))).max() < 5
    again = jax.jit(attend)
    np.testing.assert_array_equal(again(keys[0]), again(keys[0]))
    assert not np.allclose(draws[0], draws[1])


def test_half_precision_rounds_only_its_inputs_and_output():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(2, 64, 2, 16))
    mask = jnp.ones((2, 64), jnp.int32)
    exact = reference(*(x.astype(jnp.float32) for x in (q, k, v)), mask)
    got = reference(q, k, v, mask)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=2.0**-7)


def test_unknown_implementation_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="auto, " + ", ".join(ATTENTION)):
        attention_kernel("fast")
