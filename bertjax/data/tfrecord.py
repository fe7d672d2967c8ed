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

import numba
import numpy as np

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
        low = crc ^ (
            np.uint32(data[i])
            | np.uint32(data[i + 1]) << np.uint32(8)
            | np.uint32(data[i + 2]) << np.uint32(16)
            | np.uint32(data[i + 3]) << np.uint32(24)
        )
        crc = (
            table[7, low & np.uint32(255)]
            ^ table[6, (low >> np.uint32(8)) & np.uint32(255)]
            ^ table[5, (low >> np.uint32(16)) & np.uint32(255)]
            ^ table[4, low >> np.uint32(24)]
            ^ table[3, data[i + 4]]
            ^ table[2, data[i + 5]]
            ^ table[1, data[i + 6]]
            ^ table[0, data[i + 7]]
        )
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
    offsets, end = _walk(data, _CRC)
    if end > len(data):
        raise ValueError(f"{path}: cut off in record {len(offsets) - 1}; copy it again")
    if end < len(data):
        raise ValueError(
            f"{path}: damaged at byte {end}, record {len(offsets)} (wrong length "
            "checksum); is it a TFRecord file, and whole?"
        )
    return offsets


@numba.njit(cache=True, nogil=True)
def _walk(data, table):
    """(offsets, byte after the last record that is whole; beyond the data if one is cut off)."""
    offsets = np.empty(1 << 10, np.int64)
    position, count = np.int64(0), 0
    while position + 12 <= len(data):
        length, stored = np.uint64(0), np.uint64(0)
        for i in range(8):
            length |= np.uint64(data[position + i]) << np.uint64(8 * i)
        for i in range(4):
            stored |= np.uint64(data[position + 8 + i]) << np.uint64(8 * i)
        crc = np.uint32(_crc32c(data[position : position + 8], table))
        rotated = np.uint32(crc >> np.uint32(15)) | np.uint32(crc << np.uint32(17))
        if np.uint64(np.uint32(rotated + np.uint32(0xA282EAD8))) != stored:
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
    """Features of a serialized tf.train.Example: int64 or float32 [n] (byte lists are left out).

    As protocol buffers are read: unknown fields are skipped, the last entry of a name counts, and
    numbers may be packed or not.

    Raises:
      ValueError: the bytes are no such message.
    """
    features = {}
    for group in _messages(record, 1):
        for entry in _messages(group, 1):
            if any(field[:2] not in ((1, 2), (2, 2)) for field in _fields(entry)):
                raise ValueError(NO_EXAMPLE)  # readers differ in what they make of such an entry
            name = ["", *map(bytes.decode, _messages(entry, 1))][-1]
            features[name] = _numbers(_messages(entry, 2))
    return {name: values for name, values in features.items() if values is not None}


def _messages(data: bytes, number: int) -> list[bytes]:
    """The length-delimited fields of this number."""
    return [content for n, wire, content in _fields(data) if n == number and wire == 2]


def _numbers(parts: list[bytes]) -> np.ndarray | None:
    """The list of a tf.train.Feature, in parts that are read as one; None: of bytes or nothing.

    It is a union: of lists of different kinds the last one counts.
    """
    last, lists = 0, []
    for part in parts:
        for kind, wire, content in _fields(part):
            if wire == 2 and kind in _LISTS:
                values = _LISTS[kind](content)
                lists = [*lists, values] if kind == last else [values]
                last = kind
    return np.concatenate(lists) if last in (2, 3) else None


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


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(value below 2**64, position after it); ValueError where the bytes end first."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, position
    raise ValueError(NO_EXAMPLE)


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, content) of each field; the content of a varint is an int.

    Raises ValueError where `data` is no message. Groups, which nobody writes, are none here.
    """
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise ValueError(NO_EXAMPLE)
        if wire == 0:
            value, position = _read_varint(data, position)
            yield number, wire, value
            continue
        if wire == 2:
            length, position = _read_varint(data, position)
        else:
            length = {1: 8, 5: 4}.get(wire, len(data))
        if length > len(data) - position:
            raise ValueError(NO_EXAMPLE)
        yield number, wire, data[position : position + length]
        position += length


def _floats(values: bytes) -> np.ndarray:
    parts = []
    for number, wire, content in _fields(values):
        if number == 1 and wire in (2, 5):
            if len(content) % 4:
                raise ValueError(NO_EXAMPLE)
            parts.append(content)
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(values: bytes) -> np.ndarray:
    lists = [np.empty(0, np.int64)]
    for number, wire, content in _fields(values):
        if number == 1 and wire == 0:  # not packed: one varint a field
            lists.append(np.array([content], np.uint64).astype(np.int64))
        elif number == 1 and wire == 2:
            out = np.empty(len(content), np.int64)
            count = _unpack(np.frombuffer(content, np.uint8), out)
            if count < 0:
                raise ValueError(NO_EXAMPLE)
            lists.append(out[:count])
    return np.concatenate(lists)


@numba.njit(cache=True, nogil=True)
def varint_at(data, position, end):
    """(value, position after it); the position is -1 where the bytes end first."""
    value, shift = np.uint64(0), np.uint64(0)
    while position < end and shift < np.uint64(64):
        byte = data[position]
        position += 1
        value |= np.uint64(byte & 127) << shift
        if byte < 128:
            return np.int64(value), position
        shift += np.uint64(7)
    return np.int64(0), np.int64(-1)


@numba.njit(cache=True, nogil=True)
def _unpack(data, out):
    """Varints end to end -> out; their number, -1 where the bytes are anything else."""
    count, position = 0, np.int64(0)
    while position < len(data):
        value, position = varint_at(data, position, np.int64(len(data)))
        if position < 0:
            return -1
        out[count] = value
        count += 1
    return count


_LISTS = {1: lambda content: _messages(content, 1), 2: _floats, 3: _integers}


@numba.njit(cache=True, nogil=True)
def content_at(data, position, end, field):
    """(begin, end) of the length-delimited field that must come next; begin -1 if it does not."""
    tag, position = varint_at(data, position, end)
    if position < 0 or tag != (field << 3 | 2):
        return np.int64(-1), end
    length, position = varint_at(data, position, end)
    if position < 0 or length < 0 or length > end - position:
        return np.int64(-1), end
    return position, position + length
