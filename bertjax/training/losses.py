"""Sums from which losses and accuracies are made.

Sums, not means: those of micro-batches, devices and hosts add up, and the caller divides by the global denominator
once, so that accumulation gives the loss of the large batch. Logits of any type are widened to float32 first.
"""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log probability of `labels` [...] under `logits` [..., C] -> float32 [...]."""
    return scored_cross_entropy(logits, labels)[0]


@jax.custom_vjp
def scored_cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(negative log probability, whether the label has the largest logit), both float32 [...].

    Over logits [..., C] and int labels [...]. Logits of a vocabulary are the largest arrays of a step, so passes over
    them are counted: maximum and sum forward, one pass backward. The label's logit is a gather, whose gradient here is
    part of that one pass and no scatter.
    """
    return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits: jax.Array, labels: jax.Array) -> tuple:
    wide = logits.astype(jnp.float32)
    top = jnp.max(wide, axis=-1)
    log_sum = top + jnp.log(jnp.sum(jnp.exp(wide - top[..., None]), axis=-1))
    picked = jnp.take_along_axis(wide, labels[..., None], axis=-1, mode="clip")[..., 0]
    correct = (picked >= top).astype(jnp.float32)
    return (log_sum - picked, correct), (logits, labels, log_sum)


def _cross_entropy_backward(residuals: tuple, cotangents: tuple) -> tuple[jax.Array, None]:
    logits, labels, log_sum = residuals
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    gradient = cotangents[0][..., None] * (probabilities - (classes == labels[..., None]))
    return gradient.astype(logits.dtype), None


scored_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def classification_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss_sum, correct_sum, weight_sum), float32 scalars, of a softmax classifier over all positions.

    Of the masked language model (logits [B, P, V]; the original's get_masked_lm_output has 1e-5 more in its
    denominator) and of next-sentence prediction ([B, K, 2], 0 = next).

    Args:
      logits: [..., C].
      labels: int [...]; the value where the weight is 0 does not matter.
      weights: float [...], 0 for positions that do not count. Without any weight all three sums are 0 and so is the
        gradient: whoever divides must guard the denominator, not this sum.
    """
    weights = weights.astype(jnp.float32)
    losses, correct = scored_cross_entropy(logits, labels)
    return jnp.sum(losses * weights), jnp.sum(correct * weights), jnp.sum(weights)


def mean(total: jax.Array, denominator: jax.Array) -> jax.Array:
    """total / denominator, and 0 with zero gradient where the denominator is 0."""
    safe = jnp.where(denominator > 0, denominator, 1.0)
    return jnp.where(denominator > 0, total / safe, 0.0)
