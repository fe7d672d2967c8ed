"""A bidirectional LSTM over the tokens of each row, for heads that are drawn at random."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class BiLstm(nn.Module):
    """One layer, in float32: hidden [B, T, any], attention_mask [B, T] -> [B, T, 2 size].

    Padding, which must come last in a row, changes nothing before it.
    """

    size: int  # units of each direction

    @nn.compact
    def __call__(self, hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
        both = nn.Bidirectional(
            nn.RNN(nn.OptimizedLSTMCell(self.size, name="forward")),
            nn.RNN(nn.OptimizedLSTMCell(self.size, name="backward")),
        )
        return both(hidden.astype(jnp.float32), seq_lengths=jnp.sum(attention_mask > 0, -1))
