"""Adding a bias: the value is the plain one, the gradient that of a sum in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bertjax.model.layers import Dense, add_bias, zeros


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_value_and_gradients_equal_the_plain_expression(dtype):
    x = jax.random.normal(jax.random.key(0), (4, 5, 8), dtype)
    bias = jax.random.normal(jax.random.key(1), (8,))
    cotangent = jax.random.normal(jax.random.key(2), x.shape, dtype)
    value, back = jax.vjp(add_bias, x, bias)
    np.testing.assert_array_equal(value, x + bias.astype(dtype))
    for_x, for_bias = back(cotangent)
    np.testing.assert_array_equal(for_x, cotangent)
    assert for_bias.dtype == jnp.float32
    np.testing.assert_allclose(for_bias, np.float32(cotangent).sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_layers_bias_loses_nothing_over_many_tokens():
    # 8,192 equal terms: a sum in bfloat16 stands still at 256 of them.
    x = jnp.ones((64, 128, 4), jnp.bfloat16)
    params = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
    graph, _ = nnx.split(Dense(4, 4, zeros))
    total = jax.grad(lambda p: jnp.sum(nnx.merge(graph, p)(x).astype(jnp.float32)))(params)["bias"]
    np.testing.assert_array_equal(total, 8192.0)
