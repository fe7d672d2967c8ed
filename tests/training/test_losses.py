"""Loss sums: against scipy, without targets, in any split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from bertjax.training.losses import classification_sums, mean


def sample(rows=3, slots=4, classes=11, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 5, (rows, slots, classes)).astype(np.float32)
    labels = rng.integers(0, classes, (rows, slots))
    weights = rng.integers(0, 2, (rows, slots)).astype(np.float32)
    return logits, labels, weights


def test_sums_equal_scipy():
    logits, labels, weights = sample()
    log_probability = np.take_along_axis(log_softmax(logits.astype(np.float64), -1), labels[..., None], -1)[..., 0]
    loss, correct, weight = classification_sums(logits, labels, weights)
    assert loss == pytest.approx(-(log_probability * weights).sum(), rel=1e-6)
    assert correct == ((logits.argmax(-1) == labels) * weights).sum()
    assert weight == weights.sum()


def test_sums_of_parts_add_up_to_the_sums_of_the_whole():
    logits, labels, weights = sample(rows=6)
    whole = classification_sums(logits, labels, weights)
    parts = [classification_sums(logits[i : i + 2], labels[i : i + 2], weights[i : i + 2]) for i in (0, 2, 4)]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)


def test_no_target_gives_zero_loss_and_zero_gradient():
    logits, labels, weights = sample()

    def objective(x):
        loss, _, weight = classification_sums(x, labels, weights * 0)
        return mean(loss, weight)

    value, gradient = jax.value_and_grad(objective)(jnp.asarray(logits))
    assert value == 0.0
    assert (gradient == 0).all()


def test_the_gradient_is_probability_less_target_in_the_type_of_the_logits():
    logits, labels, weights = sample()
    gradient = jax.grad(lambda x: 3 * classification_sums(x, labels, weights)[0])(jnp.asarray(logits))
    expected = softmax(logits.astype(np.float64), -1) - np.eye(logits.shape[-1])[labels]
    np.testing.assert_allclose(gradient, 3 * expected * weights[..., None], atol=1e-5)
    half = jax.grad(lambda x: classification_sums(x, labels, weights)[0])(jnp.asarray(logits, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_a_row_without_targets_does_not_dilute_the_others():
    logits, labels, _ = sample(rows=2)
    weights = np.array([[1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    loss, _, weight = classification_sums(logits, labels, weights)
    alone, _, _ = classification_sums(logits[:1], labels[:1], weights[:1])
    assert weight == 4.0
    assert mean(loss, weight) == pytest.approx(float(alone) / 4, rel=1e-6)


def test_large_logits_stay_finite_and_bfloat16_is_widened():
    logits = jnp.array([[[1e4, -1e4, 0.0]]], jnp.bfloat16)
    loss, _, _ = classification_sums(logits, jnp.array([[1]]), jnp.ones((1, 1)))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(2e4, rel=1e-2)


def test_nsp_sums_of_packed_slots():
    logits = jnp.array([[[2.0, 0.0], [0.0, 0.0]]])
    loss, correct, weight = classification_sums(logits, jnp.array([[0, 0]]), jnp.array([[1.0, 0.0]]))
    # log(1 + e^-2) = 0.126928, by hand.
    assert float(loss) == pytest.approx(0.126928, abs=1e-6)
    assert (correct, weight) == (1.0, 1.0)
