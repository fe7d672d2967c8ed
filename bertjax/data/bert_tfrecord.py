"""The original's pre-training files: TFRecords of tf.train.Example, read and written here.

In: files that `create_pretraining_data.py` of google-research/bert wrote, plain or GZIP, or masked
batches to write. Out: `TFRecordBatches`, training batches whose masks are fixed, or the records.
TensorFlow is not needed: a record is framed by its length and two masked CRC-32C checksums
(tensorflow/core/lib/io/record_writer.h), and holds a protocol-buffer map from names to lists
(tensorflow/core/example/feature.proto).
"""

from __future__ import annotations

import atexit
import gzip
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np

from bertjax.data.documents import resolve
from bertjax.data.pairs import combine, permute
from bertjax.data.rows import Batch, check_processes

SEQUENCE_FIELDS = ("input_ids", "input_mask", "segment_ids")
PREDICTION_FIELDS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
FIELDS = (*SEQUENCE_FIELDS, *PREDICTION_FIELDS, "next_sentence_labels")


# --- CRC-32C and frames -----------------------------------------------------------------------

def _crc_tables() -> np.ndarray:
    """uint32 [8, 256]: tables for eight bytes at a time, polynomial 0x82F63B78 (Castagnoli)."""
    table = np.zeros((8, 256), np.uint32)
    for i in range(256):
        crc = i
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table[0, i] = crc
    for k in range(1, 8):
        table[k] = (table[k - 1] >> 8) ^ table[0, table[k - 1] & 0xFF]
    return table


_CRC = _crc_tables()


@numba.njit(cache=True, nogil=True)
def _crc32c(data, table):
    crc = np.uint32(0xFFFFFFFF)
    n = len(data)
    i = 0
    while i + 8 <= n:
        low = crc ^ (np.uint32(data[i]) | np.uint32(data[i + 1]) << np.uint32(8)
                     | np.uint32(data[i + 2]) << np.uint32(16)
                     | np.uint32(data[i + 3]) << np.uint32(24))
        crc = (table[7, low & np.uint32(255)] ^ table[6, (low >> np.uint32(8)) & np.uint32(255)]
               ^ table[5, (low >> np.uint32(16)) & np.uint32(255)]
               ^ table[4, low >> np.uint32(24)]
               ^ table[3, data[i + 4]] ^ table[2, data[i + 5]]
               ^ table[1, data[i + 6]] ^ table[0, data[i + 7]])
        i += 8
    while i < n:
        crc = table[0, (crc ^ np.uint32(data[i])) & np.uint32(255)] ^ (crc >> np.uint32(8))
        i += 1
    return crc ^ np.uint32(0xFFFFFFFF)


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated and shifted."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        data = np.frombuffer(data, np.uint8)
    crc = int(_crc32c(data, _CRC))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write_records(path: str | os.PathLike[str], records: Iterable[bytes],
                  compressed: bool | None = None) -> int:
    """Write records as a TFRecord file, GZIP if `compressed` (default: by the name's .gz)."""
    compressed = str(path).endswith(".gz") if compressed is None else compressed
    count = 0
    with (gzip.open if compressed else open)(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + struct.pack("<I", masked_crc32c(length)) + record
                       + struct.pack("<I", masked_crc32c(record)))
            count += 1
    return count


def read_records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Records of a TFRecord file, plain or GZIP (told by its first bytes), checksums verified.

    Raises:
      ValueError: cut off or damaged, with file and record number.
    """
    with _open(path) as file:
        number = 0
        while head := file.read(12):
            if len(head) < 12 or struct.unpack("<I", head[8:])[0] != masked_crc32c(head[:8]):
                raise ValueError(f"{path}: damaged before record {number} (wrong length checksum); "
                                 "is it a TFRecord file, and whole?")
            (length,) = struct.unpack("<Q", head[:8])
            record, tail = file.read(length), file.read(4)
            if len(record) < length or len(tail) < 4:
                raise ValueError(f"{path}: cut off in record {number}; copy or build it again")
            if struct.unpack("<I", tail)[0] != masked_crc32c(record):
                raise ValueError(f"{path}: record {number} is damaged (wrong checksum)")
            yield record
            number += 1


def _is_gzip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _open(path: str | os.PathLike[str]) -> Any:
    return gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb", buffering=1 << 18)


# --- tf.train.Example -------------------------------------------------------------------------

def make_example(features: Mapping[str, np.ndarray]) -> bytes:
    """A serialized tf.train.Example of integer and float lists."""
    entries = b""
    for name, values in features.items():
        values = np.asarray(values).ravel()
        if values.dtype.kind == "f":
            kind, packed = 2, values.astype("<f4").tobytes()
        else:
            kind, packed = 3, b"".join(map(_varint, values.tolist()))
        feature = _field(kind, _field(1, packed))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def parse_example(record: bytes) -> dict[str, np.ndarray]:
    """Features of a serialized tf.train.Example: int64 or float32 [n] (byte lists are left out)."""
    features = {}
    for _, group in _fields(record):
        for _, entry in _fields(group):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b"")):
                if kind == 2:
                    features[bytes(parts[1]).decode()] = _floats(values)
                elif kind == 3:
                    features[bytes(parts[1]).decode()] = _integers(values)
    return features


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _read_varint(data: memoryview | bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _fields(data: memoryview | bytes) -> Iterator[tuple[int, Any]]:
    """(number, content) of each field: a view of bytes, or an int for a varint."""
    data, position = memoryview(data), 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _read_varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, position = _read_varint(data, position)
        else:
            length = {1: 8, 5: 4}[wire]
        yield tag >> 3, data[position : position + length]
        position += length


def _floats(values: memoryview) -> np.ndarray:
    return np.concatenate(
        [np.empty(0, "<f4"), *(np.frombuffer(v, "<f4") for _, v in _fields(values))])


def _integers(values: memoryview) -> np.ndarray:
    lists = []
    for _, packed in _fields(values):
        if isinstance(packed, int):  # not packed: one varint a field
            lists.append(np.array([packed], np.uint64).astype(np.int64))
        else:
            out = np.empty(len(packed), np.int64)
            lists.append(out[: _unpack(np.frombuffer(packed, np.uint8), out)])
    return np.concatenate([np.empty(0, np.int64), *lists])


@numba.njit(cache=True, nogil=True)
def _unpack(data, out):
    count = 0
    value, shift = np.uint64(0), np.uint64(0)
    for byte in data:
        value |= np.uint64(byte & 127) << shift
        if byte < 128:
            out[count] = np.int64(value)
            count += 1
            value, shift = np.uint64(0), np.uint64(0)
        else:
            shift += np.uint64(7)
    return count


# --- pre-training files -----------------------------------------------------------------------

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
            if _is_gzip(path):
                path = _unpack_gzip(path, cache_dir, number)
            if size := os.path.getsize(path):
                maps.append(np.memmap(path, np.uint8, "r", shape=(size,)))
                offsets.append(_record_offsets(maps[-1], path))
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
        examples = []
        for row in range(first, first + local):
            key = np.uint64(combine(np.uint64(self.seed % 2**64), np.uint64(row // records)))
            examples.append(self._example(permute(row % records, records, key)))
        batch = {name: np.stack([e[name] for e in examples]).astype(np.int32) for name in FIELDS}
        return {
            "input_ids": batch["input_ids"],
            "token_type_ids": batch["segment_ids"],
            "attention_mask": batch["input_mask"],
            "masked_lm_positions": batch["masked_lm_positions"],
            "masked_lm_ids": batch["masked_lm_ids"],
            "masked_lm_weights": np.stack(
                [e["masked_lm_weights"] for e in examples]).astype(np.float32),
            "nsp_labels": batch["next_sentence_labels"].reshape(local, 1),
            "nsp_weights": np.ones((local, 1), np.float32),
        }

    def _example(self, number: int) -> dict[str, np.ndarray]:
        path = self._paths[self._files[number]]
        data, offset = self._maps[self._files[number]], int(self._offsets[number])
        length = int.from_bytes(data[offset - 12 : offset - 4].tobytes(), "little")
        record = data[offset : offset + length]
        checksum = int.from_bytes(data[offset + length : offset + length + 4].tobytes(), "little")
        if checksum != masked_crc32c(record):
            raise ValueError(f"{path}: the record at byte {offset} is damaged (wrong checksum)")
        example = parse_example(record.tobytes())
        for names, expected in ((SEQUENCE_FIELDS, self.seq_length),
                                (PREDICTION_FIELDS, self.max_predictions)):
            for name in names:
                if (found := len(example.get(name, ()))) != expected:
                    raise ValueError(f"{path}: a record has {found} {name}, the first record of "
                                     f"{self._paths[0]} has {expected}; do not mix such files")
        return example


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


def _record_offsets(data: np.ndarray, path: str) -> np.ndarray:
    """Where the content of each record begins, int64 [n]; the lengths' checksums are verified."""
    offsets, position, size = [], 0, len(data)
    while position < size:
        head = data[position : position + 12].tobytes()
        if len(head) < 12 or struct.unpack("<I", head[8:])[0] != masked_crc32c(head[:8]):
            raise ValueError(f"{path}: damaged at byte {position}, record {len(offsets)} (wrong "
                             "length checksum); is it a TFRecord file, and whole?")
        (length,) = struct.unpack("<Q", head[:8])
        offsets.append(position + 12)
        position += length + 16
        if position > size:
            raise ValueError(f"{path}: cut off in record {len(offsets) - 1}; copy it again")
    return np.array(offsets, np.int64)
