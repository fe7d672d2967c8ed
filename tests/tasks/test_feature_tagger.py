"""The feature-based tagger: layer choices, a frozen encoder, padding that changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import Config, walk
from bertjax.model.heads import init_params
from bertjax.model.presets import BertConfig
from bertjax.tasks.feature_tagger import LAYER_CHOICES, BertFeatureTagger, combine

CONFIG = BertConfig(
    vocab_size=30,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=16,
    initializer_range=0.5,
)
IDS = jnp.array([[2, 7, 9, 11, 3, 0, 0]])
MASK = (IDS > 0).astype(jnp.int32)


def test_layer_choices_are_those_of_the_papers_table():
    hidden = list(np.random.default_rng(0).normal(size=(6, 2, 3, 4)).astype(np.float32))
    expected = {
        "embeddings": hidden[0],
        "second_to_last": hidden[4],
        "last": hidden[5],
        "weighted_sum_last_4": sum(hidden[2:]) / 4,
        "concat_last_4": np.concatenate(hidden[2:], -1),
        "weighted_sum_all": sum(hidden[1:]) / 5,
    }
    assert set(expected) == set(LAYER_CHOICES) == {*dict(walk(Config))["task.feature_layers"].allowed} - {""}
    for name, value in expected.items():
        np.testing.assert_allclose(combine(hidden, name), value, atol=1e-6)
    only_second = combine(hidden, "weighted_sum_last_4", jnp.array([0.0, 50.0, 0.0, 0.0]))
    np.testing.assert_allclose(only_second, hidden[3], atol=1e-6)


@pytest.mark.slow
def test_the_encoder_is_frozen_and_padding_changes_nothing():
    model = BertFeatureTagger(CONFIG, num_labels=3, layers="weighted_sum_all", lstm_size=4)
    params = jax.jit(lambda k: init_params(model, k))(jax.random.key(0))

    def total(p, ids, mask):
        logits = model.apply({"params": p}, ids, mask)
        return jnp.sum(jnp.square(logits) * mask[..., None]), logits

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, padded), gradients = run(params, IDS, MASK)
    (_, short), _ = run(params, IDS[:, :5], MASK[:, :5])
    np.testing.assert_allclose(padded[:, :5], short, atol=1e-6)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients.pop("encoder")))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_an_unknown_layer_choice_names_the_valid_ones():
    with pytest.raises(ValueError, match="layers='first'.*one of embeddings, second_to_last"):
        combine([jnp.zeros((1, 1, 8))], "first")
