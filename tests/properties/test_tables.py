"""CSV and TSV: what is accepted means the same as to the csv module, the rest is refused."""

import csv
import io
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tasks.custom import TableTask
from bertjax.tasks.inputs import Inputs, Output, read_inputs
from bertjax.tasks.make import Remembered
from bertjax.tasks.tables import TableWriter, read_table

CELLS = st.one_of(
    st.sampled_from(
        [
            "text",
            "label",
            "id",
            "",
            " ",
            "a",
            "b",
            "NA",
            "nan",
            "null",
            "-1",
            "0",
            "11",
            "2",
            '"',
            '""',
            '"a,b"',
            '"a\nb"',
            '"a""b"',
            "a\tb",
            "\ufeff",
            "\u2028",
            "\x85",
            "\xa0",
            "\x00",
            "\x0b",
            "\x1c",
            "é",
            "[",
            "['x', 'y']",
            "x|y",
            "'",
            ";",
            "\\",
            "\\n",
            "#",
            "=1+1",
            "1e400",
            "ſ",
            "\U0001f600",
            " text",
            "text ",
        ]
    ),
    st.text(max_size=3),
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r", "\n\n", ""])
STARTS = st.sampled_from([b"", b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"\xff", b'"'])
HEADERS = st.sampled_from(
    [
        ["text", "label"],
        ["text", "label"],
        ["label", "text"],
        [" text ", "label"],
        ["id", "text", "label"],
        ["text"],
        ["text", "text"],
        ["a", "b"],
        None,
    ]
)
ROWS = st.lists(st.tuples(st.lists(CELLS, min_size=1, max_size=3), ENDS), max_size=6)
REGULAR = st.integers(0, 3).map(bool)  # most rows have the width of the header


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


def content(start, header, rows, separator, regular):
    lines = [] if header is None else [separator.join(header) + "\n"]
    for cells, end in rows:
        if header is not None and regular:
            cells = (cells * 3)[: len(header)]
        lines.append(separator.join(cells) + end)
    return start + "".join(lines).encode("utf-8", "surrogatepass")


def reference(data: bytes, name: str) -> list[dict[str, str]]:
    """Rows by column, as Python's documentation reads such a file."""
    text = data.decode("utf-8-sig")
    if name.endswith("csv"):
        rows = list(csv.reader(io.StringIO(text, newline="")))
    else:
        lines = text.split("\n" if "\n" in text else "\r")
        rows = [line.rstrip("\r").split("\t") for line in lines if line.rstrip("\r")]
    rows = [row for row in rows if row]
    header = [cell.strip() for cell in rows[0]]
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row, strict=True)) for row in rows[1:]]


FILES = dict(
    start=STARTS, header=HEADERS, rows=ROWS, regular=REGULAR, name=st.sampled_from(["a.csv", "a.tsv", "a.txt"])
)


@given(**FILES)
def test_accepted_tables_have_the_rows_of_the_csv_module(directory, start, header, rows, regular, name):
    path = directory / name
    data = content(start, header, rows, "," if name == "a.csv" else "\t", regular)
    path.write_bytes(data)
    try:
        table = read_table(path, ["text"])
    except ValueError as error:
        assert str(path) in str(error) and type(error) is ValueError
        return
    expected = reference(data, name)
    assert [row for _, row in table.rows] == expected
    lines = [line for line, _ in table.rows]
    assert lines == sorted(set(lines)) and all(1 < line <= data.count(b"\n") + data.count(b"\r") + 1 for line in lines)
    if name != "a.txt":  # which may also be plain lines
        inputs = read_inputs(str(path), "classify", Remembered("table", {"text": "text"}))
        assert inputs.texts == [(row["text"],) for row in expected]


@given(**FILES, head=st.sampled_from(["classification", "multilabel", "regression"]))
def test_a_table_to_train_on_is_read_or_refused_and_its_labels_are_those_of_the_file(
    directory, start, header, rows, regular, name, head
):
    path = directory / name
    data = content(start, header, rows, "," if name == "a.csv" else "\t", regular)
    path.write_bytes(data)
    try:
        task = TableTask(directory, {"train": name}, head=head)
        split = task.read("train")
    except ValueError as error:
        assert str(path) in str(error) or "split 'train' has no" in str(error)
        return
    expected = reference(data, name)
    assert [record.text_a for record in split.records] == [row["text"] for row in expected]
    for record, row in zip(split.records, expected, strict=True):
        cell = row["label"].strip()
        if not split.labelled:
            assert head == "regression" and cell == ""
        elif head == "regression":
            assert record.label == float(cell)
        elif head == "classification":
            assert record.label == cell and cell in task.labels
        elif cell[:1] not in "[({" or not cell:
            assert list(record.label) == [n.strip() for n in cell.split("|") if n.strip()]
            assert set(record.label) <= set(task.labels)


@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=5), kind=st.sampled_from(["csv", "tsv"]))
def test_what_is_written_is_read_again_by_the_csv_module(rows, kind):
    stream = io.StringIO(newline="")
    writer = TableWriter(stream, kind, ("a", "b"))
    kept = []
    for a, b in rows:
        try:
            writer.write({"a": a, "b": b})
        except ValueError as error:
            assert kind == "tsv" and "holds a tab or a line break" in str(error)
            continue
        kept.append([a, b])
    text = stream.getvalue()
    if kind == "csv":
        found = list(csv.reader(io.StringIO(text, newline="")))
    else:
        found = [line.split("\t") for line in text.split("\n")[:-1]]
    assert found == [["a", "b"], *kept]


@given(
    texts=st.lists(st.one_of(CELLS, st.tuples(CELLS, CELLS)), min_size=1, max_size=4),
    kind=st.sampled_from([".csv", ".tsv", ".jsonl", ""]),
)
def test_every_input_has_its_answer_in_the_file_of_answers(texts, kind):
    inputs = Inputs(texts, [*range(1, len(texts) + 1)])
    stream = io.StringIO(newline="")
    try:
        output = Output(stream, f"out{kind}", "classify", inputs)
        for number in range(len(texts)):
            output.write({"text": "x", "labels": {"p": number, "q": 0.5}, "label": "p"})
        output.close()
    except ValueError as error:
        assert kind == ".tsv" and "holds a tab or a line break" in str(error)
        return
    if kind == ".csv":
        rows = list(csv.DictReader(io.StringIO(stream.getvalue(), newline="")))
        assert [row["probability"] for row in rows] == [str(i) for i in range(len(texts))]


def test_time_grows_with_the_size_of_a_table_and_no_faster(tmp_path):
    """A million characters that begin a quote, a list or a number without end."""
    for cell in (
        "['" + "a" * 10**6,
        "[" + " " * 10**6 + "x]",
        "[" + "'a'," * 10**5 + "]x]",
        "1" * 10**6,
        "e" * 10**6,
        "x," * 10**5,
    ):
        path = pathlib.Path(tmp_path) / "a.jsonl"

        rows = [{"text": "x", "label": cell}, {"text": "y", "label": "b"}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for head in ("classification", "multilabel"):
            try:
                TableTask(tmp_path, {"train": "a.jsonl"}, head=head)
            except ValueError as error:
                assert "a.jsonl:1" in str(error)
