"""cuDNN's fused attention, without dropout.

For comparison and for inference. Not for training: jax's public function has no dropout argument,
and the private one numbers its draws with a counter inside the process, so that neither a resumed
run nor a rematerialised forward pass can draw the same mask again.
"""

from __future__ import annotations

import jax

from bertjax.model.kernels.attention_reference import visible_keys


def attention(
    query, key, value, attention_mask, dropout_rate=0.0, dropout_key=None, several_pairs=False, window=None
) -> jax.Array:
    """As attention_reference.attention; the mask becomes a dense boolean [B,1,T,T], in which a window lies too
    (cuDNN's own windows are one-sided). Refuses dropout."""
    if dropout_key is not None and dropout_rate > 0.0:
        raise ValueError(
            "attention='cudnn' cannot draw dropout that a resumed run repeats; use "
            "attention='triton' or 'reference', or set attention_probs_dropout_prob=0"
        )
    mask = visible_keys(attention_mask, attention_mask, window)[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")
