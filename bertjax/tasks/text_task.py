"""Tasks over one text or a pair of texts: classes, a number, or a set of labels.

`TextTask` is what the GLUE tasks, XNLI and a user's own tables share; they differ in reading. Label names are matched
by name with the head's, never by position.
"""

import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax.tasks.batches import Features
from bertjax.tasks.encoding import pair_rows
from bertjax.tasks.kinds import KINDS, TextKind
from bertjax.tasks.metrics import Scores
from bertjax.tasks.task import Example, Outputs, Rows, Split, Task, label_places, likeliest, write_jsonl
from bertjax.tokenization import Tokenizer


class TextTask(Task):
    """A task of texts or pairs; `head` names a TextKind of kinds.py."""

    def __init__(self, name: str, head: str, labels: Sequence[str], metric: str | None = None):
        kinds = {name: kind for name, kind in KINDS.items() if isinstance(kind, TextKind)}
        if head not in kinds:
            raise ValueError(f"unknown head {head!r}; one of {', '.join(kinds)}")
        self.name, self.head, self.labels = name, head, tuple(labels)
        self.kind_of_head = kinds[head]
        self.metric = metric or self.kind_of_head.metrics[0]

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.kind_of_head.metrics if name != "f1" or len(self.labels) == 2)

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """One row a record: [CLS] A [SEP] (B [SEP]), the longer segment trimmed first."""
        if training:
            split.require_labels("training")
        pairs = [(record.text_a, record.text_b) for record in split.records]
        rows, place = [], label_places(self.labels)
        for number, (ids, types) in enumerate(pair_rows(tokenizer, pairs, max_length)):
            rows.append({"input_ids": ids, "token_type_ids": types, "example": number})
            if split.labelled:
                record = split.records[number]
                index = functools.partial(place, what=f"{record.where}: label")
                rows[-1] |= self.kind_of_head.gold(record.label, index, self.num_labels)
        return rows

    def predict(self, outputs: Outputs) -> np.ndarray:
        """Class index [N], value [N], or bool [N, C] (probability of at least one half)."""
        return self.kind_of_head.predict(_logits(outputs))

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> Scores:
        split.require_labels("scoring")
        return self.kind_of_head.score(rows, _logits(outputs), self.labels)

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """predictions_SPLIT.jsonl: id, prediction and scores of each record, in file order."""
        lines = []
        for record, value, logits in zip(split.records, self.predict(outputs), _logits(outputs), strict=True):
            lines.append({"id": record.id, "prediction": _or_none(self.kind_of_head.readable(value, self.labels))})
            if self.labels:
                shares = zip(self.labels, self.kind_of_head.probabilities(logits), strict=True)
                lines[-1]["scores"] = {name: _or_none(round(float(share), 6)) for name, share in shares}
        return write_jsonl(directory, split, lines)

    def examples(self, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
        made = []
        for record, logits in zip(split.records, _logits(outputs), strict=True):
            example = {"texts": [text for text in (record.text_a, record.text_b) if text is not None]}
            made.append(example | self.kind_of_head.compare(record.label, logits, self.labels))
            if self.labels:
                made[-1]["predictions"] = likeliest(self.labels, self.kind_of_head.probabilities(logits))
        return made


def _logits(outputs: Outputs) -> np.ndarray:
    """[N, C] of the outputs, also where a number has no axis of its own."""
    return np.asarray(outputs, np.float64).reshape(len(outputs), -1)


def _or_none(value: Any) -> Any:
    """The value; None for NaN and infinities, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
