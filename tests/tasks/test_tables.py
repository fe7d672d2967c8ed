"""Rows by column name from TSV, CSV and JSONL, and the errors for files that do not fit."""

import pytest

from bertjax.tasks.tables import read_table


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


def test_a_row_of_the_wrong_width_is_an_error_with_file_line_and_columns(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\tc\n1\t2\t3\n1\t2\n")
    with pytest.raises(ValueError, match=r"a\.tsv:3: expected 3 columns \(a, b, c\), found 2"):
        read_table(path, ["a"])
    table = read_table(path, ["a"], skip_short=True)
    assert (len(table.rows), table.skipped) == (1, 1)


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
