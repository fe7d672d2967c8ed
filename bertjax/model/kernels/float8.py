"""Products of a layer in 8-bit floats (NVIDIA GPUs from Ada on).

    x [B, T, in], kernel [in, out]  ->  [B, T, out] in x's type, bfloat16

Activations and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, arXiv:2209.05433). Each array is scaled by
the power of two that brings its largest element just below the largest number of the type. The scale is that of the
array itself and not of earlier steps, so a run has no more state than in bfloat16. A NaN or an infinity makes the whole
product NaN, and so the step is skipped as any that is not finite.

cuBLASLt multiplies 8-bit matrices only along the last axis of both. One kernel therefore writes each array twice, as it
lies and turned: the first is for the product at hand, the second for the gradient of the weights, which is all that is
kept for backward.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bertjax.model.kernels.gpu_launch import launch
from bertjax.model.mesh import current_mesh, gathered, heads_are_split, on_each_share

WEIGHTS, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
STEEPEST = 1.13  # the largest slope of GELU
EXACT = jax.lax.Precision.HIGHEST  # the tensor cores' slower sums, for gradients
ROWS, COLUMNS, WARPS = 64, 128, 4  # of a program; of seven shapes the fastest on an H200


class Quantised(NamedTuple):
    """rows [n, width] and columns [width, n] of an array times `scale`, float32 []."""

    rows: jax.Array
    columns: jax.Array
    scale: jax.Array


def scale_of(largest: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The power of two for an array whose largest magnitude is `largest`, float32 []; NaN if that is not finite."""
    _, exponent = jnp.frexp(float(jnp.finfo(dtype).max) / jnp.maximum(largest, 2.0**-100))
    return jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), exponent - 1), jnp.nan)


def quantised(x: jax.Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """x [n, width], by XLA."""
    scale = scale_of(jnp.max(jnp.abs(x)).astype(jnp.float32), dtype)
    rows = (x.astype(jnp.float32) * scale).astype(dtype)
    return Quantised(rows, rows.T, scale)


def _tiles(x: jax.Array) -> tuple[tuple[int, int], dict[str, int]]:
    """The programs for x [B, T, width], and what they know when they are compiled."""
    count, width = x.shape[0] * x.shape[1], x.shape[2]
    rows, columns = math.gcd(count, ROWS), math.gcd(width, COLUMNS)
    return (count // rows, width // columns), {"WIDTH": width, "ROWS": rows, "COLUMNS": columns}


def _largest(x: jax.Array) -> tuple[jax.Array]:
    """One shard's largest magnitudes, [1, programs]."""
    grid, constants = _tiles(x)
    result = jax.ShapeDtypeStruct((1, math.prod(grid)), jnp.float32)
    return (launch("largest", grid, (x,), [result], WARPS, **constants)[0],)


def _written(x: jax.Array, *others: jax.Array, kernel: str, dtype: jax.typing.DTypeLike, **constants):
    """One shard's rows and columns of what `kernel` makes of x and others; of gelu_backward_quantise also the sums."""
    grid, tiles = _tiles(x)
    width, count = x.shape[2], x.shape[0] * x.shape[1]
    results = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((count, width), (width, count))]
    if kernel == "gelu_backward_quantise":
        results.append(jax.ShapeDtypeStruct((grid[0], width), jnp.float32))
    warps = 2 * WARPS if kernel == "gelu_quantise" else WARPS
    rows, columns, *sums = launch(kernel, grid, (x, *others), results, warps, COUNT=count, **tiles, **constants)
    return (*(jax.lax.bitcast_convert_type(bits, dtype) for bits in (rows, columns)), *sums)


def _largest_of(x: jax.Array, mesh: Mesh | None, rows: str = "b") -> jax.Array:
    """The largest magnitude of x [B, T, width], float32 []."""
    return jnp.max(on_each_share(_largest, mesh, f"{rows}th", f"{rows}n")(x)[0])


def quantised_on_gpu(x: jax.Array, dtype: jax.typing.DTypeLike, mesh: Mesh | None, rows: str = "b") -> Quantised:
    """x [B, T, width], width a multiple of 16, each device's rows by itself (rows "b"), or the whole on each (" ")."""
    scale = scale_of(_largest_of(x, mesh, rows), dtype)
    write = functools.partial(_written, kernel="quantise", dtype=dtype, FINE=dtype == WEIGHTS)
    return Quantised(*on_each_share(write, mesh, "bth s", "bh hb")(x, scale.reshape(1)), scale)


class _How(NamedTuple):
    mesh: Mesh | None
    fused: bool


def _quantise(how: _How, x: jax.Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """Activations or gradients [B, T, width], or a matrix."""
    if not how.fused or x.shape[-1] % 16:
        return quantised(x.reshape(-1, x.shape[-1]), dtype)
    return quantised_on_gpu(x, dtype, how.mesh) if x.ndim == 3 else quantised_on_gpu(x[None], dtype, how.mesh, " ")


def _dot(a: jax.Array, b: jax.Array, scale: jax.Array, precision: jax.lax.Precision | None = None) -> jax.Array:
    """a [n, k] and b [m, k] -> [n, m] bfloat16, divided by `scale`, a power of two, which cuBLASLt does. Without
    precision it adds up in the tensor cores' fast way, which serves forward."""
    along = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(a, b, along, precision=precision, preferred_element_type=jnp.bfloat16)
    return y * (1 / scale).astype(jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, kernel: jax.Array, x: jax.Array) -> jax.Array:
    return _product_forward(how, kernel, x)[0]


def _product_forward(how: _How, kernel: jax.Array, x: jax.Array):
    x8, kernel8 = _quantise(how, x, WEIGHTS), _quantise(how, kernel, WEIGHTS)
    y = _dot(x8.rows, kernel8.columns, x8.scale * kernel8.scale)
    return y.reshape(*x.shape[:-1], -1), (x8._replace(rows=None), kernel8._replace(columns=None), kernel[:0])


def _product_backward(how: _How, kept, cotangent: jax.Array):
    x8, kernel8, kernel = kept
    g8 = _quantise(how, cotangent, GRADIENTS)
    dx = _dot(g8.rows, kernel8.rows, g8.scale * kernel8.scale, EXACT)
    dkernel = _dot(x8.columns, g8.columns, x8.scale * g8.scale, EXACT)
    return dkernel.astype(kernel.dtype), dx.reshape(*cotangent.shape[:-1], -1)


_product.defvjp(_product_forward, _product_backward)


def product(kernel: jax.Array, x: jax.Array, fused: bool) -> jax.Array:
    """layers.product in 8-bit floats.

    Args:
      kernel: float32 [in, out].
      x: bfloat16 [B, T, in].
      fused: quantise by kernels (GPU) and not by XLA.
    """
    mesh = current_mesh()
    return _product(_How(mesh, fused and not heads_are_split(mesh)), _whole(kernel, mesh), x)


def _whole(kernel: jax.Array, mesh: Mesh | None) -> jax.Array:
    """A matrix that devices share is gathered in 16 bits."""
    shared = mesh is not None and mesh.shape["fsdp"] > 1
    return gathered(kernel.astype(jnp.bfloat16)) if shared else kernel


# ------------------------------------------------------- dense, GELU, dense: what lies between never leaves 8 bits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dense_gelu_dense(mesh: Mesh | None, tanh: bool, first, bias, second, x) -> jax.Array:
    return _dense_gelu_dense_forward(mesh, tanh, first, bias, second, x)[0]


def _dense_gelu_dense_forward(mesh, tanh, first, bias, second, x):
    x8, first8, second8 = (_quantise(_How(mesh, True), array, WEIGHTS) for array in (x, first, second))
    h = _dot(x8.rows, first8.columns, x8.scale * first8.scale).reshape(*x.shape[:-1], -1)
    # GELU never gives more than it gets, but for 0.17 of what is below 0.
    scale = scale_of(jnp.maximum(_largest_of(h, mesh) + jnp.max(jnp.abs(bias)), 0.17), WEIGHTS)
    write = functools.partial(_written, kernel="gelu_quantise", dtype=WEIGHTS, TANH=tanh)
    a8 = Quantised(*on_each_share(write, mesh, "bth h s", "bh hb")(h, bias, scale.reshape(1)), scale)
    y = _dot(a8.rows, second8.columns, a8.scale * second8.scale)
    weights = (matrix._replace(columns=None) for matrix in (first8, second8))
    return y.reshape(x.shape), (x8._replace(rows=None), a8._replace(rows=None), *weights, h, bias, first[:0])


def _dense_gelu_dense_backward(mesh, tanh, kept, cotangent):
    x8, a8, first8, second8, h, bias, kernel = kept
    g8 = quantised_on_gpu(cotangent, GRADIENTS, mesh)
    dsecond = _dot(a8.columns, g8.columns, a8.scale * g8.scale, EXACT)
    da = _dot(g8.rows, second8.rows, g8.scale * second8.scale, EXACT).reshape(h.shape)
    scale = scale_of(STEEPEST * _largest_of(da, mesh), GRADIENTS)
    write = functools.partial(_written, kernel="gelu_backward_quantise", dtype=GRADIENTS, TANH=tanh)
    rows, columns, sums = on_each_share(write, mesh, "bth h bth s", "bh hb bh")(h, bias, da, scale.reshape(1))
    dx = _dot(rows, first8.rows, scale * first8.scale, EXACT).reshape(cotangent.shape)
    dfirst = _dot(x8.columns, columns, x8.scale * scale, EXACT)
    dfirst, dsecond = (gradient.astype(kernel.dtype) for gradient in (dfirst, dsecond))
    return dfirst, jnp.sum(sums, axis=0), dsecond, dx


dense_gelu_dense.defvjp(_dense_gelu_dense_forward, _dense_gelu_dense_backward)


def feed_forward(otherwise, tanh: bool, first, gate, second, x: jax.Array) -> jax.Array:
    """See choice.Kernels; `otherwise` computes what this does not. GELU is by tanh or exact."""
    mesh = current_mesh()
    if gate is not None or first.bias is None or heads_are_split(mesh):
        return otherwise(first, gate, second, x)
    kernels = [_whole(dense.kernel[...], mesh) for dense in (first, second)]
    return dense_gelu_dense(mesh, tanh, kernels[0], first.bias[...], kernels[1], x)
