"""The fused kernels behind the signatures of bertjax.model.attention's dispatch table."""

from __future__ import annotations

import jax

from bertjax.model.kernels.dropout_bits import stream_seeds
from bertjax.model.kernels.flash_attention import Tiling, flash_attention, flash_attention_joined


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
) -> jax.Array:
    """[B,T,A,D] x 3 and mask [B,T] -> context [B,T,A,D]; same dropout bits as the reference path.

    Runs interpreted (slowly) on a backend without the compiled kernels, which is what tests on the
    CPU use.
    """
    options = _options(query.shape[:3], dropout_rate, dropout_key, several_pairs)
    return flash_attention(query, key, value, attention_mask, **options)


def joined_attention(
    product: jax.Array,
    bias: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
) -> jax.Array:
    """`attention` for a product [B,T,3H] and its bias [3,A,D]."""
    shape = (*product.shape[:2], bias.shape[1])
    options = _options(shape, dropout_rate, dropout_key, several_pairs)
    return flash_attention_joined(product, bias, attention_mask, **options)


def _options(shape, rate: float, key: jax.Array | None, several_pairs: bool) -> dict:
    batch, length, heads = shape
    rate = 0.0 if key is None else rate
    return {
        "dropout_rate": rate,
        "seeds": stream_seeds(key, batch, heads) if rate > 0.0 else None,
        "tiling": Tiling.for_length(length, several_pairs),
        "interpret": jax.default_backend() not in ("gpu", "cuda"),
    }
