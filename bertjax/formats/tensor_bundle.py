"""TensorFlow's checkpoints ("tensor bundles", tensorflow/core/util/tensor_bundle), without TensorFlow.

    PREFIX.index  PREFIX.data-00000-of-00001

The index is a table in LevelDB's format from variable name to a BundleEntryProto (type, shape,
shard, offset, size, checksum), the data files hold the arrays one after the other. Sizes and
checksums are verified, so that a partial download is an error and not wrong numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from bertjax.formats.arrays import TYPES, LoadError
from bertjax.formats.crc32c import masked_crc32c
from bertjax.formats.protobuf import declare

_TABLE_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5  # compression type, masked crc32c
_TYPES = {number: kind for _, _, number, kind in TYPES}
# tensorflow/core/protobuf/tensor_bundle.proto, core/framework/{tensor_shape,tensor_slice}.proto
_MESSAGES = declare(
    BundleHeader={1: "int64 num_shards", 2: "int64 endianness"},
    Dim={1: "int64 size"},
    TensorShape={2: "repeated Dim dim"},
    Extent={1: "int64 start", 2: "oneof int64 length"},  # without length: all
    TensorSlice={1: "repeated Extent extent"},
    BundleEntry={
        1: "int64 dtype",
        2: "TensorShape shape",
        3: "int64 shard_id",
        4: "int64 offset",
        5: "int64 size",
        6: "fixed32 crc32c",
        7: "repeated TensorSlice slices",
    },
)


class Entry(NamedTuple):
    """One variable of the index. One that was partitioned is stored as slices of itself."""

    dtype: np.dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[tuple[slice, ...], ...] = ()
    parts: tuple[Entry, ...] = ()  # one for each of `slices`


def read_index(path: str | Path) -> tuple[dict[str, Entry], int]:
    """(variable name -> Entry, number of data files) of a `.index` file.

    Raises:
      LoadError: not such a file, truncated, or a checksum differs.
    """
    try:
        entries: dict[str, Entry] = {}
        parts: dict[str, list[Entry]] = {}
        shards = 1
        for key, value in _table(Path(path).read_bytes()):
            if not key:
                header = _MESSAGES["BundleHeader"].FromString(value)
                shards = header.num_shards or 1
                if header.endianness:
                    raise LoadError("big-endian checkpoints are not supported")
            elif key.startswith(b"\0"):
                # Of a slice: 0, the name and its end (EncodeTensorNameSlice, OrderedCode), then the
                # extents, in whose order the keys are sorted.
                name = key[1:].split(b"\0\1")[0].decode()
                parts.setdefault(name, []).append(_entry(name, value))
            else:
                entries[key.decode()] = _entry(key.decode(), value)
        if not entries:
            raise LoadError("it names no variable")
        for name, entry in entries.items():
            if entry.slices:
                entries[name] = _with_parts(name, entry, parts.get(name, []))
    except (ValueError, IndexError, struct.error, DecodeError) as error:
        raise LoadError(f"{path} is not a readable checkpoint index: {error}") from error
    return entries, shards


def read_entry(name: str, entry: Entry, prefix: Path, shards: int) -> np.ndarray:
    """The array of a variable.

    Raises:
      LoadError: a data file is missing or truncated, or a checksum differs.
    """
    parts = [_stored(name, part, prefix, shards) for part in entry.parts or (entry,)]
    if not entry.slices:
        return parts[0].copy()
    whole = np.empty(entry.shape, entry.dtype)
    for where, part in zip(entry.slices, parts, strict=True):
        whole[where] = part
    return whole


def _stored(name: str, entry: Entry, prefix: Path, shards: int) -> np.ndarray:
    path = Path(f"{prefix}.data-{entry.shard:05d}-of-{shards:05d}")
    if not path.is_file():
        raise LoadError(f"{prefix}.index needs {path.name}, which is not beside it")
    data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    raw = data[entry.offset : entry.offset + entry.size]
    if entry.size != math.prod(entry.shape) * entry.dtype.itemsize or raw.size < entry.size:
        raise LoadError(
            f"{prefix}: {name} {entry.shape} needs {entry.size} bytes at {entry.offset}, the "
            "data file is too short: the download is incomplete"
        )
    if entry.checksum and masked_crc32c(raw) != entry.checksum:
        raise LoadError(f"{prefix}: {name} fails its checksum; the data file is damaged")
    return np.frombuffer(raw, entry.dtype).reshape(entry.shape)


def _entry(name: str, content: bytes) -> Entry:
    message = _MESSAGES["BundleEntry"].FromString(content)
    if message.dtype not in _TYPES:
        raise LoadError(f"variable {name} has TensorFlow type {message.dtype}, which is not supported")
    shape = tuple(dim.size for dim in message.shape.dim)
    if min(*shape, message.offset, message.size, message.shard_id, 0) < 0:
        raise LoadError(f"variable {name} has negative sizes")
    slices = [_slice(each, shape) for each in message.slices]
    return Entry(
        dtype=np.dtype(_TYPES[message.dtype]),
        shape=shape,
        shard=message.shard_id,
        offset=message.offset,
        size=message.size,
        checksum=message.crc32c,
        slices=tuple(sorted(slices, key=lambda one: [extent.start for extent in one])),
    )


def _slice(message: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(extent.start, extent.start + (extent.length if extent.HasField("length") else size - extent.start))
        for extent, size in zip(message.extent, shape, strict=True)
    )


def _with_parts(name: str, entry: Entry, parts: list[Entry]) -> Entry:
    shapes = [tuple(extent.stop - extent.start for extent in one) for one in entry.slices]
    if shapes != [part.shape for part in parts]:
        raise LoadError(f"variable {name} should be in slices {shapes}, there are {[part.shape for part in parts]}")
    if sum(map(math.prod, shapes)) != math.prod(entry.shape):
        raise LoadError(f"slices of variable {name} are missing")
    return entry._replace(parts=tuple(parts))


# ----------------------------------------------------------------------------------------- table


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of a table in LevelDB's format."""
    if len(data) < _FOOTER_BYTES:
        raise LoadError("too short")
    footer = data[-_FOOTER_BYTES:]
    if struct.unpack_from("<Q", footer, 40)[0] != _TABLE_MAGIC:
        raise LoadError("the last bytes are not those of a table")
    _, _, offset, size = _varints(footer, 0, 4)[0]  # of the metaindex block, and of the index block
    for _, handle in _records(_block(data, offset, size)):
        yield from _records(_block(data, *_varints(handle, 0, 2)[0]))


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _BLOCK_TRAILER_BYTES > len(data):
        raise LoadError("a block reaches beyond the end of the index")
    kind, checksum = struct.unpack_from("<BI", data, end)
    if masked_crc32c(data[offset : end + 1]) != checksum:
        raise LoadError("a block of the index fails its checksum")
    if kind == 0:
        return data[offset:end]
    if kind == 1:
        return _snappy(data[offset:end])
    raise LoadError(f"unknown compression {kind} in the index")


def _snappy(data: bytes) -> bytes:
    import pyarrow as pa  # late: few indices are compressed

    (size,), _ = _varints(data, 0, 1)
    if size > 64 * len(data):  # more than the format can
        raise LoadError("malformed snappy block")
    try:
        return pa.decompress(data, size, "snappy", asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise LoadError(f"malformed snappy block: {error}") from None


def _records(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) pairs; keys share prefixes with the one before."""
    restarts = struct.unpack_from("<I", block, len(block) - 4)[0]
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise LoadError("malformed block of the index")
    at, key = 0, b""
    while at < end:
        (shared, unshared, length), at = _varints(block, at, 3)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length


def _varints(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    """(so many varints from there on, the position after them)."""
    values = []
    for _ in range(count):
        value = shift = 0
        more = True
        while more:
            if at >= len(data) or shift > 56:  # none is negative
                raise LoadError("malformed varint")
            value |= (data[at] & 127) << shift
            more, shift, at = data[at] > 127, shift + 7, at + 1
        values.append(value)
    return values, at
