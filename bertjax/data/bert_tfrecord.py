"""The original's pre-training files: TFRecords of tf.train.Example, read and written here.

In: files that `create_pretraining_data.py` of google-research/bert wrote, plain or GZIP, or masked
batches to write. Out: `TFRecordBatches`, training batches whose masks are fixed, or the records.
TensorFlow is not needed (`tfrecord.py`).
"""

from __future__ import annotations

import atexit
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numba
import numpy as np

from bertjax.data.documents import resolve
from bertjax.data.pairs import combine, permute
from bertjax.data.rows import Batch, check_processes
from bertjax.data.tfrecord import (
    content_at,
    is_gzip,
    make_example,
    masked_crc32c,
    parse_example,
    read_records,
    record_offsets,
    varint_at,
)

SEQUENCE_FIELDS = ("input_ids", "input_mask", "segment_ids")
PREDICTION_FIELDS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
FIELDS = (*SEQUENCE_FIELDS, *PREDICTION_FIELDS, "next_sentence_labels")


def examples_of_batch(batch: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    """Serialized examples, with the original's names, of a batch as `TFRecordBatches` gives it.

    Rows without a pair (all padding) are left out. Packed rows have no place in that format.
    """
    if "position_ids" in batch:
        raise ValueError("packed rows cannot be written: the original's format has one pair a row")
    columns = {"input_ids": "input_ids", "input_mask": "attention_mask",
               "segment_ids": "token_type_ids", "next_sentence_labels": "nsp_labels"}
    for row in range(len(batch["input_ids"])):
        if not np.any(batch["attention_mask"][row]):
            continue
        features = {name: np.asarray(batch[columns.get(name, name)][row]) for name in FIELDS}
        features["masked_lm_weights"] = features["masked_lm_weights"].astype(np.float32)
        yield make_example(features)


class TFRecordBatches:
    """Endless random-access training batches out of the original's TFRecords.

    As `PretrainingBatches` (a function of (seed, step), the rows of this process), but the masks
    are those of the files: `input_ids` [B, T] are masked already and each batch has
    masked_lm_positions, masked_lm_ids int32 [B, P] and masked_lm_weights float32 [B, P].

    Args:
      patterns: files; lengths T and P are read from them.
      seq_length, max_predictions: what the training is set to; None takes what the files hold.
      cache_dir: where GZIP files are unpacked to, for access in any order; default a temporary
        directory that is removed at exit.

    Raises:
      ValueError: another T or P than set (both named), a missing field, a damaged file, no records.
    """

    pairs_per_row = 1

    def __init__(
        self, patterns: str | Iterable[str], batch_size: int, seed: int = 0, *,
        seq_length: int | None = None, max_predictions: int | None = None,
        process_index: int = 0, process_count: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        check_processes(batch_size, process_index, process_count)
        self.batch_size, self.seed = batch_size, seed
        self.process_index, self.process_count = process_index, process_count
        self._paths = resolve(patterns)
        self._check_lengths(seq_length, max_predictions)
        maps, offsets = [], []
        for number, path in enumerate(self._paths):
            if is_gzip(path):
                path = _unpack_gzip(path, cache_dir, number)
            if size := os.path.getsize(path):
                maps.append(np.asarray(np.memmap(path, np.uint8, "r", shape=(size,))))
                offsets.append(record_offsets(maps[-1], path))
        self._maps = maps
        self._offsets = np.concatenate([np.empty(0, np.int64), *offsets])
        self._files = np.repeat(np.arange(len(maps)), [len(o) for o in offsets])
        self.examples_per_epoch = len(self._offsets)

    def _check_lengths(self, seq_length: int | None, max_predictions: int | None) -> None:
        first = next((r for path in self._paths for r in read_records(path)), None)
        if first is None:
            raise ValueError(f"0 examples from {len(self._paths)} files")
        example = parse_example(first)
        if missing := [name for name in FIELDS if name not in example]:
            raise ValueError(f"{self._paths[0]}: no field {', '.join(missing)} (there is "
                             f"{', '.join(sorted(example))}); not the original's pre-training data")
        self.seq_length = len(example["input_ids"])
        self.max_predictions = len(example["masked_lm_positions"])
        self._expected = np.array([self.seq_length] * 3 + [self.max_predictions] * 3 + [1])
        for name, stored, wanted in (
                ("max_seq_length", self.seq_length, seq_length),
                ("max_predictions_per_seq", self.max_predictions, max_predictions)):
            if wanted is not None and wanted != stored:
                raise ValueError(
                    f"{self._paths[0]} was built with {name}={stored}, training is set to "
                    f"{wanted}; set it to {stored}, or build the data with {wanted}")

    def epochs(self, steps: int) -> float:
        """How often `steps` batches go through the files."""
        return steps * self.batch_size / self.examples_per_epoch

    def __getitem__(self, step: int) -> Batch:
        local = self.batch_size // self.process_count
        first = step * self.batch_size + self.process_index * local
        records = self.examples_per_epoch
        longest = max(self.seq_length, self.max_predictions)
        values = np.zeros((local, len(FIELDS), longest), np.int32)
        weights = np.zeros((local, self.max_predictions), np.float32)
        for i, row in enumerate(range(first, first + local)):
            key = np.uint64(combine(np.uint64(self.seed % 2**64), np.uint64(row // records)))
            self._read(permute(row % records, records, key), values[i], weights[i])
        columns = {name: np.ascontiguousarray(values[:, i, :n]) for i, (name, n) in enumerate(
            zip(FIELDS, self._expected.tolist(), strict=True))}
        return {
            "input_ids": columns["input_ids"],
            "token_type_ids": columns["segment_ids"],
            "attention_mask": columns["input_mask"],
            "masked_lm_positions": columns["masked_lm_positions"],
            "masked_lm_ids": columns["masked_lm_ids"],
            "masked_lm_weights": weights,
            "nsp_labels": columns["next_sentence_labels"],
            "nsp_weights": np.ones((local, 1), np.float32),
        }

    def _read(self, number: int, values: np.ndarray, weights: np.ndarray) -> None:
        path = self._paths[self._files[number]]
        data, offset = self._maps[self._files[number]], int(self._offsets[number])
        length = int.from_bytes(data[offset - 12 : offset - 4].tobytes(), "little")
        record = data[offset : offset + length]
        checksum = int.from_bytes(data[offset + length : offset + length + 4].tobytes(), "little")
        if checksum != masked_crc32c(record):
            raise ValueError(f"{path}: the record at byte {offset} is damaged (wrong checksum)")
        counts = np.zeros(len(FIELDS), np.int64)
        well_formed = _read_example(record, _NAMES, values, weights, counts)
        if not well_formed or not np.array_equal(counts, self._expected):
            found = {name: len(v) for name, v in parse_example(record.tobytes()).items()}
            raise ValueError(
                f"{path}: a record has {found}, the first record of {self._paths[0]} has "
                f"{dict(zip(FIELDS, self._expected.tolist(), strict=True))}; do not mix such files")


_NAMES = np.zeros((len(FIELDS), 32), np.uint8)
for _i, _name in enumerate(FIELDS):
    _NAMES[_i, : len(_name)] = np.frombuffer(_name.encode(), np.uint8)


@numba.njit(cache=True, nogil=True)
def _read_example(data, names, values, weights, counts):
    """`parse_example` for the fields `names` with packed lists, as TensorFlow writes them.

    Writes integers to values [field, i], floats to weights [i], numbers of both to counts; False
    where the bytes are anything else (`parse_example` then says what).
    """
    position, end = content_at(data, np.int64(0), np.int64(len(data)), 1)
    while 0 <= position < end:
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
            if same:
                break
            field += 1
        if field == len(names):
            continue
        feature, feature_end = content_at(data, name_end, entry_end, 2)
        if feature < 0 or feature == feature_end:
            return False
        kind = np.int64(data[feature] >> 3)
        content, content_end = content_at(data, feature, feature_end, kind)
        if content < 0:
            return False
        content, content_end = content_at(data, content, content_end, 1)
        if content < 0:
            return False
        count = 0
        if kind == 2:
            count = (content_end - content) // 4
            if count > len(weights):
                return False
            weights[:count] = data[content : content + 4 * count].copy().view(np.float32)
        elif kind == 3:
            while content < content_end:
                value, content = varint_at(data, content, content_end)
                if content < 0 or count >= values.shape[1]:
                    return False
                values[field, count] = value
                count += 1
        counts[field] = count
    return position == end


def _unpack_gzip(path: str, cache_dir: str | os.PathLike[str] | None, number: int) -> str:
    if cache_dir is None:
        cache_dir = tempfile.mkdtemp(prefix="bertjax-tfrecord-")
        atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    out = Path(cache_dir) / f"{number:05d}-{Path(path).name}.plain"
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    with gzip.open(path, "rb") as source, open(temporary, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    os.replace(temporary, out)
    return str(out)
