"""Rows of Python objects: lists, pandas, datasets, all to the same plain rows."""

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from bertjax.data import objects

ROWS = [{"text": "a", "label": "x"}, {"text": "b", "label": None}]


def test_lists_of_dicts_and_of_tuples_and_a_dict_of_columns_are_the_same_rows():
    for data in (
        ROWS,
        [("a", "x"), ("b", None)],
        {"text": ["a", "b"], "label": ["x", None]},
        {"text": np.array(["a", "b"]), "label": ["x", float("nan")]},
    ):
        assert list(objects.rows(data, ("text", "label"))) == ROWS
    assert list(objects.texts(["a", "b"])) == list(objects.texts(ROWS)) == ["a", "b"]


def test_a_dataframe_and_a_series_of_pandas_are_rows():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", "b"], "label": ["x", None], "number": [1, 2]})
    found = list(objects.rows(frame))
    assert [{**row, "number": i + 1} for i, row in enumerate(ROWS)] == found
    assert all(type(row["number"]) is int for row in found)
    assert list(objects.texts(frame["text"])) == list(objects.texts(frame)) == ["a", "b"]
    missing = pandas.DataFrame({"label": pandas.array([1, None], dtype="Int64")})
    assert list(objects.rows(missing)) == [{"label": 1}, {"label": None}]


def test_the_class_labels_of_a_dataset_become_their_names():
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["x", "y"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": datasets.Sequence(label)})
    rows = {"text": ["a", "b"], "label": [0, -1], "tags": [[1, 0], []]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    expected = [{**row, "tags": tags} for row, tags in zip(ROWS, (["y", "x"], []), strict=True)]
    assert list(objects.rows(dataset)) == list(objects.rows(dataset.to_iterable_dataset())) == expected
    for name in ("numpy", "pandas", "arrow"):
        assert list(objects.rows(dataset.with_format(name))) == expected
    with pytest.raises(ValueError, match="^train is a set of splits, train, test: give one of them"):
        list(objects.rows(datasets.DatasetDict({"train": dataset, "test": dataset}), name="train"))


@pytest.mark.parametrize(
    "data, message",
    [
        ("a text", "train takes a list of rows, a DataFrame or a Dataset, not 'a text'"),
        (5, "train takes a list of rows, a DataFrame or a Dataset, not 5"),
        ([("a", "x"), ("b",)], "train: row 1 is .'b',.; expected text and label"),
        ({"text": ["a"], "label": ["x", "y"]}, "train: its columns have different lengths: text 1, label 2"),
        ({"text": "a"}, "train is a dict of columns, each of which is a list"),
    ],
)
def test_what_is_no_data_is_refused(data, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        list(objects.rows(data, ("text", "label"), "train"))


@pytest.mark.parametrize("columns", [["text", "label", "label"], ["0", 0, "label"]])
def test_a_dataframe_with_columns_of_one_name_is_refused(columns):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([("a", "x", "y")], columns=columns)
    twice = str(columns[1])
    with pytest.raises(ValueError, match=f"^train: the DataFrame has several columns '{twice}'; drop"):
        list(objects.rows(frame, name="train"))


def test_what_is_no_text_is_refused():
    with pytest.raises(ValueError, match="^texts: row 1 has no 'text' that is text; text is 5"):
        list(objects.texts(["a", 5], name="texts"))
    with pytest.raises(ValueError, match="^texts: row 0 has no 'text' that is text; found body"):
        list(objects.texts([{"body": "a"}], name="texts"))


def test_values_are_written_as_json_has_them(tmp_path):
    row = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([1, 2]), "d": ("x", None), "e": True, "f": np.nan}
    row |= {"g": "é".encode(), "h": {"y", "x"}, "i": Decimal("0.5"), 0: Fraction(1, 4)}
    objects.write_rows(objects.rows([row]), tmp_path / "rows.jsonl")
    [line] = (tmp_path / "rows.jsonl").read_text().splitlines()
    expected = {"a": 0.5, "b": 3, "c": [1, 2], "d": ["x", None], "e": "True", "f": None}
    assert json.loads(line) == expected | {"g": "é", "h": ["x", "y"], "i": 0.5, "0": 0.25}
