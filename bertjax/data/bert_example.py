"""One example of the original's pre-training data: a tf.train.Example of seven lists.

In: the bytes of a record. Out: a row of a batch (see bert_records.py) whose values are in their ranges, or a ValueError
that names file, record and field.
"""

from typing import Any

import numpy as np

from bertjax.data.rows import Batch
from bertjax.formats.tfrecord import parse_example
from bertjax.tokenization import Tokenizer

# The original's name of each field -> the name in a batch.
FIELDS = {
    "input_ids": "input_ids",
    "input_mask": "attention_mask",
    "segment_ids": "token_type_ids",
    "masked_lm_positions": "mlm_positions",
    "masked_lm_ids": "mlm_labels",
    "masked_lm_weights": "mlm_weights",
    "next_sentence_labels": "nsp_labels",
}


class ExampleReader:
    """Reads examples that have the fields and the lengths (T, P) of the first one.

    Args:
      first: bytes of a record of the file `path`.
      tokenizer: the vocabulary that the ids are of; None: any.

    Raises:
      ValueError: not the original's data, or of another vocabulary.
    """

    def __init__(self, first: bytes, path: str, tokenizer: Tokenizer | None = None):
        self._first = path
        example = _parse(first, f"{path}, record 0")
        if missing := [name for name in FIELDS if not len(example.get(name, ()))]:
            raise ValueError(
                f"{path}: no field {', '.join(missing)} (there is "
                f"{', '.join(sorted(example))}); not the original's pre-training data"
            )
        if tokenizer is not None and example["input_ids"][0] != tokenizer.cls_id:
            raise ValueError(
                f"{path}: the first record begins with id {example['input_ids'][0]}, but [CLS] is {tokenizer.cls_id} "
                "in the tokenizer; give the vocabulary that the files were made with"
            )
        self.seq_length = len(example["input_ids"])
        self.max_predictions = len(example["masked_lm_positions"])
        self.lengths = [self.seq_length] * 3 + [self.max_predictions] * 3 + [1]  # in the order of FIELDS
        vocab_size = 1 << 31 if tokenizer is None else tokenizer.vocab_size
        # The largest value that each number of a record can have, weights apart, and where fields end.
        largest = vocab_size - 1, 1, 1, self.seq_length - 1, vocab_size - 1, 1, 1
        self._limits, self._ends = np.repeat(largest, self.lengths), np.cumsum(self.lengths)

    def read(self, record: np.ndarray, where: str, batch: Batch, row: int) -> None:
        """Writes a record, uint8 [n], to a row of a batch; ValueError begins with `where`."""
        example = _parse(record.tobytes(), where)
        expected = dict(zip(FIELDS, self.lengths, strict=True))
        if (found := {name: len(example[name]) for name in FIELDS if name in example}) != expected:
            raise ValueError(
                f"{where}: a record has {found}, the first record of {self._first} has "
                f"{expected}; do not mix such files"
            )
        for name in FIELDS:
            if (example[name].dtype.kind == "f") != (name == "masked_lm_weights"):
                raise ValueError(
                    f"{where}: {name} is a list of {example[name].dtype} numbers; not the original's pre-training data"
                )
        numbers = np.concatenate([example[name] for name in FIELDS])  # float64, which holds every id
        if not (fits := (numbers >= 0) & (numbers <= self._limits)).all():  # nor NaN
            place = int(fits.argmin())
            field = int(np.searchsorted(self._ends, place, side="right"))
            name = list(FIELDS)[field]
            raise ValueError(f"{where}: " + self._problem(name, example[name][place - self._ends[field]]))
        for name, ours in FIELDS.items():
            batch[ours][row] = example[name]
        batch["nsp_weights"][row] = 1.0

    def _problem(self, name: str, value: Any) -> str:
        if name in ("input_ids", "masked_lm_ids"):
            return (
                f"{name} has the id {value}, the tokenizer has {int(self._limits[0]) + 1} entries; give "
                "the vocabulary that the files were made with, or build the file again"
            )
        allowed = {
            "masked_lm_positions": f"a row has {self.seq_length} tokens",
            "masked_lm_weights": "weights are from 0 to 1",
        }.get(name, "it must be 0 or 1")
        return (
            f"{name} has the value {value}, but {allowed}; it is not the original's "
            "pre-training data, or damaged: build the file again"
        )


def _parse(record: bytes, where: str) -> dict[str, np.ndarray]:
    try:
        return parse_example(record)
    except ValueError as error:
        raise ValueError(
            f"{where}: it is not the original's pre-training data, but other bytes ({error}); build the file again"
        ) from None
