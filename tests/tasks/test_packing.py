"""Several examples in a row: the same logits, loss and gradients as a row for each."""

import dataclasses

import jax
import numpy as np
import pytest

from bertjax.config.task import TaskSettings
from bertjax.model import heads
from bertjax.model.presets import BertConfig, modern
from bertjax.tasks import batches, kinds, shapes
from bertjax.tasks.shapes import Shape

LENGTHS = (13, 7, 20, 4, 30, 5, 6, 9)
PAD = 1
BERT = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    initializer_range=0.2,
    pad_token_id=PAD,
    classifier_dropout=0.0,
)
MODERN = dataclasses.replace(
    modern(2, 32, 48, vocab_size=50, num_attention_heads=2, local_attention=8, global_attn_every_n_layers=2),
    pad_token_id=PAD,
    max_position_embeddings=64,
    initializer_range=0.2,
)
NETWORKS = {
    "bert": BERT,
    "roberta": dataclasses.replace(BERT, positions="offset", heads="roberta", type_vocab_size=1),
    "distilbert": dataclasses.replace(BERT, heads="distilbert", type_vocab_size=0),
    "left to right": dataclasses.replace(BERT, is_decoder=True),
    "modernbert": MODERN,
    "modernbert, mean": dataclasses.replace(MODERN, classifier_pooling="mean"),
}


def rows_of(head, rng, segments):
    """One row of features for each of LENGTHS, with the gold of its head."""
    made = []
    for n in LENGTHS:
        ids = rng.integers(5, 50, n).astype(np.int32)
        types = (np.arange(n) > n // 2).astype(np.int32) * (segments > 1)
        gold = {
            "classification": {"labels": int(rng.integers(3))},
            "regression": {"targets": float(rng.normal())},
            "multilabel": {"label_set": rng.integers(0, 2, 3).astype(np.float32)},
            "tagging": {
                "tags": rng.integers(0, 3, n).astype(np.int32),
                "tag_weights": rng.integers(0, 2, n).astype(np.float32),
            },
            "spans": {"start_positions": int(rng.integers(n)), "end_positions": int(rng.integers(n))},
        }[head]
        made.append({"input_ids": ids, "token_type_ids": types, **gold})
    return made


@pytest.mark.parametrize(
    "head, network",
    [("classification", name) for name in NETWORKS]
    + [(head, "bert") for head in ("regression", "multilabel", "tagging", "spans")],
)
def test_packed_rows_have_the_logits_loss_and_gradients_of_padded_ones(head, network):
    config, kind = NETWORKS[network], kinds.KINDS[head]
    model = kind.network(config, **({"num_labels": 1 if head == "regression" else 3} if kind.sized else {}))
    assert model.packs
    params = jax.jit(lambda key: heads.init_params(model, key))(jax.random.key(0))
    features = rows_of(head, np.random.default_rng(0), config.type_vocab_size)
    objective = kinds.TaskObjective(model, head, (1.0, 0.5, 2.0) if kind.class_weights else ())
    shape = Shape(4, 48, 6)

    @jax.jit
    def computed(batch):
        (loss, sums), gradients = jax.value_and_grad(
            lambda p: objective.loss(p, batch, objective.denominators(batch), None), has_aux=True
        )(params)
        return objective.outputs(params, batch), loss, sums, gradients

    ((_, rows),) = shapes.filled(LENGTHS, lambda n: shape)
    assert max(map(len, rows)) >= 3 and len(rows) < 4  # the last row is empty
    padded = Shape(len(LENGTHS) + 1, 48)
    one_each = [[i] for i in range(len(LENGTHS))]
    made = {}
    for way, members in ((shape, rows), (padded, one_each)):
        logits, *others = computed(batches.batch_of(features, members, way, PAD))
        found = dict(batches.of_examples(np.asarray(logits), way, members, LENGTHS, kind.by_token))
        made[way] = [found[i] for i in range(len(LENGTHS))], others
    for one, other in zip(*map(jax.tree.leaves, made.values()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(made[padded][1][1]))  # the sums are not empty


def test_packing_keeps_every_example_and_leaves_little_room():
    rng = np.random.default_rng(0)
    lengths = np.minimum(3 + rng.geometric(0.05, 3000), 128)
    shape = shapes.packed_shape(lengths, 128, 512)
    assert shape.length == 128 and shape.rows <= 128
    made = list(shapes.filled(lengths, lambda n: shape))
    rows = [row for _, some in made for row in some]
    assert sorted(i for row in rows for i in row) == list(range(3000))
    held = [sum(lengths[i] for i in row) for row in rows]
    assert max(held) <= 128 and max(map(len, rows)) <= shape.slots
    assert lengths.sum() > 0.97 * 128 * shape.rows * len(made)  # few empty rows in the last batch either


@pytest.mark.parametrize("length, expected", [(42, 128), (80, 80), (128, 128), (20, 64)])
def test_rows_are_twice_as_long_where_that_leaves_less_room(length, expected):
    assert shapes.packed_shape([length] * 1000, 32, 512).length == expected


def test_rows_are_never_longer_than_the_model_s_positions():
    assert shapes.packed_shape([70] * 1000, 32, 100).length == 80
    assert shapes.packed_shape([30] * 1000, 32, 48).length == 48


def test_an_example_longer_than_its_rows_is_refused():
    with pytest.raises(ValueError, match="an example of 70 tokens is longer than the rows of its batch, 64"):
        list(shapes.filled([4, 70], lambda n: Shape(2, 64, 8)))


def test_networks_whose_rows_are_read_from_end_to_end_do_not_pack():
    assert not heads.BertForTokenClassification(BERT, bilstm=1).packs
    assert not heads.BertForMultipleChoice(BERT).packs


def features_of(lengths, rng):
    return [
        {"input_ids": rng.integers(5, 50, n), "token_type_ids": np.zeros(n, int), "labels": i}
        for i, n in enumerate(lengths)
    ]


def test_packed_training_batches_hold_the_examples_of_padded_ones():
    rng = np.random.default_rng(0)
    lengths = np.minimum(3 + rng.geometric(0.08, 500), 64)
    features = features_of(lengths, rng)
    packed = shapes.training_shapes(lengths, 32, 512, multiple=4)
    assert [shape.rows for shape in packed] == [packed[0].rows, 32] and packed[0].rows % 4 == 0
    assert packed[0].rows * packed[0].length < 0.5 * 32 * 64
    one, other = (batches.TrainingBatches(features, 32, 1, way, PAD) for way in (packed, [Shape(32, 64)]))
    usual = 0
    for step in range(16):
        batch, real = one[step], other[step]["weights"] > 0
        assert sorted(batch["labels"][batch["weights"] > 0]) == sorted(other[step]["labels"][real])
        assert batch["weights"].sum() == real.sum()
        usual += len(batch["weights"]) == packed[0].rows
    assert usual >= 15


def test_a_batch_that_does_not_fit_takes_the_shape_with_a_row_for_each_example():
    features = features_of([64] * 8 + [4] * 100, np.random.default_rng(0))
    one = batches.TrainingBatches(features, 8, 0, [Shape(2, 64, 8), Shape(8, 64, 8)], PAD)
    for step in range(one.steps_per_epoch):
        long = sum(len(features[i]["input_ids"]) == 64 for i in one.rows(step))
        batch = one[step]
        assert len(batch["weights"]) == (2 if long + (long < 8) <= 2 else 8)
        assert batch["weights"].sum() == len(one.rows(step))


@pytest.mark.parametrize("head, bilstm", [("multiple_choice", 0), ("tagging", 1)])
def test_training_on_packed_rows_is_refused_where_the_network_cannot_read_them(head, bilstm):
    model = kinds.KINDS[head].network(BERT, bilstm=bilstm)
    with pytest.raises(ValueError, match="task.pack=all: .* set --config.task.pack=evaluation"):
        shapes.Shapes(TaskSettings(pack="all"), model.packs, 64, 1)
