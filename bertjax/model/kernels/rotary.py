"""Rotary positions in one pass over memory before the attention kernels (Su et al. 2021, arXiv:2104.09864).

A vector's halves are swapped by `flip`, not cut and joined, so that XLA makes one loop of the cast, the
bias before it and the turn, over queries, keys and values of one product as they lie.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.kernels.gpu_launch import launch

ROWS, WARPS = 16, 8  # of a program
Turn = tuple[jax.Array, jax.Array]  # cosines and sines [B or 1, T, D], float32; both halves of D are equal


def turned(x: jax.Array, turn: Turn) -> jax.Array:
    """Queries or keys [B, T, A, D] turned in float32, x's type out; of [B, T, 3, A, D] queries and keys, not values."""
    *outer, head = x.shape
    cos, sin = (y[..., : head // 2].reshape(*y.shape[:2], *[1] * (x.ndim - 2), head // 2) for y in turn)
    sin = jnp.concatenate([-sin, sin], axis=-2)
    if x.ndim == 5:
        of_values = np.arange(3).reshape(3, 1, 1, 1) == 2
        cos, sin = jnp.where(of_values, 1.0, cos), jnp.where(of_values, 0.0, sin)
    halves = x.astype(jnp.float32).reshape(*outer, 2, head // 2)
    return (halves * cos + jnp.flip(halves, -2) * sin).reshape(x.shape).astype(x.dtype)


def turned_in_place(product: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`turned` of [B, T, 3, A, D] as one kernel that touches queries and keys alone (GPU); D is a power of two.

    Without a gradient of its own: attention_triton turns back what comes out of its backward kernel.
    """
    batch, length, _, heads, size = product.shape
    count, rows = batch * length, math.gcd(length, ROWS)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (product, cos, sin)]
    shape = jax.ShapeDtypeStruct(flat[0].shape, product.dtype)
    how = {"PERIOD": flat[1].shape[0], "HEADS": heads, "HALF": size // 2, "ROWS": rows}
    (made,) = launch("turn", (count // rows, 2), flat, [shape], WARPS, in_place=0, **how)
    return made.reshape(product.shape)
