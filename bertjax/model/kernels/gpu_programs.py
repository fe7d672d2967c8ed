"""What one GPU program of the fused attention computes: the kernels' bodies and their tiles.

    refs to q, k, v of a head [T,D], its seeds, the row's ids  ->  context, log-sum-exp
    the same, and the context's gradient                       ->  dq, dk, dv

attention_pallas.py lays arrays out as these refs, launches the programs and makes them one
differentiable function; it also says what they compute and why.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh

from bertjax.model.kernels.dropout_bits import keep_probability, tile_keep_mask

MASKED = -1e30
"""Score of a forbidden pair, finite so that a row's running maximum never is -inf."""
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch shape of the kernels; speed only, never the result's meaning.

    Attributes:
      block_q, block_k, warps, stages: of the forward kernel.
      backward: 'fused', one program a head computes all three gradients with five matrix products
        a tile, dq adding up in device memory; or 'twin', a program for each block of a head goes
        over all queries for dk and dv, then over all keys for dq, seven products a tile.
      backward_block_q, backward_block_k, backward_warps, backward_stages: of the backward kernel;
        'twin' needs equal blocks. An earlier form (separate kernels, two stages, dk's product
        before dv's) gave a dv that was wrong by 1 to 2 % and varied from run to run with jax
        0.11.2. The present order has not shown it with one, two or three stages (equal to one
        stage to the bit, 20 runs of each); run the gpu tests after changing either.
      bounded, backward_bounded: visit only the tiles that segments and window let be seen; backward
        needs 'twin'. Forward pays for the loop of unknown length (15 % where rows are full), so it
        is bounded for packed rows and windows alone; backward gains (8 % where rows are full, the
        tiles themselves where they are not).
    """

    block_q: int = 64
    block_k: int = 128
    warps: int = 4
    stages: int = 2
    backward: str = "twin"
    backward_block_q: int = 64
    backward_block_k: int = 64
    backward_warps: int = 4
    backward_stages: int = 3
    bounded: bool = False
    backward_bounded: bool = True

    def __post_init__(self) -> None:
        if self.backward not in ("fused", "twin"):
            raise ValueError(f"Tiling.backward must be 'fused' or 'twin', got {self.backward!r}")
        if self.backward == "twin" and self.backward_block_q != self.backward_block_k:
            raise ValueError("Tiling.backward='twin' needs backward_block_q = backward_block_k")
        if self.backward_bounded and self.backward == "fused":
            raise ValueError("Tiling.backward_bounded needs backward='twin'")

    @classmethod
    def for_length(cls, length: int, several_pairs: bool = False, window: int | None = None) -> Tiling:
        """The tiling to use for rows of `length` tokens, tuned on an H100 and an H200."""
        if several_pairs or (window is not None and length > 128):
            return cls(block_k=64, bounded=True)
        if length <= 128:
            return cls(
                block_k=64,
                backward="fused",
                backward_block_k=128,
                backward_warps=8,
                backward_stages=1,
                backward_bounded=False,
            )
        return cls()


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static that a kernel needs.

    `joined`: q, k, v are one array [B,T,3,A,D], whose gradient is written as one too.
    `window`: a position sees none that is further away.
    `mesh`: where rows and heads lie; a program sees nothing of it.
    """

    rate: float
    scale: float
    tiling: Tiling
    joined: bool
    window: int | None
    interpret: bool
    mesh: Mesh | None = None


Q, K, V = range(3)


def launch(name: str, kernel, spec, grid, in_specs, out_specs, out_shape, warps: int = 1, stages: int = 1):
    """arrays -> results of kernel(*refs, spec=spec) over `grid`; interpreted if `spec.interpret`."""
    params = {} if spec.interpret else {"compiler_params": plgpu.CompilerParams(num_warps=warps, num_stages=stages)}
    kernel = functools.partial(kernel, spec=spec)
    specs = {"grid": grid, "in_specs": in_specs, "out_specs": out_specs, "out_shape": out_shape}
    return pl.pallas_call(kernel, **specs, interpret=spec.interpret, name=name, **params)


def _put(spec: Spec, refs, which: int, at, value: jax.Array) -> None:
    """Stores rows of dq, dk or dv, which are three outputs or slices of a joined one."""
    if spec.joined:
        refs[0][at, which, :] = value.astype(refs[0].dtype)
    else:
        refs[which][at, :] = value.astype(refs[which].dtype)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def block_size(length: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides the row."""
    return math.gcd(length, wanted)


def visit(bounds_ref, blocks: int, bounded: bool, tile, carry):
    """`carry` taken through tile(index, carry, compare=) for the blocks that this one must see.

    Args:
      bounds_ref: int32 [4] of `tile_bounds`: this block may see the blocks first, ..., last - 1,
        and all of whole, ..., mixed - 1 from all its positions: those need no comparison.
      blocks: of the row.
      bounded: leave out what is not between first and last, in two loops, of which the one without
        comparison is the faster; else one loop over all blocks.
    """
    first, whole, mixed, last = (bounds_ref[i] for i in range(4))

    def any_block(i, carry):
        return tile(i, carry, compare=(i < whole) | (i >= mixed))

    if not bounded:
        return any_block(0, carry) if blocks == 1 else lax.fori_loop(0, blocks, any_block, carry)
    carry = lax.fori_loop(whole, mixed, functools.partial(tile, compare=False), carry)
    before = whole - first

    def rest(i, carry):
        return tile(first + i + jnp.where(i < before, 0, mixed - whole), carry, compare=True)

    return lax.fori_loop(0, before + last - mixed, rest, carry)


def _compared(compare, spec: Spec, ids_q, ids_k, start_q, start_k, tile: jax.Array, otherwise: float):
    """`tile` where query and key see each other, else `otherwise`, if there is to `compare`.

    ids_q, ids_k: [n,1] and [1,m] or [1,n] and [m,1], as the tile lies; start_q, start_k: their first positions.
    """

    def masked():
        visible = ids_q == ids_k
        if spec.window is not None:
            places = [lax.broadcasted_iota(jnp.int32, x.shape, x.shape.index(x.size)) for x in (ids_q, ids_k)]
            visible &= jnp.abs(places[0] + start_q - (places[1] + start_k)) <= spec.window
        return jnp.where(visible, tile, otherwise)

    if isinstance(compare, bool):
        return masked() if compare else tile
    return lax.cond(compare, masked, lambda: tile)


def forward_kernel(seeds_ref, bounds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, lse_ref, *, spec: Spec):
    block_q, head = q_ref.shape
    length = k_ref.shape[0]
    block_k = block_size(length, spec.tiling.block_k)
    start_q = pl.program_id(0) * block_q
    q = q_ref[...]
    ids_q = ids_ref[pl.ds(start_q, block_q)]
    seed_0, seed_1 = seeds_ref[0], seeds_ref[1]

    def tile(index, carry, compare):
        acc, running_max, running_sum = carry
        start_k = index * block_k
        at_k = pl.ds(start_k, block_k)
        scores = _dot(q, k_ref[at_k, :], (1, 1)) * (spec.scale * _LOG2_E)
        ids = ids_q[:, None], ids_ref[at_k][None, :]
        scores = _compared(compare, spec, *ids, start_q, start_k, scores, MASKED)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
        shrink = jnp.exp2(running_max - new_max)
        p = jnp.exp2(scores - new_max[:, None])
        running_sum = running_sum * shrink + jnp.sum(p, axis=1)
        if spec.rate > 0.0:
            keep = tile_keep_mask(seed_0, seed_1, start_q, start_k, (block_q, block_k), spec.rate)
            p = jnp.where(keep, p, 0.0)
        acc = acc * shrink[:, None] + _dot(p.astype(v_ref.dtype), v_ref[at_k, :], (1, 0))
        return acc, new_max, running_sum

    carry = (
        jnp.zeros((block_q, head), jnp.float32),
        jnp.full((block_q,), 2 * MASKED, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    carry = visit(bounds_ref, length // block_k, spec.tiling.bounded, tile, carry)
    acc, running_max, running_sum = carry
    acc = acc * (1.0 / (running_sum * keep_probability(spec.rate)))[:, None]
    o_ref[...] = acc.astype(o_ref.dtype)
    lse_ref[...] = running_max + jnp.log2(running_sum)


def _gradient_tile(spec: Spec, seeds, queries, keys, turned: bool, compare):
    """(dropped probabilities, score gradients) of one tile, [bq,bk] or, `turned`, [bk,bq].

    queries: (first position, q, ids, do, log-sum-exp, delta); keys: (first position, k, v, ids).
    `compare`: whether the tile may hold positions that do not see each other.
    The score gradient lacks the factor scale / keep probability, which the caller applies to the
    sum of all tiles.
    """
    start_q, q, ids_q, do, lse, delta = queries
    start_k, k, v, ids_k = keys
    if turned:
        scores, dp = _dot(k, q, (1, 1)), _dot(v, do, (1, 1))
        lse, delta, ids_q, ids_k = lse[None, :], delta[None, :], ids_q[None, :], ids_k[:, None]
    else:
        scores, dp = _dot(q, k, (1, 1)), _dot(do, v, (1, 1))
        lse, delta, ids_q, ids_k = lse[:, None], delta[:, None], ids_q[:, None], ids_k[None, :]
    p = jnp.exp2(scores * (spec.scale * _LOG2_E) - lse)
    p = _compared(compare, spec, ids_q, ids_k, start_q, start_k, p, 0.0)
    dropped = p
    if spec.rate > 0.0:
        keep = tile_keep_mask(*seeds, start_q, start_k, p.shape, spec.rate, transposed=turned)
        dropped, dp = jnp.where(keep, p, 0.0), jnp.where(keep, dp, 0.0)
    ds = p * (dp - delta)
    return dropped.astype(q.dtype), ds.astype(q.dtype)


def row_delta(o: jax.Array, do: jax.Array, rate: float) -> jax.Array:
    """Sums of do * o over a head, times the keep probability that `_gradient_tile` leaves out."""
    product = o.astype(jnp.float32) * do.astype(jnp.float32)
    return jnp.sum(product, axis=-1) * keep_probability(rate)


def backward_fused_kernel(seeds_ref, q_ref, k_ref, v_ref, ids_ref, o_ref, do_ref, lse_ref, *out_refs, spec: Spec):
    """All gradients of one head: for each block of keys, over all blocks of queries."""
    *gradients, partial_ref = out_refs
    length, head = q_ref.shape
    block_q = block_size(length, spec.tiling.backward_block_q)
    block_k = block_size(length, spec.tiling.backward_block_k)
    queries, keys = length // block_q, length // block_k
    seeds = seeds_ref[0], seeds_ref[1]
    inverse_keep = 1.0 / keep_probability(spec.rate)
    zero = jnp.zeros((block_k, head), jnp.float32)

    for key_index in range(keys):
        start_k = key_index * block_k
        at_k = pl.ds(start_k, block_k)
        k = k_ref[at_k, :]
        of_keys = start_k, k, v_ref[at_k, :], ids_ref[at_k]

        def tile(index, carry, key_index=key_index, k=k, of_keys=of_keys):
            dk, dv = carry
            start_q = index * block_q
            at_q = pl.ds(start_q, block_q)
            q, do = q_ref[at_q, :], do_ref[at_q, :]
            delta = row_delta(o_ref[at_q, :], do, spec.rate)
            of_queries = start_q, q, ids_ref[at_q], do, lse_ref[at_q], delta
            dropped, ds = _gradient_tile(spec, seeds, of_queries, of_keys, turned=True, compare=True)
            dv = dv + _dot(dropped, do, (1, 0))
            dk = dk + _dot(ds, q, (1, 0))
            dq = _dot(ds, k, (0, 0))
            if key_index > 0:
                dq = dq + partial_ref[at_q, :]
            if key_index == keys - 1:
                _put(spec, gradients, Q, at_q, dq * (spec.scale * inverse_keep))
            else:
                partial_ref[at_q, :] = dq
            return dk, dv

        if queries == 1:
            dk, dv = tile(0, (zero, zero))
        else:
            dk, dv = lax.fori_loop(0, queries, tile, (zero, zero))
        _put(spec, gradients, K, at_k, dk * (spec.scale * inverse_keep))
        _put(spec, gradients, V, at_k, dv * inverse_keep)
        if keys > 1 and not spec.interpret:
            plgpu.debug_barrier()  # the next pass reads what other threads of this one wrote


def backward_twin_kernel(
    seeds_ref, bounds_ref, q_ref, k_ref, v_ref, ids_ref, do_ref, lse_ref, delta_ref, *gradients, spec: Spec
):
    """Block i of one head: dk and dv of its keys, then dq of its queries.

    Every program goes over all queries, so delta comes ready made: working it out here cost more
    than the pass over o and its gradient that makes it.
    """
    length, head = q_ref.shape
    block = block_size(length, spec.tiling.backward_block_q)
    mine, own = pl.program_id(0) * block, pl.ds(0, block)
    seeds = seeds_ref[0], seeds_ref[1]
    zero = jnp.zeros((block, head), jnp.float32)
    inverse_keep = 1.0 / keep_probability(spec.rate)

    def queries(start):
        at = pl.ds(start, block)
        return start, q_ref[at, :], ids_ref[at], do_ref[at, :], lse_ref[at], delta_ref[at]

    def keys(start):
        at = pl.ds(start, block)
        return start, k_ref[at, :], v_ref[at, :], ids_ref[at]

    my_queries, my_keys = queries(mine), keys(mine)

    def over_queries(index, carry, compare):
        dk, dv = carry
        _, q, _, do, _, _ = of_queries = queries(index * block)
        dropped, ds = _gradient_tile(spec, seeds, of_queries, my_keys, turned=True, compare=compare)
        dv = dv + _dot(dropped, do, (1, 0))
        dk = dk + _dot(ds, q, (1, 0))
        return dk, dv

    loop = functools.partial(visit, bounds_ref, length // block, spec.tiling.backward_bounded)
    dk, dv = loop(over_queries, (zero, zero))
    _put(spec, gradients, K, own, dk * (spec.scale * inverse_keep))
    _put(spec, gradients, V, own, dv * inverse_keep)

    def over_keys(index, dq, compare):
        _, k, _, _ = of_keys = keys(index * block)
        _, ds = _gradient_tile(spec, seeds, my_queries, of_keys, turned=False, compare=compare)
        return dq + _dot(ds, k, (1, 0))

    dq = loop(over_keys, zero)
    _put(spec, gradients, Q, own, dq * (spec.scale * inverse_keep))
