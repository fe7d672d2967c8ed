"""Fused bidirectional attention for NVIDIA GPUs, with dropout that can be drawn again.

    q, k, v [B,T,A,D] + attention_mask [B,T] + stream seeds [B,A,2]  ->  context [B,T,A,D]

The programs are in gpu_programs. The scores never reach device memory: forward keeps the
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

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from bertjax.model.kernels.attention_reference import seen_window
from bertjax.model.kernels.dropout_bits import keep_probability, stream_seeds, word_threshold
from bertjax.model.kernels.gpu_launch import launch, writes_in_place
from bertjax.model.kernels.rotary import turned, turned_in_place
from bertjax.model.layers import add_bias
from bertjax.model.mesh import current_mesh, on_each_share

_PADDING_ID = -1
"""Mask value of rows added to reach a multiple of the tile: no real token carries it."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch shape of the kernels; speed only, never the result's meaning.

    Attributes:
      block_q, block_k, warps, stages: of the forward kernel.
      backward_block, backward_over, backward_warps, backward_stages: of the backward kernel: tokens
        of a program, and how many others it meets at a time. It multiplies seven times a tile: for
        dk and dv of its keys it goes over all queries, then for dq over all keys.
      dq_block, dq_warps: of a second launch that makes dq, whose programs take fewer registers and so more queries:
        faster where rows are long. 0: one launch makes all three.
      bounded: visit only the tiles that segments and window let be seen. Forward pays for the loop of
        unknown length (8 % where rows are full), so it is bounded for packed rows and windows alone;
        backward always is.
    """

    block_q: int = 64
    block_k: int = 64
    warps: int = 4
    stages: int = 3
    backward_block: int = 64
    backward_over: int = 32
    backward_warps: int = 4
    backward_stages: int = 3
    dq_block: int = 0
    dq_warps: int = 8
    bounded: bool = False

    @classmethod
    def for_length(cls, length: int, several_pairs: bool = False, window: int | None = None) -> Tiling:
        """The tiling to use for rows of `length` tokens, tuned on an H200."""
        if several_pairs or (window is not None and length > 128):
            return cls(bounded=True)
        return cls(backward_over=64, dq_block=128) if length >= 1024 else cls()


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static that a kernel needs.

    `joined`: q, k, v are one array [B,T,3,A,D], whose gradient is written as one too.
    `window`: a position sees none that is further away.
    `turned`: queries and keys are turned by their positions, and their gradients turned back.
    `mesh`: where rows and heads lie; a program sees nothing of it.
    """

    rate: float
    scale: float
    tiling: Tiling
    joined: bool
    window: int | None
    turned: bool = False
    mesh: Mesh | None = None


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


def _dimensions(qkv, spec: Spec) -> tuple[int, int, int, int]:
    """B, T, A, D."""
    return qkv[0].shape[:2] + qkv[0].shape[-2:] if spec.joined else qkv[0].shape


def _constants(spec: Spec, length: int, heads: int, head: int) -> dict[str, int | float]:
    """What all programs know when they are compiled; see gpu_programs."""
    return {
        "LENGTH": length,
        "HEADS": heads,
        "HEAD": head,
        "JOINED": spec.joined,
        "SCALE": spec.scale * math.log2(math.e),
        "KEEP": keep_probability(spec.rate),
        "THRESHOLD": word_threshold(spec.rate),
        "WINDOW": -1 if spec.window is None else spec.window,
    }


def _forward(ids, seeds, *qkv, spec: Spec):
    """One shard's forward pass -> context [B,T,A,D], log2-sum-exp2 [B,A,T] float32."""
    batch, length, heads, head = _dimensions(qkv, spec)
    tiling = spec.tiling
    block_q, block_k = math.gcd(length, tiling.block_q), math.gcd(length, tiling.block_k)
    bounds = tile_bounds(ids, block_q, block_k, spec.window)
    context = jax.ShapeDtypeStruct((batch, length, heads, head), qkv[0].dtype)
    sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    arrays = seeds, bounds, *(qkv * 3 if spec.joined else qkv), ids
    grid, how = (length // block_q, heads, batch), (tiling.warps, tiling.stages)
    constants = _constants(spec, length, heads, head)
    blocks = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BOUNDED": tiling.bounded}
    return launch("attention_forward", grid, arrays, [context, sums], *how, **constants, **blocks)


def _backward(ids, seeds, o, lse, do, *rest, spec: Spec):
    """One shard's gradients, laid out as q, k and v; `rest` is the angles, if spec.turned, and q, k and v."""
    turn, qkv = (rest[:2], rest[2:]) if spec.turned else ((), rest)
    batch, length, heads, head = _dimensions(qkv, spec)
    tiling = spec.tiling
    keep = keep_probability(spec.rate)
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1) * keep
    delta = delta.transpose(0, 2, 1)
    over = math.gcd(length, tiling.backward_over)
    constants = _constants(spec, length, heads, head) | {"FACTOR": spec.scale / keep, "OVER": over}
    constants |= {"TURNED": bool(turn), "PERIOD": turn[0].shape[0] if turn else 1}

    def run(block: int, warps: int, keys: bool, queries: bool, results, before=()):
        """dk and dv, dq, or all three; `before`: the first result, written in part."""
        block = math.gcd(length, block)
        bounds = tile_bounds(ids, block, over, spec.window)
        arrays = [seeds, bounds, *(qkv * 3 if spec.joined else qkv), ids, do, lse, delta, *(turn or (delta, delta))]
        how = {"in_place": len(arrays)} if before else {}
        how |= constants | {"BLOCK": block, "OF_KEYS": keys, "OF_QUERIES": queries}
        grid = length // block, heads, batch
        arrays += before
        return launch("attention_backward", grid, arrays, results, warps, tiling.backward_stages, **how)

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
    nothing = jax.ShapeDtypeStruct((1,), qkv[0].dtype)  # for an argument that is not written
    if spec.joined:
        results += [nothing] * 2
    of_keys, of_queries = (tiling.backward_block, tiling.backward_warps), (tiling.dq_block, tiling.dq_warps)
    if not tiling.dq_block or (spec.joined and not writes_in_place()):
        gradients = run(*of_keys, True, True, results)
    elif spec.joined:
        joined, *_ = run(*of_keys, True, False, results)
        gradients = run(*of_queries, False, True, results, [joined])
    else:
        _, dk, dv = run(*of_keys, True, False, [nothing, *results[1:]])
        dq, *_ = run(*of_queries, False, True, [results[0], nothing, nothing])
        gradients = dq, dk, dv
    return gradients[: len(qkv)]


def _run(spec: Spec, backward: bool, *args):
    """`_forward` or `_backward` on each device's rows and heads."""
    qkv = "btcad" if spec.joined else "btad btad btad"  # c = query, key, value
    context = "btad bat"  # and log-sum-exp
    if backward:
        angles = _angles(args[5]) if spec.turned else ""
        function, takes, gives = _backward, f"bt bas {context} btad {angles} {qkv}", qkv
    else:
        function, takes, gives = _forward, f"bt bas {qkv}", context
    run = on_each_share(functools.partial(function, spec=spec), spec.mesh, takes, gives)
    return run(*args)


def _angles(cos: jax.Array) -> str:
    """Axes of cosines and sines for `on_each_share`: those of each row, or the same for all."""
    return "xtd xtd" if cos.shape[0] == 1 else "btd btd"


def _prepared(spec: Spec, bias: jax.Array | None, turn: tuple[jax.Array, ...], qkv):
    """`qkv` itself, or the product in it plus the bias [3,A,D], and turned, as [B,T,3,A,D]."""
    if bias is not None:
        (product,) = qkv
        biased = product + bias.reshape(-1).astype(product.dtype)
        qkv = (biased.reshape(*product.shape[:2], *bias.shape),)
    if turn:
        takes = f"btcad {_angles(turn[0])}"
        qkv = on_each_share(lambda *args: (turned_in_place(*args),), spec.mesh, takes, "btcad")(*qkv, *turn)
    return qkv


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, ids, seeds, bias, turn, *qkv):
    return _run(spec, False, ids, seeds, *_prepared(spec, bias, turn, qkv))[0]


def _attend_forward(spec, ids, seeds, bias, turn, *qkv):
    qkv = _prepared(spec, bias, turn, qkv)
    o, lse = _run(spec, False, ids, seeds, *qkv)
    # Named so that a rematerialisation policy can keep them and never run the forward kernel twice.
    o, lse = checkpoint_name(o, "attention_residuals"), checkpoint_name(lse, "attention_residuals")
    return o, (ids, seeds, bias, turn, o, lse, qkv)


def _attend_backward(spec, residuals, do):
    ids, seeds, bias, turn, o, lse, qkv = residuals
    gradients = _run(spec, True, ids, seeds, o, lse, do.astype(o.dtype), *turn, *qkv)
    dbias = None
    if bias is not None:
        # Not summed inside the kernel, although it holds the numbers: measured, that costs more
        # (8 % of the kernel) than this pass over memory. The keys' bias has no gradient unless they are
        # turned: it adds the same to all scores of a query, which softmax does not see.
        (joined,) = gradients
        parts = (0, 1, 2) if turn else (0, 2)
        summed = {part: jnp.sum(joined[:, :, part].astype(jnp.float32), axis=(0, 1)) for part in parts}
        dbias = jnp.stack([summed.get(part, jnp.zeros_like(summed[0])) for part in range(3)])
        gradients = (joined.reshape(*joined.shape[:2], -1),)
    return None, None, dbias, None, *gradients


_attend.defvjp(_attend_forward, _attend_backward)


def flash_attention(
    qkv, attention_mask, seeds=None, dropout_rate=0.0, tiling=None, window=None, bias=None, turn=None
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with dropout on the probabilities, fused.

    Args:
      qkv: (q, k, v), [B, T, A, D] of one floating type; bfloat16 is the fast one. D a power of two of at
        least 16. Or (product,), what they lie in side by side: [B, T, 3, A, D], and [B, T, 3 A D] with a
        bias. It is read in place, and its gradient written as a whole, without the copies that splitting
        and joining cost; not for heads sharded over devices.
      attention_mask, window: as of attention_reference.attention.
      seeds: uint32 [B, A, 2] of `dropout_bits.stream_seeds`, needed when dropout_rate > 0.
      dropout_rate: of the attention weights; kept ones are divided by `keep_probability` of it.
      tiling: a Tiling; by default `Tiling.for_length(T)`.
      bias: [3, A, D], still to be added to a product.
      turn: cosines and sines (rotary.Turn) by which queries and keys of a product are still to be turned.

    Returns:
      [B, T, A, D], in q's type. Softmax and sums are float32.

    Raises:
      ValueError: for shapes the kernels do not take, or dropout without seeds.
    """
    if any(x.shape != qkv[0].shape for x in qkv):
        raise ValueError(f"q, k, v must share one shape, got {', '.join(str(x.shape) for x in qkv)}")
    batch, length = qkv[0].shape[:2]
    heads, head = (qkv[0] if bias is None else bias).shape[-2:]
    if head < 16 or head & (head - 1):
        raise ValueError(
            f"--config.execution.kernels=triton needs heads of a power of two >= 16, not of {head}; use reference"
        )
    bias = None if bias is None else bias.astype(jnp.float32)
    if seeds is None:
        if dropout_rate > 0.0:
            raise ValueError("dropout_rate > 0 needs seeds (dropout_bits.stream_seeds)")
        seeds = jnp.zeros((batch, heads, 2), jnp.uint32)
    extra = -length % (16 if length <= 64 else 64 if length <= 256 else 128)
    ids = jnp.pad(attention_mask.astype(jnp.int32), ((0, 0), (0, extra)), constant_values=_PADDING_ID)
    window = seen_window(window, length)
    tiling = tiling or Tiling.for_length(length + extra, window=window)
    if turn is not None and not writes_in_place():
        if bias is not None:
            qkv, bias = (add_bias(qkv[0], bias.reshape(-1)).reshape(batch, length, *bias.shape),), None
        qkv, turn = (turned(*qkv, turn),), None
    how = len(qkv) == 1, window, turn is not None, current_mesh()
    spec = Spec(float(dropout_rate), 1.0 / math.sqrt(head), tiling, *how)
    turn, qkv = (
        tuple(jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2))) for x in each) for each in (turn or (), qkv)
    )
    return _attend(spec, ids, seeds, bias, turn, *qkv)[:, :length]


def attention(query, key, value, attention_mask, *how, **window) -> jax.Array:
    """As attention_reference.attention, with the same dropout bits.

    Runs interpreted (slowly) without a GPU, which is what tests on the CPU use.
    """
    return _attention((query, key, value), None, attention_mask, *how, **window)


def joined_attention(product, bias, attention_mask, *how, **options) -> jax.Array:
    """`attention` for a product [B, T, 3 A D] and its bias [3, A, D], or [B, T, 3, A, D] and None; see
    `flash_attention` for its `turn`."""
    return _attention((product,), bias, attention_mask, *how, **options)


def _attention(
    qkv, bias, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False, window=None, turn=None
) -> jax.Array:
    (batch, length), heads = qkv[0].shape[:2], (qkv[0] if bias is None else bias).shape[-2]
    rate = 0.0 if dropout_key is None else dropout_rate
    seeds = stream_seeds(dropout_key, batch, heads) if rate > 0.0 else None
    tiling = Tiling.for_length(length, several_pairs, seen_window(window, length))
    return flash_attention(qkv, attention_mask, seeds, rate, tiling, window, bias, turn)
