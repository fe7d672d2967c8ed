"""A user's own tables: classes by name, several labels, numbers."""

import csv
import json

import numpy as np
import pytest

from bertjax.tasks.custom import TableTask
from bertjax.tasks.inputs import Inputs, Output
from bertjax.tasks.kinds import KINDS, Regression, TextKind
from tests.fakes import FakeTokenizer


class Words(FakeTokenizer):
    cls_id, sep_id, pad_id = 101, 102, 0

    def encode_batch(self, texts):
        return [[len(word) for word in text.split()] for text in texts]


def test_classes_are_named_by_the_train_split_and_matched_by_name(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"x, y",pos\nz,neg\n')
    (tmp_path / "b.jsonl").write_text('{"text": "q", "label": "pos", "id": "k1"}\n')
    task = TableTask(tmp_path, {"train": "a.csv", "dev": "b.jsonl"})
    assert task.labels == ("neg", "pos")
    split = task.read("train")
    assert split.records[0].text_a == "x, y"
    assert [f["labels"] for f in task.features(split, Words(), 16, True)] == [1, 0]
    # The head of a fine-tuned model has its own order.
    other = TableTask(tmp_path, {"train": "a.csv"}, labels=("pos", "other", "neg"))
    assert [f["labels"] for f in other.features(other.read("train"), Words(), 16, True)] == [0, 2]
    dev = task.read("dev")
    [path] = task.write(dev, task.features(dev, Words(), 16, False), [[0.0, 2.0]], tmp_path)
    row = json.loads(path.read_text())
    assert (row["id"], row["prediction"]) == ("k1", "pos")
    assert row["scores"]["pos"] == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-6)
    (tmp_path / "b.jsonl").write_text(
        '{"text": "q", "label": "pos", "id": null, "index": 7}\n{"text": "q", "label": "pos"}\n'
    )
    assert [record.id for record in task.read("dev").records] == ["7", "1"]
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "q", "label": "pos", "Id": {n}}}\n' for n in (1, 2)))
    assert [record.id for record in task.read("dev").records] == ["1", "2"]  # not their numbers from 0 on


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_files_that_are_not_named_may_be_of_any_form(tmp_path, suffix):
    """The page on fine-tuning asks for a folder with CSV, TSV or JSON lines."""
    lines = {"tsv": "text\tlabel\nx\ta\ny\tb\n", "jsonl": '{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n'}
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.{suffix}").write_text(lines[suffix])
    task = TableTask(tmp_path)
    assert task.labels == ("a", "b")
    assert [record.text_a for split in ("dev", "test") for record in task.read(split).records] == ["x", "y"] * 2
    assert task.read("dev").notes == ()
    (tmp_path / "dev.csv").write_text("text,label\nz,a\n")
    dev = TableTask(tmp_path).read("dev")
    assert [record.text_a for record in dev.records] == ["z"]
    assert dev.notes == (f"dev.csv is read, and not dev.{suffix} beside it; the option files names others",)
    assert TableTask(tmp_path, {"train": "dev.csv", "dev": "dev.csv"}, labels="ab").read("dev").notes == ()


def test_a_label_unknown_to_the_head_is_refused_with_file_and_line(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nx\ta\ny\tb\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\ta\ny\tc\n")
    task = TableTask(tmp_path, {"train": "a.tsv", "dev": "b.tsv"})
    with pytest.raises(ValueError, match=r"b\.tsv:3: label 'c' is unknown; the head has"):
        task.features(task.read("dev"), Words(), 16, False)


def test_several_labels_come_as_a_list_or_joined_and_may_be_none_at_all(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": ["b", "a"]}\n{"text": "y", "label": []}\n')
    (tmp_path / "b.csv").write_text("text,label\nx,a|b\ny,\nz,b\n")
    task = TableTask(tmp_path, {"train": "a.jsonl", "dev": "b.csv"}, head="multilabel")
    dev = task.read("dev")
    features = task.features(dev, Words(), 16, False)
    np.testing.assert_array_equal([f["label_set"] for f in features], [[1, 1], [0, 0], [0, 1]])
    outputs = [[1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]]
    assert task.score(dev, features, outputs)["micro_f1"] == 1.0


def test_numbers_make_a_regression_over_pairs(tmp_path):
    (tmp_path / "a.tsv").write_text("q\ta\tlabel\nx\ty\t0.5\nz\tw\t2\n")
    task = TableTask(tmp_path, {"train": "a.tsv"}, head="regression", text=("q", "a"))
    features = task.features(task.read("train"), Words(), 16, True)
    assert [f["targets"] for f in features] == [0.5, 2.0]
    np.testing.assert_array_equal(features[0]["token_type_ids"], [0, 0, 0, 1, 1])
    (tmp_path / "a.tsv").write_text("q\ta\tlabel\nx\ty\thigh\n")
    with pytest.raises(ValueError, match=r"a\.tsv:2: label 'high' is not a number"):
        task.read("train")


def test_a_train_file_without_the_label_column_is_refused_and_a_test_file_is_not(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tclass\nx\ta\ny\tb\n")
    told = "no column 'label' to train on; found text, class. config.task.options.label names another"
    with pytest.raises(ValueError, match=told):
        TableTask(tmp_path, {"train": "a.tsv"})
    task = TableTask(tmp_path, {"train": "a.tsv", "test": "a.tsv"}, label="class")
    task.label = "label"
    assert not task.read("test").labelled
    with pytest.raises(ValueError, match=r"labels=\(...\)"):
        TableTask(tmp_path, {"test": "a.tsv"})


def test_a_split_that_teaches_nothing_is_refused(tmp_path):
    (tmp_path / "one.csv").write_text("text,label\nx,a\ny,a\n")
    with pytest.raises(ValueError, match="one.csv: every label is 'a'"):
        TableTask(tmp_path, {"train": "one.csv"})
    (tmp_path / "empty.csv").write_text("text,label\nx,\ny,\n")
    with pytest.raises(ValueError, match="empty.csv: no row has a label"):
        TableTask(tmp_path, {"train": "empty.csv"}, head="multilabel")
    (tmp_path / "none.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match="none.csv has no rows, and it is the 'train' split"):
        TableTask(tmp_path, {"train": "none.csv"})


def test_a_label_column_of_another_name_is_told_where_a_split_has_no_labels(tmp_path):
    (tmp_path / "a.csv").write_text("text,lab\nx,a\ny,b\n")
    split = TableTask(tmp_path, {"dev": "a.csv"}, labels=("a", "b")).read("dev")
    with pytest.raises(ValueError, match=r"has no labels \(.*a.csv has no column 'label'; found text, lab\), so it"):
        split.require_labels("scoring")


def test_one_column_may_be_named_without_brackets(tmp_path):
    (tmp_path / "a.csv").write_text("body,label\nx,a\ny,b\n")
    task = TableTask(tmp_path, {"train": "a.csv"}, text="body")
    assert [record.text_a for record in task.read("train").records] == ["x", "y"]


def test_blanks_around_a_class_name_make_no_other_class(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,pos \ny, pos\nz,neg\n")
    assert TableTask(tmp_path, {"train": "a.csv"}).labels == ("neg", "pos")


@pytest.mark.parametrize("cell", ["NaN", '"-1"', "-1", "null", '" "'])
def test_a_cell_that_is_no_label_becomes_no_class(tmp_path, cell):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x", "label": 1}}\n{{"text": "y", "label": {cell}}}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: no label, although .*-1 is no label"):
        TableTask(tmp_path, {"train": "a.jsonl"})


def test_integer_classes_are_in_the_order_of_their_values(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"x\t{n}\n" for n in [11, 2, 10, *range(12)]))
    task = TableTask(tmp_path, {"train": "a.tsv"})
    assert task.labels == tuple(map(str, range(12)))
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\t10|-1\ny\t2\nz\t-3\n")
    assert TableTask(tmp_path, {"train": "b.tsv"}, head="multilabel").labels == ("-3", "-1", "2", "10")
    (tmp_path / "c.tsv").write_text("text\tlabel\nx\t10\ny\t2\nz\t1b\n")
    assert TableTask(tmp_path, {"train": "c.tsv"}).labels == ("10", "1b", "2")


def multilabel(folder, cells, **options):
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "label"), *(("x", cell) for cell in cells)])
    return TableTask(folder, {"train": "a.csv"}, head="multilabel", **options)


@pytest.mark.parametrize(
    "cells",
    [
        ["['x', 'y']", "['y']", "[]"],
        ['["x", "y"]', '["y"]', "[ ]"],
        ["x|y", "y", ""],
        ["{'y', 'x'}", '"y"'.strip('"'), ""],
        ["('x', 'y')", "('y',)", "()"],
    ],
)
def test_lists_in_a_cell_are_several_labels(tmp_path, cells):
    task = multilabel(tmp_path, cells)
    assert task.labels == ("x", "y")
    found = [set(record.label) for record in task.read("train").records]
    assert found == [{"x", "y"}, {"y"}, set()]


@pytest.mark.parametrize("names", [("a|b", "c, d"), ("x", "y")])
def test_labels_that_were_predicted_are_read_as_they_are(tmp_path, names):
    inputs = Inputs(["text"], [2], "csv", ("text",), [{"text": "q"}])
    with open(tmp_path / "train.csv", "w") as stream:
        output = Output(stream, None, "classify", inputs)
        output.write({"labels": dict.fromkeys(names, 0.9), "chosen": list(names)})
    task = TableTask(tmp_path, head="multilabel", label="prediction", labels=names)
    assert task.read("train").records[0].label == names


def test_names_in_lists_are_read_as_json_or_python_reads_them(tmp_path):
    cells = [r"""["it's", "a,b", "\ud83d\ude00"]""", r"""['it\'s', "a,b"]""", "[3, -1]"]
    found = [record.label for record in multilabel(tmp_path, cells).read("train").records]
    assert found == [("it's", "a,b", "\U0001f600"), ("it's", "a,b"), ("3", "-1")]


@pytest.mark.parametrize(
    "cell",
    [
        "['x' 'y']",
        "[x, y]",
        "['x', 'y'",
        "['x', ['y']]",
        "['x' + 'y']",
        "[" + " " * 200_000 + "x]",
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_nearly_a_list_is_refused_and_costs_no_time(tmp_path, cell):
    if cell[-1] == "]":
        with pytest.raises(ValueError, match=r"a.csv:3: label .* is not a list of names: write each"):
            multilabel(tmp_path, ["['x']", cell])
    else:
        assert cell in multilabel(tmp_path, ["['x']", cell]).labels


def test_lists_of_labels_are_no_classes(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,\"['a', 'b']\"\ny,['b']\n")
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": ["a"]}\n')
    for name, message in (
        ("a.csv", "a.csv:2: label .*is a list of labels"),
        ("a.jsonl", "a.jsonl:1: label .*is not one label"),
    ):
        with pytest.raises(ValueError, match=message + ".*head='multilabel'"):
            TableTask(tmp_path, {"train": name})


@pytest.mark.parametrize("rows", [[[1, 0, 1], [0, 0, 1]], [[1.0, 0.0], [0.0, 1.0]], ["[0, 1, 1]", "[1, 1, 1]"]])
def test_zeros_and_ones_of_every_label_are_no_names(tmp_path, rows):
    lines = [json.dumps({"text": "x", "label": row}) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"a.jsonl:1: label says [01], [01].* names of the labels that apply"):
        TableTask(tmp_path, {"train": "a.jsonl"}, head="multilabel")
    (tmp_path / "a.jsonl").write_text("".join([*lines, '{"text": "y", "label": ["1"]}\n']))
    assert TableTask(tmp_path, {"train": "a.jsonl"}, head="multilabel").labels == ("0", "1")


def test_a_number_has_one_name_however_it_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x", "label": 1.0}\n{"text": "y", "label": 1}\n{"text": "z", "label": 0}\n'
    )
    assert TableTask(tmp_path, {"train": "a.jsonl"}).labels == ("0", "1")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "label": [1.0, "a"]}\n{"text": "y", "label": [1]}\n')
    assert TableTask(tmp_path, {"train": "b.jsonl"}, head="multilabel").labels == ("1", "a")
    (tmp_path / "c.csv").write_text("text,label\nx,1\ny,0\nz,1.0\n")
    with pytest.raises(ValueError, match="c.csv:4: label 1.0 is the same number as 1: write them alike"):
        TableTask(tmp_path, {"train": "c.csv"})
    (tmp_path / "d.jsonl").write_text('{"text": "x", "label": [0.2, 0.8]}\n')
    with pytest.raises(ValueError, match="d.jsonl:1: label holds '?0.2'?, not a name"):
        TableTask(tmp_path, {"train": "d.jsonl"}, head="multilabel")


def test_another_separator_of_labels_is_asked_for(tmp_path):
    for mark in ",;":
        cells = [f"x{mark} y", "x", f"z{mark}y"]
        with pytest.raises(ValueError, match=f"looks like several labels: .*separator='{mark}'"):
            multilabel(tmp_path, cells)
        assert multilabel(tmp_path, cells, separator=mark).labels == ("x", "y", "z")
        assert f"x{mark} y" in multilabel(tmp_path, cells, separator="|").labels
        with pytest.raises(ValueError, match=f"looks like several labels: .*separator='{mark}'"):
            multilabel(tmp_path, ["x", f"x{mark}y"])
    assert multilabel(tmp_path, ["Bonn, NRW", "Rome"]).labels == ("Bonn, NRW", "Rome")


@pytest.mark.parametrize(
    "labels, said",
    [
        ([f"{i / 7:.3f}" for i in range(20)], "the 20 classes are all numbers (0.000 to 2.714); to"),
        (["0.5", "1.0", "1"], "the 3 classes are all numbers (0.5 to 1.0)"),
        ([str(i) for i in range(60)], "the 60 classes are all numbers (0 to 59)"),
        (["1e-3", "-2.5"], "the 2 classes are all numbers (-2.5 to 1e-3)"),
        ([str(i) for i in range(12)], None),
        (["1.0", "2.0"], None),
        (["0.5", "half"], None),
    ],
)
def test_classes_that_look_like_a_quantity_are_remarked_upon(tmp_path, labels, said):
    rows = [f'{{"text": "x", "label": "{label}"}}\n' for label in labels]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    notes = TableTask(tmp_path, {"train": "a.jsonl"}).read("train").notes
    assert [note.startswith(said) for note in notes] == ([True] if said else [])
    assert all("set the option head='regression'" in note for note in notes)


@pytest.mark.parametrize(
    "labels, options",
    [("x x|y y", "head='multilabel'"), ("x x;y y", "head='multilabel' and separator=';'"), ("x x|y z", None)],
)
def test_classes_that_name_other_classes_are_remarked_upon(tmp_path, labels, options):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "t", "label": "{label}"}}\n' for label in labels.split()))
    said = f"{labels.split()[1]!r} is a class beside those that it names; for several labels set {options}"
    assert TableTask(tmp_path, {"train": "a.jsonl"}).read("train").notes == ((said,) if options else ())


def test_nearly_as_many_classes_as_rows_are_remarked_upon(tmp_path):
    for name, rows in (("swapped", 16), ("few", 12)):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"good,text {i}\n" for i in range(rows)))
    said = "16 classes in 16 rows: is 'label' the column of labels? The options text and label name the columns"
    notes = [TableTask(tmp_path, {"train": f"{name}.csv"}).read("train").notes for name in ("swapped", "few")]
    assert notes == [(said,), ()]


@pytest.mark.parametrize("head", ["classification", "multilabel"])
def test_classes_that_only_capital_letters_tell_apart_are_remarked_upon(tmp_path, head):
    for name, labels in (("a", "yes No no Yes no maybe"), ("b", "yes No")):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"t,{label}\n" for label in labels.split()))
    task = TableTask(tmp_path, {"train": "a.csv", "dev": "b.csv"}, head)
    said = "'No' and 'no' are classes of their own; if they are one, write them alike"
    assert task.labels == ("No", "Yes", "maybe", "no", "yes")
    assert (task.read("train").notes, task.read("dev").notes) == ((said,), ())


@pytest.mark.parametrize("text", ["NA", "null", "nan", "None", "\xa0", " ", ""])
def test_words_that_look_like_missing_values_are_texts_and_classes(tmp_path, text):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), (text, "NA"), ("y", "null"), ("z", "nan")])
    task = TableTask(tmp_path, {"train": "a.csv"})
    assert task.labels == ("NA", "nan", "null")
    assert task.read("train").records[0].text_a == text


def test_a_head_of_ones_own_is_shown_with_whatever_its_labels_are(tmp_path, monkeypatch):
    class Two(Regression):
        gold_fields = {"targets": "float32 B C"}

        def label(self, value, where, column):
            return tuple(value)

        def readable(self, prediction, labels):
            return dict(zip(labels, prediction.tolist(), strict=True))

        def predict(self, logits):
            return logits

        compare = TextKind.compare

    monkeypatch.setitem(KINDS, "two", Two())
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": [0.5, 2]}\n')
    task = TableTask(tmp_path, {"dev": "a.jsonl"}, head="two", labels=("a", "b"))
    [example] = task.examples(task.read("dev"), [], np.array([[0.25, 1.5]]))
    assert (example["gold"], example["predicted"]) == ("(0.5, 2)", "{'a': 0.25, 'b': 1.5}")
