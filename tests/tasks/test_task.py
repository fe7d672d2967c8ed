"""Segments, length buckets and batches that all tasks share."""

import types

import numpy as np
import pytest

from bertjax.tasks import batches as batching
from bertjax.tasks import encoding, shapes, task
from bertjax.tasks.make import make_task
from bertjax.tokenization import Layout

TOKENIZER = types.SimpleNamespace(layout=Layout.bert(101, 102))


def rows(lengths, labelled=True):
    """Rows whose ids all equal the row's number + 1, so that a batch shows where they came from."""
    made = []
    for i, n in enumerate(lengths):
        row = {"input_ids": np.full(n, i + 1, np.int32), "token_type_ids": np.zeros(n, np.int32)}
        made.append(row | ({"labels": i % 2} if labelled else {}) | {"example": i})
    return made


@pytest.mark.parametrize(
    ("lengths", "kept"), [((25, 200), (25, 100)), ((125, 130), (63, 62)), ((0, 5), (0, 5)), ((200, 0), (125, 0))]
)
def test_pairs_are_trimmed_longest_first_and_the_second_side_loses_on_a_tie(lengths, kept):
    assert encoding.trim_lengths(*lengths, 128 - 3) == kept


def test_the_first_separator_belongs_to_segment_zero_and_an_empty_segment_stays():
    ids, types = encoding.segment_row(TOKENIZER, [5, 6], [7], 128)
    assert ids.tolist() == [101, 5, 6, 102, 7, 102] and types.tolist() == [0, 0, 0, 0, 1, 1]
    assert encoding.segment_row(TOKENIZER, [5], [], 128)[0].tolist() == [101, 5, 102, 102]
    assert encoding.segment_row(TOKENIZER, [5] * 10, None, 4)[0].tolist() == [101, 5, 5, 102]
    for second, specials in ((None, 2), ([6], 3)):  # else a model would learn from no text at all
        with pytest.raises(ValueError, match=f"no room for text beside {specials} special"):
            encoding.segment_row(TOKENIZER, [5], second, specials)


def padded(*buckets):
    return [shapes.Shape(8, bucket) for bucket in buckets]


@pytest.mark.parametrize("group", (0, 4))
def test_training_batches_are_a_function_of_seed_and_step_and_show_each_row_once_an_epoch(group):
    features = rows(np.random.default_rng(1).integers(3, 60, 101))
    batches = batching.TrainingBatches(features, 8, seed=5, shapes=padded(16, 32, 64), pad_id=0, group=group)
    again = batching.TrainingBatches(features, 8, seed=5, shapes=padded(16, 32, 64), pad_id=0, group=group)
    assert batches.steps_per_epoch == 13
    for epoch in (1, 0):  # any order of access
        seen = np.concatenate([batches.rows(epoch * 13 + i) for i in range(13)])
        assert sorted(seen) == list(range(101))
    for step in (20, 3):
        for name, value in again[step].items():
            np.testing.assert_array_equal(value, batches[step][name])
    first = [tuple(batches.rows(i)) for i in range(13)]
    assert first != [tuple(batches.rows(13 + i)) for i in range(13)]
    other = batching.TrainingBatches(features, 8, seed=6, shapes=padded(16, 32, 64), pad_id=0, group=group)
    assert first != [tuple(other.rows(i)) for i in range(13)]


def test_batches_are_random_draws_whatever_the_buckets_unless_grouped():
    features = rows(np.random.default_rng(1).integers(3, 128, 640))
    one, three, grouped = (
        batching.TrainingBatches(features, 8, 0, padded(*buckets), 0, group)
        for buckets, group in (((128,), 0), ((32, 80, 128), 0), ((32, 80, 128), 16))
    )
    for step in range(160):
        np.testing.assert_array_equal(one.rows(step), three.rows(step))
    # Lengths within a batch scatter as much as they do over all rows, or far less when grouped.
    lengths = np.array([batching.row_length(row) for row in features])
    spread = [np.mean([lengths[b.rows(i)].var(ddof=1) for i in range(80)]) / lengths.var() for b in (three, grouped)]
    assert abs(spread[0] - 1) < 0.1 and spread[1] < 0.3
    spent = [sum(b[i]["input_ids"].size for i in range(80)) for b in (one, three, grouped)]
    assert spent[2] < 0.75 * spent[0] and spent[1] <= spent[0]


def test_the_short_last_batch_keeps_its_shape_with_rows_of_weight_zero():
    batches = batching.TrainingBatches(rows([4] * 10), 8, 0, padded(16), pad_id=9)
    batch = batches[1]
    assert batch["input_ids"].shape == (8, 16)
    np.testing.assert_array_equal(batch["weights"], [1, 1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch["attention_mask"].sum(1), [4] * 8)
    assert (batch["input_ids"][:, 4:] == 9).all()
    assert batch["labels"].dtype == np.int32 and "example" not in batch


def test_processes_get_the_contiguous_slices_of_the_global_batch():
    features = rows(range(3, 35))
    whole = batching.TrainingBatches(features, 8, 0, padded(64), 0)[2]
    parts = [
        batching.TrainingBatches(features, 8, 0, padded(64), 0, process_index=i, process_count=2)[2] for i in range(2)
    ]
    for name, value in whole.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)


def test_evaluation_shows_every_row_exactly_once_in_one_shape_a_bucket():
    features = rows(np.random.default_rng(2).integers(3, 129, 408))
    used, seen = set(), []
    shape_of = lambda n: shapes.Shape(32, 32 if n <= 32 else 64 if n <= 64 else 128)  # noqa: E731
    for _, members, batch in batching.evaluation_batches(features, shape_of, 0):
        indices = np.concatenate(members)
        used.add(batch["input_ids"].shape)
        real = batch["weights"] > 0
        assert real.sum() == len(indices)
        np.testing.assert_array_equal(batch["input_ids"][real][:, 0], indices + 1)
        seen += list(indices)
    assert sorted(seen) == list(range(408))
    assert used == {(32, 32), (32, 64), (32, 128)}


def test_rows_without_labels_cannot_be_trained_on():
    with pytest.raises(ValueError, match="no labels"):
        batching.TrainingBatches(rows([4] * 5, labelled=False), 2, 0, padded(16), 0)
    for records, missing in (([object()], "labels"), ([], "rows")):
        split = task.Split("test", records, labelled=False, fingerprint="")
        with pytest.raises(ValueError, match=f"'test' has no {missing}.*scoring"):
            split.require_labels("scoring")


def test_labels_are_matched_by_name_with_those_of_the_head():
    assert task.adopt_labels(["a", "b"], ["b", "c", "a"], "DIR") == ("b", "c", "a")
    assert task.adopt_labels(["a", "b"], ["B", "C", "A"], "DIR") == ("b", "C", "a")  # NEGATIVE and POSITIVE of SST-2
    assert task.adopt_labels(["a", "A"], ["A", "a"], "DIR") == ("A", "a")
    with pytest.raises(ValueError, match=r"\['b'\] are unknown to the head of DIR"):
        task.adopt_labels(["A", "b"], ["A", "a"], "DIR")
    with pytest.raises(ValueError, match=r"\['x'\] are unknown to the head of DIR"):
        task.adopt_labels(["a", "x"], ["a", "b"], "DIR")


def test_multiple_choice_and_tagging_fields_are_padded_along_their_tokens():
    ids = [np.full(n, 7, np.int32) for n in (3, 5)]
    row = {"input_ids": ids, "token_type_ids": [np.zeros(3, int), np.ones(5, int)], "labels": 1}
    batch = batching.collate([row], 8, 2, pad_id=0)
    assert batch["input_ids"].shape == (2, 2, 8)
    np.testing.assert_array_equal(batch["attention_mask"].sum(-1), [[3, 5], [3, 5]])
    assert batching.row_length(row) == 5
    tagged = {"input_ids": ids[0], "tags": np.array([0, 2, 0]), "tag_weights": np.array([0, 1, 0])}
    batch = batching.collate([tagged], 4, 1, pad_id=0)
    np.testing.assert_array_equal(batch["tags"], [[0, 2, 0, 0]])
    assert batch["tag_weights"].dtype == np.float32


@pytest.mark.parametrize(
    "name, options",
    [
        ("rte", {}),
        ("xnli", {}),
        ("squad1.1", {}),
        ("swag", {}),
        ("ner", {"labels": ("O", "B-X")}),
        ("table", {"files": {"dev": "dev.csv"}, "labels": ("a", "b")}),
    ],
)
def test_a_split_that_a_task_has_not_is_refused_with_those_that_it_has(tmp_path, name, options):
    with pytest.raises(ValueError, match="has no split 'validation'; one of .*dev"):
        make_task(name, str(tmp_path), options).read("validation")


def test_a_gold_label_that_the_head_lacks_is_refused_with_its_place():
    place = task.label_places(("a", "b"))
    assert place("b", "x.tsv:3: label") == 1
    with pytest.raises(ValueError, match=r"^x\.tsv:3: tag 'c' is unknown; the head has \['a', 'b"):
        place("c", "x.tsv:3: tag")
    with pytest.raises(ValueError, match=r"label '3.5' is unknown; .*; config.task.options.head=regression"):
        task.label_places(("1.0", "2.5"))("3.5", "x.tsv:3: label")
