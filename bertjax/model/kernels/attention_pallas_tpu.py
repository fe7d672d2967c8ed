"""Fused bidirectional attention for TPUs, with the dropout of the reference path.

    q, k, v [B,T,A,D] + attention_mask [B,T] + stream seeds [B,A,2]  ->  context [B,T,A,D]

Written in Pallas for its Mosaic backend. A program works on one row and on as many heads as fill
the 128 lanes of a register (two of BERT's): for a block of queries it has the scores of all keys at
once in the chip's own memory, so that neither scores nor probabilities reach HBM, softmax needs no
running maximum, and backward keeps nothing but q, k, v and the context.

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
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from bertjax.model.kernels.dropout_bits import keep_probability, rows_keep_mask, stream_seeds
from bertjax.model.mesh import current_mesh, on_each_share

LANES = 128
LONGEST = 2048  # tokens of a row: beyond, a block's scores do not fit
BLOCK = 256  # queries at a time; 512 is 5 % faster in backward and takes thrice as long to compile
_MASKED = -1e30
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Everything static: the dropout rate, the size D of a head, where rows and heads lie."""

    rate: float
    head: int
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


def _probabilities(q, k, ids_q, ids_k, spec: _Spec) -> tuple[jax.Array, jax.Array]:
    """(exp(scores - their maximum) [n,T], its row sums [n,1]) of one head's queries, float32."""
    scores = _dot(q, k, (1, 1), spec) * (spec.scale * _LOG2_E)
    scores = jnp.where(ids_q == ids_k, scores, _MASKED)
    p = jnp.exp2(scores - jnp.max(scores, axis=1, keepdims=True))
    return p, jnp.sum(p, axis=1, keepdims=True)


def _over_queries(length: int, block) -> None:
    """block(start, queries) for all queries of the row."""
    queries = math.gcd(length, BLOCK)
    if queries == length:
        block(0, queries)
    else:
        pl.loop(0, length // queries)(lambda i: block(i * queries, queries))


def _keep(seeds, h: int, start, shape, spec: _Spec):
    return rows_keep_mask(seeds[2 * h], seeds[2 * h + 1], start, shape, spec.rate)


def _seeds_of(seeds_ref, spec: _Spec) -> list[jax.Array]:
    """The two words of each head of this program."""
    first = 2 * spec.together * pl.program_id(1)
    return [seeds_ref[0, first + i] for i in range(2 * spec.together)]


def _forward_kernel(seeds_ref, q_ref, k_ref, v_ref, ids_q_ref, ids_k_ref, o_ref, *, spec: _Spec):
    seeds = _seeds_of(seeds_ref, spec)
    k, v, ids_k = k_ref[...], v_ref[...], ids_k_ref[...]

    def block(start, queries):
        at = pl.ds(start, queries)
        q, ids_q = q_ref[at, :], ids_q_ref[at, :]
        out = jnp.zeros((queries, LANES), jnp.float32)
        for h in range(spec.together):
            p, total = _probabilities(_lanes_of(h, q, spec), k, ids_q, ids_k, spec)
            if spec.rate > 0.0:
                p = jnp.where(_keep(seeds, h, start, p.shape, spec), p, 0.0)
            o = _dot(p.astype(v.dtype), v, (1, 0), spec)
            o = o * (1.0 / (total * keep_probability(spec.rate)))
            out = out + _lanes_of(h, o, spec)
        o_ref[at, :] = out.astype(o_ref.dtype)

    _over_queries(q_ref.shape[0], block)


def _backward_kernel(
    seeds_ref,
    q_ref,
    k_ref,
    v_ref,
    ids_q_ref,
    ids_k_ref,
    o_ref,
    do_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    dk_sum,
    dv_sum,
    *,
    spec: _Spec,
):
    seeds = _seeds_of(seeds_ref, spec)
    k, v, ids_k = k_ref[...], v_ref[...], ids_k_ref[...]
    kept = keep_probability(spec.rate)
    dk_sum[...] = jnp.zeros_like(dk_sum)
    dv_sum[...] = jnp.zeros_like(dv_sum)

    def block(start, queries):
        at = pl.ds(start, queries)
        q, do, ids_q = q_ref[at, :], do_ref[at, :], ids_q_ref[at, :]
        product = o_ref[at, :].astype(jnp.float32) * do.astype(jnp.float32)
        dq = jnp.zeros((queries, LANES), jnp.float32)
        dk = jnp.zeros(dk_sum.shape, jnp.float32)
        dv = jnp.zeros(dv_sum.shape, jnp.float32)
        for h in range(spec.together):
            p, total = _probabilities(_lanes_of(h, q, spec), k, ids_q, ids_k, spec)
            p = p * (1.0 / total)
            dp = _dot(_lanes_of(h, do, spec), v, (1, 1), spec)
            dropped = p
            if spec.rate > 0.0:
                keep = _keep(seeds, h, start, p.shape, spec)
                dropped, dp = jnp.where(keep, p, 0.0), jnp.where(keep, dp, 0.0)
            delta = jnp.sum(_lanes_of(h, product, spec), axis=1, keepdims=True) * kept
            ds = (p * (dp - delta)).astype(k.dtype)
            dq = dq + _lanes_of(h, _dot(ds, k, (1, 0), spec), spec)
            dk = dk + _lanes_of(h, _dot(ds, q, (0, 0), spec), spec)
            dv = dv + _lanes_of(h, _dot(dropped.astype(do.dtype), do, (0, 0), spec), spec)
        dq_ref[at, :] = (dq * (spec.scale / kept)).astype(dq_ref.dtype)
        dk_sum[...] += dk
        dv_sum[...] += dv

    _over_queries(q_ref.shape[0], block)
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
    weights = batch * padded * length * length
    call = functools.partial(
        pl.pallas_call,
        functools.partial(kernel, spec=spec),
        grid=(batch, padded * head // LANES),
        in_specs=[words, *[block] * 3, of_row(length, 1), of_row(1, length), *[block] * (len(arrays) - 3)],
        out_specs=[block] * results,
        out_shape=[result] * results,
        scratch_shapes=scratch,
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
    no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return no_gradient(ids), no_gradient(seeds), *gradients


_attend.defvjp(_attend_forward, _attend_backward)


def refusal(length: int, head: int) -> str:
    """Why the kernels do not take rows of `length` tokens or heads of `head`; '' = they do."""
    if length % LANES or length > LONGEST:
        return f"rows of {length} tokens: it takes multiples of {LANES} up to {LONGEST}"
    if LANES % head:
        return f"heads of size {head}: it takes divisors of {LANES}"
    return ""


def attention(query, key, value, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False) -> jax.Array:
    """As attention_reference.attention, with the same dropout bits; bfloat16 is the fast type.

    Raises ValueError for rows or heads that the kernels do not take.
    """
    batch, length, heads, head = query.shape
    if reason := refusal(length, head):
        raise ValueError(f"attention='pallas_tpu' does not take {reason}; use 'reference'")
    rate = 0.0 if dropout_key is None else dropout_rate
    seeds = jnp.zeros((batch, heads, 2), jnp.uint32) if dropout_key is None else stream_seeds(dropout_key, batch, heads)
    mesh = current_mesh()
    chip = (jax.devices() if mesh is None else mesh.devices.flat)[0].device_kind
    spec = _Spec(float(rate), head, mesh, widen=chip.startswith(("TPU v2", "TPU v3")))
    return _attend(spec, attention_mask.astype(jnp.int32), seeds, query, key, value)
