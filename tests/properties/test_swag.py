"""SWAG: what is accepted means the same as to csv.DictReader, the rest is refused by name."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tasks.swag import MultipleChoiceTask
from tests.fakes import FakeTokenizer

COLUMNS = ["fold-ind", "sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label"]
CELLS = st.one_of(
    st.sampled_from(
        [
            "",
            "She opens",
            "the door.",
            "a, b",
            'say "it"',
            "two\nlines",
            "\u2028",
            "NA",
            "\xa0",
            "\x00",
            "é",
            "0",
            "4",
            "\r",
            "\t",
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=3),
)
LABELS = st.sampled_from(["0", "1", "2", "3", "3", "2", "-1", "", "4", "1.0", " 1", "x", "\u0663"])
ROWS = st.lists(st.tuples(*[CELLS] * 7, LABELS), max_size=4)
HEADERS = st.sampled_from(
    [
        COLUMNS,
        COLUMNS,
        ["", *COLUMNS],
        COLUMNS[::-1],
        COLUMNS[:-1],
        COLUMNS[1:],
        [*COLUMNS, "ending0"],
        [" sent1", *COLUMNS[2:], "id"],
    ]
)


class Words(FakeTokenizer):
    cls_id, sep_id, pad_id = 101, 102, 0

    def encode_batch(self, texts):
        return [[len(word) for word in text.split()] for text in texts]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("swag")


def check(split, rows):
    """The choices of `rows`, and of each the row of the model that transformers' run_swag makes."""
    assert len(split.records) == len(rows)
    for record, row in zip(split.records, rows, strict=True):
        assert (record.context, record.start) == (row["sent1"], row["sent2"])
        assert list(record.endings) == [row[f"ending{i}"] for i in range(4)]
        assert record.label == (int(row["label"]) if split.labelled else None)
    features = MultipleChoiceTask("x").features(split, Words(), 512, training=False)
    for feature, row in zip(features, rows, strict=True):
        for i in range(4):
            pair = [row["sent1"].split(), f"{row['sent2']} {row[f'ending{i}']}".split()]
            ids = [101, *map(len, pair[0]), 102, *map(len, pair[1]), 102]
            assert feature["input_ids"][i].tolist() == ids


@given(
    header=HEADERS,
    rows=ROWS,
    gold=st.booleans(),
    cut=st.integers(0, 12),
    start=st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\xff"]),
)
def test_accepted_csv_files_are_the_questions_of_the_csv_module(directory, header, rows, gold, cut, start):
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\r\n")
    writer.writerow(header)
    for row in rows:
        cells = (
            dict(zip(COLUMNS, row, strict=True)) if gold else {**dict(zip(COLUMNS, row, strict=True)), "label": "-1"}
        )
        writer.writerow([cells.get(name.strip(), "x") for name in header])
    text = stream.getvalue()
    path = directory / "val.csv"
    path.write_bytes(start + (text if cut else text[: len(text) - 3]).encode())
    try:
        split = MultipleChoiceTask(directory).read("dev")
    except ValueError as error:
        assert str(path) in str(error) and type(error) is ValueError
        return
    found = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
    found.fieldnames = [name.strip() for name in found.fieldnames]
    check(split, list(found))


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {name: st.one_of(CELLS, CELLS, CELLS, CELLS, st.none()) for name in COLUMNS[1:-1]},
            optional={
                "label": st.one_of(st.integers(-1, 4), LABELS, st.none(), st.booleans(), st.lists(LABELS, max_size=1))
            },
        ),
        max_size=3,
    )
)
def test_accepted_json_lines_are_the_questions_of_the_json_module(directory, rows):
    path = directory / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        split = MultipleChoiceTask(directory, {"dev": "val.jsonl"}).read("dev")
    except ValueError as error:
        assert f"{path}" in str(error)
        return
    check(split, rows)
