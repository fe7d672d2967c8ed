"""Rows of TSV, CSV and JSONL files as dicts by column name, each with its line for error messages.

In: a path. Out: `Table(columns, rows)`, where a row is (line number from 1, {column: text}). Text
is UTF-8, with or without a byte order mark; lines end with \\n or \\r\\n and nothing else, because
real sentences contain other characters that `str.splitlines` would break at.
"""

import csv
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """All rows of a file; `skipped` counts the short rows that were left out on request."""

    columns: tuple[str, ...]
    rows: list[tuple[int, dict[str, Any]]]
    skipped: int = 0


def read_table(
    path: pathlib.Path,
    required: Sequence[str],
    headerless: Sequence[str] | None = None,
    skip_short: bool = False,
) -> Table:
    """Reads .tsv/.txt (tabs, quotes are text), .csv (quotes quote) or .jsonl (an object a line).

    Args:
      required: columns that must be there. The first line is a header if it names them all.
      headerless: column names of a file whose first line is already data.
      skip_short: leave rows with missing columns out and count them, in place of an error.

    Raises ValueError with file and line for a missing column or a row of the wrong width.
    """
    if path.suffix == ".jsonl":
        return _read_json_lines(path, required)
    lines = _csv_lines(path) if path.suffix == ".csv" else _tab_lines(path)
    if not lines:
        raise ValueError(f"{path} is empty")
    first = tuple(lines[0][1])
    if set(required) <= set(first):
        columns, lines = first, lines[1:]
    elif headerless is not None and len(first) == len(headerless):
        columns = tuple(headerless)
    else:
        expected = f"a header with {', '.join(map(repr, required))}"
        if headerless is not None:
            expected += f", or {len(headerless)} columns without a header"
        raise ValueError(
            f"{path}:1: expected {expected}; found {len(first)} columns: {', '.join(first)}"
        )
    rows, skipped = [], 0
    for line, cells in lines:
        if len(cells) != len(columns):
            if skip_short and len(cells) < len(columns):
                skipped += 1
                continue
            raise ValueError(
                f"{path}:{line}: expected {len(columns)} columns ({', '.join(columns)}), found "
                f"{len(cells)}"
            )
        rows.append((line, dict(zip(columns, cells, strict=True))))
    return Table(columns, rows, skipped)


def _tab_lines(path: pathlib.Path) -> list[tuple[int, list[str]]]:
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        return [
            (number, line.rstrip("\r\n").split("\t"))
            for number, line in enumerate(file, 1)
            if line.strip("\r\n")
        ]


def _csv_lines(path: pathlib.Path) -> list[tuple[int, list[str]]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        lines, start = [], 1
        try:
            for cells in reader:
                if cells:
                    lines.append((start, cells))
                start = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}:{start}: {error}") from error
    return lines


def _read_json_lines(path: pathlib.Path, required: Sequence[str]) -> Table:
    rows, columns = [], {}
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected an object, found {line.strip()[:40]}")
            if missing := [name for name in required if name not in row]:
                raise ValueError(
                    f"{path}:{number}: expected the keys {', '.join(required)}; missing "
                    f"{', '.join(missing)}; found {', '.join(row)}"
                )
            columns |= dict.fromkeys(row)
            rows.append((number, row))
    return Table(tuple(columns), rows)
