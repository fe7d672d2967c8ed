"""Tables in Markdown, as the tools print them and leave them beside a run."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table of `columns` (its head) and `rows` of as many cells, without a line end after it."""
    return "\n".join([_line(columns), "|" + "---|" * len(columns), *map(_line, rows)])


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
