"""The fused attention kernels against a plain float32 attention with the same dropout bits.

On the CPU Triton's interpreter runs the kernels; `-m gpu` runs the compiled ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.model.kernels.attention_triton import Tiling, flash_attention, tile_bounds
from bertjax.model.kernels.dropout_bits import keep_probability, stream_seeds, tile_keep_mask
from bertjax.model.mesh import rows_on

pytest.importorskip("triton", reason="needs triton, which comes with the extras test and cuda")

RATE = 0.1
AXES = ("data", "fsdp", "tensor")
SMALL = {"block_q": 16, "block_k": 16, "backward_block": 16, "backward_over": 16}
WHOLE = Tiling(**SMALL)
BOUNDED = Tiling(**SMALL, bounded=True)
TWICE = Tiling(**SMALL, dq_block=32)


def reference(q, k, v, ids, seeds, rate):
    scores = jnp.einsum("bqad,bkad->baqk", q, k) / np.sqrt(q.shape[-1])
    visible = ids[:, None, :, None] == ids[:, None, None, :]
    p = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    if rate:
        keep = tile_keep_mask(seeds, 0, 0, (q.shape[1],) * 2, rate)
        p = jnp.where(keep, p / keep_probability(rate), 0.0)
    return jnp.einsum("baqk,bkad->bqad", p, v)


def inputs(batch, length, heads, head, dtype=jnp.float32):
    drawn = np.random.default_rng(0).normal(size=(4, batch, length, heads, head))
    q, k, v, g = (jnp.asarray(x, dtype) for x in drawn)
    half, quarter = length // 2, length // 4
    row = jnp.array([1] * half + [2] * quarter + [0] * (length - half - quarter))
    return q, k, v, g, jnp.tile(row, (batch, 1)), stream_seeds(jax.random.key(0), batch, heads)


def gradients(attend, q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return (out, *pull(g.astype(out.dtype)))


@jax.jit
def reference_gradients(q, k, v, g, ids, seeds):
    return gradients(lambda q, k, v: reference(q, k, v, ids, seeds, RATE), q, k, v, g)


def check_against_reference(tiling, atol, q, k, v, g, ids, seeds):
    def fused(q, k, v):
        return flash_attention((q, k, v), ids, seeds, RATE, tiling)

    got = jax.jit(lambda *a: gradients(fused, *a))(q, k, v, g)
    want = reference_gradients(q, k, v, g, ids, seeds)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize(
    ("length", "tiling"),
    [
        (32, WHOLE),
        pytest.param(32, TWICE, marks=pytest.mark.slow),
        pytest.param(32, BOUNDED, marks=pytest.mark.slow),
        pytest.param(40, None, marks=pytest.mark.slow),
    ],
)
def test_value_and_gradients_equal_the_reference_with_dropout(length, tiling):
    check_against_reference(tiling, 2e-6, *inputs(1, length, 1, 16))


@pytest.mark.parametrize(
    ("length", "tiling"),
    [
        (32, WHOLE),
        pytest.param(32, TWICE, marks=pytest.mark.slow),
        pytest.param(32, BOUNDED, marks=pytest.mark.slow),
        pytest.param(40, None, marks=pytest.mark.slow),
    ],
)
def test_joined_product_and_its_bias_have_the_gradients_of_the_reference(length, tiling):
    *qkv, g, ids, seeds = inputs(2, length, 2, 16)
    product = jnp.stack(qkv, axis=2).reshape(2, length, -1)
    bias = jax.random.normal(jax.random.key(1), (3, 2, 16))

    def joined(product, bias):
        return flash_attention((product,), ids, seeds, RATE, tiling, bias=bias)

    def plain(product, bias):
        q, k, v = jnp.moveaxis(product.reshape(2, length, 3, 2, 16) + bias, 2, 0)
        return reference(q, k, v, ids, seeds, RATE)

    def both(attend, product, bias):
        out, pull = jax.vjp(attend, product, bias)
        return (out, *pull(g))

    got, want = (jax.jit(functools.partial(both, attend))(product, bias) for attend in (joined, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)  # sums over 128 tokens


def test_forward_equals_the_reference_without_dropout_and_pads_odd_lengths():
    q, k, v, _, ids, _ = inputs(2, 20, 1, 16)
    got = jax.jit(flash_attention)((q, k, v), ids)
    want = jax.jit(lambda q, k, v: reference(q, k, v, ids, None, 0.0))(q, k, v)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_bfloat16_is_right_without_a_gpu():
    q, k, v, _, ids, _ = inputs(1, 16, 1, 16, jnp.bfloat16)
    got = jax.jit(flash_attention)((q, k, v), ids)
    want = reference(*(x.astype(jnp.float32) for x in (q, k, v)), ids, None, 0.0)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def test_sharded_rows_draw_the_bits_of_the_global_batch():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    q, k, v, _, ids, seeds = inputs(2, 16, 2, 16)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), AXES)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))

    @jax.jit
    def run(q, k, v, ids):
        with rows_on(mesh):
            return flash_attention((q, k, v), ids, seeds, RATE)

    whole = jax.jit(lambda q, k, v: reference(q, k, v, ids, seeds, RATE))(q, k, v)
    split = run(*(jax.device_put(x, rows) for x in (q, k, v, ids)))
    assert split.sharding.is_equivalent_to(rows, 4)
    np.testing.assert_allclose(split, whole, atol=2e-6)


def test_sharded_rows_of_a_joined_product_have_the_gradients_of_the_whole():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    *qkv, g, ids, seeds = inputs(2, 16, 2, 16)
    product = jnp.stack(qkv, axis=2).reshape(2, 16, -1)
    bias = jax.random.normal(jax.random.key(1), (3, 2, 16))

    def run(mesh, product, ids, g):
        def attend(product, bias):  # the backward pass is traced after rows_on ended, as in a training step
            with rows_on(mesh):
                return flash_attention((product,), ids, seeds, RATE, bias=bias)

        out, pull = jax.vjp(attend, product, bias)
        return (out, *pull(g))

    two, one = (Mesh(np.array(jax.devices()[:n]).reshape(n, 1, 1), AXES) for n in (2, 1))
    rows = NamedSharding(two, PartitionSpec(("data", "fsdp")))
    run = jax.jit(run, static_argnums=0)
    split = run(two, *(jax.device_put(x, rows) for x in (product, ids, g)))
    for a, b in zip(split, run(one, product, ids, g), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("data", None), ("data", "tensor")])
def test_sharded_gradients_equal_the_reference(axes):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    q, k, v, g, ids, seeds = inputs(2, 16, 2, 16)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), AXES)
    place = NamedSharding(mesh, PartitionSpec(axes[0], None, axes[1]))

    def fused(q, k, v):
        with rows_on(mesh):
            return flash_attention((q, k, v), ids, seeds, RATE, TWICE)

    run = jax.jit(lambda *a: gradients(fused, *a))
    got = run(*(jax.device_put(x, place) for x in (q, k, v, g)))
    want = reference_gradients(q, k, v, g, ids, seeds)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_shapes_that_the_kernels_do_not_take_are_refused():
    q = jnp.zeros((1, 16, 1, 24))
    with pytest.raises(ValueError, match="power of two"):
        flash_attention((q, q, q), jnp.ones((1, 16), jnp.int32))
    q = jnp.zeros((1, 16, 1, 16))
    with pytest.raises(ValueError, match="needs seeds"):
        flash_attention((q, q, q), jnp.ones((1, 16), jnp.int32), dropout_rate=0.1)
    with pytest.raises(ValueError, match="share one shape"):
        flash_attention((q, q[:, :8], q), jnp.ones((1, 16), jnp.int32))


@pytest.mark.parametrize("tiling", [BOUNDED, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_rows_of_any_segments_equal_the_reference(tiling):
    """Full, padded, packed, all padding, and ids that no batch of ours has: holes and disorder."""
    q, k, v, g, _, seeds = inputs(6, 48, 1, 16)
    rows = [
        [1] * 48,
        [1] * 37 + [0] * 11,
        [1] * 16 + [2] * 20 + [3] * 12,
        [0] * 48,
        [1] * 16 + [0] * 16 + [1] * 16,
        [3] * 20 + [1] * 14 + [2] * 14,
    ]
    check_against_reference(tiling, 5e-6, q, k, v, g, jnp.array(rows), seeds)


def test_bounds_of_tiles_leave_out_nothing_and_compare_wherever_ids_differ():
    random = np.random.default_rng(0)
    rows = random.integers(0, 3, (60, 8)).repeat(4, axis=1)  # runs of 4, in any order
    rows[30:] = random.integers(0, 2, (30, 1))
    rows[45:, 20:] = 0
    find = jax.jit(tile_bounds, static_argnums=(1, 2))
    for block, over in ((4, 4), (8, 4), (4, 8)):
        bounds = np.asarray(find(jnp.asarray(rows), block, over))
        for row, of_row in zip(rows, bounds, strict=True):
            others = row.reshape(-1, over)
            for mine, (first, whole, mixed, last) in zip(row.reshape(-1, block), of_row, strict=True):
                assert 0 <= first <= whole <= mixed <= last <= len(others)
                touching = [i for i, other in enumerate(others) if set(mine) & set(other)]
                assert first <= min(touching) and max(touching) < last
                for other in others[whole:mixed]:
                    assert len({*mine, *other}) == 1
    full = np.asarray(find(jnp.ones((1, 32), jnp.int32), 8, 8))
    np.testing.assert_array_equal(full, [[[0, 0, 4, 4]] * 4])  # nothing is compared


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "several"), [(128, False), (128, True), (384, False), (512, False), (1024, False)])
def test_compiled_kernels_are_right_and_bit_identical_from_run_to_run(length, several):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    q, k, v, g, ids, seeds = inputs(16, length, 12, 64, jnp.bfloat16)
    tiling = Tiling.for_length(length, several)
    run = jax.jit(lambda *a: gradients(lambda q, k, v: flash_attention((q, k, v), ids, seeds, RATE, tiling), *a))
    got = run(q, k, v, g)
    wide = (x.astype(jnp.float32) for x in (q, k, v, g))
    with jax.default_matmul_precision("highest"):
        want = gradients(lambda q, k, v: reference(q, k, v, ids, seeds, RATE), *wide)
    for a, b in zip(got, want, strict=True):
        # bfloat16 operands: 2^-8 relative, a few roundings deep.
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < 8e-3
    for _ in range(20):
        for a, b in zip(got, run(q, k, v, g), strict=True):
            np.testing.assert_array_equal(a, b)

    product = jnp.stack([q, k, v], axis=2).reshape(16, length, -1)
    bias = jnp.zeros((3, 12, 64))

    @jax.jit
    def joined(product, bias, g):
        attend = functools.partial(flash_attention, attention_mask=ids, seeds=seeds, dropout_rate=RATE, tiling=tiling)
        out, pull = jax.vjp(lambda product, bias: attend((product,), bias=bias), product, bias)
        return out, *pull(g)

    out, dproduct, dbias = joined(product, bias, g)
    for _ in range(20):
        for a, b in zip((out, dproduct, dbias), joined(product, bias, g), strict=True):
            np.testing.assert_array_equal(a, b)
    dproduct = dproduct.reshape(16, length, 3, 12, 64)
    for a, b in zip((out, *jnp.moveaxis(dproduct, 2, 0)), got, strict=True):
        # XLA sums delta, in each program in an order of its own: now and then a rounding differs.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 1e-4
    summed = dproduct.astype(jnp.float32).sum((0, 1))
    assert jnp.linalg.norm(dbias - summed) / jnp.linalg.norm(summed) < 8e-3
