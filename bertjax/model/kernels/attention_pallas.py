"""The fused kernels behind the signature of bertjax.model.attention's dispatch table."""

from __future__ import annotations

import jax

from bertjax.model.kernels.dropout_bits import stream_seeds
from bertjax.model.kernels.flash_attention import flash_attention


def packed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`attention` for queries, keys and values that are slices of one product [B,T,3H]."""
    return attention(
        query, key, value, attention_mask, dropout_rate, dropout_key, packed=True
    )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    packed: bool = False,
) -> jax.Array:
    """[B,T,A,D] x 3 and mask [B,T] -> context [B,T,A,D]; same dropout bits as the reference path.

    Runs interpreted (slowly) on a backend without the compiled kernels, which is what tests on the
    CPU use.
    """
    seeds = None
    if dropout_key is None:
        dropout_rate = 0.0
    if dropout_rate > 0.0:
        seeds = stream_seeds(dropout_key, query.shape[0], query.shape[2])
    interpret = jax.default_backend() not in ("gpu", "cuda")
    return flash_attention(
        query, key, value, attention_mask, seeds, dropout_rate, packed=packed, interpret=interpret
    )
