"""What every fine-tuning task has in common: the `Task` interface, pairs of segments, batches.

The way of an example:

    file -> Record (text and gold) -> features (ids, one row of the model) -> batch [B, T]
         -> outputs (logits of each row) -> Scores, prediction and submission files

A task says how to read, featurise, score and write; the loop, the sweep and the table know nothing
else of it. Features are dicts of plain numpy values, one dict a row:

    input_ids, token_type_ids   int32 [t]; multiple choice: [C][t]
    labels                      int: class or right choice
    targets                     float: regression
    label_set                   float32 [C]: multi-label, 0 or 1
    tags, tag_weights           int32 [t], float32 [t]: tagging; weight 1 where a word is predicted
    start_positions, end_positions   int: spans, in tokens of the row; 0, 0 = no answer here
    example                     int: which record of the split the row belongs to

A split without gold (a test set) yields features without the gold fields.
"""

import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bertjax.model.presets import BertConfig
from bertjax.tasks.metrics import Scores

Features = dict[str, Any]

GOLD_FIELDS = ("labels", "targets", "label_set", "tags", "tag_weights", "start_positions", "end_positions")


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
    """The records of one split, whether they have gold, and what the reader wants known."""

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
                f"split {self.name!r} has no labels, so it cannot be used for {purpose}; "
                "predictions can be written, or name a split with labels"
            )


class Task(Protocol):
    """The contract of a task. One instance serves all splits of one data set."""

    name: str
    head: str  # classification, regression, multilabel, tagging, spans or multiple_choice
    labels: tuple[str, ...]  # names by index of the head's outputs; () where there are none
    metric: str  # the name in Scores that picks the best checkpoint (higher is better)
    metric_names: tuple[str, ...]  # the names in Scores that could
    splits: dict[str, str]  # 'train', 'dev', 'test' (and more) -> what is read for them

    def read(self, split: str) -> Split:
        """Reads a split. Errors name file and line."""

    def features(self, split: Split, tokenizer: Any, max_length: int, training: bool) -> list[Features]:
        """Rows for the model, in record order; a record may give several (windows)."""

    def score(self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> Scores:
        """Scores the outputs, one array a row in feature order, without padding."""

    def write(
        self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray], directory: pathlib.Path
    ) -> list[pathlib.Path]:
        """Writes the prediction (or submission) files and returns their paths."""


def check_split(task: Task, split: str) -> None:
    """Raises ValueError naming the splits that there are, if this is none of them."""
    if split not in task.splits:
        raise ValueError(f"{task.name} has no split {split!r}; one of {', '.join(task.splits)}")


def label_index(labels: Sequence[str], name: str, what: str) -> int:
    """The place of a gold label among the head's.

    Raises ValueError for one that the head does not have; `what` says where and what it is.
    """
    if name not in labels:
        raise ValueError(
            f"{what} {name!r} is unknown; the head has {list(labels)} "
            "(those of the training rows, unless the task's option 'labels' names them all)"
        )
    return labels.index(name)


def file_fingerprint(*paths: pathlib.Path) -> str:
    """sha256 over the contents of the files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorted label names; as numbers where all of them are integers."""
    labels = set(labels)
    numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    return tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


def adopt_labels(wanted: Sequence[str], known: Sequence[str], source: str) -> tuple[str, ...]:
    """The head's own label order, for a task whose labels are `wanted`.

    A fine-tuned model keeps its names in its config and is matched by name, never by position,
    unless the names are the numbers of the head's outputs. Raises ValueError if the head does not
    know one of the task's labels, or names none.
    """
    if not known and tuple(wanted) == tuple(map(str, range(len(wanted)))):
        return tuple(wanted)
    if not known:
        raise ValueError(
            f"{source} does not name the classes of its head, so their order is not known. Give "
            f"the names in the head's order (--labels={','.join(wanted)} if it is this one), or "
            "write them to its config.json as id2label"
        )
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"labels {unknown} are unknown to the head of {source}, which has {list(known)}; "
            "fine-tune a new head for them or rename the labels"
        )
    return tuple(known)


# --- segments -------------------------------------------------------------------------------------


def trim_lengths(length_a: int, length_b: int, room: int) -> tuple[int, int]:
    """Lengths of two segments that fit `room`: the longer one loses, the second one on a tie.

    Source: _truncate_seq_pair of the original run_classifier.py.
    """
    while length_a + length_b > room:
        if length_a > length_b:
            length_a -= 1
        else:
            length_b -= 1
    return length_a, length_b


def encode_segments(tokenizer: Any, ids_a: Sequence[int], ids_b: Sequence[int] | None, max_length: int) -> Features:
    """[CLS] A [SEP] or [CLS] A [SEP] B [SEP], trimmed to max_length.

    The first [SEP] belongs to segment 0. An empty B stays a segment: [CLS] A [SEP] [SEP].
    """
    specials = 2 if ids_b is None else 3
    if max_length <= specials:
        raise ValueError(f"max_length={max_length} has no room for text beside {specials} special tokens")
    keep_a, keep_b = trim_lengths(len(ids_a), len(ids_b or ()), max_length - specials)
    ids = [tokenizer.cls_id, *ids_a[:keep_a], tokenizer.sep_id]
    first = len(ids)
    if ids_b is not None:
        ids += [*ids_b[:keep_b], tokenizer.sep_id]
    types = np.zeros(len(ids), np.int32)
    types[first:] = 1
    return {"input_ids": np.array(ids, np.int32), "token_type_ids": types}


def require_segments(config: BertConfig) -> None:
    """Raises ValueError for a model that cannot tell the two texts of a pair apart."""
    if config.type_vocab_size < 2:
        raise ValueError(
            "this model has one segment (type_vocab_size=1), so it cannot read pairs "
            "of texts; join the two into one text, or take another model"
        )


def encode_texts(tokenizer: Any, texts: Sequence[str | None]) -> list[list[int] | None]:
    """encode_batch that passes None through (records without a second text)."""
    present = [i for i, text in enumerate(texts) if text is not None]
    encoded: list[list[int] | None] = [None] * len(texts)
    for i, ids in zip(present, tokenizer.encode_batch([texts[i] for i in present]), strict=True):
        encoded[i] = ids
    return encoded


# --- batches --------------------------------------------------------------------------------------

_TOKEN_FIELDS = ("input_ids", "token_type_ids", "tags", "tag_weights")
_HOST_FIELDS = ("example", "window")  # stay on the host


def row_length(features: Features) -> int:
    """Tokens of a row; of its longest choice where there are several."""
    ids = features["input_ids"]
    return max(map(len, ids)) if isinstance(ids, list) else len(ids)


def has_pair(features: Features) -> bool:
    """Whether a row has a second segment."""
    types = features["token_type_ids"]
    return any(map(np.any, types)) if isinstance(types, list) else bool(np.any(types))


def _bucket_of(features: Sequence[Features], buckets: Sequence[int]) -> np.ndarray:
    lengths = np.array([row_length(f) for f in features])
    if lengths.size and lengths.max() > max(buckets):
        raise ValueError(f"a row of {lengths.max()} tokens is longer than the buckets {buckets}")
    return np.searchsorted(np.asarray(sorted(buckets)), lengths)


def collate(features: Sequence[Features], length: int, batch_size: int, pad_id: int) -> dict[str, np.ndarray]:
    """Pads rows to [batch_size, length]; missing rows repeat the first with weight 0.

    Adds attention_mask (1 = token) and weights [B] float32 (0 = not a row of the data).
    """
    rows = [*features, *[features[0]] * (batch_size - len(features))]
    batch: dict[str, np.ndarray] = {}
    for name, first in rows[0].items():
        if name in _HOST_FIELDS:
            continue
        if name not in _TOKEN_FIELDS:
            batch[name] = np.asarray([row[name] for row in rows])
            kind = np.int32 if batch[name].dtype.kind in "iu" else np.float32
            batch[name] = batch[name].astype(kind)
            continue
        choices = isinstance(first, list)
        shape = (batch_size, len(first), length) if choices else (batch_size, length)
        kind = np.float32 if name == "tag_weights" else np.int32
        batch[name] = np.full(shape, pad_id if name == "input_ids" else 0, kind)
        mask = np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            for j, values in enumerate(row[name]) if choices else [(..., row[name])]:
                batch[name][i, j, : len(values)] = values
                mask[i, j, : len(values)] = 1
        if name == "input_ids":
            batch["attention_mask"] = mask
    batch["weights"] = (np.arange(batch_size) < len(features)).astype(np.float32)
    return batch


def process_slice(batch: dict[str, np.ndarray], process_index: int, process_count: int) -> dict[str, np.ndarray]:
    """The contiguous rows of one process."""
    size = len(batch["weights"]) // process_count
    return {k: v[process_index * size : (process_index + 1) * size] for k, v in batch.items()}


class TrainingBatches:
    """Training batches by step: a pure function of (seed, step), every row once an epoch.

    Rows are shuffled anew each epoch and a batch is the next ones, padded to the bucket of its
    longest row. With `group`, that many batches' worth of rows at a time are ordered by bucket
    before they are cut into batches, and the batches are shuffled: a batch rarely pads beyond its
    bucket then, but is no random draw any more. The last, short batch of an epoch is filled with
    rows of weight 0. `batches[step]` gives the rows of this process.
    """

    def __init__(
        self,
        features: Sequence[Features],
        batch_size: int,
        seed: int,
        buckets: Sequence[int],
        pad_id: int,
        group: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if not features:
            raise ValueError("no training rows")
        if batch_size % process_count:
            raise ValueError(f"batch_size={batch_size} is not divisible by {process_count} hosts")
        for row in features:
            if not any(name in row for name in GOLD_FIELDS):
                raise ValueError("training rows have no labels; a test split cannot be trained on")
        self.features, self.batch_size, self.seed = features, batch_size, seed
        self.buckets, self.pad_id, self.group = tuple(sorted(buckets)), pad_id, group
        self.process_index, self.process_count = process_index, process_count
        self._bucket = _bucket_of(features, self.buckets)
        self._plan: tuple[int, list[np.ndarray]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.features) // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Indices of the features in the global batch of `step`."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._plan[0] != epoch:
            self._plan = (epoch, self._epoch(epoch))
        return self._plan[1][at]

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.features))
        if len(self.buckets) == 1 or not self.group:
            return np.split(order, range(self.batch_size, len(order), self.batch_size))
        size = self.group * self.batch_size
        groups = np.split(order, range(size, len(order), size))
        order = np.concatenate([g[np.argsort(self._bucket[g], kind="stable")] for g in groups])
        batches = np.split(order, range(self.batch_size, len(order), self.batch_size))
        return [batches[i] for i in rng.permutation(len(batches))]

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows = self.rows(step)
        length = self.buckets[self._bucket[rows].max()]
        batch = collate([self.features[i] for i in rows], length, self.batch_size, self.pad_id)
        return process_slice(batch, self.process_index, self.process_count)


def evaluation_batches(
    features: Sequence[Features], batch_size: int, buckets: Sequence[int], pad_id: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Every row exactly once, by bucket, as (feature indices, batch [B, bucket]) pairs.

    The last batch of a bucket is filled with weight-0 rows, so a bucket has one shape.
    """
    buckets = sorted(buckets)
    bucket = _bucket_of(features, buckets)
    for number, length in enumerate(buckets):
        members = np.flatnonzero(bucket == number)
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size]
            yield rows, collate([features[i] for i in rows], length, batch_size, pad_id)
