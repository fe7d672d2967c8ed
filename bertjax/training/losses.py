"""Sums from which losses and accuracies are made.

Sums, not means: the sums of micro-batches, devices and hosts add up, and the caller divides by the
global denominator once, so that accumulation gives the loss of the large batch. Everything is
float32; logits of any type are widened first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log probability of `labels` [...] under `logits` [..., C] -> float32 [...].

    The label's logit is picked by a masked sum, not by a gather: its gradient is then elementwise
    and joins the softmax's in one pass, where a gather's would be a scatter into [..., C].
    """
    logits = logits.astype(jnp.float32)
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(classes == labels[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def classification_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted sums over all positions of a softmax classifier.

    Args:
      logits: [..., C].
      labels: int [...]; the value where the weight is 0 does not matter.
      weights: float [...], 0 for positions that do not count.

    Returns:
      (loss_sum, correct_sum, weight_sum), float32 scalars. Without any weight all three are 0 and
      so is the gradient: whoever divides must guard the denominator, not this sum.
    """
    weights = weights.astype(jnp.float32)
    losses = cross_entropy(logits, labels)
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(correct * weights), jnp.sum(weights)


def mlm_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of the masked language model: logits [B, P, V], labels and weights [B, P].

    Original: run_pretraining.py, get_masked_lm_output, without its 1e-5 in the denominator.
    """
    return classification_sums(logits, labels, weights)


def nsp_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of next-sentence prediction: logits [B, K, 2], labels (0 is next) and weights [B, K]."""
    return classification_sums(logits, labels, weights)


def mean(total: jax.Array, denominator: jax.Array) -> jax.Array:
    """total / denominator, and 0 with zero gradient where the denominator is 0."""
    safe = jnp.where(denominator > 0, denominator, 1.0)
    return jnp.where(denominator > 0, total / safe, 0.0)
