"""Tasks over one text or a pair of texts: classes, a number, or a set of labels.

`TextTask` is what the GLUE tasks, XNLI and a user's own tables share; they differ in reading. Label
names are matched by name with the head's, never by position.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax.tasks.batches import Features
from bertjax.tasks.kinds import KINDS, TextKind
from bertjax.tasks.metrics import Scores
from bertjax.tasks.shown import Example, likeliest
from bertjax.tasks.task import Record, Split, Task, encode_segments, encode_texts, label_index, write_predictions
from bertjax.tokenization import Tokenizer


class TextTask(Task):
    """A sentence or pair task with head 'classification', 'regression' or 'multilabel'."""

    def __init__(self, name: str, head: str, labels: Sequence[str], metric: str | None = None):
        kinds = {name: kind for name, kind in KINDS.items() if isinstance(kind, TextKind)}
        if head not in kinds:
            raise ValueError(f"unknown head {head!r}; one of {', '.join(kinds)}")
        self.name, self.head, self.labels = name, head, tuple(labels)
        self.kind_of_head = kinds[head]
        self.metric = metric or self.kind_of_head.metrics[0]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Scores by which a checkpoint may be the best one."""
        return tuple(name for name in self.kind_of_head.metrics if name != "f1" or len(self.labels) == 2)

    @property
    def outputs(self) -> int:
        return max(1, len(self.labels))

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """One row a record: [CLS] A [SEP] (B [SEP]), the longer segment trimmed first."""
        if training:
            split.require_labels("training")
        first = encode_texts(tokenizer, [record.text_a for record in split.records])
        second = encode_texts(tokenizer, [record.text_b for record in split.records])
        rows = []
        for i, (record, ids_a, ids_b) in enumerate(zip(split.records, first, second, strict=True)):
            row = encode_segments(tokenizer, ids_a, ids_b, max_length) | {"example": i}
            if split.labelled:
                row |= self._gold(record)
            rows.append(row)
        return rows

    def _gold(self, record: Record) -> Features:
        def index(name: str) -> int:
            return label_index(self.labels, name, f"{record.where}: label")

        return self.kind_of_head.gold(record.label, index, self.outputs)

    def predict(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Class index [N], value [N], or bool [N, C] (probability of at least one half)."""
        return self.kind_of_head.predict(_logits(outputs))

    def score(self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> Scores:
        """The scores of metrics.py for this head."""
        split.require_labels("scoring")
        return self.kind_of_head.score(features, _logits(outputs), self.labels)

    def write(
        self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray], directory: pathlib.Path
    ) -> list[pathlib.Path]:
        """predictions_SPLIT.jsonl: id, prediction and scores of each record, in file order."""
        rows = []
        for record, value, logits in zip(split.records, self.predict(outputs), _logits(outputs), strict=True):
            row = {"id": record.id, "prediction": _or_none(self.kind_of_head.readable(value, self.labels))}
            if self.labels:
                shares = self.kind_of_head.probabilities(logits)
                row["scores"] = {
                    name: _or_none(round(float(p), 6)) for name, p in zip(self.labels, shares, strict=True)
                }
            rows.append(row)
        return write_predictions(directory, split, rows)

    def examples(self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> list[Example]:
        made = []
        for record, logits in zip(split.records, _logits(outputs), strict=True):
            example = {"texts": [text for text in (record.text_a, record.text_b) if text is not None]}
            example |= self.kind_of_head.compare(record.label, logits, self.labels)
            if self.labels:
                example["predictions"] = likeliest(self.labels, self.kind_of_head.probabilities(logits))
            made.append(example)
        return made


def _logits(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """[N, C] of the outputs, also where a number has no axis of its own."""
    return np.asarray(outputs, np.float64).reshape(len(outputs), -1)


def _or_none(value: Any) -> Any:
    """The value; None for NaN and infinities, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
