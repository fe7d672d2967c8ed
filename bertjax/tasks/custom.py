"""A user's own table: CSV, TSV or JSON lines of texts or pairs, with classes, labels or a number.

In: a directory with one file a split. Out: the records of a `TextTask`. The label column holds a
class name, several names (JSON list, or text joined by `separator`), or a number. Class names come
from the train split in sorted order (integers by value), unless given (those of a fine-tuned head,
for example).
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from bertjax.tasks.tables import read_table
from bertjax.tasks.task import Record, Split, check_split, file_fingerprint, in_order
from bertjax.tasks.text import TextTask


class TableTask(TextTask):
    """Texts and labels in columns of .csv, .tsv, .txt or .jsonl files."""

    def __init__(
        self,
        source: str | pathlib.Path,
        files: dict[str, str],
        head: str = "classification",
        text: str | Sequence[str] = ("text",),
        label: str = "label",
        labels: Sequence[str] = (),
        metric: str | None = None,
        separator: str = "|",
        name: str = "table",
        headerless: Sequence[str] | None = None,
    ):
        """`files` maps splits to names in `source`; `text` names one or two columns."""
        text = (text,) if isinstance(text, str) else text
        if len(text) not in (1, 2):
            raise ValueError(f"text={tuple(text)!r} must name one column or two")
        super().__init__(name, head, labels, metric)
        self.source, self.splits = pathlib.Path(source), dict(files)
        self.text, self.label, self.separator = tuple(text), label, separator
        self.headerless = headerless
        if head != "regression" and not self.labels:
            self.labels = self._labels_of_train()

    def _labels_of_train(self) -> tuple[str, ...]:
        if "train" not in self.splits:
            raise ValueError("without a train split the task needs labels=(...)")
        split = self.read("train")
        split.require_labels("training")
        if self.head == "multilabel":
            return in_order(name for record in split.records for name in record.label)
        labels = in_order(record.label for record in split.records)
        if len(labels) == 1:
            raise ValueError(
                f"{self.source / self.splits['train']}: every {self.label} is {labels[0]!r}; there "
                "must be two classes to tell apart"
            )
        return labels

    def read(self, split: str) -> Split:
        """Records in file order; a file without the label column, or with every label empty, is
        unlabelled. Raises ValueError with file and line for a label that is missing or no number.
        """
        check_split(self, split)
        path = self.source / self.splits[split]
        table = read_table(
            path, self.text, headerless=self.headerless,
            remedy=". The task's options 'text' and 'label' name other columns, 'headerless' those "
            "of a file without a header")
        if split == "train" and self.label not in table.columns:
            raise ValueError(
                f"{path}: no column {self.label!r} to train on; found {', '.join(table.columns)}"
            )
        records = []
        for number, (line, row) in enumerate(table.rows):
            where = f"{path}:{line}"
            texts = [row[column] for column in self.text]
            for column, text in zip(self.text, texts, strict=True):
                if not isinstance(text, str):
                    raise ValueError(f"{where}: {column} is {text!r}, not text")
            label = self._label(row.get(self.label), where)
            key = row.get("id", row.get("index", number))
            second = texts[1] if len(texts) > 1 else None
            records.append(Record(str(key), texts[0], second, label, where))
        unlabelled = [record for record in records if record.label is None]
        if unlabelled and len(unlabelled) < len(records):
            raise ValueError(
                f"{unlabelled[0].where}: no label, although other rows have one (-1 is no label, "
                "as in GLUE's test files; write a class of that name in another way)")
        return Split(split, records, bool(records) and not unlabelled, file_fingerprint(path))

    def _label(self, value: Any, where: str) -> str | float | tuple[str, ...] | None:
        if self.head == "multilabel":
            # Empty text is a row without any of the labels; only a missing column is unlabelled.
            if value is None or isinstance(value, list | tuple):
                return None if value is None else tuple(map(str, value))
            names = (name.strip() for name in str(value).split(self.separator))
            return tuple(name for name in names if name)
        if isinstance(value, str):
            value = value.strip()
        if value is None or value == "":
            return None
        if self.head == "classification":  # NaN is what pandas makes of an empty cell
            return None if str(value) == "-1" or value != value else str(value)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: {self.label} {value!r} is not a number")
        return number
