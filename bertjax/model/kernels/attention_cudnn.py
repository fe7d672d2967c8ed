"""cuDNN's fused attention, without dropout, behind the signature of the dispatch table.

For comparison and for inference. Not for training: jax's public function has no dropout argument,
and the private one numbers its draws with a counter inside the process, so that neither a resumed
run nor a rematerialised forward pass can draw the same mask again.
"""

from __future__ import annotations

import jax


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
) -> jax.Array:
    """[B,T,A,D] x 3 and mask [B,T] -> context [B,T,A,D].

    The mask becomes a dense boolean [B,1,T,T], since segments need it.

    Raises:
      ValueError: when dropout is asked for.
    """
    if dropout_key is not None and dropout_rate > 0.0:
        raise ValueError(
            "attention='cudnn' cannot draw dropout that a resumed run repeats; use "
            "attention='pallas' or 'reference', or set attention_probs_dropout_prob=0"
        )
    mask = attention_mask[:, None, :, None] == attention_mask[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")
