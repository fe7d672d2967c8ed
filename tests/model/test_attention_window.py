"""Attention with a window: every path against loops over what each position sees, with the same dropout bits."""

import dataclasses
import functools
import importlib.util

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model.kernels import attention_reference, attention_triton
from bertjax.model.kernels.attention_pallas_tpu import attention as tpu_attention
from bertjax.model.kernels.attention_triton import Tiling, flash_attention, tile_bounds
from bertjax.model.kernels.choice import joined_attention
from bertjax.model.kernels.dropout_bits import keep_probability, stream_seeds, tile_keep_mask
from bertjax.model.kernels.rotary import turned

RATE = 0.2
KEY = jax.random.key(3)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with the extras test and cuda"
)
SMALL = Tiling(block_q=16, block_k=16, backward_block=16, backward_over=16, bounded=True)


def inputs(length, heads=1, head=16):
    """q, k, v and the context's gradient of four rows: full, padded, packed, and segments in disorder."""
    drawn = np.random.default_rng(0).normal(size=(4, 4, length, heads, head))
    third, rest = length // 3, length - 2 * (length // 3)
    rows = [
        [1] * length,
        [1] * (2 * third) + [0] * rest,
        [1] * third + [2] * third + [3] * rest,
        [2] * third + [1] * third + [2] * rest,
    ]
    return [jnp.asarray(x, jnp.float32) for x in drawn], jnp.array(rows, jnp.int32)


def plain(q, k, v, ids, window, rate=0.0):
    """The whole matrix of scores; what may be seen is found by loops."""
    length = q.shape[1]
    near = np.zeros((length, length), bool)
    for i in range(length):
        near[i, max(0, i - window) : i + window + 1] = True
    visible = (ids[:, :, None] == ids[:, None, :]) & near
    scores = jnp.einsum("bqad,bkad->baqk", q, k) / np.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
    if rate:
        keep = tile_keep_mask(stream_seeds(KEY, q.shape[0], q.shape[2]), 0, 0, (length, length), rate)
        p = jnp.where(keep, p / keep_probability(rate), 0.0)
    return jnp.einsum("baqk,bkad->bqad", p, v)


def check(attend, want, arrays, atol=5e-6):
    def run(function, q, k, v, g):
        out, pull = jax.vjp(function, q, k, v)
        return (out, *pull(g))

    for a, b in zip(*(jax.jit(functools.partial(run, f))(*arrays) for f in (attend, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def fused(q, k, v, ids, window, rate, tiling=SMALL):
    seeds = stream_seeds(KEY, q.shape[0], q.shape[2]) if rate else None
    return flash_attention((q, k, v), ids, seeds, rate, tiling, window)


def joined(q, k, v, ids, window, rate):
    batch, length, heads, head = q.shape
    seeds = stream_seeds(KEY, batch, heads) if rate else None
    product, bias = jnp.stack([q, k, v], axis=2).reshape(batch, length, -1), jnp.zeros((3, heads, head))
    return flash_attention((product,), ids, seeds, rate, SMALL, window, bias)


def with_key(attention):
    def attend(q, k, v, ids, window, rate):
        return attention(q, k, v, ids, rate, KEY if rate else None, window=window)

    return attend


def split_product(q, k, v, ids, window, rate):
    product, bias = jnp.stack([q, k, v], axis=2).reshape(*q.shape[:2], -1), jnp.zeros((3, *q.shape[2:]))
    return joined_attention(attention_reference, product, bias, ids, rate, KEY if rate else None, False, window=window)


REFERENCE = with_key(attention_reference.attention)


@pytest.mark.parametrize(
    ("attend", "length", "window"),  # lengths are not multiples of a tile
    [
        *((REFERENCE, 83, window) for window in (0, 1, 5, 16, 40, 100)),
        (split_product, 83, 5),
        pytest.param(fused, 44, 5, marks=needs_triton),
        *(pytest.param(fused, 83, window, marks=[needs_triton, pytest.mark.slow]) for window in (0, 5, 16, 40, 100)),
        pytest.param(joined, 28, 5, marks=needs_triton),
    ],
)
def test_value_and_gradients_equal_loops(attend, length, window):
    arrays, ids = inputs(length)
    rate = RATE if window == 5 else 0.0

    def got(q, k, v):
        return attend(q, k, v, ids, window, rate)

    check(got, lambda q, k, v: plain(q, k, v, ids, window, rate), arrays)


@needs_triton
@pytest.mark.parametrize(
    ("tiling", "length"),
    [
        pytest.param(dataclasses.replace(SMALL, block_q=32, backward_over=32), 96, marks=pytest.mark.slow),
        (Tiling(block_q=16, block_k=32, backward_block=32, backward_over=16), 64),  # forward visits all tiles
        (dataclasses.replace(SMALL, dq_block=32), 32),
    ],
)
def test_every_tiling_gives_the_same(tiling, length):
    arrays, ids = inputs(length)
    check(lambda q, k, v: fused(q, k, v, ids, 20, RATE, tiling), lambda q, k, v: plain(q, k, v, ids, 20, RATE), arrays)


@pytest.mark.parametrize(
    ("length", "window", "rate"), [(128, 64, 0.0), (640, 64, RATE), (640, 130, 0.0), (256, 300, 0.0)]
)
def test_tpu_kernels_equal_loops(length, window, rate):
    arrays, ids = inputs(length, heads=2, head=64)
    attend = with_key(tpu_attention)
    check(lambda q, k, v: attend(q, k, v, ids, window, rate), lambda q, k, v: plain(q, k, v, ids, window, rate), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_keys_of_long_rows_come_in_chunks_on_tpus(monkeypatch, rate):
    monkeypatch.setattr("bertjax.model.kernels.attention_pallas_tpu.WHOLE", 128)
    arrays, ids = inputs(384, heads=2, head=64)
    attend = with_key(tpu_attention)
    check(lambda q, k, v: attend(q, k, v, ids, None, rate), lambda q, k, v: plain(q, k, v, ids, 384, rate), arrays)


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_queries_of_long_rows_come_in_blocks_in_the_reference(monkeypatch, rate):
    monkeypatch.setattr(attention_reference, "WHOLE", 64)
    monkeypatch.setattr(attention_reference, "BLOCK", 32)
    arrays, ids = inputs(83)
    check(lambda q, k, v: REFERENCE(q, k, v, ids, None, rate), lambda q, k, v: plain(q, k, v, ids, 83, rate), arrays)


def turn(length, head, base=100.0):
    angles = np.arange(length)[:, None] * base ** -(np.arange(0, head, 2) / head)
    angles = jnp.asarray(np.concatenate([angles, angles], axis=-1)[None], jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def by_complex_numbers(x):
    """Independent: each pair of numbers is one complex number that is turned by its position."""
    half = x.shape[-1] // 2
    steps = 100.0 ** -(np.arange(half) / half)
    turns = jnp.exp(1j * jnp.asarray(np.arange(x.shape[1])[:, None, None] * steps, jnp.float32))
    z = (x[..., :half] + 1j * x[..., half:]) * turns
    return jnp.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize(
    ("kernel", "length", "has_bias"),
    [
        (attention_reference, 40, False),
        (attention_reference, 40, True),
        pytest.param(attention_triton, 16, True, marks=needs_triton),
        pytest.param(attention_triton, 40, False, marks=[needs_triton, pytest.mark.slow]),
    ],
)
def test_queries_and_keys_of_a_product_are_turned(kernel, length, has_bias):
    (q, k, v, g), ids = inputs(length, heads=2)
    product, turns = jnp.stack([q, k, v], axis=2), turn(length, 16)
    bias = jax.random.normal(KEY, (3, 2, 16)) if has_bias else None

    def joined(product, bias):
        flat = product if bias is None else product.reshape(4, length, -1)
        return joined_attention(kernel, flat, bias, ids, 0.0, None, False, turn=turns, window=9)

    def want(product, bias):
        q, k, v = jnp.moveaxis(product if bias is None else product + bias, 2, 0)
        return plain(by_complex_numbers(q), by_complex_numbers(k), v, ids, 9)

    def both(attend, product, bias, g):
        out, pull = jax.vjp(attend, product, bias)
        return jax.tree.leaves((out, pull(g)))

    for a, b in zip(*(jax.jit(functools.partial(both, f))(product, bias, g) for f in (joined, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    np.testing.assert_allclose(turned(q, turns), by_complex_numbers(q), atol=2e-6)


def test_no_array_grows_with_the_square_of_a_long_row():
    """Neither forward nor backward, in the reference and in the fused kernels."""
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def largest(attend):
        def run(q, k, v, ids):
            out, pull = jax.vjp(lambda *qkv: attend(*qkv, ids, window=64), q, k, v)
            return pull(out)

        sizes = []

        def collect(jaxpr):
            for equation in jaxpr.eqns:
                sizes.extend(x.aval.size for x in equation.outvars)
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    collect(inner)

        collect(jax.make_jaxpr(run)(shape, shape, shape, ids).jaxpr)
        return max(sizes)

    assert largest(attention_reference.attention) <= 4096 * 2 * 3 * 64
    for attend in (attention_triton.attention, tpu_attention):
        assert largest(attend) <= 4096 * 2 * 64


def test_tiles_out_of_the_window_are_not_visited():
    bounds = np.asarray(tile_bounds(jnp.ones((1, 512), jnp.int32), 64, 64, 64))[0]
    np.testing.assert_array_equal(bounds[:, 0], [0, 0, 1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(bounds[:, 3], [2, 3, 4, 5, 6, 7, 8, 8])
    np.testing.assert_array_equal(bounds[:, 1:3], [[i, i + 1] for i in range(8)])  # itself needs no comparison
    packed = jnp.repeat(jnp.arange(1, 5), 128)[None, :]
    bounds = np.asarray(tile_bounds(packed, 64, 64, 64))[0]
    np.testing.assert_array_equal(bounds[:, 0] // 2, [0, 0, 1, 1, 2, 2, 3, 3])  # nor other segments


def test_a_negative_window_is_refused():
    (q, k, v, _), ids = inputs(16)
    for attend in (attention_reference.attention, attention_triton.attention):
        with pytest.raises(ValueError, match="at least 0"):
            attend(q, k, v, ids, window=-1)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), [(128, 64), (512, 64), (512, None), (1024, 64), (1024, None)])
def test_compiled_kernels_with_turn_and_window_are_right_and_bit_identical_from_run_to_run(length, window):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    arrays, ids = inputs(length, heads=2, head=64)
    product, g = jnp.stack(arrays[:3], axis=2).astype(jnp.bfloat16), arrays[3].astype(jnp.bfloat16)
    turns = turn(length, 64)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(kernel, several, product, g):
        def attend(product):
            return joined_attention(kernel, product, None, ids, 0.0, None, several, turn=turns, window=window)

        out, pull = jax.vjp(attend, product)
        return out, *pull(g)

    with jax.default_matmul_precision("highest"):
        want = both(attention_reference, False, product.astype(jnp.float32), g.astype(jnp.float32))
    for several in (False, True):
        got = both(attention_triton, several, product, g)
        for a, b in zip(got, want, strict=True):
            assert jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b) < 1e-2
        for _ in range(5):
            for a, b in zip(got, both(attention_triton, several, product, g), strict=True):
                np.testing.assert_array_equal(a, b)
