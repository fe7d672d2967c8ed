"""Rows by column name from TSV, CSV and JSONL, and the errors for files that do not fit."""

import gzip
import os

import pytest

from bertjax.data import opening
from bertjax.formats.files import whole_file
from bertjax.tasks.tables import TableWriter, read_table


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_quotes_and_odd_line_separators_are_text_in_tsv(tmp_path):
    path = write(tmp_path / "a.tsv", '\ufeffsentence\tlabel\r\n"say\u2028 it\x0b\x85\t1\r\nb"\t0\n')
    table = read_table(path, ["sentence", "label"])
    assert [row["sentence"] for _, row in table.rows] == ['"say\u2028 it\x0b\x85', 'b"']
    assert [line for line, _ in table.rows] == [2, 3]


def test_quotes_quote_in_csv_and_lines_count_from_the_start_of_the_row(tmp_path):
    path = write(tmp_path / "a.csv", 'x,y\n"go on, slowly.","two\nlines"\nc,d\n')
    table = read_table(path, ["x", "y"])
    assert table.rows[0] == (2, {"x": "go on, slowly.", "y": "two\nlines"})
    assert table.rows[1] == (4, {"x": "c", "y": "d"})
    with pytest.raises(ValueError, match=r"b\.csv:2"):
        read_table(write(tmp_path / "b.csv", 'x,y\na"b","c\n'), ["x", "y"])


def test_a_quote_that_is_not_closed_is_named_with_the_row_that_it_begins_in(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\nx,1\n"y,1\nz,0\n')
    with pytest.raises(ValueError, match="a.csv:3: .*a quote that begins in this row is not closed"):
        read_table(tmp_path / "a.csv", ["text"])


def test_a_text_may_be_as_long_as_a_book(tmp_path):
    book = "word " * 200_000
    path = write(tmp_path / "a.csv", f'x,y\n"{book}",1\n')
    assert read_table(path, ["x"]).rows[0][1]["x"] == book


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_tables_may_be_compressed_and_may_come_from_old_macs(tmp_path, suffix):
    text = {"csv": "x,y\ra,b\r", "tsv": "x\ty\ra\tb\r", "jsonl": '\r{"x": "a", "y": "b"}\r'}[suffix]
    path = tmp_path / f"t.{suffix}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_table(path, ["x", "y"]).rows == [(2, {"x": "a", "y": "b"})]


def test_blanks_around_the_names_of_columns_are_no_part_of_them(tmp_path):
    path = write(tmp_path / "a.csv", "text , label\na, b\n")
    assert read_table(path, ["text", "label"]).rows == [(2, {"text": "a", "label": " b"})]


@pytest.mark.parametrize(
    "name, header, separators",
    [("a.csv", "text;label", "semicolons"), ("a.csv", "text\tlabel", "tabs"), ("a.tsv", "text,label", "commas")],
)
def test_other_separators_are_named(tmp_path, name, header, separators):
    path = write(tmp_path / name, f"{header}\na,b\n")
    with pytest.raises(ValueError, match=f"columns are separated by {separators}: save it with"):
        read_table(path, ["text"], remedy=". Name them")
    with pytest.raises(ValueError, match="found 2 columns: x, y. Name them"):
        read_table(write(tmp_path / "b.csv", "x,y\na,b\n"), ["text"], remedy=". Name them")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_text_in_another_encoding_names_file_and_line(tmp_path, suffix):
    (tmp_path / f"t.{suffix}").write_bytes("x\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"t\.{suffix}, line 2: byte 0xe9 is not valid UTF-8"):
        read_table(tmp_path / f"t.{suffix}", ["x"])


def test_a_column_that_is_read_stands_in_the_header_once(tmp_path):
    path = write(tmp_path / "a.csv", "x,x,z,z\n1,2,3,4\n")
    with pytest.raises(ValueError, match="a.csv:1: the header names 'x' twice"):
        read_table(path, ["x"])
    assert read_table(path, [], label="y").rows  # what is not read may
    with pytest.raises(ValueError, match="a.csv:1: the header names 'z' twice"):
        read_table(path, [], label="z")  # the last would be learnt


@pytest.mark.parametrize("name, separator", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_header_that_comes_again_is_no_row(tmp_path, name, separator):
    """As in files that were joined by cat: it would be a class of its own."""
    header = separator.join(("text", "label"))
    path = write(tmp_path / name, f"{header}\na{separator}x\n{header}\nb{separator}y\n")
    with pytest.raises(ValueError, match=r":3: the header again, .* keep only the first"):
        read_table(path, ["text"])
    assert len(read_table(write(tmp_path / f"1{name}", "text\na\ntext\n"), ["text"]).rows) == 2  # may be a text


def test_a_row_of_the_wrong_width_is_an_error_with_file_line_and_columns(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\tc\n1\t2\t3\n1\t2\n")
    with pytest.raises(ValueError, match=r"a\.tsv:3: expected 3 columns \(a, b, c\), found 2"):
        read_table(path, ["a"])
    table = read_table(path, ["a"], skip_short=True)
    assert (len(table.rows), table.skipped) == (1, 1)


def test_cells_that_were_quoted_are_no_text_of_a_tsv(tmp_path):
    quoted = write(tmp_path / "a.tsv", 'a\tb\n"say ""it"""\tx\n')
    with pytest.raises(ValueError, match=r"a\.tsv:2: cells are quoted, .*: save it as .csv"):
        read_table(quoted, ["a"], own=True)
    assert len(read_table(quoted, ["a"]).rows) == 1
    for text in ('a\tb\n"say ""it"""\t"x\n', 'a\tb\n"say it"\tx\n'):  # as in MRPC
        assert len(read_table(write(tmp_path / "b.tsv", text), ["a"], own=True).rows) == 1


def test_a_header_is_recognised_by_its_column_names(tmp_path):
    with_header = write(tmp_path / "a.tsv", "index\tsentence\n0\tx\n1\ty\n")
    without = write(tmp_path / "b.tsv", "0\tx\n1\ty\n")
    for path in (with_header, without):
        table = read_table(path, ["sentence"], headerless=("index", "sentence"))
        assert [row["sentence"] for _, row in table.rows] == ["x", "y"]
    with pytest.raises(ValueError, match=r"b\.tsv:1: expected a header with 'sentence'"):
        read_table(without, ["sentence"])
    with pytest.raises(ValueError, match="3 columns without a header; found 2"):
        read_table(without, ["sentence"], headerless=("a", "b", "sentence"))


def test_json_lines_name_the_line_of_a_broken_or_incomplete_object(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x\u2028"}\n\n{"label": "y"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: .*missing text; found label"):
        read_table(path, ["text"])
    with pytest.raises(ValueError, match=r"b\.jsonl:1: not JSON"):
        read_table(write(tmp_path / "b.jsonl", "{x\n"), ["text"])
    with pytest.raises(ValueError, match="empty"):
        read_table(write(tmp_path / "c.tsv", ""), ["text"])


@pytest.mark.parametrize("name", ["a.json", "a.xlsx", "a.parquet", "a.json.gz", "a.ndjson"])
def test_other_kinds_of_files_are_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match="save it as a .csv, .tsv or .txt table, or as .jsonl with"):
        read_table(write(tmp_path / name, "[]"), ["x"])


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt"])
def test_a_pipe_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe, socket or device, not a file; write"):
        read_table(tmp_path / name, ["text"])


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_utf_16_without_a_mark_is_no_text(tmp_path, name):
    for coding in ("utf-16-le", "utf-16-be"):
        (tmp_path / name).write_bytes("text,label\na,b\n".encode(coding))
        with pytest.raises(ValueError, match=f"{name}: this is text in UTF-16"):
            read_table(tmp_path / name, ["text"])
    (tmp_path / name).write_bytes(b"text,label\n" + b"a" * 999 + b"\0,b\n")
    with pytest.raises(ValueError, match=rf"{name}, line 2: a NUL byte, so the file is not"):
        read_table(tmp_path / name, ["text"])


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "not JSON"),
        ('{"text": ' + "9" * 10_000 + "}", "not JSON"),
        ('["text"]', "expected an object"),
    ],
)
def test_strange_json_names_its_line(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl:2: .*{message}"):
        read_table(path, ["text"])


def test_a_file_that_grows_out_of_proportion_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_LEAST", 1 << 16)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\n" + b"a" * (1 << 20)))
    with pytest.raises(ValueError, match="a.csv.gz unpacks to more than 300 times its size"):
        read_table(path, ["text"])


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_what_is_written_reads_the_same(tmp_path, kind):
    rows = [{"a": 'x "y", z', "b": "\u2028 \xa0"}, {"a": "", "b": "é"}, {"a": " '", "b": "NA"}]
    rows += [{"a": "two\nlines\r", "b": "a\tb"}] * (kind != "tsv")
    path = tmp_path / f"a.{kind}"
    with whole_file(path) as file:
        writer = TableWriter(file, kind, ("a", "b"))
        for row in rows:
            writer.write(row)
    assert [row for _, row in read_table(path, ["a", "b"]).rows] == rows
