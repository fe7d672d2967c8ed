"""LayerNorm(residual + dropout(h + b)) in one pass over memory, forward and backward (GPU, Pallas).

    h, residual [B,T,H], b [H]  ->  y [B,T,H], twice

XLA splits this chain into about eight memory-bound kernels a site, among them a float32 array
written only to be summed. Here forward reads h and the residual and writes the sum z and y;
backward reads z and the cotangents and writes the two gradients and, for each program, one partial
sum of the gradients of scale, bias and b. b is the bias of the product that makes h: its gradient
costs nothing here and a pass over memory anywhere else. The dropout mask is never stored: it is
drawn again from (key, token, column), see `dropout_bits.hidden_keep_mask`.

y is returned twice so that its two uses, the residual branch and the next product, hand back two
cotangents: the backward kernel adds them in registers instead of XLA in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh

from bertjax.model.kernels.dropout_bits import hidden_keep_mask, keep_probability, key_words
from bertjax.model.kernels.gpu_programs import launch
from bertjax.model.mesh import current_mesh, on_each_share

LARGEST_CHUNK = 1024
SUMS = 3  # gradients that backward adds up over tokens: scale, bias, b


@dataclasses.dataclass(frozen=True)
class _Spec:
    rate: float
    epsilon: float
    interpret: bool
    rows: int
    backward_rows: int
    mesh: Mesh | None


def _chunks(width: int) -> list[tuple[int, int]]:
    """(start, size) of powers of two that make up `width`: Triton's arrays have such sizes."""
    parts, start = [], 0
    while start < width:
        size = min(LARGEST_CHUNK, 1 << ((width - start).bit_length() - 1))
        parts.append((start, size))
        start += size
    return parts


def _total(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, [jnp.sum(part) for part in parts])


def _normalise(z: list[jax.Array], width: int, epsilon: float) -> tuple[list[jax.Array], jax.Array]:
    """(centred and scaled chunks, reciprocal deviation) of one row, float32."""
    mean = _total(z) * (1.0 / width)
    centred = [part - mean for part in z]
    variance = _total([part * part for part in centred]) * (1.0 / width)
    reciprocal = lax.rsqrt(variance + epsilon)
    return [part * reciprocal for part in centred], reciprocal


def _keep(words_ref, token: jax.Array, start: int, size: int, rate: float) -> jax.Array:
    columns = lax.iota(jnp.uint32, size) + np.uint32(start)
    return hidden_keep_mask(words_ref[0], words_ref[1], token, columns, rate)


def _forward_kernel(words_ref, tokens_ref, h_ref, b_ref, r_ref, scale_ref, bias_ref, y_ref, z_ref, *, spec: _Spec):
    rows, width = h_ref.shape
    chunks = _chunks(width)
    scale = [scale_ref[pl.ds(*chunk)] for chunk in chunks]
    bias = [bias_ref[pl.ds(*chunk)] for chunk in chunks]
    before = [b_ref[pl.ds(*chunk)] for chunk in chunks]
    factor = 1.0 / keep_probability(spec.rate)

    def row(i, _):
        z = []
        for (start, size), b in zip(chunks, before, strict=True):
            at = pl.ds(start, size)
            h = h_ref[i, at].astype(jnp.float32) + b
            if spec.rate > 0.0:
                keep = _keep(words_ref, tokens_ref[i], start, size, spec.rate)
                h = jnp.where(keep, h * factor, 0.0)
            # Rounded before the statistics are taken, so that backward sees the same numbers.
            rounded = (h + r_ref[i, at].astype(jnp.float32)).astype(z_ref.dtype)
            z_ref[i, at] = rounded
            z.append(rounded.astype(jnp.float32))
        normalised, _ = _normalise(z, width, spec.epsilon)
        for (start, size), x, g, b in zip(chunks, normalised, scale, bias, strict=True):
            y_ref[i, pl.ds(start, size)] = (x * g + b).astype(y_ref.dtype)
        return 0

    lax.fori_loop(0, rows, row, 0)


def _backward_kernel(
    words_ref, tokens_ref, z_ref, dy_1_ref, dy_2_ref, scale_ref, dh_ref, dr_ref, sums_ref, *, spec: _Spec
):
    rows, width = z_ref.shape
    chunks = _chunks(width)
    scale = [scale_ref[pl.ds(*chunk)] for chunk in chunks]
    factor = 1.0 / keep_probability(spec.rate)

    def row(i, carry):
        dscale, dbias, dbefore = carry
        load = lambda ref: [ref[i, pl.ds(*chunk)].astype(jnp.float32) for chunk in chunks]  # noqa: E731
        x, reciprocal = _normalise(load(z_ref), width, spec.epsilon)
        dy = [a + b for a, b in zip(load(dy_1_ref), load(dy_2_ref), strict=True)]
        dx = [a * b for a, b in zip(dy, scale, strict=True)]
        mean = _total(dx) * (1.0 / width)
        slope = _total([a * b for a, b in zip(dx, x, strict=True)]) * (1.0 / width)
        dh = []
        for (start, size), d, part in zip(chunks, dx, x, strict=True):
            at = pl.ds(start, size)
            dz = (d - mean - part * slope) * reciprocal
            dr_ref[i, at] = dz.astype(dr_ref.dtype)
            if spec.rate > 0.0:
                keep = _keep(words_ref, tokens_ref[i], start, size, spec.rate)
                dz = jnp.where(keep, dz * factor, 0.0)
            dh_ref[i, at] = dz.astype(dh_ref.dtype)
            dh.append(dz)
        dscale = tuple(a + d * b for a, d, b in zip(dscale, dy, x, strict=True))
        dbias = tuple(a + d for a, d in zip(dbias, dy, strict=True))
        dbefore = tuple(a + d for a, d in zip(dbefore, dh, strict=True))
        return dscale, dbias, dbefore

    zeros = tuple(jnp.zeros((size,), jnp.float32) for _, size in chunks)
    sums = lax.fori_loop(0, rows, row, (zeros,) * SUMS)
    for which, parts in enumerate(sums):
        for (start, size), part in zip(chunks, parts, strict=True):
            sums_ref[which, pl.ds(start, size)] = part


def _blocks(rows: int, width: int):
    """Specs of a block of hidden vectors, of their token numbers, of a [H] vector, of the words."""
    return (
        pl.BlockSpec((rows, width), lambda i: (i, 0)),
        pl.BlockSpec((rows,), lambda i: (i,)),
        pl.BlockSpec((width,), lambda i: (0,)),
        pl.BlockSpec((2,), lambda i: (0,)),
    )


def _forward(h, b, r, scale, bias, words, tokens, *, spec: _Spec):
    """One shard's y and z, [B,T,H]."""
    batch, length, width = h.shape
    count = batch * length
    rows = math.gcd(count, spec.rows)
    block, numbers, vector, pair = _blocks(rows, width)
    flat = jax.ShapeDtypeStruct((count, width), h.dtype)
    in_specs = [pair, numbers, block, vector, block, vector, vector]
    run = launch("residual_norm_forward", _forward_kernel, spec, (count // rows,), in_specs, [block] * 2, [flat] * 2)
    y, z = run(words, tokens.reshape(count), h.reshape(flat.shape), b, r.reshape(flat.shape), scale, bias)
    return y.reshape(h.shape), z.reshape(h.shape)


def _backward(z, dy_1, dy_2, scale, words, tokens, *, spec: _Spec):
    """One shard's dh, dr [B,T,H] and partial sums [B, programs a row, SUMS, H]."""
    batch, length, width = z.shape
    count = batch * length
    rows = math.gcd(length, spec.backward_rows)
    block, numbers, vector, pair = _blocks(rows, width)
    flat = jax.ShapeDtypeStruct((count, width), z.dtype)
    in_specs = [pair, numbers, block, block, block, vector]
    out_specs = [block, block, pl.BlockSpec((None, SUMS, width), lambda i: (i, 0, 0))]
    shapes = [flat, flat, jax.ShapeDtypeStruct((count // rows, SUMS, width), jnp.float32)]
    run = launch("residual_norm_backward", _backward_kernel, spec, (count // rows,), in_specs, out_specs, shapes)
    dh, dr, sums = run(words, tokens.reshape(count), *(x.reshape(flat.shape) for x in (z, dy_1, dy_2)), scale)
    return (dh.reshape(z.shape), dr.reshape(z.shape), sums.reshape(batch, length // rows, SUMS, width))


def _run(spec: _Spec, backward: bool, *args):
    """`_forward` or `_backward` on each device's rows."""
    function, takes, gives = (
        (_backward, "bth bth bth h w bt", "bth bth bnsh") if backward else (_forward, "bth h bth h h w bt", "bth bth")
    )
    run = on_each_share(functools.partial(function, spec=spec), spec.mesh, takes, gives)
    return run(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(spec: _Spec, h, b, r, scale, bias, words, tokens):
    y, _ = _run(spec, False, h, b, r, scale, bias, words, tokens)
    return y, y


def _norm_forward(spec, h, b, r, scale, bias, words, tokens):
    y, z = _run(spec, False, h, b, r, scale, bias, words, tokens)
    return (y, y), (z, scale, words, tokens)


def _norm_backward(spec, residuals, cotangents):
    z, scale, words, tokens = residuals
    dy_1, dy_2 = (c.astype(z.dtype) for c in cotangents)
    dh, dr, sums = _run(spec, True, z, dy_1, dy_2, scale, words, tokens)
    dscale, dbias, db = jnp.sum(sums, axis=(0, 1))
    no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return dh, db, dr, dscale, dbias, no_gradient(words), no_gradient(tokens)


_norm.defvjp(_norm_forward, _norm_backward)


def residual_layer_norm(
    h, h_bias, residual, scale, bias, words=None, dropout_rate=0.0, epsilon=1e-12, interpret=False, backward_rows=None
) -> tuple[jax.Array, jax.Array]:
    """LayerNorm(residual + dropout(h + h_bias)), twice: see the module's docstring.

    Args:
      h, residual: [B, T, H] of one type; H a multiple of 16.
      h_bias: float32 [H].
      scale, bias: float32 [H], of the LayerNorm.
      words: uint32 [2] of `dropout_bits.key_words`, needed when dropout_rate > 0.
      dropout_rate, epsilon: Python floats.
      interpret: run without a GPU (tests).
      backward_rows: of which one partial sum of the gradients of scale, bias and h_bias is made; None
        takes what was fastest on an H100 for this H.

    Returns:
      (y, y): use one for the residual branch, the other for the next product.

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
    batch, length, width = h.shape
    rows = 4 if width >= 1024 else 8
    backward_rows = backward_rows or 4 * rows
    spec = _Spec(float(dropout_rate), float(epsilon), interpret, rows, backward_rows, current_mesh())
    tokens = lax.iota(jnp.uint32, batch * length).reshape(batch, length)
    scale, bias, h_bias = (x.astype(jnp.float32) for x in (scale, bias, h_bias))
    return _norm(spec, h, h_bias, residual, scale, bias, words, tokens)


def dense_add_norm(dense, norm, x, residual, rate: float, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See choice.Kernels: `residual_layer_norm` behind a dense layer."""
    words, rate = (None, 0.0) if key is None else (key_words(key), rate)
    arrays = dense.product(x), dense.bias[...], residual, norm.scale[...], norm.bias[...]
    return residual_layer_norm(*arrays, words, rate, norm.epsilon, interpret=jax.default_backend() != "gpu")
