"""Attention by plain XLA: what every kernel must compute.

Position i sees position j when mask[i] == mask[j]: 1..K number the pairs of a row and 0 is padding,
so that padding sees only padding (no row is without a visible position, hence no NaN) and pairs
packed in one row never see each other. With a window, j must also be at most so many positions away.
Outputs at padding are meaningless by design and nothing that is trained or reported reads them.

Scores of a row take T x T numbers up to WHOLE tokens. Longer rows are computed a block of queries
after the other, and again in backward; with a window a block meets only the keys it can see.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from bertjax.model.kernels import dropout_bits

# Finite, so that a difference of two masked scores is 0 and not NaN.
MASKED_SCORE = -1e30
WHOLE = 2048
BLOCK = 256  # queries at a time beyond


def seen_window(window: int | None, length: int) -> int | None:
    """The window, None if it leaves out nothing of a row; ValueError if it is negative."""
    if window is not None and window < 0:
        raise ValueError(f"a window of {window} positions on either side: must be at least 0")
    return None if window is None or window >= length - 1 else window


def visible_keys(ids_q: jax.Array, ids_k: jax.Array, window: int | None, start_q=0, start_k=0, causal: bool = False):
    """bool [..., queries, keys]: which keys [..., keys] each query [..., queries] sees, whose first positions in
    the row are start_k and start_q."""
    visible = ids_q[..., :, None] == ids_k[..., None, :]
    distance = start_q + jnp.arange(ids_q.shape[-1])[:, None] - (start_k + jnp.arange(ids_k.shape[-1]))
    if window is not None:
        visible &= jnp.abs(distance) <= window
    return visible & (distance >= 0) if causal else visible


def _attend(query, key, value, ids_q, ids_k, seeds, start_q, start_k, rate: float, window: int | None, causal: bool):
    """Queries [B, n, A, D] over keys [B, m, A, D] of the same rows."""
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTAD,BSAD->BATS", query, key, preferred_element_type=jnp.float32) * scale
    visible = visible_keys(ids_q, ids_k, window, start_q, start_k, causal)[:, None]
    probabilities = jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)
    if seeds is not None:
        # The bits that the fused kernels redraw tile by tile: same key, same mask.
        keep = dropout_bits.tile_keep_mask(seeds, start_q, start_k, scores.shape[2:], rate)
        probabilities = jnp.where(keep, probabilities * (1.0 / dropout_bits.keep_probability(rate)), 0.0)
    return jnp.einsum("BATS,BSAD->BTAD", probabilities.astype(query.dtype), value)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
    window: int | None = None,
    causal: bool = False,
) -> jax.Array:
    """Scaled dot-product attention, softmax in float32.

    Vaswani et al. 2017, section 3.2.1, with dropout on the probabilities as in the original BERT
    (modeling.py, attention_layer).

    Args:
      query, key, value: [B, T, A, D] in the compute type.
      attention_mask: int [B, T]; equal numbers see each other.
      dropout_rate: of the attention probabilities; no effect without a key.
      several_pairs: rows hold several pairs, so that a kernel may skip what none of them spans.
      window: i sees j only if |i - j| <= window (ModernBERT's local_attention=128 is 64 here).
      causal: a position sees none after it, which no kernel can do.

    Returns:
      [B, T, A, D], the query's type.
    """
    batch, length, heads, _ = query.shape
    any_length = not isinstance(length, int)  # a symbol, where a program for rows of every length is exported
    window = window if any_length else seen_window(window, length)
    dropped = dropout_key is not None and dropout_rate > 0.0
    seeds = dropout_bits.stream_seeds(dropout_key, batch, heads) if dropped else None
    attend = functools.partial(_attend, rate=dropout_rate, window=window, causal=causal)
    block = BLOCK if window is None else max(16, window + -window % 16)  # dropout bits come in sixteens
    if any_length or length <= (WHOLE if window is None else 3 * block):
        return attend(query, key, value, attention_mask, attention_mask, seeds, 0, 0)

    def blocks(x, fill=0, around=0):
        """[B, T, ...] -> [blocks, B, block, ...], with so many more blocks on either side."""
        more = (around * block, -length % block + around * block)
        x = jnp.pad(x, [(0, 0), more, *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, -1, block, *x.shape[2:]), 1, 0)

    queries, ids = blocks(query), blocks(attention_mask, fill=-1)
    starts = jnp.arange(len(queries)) * block
    if window is None:
        one = jax.checkpoint(lambda q, ids_q, at: attend(q, key, value, ids_q, attention_mask, seeds, at, 0))
        context = jax.lax.map(lambda of_block: one(*of_block), (queries, ids, starts))
    else:
        triples = (blocks(key, around=1), blocks(value, around=1), blocks(attention_mask, fill=-1, around=1))
        k, v, ids_k = (jnp.concatenate([x[:-2], x[1:-1], x[2:]], axis=2) for x in triples)
        axes = (0, 0, 0, 0, 0, None, 0, 0)
        context = jax.vmap(attend, axes)(queries, k, v, ids, ids_k, seeds, starts, starts - block)
    return jnp.moveaxis(context, 0, 1).reshape(batch, -1, *query.shape[2:])[:, :length]
