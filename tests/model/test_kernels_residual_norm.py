"""residual_layer_norm against the plain expression with the same dropout bits, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.model.kernels.dropout_bits import hidden_words, keep_probability, key_words, threshold
from bertjax.model.kernels.residual_norm import residual_layer_norm
from bertjax.model.mesh import rows_on

pytest.importorskip("triton", reason="needs triton, which comes with the extras test and cuda")

RATE, EPSILON = 0.1, 1e-12


def reference(h, h_bias, residual, scale, bias, key, rate=RATE, before=False):
    h = h + h_bias
    if rate:
        h = jnp.where(hidden_words(key, h.shape) >= threshold(rate), h / keep_probability(rate), 0.0)
    z = residual + h
    centred = z - z.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * scale + bias
    return z if before else y, y


@pytest.mark.parametrize(("rate", "before"), [(RATE, False), (RATE, True), (0.0, True)])
def test_value_and_all_gradients_equal_the_plain_expression(rate, before):
    key = jax.random.key(0)
    # 48 = 32 + 16: two chunks. Of 24 tokens backward makes three partial sums.
    random = np.random.default_rng(0)
    h, residual, g1, g2 = jnp.asarray(random.normal(size=(4, 1, 24, 48)), jnp.float32)
    scale, bias, h_bias = jnp.asarray(random.normal(size=(3, 48)), jnp.float32)

    def fused(*args):
        return residual_layer_norm(*args, key_words(key), rate, EPSILON, before)

    def both(function):
        def loss(*args):
            first, second = function(*args)
            return jnp.sum(first * g1) + jnp.sum(jnp.sin(second) * g2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))

    got = both(fused)(h, h_bias, residual, scale, bias)
    want = both(lambda *a: reference(*a, key, rate, before))(h, h_bias, residual, scale, bias)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_a_norm_without_biases_has_the_gradients_of_the_plain_expression():
    random = np.random.default_rng(0)
    h, residual, g1, g2 = jnp.asarray(random.normal(size=(4, 1, 24, 48)), jnp.float32)
    scale = jnp.asarray(random.normal(size=48), jnp.float32)

    def both(function):
        out, pull = jax.vjp(function, h, residual, scale)
        return (*out, *pull((g1, g2)))

    def fused(h, residual, scale):
        return residual_layer_norm(h, None, residual, scale, None, before=True)

    got = jax.jit(lambda: both(fused))()
    want = jax.jit(lambda: both(lambda h, r, s: reference(h, 0, r, s, 0, None, 0.0, True)))()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_sharded_rows_draw_the_bits_of_the_global_batch():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    key = jax.random.key(0)
    h, residual = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 4, 16)), jnp.float32)
    scale, bias, h_bias = jnp.full(16, 1.5), jnp.full(16, 0.1), jnp.linspace(-1, 1, 16)

    def gradients(h, residual):
        def norm(*a):
            with rows_on(mesh):
                return residual_layer_norm(*a, words=key_words(key), dropout_rate=RATE)

        out, pull = jax.vjp(norm, h, h_bias, residual, scale, bias)
        return out[0], pull((jnp.sin(h), jnp.cos(h)))

    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    split = jax.jit(gradients)(jax.device_put(h, rows), jax.device_put(residual, rows))

    @jax.jit
    def plain(h, residual):
        out, pull = jax.vjp(lambda *a: reference(*a, key), h, h_bias, residual, scale, bias)
        return out[0], pull((jnp.sin(h), jnp.cos(h)))

    want = plain(h, residual)
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_inputs_that_do_not_fit_are_refused():
    h, ones = jnp.zeros((1, 2, 16)), jnp.ones(16)
    with pytest.raises(ValueError, match="needs words"):
        residual_layer_norm(h, ones, h, ones, ones, dropout_rate=0.1)
    with pytest.raises(ValueError, match="multiple of 16"):
        residual_layer_norm(h[..., :8], ones[:8], h[..., :8], ones[:8], ones[:8])
