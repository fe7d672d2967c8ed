"""One example of the original's pre-training data: a tf.train.Example of seven lists.

In: the bytes of a record. Out: a row of a batch (see bert_records.py) whose values are in their ranges, or a ValueError
that names file, record and field.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bertjax.data.rows import Batch
from bertjax.formats.protobuf import content_at, varint_at
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
_WEIGHTS = list(FIELDS).index("masked_lm_weights")
_NAMES = np.array([list(name.encode().ljust(32, b"\0")) for name in FIELDS], np.uint8)


class ExampleReader:
    """Reads examples that are like the first one, whose lengths T and P are those of all.

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
        self._lengths = np.array([self.seq_length] * 3 + [self.max_predictions] * 3 + [1])
        vocab_size = 1 << 31 if tokenizer is None else tokenizer.vocab_size
        # First value that each field cannot have; of the weights, the last that they can.
        self._limits = np.array([vocab_size, 2, 2, self.seq_length, vocab_size, 1, 2])

    @property
    def lengths(self) -> list[int]:
        """Numbers of each field, in the order of FIELDS."""
        return self._lengths.tolist()

    def read(self, record: np.ndarray, where: str, batch: Batch, row: int) -> None:
        """Writes a record, uint8 [n], to a row of a batch; ValueError begins with `where`."""
        values = np.zeros((len(FIELDS), max(self.seq_length, self.max_predictions)), np.int64)
        weights = np.zeros(self.max_predictions, np.float32)
        counts = np.full(len(FIELDS), -1, np.int64)
        if not (_read_example(record, _NAMES, values, weights, counts) and np.array_equal(counts, self._lengths)):
            self._read_slowly(record.tobytes(), where, values, weights)
        field, place = _out_of_range(values, weights, self._lengths, self._limits)
        if field >= 0:
            value = weights[place] if field == _WEIGHTS else values[field, place]
            raise ValueError(f"{where}: " + self._problem(list(FIELDS)[field], value))
        for field, name in enumerate(FIELDS.values()):
            batch[name][row] = weights if field == _WEIGHTS else values[field, : self._lengths[field]]
        batch["nsp_weights"][row] = 1.0

    def _problem(self, name: str, value: Any) -> str:
        if name in ("input_ids", "masked_lm_ids"):
            return (
                f"{name} has the id {value}, the tokenizer has {self._limits[0]} entries; give "
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

    def _read_slowly(self, record: bytes, where: str, values: np.ndarray, weights: np.ndarray) -> None:
        """As `_read_example`, for what TensorFlow does not write but a reader has to accept."""
        example = _parse(record, where)
        expected = dict(zip(FIELDS, self._lengths.tolist(), strict=True))
        if (found := {name: len(example[name]) for name in FIELDS if name in example}) != expected:
            raise ValueError(
                f"{where}: a record has {found}, the first record of {self._first} has "
                f"{expected}; do not mix such files"
            )
        values[:] = 0
        for field, name in enumerate(FIELDS):
            if (example[name].dtype.kind == "f") != (field == _WEIGHTS):
                raise ValueError(
                    f"{where}: {name} is a list of {example[name].dtype} numbers; not the original's pre-training data"
                )
            if field == _WEIGHTS:
                weights[:] = example[name]
            else:
                values[field, : expected[name]] = example[name]


def _parse(record: bytes, where: str) -> dict[str, np.ndarray]:
    try:
        return parse_example(record)
    except ValueError as error:
        raise ValueError(
            f"{where}: it is not the original's pre-training data, but other bytes ({error}); build the file again"
        ) from None


@numba.njit(cache=True, nogil=True)
def _read_example(data, names, values, weights, counts):
    """`parse_example` for the fields `names` with packed lists, as TensorFlow writes them.

    Writes integers to values [field, i], floats to weights [i], numbers of both to counts (-1 on
    entry); False where the bytes are anything else (`parse_example` then says what).
    """
    position, end = content_at(data, np.int64(0), np.int64(len(data)), 1)
    if position < 0 or end != len(data):
        return False
    while position < end:
        entry, entry_end = content_at(data, position, end, 1)
        if entry < 0:
            return False
        position = entry_end
        name, name_end = content_at(data, entry, entry_end, 1)
        if name < 0 or name_end - name > names.shape[1]:
            return False
        field = 0
        while field < len(names):
            same = name_end - name == names.shape[1] or names[field, name_end - name] == 0
            for i in range(name_end - name):
                same &= data[name + i] == names[field, i]
            if same and name_end > name:
                break
            field += 1
        if field == len(names) or counts[field] >= 0:
            return False
        feature, feature_end = content_at(data, name_end, entry_end, 2)
        kind = 2 if field == _WEIGHTS else 3
        content, content_end = feature, feature_end
        if feature >= 0:
            content, content_end = content_at(data, feature, feature_end, kind)
        if feature < 0 or feature_end != entry_end or content < 0 or content_end != feature_end:
            return False
        content, content_end = content_at(data, content, content_end, 1)
        if content < 0 or content_end != feature_end:
            return False
        count = 0
        if kind == 2:
            count = (content_end - content) // 4
            if count > len(weights) or (content_end - content) % 4:
                return False
            weights[:count] = data[content : content + 4 * count].copy().view(np.float32)
        else:
            while content < content_end:
                value, content = varint_at(data, content, content_end)
                if content < 0 or count >= values.shape[1]:
                    return False
                values[field, count] = value
                count += 1
        counts[field] = count
    return True


@numba.njit(cache=True, nogil=True)
def _out_of_range(values, weights, lengths, limits):
    """(field, place) of the first value beyond its range; field -1 if there is none."""
    for field in range(len(lengths)):
        for i in range(lengths[field]):
            if field == _WEIGHTS:
                if not 0 <= weights[i] <= limits[field]:  # nor NaN
                    return field, i
            elif not 0 <= values[field, i] < limits[field]:
                return field, i
    return -1, -1
