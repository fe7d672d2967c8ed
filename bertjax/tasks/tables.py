"""Rows of TSV, CSV and JSONL files as dicts by column name, each with its line for error messages.

What text and lines are, and that files may be compressed: see data/opening.py. `TableWriter` is the way back.
"""

import csv
import io
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from bertjax.data.named import is_name, read_rows
from bertjax.data.opening import plain_name, read_lines, read_text

_OBJECTS = "; each line must hold one object, as `jq -c '.[]'` writes the elements of an array"
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


@dataclass(frozen=True)
class Table:
    """All rows of a file, each with its line number; `skipped` counts the short ones left out on request."""

    path: pathlib.Path
    columns: tuple[str, ...]
    rows: list[tuple[int, dict[str, Any]]]
    skipped: int = 0

    @property
    def keys(self) -> list[str]:
        """The columns that name the rows, the better one first: id (Id, ID) and index."""
        return [column for name in ("id", "index") for column in self.columns if column.lower() == name]

    def texts(self, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
        """(file:line, row, its texts in these columns). Raises ValueError for what is not a text."""
        for line, row in self.rows:
            for column in columns:
                if not isinstance(row[column], str):
                    raise ValueError(f"{self.path}:{line}: {column} is {row[column]!r:.60}, not text")
            yield f"{self.path}:{line}", row, tuple(row[column] for column in columns)


def read_table(
    path: pathlib.Path,
    required: Sequence[str],
    headerless: Sequence[str] | None = None,
    skip_short: bool = False,
    remedy: str = "",
    own: bool = False,
    label: str | None = None,
) -> Table:
    """Reads .tsv/.txt (tabs, quotes are text), .csv (quotes quote), .jsonl (an object a line) or a data set by name.

    Args:
      required: columns that must be there. The first line is a header if it names them all; blanks around a name are
        not part of it.
      headerless: column names of a file whose first line is already data.
      skip_short: leave rows with missing columns out and count them, in place of an error.
      remedy: what else the error for a missing column says.
      own: whether the file is a user's own, and of no benchmark, where quotes that look like CSV's are text.
      label: the column of the gold, which need not be there.

    Raises ValueError with file and line for a missing column, one that is read and named twice, or a row of the wrong
    width.
    """
    name = plain_name(path.name)
    if not is_name(path) and name.endswith((".json", ".ndjson", ".parquet", ".xls", ".xlsx")):
        raise ValueError(f"{path}: save it as a .csv, .tsv or .txt table, or as .jsonl with an object a line")
    if is_name(path) or name.endswith(".jsonl"):
        return _read_json_lines(path, required, remedy)
    lines = (
        _csv_lines(path)
        if name.endswith(".csv")
        else [(number, line.split("\t")) for number, line in enumerate(read_lines(path), 1) if line]
    )
    if not lines:
        raise ValueError(f"{path} is empty")
    if own and not name.endswith(".csv"):
        _check_unquoted(path, lines)
    first = tuple(cell.strip() for cell in lines[0][1])
    if set(required) <= set(first):
        columns, lines = first, lines[1:]
    elif headerless is not None and len(first) == len(headerless):
        columns = tuple(headerless)
    else:
        expected = f"a header with {', '.join(map(repr, required))}"
        if headerless is not None:
            expected += f", or {len(headerless)} columns without a header"
        raise ValueError(
            f"{path}:1: expected {expected}; found {len(first)} columns: {', '.join(first):.200}"
            + (_other_separator(first) or remedy)
        )
    if twice := [name for name in (*required, label) if columns.count(name) > 1]:
        raise ValueError(f"{path}:1: the header names {', '.join(map(repr, twice))} twice")
    rows = []
    for line, cells in lines:
        if 1 < len(cells) == len(columns) and tuple(cell.strip() for cell in cells) == columns:
            raise ValueError(f"{path}:{line}: the header again, as where files were joined: keep only the first one")
        if len(cells) == len(columns):
            rows.append((line, dict(zip(columns, cells, strict=True))))
        elif len(cells) > len(columns) or not skip_short:
            raise ValueError(
                f"{path}:{line}: expected {len(columns)} columns ({', '.join(columns)}), found {len(cells)}"
            )
    return Table(path, columns, rows, len(lines) - len(rows))


def _other_separator(first: Sequence[str]) -> str:
    """A remark on a header of one column that seems to hold several."""
    for character, name in ((";", "semicolons"), ("\t", "tabs"), (",", "commas")):
        if len(first) == 1 and character in first[0]:
            return f". Its columns are separated by {name}: save it with commas as .csv, or with tabs as .tsv"
    return ""


def _check_unquoted(path: pathlib.Path, lines: Sequence[tuple[int, list[str]]]) -> None:
    """Raises ValueError if a program that quotes cells (pandas, spreadsheets) wrote a file in which quotes are text."""
    with_quotes = [(line, cell) for line, cells in lines for cell in cells if '"' in cell]
    doubled = next((line for line, cell in with_quotes if '""' in cell[1:-1]), None)
    if doubled and all(map(_QUOTED.fullmatch, (cell for _, cell in with_quotes))):
        raise ValueError(f"{path}:{doubled}: cells are quoted, which only .csv files may be: save it as .csv")


def _csv_lines(path: pathlib.Path) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    lines, start = [], 1
    csv.field_size_limit(sys.maxsize)  # of 131,072 characters, which a long document exceeds
    try:
        for cells in reader:
            if cells:
                lines.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        open_quote = "; a quote that begins in this row is not closed" * ("end of data" in str(error))
        raise ValueError(f"{path}:{start}: {error}{open_quote}") from error
    return lines


def read_objects(path: pathlib.Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of JSON lines, or (number, row) of a data set by name; blank lines are none.

    Raises ValueError with file and line for what is not an object, or holds half a surrogate pair.
    """
    if is_name(path):
        return list(enumerate(read_rows(str(path))[0]))
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # RecursionError: nested without end
            raise ValueError(f"{path}:{number}: not JSON: {error}{_OBJECTS}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected an object, found {line.strip()[:40]}{_OBJECTS}")
        try:
            json.dumps(row, ensure_ascii=False).encode() if "\\u" in line else None
        except UnicodeEncodeError:
            raise ValueError(
                f"{path}:{number}: a text holds half a surrogate pair (\\ud800 to \\udfff), which is not a character"
            ) from None
        rows.append((number, row))
    return rows


def _read_json_lines(path: pathlib.Path, required: Sequence[str], remedy: str) -> Table:
    rows, columns = read_objects(path), {}
    for number, row in rows:
        if missing := [name for name in required if name not in row]:
            raise ValueError(
                f"{path}:{number}: expected the keys {', '.join(required)}; missing "
                f"{', '.join(missing)}; found {', '.join(row)}{remedy}"
            )
        columns |= dict.fromkeys(row)
    return Table(path, tuple(columns), rows)


class TableWriter:
    """Writes rows to a stream as 'csv' or 'tsv', the names of the columns first, so that `read_table` reads the same.

    A cell that is not text is written as JSON.
    """

    def __init__(self, stream: IO[str], kind: str, columns: Sequence[str]):
        self._stream, self._kind, self._columns = stream, kind, tuple(columns)
        self._csv = csv.writer(stream, lineterminator="\n")
        self._all = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)
        self.write(dict(zip(columns, columns, strict=True)))

    def write(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError for a cell that does not fit a TSV file."""
        values = ["" if row.get(column) is None else row[column] for column in self._columns]
        cells = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        if self._kind == "tsv":
            check_tsv(self._columns, cells)
            self._stream.write("\t".join(cells) + "\n")
        else:  # the csv module quotes a carriage return in its later versions only
            (self._all if any("\r" in cell for cell in cells) else self._csv).writerow(cells)


def check_tsv(columns: Sequence[str], cells: Sequence[str]) -> None:
    """Raises ValueError for a cell with a tab or a line break: a TSV file has no quotes to hold them."""
    for column, cell in zip(columns, cells, strict=True):
        if any(mark in cell for mark in "\t\n\r"):
            raise ValueError(
                f"column {column!r} holds a tab or a line break, which a .tsv file "
                f"cannot hold ({cell!r:.60}); write a .csv or .jsonl file"
            )
