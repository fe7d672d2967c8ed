"""The GELUs with backward passes of their own against jax's, in value and slope."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.model.kernels.bias_gelu import bias_gelu
from bertjax.model.kernels.choice import dense_gated
from bertjax.model.kernels.gated_gelu import gated_gelu
from bertjax.model.kernels.gelu import gated, gelu_erf, gelu_tanh
from bertjax.model.layers import Dense
from bertjax.model.mesh import rows_on

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with the extras test and cuda"
)


@pytest.mark.parametrize(("gelu", "approximate"), [(gelu_tanh, True), (gelu_erf, False)])
def test_recomputing_gelu_equals_jax_in_value_and_slope(gelu, approximate):
    x = jnp.linspace(-6, 6, 101)

    def plain(x):
        return jax.nn.gelu(x, approximate=approximate)

    (value, slope), (want, want_slope) = (jax.jit(jax.vmap(jax.value_and_grad(f)))(x) for f in (gelu, plain))
    np.testing.assert_allclose(value, want, atol=1e-6)
    np.testing.assert_allclose(slope, want_slope, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "plain"), [(gelu_erf, functools.partial(jax.nn.gelu, approximate=False)), (jax.nn.silu, jax.nn.silu)]
)
def test_gated_activation_equals_the_plain_expression_and_keeps_one_array(function, plain):
    u = 3 * jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)), jnp.float32)

    def both(f):
        return jax.jit(lambda u: (f(u), jax.grad(lambda u: jnp.sum(jnp.sin(f(u))))(u)))(u)

    for a, b in zip(both(gated(function)), both(lambda u: plain(u[..., :8]) * u[..., 8:]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    kept = jax.eval_shape(lambda u: jax.vjp(gated(function), u)[1], u)
    assert [x.shape for x in jax.tree.leaves(kept)] == [u.shape]


@pytest.mark.parametrize(("tanh", "function"), [(True, gelu_tanh), (False, gelu_erf)])
def test_the_gated_kernel_equals_the_plain_function_in_value_and_gradient(tanh, function):
    u, g = (jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, n)), jnp.float32) for n in (96, 48))
    (got, pull), (want, plain) = (jax.vjp(f, u) for f in (lambda u: gated_gelu(u, tanh), gated(function)))
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(pull(g)[0], plain(g)[0], atol=3e-6)


def test_dense_gated_is_one_product_of_both_matrices():
    random = np.random.default_rng(0)
    dense, gate = (Dense(16, 8, None) for _ in range(2))
    for layer in (dense, gate):
        layer.kernel.set_value(jnp.asarray(random.normal(size=(16, 8)), jnp.float32))
        layer.bias.set_value(jnp.asarray(random.normal(size=8), jnp.float32))
    x = jnp.asarray(random.normal(size=(2, 3, 16)), jnp.float32)
    got = dense_gated(gated(gelu_erf), dense, gate, x)
    np.testing.assert_allclose(got, jax.nn.gelu(dense(x), approximate=False) * gate(x), atol=1e-5)


def gradients(function, h, bias, g):
    out, pull = jax.vjp(function, h, bias)
    return (out, *pull(g))


def inputs(batch=2):
    random = np.random.default_rng(0)
    h, bias, g = (
        jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((batch, 24, 128), (128,), (batch, 24, 128))
    )
    return 3 * h, bias, g


def plain_bias_gelu(h, bias):
    return jax.nn.gelu(h + bias, approximate=True)


@jax.jit
def plain_gradients(h, bias, g):
    return gradients(plain_bias_gelu, h, bias, g)


# Far out the plain expression is x (1 + tanh(x)) with tanh near -1: a few ulp of 1 are left.
CLOSE = dict(rtol=1e-5, atol=3e-5)


@needs_triton
def test_bias_gelu_equals_the_plain_expression_in_value_and_gradients():
    got = jax.jit(lambda *a: gradients(lambda *x: bias_gelu(*x), *a))(*inputs())
    for a, b in zip(got, plain_gradients(*inputs()), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@needs_triton
def test_slope_of_the_fused_gelu_is_finite_far_out():
    h = jnp.array([-1e4, -60.0, 60.0, 1e4])[:, None, None] * jnp.ones((4, 1, 128))
    slope = jax.vjp(lambda h: bias_gelu(h, jnp.zeros(128)), h)[1](jnp.ones_like(h))
    np.testing.assert_array_equal(slope[0][:, 0, 0], [0, 0, 1, 1])


@needs_triton
@pytest.mark.parametrize("columns", [None, "tensor"])
def test_bias_gelu_runs_on_shards_of_rows_and_columns(columns):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), ("data", "fsdp", "tensor"))
    h, bias, g = inputs()
    place = NamedSharding(mesh, PartitionSpec("data", None, columns))

    def on_mesh(*x):
        with rows_on(mesh):
            return bias_gelu(*x)

    run = jax.jit(lambda *a: gradients(on_mesh, *a))
    got = run(jax.device_put(h, place), bias, jax.device_put(g, place))
    for a, b in zip(got, plain_gradients(h, bias, g), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_shapes_that_the_fused_gelu_does_not_take_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        bias_gelu(jnp.zeros((1, 2, 100)), jnp.zeros(100))


@pytest.mark.gpu
def test_compiled_bias_gelu_is_right():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    h, g = (jax.random.normal(key, (8, 512, 3072)).astype(jnp.bfloat16) for key in keys[:2])
    bias = jax.random.normal(keys[2], (3072,))
    got = jax.jit(lambda *a: gradients(bias_gelu, *a))(h, bias, g)
    wide = (h + bias.astype(h.dtype)).astype(jnp.float32), jnp.zeros(3072), g.astype(jnp.float32)
    for a, b in zip(got, gradients(plain_bias_gelu, *wide), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=1e-2 * scale)
