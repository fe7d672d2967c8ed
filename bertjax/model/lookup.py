"""Reading rows of tables and positions of rows, with gradients that do not collide.

The gradient of a gather is a scatter-add; when many indices fall on few rows (positions, segments)
its atomic additions queue up, and their order is not fixed. For small tables both are avoided by a
product with a one-hot matrix in the backward pass only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def table_lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [...] of a large float32 table [V, H] -> [..., H].

    The gather and its gradient stay in float32: additions of bfloat16 rows would lose the small
    terms of frequent words, and accelerators add float32 atomically but not bfloat16.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


@jax.custom_vjp
def small_table_lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [B, T] of a small table [N, H] -> [B, T, H]; the gradient is a product."""
    return jnp.take(table, ids, axis=0, mode="clip")


def _small_table_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
    return small_table_lookup(table, ids), (ids, table)


def _small_table_backward(residuals: tuple, cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, table = residuals
    one_hot = jax.nn.one_hot(ids, table.shape[0], dtype=cotangent.dtype)
    gradient = jnp.einsum(
        "BTN,BTH->NH",
        one_hot,
        cotangent,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return gradient.astype(table.dtype), None


small_table_lookup.defvjp(_small_table_forward, _small_table_backward)


def gather_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Vectors at `positions` [B, P] of `hidden` [B, T, H] -> [B, P, H], exactly.

    A product with a one-hot matrix: P is a fraction of T, so it costs little, and its gradient is
    another product that writes [B, T, H] once.
    """
    one_hot = jax.nn.one_hot(positions, hidden.shape[1], dtype=hidden.dtype)
    return jnp.einsum("BPT,BTH->BPH", one_hot, hidden, precision=jax.lax.Precision.HIGHEST)
