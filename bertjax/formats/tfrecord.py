"""TFRecord files and tf.train.Example, without TensorFlow.

In: bytes and arrays. Out: records, features. A record is framed by its length and two masked
CRC-32C checksums (tensorflow/core/lib/io/record_writer.h) and holds a protocol-buffer map from
names to lists of numbers (tensorflow/core/example/feature.proto).
"""

from __future__ import annotations

import contextlib
import gzip
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bertjax.formats.compiled import compiled
from bertjax.formats.crc32c import masked_crc32c, masked_crc32c_of_array
from bertjax.formats.protobuf import declare


def write_records(path: str | os.PathLike[str], records: Iterable[bytes], compressed: bool | None = None) -> int:
    """Write records as a TFRecord file, GZIP if `compressed` (default: by the name's .gz)."""
    compressed = str(path).endswith(".gz") if compressed is None else compressed
    count = 0
    with (gzip.open if compressed else open)(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(
                length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))
            )
            count += 1
    return count


def read_records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Records of a TFRecord file, plain or GZIP (told by its first bytes), checksums verified.

    Raises:
      ValueError: cut off or damaged, with file and record number.
    """
    with _open(path) as file, gzip_errors(path):
        number = 0
        while head := file.read(12):
            if len(head) < 12 or struct.unpack("<I", head[8:])[0] != masked_crc32c(head[:8]):
                raise ValueError(
                    f"{path}: damaged before record {number} (wrong length checksum); is it a TFRecord file, and whole?"
                )
            (length,) = struct.unpack("<Q", head[:8])
            record, tail = _read_at_most(file, length), file.read(4)
            if len(record) < length or len(tail) < 4:
                raise ValueError(f"{path}: cut off in record {number}; copy or build it again")
            if struct.unpack("<I", tail)[0] != masked_crc32c(record):
                raise ValueError(f"{path}: record {number} is damaged (wrong checksum)")
            yield record
            number += 1


def _read_at_most(file: Any, length: int) -> bytes:
    """`length` bytes or all that are left; memory as for what is there, whatever `length` says."""
    parts = []
    while length and (part := file.read(min(length, 1 << 20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def gzip_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """ValueError, with the file, for what the gzip module raises on damaged files."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the GZIP file is cut off or damaged ({error}); copy it again") from None


def is_gzip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _open(path: str | os.PathLike[str]) -> Any:
    return gzip.open(path, "rb") if is_gzip(path) else open(path, "rb", buffering=1 << 18)


def record_offsets(data: np.ndarray, path: str) -> np.ndarray:
    """Where the content of each record begins, int64 [n]; the lengths' checksums are verified."""
    offsets, end = _walk(data)
    if end > len(data):
        raise ValueError(f"{path}: cut off in record {len(offsets) - 1}; copy it again")
    if end < len(data):
        raise ValueError(
            f"{path}: damaged at byte {end}, record {len(offsets)} (wrong length "
            "checksum); is it a TFRecord file, and whole?"
        )
    return offsets


@compiled
def _walk(data):
    """(offsets, byte after the last record that is whole; beyond the data if one is cut off)."""
    offsets = np.empty(1 << 10, np.int64)
    position, count = np.int64(0), 0
    while position + 12 <= len(data):
        length, stored = np.uint64(0), np.uint64(0)
        for i in range(8):
            length |= np.uint64(data[position + i]) << np.uint64(8 * i)
        for i in range(4):
            stored |= np.uint64(data[position + 8 + i]) << np.uint64(8 * i)
        if masked_crc32c_of_array(data[position : position + 8]) != stored:
            break
        if count == len(offsets):
            larger = np.empty(2 * count, np.int64)
            larger[:count] = offsets
            offsets = larger
        offsets[count] = position + 12
        count += 1
        if length > np.uint64(len(data)):
            position = np.int64(len(data)) + 1
            break
        position += np.int64(length) + 16
    return offsets[:count].copy(), position


# --- tf.train.Example -------------------------------------------------------------------------

NO_EXAMPLE = "it is no tf.train.Example"

# tensorflow/core/example/{example,feature}.proto
_Example = declare(
    BytesList={1: "repeated bytes value"},
    FloatList={1: "repeated float value"},
    Int64List={1: "repeated int64 value"},
    Feature={1: "oneof BytesList bytes_list", 2: "oneof FloatList float_list", 3: "oneof Int64List int64_list"},
    Features={1: "map Feature feature"},
    Example={1: "Features features"},
)["Example"]


def make_example(features: Mapping[str, np.ndarray]) -> bytes:
    """A serialized tf.train.Example of integer and float lists."""
    example = _Example()
    for name, values in features.items():
        values = np.asarray(values).ravel()
        feature = example.features.feature[name]
        numbers = feature.float_list if values.dtype.kind == "f" else feature.int64_list
        numbers.value.extend(values.tolist())
    return example.SerializeToString(deterministic=True)


def parse_example(record: bytes) -> dict[str, np.ndarray]:
    """Features of a serialized tf.train.Example: int64 or float32 [n] (byte lists are left out).

    Raises:
      ValueError: the bytes are no such message.
    """
    try:
        features = _Example.FromString(record).features.feature
    except (DecodeError, UnicodeDecodeError):
        raise ValueError(NO_EXAMPLE) from None
    lists = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        if kind == "float_list":
            lists[name] = np.array(feature.float_list.value, np.float32)
        elif kind == "int64_list":
            lists[name] = np.array(feature.int64_list.value, np.int64)
    return lists
