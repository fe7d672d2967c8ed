"""Attention by plain XLA: what every kernel must compute.

Position i sees position j when mask[i] == mask[j]: 1..K number the pairs of a row and 0 is padding,
so that padding sees only padding (no row is without a visible position, hence no NaN) and pairs
packed in one row never see each other. Outputs at padding are meaningless by design and nothing
that is trained or reported reads them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bertjax.model.kernels import dropout_bits

# Finite, so that a difference of two masked scores is 0 and not NaN.
MASKED_SCORE = -1e30


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
    causal: bool = False,
) -> jax.Array:
    """Scaled dot-product attention with the whole [B, A, T, T] matrix, softmax in float32.

    Vaswani et al. 2017, section 3.2.1, with dropout on the probabilities as in the original BERT
    (modeling.py, attention_layer).

    Args:
      query, key, value: [B, T, A, D] in the compute type.
      attention_mask: int [B, T]; equal numbers see each other.
      dropout_rate: of the attention probabilities; no effect without a key.
      several_pairs: rows hold several pairs, so that a kernel may skip what none of them spans.
      causal: a position sees none after it, which no kernel can do.

    Returns:
      [B, T, A, D], the query's type.
    """
    dtype = query.dtype
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTAD,BSAD->BATS", query, key, preferred_element_type=jnp.float32) * scale
    visible = attention_mask[:, None, :, None] == attention_mask[:, None, None, :]
    if causal:
        visible &= jnp.tril(jnp.ones(visible.shape[-2:], bool))
    probabilities = jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)
    if dropout_key is not None and dropout_rate > 0.0:
        batch, length, heads, _ = query.shape
        # The bits that the fused kernels redraw tile by tile: same key, same mask.
        keep = dropout_bits.keep_mask(dropout_bits.stream_seeds(dropout_key, batch, heads), length, dropout_rate)
        inverse = 1.0 / dropout_bits.keep_probability(dropout_rate)
        probabilities = jnp.where(keep, probabilities * inverse, 0.0)
    return jnp.einsum("BATS,BSAD->BTAD", probabilities.astype(dtype), value)
