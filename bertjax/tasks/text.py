"""Tasks over one text or a pair of texts: classes, a number, or a set of labels.

`TextTask` holds everything that the GLUE tasks and a user's own tables share: records to features,
outputs to predictions, predictions to scores and to a file. What differs, reading, is left to
glue.py and custom.py. Label names are matched by name with the head's, never by position.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax.formats.files import whole_file
from bertjax.tasks import metrics
from bertjax.tasks.task import Features, Record, Split, encode_segments, encode_texts, label_index

DEFAULT_METRIC = {"classification": "accuracy", "regression": "pearson_spearman", "multilabel": "micro_f1"}


def _or_none(value: Any) -> Any:
    """The value; None for NaN and infinities, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TextTask:
    """A sentence or pair task with head 'classification', 'regression' or 'multilabel'."""

    def __init__(self, name: str, head: str, labels: Sequence[str], metric: str | None = None):
        if head not in DEFAULT_METRIC:
            raise ValueError(f"unknown head {head!r}; one of {', '.join(DEFAULT_METRIC)}")
        self.name, self.head, self.labels = name, head, tuple(labels)
        self.metric = metric or DEFAULT_METRIC[head]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Scores by which a checkpoint may be the best one."""
        if self.head == "regression":
            return "pearson_spearman", "pearson", "spearman"
        if self.head == "multilabel":
            return "micro_f1", "macro_f1", "accuracy"
        return ("accuracy", "matthews", "macro_f1", *(["f1"] if len(self.labels) == 2 else []))

    @property
    def outputs(self) -> int:
        """Size of the head's output."""
        return max(1, len(self.labels))

    # --- records -> features

    def features(self, split: Split, tokenizer: Any, max_length: int, training: bool) -> list[Features]:
        """One row a record: [CLS] A [SEP] (B [SEP]), the longer segment trimmed first."""
        if training:
            split.require_labels("training")
        first = encode_texts(tokenizer, [record.text_a for record in split.records])
        second = encode_texts(tokenizer, [record.text_b for record in split.records])
        rows = []
        for i, (record, ids_a, ids_b) in enumerate(zip(split.records, first, second, strict=True)):
            row = encode_segments(tokenizer, ids_a, ids_b, max_length)
            row["example"] = i
            if split.labelled:
                row |= self._gold(record)
            rows.append(row)
        return rows

    def _gold(self, record: Record) -> Features:
        if self.head == "regression":
            return {"targets": float(record.label)}
        if self.head == "classification":
            return {"labels": self._index(record.label, record)}
        chosen = np.zeros(len(self.labels), np.float32)
        for name in record.label:
            chosen[self._index(name, record)] = 1.0
        return {"label_set": chosen}

    def _index(self, name: str, record: Record) -> int:
        return label_index(self.labels, name, f"{record.where}: label")

    # --- outputs -> predictions -> scores and files

    def predict(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Class index [N], value [N], or bool [N, C] (probability of at least one half)."""
        logits = np.asarray(outputs, np.float64).reshape(len(outputs), -1)
        if self.head == "regression":
            return logits[:, 0]
        return logits >= 0 if self.head == "multilabel" else logits.argmax(1)

    def score(self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> metrics.Scores:
        """The scores of metrics.py for this head."""
        split.require_labels("scoring")
        predicted = self.predict(outputs)
        if self.head == "regression":
            return metrics.regression_scores([row["targets"] for row in features], predicted)
        if self.head == "multilabel":
            gold = [row["label_set"] > 0 for row in features]
            scores = metrics.multilabel_scores(gold, predicted)
        else:
            gold = [row["labels"] for row in features]
            scores = metrics.classification_scores(gold, predicted)
        details = metrics.by_class(gold, predicted, self.labels)
        if self.head == "classification":
            logits = np.asarray(outputs, np.float64).reshape(len(outputs), -1)
            details |= metrics.calibration(gold, [self.probabilities(row) for row in logits])
        return dataclasses.replace(scores, details=details)

    def write(
        self, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray], directory: pathlib.Path
    ) -> list[pathlib.Path]:
        """predictions_SPLIT.jsonl: id, prediction and scores of each record, in file order."""
        path = directory / f"predictions_{split.name}.jsonl"
        predicted = self.predict(outputs)
        with whole_file(path) as file:
            for record, value, logits in zip(split.records, predicted, outputs, strict=True):
                found = self.readable(value)
                row: dict[str, Any] = {"id": record.id, "prediction": _or_none(found)}
                if self.labels:
                    scores = self.probabilities(np.asarray(logits, np.float64))
                    row["scores"] = {
                        name: _or_none(round(float(p), 6)) for name, p in zip(self.labels, scores, strict=True)
                    }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return [path]

    def readable(self, value: Any) -> Any:
        """One entry of `predict` as a number, a label name, or a list of names."""
        if self.head == "regression":
            return float(value)
        if self.head == "multilabel":
            return [name for name, on in zip(self.labels, value, strict=True) if on]
        return self.labels[int(value)]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """[C] of one row's logits; of a multi-label head each on its own."""
        if self.head == "multilabel":
            return 1.0 / (1.0 + np.exp(-np.clip(logits, -500, 500)))
        shifted = np.exp(logits - logits.max())
        return shifted / shifted.sum()
