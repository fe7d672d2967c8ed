"""A user's own table: CSV, TSV or JSON lines of texts or pairs, with classes, labels or a number.

In: a directory with one file a split. Out: the records of a `TextTask`. The label column holds a class name, several
names (a list as JSON or Python write it, or text joined by `separator`), or a number. Class names come from the train
split in sorted order (integers by value), unless given (those of a fine-tuned head, for example).
"""

import ast
import collections
import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from bertjax.tasks.tables import read_table
from bertjax.tasks.task import Record, Split, all_labelled, file_fingerprint, in_order, name_of, splits_in, texts_of
from bertjax.tasks.text_task import TextTask

# A list of names in a cell, ['a', "b"]. numpy's form without commas is no such list.
_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[-+]?\d{1,18})"""
_LIST = re.compile(rf"[\[({{]\s*(?:{_QUOTED}\s*(?:,\s*{_QUOTED}\s*)*(?:,\s*)?)?[\])}}]")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_NUMBER = re.compile(r"[-+]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})(e[-+]?\d{1,3})?", re.ASCII | re.I)
MANY_NUMBERS = 12  # classes that are all numbers and look like a quantity


class TableTask(TextTask):
    """Texts and labels in columns of .csv, .tsv, .txt or .jsonl files."""

    def __init__(
        self,
        source: str | pathlib.Path,
        files: dict[str, str] | None = None,
        head: str = "classification",
        text: str | Sequence[str] = ("text",),
        label: str = "label",
        labels: Sequence[str] = (),
        metric: str | None = None,
        separator: str | None = None,
        name: str = "table",
        headerless: Sequence[str] | None = None,
    ):
        """`files` maps splits to names in `source` (default train, dev and test, as .csv, .tsv or .jsonl), or to splits
        of the data set that it names; `text` names one or two columns; `separator` parts the labels of a cell (None:
        '|').
        """
        text = (text,) if isinstance(text, str) else text
        if not isinstance(text, list | tuple) or len(text) not in (1, 2):
            raise ValueError(f"text={text!r} must name one column or two")
        if separator == "":
            raise ValueError("separator='' cannot separate labels; leave it out for '|'")
        super().__init__(name, head, labels, metric)
        self.source = pathlib.Path(source)
        usual = {split: self._usual(split) for split in ("train", "dev", "test")}
        self.splits = splits_in(source, files, {split: names[0] for split, names in usual.items()})
        self._beside = {} if files else {split: names[1:] for split, names in usual.items()}
        self.text, self.label, self.separator = tuple(text), label, separator
        self.headerless = headerless
        if self.kind_of_head.named and not self.labels:
            self.labels = self._labels_of_train()

    def _usual(self, split: str) -> list[str]:
        """The files of a split that is not named, of which the first is read: SPLIT.csv, or of another form."""
        names = [f"{split}{suffix}" for suffix in (".csv", ".tsv", ".jsonl")]
        return [name for name in names if (self.source / name).exists()] or names[:1]

    def _labels_of_train(self) -> tuple[str, ...]:
        split = self.labelled_train()
        several = self.head == "multilabel"
        labels = in_order(name for record in split.records for name in (record.label if several else [record.label]))
        if len(labels) < 2 - several:
            raise ValueError(
                f"{self.source / self.splits['train']}: every {self.label} is {labels[0]!r}; there "
                "must be two classes to tell apart"
                if labels
                else f"{self.source / self.splits['train']}: no row has a {self.label}: there is nothing to learn"
            )
        return labels

    def read(self, split: str) -> Split:
        """Records in file order; a file without the label column, or with every label empty, is unlabelled. Raises
        ValueError with file and line for a label that is missing or no number.
        """
        path = self.file_of(split)
        table = read_table(
            path,
            self.text,
            headerless=self.headerless,
            remedy=". config.task.options.text and .label name other columns, .headerless those of a file without a "
            "header",
            own=True,
            label=self.label,
        )
        if split == "train" and self.label not in table.columns:
            raise ValueError(
                f"{path}: no column {self.label!r} to train on; found {', '.join(table.columns)}. "
                "config.task.options.label names another"
            )
        records, keys = [], table.keys
        for number, (where, row, _) in enumerate(table.texts(self.text)):
            key = next((row[name] for name in keys if row.get(name) is not None), number)
            label = self._label(row.get(self.label), where)
            records.append(Record(str(key), *texts_of(row, self.text), label, where))
        labelled = all_labelled(records, " (-1 is no label, as in GLUE's test files; give such a class another name)")
        notes = (*self._remarks(records), *self._alike(records)) if labelled else ()
        if self.label not in table.columns:
            notes = (f"{path} has no column {self.label!r}; found {', '.join(table.columns)}",)
        if others := self._beside.get(split):
            notes += (f"{path.name} is read, and not {' or '.join(others)} beside it; the option files names others",)
        return Split(split, records, labelled, file_fingerprint(path), notes)

    def _remarks(self, records: Sequence[Record]) -> tuple[str, ...]:
        """Notes on labels that seem to fit the head but may not; ValueError for lists."""
        if self.head == "multilabel":
            self._check_separator(records)
            self._check_names(records)
        if self.head != "classification":
            return ()
        names = {record.label for record in records}
        if lists := [r for r in records if r.label[0] in "[({" and _LIST.fullmatch(r.label)]:
            raise ValueError(
                f"{lists[0].where}: {self.label} {lists[0].label!r} is a list of "
                "labels: set the option head='multilabel'"
            )
        for mark, name in itertools.product("|,;", sorted(names)):
            if mark in name and names.issuperset(part.strip() for part in name.split(mark)):
                option = f" and separator={mark!r}" * (mark != "|")
                return (
                    f"{name!r} is a class beside those that it names; for several labels set head='multilabel'{option}",
                )
        if len(names) < 2 or not all(map(_NUMBER.fullmatch, names)):
            many = len(names) > max(MANY_NUMBERS, len(records) // 2)  # such as texts, where columns are swapped
            said = f"{len(names)} classes in {len(records)} rows: is {self.label!r} the column of labels? "
            return (said + "The options text and label name the columns",) * many
        by_value = sorted(names, key=lambda name: (float(name), name))
        whole = all(float(name).is_integer() for name in names)
        same = [pair for pair in itertools.pairwise(by_value) if float(pair[0]) == float(pair[1])]
        if whole and same:
            where = next(record.where for record in records if record.label == same[0][1])
            raise ValueError(f"{where}: {self.label} {same[0][1]} is the same number as {same[0][0]}: write them alike")
        if whole and len(names) <= MANY_NUMBERS:
            return ()
        return (
            f"the {len(names)} classes are all numbers ({by_value[0]} to {by_value[-1]}); to "
            "predict a number, set the option head='regression'",
        )

    def _alike(self, records: Sequence[Record]) -> tuple[str, ...]:
        """A note on classes that only capital letters tell apart, as in tables of several hands."""
        if not self.kind_of_head.named:
            return ()
        several, spellings = self.head == "multilabel", collections.defaultdict(set)
        for name in {name for record in records for name in (record.label if several else [record.label])}:
            spellings[name.casefold()].add(name)
        alike = min((sorted(names) for names in spellings.values() if len(names) > 1), default=())
        said = f"{' and '.join(map(repr, alike))} are classes of their own; if they are one, write them alike"
        return (said,) if alike else ()

    def _check_separator(self, records: Sequence[Record]) -> None:
        """Raises ValueError if another character than '|' seems to separate the labels."""
        if self.separator is not None or any(len(record.label) > 1 for record in records):
            return
        names = {record.label[0] for record in records if record.label}
        for mark in ",;":
            seen = collections.Counter(part.strip() for name in names for part in name.split(mark))
            for record in records:
                first, *others = (part.strip() for part in (record.label or ("",))[0].split(mark))
                if others and (first in names or any(seen[part] > 1 for part in others)):
                    raise ValueError(
                        f"{record.where}: {self.label} {record.label[0]!r} looks like several "
                        f"labels: set the option separator={mark!r}, or '|' to read it as one"
                    )

    def _check_names(self, records: Sequence[Record]) -> None:
        """ValueError for a row of zeros and ones, one for each label, in place of names."""
        names, lengths = {name for record in records for name in record.label}, {len(r.label) for r in records}
        if names and names <= {"0", "1", "True", "False"} and len(lengths) == 1 and lengths != {1}:
            raise ValueError(
                f"{records[0].where}: {self.label} says {', '.join(records[0].label):.60}, which looks like one value "
                "for each label; write the names of the labels that apply, as in ['a', 'b']"
            )

    def _label(self, value: Any, where: str) -> Any:
        if self.head != "multilabel":
            return self.kind_of_head.label(value, where, self.label)
        # Empty text is a row without any of the labels; only a missing column is unlabelled.
        return None if value is None else self._names(value, where)

    def _names(self, value: Any, where: str) -> tuple[str, ...]:
        """The labels of a cell, or of a list in JSON lines."""
        text = value.strip() if isinstance(value, str) else ""
        if len(text) > 1 and _CLOSING.get(text[0]) == text[-1]:
            value = _listed(text)
            if value is None:
                raise ValueError(
                    f"{where}: {self.label} {text!r:.60} is not a list of names: write each in quotes "
                    "and commas between them, as in ['a', 'b']"
                )
        if isinstance(value, list):
            names = tuple(map(name_of, value))
            if strange := [name for name in names if not isinstance(name, str)]:
                raise ValueError(f"{where}: {self.label} holds {strange[0]!r:.60}, not a name")
            return names
        names = (name.strip() for name in str(value).split(self.separator or "|"))
        return tuple(name for name in names if name)


def _listed(text: str) -> list[str] | None:
    """The names in a list as JSON or Python write it; None if it is no such list."""
    if not _LIST.fullmatch(text):
        return None
    with contextlib.suppress(ValueError):
        return list(map(str, json.loads(text)))
    try:
        return [str(ast.literal_eval(name)) for name in re.findall(_QUOTED, text)]
    except (ValueError, SyntaxError):
        return None
