"""Writes checkpoints as TensorFlow's BundleWriter does (tensor_bundle.cc), for tests of reading."""

import struct

import numpy as np
import pyarrow as pa

from bertjax.formats.crc32c import masked_crc32c

_TYPES = {"float32": 1, "int32": 3, "int64": 9}


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def _number(field, value):
    return varint(field << 3) + varint(value) if value else b""


def _bytes(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def _signed(value):
    """OrderedCode::WriteSignedNumIncreasing of a small number."""
    if value < 64:
        return bytes([0x80 ^ value])
    length = value.bit_length() // 7 + 1
    head = ((1 << length) - 1) << (8 - length)  # as many ones as bytes
    raw = bytearray(value.to_bytes(length, "big"))
    raw[0] ^= head
    return bytes(raw)


def _entry(dtype, shape, offset=0, size=0, crc=None, slices=()):
    dims = b"".join(_bytes(2, _number(1, n)) for n in shape)
    message = _number(1, _TYPES[str(np.dtype(dtype))]) + _bytes(2, dims)
    message += _number(4, offset) + _number(5, size)
    message += b"" if crc is None else varint(6 << 3 | 5) + struct.pack("<I", crc)
    for extents in slices:
        message += _bytes(7, b"".join(_bytes(1, _number(1, start) + _number(2, length)) for start, length in extents))
    return message


def table(records, compress=False):
    """The bytes of an index with these (key, value) records, in one block."""

    def block(pairs):
        body = b"".join(b"\0" + varint(len(k)) + varint(len(v)) + k + v for k, v in pairs)
        body += struct.pack("<II", 0, 1)
        body = pa.compress(body, "snappy", asbytes=True) + b"\1" if compress else body + b"\0"
        return body + struct.pack("<I", masked_crc32c(body))

    out, handles = b"", []
    records = sorted(records)
    for pairs in (records, [], [(records[-1][0] + b"\0", None)]):
        if pairs and pairs[0][1] is None:
            pairs = [(pairs[0][0], handles[0])]
        data = block(pairs)
        handles.append(varint(len(out)) + varint(len(data) - 5))
        out += data
    footer = handles[1] + handles[2]
    return out + footer + bytes(40 - len(footer)) + struct.pack("<Q", 0xDB4775248B80FB57)


def write(prefix, variables, partitioned=None, compress=False):
    """A checkpoint of arrays; `partitioned` has, by name, the rows of each slice."""
    records, data = [(b"", _number(1, 1) + _bytes(3, _number(1, 1)))], b""

    def stored(array):
        nonlocal data
        raw = np.ascontiguousarray(array).tobytes()
        data += raw
        return _entry(array.dtype, array.shape, len(data) - len(raw), len(raw), masked_crc32c(raw))

    for name, array in variables.items():
        if name not in (partitioned or {}):
            records.append((name.encode(), stored(array)))
            continue
        slices, start = [], 0
        for rows in partitioned[name]:
            extents = [(start, rows)] + [(0, n) for n in array.shape[1:]]
            # A dimension that is whole has no length in the message, and -1 in the key.
            key = (
                b"\0"
                + name.encode()
                + b"\0\1"
                + bytes([1, array.ndim])
                + _signed(start)
                + (_signed(rows))
                + (_signed(0) + b"\x7f") * (array.ndim - 1)
            )
            records.append((key, stored(array[start : start + rows])))
            slices.append([extents[0], *[(0, 0)] * (array.ndim - 1)])
            start += rows
        records.append((name.encode(), _entry(array.dtype, array.shape, slices=slices)))
    with open(f"{prefix}.index", "wb") as file:
        file.write(table(records, compress))
    with open(f"{prefix}.data-00000-of-00001", "wb") as file:
        file.write(data)
