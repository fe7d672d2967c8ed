"""JSON lines: what is accepted means the same as to the json module, the rest is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.objects import write_rows
from bertjax.tasks.custom import TableTask
from bertjax.tasks.inputs import read_inputs
from bertjax.tasks.make import Remembered
from bertjax.tasks.tables import read_objects, read_table

TEXT = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "NA",
            "nan",
            "null",
            "a|b",
            "['x', 'y']",
            "-1",
            "3",
            "0.5",
            "\u2028",
            "\x00",
            "\ud800",
            "\U0001f600",
            "\ufeff",
            '"',
            "\\u0041",
            "x",
            "y",
        ]
    ),
    st.text(st.characters(), max_size=3),
)
SCALARS = st.one_of(TEXT, st.integers(), st.floats(), st.booleans(), st.none())
VALUES = st.one_of(
    TEXT, TEXT, SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=1)
)
ROWS = st.one_of(
    st.fixed_dictionaries({"text": TEXT, "label": VALUES}, optional={"id": SCALARS}),
    st.fixed_dictionaries({"text": TEXT, "label": TEXT}),
    st.dictionaries(st.sampled_from(["text", "label", "id", ""]), VALUES, max_size=3),
)
# Whole lines: rows, blank ones, what is not an object, and what is not JSON.
LINES = st.lists(
    st.one_of(
        ROWS.map(json.dumps),
        ROWS.map(json.dumps),
        ROWS.map(lambda row: json.dumps(row, indent=None)),
        st.sampled_from(
            [
                "",
                "  ",
                "[]",
                "3",
                "null",
                "{",
                "{}",
                '{"text": "a", "text": "b"}',
                '{"text": "a",}',
                "{'text': 'a'}",
                '{"text": NaN}',
                '{"text": "a"} {}',
                "[" * 3000,
                '{"text": ' + "9" * 5000 + "}",
                '{"text": "\t"}',
                "\ufeff{}",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("jsonl")


def write(path, lines, end="\n"):
    path.write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    return path


def reference(path) -> list[dict]:
    """The objects, by the json module and by lines alone."""
    text = path.read_bytes().decode("utf-8-sig")
    lines = text.split("\n") if "\n" in text else text.split("\r")
    return [json.loads(line) for line in lines if line.strip()]


def same(one, other):
    """Equal, and NaN to itself."""
    return json.dumps(one) == json.dumps(other)


@given(lines=LINES, end=st.sampled_from(["\n", "\n", "\r\n", "\r"]))
def test_accepted_lines_are_the_objects_of_the_json_module(directory, lines, end):
    path = write(directory / "a.jsonl", lines, end)
    try:
        rows = read_objects(path)
    except ValueError as error:
        assert str(path) in str(error) and type(error) is ValueError
        return
    assert same([row for _, row in rows], reference(path))
    assert all(
        json.loads(
            path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")[number - 1]
        ).keys()
        == row.keys()
        for number, row in rows
    )
    try:
        table = read_table(path, ["text"])
    except ValueError as error:
        assert f"{path}:" in str(error)
        assert any("text" not in row for _, row in rows)
        return
    assert same([row for _, row in table.rows], [row for _, row in rows])


@given(lines=LINES, head=st.sampled_from(["classification", "multilabel", "regression"]))
def test_records_have_the_texts_and_labels_of_the_objects(directory, lines, head):
    path = write(directory / "a.jsonl", lines)
    try:
        split = TableTask(directory, {"train": "a.jsonl"}, head=head).read("train")
        inputs = read_inputs(str(path), "classify", Remembered())
    except ValueError as error:
        assert str(path) in str(error) or "split 'train' has no" in str(error)
        return
    expected = reference(path)
    assert [record.text_a for record in split.records] == [row["text"] for row in expected]
    assert inputs.texts == [(row["text"],) for row in expected]
    for record, row in zip(split.records, expected, strict=True):
        label = row.get("label")
        if head == "regression" and split.labelled:
            assert record.label == float(label) and math.isfinite(record.label)
        elif head == "multilabel" and isinstance(label, list):
            assert list(record.label) == [str(name) for name in label]
        elif head == "classification" and split.labelled:
            assert record.label == str(label).strip() and not isinstance(label, list | dict)


@given(rows=st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=3))
def test_written_lines_are_one_object_each(directory, rows):
    write_rows(rows, directory / "a.jsonl")
    lines = (directory / "a.jsonl").read_bytes().decode().split("\n")
    assert lines[-1] == "" and same([json.loads(line) for line in lines[:-1]], rows)
