"""Fused bidirectional attention for TPUs, with the dropout of the reference path.

    q, k, v [B,T,A,D] + attention_mask [B,T] + stream seeds [B,A,2]  ->  context [B,T,A,D]

Written in Pallas for its Mosaic backend. A program works on one row and on as many heads as fill
the 128 lanes of a register (two of BERT's): for a block of queries it has the scores of all keys, or
of those in its window, at once in the chip's own memory, so that neither scores nor probabilities
reach HBM and backward keeps nothing but q, k, v and the context. Only the keys of long rows without a
window come a chunk at a time, under a running maximum, and backward finds the maximum again first.

Heads are never cut apart. With two heads side by side in the lanes, q with the other head's lanes
set to zero times k gives one head's scores, and of p times v one head's lanes are kept: a product
over 64 lanes would occupy the 128 of the matrix unit just the same.

The mask is a comparison of segment ids, and dropout bits are a hash of (key, row, head, query, key
position); see `dropout_bits`. Each kernel runs on its shard: rows and heads may be split.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from bertjax.model.kernels.attention_reference import seen_window
from bertjax.model.kernels.dropout_bits import keep_probability, rows_keep_mask, stream_seeds
from bertjax.model.mesh import current_mesh, on_each_share

LANES = 128
WHOLE = 2048  # keys at a time: the scores of more do not fit
LONGEST = 8192  # tokens of a row, which lies in the chip's own memory as a whole
SHORT = 1024  # up to here that takes 16 MB, which is what SMALL_CHIPS have and compilers allow if not asked
SMALL_CHIPS = ("TPU v2", "TPU v3", "TPU v4")
BLOCK = 256  # queries at a time; 512 is 5 % faster in backward and takes thrice as long to compile
_LONG_ROWS_MEMORY = 60 << 20
_MASKED = -1e30
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Everything static: the dropout rate, the size D of a head, the window, where rows and heads lie."""

    rate: float
    head: int
    window: int | None
    mesh: Mesh | None
    widen: bool  # a 16-bit product is written as one of float32: v2 and v3 know no other

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head)

    @property
    def together(self) -> int:
        """Heads of a program."""
        return LANES // self.head


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], spec: _Spec) -> jax.Array:
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    if spec.widen:  # in the default precision the matrix unit rounds to bfloat16 again
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, exact, preferred_element_type=jnp.float32)


def _lanes_of(h: int, x: jax.Array, spec: _Spec) -> jax.Array:
    """x [n, LANES] with the lanes of all heads but the h-th set to zero."""
    if spec.together == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    own = (lane >= h * spec.head) & (lane < (h + 1) * spec.head)
    return jnp.where(own, x, jnp.zeros_like(x))


def _scores(q, k, ids_q, ids_k, start_q, start_k, spec: _Spec) -> jax.Array:
    """One head's scores [n,m] in units of log 2, float32."""
    scores = _dot(q, k, (1, 1), spec) * (spec.scale * _LOG2_E)
    visible = ids_q == ids_k
    if spec.window is not None:
        places = [lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis, x in enumerate((ids_q, ids_k))]
        visible &= jnp.abs(places[0] - places[1] + (start_q - start_k)) <= spec.window
    return jnp.where(visible, scores, _MASKED)


def _chunk(length: int, queries: int, spec: _Spec) -> int:
    """Keys that a block of queries meets at a time."""
    if spec.window is not None:
        return min(length, queries + 2 * (spec.window + -spec.window % LANES))
    return length if length <= WHOLE else math.gcd(length, WHOLE)


def _over_keys(chunk: int, start, queries: int, length: int, spec: _Spec, visit, carry):
    """`carry` taken through visit(first key, carry) for the chunks of keys that the queries may see."""
    if chunk == length:
        return visit(0, carry)
    if spec.window is None:
        return lax.fori_loop(0, length // chunk, lambda i, carry: visit(pl.multiple_of(i * chunk, LANES), carry), carry)
    first = jnp.clip(start - (chunk - queries) // 2, 0, length - chunk)
    return visit(pl.multiple_of(first, LANES), carry)


def _over_queries(length: int, block) -> None:
    """block(start, queries) for all queries of the row."""
    queries = math.gcd(length, BLOCK)
    if queries == length:
        block(0, queries)
    else:
        pl.loop(0, length // queries)(lambda i: block(i * queries, queries))


def _keep(seeds, h: int, start, start_k, shape, spec: _Spec):
    return rows_keep_mask(seeds[2 * h], seeds[2 * h + 1], start, start_k, shape, spec.rate)


def _seeds_of(seeds_ref, spec: _Spec) -> list[jax.Array]:
    """The two words of each head of this program."""
    first = 2 * spec.together * pl.program_id(1)
    return [seeds_ref[0, first + i] for i in range(2 * spec.together)]


def _summed(scores: jax.Array, carry):
    """(exp2(scores - maximum), the correction of what was summed up to now, (maximum, sum [n,1]))."""
    top, total = carry
    highest = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
    p, shrink = jnp.exp2(scores - highest), jnp.exp2(top - highest)
    return p, shrink, (highest, total * shrink + jnp.sum(p, axis=1, keepdims=True))


def _nothing_summed(queries: int):
    return jnp.full((queries, 1), 2 * _MASKED, jnp.float32), jnp.zeros((queries, 1), jnp.float32)


def _forward_kernel(seeds_ref, q_ref, k_ref, v_ref, ids_q_ref, ids_k_ref, o_ref, *, spec: _Spec):
    seeds = _seeds_of(seeds_ref, spec)
    length = q_ref.shape[0]

    def block(start, queries):
        at = pl.ds(start, queries)
        q, ids_q = q_ref[at, :], ids_q_ref[at, :]
        chunk = _chunk(length, queries, spec)
        out = jnp.zeros((queries, LANES), jnp.float32)
        for h in range(spec.together):
            q_h = _lanes_of(h, q, spec)

            def visit(start_k, carry, h=h, q_h=q_h):
                o, sums = carry
                at_k = pl.ds(start_k, chunk)
                v = v_ref[at_k, :]
                p, shrink, sums = _summed(
                    _scores(q_h, k_ref[at_k, :], ids_q, ids_k_ref[:, at_k], start, start_k, spec), sums
                )
                if spec.rate > 0.0:
                    p = jnp.where(_keep(seeds, h, start, start_k, p.shape, spec), p, 0.0)
                return o * shrink + _dot(p.astype(v.dtype), v, (1, 0), spec), sums

            carry = jnp.zeros_like(out), _nothing_summed(queries)
            o, (_, total) = _over_keys(chunk, start, queries, length, spec, visit, carry)
            o = o * (1.0 / (total * keep_probability(spec.rate)))
            out = out + _lanes_of(h, o, spec)
        o_ref[at, :] = out.astype(o_ref.dtype)

    _over_queries(length, block)


def _backward_kernel(seeds_ref, q_ref, k_ref, v_ref, ids_q_ref, ids_k_ref, o_ref, do_ref, *results, spec: _Spec):
    dq_ref, dk_ref, dv_ref, dk_sum, dv_sum = results
    seeds = _seeds_of(seeds_ref, spec)
    length = q_ref.shape[0]
    kept = keep_probability(spec.rate)
    dk_sum[...] = jnp.zeros_like(dk_sum)
    dv_sum[...] = jnp.zeros_like(dv_sum)

    def block(start, queries):
        at = pl.ds(start, queries)
        q, do, ids_q = q_ref[at, :], do_ref[at, :], ids_q_ref[at, :]
        product = o_ref[at, :].astype(jnp.float32) * do.astype(jnp.float32)
        chunk = _chunk(length, queries, spec)
        loop = functools.partial(_over_keys, chunk, start, queries, length, spec)
        qs = [_lanes_of(h, q, spec) for h in range(spec.together)]
        nothing = _nothing_summed(queries)

        def scores(h, start_k):
            at_k = pl.ds(start_k, chunk)
            return _scores(qs[h], k_ref[at_k, :], ids_q, ids_k_ref[:, at_k], start, start_k, spec)

        sums = [nothing] * spec.together
        several = chunk < length and spec.window is None
        if several:
            for h in range(spec.together):
                sums[h] = loop(lambda start_k, carry, h=h: _summed(scores(h, start_k), carry)[2], nothing)

        def visit(start_k, dq):
            at_k = pl.ds(start_k, chunk)
            k, v = k_ref[at_k, :], v_ref[at_k, :]
            dk = jnp.zeros(k.shape, jnp.float32)
            dv = jnp.zeros(v.shape, jnp.float32)
            for h in range(spec.together):
                if several:
                    p, total = jnp.exp2(scores(h, start_k) - sums[h][0]), sums[h][1]
                else:
                    p, _, (_, total) = _summed(scores(h, start_k), nothing)
                p = p * (1.0 / total)
                dp = _dot(_lanes_of(h, do, spec), v, (1, 1), spec)
                dropped = p
                if spec.rate > 0.0:
                    keep = _keep(seeds, h, start, start_k, p.shape, spec)
                    dropped, dp = jnp.where(keep, p, 0.0), jnp.where(keep, dp, 0.0)
                delta = jnp.sum(_lanes_of(h, product, spec), axis=1, keepdims=True) * kept
                ds = (p * (dp - delta)).astype(k.dtype)
                dq = dq + _lanes_of(h, _dot(ds, k, (1, 0), spec), spec)
                dk = dk + _lanes_of(h, _dot(ds, q, (0, 0), spec), spec)
                dv = dv + _lanes_of(h, _dot(dropped.astype(do.dtype), do, (0, 0), spec), spec)
            dk_sum[at_k, :] += dk
            dv_sum[at_k, :] += dv
            return dq

        dq = loop(visit, jnp.zeros((queries, LANES), jnp.float32))
        dq_ref[at, :] = (dq * (spec.scale / kept)).astype(dq_ref.dtype)

    _over_queries(length, block)
    dk_ref[...] = (dk_sum[...] * (spec.scale / kept)).astype(dk_ref.dtype)
    dv_ref[...] = (dv_sum[...] * (1.0 / kept)).astype(dv_ref.dtype)


def _launch(kernel, spec: _Spec, name: str, products: int, results: int, ids, seeds, *arrays):
    """`kernel` over (row, group of heads); arrays and results are [B,T,A,D].

    products: matrix products of T x T x D a head, for the compiler's schedule.
    """
    batch, length, heads, head = arrays[0].shape
    extra = -heads % spec.together  # a shard may hold less than a register of heads

    def pad(x, axis):
        return jnp.pad(x, [(0, extra if axis == i else 0) for i in range(x.ndim)]) if extra else x

    padded = heads + extra
    arrays = [pad(x, 2).reshape(batch, length, padded * head) for x in arrays]
    seeds = pad(seeds, 1).reshape(batch, 1, 2 * padded)
    block = pl.BlockSpec((None, length, LANES), lambda b, g: (b, 0, g))
    of_row = lambda *shape: pl.BlockSpec((None, *shape), lambda b, g: (b, 0, 0))  # noqa: E731
    words = pl.BlockSpec((None, 1, 2 * padded), lambda b, g: (b, 0, 0), memory_space=pltpu.SMEM)
    result = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    scratch = [pltpu.VMEM((length, LANES), jnp.float32)] * 2 if results > 1 else []
    weights = batch * padded * length * (length if spec.window is None else _chunk(length, BLOCK, spec))
    call = functools.partial(
        pl.pallas_call,
        functools.partial(kernel, spec=spec),
        grid=(batch, padded * head // LANES),
        in_specs=[words, *[block] * 3, of_row(length, 1), of_row(1, length), *[block] * (len(arrays) - 3)],
        out_specs=[block] * results,
        out_shape=[result] * results,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_LONG_ROWS_MEMORY if length > SHORT else None),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * weights * head,
            transcendentals=weights,
            bytes_accessed=(len(arrays) + results) * arrays[0].size * arrays[0].dtype.itemsize,
        ),
        name=name,
    )
    # Elsewhere (tests) the kernel is imitated by ordinary operations. Decided when the program is
    # lowered, since that may be for chips that this machine does not have.
    outputs = lax.platform_dependent(
        seeds, *arrays[:3], ids[:, :, None], ids[:, None, :], *arrays[3:], tpu=call(), default=call(interpret=True)
    )
    return [x.reshape(batch, length, padded, head)[:, :, :heads] for x in outputs]


def _forward(ids, seeds, q, k, v, *, spec: _Spec):
    return _launch(_forward_kernel, spec, "attention_forward", 2, 1, ids, seeds, q, k, v)


def _backward(ids, seeds, q, k, v, o, do, *, spec: _Spec):
    return _launch(_backward_kernel, spec, "attention_backward", 5, 3, ids, seeds, q, k, v, o, do)


def _run(spec: _Spec, function, gives: int, ids, seeds, *arrays):
    """`_forward` or `_backward` on each device's rows and heads."""
    takes = "bt bas" + " btad" * len(arrays)
    run = on_each_share(functools.partial(function, spec=spec), spec.mesh, takes, " btad" * gives)
    return run(ids, seeds, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: _Spec, ids, seeds, q, k, v):
    return _run(spec, _forward, 1, ids, seeds, q, k, v)[0]


def _attend_forward(spec, ids, seeds, q, k, v):
    # Named so that a rematerialisation policy can keep it and never run the forward kernel twice.
    o = checkpoint_name(_attend(spec, ids, seeds, q, k, v), "attention_residuals")
    return o, (ids, seeds, q, k, v, o)


def _attend_backward(spec, residuals, do):
    ids, seeds, q, k, v, o = residuals
    gradients = _run(spec, _backward, 3, ids, seeds, q, k, v, o, do.astype(o.dtype))
    return None, None, *gradients


_attend.defvjp(_attend_forward, _attend_backward)


def refusal(length: int, head: int) -> str:
    """Why the kernels do not take rows of `length` tokens or heads of `head`; '' = they do."""
    longest = SHORT if _chip().startswith(SMALL_CHIPS) else LONGEST
    if length % LANES or length > longest:
        return f"rows of {length} tokens: it takes multiples of {LANES} up to {longest}"
    if LANES % head:
        return f"heads of size {head}: it takes divisors of {LANES}"
    return ""


def _chip() -> str:
    mesh = current_mesh()
    return (jax.devices() if mesh is None else mesh.devices.flat)[0].device_kind


def attention(
    query, key, value, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False, window=None
) -> jax.Array:
    """As attention_reference.attention, with the same dropout bits; bfloat16 is the fast type.

    Raises ValueError for rows or heads that the kernels do not take.
    """
    batch, length, heads, head = query.shape
    if reason := refusal(length, head):
        raise ValueError(f"--config.execution.kernels=pallas_tpu does not take {reason}; use reference")
    rate = 0.0 if dropout_key is None else dropout_rate
    seeds = jnp.zeros((batch, heads, 2), jnp.uint32) if dropout_key is None else stream_seeds(dropout_key, batch, heads)
    widen = _chip().startswith(("TPU v2", "TPU v3"))
    spec = _Spec(float(rate), head, seen_window(window, length), current_mesh(), widen)
    return _attend(spec, attention_mask.astype(jnp.int32), seeds, query, key, value)
