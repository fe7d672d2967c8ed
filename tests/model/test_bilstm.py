"""The BiLSTM between encoder and head: what it sees, what it starts from, what cannot be stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bertjax.interop.huggingface import write_directory
from bertjax.model.bilstm import BiLstm
from bertjax.model.heads import BertForTokenClassification, BertModel, init_params
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from bertjax.tasks import job
from bertjax.tasks.kinds import model_for

draw = jax.jit(init_params, static_argnums=0)
CONFIG = BertConfig(30, 8, 2, 2, 16, max_position_embeddings=16, is_decoder=True, initializer_range=0.5)
IDS = np.array([[2, 7, 9, 11, 3, 0, 0]], np.int32)
MASK = (IDS > 0).astype(np.int32)


def lstm(params, x):
    """Hochreiter & Schmidhuber's cell over [T, H], in numpy float64."""

    def gate(name, h, x):
        return x @ params[f"i{name}"]["kernel"] + h @ params[f"h{name}"]["kernel"] + params[f"h{name}"]["bias"]

    size = params["hi"]["bias"].shape[0]
    h, c, out = np.zeros(size), np.zeros(size), []
    for step in x:
        i, f, o = (1 / (1 + np.exp(-gate(name, h, step))) for name in "ifo")
        c = f * c + i * np.tanh(gate("g", h, step))
        h = o * np.tanh(c)
        out.append(h)
    return np.array(out)


def test_it_is_an_lstm_in_each_direction_over_the_tokens_of_a_row():
    x = np.random.default_rng(0).normal(size=(1, 7, 8))
    layer = BiLstm(8, 4)
    graph, _ = nnx.split(layer)
    params = draw(layer, jax.random.key(0))
    found = jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(x), MASK))(params)
    cells = jax.tree.map(np.float64, params)
    expected = np.concatenate([lstm(cells["forward"], x[0, :5]), lstm(cells["backward"], x[0, 4::-1])[::-1]], -1)
    np.testing.assert_allclose(found[0, :5], expected, atol=1e-6)


@pytest.mark.parametrize("bilstm", [0, 1])
def test_above_a_left_to_right_encoder_a_token_sees_those_after_it(bilstm):
    model = BertForTokenClassification(CONFIG, bilstm=bilstm, num_labels=3)
    params = draw(model, jax.random.key(0))
    run = jax.jit(lambda ids, mask: model.apply({"params": params}, ids, mask))
    changed = IDS.copy()
    changed[0, 3] = 12
    moved = np.abs(run(IDS, MASK) - run(changed, MASK))[0].max(-1) > 1e-6
    assert moved[:5].tolist() == ([True] * 5 if bilstm else [False] * 3 + [True] * 2)
    # Padding changes nothing.
    np.testing.assert_allclose(run(IDS, MASK)[:, :5], run(IDS[:, :5], MASK[:, :5]), atol=3e-6)


class Task:
    name, head, num_labels = "t", "tagging", 3


def test_it_is_drawn_over_a_checkpoint_that_has_none(tmp_path):
    params = draw(BertModel(CONFIG), jax.random.key(0))
    write_directory(tmp_path / "start", CONFIG, params, "BertModel")
    start = job.Pretrained(tmp_path / "start")
    model = model_for(Task, CONFIG, BertForTokenClassification.execution, bilstm=2)
    first, second = (flatten(start(model, jax.random.key(n))) for n in (1, 2))
    drawn = {path.split("/")[0] for path in first if not np.array_equal(first[path], second[path])}
    assert drawn == {"bilstm_0", "bilstm_1", "classifier"}
    np.testing.assert_array_equal(
        first["encoder/embeddings/word_embeddings"], params["encoder"]["embeddings"]["word_embeddings"]
    )
    plain = model_for(Task, CONFIG, BertForTokenClassification.execution)
    assert model.storable == plain and plain.storable is plain
