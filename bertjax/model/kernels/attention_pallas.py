"""Fused bidirectional attention for NVIDIA GPUs, with dropout that can be drawn again.

    q, k, v [B,T,A,D] + attention_mask [B,T] + stream seeds [B,A,2]  ->  context [B,T,A,D]

Written in Pallas for its Triton backend. The scores never reach device memory: forward keeps the
context and the row-wise log-sum-exp, backward computes the probabilities again (Dao et al. 2022,
arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Padding and the boundaries of packed pairs are
compared straight from `attention_mask` (attend iff equal), and a window by positions, so no [T,T]
mask exists, and tiles that nothing in them sees are not visited. Dropout bits
come from `dropout_bits`, a function of (key, row, head, query, key position), so that a resumed,
rematerialised or re-sharded step draws the same mask. No atomics: the result is bit-identical
from run to run.

Under several devices each kernel runs on its shard: rows may be split over any mesh axis, and
heads too; the seeds travel with their rows and heads.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from bertjax.model.kernels import gpu_programs
from bertjax.model.kernels.attention_reference import seen_window
from bertjax.model.kernels.dropout_bits import stream_seeds
from bertjax.model.kernels.gpu_programs import K, Q, Spec, Tiling, V, block_size, launch, row_delta
from bertjax.model.mesh import current_mesh, on_each_share

_PADDING_ID = -1
"""Mask value of rows added to reach a multiple of the tile: no real token carries it."""


def tile_bounds(ids: jax.Array, block: int, over: int, window: int | None = None) -> jax.Array:
    """Which blocks of `over` tokens each block of `block` tokens must see.

    Compares the smallest and largest id of both blocks, padding taken as the largest id of all: a
    superset of what the mask allows, and tight where ids rise along the row as in packed rows.

    Returns:
      int32 [B, T // block, 4]: first and last + 1 of the blocks that can share a segment and reach
      into the window, and between them, in the middle, first and last + 1 of a run of blocks that
      lie in the window as a whole and have one and the same id at all their tokens as this block
      has; the run is empty where there is none or several.
    """
    ids = jnp.where(ids <= 0, jnp.int32(2**30) - ids, ids)
    mine = ids.reshape(ids.shape[0], -1, 1, block)
    other = ids.reshape(ids.shape[0], 1, -1, over)
    low, high, other_low, other_high = mine.min(-1), mine.max(-1), other.min(-1), other.max(-1)
    touching = (low <= other_high) & (other_low <= high)
    same = (low == high) & (other_low == other_high) & (low == other_low)
    if window is not None:
        start = jnp.arange(0, ids.shape[1], block)[:, None]
        other_start = jnp.arange(0, ids.shape[1], over)[None, :]
        # The least and the greatest distance by which the other block's positions lie behind or before.
        behind, before = other_start - (start + block - 1), start - (other_start + over - 1)
        touching &= (behind <= window) & (before <= window)
        same &= (behind + block + over - 2 <= window) & (before + block + over - 2 <= window)
    first, last = _ends(touching)
    whole, mixed = _ends(same)
    one_run = same.any(-1) & (mixed - whole == same.sum(-1))
    whole, mixed = jnp.where(one_run, whole, first), jnp.where(one_run, mixed, first)
    return jnp.stack([first, whole, mixed, last], axis=-1).astype(jnp.int32)


def _ends(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the first set flag along the last axis, and of the last one + 1."""
    return jnp.argmax(flags, axis=-1), flags.shape[-1] - jnp.argmax(flags[..., ::-1], axis=-1)


def _whole(length: int, head: int) -> pl.BlockSpec:
    """A head's [T, D] out of [B, T, A, D]."""
    return pl.BlockSpec((None, length, None, head), lambda i, a, b: (b, 0, a, 0))


def _tile(block: int, head: int) -> pl.BlockSpec:
    """A head's block number program_id(0) out of [B, T, A, D]."""
    return pl.BlockSpec((None, block, None, head), lambda i, a, b: (b, i, a, 0))


def _joined(part: int, block: int, head: int, whole: bool) -> pl.BlockSpec:
    """The same of q, k or v (`part`) out of [B, T, 3, A, D]."""
    return pl.BlockSpec((None, block, None, None, head), lambda i, a, b: (b, 0 if whole else i, part, a, 0))


def _operands(qkv, spec: Spec):
    """(B, T, A, D), the three arrays to read, and whole-head specs for them."""
    if spec.joined:
        batch, length, _, heads, head = qkv[0].shape
        specs = [_joined(part, length, head, True) for part in (Q, K, V)]
        return (batch, length, heads, head), qkv * 3, specs
    batch, length, heads, head = qkv[0].shape
    return qkv[0].shape, qkv, [_whole(length, head)] * 3


def _shared_specs(length: int):
    """Specs of the seeds, the tile bounds, the ids, and the log-sum-exp or delta of a head."""
    seeds = pl.BlockSpec((None, None, 2), lambda i, a, b: (b, a, 0))
    bounds = pl.BlockSpec((None, None, 4), lambda i, a, b: (b, i, 0))
    ids = pl.BlockSpec((None, length), lambda i, a, b: (b, 0))
    of_rows = pl.BlockSpec((None, None, length), lambda i, a, b: (b, a, 0))
    return seeds, bounds, ids, of_rows


def _forward(ids, seeds, *qkv, spec: Spec):
    """One shard's forward pass -> context [B,T,A,D], log2-sum-exp2 [B,A,T] float32."""
    (batch, length, heads, head), arrays, specs = _operands(qkv, spec)
    tiling = spec.tiling
    block_q = block_size(length, tiling.block_q)
    specs[Q] = _joined(Q, block_q, head, False) if spec.joined else _tile(block_q, head)
    seeds_spec, bounds_spec, ids_spec, _ = _shared_specs(length)
    bounds = tile_bounds(ids, block_q, block_size(length, tiling.block_k), spec.window)
    context = jax.ShapeDtypeStruct((batch, length, heads, head), qkv[0].dtype)
    sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    grid, in_specs = (length // block_q, heads, batch), [seeds_spec, bounds_spec, *specs, ids_spec]
    out_specs = [_tile(block_q, head), pl.BlockSpec((None, None, block_q), lambda i, a, b: (b, a, i))]
    how = grid, in_specs, out_specs, [context, sums], tiling.warps, tiling.stages
    return launch("attention_forward", gpu_programs.forward_kernel, spec, *how)(seeds, bounds, *arrays, ids)


def _backward(ids, seeds, o, lse, do, *qkv, spec: Spec):
    """One shard's gradients, laid out as `qkv`."""
    (batch, length, heads, head), arrays, specs = _operands(qkv, spec)
    tiling = spec.tiling
    seeds_spec, bounds_spec, ids_spec, lse_spec = _shared_specs(length)
    whole = _whole(length, head)
    block_q = block_size(length, tiling.backward_block_q)
    block_k = block_size(length, tiling.backward_block_k)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
    written = length if tiling.backward == "fused" else block_q
    if spec.joined:
        out_specs = [pl.BlockSpec((None, written, 3, None, head), lambda i, a, b: (b, i, 0, a, 0))]
    else:
        out_specs = [_tile(written, head)] * 3
    how = tiling.backward_warps, tiling.backward_stages
    if tiling.backward == "twin":
        delta = row_delta(o, do, spec.rate).transpose(0, 2, 1)
        bounds = tile_bounds(ids, block_q, block_q, spec.window)
        in_specs = [seeds_spec, bounds_spec, *specs, ids_spec, whole, lse_spec, lse_spec]
        how = (length // block_q, heads, batch), in_specs, out_specs, shapes, *how
        run = launch("attention_backward", gpu_programs.backward_twin_kernel, spec, *how)
        return run(seeds, bounds, *arrays, ids, do, lse, delta)
    # dq's partial sums, a head after the other: only touched when a head has several key blocks.
    rows = length if length > block_k else 1
    partial = jax.ShapeDtypeStruct((batch, rows, heads, head), jnp.float32)
    in_specs = [seeds_spec, *specs, ids_spec, whole, whole, lse_spec]
    how = (1, heads, batch), in_specs, [*out_specs, _whole(rows, head)], [*shapes, partial], *how
    run = launch("attention_backward", gpu_programs.backward_fused_kernel, spec, *how)
    *gradients, _ = run(seeds, *arrays, ids, o, do, lse)
    return gradients


def _run(spec: Spec, backward: bool, *args):
    """`_forward` or `_backward` on each device's rows and heads."""
    qkv = "btcad" if spec.joined else "btad btad btad"  # c = query, key, value
    context = "btad bat"  # and log-sum-exp
    function, takes, gives = (
        (_backward, f"bt bas {context} btad {qkv}", qkv) if backward else (_forward, f"bt bas {qkv}", context)
    )
    run = on_each_share(functools.partial(function, spec=spec), spec.mesh, takes, gives)
    return run(*args)


def _with_bias(bias: jax.Array | None, qkv):
    """`qkv` itself, or the product [B,T,3AD] in it plus the bias [3,A,D] as [B,T,3,A,D]."""
    if bias is None:
        return qkv
    (product,) = qkv
    biased = product + bias.reshape(-1).astype(product.dtype)
    return (biased.reshape(*product.shape[:2], *bias.shape),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, ids, seeds, bias, *qkv):
    return _run(spec, False, ids, seeds, *_with_bias(bias, qkv))[0]


def _attend_forward(spec, ids, seeds, bias, *qkv):
    qkv = _with_bias(bias, qkv)
    o, lse = _run(spec, False, ids, seeds, *qkv)
    # Named so that a rematerialisation policy can keep them and never run the forward kernel twice.
    o, lse = checkpoint_name(o, "attention_residuals"), checkpoint_name(lse, "attention_residuals")
    return o, (ids, seeds, bias, o, lse, qkv)


def _attend_backward(spec, residuals, do):
    ids, seeds, bias, o, lse, qkv = residuals
    gradients = _run(spec, True, ids, seeds, o, lse, do.astype(o.dtype), *qkv)
    dbias = None
    if bias is not None:
        # Not summed inside the kernel, although it holds the numbers: measured, that costs more
        # (8 % of the kernel) than this pass over memory. The keys' bias has no gradient: it adds
        # the same to all scores of a query, which softmax does not see.
        (joined,) = gradients
        of_queries, of_values = (jnp.sum(joined[:, :, part].astype(jnp.float32), axis=(0, 1)) for part in (Q, V))
        dbias = jnp.stack([of_queries, jnp.zeros_like(of_queries), of_values])
        gradients = (joined.reshape(*joined.shape[:2], -1),)
    no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return no_gradient(ids), no_gradient(seeds), dbias, *gradients


_attend.defvjp(_attend_forward, _attend_backward)


def _fused(qkv, bias, attention_mask, shape, seeds, rate: float, tiling, interpret: bool, window) -> jax.Array:
    """flash_attention of arrays [B, T, ...] with heads of `shape` (B, T, A, D); one of them: a joined product."""
    batch, length, heads, head = shape
    if head < 16 or head & (head - 1):
        raise ValueError(
            f"the fused kernel needs a head size that is a power of two >= 16, got {head}; use attention='reference'"
        )
    if seeds is None:
        if rate > 0.0:
            raise ValueError("dropout_rate > 0 needs seeds (dropout_bits.stream_seeds)")
        seeds = jnp.zeros((batch, heads, 2), jnp.uint32)
    extra = -length % (16 if length <= 64 else 64 if length <= 256 else 128)
    ids = jnp.pad(attention_mask.astype(jnp.int32), ((0, 0), (0, extra)), constant_values=_PADDING_ID)
    window = seen_window(window, length)
    tiling = tiling or Tiling.for_length(length + extra, window=window)
    spec = Spec(float(rate), 1.0 / math.sqrt(head), tiling, len(qkv) == 1, window, interpret, current_mesh())
    qkv = (jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2))) for x in qkv)
    return _attend(spec, ids, seeds, bias, *qkv)[:, :length]


def flash_attention(
    q, k, v, attention_mask, seeds=None, dropout_rate=0.0, tiling=None, interpret=False, window=None
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with dropout on the probabilities, fused.

    Args:
      q, k, v: [B, T, A, D] of one floating type; bfloat16 is the fast one. D a power of two of at
        least 16.
      attention_mask, window: as of attention_reference.attention.
      seeds: uint32 [B, A, 2] of `dropout_bits.stream_seeds`, needed when dropout_rate > 0.
      dropout_rate: of the attention weights; kept ones are divided by `keep_probability` of it.
      tiling: a Tiling; by default `Tiling.for_length(T)`.
      interpret: run the kernels' code as ordinary XLA operations (tests without a GPU; slow).

    Returns:
      [B, T, A, D], in q's type. Softmax and sums are float32.

    Raises:
      ValueError: for shapes the kernels do not take, or dropout without seeds.
    """
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError(f"q, k, v must share one shape, got {q.shape}, {k.shape}, {v.shape}")
    return _fused((q, k, v), None, attention_mask, q.shape, seeds, dropout_rate, tiling, interpret, window)


def flash_attention_joined(
    product, bias, attention_mask, seeds=None, dropout_rate=0.0, tiling=None, interpret=False, window=None
) -> jax.Array:
    """`flash_attention` over q, k and v as they come out of one product.

    The kernels read the product in place and write its gradient as a whole, without the copies that
    splitting and joining cost. Not for heads sharded over devices.

    Args:
      product: [B, T, 3 A D], the queries, keys and values of all heads side by side.
      bias: float32 [3, A, D], still to be added to it; None: nothing, and the product is [B, T, 3, A, D].
      The others: as of `flash_attention`.
    """
    shape = *product.shape[:2], *(product if bias is None else bias).shape[-2:]
    bias = None if bias is None else bias.astype(jnp.float32)
    return _fused((product,), bias, attention_mask, shape, seeds, dropout_rate, tiling, interpret, window)


def attention(
    query, key, value, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False, window=None
) -> jax.Array:
    """As attention_reference.attention, with the same dropout bits.

    Runs interpreted (slowly) without a GPU, which is what tests on the CPU use.
    """
    options = _options(query.shape[:3], dropout_rate, dropout_key, several_pairs, window)
    return flash_attention(query, key, value, attention_mask, **options)


def joined_attention(
    product, bias, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False, window=None
) -> jax.Array:
    """`attention` for a product [B, T, 3 A D] and its bias [3, A, D], or [B, T, 3, A, D] and None."""
    heads = (product if bias is None else bias).shape[-2]
    options = _options((*product.shape[:2], heads), dropout_rate, dropout_key, several_pairs, window)
    return flash_attention_joined(product, bias, attention_mask, **options)


def _options(shape, rate: float, key: jax.Array | None, several_pairs: bool, window: int | None) -> dict[str, Any]:
    batch, length, heads = shape
    rate = 0.0 if key is None else rate
    return {
        "dropout_rate": rate,
        "seeds": stream_seeds(key, batch, heads) if rate > 0.0 else None,
        "tiling": Tiling.for_length(length, several_pairs, seen_window(window, length)),
        "window": window,
        "interpret": jax.default_backend() != "gpu",
    }
