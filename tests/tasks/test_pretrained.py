"""Where a fine-tuning run starts: stored weights, and a head that is drawn beside them."""

import functools

import jax
import numpy as np
import pytest

from bertjax.interop import LoadError
from bertjax.interop.huggingface import write_directory
from bertjax.interop.loading import draw
from bertjax.model import heads
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from bertjax.tasks.feature_tagger import BertFeatureTagger
from bertjax.tasks.pretrained import Pretrained

CONFIG = BertConfig(
    vocab_size=30,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
MODELS = {
    "classifier": heads.BertForSequenceClassification(CONFIG, num_labels=3),
    "spans": heads.BertForQuestionAnswering(CONFIG),
    "pretraining": heads.BertForPreTraining(CONFIG),
    # Its BiLSTM is as wide as the layers that it reads: one layer is not enough to know it.
    "feature tagger": BertFeatureTagger(CONFIG, num_labels=3, layers="concat_last_4", lstm_size=8, lstm_layers=1),
}


@functools.cache
def drawn_whole(name, seed):
    return flatten(jax.jit(heads.init_params, static_argnums=0)(MODELS[name], jax.random.key(seed)))


@pytest.mark.parametrize(
    "name, extra", [*((name, []) for name in MODELS), ("classifier", ["encoder/layer_2/output/kernel"])]
)
def test_what_is_drawn_alone_is_what_init_params_draws(name, extra):
    key, full = jax.random.key(5), drawn_whole(name, 5)
    wanted = [path for path in full if not path.startswith("encoder/")] + extra
    drawn = draw(MODELS[name], wanted)(key)
    assert set(drawn) == set(wanted)
    assert all(np.array_equal(drawn[path], full[path]) for path in wanted)


def test_shapes_are_those_of_init_params():
    for model in MODELS.values():
        shapes = flatten(heads.parameter_shapes(model))
        full = flatten(jax.eval_shape(lambda m=model: heads.init_params(m, jax.random.key(0))))
        assert shapes == full


def test_reading_ahead_changes_nothing_but_when(tmp_path):
    model = heads.BertForSequenceClassification(CONFIG, num_labels=3)
    stored = jax.jit(heads.init_params, static_argnums=0)(heads.BertModel(CONFIG), jax.random.key(1))
    write_directory(tmp_path / "model", CONFIG, jax.device_get(stored), "BertModel")
    early, late = Pretrained(tmp_path / "model"), Pretrained(tmp_path / "model")
    early.read_ahead()
    jax.tree.map(np.testing.assert_array_equal, *(start(model, jax.random.key(2)) for start in (early, late)))

    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    early = Pretrained(tmp_path / "model")
    early.read_ahead()  # what is wrong is said when the weights are asked for
    with pytest.raises(LoadError, match="not a readable safetensors file"):
        early(model, jax.random.key(2))


@pytest.mark.parametrize("kind, missing", [(heads.BertForMaskedLM, True), (heads.BertModel, False)])
def test_a_pooler_that_is_drawn_at_random_is_told(kind, missing, tmp_path, caplog):
    params = jax.jit(heads.init_params, static_argnums=0)(kind(CONFIG), jax.random.key(1))
    write_directory(tmp_path / "m", CONFIG, params, kind.__name__)
    Pretrained(tmp_path / "m")(MODELS["classifier"], jax.random.key(0))
    assert ("has no pooler: it is drawn at random" in caplog.text) == missing
