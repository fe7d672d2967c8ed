"""Multiple choice: SWAG's CSV files and CODAH-like TSV files.

In: SWAG's train.csv, val.csv and test.csv (columns by name, quotes quote; the test file has no label), or CODAH's TSV
without a header: category, prompt, four answers, label. Out: four rows [CLS] context [SEP] ending [SEP] a question,
accuracy, and predictions. Source: BERT paper 4.4; segments as run_swag of transformers: sent1 | sent2 + ending.
"""

import dataclasses
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax.data.opening import plain_name
from bertjax.tasks import metrics
from bertjax.tasks.batches import Features
from bertjax.tasks.encoding import segment_row
from bertjax.tasks.tables import read_table
from bertjax.tasks.task import (
    Example,
    Outputs,
    Rows,
    Split,
    Task,
    cut,
    file_fingerprint,
    likeliest,
    splits_in,
    write_jsonl,
)
from bertjax.tokenization import Tokenizer

CHOICES = 4
_ENDINGS = tuple(f"ending{i}" for i in range(CHOICES))
_CODAH = ("category", "prompt", "answer0", "answer1", "answer2", "answer3", "label")


@dataclass(frozen=True)
class Choice:
    """A context, the start that all endings share (may be empty), and the endings."""

    id: str
    context: str
    start: str
    endings: tuple[str, ...]
    label: int | None
    where: str


def _gold(value: Any) -> str:
    """The label of a cell, or of JSON lines: a number there is the same as its text."""
    return "" if value is None or isinstance(value, bool) else str(value).strip()


class MultipleChoiceTask(Task):
    """Picks one of four continuations; head 'multiple_choice' (one logit a choice)."""

    head = "multiple_choice"
    metric = "accuracy"
    metric_names = ("accuracy", "matthews", "macro_f1")

    def __init__(self, source: str | pathlib.Path, files: dict[str, str] | None = None, name: str = "swag"):
        """`source` is a directory with `files` (split -> name; default SWAG's names), or hf:allenai/swag,regular."""
        self.source, self.name = pathlib.Path(source), name
        self.splits = splits_in(source, files, {"train": "train.csv", "dev": "val.csv", "test": "test.csv"})
        self.published = "" if files else "hf:allenai/swag,regular"

    def read(self, split: str) -> Split:
        """Choices in file order. Raises ValueError with file and line for a bad label."""
        path = self.file_of(split)
        if plain_name(path.name).endswith(".tsv"):
            table = read_table(path, _CODAH[1:-1], headerless=_CODAH)
            columns = ("prompt", *_CODAH[2:-1])
        else:
            table = read_table(path, ("sent1", "sent2", *_ENDINGS))
            columns = ("sent1", "sent2", *_ENDINGS)
            if more := [name for name in table.columns if re.fullmatch(r"ending\d+", name) and name not in columns]:
                raise ValueError(f"{path}: a question has {CHOICES} endings, and there is a column {more[0]}")
        # Test files have no label, or -1.
        golds = [_gold(row.get("label")) for _, row in table.rows]
        labelled = set(golds) - {"", "-1"} != set()
        records = []
        for number, ((where, row, texts), gold) in enumerate(zip(table.texts(columns), golds, strict=True)):
            if labelled and gold not in map(str, range(CHOICES)):
                raise ValueError(f"{where}: label {gold!r} is not one of 0 to 3")
            key, label = str(row.get("fold-ind") or number), int(gold) if labelled else None
            start = texts[1] if len(texts) > 1 + CHOICES else ""
            records.append(Choice(key, texts[0], start, texts[-CHOICES:], label, where))
        empty = sum(not all(map(str.strip, record.endings)) for record in records)
        notes = (f"questions with an empty ending: {empty:,}",) if empty else ()
        return Split(split, records, labelled, file_fingerprint(path), notes)

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """One feature dict a question, whose input_ids are a list of four rows."""
        if training:
            split.require_labels("training")
        contexts = tokenizer.encode_batch([record.context for record in split.records])
        # Joined by a blank before tokenisation, as "She" + "opens the door.".
        texts = [f"{r.start} {ending}".strip() for r in split.records for ending in r.endings]
        endings = tokenizer.encode_batch(texts)
        rows = []
        for i, record in enumerate(split.records):
            mine = endings[i * CHOICES : (i + 1) * CHOICES]
            ids, types = zip(*(segment_row(tokenizer, contexts[i], one, max_length) for one in mine), strict=True)
            rows.append({"input_ids": list(ids), "token_type_ids": list(types), "example": i})
            if split.labelled:
                rows[-1]["labels"] = record.label
        return rows

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> metrics.Scores:
        """Accuracy over the questions."""
        split.require_labels("scoring")
        gold, logits = [record.label for record in split.records], np.asarray(outputs, np.float64)
        details = metrics.calibration(gold, metrics.softmax(logits))
        return dataclasses.replace(metrics.classification_scores(gold, logits.argmax(-1)), details=details)

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """predictions_SPLIT.jsonl: id, chosen ending (0 to 3) and its text."""
        chosen = [int(np.argmax(logits)) for logits in outputs]
        lines = [
            {"id": record.id, "prediction": best, "text": record.endings[best]}
            for record, best in zip(split.records, chosen, strict=True)
        ]
        return write_jsonl(directory, split, lines)

    def examples(self, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
        made = []
        for record, shares in zip(split.records, metrics.softmax(np.asarray(outputs, np.float64)), strict=True):
            best, endings = int(shares.argmax()), [cut(ending, 160) for ending in record.endings]
            made.append(
                {
                    "texts": [f"{record.context} {record.start}".strip()],
                    "gold": endings[record.label],
                    "predicted": endings[best],
                    "right": best == record.label,
                    "score": float(shares.max()),
                    "predictions": likeliest(endings, shares, len(shares)),
                }
            )
        return made
