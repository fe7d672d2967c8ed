"""Google's original checkpoints, read without TensorFlow.

    bert_config.json  vocab.txt  bert_model.ckpt.index  bert_model.ckpt.data-00000-of-00001

A TF1 checkpoint is a "tensor bundle" (tensorflow/core/util/tensor_bundle): the index is a table in
LevelDB's format from variable name to a BundleEntryProto (type, shape, shard, offset, size,
checksum), the data files hold the arrays one after the other. Sizes and checksums are verified, so
that a partial download is an error and not a model with wrong numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bertjax.interop.huggingface import config_of_file
from bertjax.interop.names import Header, LoadError
from bertjax.model.presets import BertConfig

_TABLE_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5  # compression type, masked crc32c
# tensorflow/core/framework/types.proto
_TYPES = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    4: np.uint8,
    5: np.int16,
    6: np.int8,
    9: np.int64,
    10: np.bool_,
    14: ml_dtypes.bfloat16,
    19: np.float16,
}

# What training left beside the weights (optimization.py of the original, and LAMB variants).
_NOT_WEIGHTS = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|[mv]|Adam(_1)?|"
    r"AdamWeightDecayOptimizer|global_step)(_\d+)?$|"
    r"^(global_step|beta[12]_power|loss_scale.*|good_steps)$"
)


class Entry(NamedTuple):
    """One variable of the index. One that was partitioned is stored as slices of itself."""

    dtype: np.dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int | None
    slices: tuple[tuple[slice, ...], ...] = ()
    parts: tuple[Entry, ...] = ()  # one for each of `slices`


# -------------------------------------------------------------------------- varints and messages


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, next position) of a base-128 varint."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise LoadError("malformed varint")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer: int, or bytes for nested messages."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 1:
            value, at = struct.unpack_from("<Q", message, at)[0], at + 8
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind == 5:
            value, at = struct.unpack_from("<I", message, at)[0], at + 4
        else:
            raise LoadError(f"unknown wire type {kind}")
        yield tag >> 3, value


def _shape(message: bytes) -> tuple[int, ...]:
    """TensorShapeProto: repeated Dim dim = 2, whose size = 1."""
    return tuple(dict(_fields(dim)).get(1, 0) for number, dim in _fields(message) if number == 2)


def _slice(message: bytes, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """TensorSliceProto: repeated Extent extent = 1 {start = 1, length = 2; all without length}."""
    extents = [dict(_fields(extent)) for number, extent in _fields(message) if number == 1]
    starts = [extent.get(1, 0) for extent in extents]
    return tuple(
        slice(start, start + extent.get(2, size - start))
        for start, extent, size in zip(starts, extents, shape, strict=True)
    )


def _entry(name: str, message: bytes) -> Entry:
    """BundleEntryProto: dtype 1, shape 2, shard_id 3, offset 4, size 5, crc32c 6, slices 7."""
    values = dict(_fields(message))
    number = values.get(1, 0)
    if number not in _TYPES:
        raise LoadError(f"variable {name} has TensorFlow type {number}, which is not supported")
    shape = _shape(values.get(2, b""))
    slices = [_slice(part, shape) for number, part in _fields(message) if number == 7]
    return Entry(
        np.dtype(_TYPES[number]),
        shape,
        values.get(3, 0),
        values.get(4, 0),
        values.get(5, 0),
        values.get(6),
        tuple(sorted(slices, key=lambda one: [extent.start for extent in one])),
    )


def _sliced_name(key: bytes) -> str:
    """Of the key of a slice: 0, the name and its end (EncodeTensorNameSlice, OrderedCode), then the
    extents, in whose order the keys are sorted."""
    return key[1:].split(b"\0\1")[0].decode()


def _with_parts(name: str, entry: Entry, parts: list[Entry]) -> Entry:
    shapes = [tuple(extent.stop - extent.start for extent in one) for one in entry.slices]
    if shapes != [part.shape for part in parts]:
        raise LoadError(f"variable {name} should be in slices {shapes}, there are {[part.shape for part in parts]}")
    if sum(map(math.prod, shapes)) != math.prod(entry.shape):
        raise LoadError(f"the slices of variable {name} are not the whole of it")
    return entry._replace(parts=tuple(parts))


# ----------------------------------------------------------------------------------------- table


def snappy_decompress(data: bytes) -> bytes:
    """Snappy's raw format: a length, then literals and copies from what is already out."""
    expected, at = _varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:
            length = (tag >> 2) + 1
            if length > 60:
                extra = length - 60
                length = int.from_bytes(data[at : at + extra], "little") + 1
                at += extra
            out += data[at : at + length]
            at += length
            continue
        if kind == 1:
            length, offset = ((tag >> 2) & 7) + 4, ((tag >> 5) << 8) | data[at]
            at += 1
        else:
            width = 2 if kind == 2 else 4
            length = (tag >> 2) + 1
            offset = int.from_bytes(data[at : at + width], "little")
            at += width
        if not 0 < offset <= len(out):
            raise LoadError("malformed snappy block")
        for _ in range(length):  # a copy may overlap its own output
            out.append(out[-offset])
    if len(out) != expected or at != len(data):
        raise LoadError("malformed snappy block")
    return bytes(out)


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _BLOCK_TRAILER_BYTES > len(data):
        raise LoadError("a block reaches beyond the end of the index")
    kind, checksum = struct.unpack_from("<BI", data, end)
    if _masked(crc32c(data[offset : end + 1])) != checksum:
        raise LoadError("a block of the index fails its checksum")
    block = data[offset:end]
    if kind == 0:
        return block
    if kind == 1:
        return snappy_decompress(block)
    raise LoadError(f"unknown compression {kind} in the index")


def _records(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) pairs; keys share prefixes with the one before."""
    restarts = struct.unpack_from("<I", block, len(block) - 4)[0]
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise LoadError("malformed block of the index")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length


def read_index(path: str | Path) -> tuple[dict[str, Entry], int]:
    """(variable name -> Entry, number of data files) of a `.index` file.

    Raises:
      LoadError: not such a file, truncated, or a checksum differs.
    """
    data = Path(path).read_bytes()
    try:
        if len(data) < _FOOTER_BYTES:
            raise LoadError("too short")
        footer = data[-_FOOTER_BYTES:]
        if struct.unpack_from("<Q", footer, 40)[0] != _TABLE_MAGIC:
            raise LoadError("the last bytes are not those of a table")
        _, at = _varint(footer, 0)  # metaindex block: offset, size
        _, at = _varint(footer, at)
        offset, at = _varint(footer, at)
        size, at = _varint(footer, at)
        entries: dict[str, Entry] = {}
        parts: dict[str, list[Entry]] = {}
        shards = 1
        for _, handle in _records(_block(data, offset, size)):
            block_offset, at = _varint(handle, 0)
            block_size, at = _varint(handle, at)
            for key, value in _records(_block(data, block_offset, block_size)):
                if key.startswith(b"\0"):
                    name = _sliced_name(key)
                    parts.setdefault(name, []).append(_entry(name, value))
                    continue
                if key:
                    entries[key.decode()] = _entry(key.decode(), value)
                    continue
                header = dict(_fields(value))  # BundleHeaderProto: num_shards 1, endianness 2
                shards = header.get(1, 1)
                if header.get(2, 0) != 0:
                    raise LoadError("big-endian checkpoints are not supported")
        if not entries:
            raise LoadError("it names no variable")
        for name, entry in entries.items():
            if entry.slices:
                entries[name] = _with_parts(name, entry, parts.get(name, []))
    except (LoadError, IndexError, struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise LoadError(f"{path} is not a readable checkpoint index: {error}") from error
    return entries, shards


# -------------------------------------------------------------------------------------- checksum


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


_CRC_TABLE = _crc_table()


def _crc_update(data: np.ndarray, table: np.ndarray) -> int:
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = table[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)


@functools.cache
def _compiled_crc_update() -> Callable[[np.ndarray, np.ndarray], int]:
    # Late: numba is slow to import, and few models come from TF1.
    import numba

    return numba.njit(nogil=True)(_crc_update)


def crc32c(data: bytes | np.ndarray) -> int:
    """Castagnoli's CRC (RFC 3720, appendix B.4)."""
    return int(_compiled_crc_update()(np.frombuffer(data, np.uint8), _CRC_TABLE))


def _masked(crc: int) -> int:
    """TensorFlow stores checksums rotated and shifted (lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# -------------------------------------------------------------------------------------- variables


def find_prefix(path: str | Path) -> Path | None:
    """The checkpoint prefix (.../bert_model.ckpt) that a path means, or None.

    A prefix itself, its .index file, or a directory with one checkpoint are accepted; of several
    in a directory, bert_model.ckpt and then the highest step is taken.
    """
    path = Path(path).absolute()  # the present directory, '.', has no name to add to
    if path.name.endswith(".index") and path.is_file():
        return path.with_name(path.name.removesuffix(".index"))
    if path.with_name(path.name + ".index").is_file():
        return path
    if not path.is_dir():
        return None
    found = [p.with_name(p.name.removesuffix(".index")) for p in path.glob("*.index")]
    if not found:
        return None

    def rank(prefix: Path) -> tuple[bool, int]:
        step = re.search(r"-(\d+)$", prefix.name)
        return prefix.name == "bert_model.ckpt", int(step.group(1)) if step else -1

    return max(found, key=rank)


def _weights(prefix: Path) -> tuple[dict[str, list[Entry]], int]:
    """(variable name -> its entries, number of data files), without what training left beside them.

    A variable below another ('VARIABLE/Adam') is a slot of an optimizer, and no weight is a scalar.
    Parts that were saved as variables of their own ('VARIABLE/part_0') are one variable.
    """
    entries, shards = read_index(f"{prefix}.index")
    weights: dict[str, list[Entry]] = {}
    for name, entry in entries.items():
        above = name
        while (above := above.rpartition("/")[0]) and above not in entries:
            pass
        if not above and entry.shape and not _NOT_WEIGHTS.match(name):
            weights[name] = [entry]
    for name in [name for name in weights if name.endswith("/part_0")]:
        whole = name.removesuffix("/part_0")
        numbered = [f"{whole}/part_{i}" for i in range(len(weights))]
        there = list(itertools.takewhile(weights.__contains__, numbered))
        weights[whole] = [weights.pop(part)[0] for part in there]
    return weights, shards


def read_headers(prefix: str | Path) -> dict[str, Header]:
    """Variable name -> type and shape of what `read_variables` gives. Raises LoadError as it."""
    weights, _ = _weights(Path(prefix))
    return {
        name: Header((sum(entry.shape[0] for entry in entries), *entries[0].shape[1:]), entries[0].dtype)
        for name, entries in weights.items()
    }


def read_variables(prefix: str | Path) -> dict[str, np.ndarray]:
    """Variable name -> array; optimizer slots and step counters are left out by rule.

    Raises:
      LoadError: files missing or truncated, or a checksum differs.
    """
    prefix = Path(prefix)
    weights, shards = _weights(prefix)
    files: dict[int, np.ndarray] = {}

    def stored(name: str, entry: Entry) -> np.ndarray:
        if entry.slices:
            whole = np.empty(entry.shape, entry.dtype)
            for where, part in zip(entry.slices, entry.parts, strict=True):
                whole[where] = stored(name, part)
            return whole
        if entry.shard not in files:
            path = Path(f"{prefix}.data-{entry.shard:05d}-of-{shards:05d}")
            if not path.is_file():
                raise LoadError(f"{prefix}.index needs {path.name}, which is not beside it")
            files[entry.shard] = _mapped(path)
        raw = files[entry.shard][entry.offset : entry.offset + entry.size]
        if entry.size != math.prod(entry.shape) * entry.dtype.itemsize or raw.size < entry.size:
            raise LoadError(
                f"{prefix}: {name} {entry.shape} needs {entry.size} bytes at {entry.offset}, the "
                "data file is too short: the download is incomplete"
            )
        if entry.checksum is not None and _masked(crc32c(raw)) != entry.checksum:
            raise LoadError(f"{prefix}: {name} fails its checksum; the data file is damaged")
        return np.frombuffer(raw.tobytes(), entry.dtype).reshape(entry.shape)

    variables = {}
    for name, entries in weights.items():
        try:
            arrays = [stored(name, entry) for entry in entries]
            variables[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        except (ValueError, TypeError, OverflowError) as error:
            raise LoadError(f"{prefix}: {name}: {error}" if name not in str(error) else str(error)) from error
    return variables


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)


def read_config(prefix: str | Path) -> tuple[BertConfig, dict[str, Any]]:
    """(BertConfig, contents) of the bert_config.json beside a checkpoint.

    "gelu" there means the exact form: the released weights were trained before the original code
    moved to the tanh approximation, and transformers reads them so too.

    Raises:
      LoadError: the file is missing or wrong.
    """
    path = Path(prefix).parent / "bert_config.json"
    if not path.is_file():
        raise LoadError(f"{path} is missing: Google's checkpoints come with it")
    return config_of_file(path)
