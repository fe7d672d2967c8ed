"""Fused bidirectional attention for NVIDIA GPUs, with dropout that can be drawn again.

    q, k, v [B,T,A,D] + attention_mask [B,T] + stream seeds [B,A,2]  ->  context [B,T,A,D]

Written in Pallas for its Triton backend. The scores never reach device memory: forward keeps the
context and the row-wise log-sum-exp, backward computes the probabilities again (Dao et al. 2022,
arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Padding and the boundaries of packed pairs are
compared straight from `attention_mask` (attend iff equal), so no [T,T] mask exists. Dropout bits
come from `dropout_bits`, a function of (key, row, head, query, key position), so that a resumed,
rematerialised or re-sharded step draws the same mask. No atomics: the result is bit-identical
from run to run.

Under several devices each kernel runs on its shard: rows may be split over any mesh axis, and
heads too (`custom_partitioning`); the seeds travel with their rows and heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.model.kernels.dropout_bits import keep_probability, tile_keep_mask

MASKED = -1e30
"""Score of a forbidden pair, finite so that a row's running maximum never is -inf."""
_LOG2_E = math.log2(math.e)
_PADDING_ID = -1
"""Mask value of rows added to reach a multiple of the tile: no real token carries it."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch shape of the kernels; speed only, never the result's meaning.

    `backward` is 'fused' (one program a head computes all three gradients, five matrix products a
    tile; dq accumulates in device memory) or 'split' (one kernel for dk and dv and one for dq,
    seven products a tile, programs a tile). `bounded` skips the tiles of a row that
    no common segment id can touch (packed rows); it needs the split backward.
    """

    block_q: int = 128
    block_k: int = 128
    warps: int = 8
    stages: int = 2
    backward: str = "fused"
    backward_block_q: int = 64
    backward_block_k: int = 128
    backward_warps: int = 8
    backward_stages: int = 2
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.backward not in ("fused", "split"):
            raise ValueError(f"Tiling.backward must be 'fused' or 'split', got {self.backward!r}")
        if self.bounded and self.backward == "fused":
            raise ValueError("Tiling.bounded needs backward='split'")

    @classmethod
    def for_length(cls, length: int, packed: bool = False) -> Tiling:
        """The tiling to use for rows of `length` tokens on an H100."""
        if packed:
            return cls(backward="split", backward_block_q=64, backward_block_k=64, bounded=True)
        return cls()


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Everything static that a kernel needs."""

    rate: float
    scale: float
    tiling: Tiling
    interpret: bool


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _block(length: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides the row."""
    return math.gcd(length, wanted)


def _forward_kernel(
    seeds_ref, bounds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, lse_ref, *, spec: _Spec
):
    block_q, head = q_ref.shape
    length = k_ref.shape[0]
    block_k = _block(length, spec.tiling.block_k)
    start_q = pl.program_id(0) * block_q
    q = q_ref[...]
    ids_q = ids_ref[pl.ds(start_q, block_q)]
    seed_0, seed_1 = seeds_ref[0], seeds_ref[1]

    def tile(index, carry):
        acc, running_max, running_sum = carry
        start_k = index * block_k
        at_k = pl.ds(start_k, block_k)
        scores = _dot(q, k_ref[at_k, :], (1, 1)) * (spec.scale * _LOG2_E)
        allowed = ids_q[:, None] == ids_ref[at_k][None, :]
        scores = jnp.where(allowed, scores, MASKED)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
        shrink = jnp.exp2(running_max - new_max)
        p = jnp.exp2(scores - new_max[:, None])
        running_sum = running_sum * shrink + jnp.sum(p, axis=1)
        if spec.rate > 0.0:
            keep = tile_keep_mask(
                seed_0, seed_1, start_q, start_k, (block_q, block_k), spec.rate
            )
            p = jnp.where(keep, p, 0.0)
        acc = acc * shrink[:, None] + _dot(p.astype(v_ref.dtype), v_ref[at_k, :], (1, 0))
        return acc, new_max, running_sum

    carry = (
        jnp.zeros((block_q, head), jnp.float32),
        jnp.full((block_q,), 2 * MASKED, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    if spec.tiling.bounded:
        carry = lax.fori_loop(bounds_ref[0], bounds_ref[1], tile, carry)
    elif length == block_k:
        carry = tile(0, carry)
    else:
        carry = lax.fori_loop(0, length // block_k, tile, carry)
    acc, running_max, running_sum = carry
    acc = acc * (1.0 / (running_sum * keep_probability(spec.rate)))[:, None]
    o_ref[...] = acc.astype(o_ref.dtype)
    lse_ref[...] = running_max + jnp.log2(running_sum)


def _gradient_tile(spec, seeds, start_q, start_k, q, k, v, ids_q, ids_k, do, lse, delta, turned):
    """(dropped probabilities, score gradients) of one tile, [bq,bk] or, `turned`, [bk,bq].

    The score gradient lacks the factor scale / keep probability, which the caller applies to the
    sum of all tiles.
    """
    if turned:
        scores, dp = _dot(k, q, (1, 1)), _dot(v, do, (1, 1))
        shape = (k.shape[0], q.shape[0])
        lse, delta = lse[None, :], delta[None, :]
        allowed = ids_k[:, None] == ids_q[None, :]
    else:
        scores, dp = _dot(q, k, (1, 1)), _dot(do, v, (1, 1))
        shape = (q.shape[0], k.shape[0])
        lse, delta = lse[:, None], delta[:, None]
        allowed = ids_q[:, None] == ids_k[None, :]
    p = jnp.where(allowed, jnp.exp2(scores * (spec.scale * _LOG2_E) - lse), 0.0)
    if spec.rate > 0.0:
        keep = tile_keep_mask(
            seeds[0], seeds[1], start_q, start_k, shape, spec.rate, transposed=turned
        )
        dropped = jnp.where(keep, p, 0.0)
        dp = jnp.where(keep, dp, 0.0)
    else:
        dropped = p
    ds = p * (dp - delta)
    return dropped.astype(q.dtype), ds.astype(q.dtype)


def _delta(o: jax.Array, do: jax.Array, spec: _Spec) -> jax.Array:
    """Row sums of do * o, times the keep probability that `_gradient_tile` leaves out."""
    product = o.astype(jnp.float32) * do.astype(jnp.float32)
    return jnp.sum(product, axis=1) * keep_probability(spec.rate)


def _backward_fused_kernel(
    seeds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, do_ref, lse_ref,
    dq_ref, dk_ref, dv_ref, partial_ref, *, spec: _Spec,
):  # fmt: skip
    """All gradients of one head: for each block of keys, over all blocks of queries."""
    length, head = q_ref.shape
    block_q = _block(length, spec.tiling.backward_block_q)
    block_k = _block(length, spec.tiling.backward_block_k)
    queries, keys = length // block_q, length // block_k
    seeds = seeds_ref[0], seeds_ref[1]
    inverse_keep = 1.0 / keep_probability(spec.rate)

    for key_index in range(keys):
        start_k = key_index * block_k
        at_k = pl.ds(start_k, block_k)
        k, v, ids_k = k_ref[at_k, :], v_ref[at_k, :], ids_ref[at_k]

        def tile(index, carry, key_index=key_index, start_k=start_k, k=k, v=v, ids_k=ids_k):
            dk, dv = carry
            start_q = index * block_q
            at_q = pl.ds(start_q, block_q)
            q, do = q_ref[at_q, :], do_ref[at_q, :]
            delta = _delta(o_ref[at_q, :], do, spec)
            dropped, ds = _gradient_tile(
                spec, seeds, start_q, start_k, q, k, v, ids_ref[at_q], ids_k,
                do, lse_ref[at_q], delta, turned=True,
            )  # fmt: skip
            dv = dv + _dot(dropped, do, (1, 0))
            dk = dk + _dot(ds, q, (1, 0))
            dq = _dot(ds, k, (0, 0))
            if key_index > 0:
                dq = dq + partial_ref[at_q, :]
            if key_index == keys - 1:
                dq_ref[at_q, :] = (dq * (spec.scale * inverse_keep)).astype(dq_ref.dtype)
            else:
                partial_ref[at_q, :] = dq
            return dk, dv

        carry = (jnp.zeros((block_k, head), jnp.float32), jnp.zeros((block_k, head), jnp.float32))
        if queries == 1:
            dk, dv = tile(0, carry)
        else:
            dk, dv = lax.fori_loop(0, queries, tile, carry)
        dk_ref[at_k, :] = (dk * (spec.scale * inverse_keep)).astype(dk_ref.dtype)
        dv_ref[at_k, :] = (dv * inverse_keep).astype(dv_ref.dtype)
        if keys > 1 and not spec.interpret:
            plgpu.debug_barrier()  # the next pass reads what other threads of this one wrote


def _backward_kv_kernel(
    seeds_ref, bounds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, do_ref, lse_ref, dk_ref, dv_ref,
    *, spec: _Spec,
):  # fmt: skip
    """dk and dv of one block of keys, over the blocks of queries."""
    block_k, head = k_ref.shape
    length = q_ref.shape[0]
    block_q = _block(length, spec.tiling.backward_block_q)
    start_k = pl.program_id(0) * block_k
    k, v, ids_k = k_ref[...], v_ref[...], ids_ref[pl.ds(start_k, block_k)]
    seeds = seeds_ref[0], seeds_ref[1]

    def tile(index, carry):
        dk, dv = carry
        start_q = index * block_q
        at_q = pl.ds(start_q, block_q)
        q, do = q_ref[at_q, :], do_ref[at_q, :]
        delta = _delta(o_ref[at_q, :], do, spec)
        dropped, ds = _gradient_tile(
            spec, seeds, start_q, start_k, q, k, v, ids_ref[at_q], ids_k,
            do, lse_ref[at_q], delta, turned=True,
        )  # fmt: skip
        return dk + _dot(ds, q, (1, 0)), dv + _dot(dropped, do, (1, 0))

    low, high = (bounds_ref[0], bounds_ref[1]) if spec.tiling.bounded else (0, length // block_q)
    zero = jnp.zeros((block_k, head), jnp.float32)
    dk, dv = lax.fori_loop(low, high, tile, (zero, zero))
    inverse_keep = 1.0 / keep_probability(spec.rate)
    dk_ref[...] = (dk * (spec.scale * inverse_keep)).astype(dk_ref.dtype)
    dv_ref[...] = (dv * inverse_keep).astype(dv_ref.dtype)


def _backward_q_kernel(
    seeds_ref, bounds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, do_ref, lse_ref, dq_ref,
    *, spec: _Spec,
):  # fmt: skip
    """dq of one block of queries, over the blocks of keys."""
    block_q, head = q_ref.shape
    length = k_ref.shape[0]
    block_k = _block(length, spec.tiling.backward_block_k)
    start_q = pl.program_id(0) * block_q
    q, do, ids_q = q_ref[...], do_ref[...], ids_ref[pl.ds(start_q, block_q)]
    delta = _delta(o_ref[...], do, spec)
    lse = lse_ref[...]
    seeds = seeds_ref[0], seeds_ref[1]

    def tile(index, dq):
        start_k = index * block_k
        at_k = pl.ds(start_k, block_k)
        k = k_ref[at_k, :]
        _, ds = _gradient_tile(
            spec, seeds, start_q, start_k, q, k, v_ref[at_k, :], ids_q, ids_ref[at_k],
            do, lse, delta, turned=False,
        )  # fmt: skip
        return dq + _dot(ds, k, (1, 0))

    low, high = (bounds_ref[0], bounds_ref[1]) if spec.tiling.bounded else (0, length // block_k)
    dq = lax.fori_loop(low, high, tile, jnp.zeros((block_q, head), jnp.float32))
    dq_ref[...] = (dq * (spec.scale / keep_probability(spec.rate))).astype(dq_ref.dtype)


def _tile_bounds(ids: jax.Array, block: int, over: int) -> jax.Array:
    """For each block of `block` tokens, which blocks of `over` tokens can share a segment with it.

    Compares the smallest and largest id of both blocks, padding taken as the largest id of all: a
    superset of what the mask allows, and tight where ids rise along the row as in packed rows.

    Returns:
      int32 [B, T // block, 2]: first index, last index + 1.
    """
    ids = jnp.where(ids <= 0, jnp.int32(2**30) - ids, ids)
    mine = ids.reshape(ids.shape[0], -1, 1, block)
    other = ids.reshape(ids.shape[0], 1, -1, over)
    touch = (mine.min(-1) <= other.max(-1)) & (other.min(-1) <= mine.max(-1))
    first = jnp.argmax(touch, axis=-1)
    last = touch.shape[-1] - jnp.argmax(touch[..., ::-1], axis=-1)
    return jnp.stack([first, last], axis=-1).astype(jnp.int32)


def _head_spec(block: int, head: int, whole: bool) -> pl.BlockSpec:
    """A head's [T, D] (`whole`) or its block number program_id(0), out of [B, T, A, D]."""
    if whole:
        return pl.BlockSpec((None, block, None, head), lambda i, a, b: (b, 0, a, 0))
    return pl.BlockSpec((None, block, None, head), lambda i, a, b: (b, i, a, 0))


def _specs(length: int):
    seeds = pl.BlockSpec((None, None, 2), lambda i, a, b: (b, a, 0))
    bounds = pl.BlockSpec((None, None, 2), lambda i, a, b: (b, i, 0))
    ids = pl.BlockSpec((None, length), lambda i, a, b: (b, 0))
    return seeds, bounds, ids


def _call(kernel, spec: _Spec, grid, in_specs, out_specs, out_shape, warps, stages, name, args):
    params: dict[str, Any] = {}
    if not spec.interpret:
        params["compiler_params"] = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(
        functools.partial(kernel, spec=spec),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=spec.interpret,
        name=name,
        **params,
    )(*args)


def _forward(q, k, v, ids, seeds, *, spec: _Spec):
    """One shard's forward pass -> context [B,T,A,D], log2-sum-exp2 [B,A,T] float32."""
    batch, length, heads, head = q.shape
    tiling = spec.tiling
    block_q = _block(length, tiling.block_q)
    bounds = (
        _tile_bounds(ids, block_q, _block(length, tiling.block_k))
        if tiling.bounded
        else jnp.zeros((batch, length // block_q, 2), jnp.int32)
    )
    seeds_spec, bounds_spec, ids_spec = _specs(length)
    tile, whole = _head_spec(block_q, head, False), _head_spec(length, head, True)
    return _call(
        _forward_kernel,
        spec,
        (length // block_q, heads, batch),
        [seeds_spec, bounds_spec, tile, whole, whole, ids_spec],
        [tile, pl.BlockSpec((None, None, block_q), lambda i, a, b: (b, a, i))],
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ],
        tiling.warps,
        tiling.stages,
        "attention_forward",
        (seeds, bounds, q, k, v, ids),
    )


def _backward(q, k, v, ids, seeds, o, lse, do, *, spec: _Spec):
    """One shard's gradients dq, dk, dv, each [B,T,A,D]."""
    batch, length, heads, head = q.shape
    tiling = spec.tiling
    warps, stages = tiling.backward_warps, tiling.backward_stages
    seeds_spec, bounds_spec, ids_spec = _specs(length)
    whole = _head_spec(length, head, True)
    lse_whole = pl.BlockSpec((None, None, length), lambda i, a, b: (b, a, 0))
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    block_q = _block(length, tiling.backward_block_q)
    block_k = _block(length, tiling.backward_block_k)
    if tiling.backward == "fused":
        # dq's partial sums, one head after the other: only touched when a head has several blocks.
        rows = length if length > block_k else 1
        partial = jax.ShapeDtypeStruct((batch, rows, heads, head), jnp.float32)
        dq, dk, dv, _ = _call(
            _backward_fused_kernel, spec, (1, heads, batch),
            [seeds_spec, whole, whole, whole, ids_spec, whole, whole, lse_whole],
            [whole, whole, whole, _head_spec(rows, head, True)],
            [like_q, like_q, like_q, partial],
            warps, stages, "attention_backward",
            (seeds, q, k, v, ids, o, do, lse),
        )  # fmt: skip
        return dq, dk, dv
    if tiling.bounded:
        bounds_kv = _tile_bounds(ids, block_k, block_q)
        bounds_q = _tile_bounds(ids, block_q, block_k)
    else:
        bounds_kv = jnp.zeros((batch, length // block_k, 2), jnp.int32)
        bounds_q = jnp.zeros((batch, length // block_q, 2), jnp.int32)
    tile_k, tile_q = _head_spec(block_k, head, False), _head_spec(block_q, head, False)
    dk, dv = _call(
        _backward_kv_kernel, spec, (length // block_k, heads, batch),
        [seeds_spec, bounds_spec, whole, tile_k, tile_k, ids_spec, whole, whole, lse_whole],
        [tile_k, tile_k], [like_q, like_q],
        warps, stages, "attention_backward_kv",
        (seeds, bounds_kv, q, k, v, ids, o, do, lse),
    )  # fmt: skip
    lse_tile = pl.BlockSpec((None, None, block_q), lambda i, a, b: (b, a, i))
    [dq] = _call(
        _backward_q_kernel, spec, (length // block_q, heads, batch),
        [seeds_spec, bounds_spec, tile_q, whole, whole, ids_spec, tile_q, tile_q, lse_tile],
        [tile_q], [like_q],
        warps, stages, "attention_backward_q",
        (seeds, bounds_q, q, k, v, ids, o, do, lse),
    )  # fmt: skip
    return dq, dk, dv


def _per_shard(function, num_outputs_like_q: int, with_lse: bool):
    """`function` made to run on each shard of rows and heads instead of on gathered operands."""

    @functools.partial(custom_partitioning, static_argnums=())
    def run(*args):
        return tuple(function(*args))

    def shardings(mesh, q_sharding, number):
        spec = tuple(q_sharding.spec) + (None,) * (4 - len(q_sharding.spec))
        rows, _, heads, _ = spec
        of = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
        whole = of(rows, None, heads, None)
        lse = of(rows, heads, None)
        operands = (whole, whole, whole, of(rows, None), of(rows, heads, None))
        if not with_lse:
            operands += (whole, lse, whole)
        outputs = (whole,) * number + ((lse,) if with_lse else ())
        return operands, outputs

    def infer(mesh, arg_shapes, result_shape):
        return shardings(mesh, arg_shapes[0].sharding, num_outputs_like_q)[1]

    def partition(mesh, arg_shapes, result_shape):
        operands, outputs = shardings(mesh, arg_shapes[0].sharding, num_outputs_like_q)
        return mesh, lambda *args: tuple(function(*args)), outputs, operands

    inputs = "b t a d, b t a d, b t a d, b t, b a s"
    if not with_lse:
        inputs += ", b t a d, b a t, b t a d"
    outputs = ", ".join(["b t a d"] * num_outputs_like_q + (["b a t"] if with_lse else []))
    run.def_partition(
        infer_sharding_from_operands=infer,
        partition=partition,
        sharding_rule=f"{inputs} -> {outputs}",
        need_replication_factors=("t", "d", "s"),
    )
    return run


@functools.lru_cache(maxsize=None)
def _sharded_forward(spec: _Spec):
    return _per_shard(functools.partial(_forward, spec=spec), 1, with_lse=True)


@functools.lru_cache(maxsize=None)
def _sharded_backward(spec: _Spec):
    return _per_shard(functools.partial(_backward, spec=spec), 3, with_lse=False)


def _run_forward(spec, *args):
    # One device: call the kernel itself, which keeps the compiled program free of callbacks.
    if jax.device_count() == 1:
        return _forward(*args, spec=spec)
    return _sharded_forward(spec)(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: _Spec, q, k, v, ids, seeds):
    return _run_forward(spec, q, k, v, ids, seeds)[0]


def _attend_forward(spec, q, k, v, ids, seeds):
    o, lse = _run_forward(spec, q, k, v, ids, seeds)
    # Named so that a rematerialisation policy can keep them and never run the forward kernel twice.
    o, lse = checkpoint_name(o, "attention_context"), checkpoint_name(lse, "attention_lse")
    return o, (q, k, v, ids, seeds, o, lse)


def _attend_backward(spec, residuals, do):
    q, k, v, ids, seeds, o, lse = residuals
    args = (q, k, v, ids, seeds, o, lse, do.astype(q.dtype))
    if jax.device_count() == 1:
        dq, dk, dv = _backward(*args, spec=spec)
    else:
        dq, dk, dv = _sharded_backward(spec)(*args)
    no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return dq, dk, dv, no_gradient(ids), no_gradient(seeds)


_attend.defvjp(_attend_forward, _attend_backward)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attention_mask: jax.Array,
    seeds: jax.Array | None = None,
    dropout_rate: float = 0.0,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with dropout on the probabilities, fused.

    Args:
      q, k, v: [B, T, A, D] of one floating type; bfloat16 is the fast one. D a power of two of at
        least 16.
      attention_mask: int [B, T]; a token attends to those with its own value (0 = padding).
      seeds: uint32 [B, A, 2] of `dropout_bits.stream_seeds`, needed when dropout_rate > 0.
      dropout_rate: probability of dropping an attention weight; kept ones are divided by
        `dropout_bits.keep_probability(dropout_rate)`.
      tiling: tile sizes; by default `Tiling.for_length(T)`.
      interpret: run the kernels' code as ordinary XLA operations (tests without a GPU; slow).

    Returns:
      [B, T, A, D], in q's type. Softmax and sums are float32.

    Raises:
      ValueError: for shapes the kernels do not take, or dropout without seeds.
    """
    batch, length, heads, head = q.shape
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError(f"q, k, v must share one shape, got {q.shape}, {k.shape}, {v.shape}")
    if head < 16 or head & (head - 1):
        raise ValueError(
            f"the fused kernel needs a head size that is a power of two >= 16, got {head}; "
            "use attention='reference'"
        )
    if dropout_rate > 0.0 and seeds is None:
        raise ValueError("dropout_rate > 0 needs seeds (dropout_bits.stream_seeds)")
    if seeds is None:
        seeds = jnp.zeros((batch, heads, 2), jnp.uint32)
    ids = attention_mask.astype(jnp.int32)
    multiple = 16 if length <= 64 else 64 if length <= 256 else 128
    extra = -length % multiple
    if extra:
        widths = ((0, 0), (0, extra), (0, 0), (0, 0))
        q, k, v = (jnp.pad(x, widths) for x in (q, k, v))
        ids = jnp.pad(ids, ((0, 0), (0, extra)), constant_values=_PADDING_ID)
    tiling = tiling or Tiling.for_length(length + extra)
    spec = _Spec(float(dropout_rate), 1.0 / math.sqrt(head), tiling, interpret)
    out = _attend(spec, q, k, v, ids, seeds)
    return out[:, :length] if extra else out
