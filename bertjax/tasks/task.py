"""What every fine-tuning task has in common: the `Task` interface, its splits, its labels.

    file -> Record (text and gold) -> features (batches.py) -> batch [B, T]
         -> outputs (logits of each row) -> Scores, prediction and submission files

A task says how to read, featurise, score and write; the loop, the sweep and the table know nothing else of it.
"""

import contextlib
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax.data.named import is_name, read_rows, splits_of
from bertjax.data.objects import write_rows
from bertjax.tasks.batches import Features
from bertjax.tasks.metrics import Scores
from bertjax.tokenization import Tokenizer

Rows = Sequence[Features]
Outputs = Sequence[np.ndarray]  # one array a row in the order of the rows, without padding
# What a reader is shown of a record (examples.json and the report), plain and of bounded size:
#   texts       the input, one string a part, long ones cut
#   gold, predicted     as text
#   right       true, false, or null where there is no such thing (a number)
#   score       how sure the model was, or how far off a number is: what the choice goes by
#   predictions [name, probability] of the likeliest answers, the best first
#   mattered    of each text [[end, change], ...], see shown.py
#   answers     SQuAD: the first gold answer and the predicted one, as they stand in the passage
#   words       tagging: [word, gold tag, predicted tag]
Example = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One example of a text task. `label` is a name, a number, a tuple of names or None."""

    id: str
    text_a: str
    text_b: str | None = None
    label: str | float | tuple[str, ...] | None = None
    where: str = ""  # "file:line", for error messages


@dataclass(frozen=True)
class Split:
    """The records of one split. `notes` are remarks of the reader, for the start-up screen and the result."""

    name: str
    records: Sequence[Any]
    labelled: bool
    fingerprint: str  # sha256 of the bytes that were read
    notes: tuple[str, ...] = ()

    def require_labels(self, purpose: str) -> None:
        """Raises ValueError if the split has no gold to train on or to score with."""
        if not self.records:
            raise ValueError(f"split {self.name!r} has no rows, so it cannot be used for {purpose}")
        if not self.labelled:
            raise ValueError(
                f"split {self.name!r} has no labels{''.join(f' ({note})' for note in self.notes)}, so it cannot be "
                f"used for {purpose}; "
                + "predictions can be written (evaluate --out=DIR, or predict), or " * (purpose != "training")
                + "name a split with labels"
            )


class Task:
    """A data set and what to do with it. One instance serves all its splits.

    A subclass reads files in `read` and says what a row looks like in `features`. `head` names a kind of kinds.py,
    `metric` the score that picks the best checkpoint (higher is better).
    """

    name: str
    kind: str  # its name in make.TASKS, and the options that it was made with
    options: Mapping[str, Any]
    head: str
    labels: tuple[str, ...] = ()  # names by index of the head's outputs; () where there are none
    metric: str
    metric_names: tuple[str, ...]  # the names in Scores that could be `metric`
    source: pathlib.Path | str
    splits: dict[str, str]  # 'train', 'dev', 'test' (and more) -> what is read for them
    dropped = 0  # training rows that the last `features` left out
    published = ""  # hf: name of the same data, for errors about missing files

    @property
    def num_labels(self) -> int:
        """Size of the head's output."""
        return max(1, len(self.labels))

    def read(self, split: str) -> Split:
        """Reads a split. Errors name file and line."""
        raise NotImplementedError

    def rows_of(self, split: str) -> Split:
        """As `read`, and raises ValueError for a split without rows."""
        found = self.read(split)
        if not found.records:
            raise ValueError(f"{self.file_of(split)} has no rows, and it is the {split!r} split of {self.name}")
        return found

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """Rows for the model, in record order; a record may give several (windows).

        Raises ValueError with training=True for a split without gold.
        """
        raise NotImplementedError

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> Scores:
        """Raises ValueError for a split without gold."""
        raise NotImplementedError

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """Writes the prediction (or submission) files and returns their paths."""
        raise NotImplementedError

    def examples(self, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
        """What a reader is shown of a split with gold, in record order."""
        raise NotImplementedError

    def file_of(self, split: str) -> pathlib.Path:
        """The file of a split, or its name. Raises ValueError as `check_split`, and where it is not there."""
        self.check_split(split)
        if is_name(self.source):
            return pathlib.Path(f"{self.source}:{self.splits[split]}")
        path = pathlib.Path(self.source) / self.splits[split]
        self.check_file(path)
        return path

    def check_file(self, path: pathlib.Path) -> None:
        """Raises ValueError if the folder is missing; of published data also if the file is, with the setting that
        fetches them."""
        folder = pathlib.Path(self.source)
        missing, remedy = str(path), "name that of the task's files, or a data set as hf:NAME"
        if not folder.is_dir():
            missing = f"the folder {folder}"
        elif not self.published or path.exists():
            return
        if self.published:
            remedy = (
                f"--config.task.data={self.published} fetches the task's data by name (pip install 'bertjax[datasets]')"
            )
        raise ValueError(f"{missing} does not exist; {remedy}")

    def check_split(self, split: str) -> None:
        """Raises ValueError naming the splits that there are, if this is none of them."""
        if split not in self.splits:
            known = [name + f" ({file})" * (split in str(file)) for name, file in self.splits.items()]
            cut = ". The task's option files={'train': 'train[:90%]', 'dev': 'train[90%:]'} cuts one in two"
            raise ValueError(
                f"{self.name} has no split {split!r}; one of {', '.join(known)}"
                + cut * str(self.source).startswith("hf:")
            )

    def labelled_train(self) -> Split:
        """The train split, from which label names are taken. Raises ValueError if it has none."""
        if "train" not in self.splits:
            raise ValueError(
                "without a train split the task needs labels=(...): the names of the classes, for evaluate in the "
                "order of the model's head"
            )
        split = self.rows_of("train")
        split.require_labels("training")
        return split


def splits_in(source: str | pathlib.Path, files: Mapping[str, str] | None, usual: Mapping[str, str]) -> dict[str, str]:
    """Split -> file in `source`, or split of the data set that it names; `usual` for what `files` leaves out."""
    found = splits_of(str(source)) if is_name(source) else usual
    return dict(files or found)


def cut(text: str, limit: int = 300) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def likeliest(names: Sequence[str], shares: np.ndarray, count: int = 3) -> list[list[Any]]:
    """[name, probability] of the most probable, the best first."""
    order = np.argsort(-shares, kind="stable")[:count]
    return [[names[i], round(float(shares[i]), 4)] for i in order]


def write_jsonl(directory: pathlib.Path, split: Split, rows: Iterable[Mapping[str, Any]]) -> list[pathlib.Path]:
    """Writes predictions_SPLIT.jsonl, a line for each record."""
    path = directory / f"predictions_{split.name}.jsonl"
    write_rows(rows, path)
    return [path]


def texts_of(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, str | None]:
    """The text, or the pair, in one or two columns of a row."""
    return row[columns[0]], row[columns[1]] if len(columns) > 1 else None


def number_of(value: Any, where: str, column: str) -> float:
    """A finite number from a cell or from JSON (where true is not a number); else ValueError."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {column} {value!r} is not a number")
    return number


def name_of(value: Any) -> Any:
    """A JSON label as text; 1 and 1.0 are one label. Lists, objects, fractions, null and NaN are returned unchanged."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, list | dict | float | None) else str(value)


def all_labelled(records: Sequence[Record], remark: str = "") -> bool:
    """Whether the records of a split have labels. Raises ValueError where only some of them have."""
    unlabelled = [record for record in records if record.label is None]
    if unlabelled and len(unlabelled) < len(records):
        raise ValueError(f"{unlabelled[0].where}: no label, although other rows have one{remark}")
    return bool(records) and not unlabelled


def label_places(labels: Sequence[str]) -> Callable[[str, str], int]:
    """(gold label, where and what it is) -> its place among the head's labels.

    It raises ValueError for a label that the head does not have.
    """
    places: dict[str, int] = {}
    for number, name in enumerate(labels):
        places.setdefault(name, number)

    def place(name: str, what: str) -> int:
        if name not in places:
            numbers = ""
            with contextlib.suppress(ValueError):
                if any(not float(label).is_integer() for label in labels):
                    numbers = "; config.task.options.head=regression predicts a number"
            raise ValueError(
                f"{what} {name!r:.60} is unknown; the head has {cut(str(list(labels)))} "
                "(those of the training rows, unless the task's option 'labels' names them all)" + numbers
            )
        return places[name]

    return place


def file_fingerprint(*paths: pathlib.Path) -> str:
    """sha256 over the contents of the files, or of data sets by name, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        if is_name(path):
            digest.update(read_rows(str(path))[1].encode())
            continue
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorted label names; as numbers where all of them are integers."""
    labels = set(labels)
    numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    return tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


def respelled(known: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The head's labels in the task's spelling if they differ only in case and stay distinct; else unchanged."""
    spelled = {name.casefold(): name for name in wanted}
    names = tuple(spelled.get(name.casefold(), name) for name in known)
    return names if len({*names}) == len(known) and len(spelled) == len(wanted) else tuple(known)


def adopt_labels(wanted: Sequence[str], known: Sequence[str], source: str) -> tuple[str, ...]:
    """The head's own label order, for a task whose labels are `wanted`.

    A fine-tuned model keeps its names in its config and is matched by name (see `respelled`), never by position, unless
    the names are the numbers of the head's outputs. Raises ValueError if the head does not know one of the task's
    labels, or names none.
    """
    if not known and tuple(wanted) == tuple(map(str, range(len(wanted)))):
        return tuple(wanted)
    if not known:
        raise ValueError(
            f"{source} does not name the classes of its head, so their order is not known. Give "
            f"the names in the head's order (--labels={','.join(wanted)} if it is this one), or "
            "write them to its config.json as id2label"
        )
    known = respelled(known, wanted)
    names = set(known)
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(
            f"labels {unknown} are unknown to the head of {source}, which has {list(known)}; "
            "fine-tune a new head for them or rename the labels"
        )
    return tuple(known)
