"""Products in 8-bit floats against float32 and against numpy's own 8-bit types.

Off a GPU the kernels run in Triton's interpreter, which rounds to 8 bits worse than a card does (125.5 becomes 64):
numbers that are 8-bit floats already are compared exactly, others by the size of the error.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from bertjax.config import ExecutionSettings
from bertjax.model import heads
from bertjax.model.kernels import choice, float8
from bertjax.model.kernels.gelu import tanh_form
from bertjax.model.mesh import rows_on
from bertjax.model.presets import BertConfig, Execution

needs_triton = pytest.mark.usefixtures("triton")
BITS = {float8.WEIGHTS: ml_dtypes.float8_e4m3fn, float8.GRADIENTS: ml_dtypes.float8_e5m2}


@pytest.fixture
def triton():
    pytest.importorskip("triton", reason="needs triton, which comes with the extras test and cuda")


def arrays(*shapes, scale=1.0, dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    return [jnp.asarray(scale * random.normal(size=shape), dtype) for shape in shapes]


def error(got, want):
    """Relative, of the whole array."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("dtype", "most"), [(float8.WEIGHTS, 448.0), (float8.GRADIENTS, 57344.0)])
def test_the_scale_is_the_power_of_two_that_brings_the_largest_element_just_below_the_limit(dtype, most):
    for largest in (most, most + 1, most / 3, 1e-7, 3e30):
        scale = float(float8.scale_of(jnp.float32(largest), dtype))
        assert np.frexp(scale)[0] == 0.5
        assert most / 2 < scale * largest <= most
    assert np.isfinite(float8.scale_of(jnp.float32(0), dtype))
    assert np.isnan(float8.scale_of(jnp.float32(np.inf), dtype)) and np.isnan(
        float8.scale_of(jnp.float32(np.nan), dtype)
    )


@pytest.mark.parametrize("dtype", BITS)
def test_xla_rounds_to_8_bits_as_numpy(dtype):
    (x,) = arrays((16, 32), scale=3e-5)
    got = float8.quantised(x, dtype)
    want = (np.asarray(x, np.float32) * float(got.scale)).astype(BITS[dtype])
    np.testing.assert_array_equal(np.asarray(got.rows, np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(got.columns, np.float32), want.astype(np.float32).T)


@needs_triton
@pytest.mark.parametrize("dtype", BITS)
def test_the_kernel_writes_rows_and_columns_as_xla_does(dtype):
    (x,) = arrays((2, 64, 48))
    x = x.astype(dtype).astype(x.dtype)  # so that nothing is rounded
    got, want = float8.quantised_on_gpu(x, dtype, None), float8.quantised(x.reshape(128, 48), dtype)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_product_and_its_gradients_are_those_of_float32_within_the_rounding_of_8_bits():
    x, kernel, g = arrays((2, 16, 96), (96, 128), (2, 16, 128))

    def both(product):
        y, pull = jax.vjp(product, kernel.astype(jnp.float32), x)
        return y, *pull(g)

    got = jax.jit(lambda: both(functools.partial(float8.product, fused=False)))()
    want = jax.jit(lambda: both(lambda kernel, x: (x.astype(jnp.float32) @ kernel).astype(x.dtype)))()
    # Of e4m3 an element is 2.6 % off on average, of e5m2 5.2 %, and two are multiplied.
    for a, b, bound in zip(got, want, (0.045, 0.075, 0.075), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert 0.01 < error(a, b) < bound


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_makes_the_product_nan(value):
    x, kernel = arrays((1, 4, 32), (32, 16))
    assert np.isnan(float8.product(kernel, x.at[0, 1, 2].set(value), fused=False)).all()


def feed_forward(x, first, bias, second, g, fused):
    if fused:
        function = functools.partial(float8.dense_gelu_dense, None, True)
    else:
        dtype = x.dtype
        product = lambda x, kernel: (x.astype(jnp.float32) @ kernel).astype(dtype)  # noqa: E731
        function = lambda first, bias, second, x: product(tanh_form(product(x, first) + bias.astype(dtype)), second)  # noqa: E731
    y, pull = jax.vjp(function, first, bias, second, x)
    return y, *pull(g)


@needs_triton
def test_gelu_between_two_products_is_as_in_float32_within_the_rounding_of_8_bits():
    x, g = arrays((2, 64, 32), (2, 64, 32))
    first, bias, second = arrays((32, 128), (128,), (128, 32), scale=0.3, dtype=jnp.float32)
    run = jax.jit(feed_forward, static_argnames="fused")
    got, want = (run(x, first, bias, second, g, fused=fused) for fused in (True, False))
    bound = 0.11 if jax.default_backend() == "gpu" else 0.3
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert error(a, b) < bound


TINY = BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
    max_position_embeddings=32,
)  # fmt: skip


def loss_and_gradients(execution, mesh=None, rows=8):
    network = heads.BertForMaskedLM(TINY, execution)
    params = jax.jit(functools.partial(heads.init_params, network))(jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(1).integers(5, 64, (rows, 16)))

    def loss(params):
        logits = network.apply({"params": params}, ids, jnp.ones_like(ids)).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1))

    run = jax.jit(jax.value_and_grad(loss))
    if mesh is None:
        return run(params)
    with rows_on(mesh):
        return run(params)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def test_a_network_in_8_bits_has_the_loss_and_the_gradients_of_bfloat16():
    (loss, gradients), (want, plain) = (loss_and_gradients(Execution(dtype=dtype)) for dtype in ("float8", "bfloat16"))
    assert loss != want and abs(loss - want) < 0.01 * want
    a, b = flat(gradients), flat(plain)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_layers_are_scanned_as_they_are_one_by_one():
    scanned, alone = (loss_and_gradients(Execution(dtype="float8", layers=layers)) for layers in ("scan", "unrolled"))
    np.testing.assert_allclose(scanned[0], alone[0], rtol=1e-3)
    assert error(flat(scanned[1]), flat(alone[1])) < 0.02


def test_devices_that_share_rows_and_matrices_compute_the_same():
    alone = loss_and_gradients(Execution(dtype="float8"))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("data", "fsdp", "tensor"))
    together = loss_and_gradients(Execution(dtype="float8"), mesh)
    np.testing.assert_allclose(together[0], alone[0], rtol=2e-3)
    assert error(flat(together[1]), flat(alone[1])) < 0.05


@needs_triton
def test_kernels_on_each_devices_rows_write_what_one_device_writes():
    (x,) = arrays((4, 8, 32))
    x = x.astype(float8.WEIGHTS).astype(x.dtype)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("data", "fsdp", "tensor"))
    got = jax.jit(lambda x: float8.quantised_on_gpu(x, float8.WEIGHTS, mesh))(x)
    for a, b in zip(got, float8.quantised_on_gpu(x, float8.WEIGHTS, None), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_float8_is_refused_where_no_product_of_8_bits_runs(monkeypatch):
    settings = ExecutionSettings(dtype="float8")
    with pytest.raises(ValueError, match="Ada"):
        choice.multiply(Execution.of(settings, "tpu"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(choice, "compute_capability", lambda: 8.0)
    with pytest.raises(ValueError, match="bfloat16"):
        choice.multiply(Execution.of(settings, "gpu"))


@pytest.mark.gpu
def test_on_a_gpu_8_bits_round_as_in_xla_and_two_runs_are_bit_equal():
    for dtype in BITS:
        (x,) = arrays((4, 64, 768), scale=1e-3)
        got, want = float8.quantised_on_gpu(x, dtype, None), float8.quantised(x.reshape(256, 768), dtype)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    x, g = arrays((4, 128, 768), (4, 128, 768))
    weights = arrays((768, 3072), (3072,), (3072, 768), scale=0.02, dtype=jnp.float32)
    run = jax.jit(functools.partial(feed_forward, fused=True))
    one, two = run(x, *weights, g), run(x, *weights, g)
    for a, b, c in zip(one, two, feed_forward(x, *weights, g, fused=False), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert error(a, c) < 0.11
