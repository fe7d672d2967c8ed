"""Data given as Python objects: lists, pandas DataFrames and Series, datasets of the `datasets` library.

In: such an object. Out: rows as dicts of plain values, and files of JSON lines, which the readers of texts and tables
take: so there is one meaning of a corpus and of a table, and its checks.
"""

import json
import numbers
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bertjax.formats.files import whole_file

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def rows(data: Any, columns: Sequence[str] = (), name: str = "data") -> Iterator[dict[str, Any]]:
    """The rows of `data` by column.

    Args:
      data: a list of dicts, of tuples or of single values (`columns` names these); a dict of columns; a pandas
        DataFrame or Series; a Dataset, whose class labels become their names.
      columns: of rows without names.
      name: of the data, in messages.

    Raises ValueError for what is none of these.
    """
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise ValueError(f"{name} takes a list of rows, a DataFrame or a Dataset, not {data!r:.80}")
    names = class_names(data)
    if isinstance(data, Mapping):
        if any(class_names(split) or hasattr(split, "column_names") for split in data.values()):
            raise ValueError(f"{name} is a set of splits, {', '.join(map(str, data))}: give one of them")
        data = _of_columns(data, name)
    elif hasattr(data, "iterrows"):
        if twice := [column for column, times in Counter(map(str, data.columns)).items() if times > 1]:
            raise ValueError(f"{name}: the DataFrame has several columns {twice[0]!r}; drop or rename all but one")
        data = data.to_dict("records")
    elif hasattr(data, "with_format"):  # a Dataset may have been told to give tables or tensors
        data = data.with_format(None)
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            cells = tuple(row) if isinstance(row, tuple | list) and len(columns) != 1 else (row,)
            if len(cells) != len(columns):
                raise ValueError(f"{name}: row {number} is {row!r:.80}; expected {' and '.join(columns)}")
            row = dict(zip(columns, cells, strict=True))
        yield {str(key): named(plain(value), names.get(key)) for key, value in row.items()}


def texts(data: Any, name: str = "data") -> Iterator[str]:
    """The texts of `data`: of its column "text", or its elements. Raises ValueError for what is not a text."""
    for number, row in enumerate(rows(data, ("text",), name)):
        if not isinstance(text := row.get("text"), str):
            found = f"text is {text!r:.60}" if "text" in row else f"found {', '.join(row)}"
            raise ValueError(f"{name}: row {number} has no 'text' that is text; {found}")
        if half := _HALF_PAIR.search(text):
            raise ValueError(
                f"{name}: row {number}: {half[0]!r} without its other half is no character; "
                "text.encode(errors='replace').decode() replaces it"
            )
        yield text


def write_rows(rows: Iterable[Mapping[str, Any]], path: pathlib.Path) -> None:
    """A file of JSON lines."""
    with whole_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: numpy scalars and arrays become numbers, what pandas calls missing None, bytes (as
    TFDS has them) text, and a set a list."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str):
        return str(value)  # numpy's too
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    if isinstance(value, bool):  # the name of a class, and no number
        return str(value)
    if isinstance(value, numbers.Number) and not isinstance(value, int | complex):
        return float(value)  # of Decimal and Fraction too
    return value if isinstance(value, int) else str(value)


def _of_columns(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if any(isinstance(column, str) or not isinstance(column, Iterable) for column in data.values()):
        raise ValueError(f"{name} is a dict of columns, each of which is a list; found {data!r:.80}")
    columns = [list(column) for column in data.values()]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{key} {len(column)}" for key, column in zip(data, columns, strict=True))
        raise ValueError(f"{name}: its columns have different lengths: {lengths}")
    return [dict(zip(data, row, strict=True)) for row in zip(*columns, strict=True)]


def class_names(data: Any) -> dict[str, Sequence[str]]:
    """Column -> names of the classes that a Dataset, or what TFDS says of one, has as numbers, also in lists."""
    features = getattr(data, "features", None)
    found = {}
    for column, feature in features.items() if hasattr(features, "items") else ():
        names = getattr(getattr(feature, "feature", feature), "names", None)
        if names and not isinstance(names, Mapping):
            found[column] = names
    return found


def named(value: Any, names: Sequence[str] | None) -> Any:
    """The names of the classes that numbers stand for; None for -1."""
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [named(item, names) for item in value]
    return names[value] if value >= 0 else None  # -1 in the test splits of GLUE
