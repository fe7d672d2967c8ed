"""LayerNorm(residual + dropout(h + b)) in one pass over memory, forward and backward (GPU).

    h, residual [B,T,H], b [H]  ->  y [B,T,H], twice, or the sum and y

XLA splits this chain into about eight memory-bound kernels a site, among them a float32 array
written only to be summed. Here forward reads h and the residual and writes the sum z and y;
backward reads z and the cotangents and writes the two gradients and, for each program, one partial
sum of the gradients of scale, bias and b. b is the bias of the product that makes h: its gradient
costs nothing here and a pass over memory anywhere else. The dropout mask is never stored: it is
drawn again from (key, token, column), see `dropout_bits.hidden_words`. The programs are in
gpu_row_programs.

y is returned twice so that its two uses, the residual branch and the next product, hand back two
cotangents: the backward kernel adds them in registers instead of XLA in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from bertjax.model.kernels.dropout_bits import keep_probability, key_words, word_threshold
from bertjax.model.kernels.gpu_launch import launch
from bertjax.model.mesh import current_mesh, on_each_share

Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Spec:
    rate: float
    epsilon: float
    before: bool
    biased: bool  # whether there is a bias, of the norm or of the product
    mesh: Mesh | None


# (rows, warps) of a program and, backward, the rows that one partial sum is made of: what was fastest on an H200.
def _forward_shape(width: int) -> tuple[int, int]:
    return (2, 2) if width >= 1024 else (8, 1)


def _backward_rows(width: int, biased: bool) -> int:
    return 16 if width >= 1024 or not biased else 32


def _constants(spec: _Spec, width: int, rows: int) -> dict[str, int | float]:
    """What the programs know when they are compiled; see gpu_row_programs."""
    first = 1 << (width.bit_length() - 1)
    rest = 1 << (width - first - 1).bit_length() if width > first else 0
    return {
        "WIDTH": width,
        "FIRST": first,
        "REST": rest,
        "ROWS": rows,
        "THRESHOLD": word_threshold(spec.rate),
        "FACTOR": 1.0 / keep_probability(spec.rate),
        "EPSILON": spec.epsilon,
    }


def _forward(h, b, r, scale, bias, words, tokens, *, spec: _Spec):
    """One shard's y and z, [B,T,H]."""
    batch, length, width = h.shape
    count = batch * length
    rows, warps = _forward_shape(width)
    rows = math.gcd(count, rows)
    flat = jax.ShapeDtypeStruct((count, width), h.dtype)
    arrays = words, tokens, h, b, r, scale, bias
    constants = _constants(spec, width, rows)
    y, z = launch("residual_norm_forward", (count // rows,), arrays, [flat] * 2, warps, **constants)
    return y.reshape(h.shape), z.reshape(h.shape)


def _backward(z, dz, dy, scale, words, tokens, *, spec: _Spec):
    """One shard's dh, dr [B,T,H] and partial sums [B, programs a row, 3, H], of scale, bias and b, or only of scale."""
    batch, length, width = z.shape
    count = batch * length
    rows, parts = math.gcd(length, _backward_rows(width, spec.biased)), 3 if spec.biased else 1
    flat = jax.ShapeDtypeStruct((count, width), z.dtype)
    of_h = flat if spec.rate else jax.ShapeDtypeStruct((1, 1), z.dtype)  # not written without dropout
    results = [of_h, flat, jax.ShapeDtypeStruct((count // rows, parts, width), jnp.float32)]
    arrays, constants = (words, tokens, z, dz, dy, scale), _constants(spec, width, rows)
    constants |= {"BEFORE": spec.before, "BIASED": spec.biased}
    dh, dr, sums = launch("residual_norm_backward", (count // rows,), arrays, results, **constants)
    dh = dh if spec.rate else dr
    return (dh.reshape(z.shape), dr.reshape(z.shape), sums.reshape(batch, length // rows, parts, width))


def _run(spec: _Spec, backward: bool, *args):
    """`_forward` or `_backward` on each device's rows."""
    function, takes, gives = (
        (_backward, "bth bth bth h w bt", "bth bth bnsh") if backward else (_forward, "bth h bth h h w bt", "bth bth")
    )
    run = on_each_share(functools.partial(function, spec=spec), spec.mesh, takes, gives)
    return run(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(spec: _Spec, h, b, r, scale, bias, words, tokens):
    y, z = _run(spec, False, h, b, r, scale, bias, words, tokens)
    return z if spec.before else y, y


def _norm_forward(spec, h, b, r, scale, bias, words, tokens):
    y, z = _run(spec, False, h, b, r, scale, bias, words, tokens)
    return (z if spec.before else y, y), (z, scale, words, tokens)


def _norm_backward(spec, residuals, cotangents):
    z, scale, words, tokens = residuals
    dz, dy = (c.astype(z.dtype) for c in cotangents)
    dh, dr, sums = _run(spec, True, z, dz, dy, scale, words, tokens)
    dscale, *biases = jnp.sum(sums, axis=(0, 1))
    dbias, db = biases or (None, None)
    return dh, db, dr, dscale, dbias, None, None


_norm.defvjp(_norm_forward, _norm_backward)


def residual_layer_norm(
    h, h_bias, residual, scale, bias, words=None, dropout_rate=0.0, epsilon=1e-12, before=False
) -> Pair:
    """LayerNorm(residual + dropout(h + h_bias)), twice: see the module's docstring.

    Args:
      h, residual: [B, T, H] of one type; H a multiple of 16.
      h_bias: float32 [H], or None.
      scale, bias: float32 [H], of the LayerNorm; bias may be None.
      words: uint32 [2] of `dropout_bits.key_words`, needed when dropout_rate > 0.
      dropout_rate, epsilon: Python floats.
      before: return the sum beside its norm, for networks whose norms come before the sub-layers.

    Returns:
      (y, y), or (sum, y): the first is for the residual branch, the second for the next product.

    Raises:
      ValueError: for dropout without words, or shapes that do not fit.
    """
    if h.shape != residual.shape or h.ndim != 3 or h.shape[-1] % 16:
        raise ValueError(
            f"h and residual must be [B, T, H] with H a multiple of 16, got {h.shape} and {residual.shape}"
        )
    if dropout_rate > 0.0 and words is None:
        raise ValueError("dropout_rate > 0 needs words (dropout_bits.key_words)")
    if words is None:
        words = jnp.zeros((2,), jnp.uint32)
    biased = h_bias is not None or bias is not None
    spec = _Spec(float(dropout_rate), float(epsilon), before, biased, current_mesh())
    tokens = lax.iota(jnp.uint32, h.shape[0] * h.shape[1]).reshape(h.shape[:2])
    none = jnp.zeros(scale.shape, jnp.float32)
    scale, bias, h_bias = (none if x is None else x.astype(jnp.float32) for x in (scale, bias, h_bias))
    return _norm(spec, h, h_bias, residual, scale, bias, words, tokens)


def add_norm(bias, norm, product, residual, rate: float, key: jax.Array | None, before: bool) -> Pair:
    """See choice.Kernels."""
    words, rate = (None, 0.0) if key is None else (key_words(key), rate)
    h_bias, norm_bias = (None if b is None else b[...] for b in (bias, norm.bias))
    return residual_layer_norm(product, h_bias, residual, norm.scale[...], norm_bias, words, rate, norm.epsilon, before)
