"""Several examples in a row: the same logits, loss and gradients as a row for each."""

import dataclasses

import jax
import numpy as np
import pytest

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
    + [(head, "bert") for head in ("regression", "multilabel", "tagging", "spans")]
    + [("tagging", "modernbert")],
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


def test_networks_whose_rows_are_read_from_end_to_end_do_not_pack():
    assert not heads.BertForTokenClassification(BERT, bilstm=1).packs
    assert not heads.BertForMultipleChoice(BERT).packs
