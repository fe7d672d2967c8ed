"""TFRecord files and tf.train.Example, read without TensorFlow.

In: bytes. Out: where the records are, their features. A record is framed by its length and two masked
CRC-32C checksums (tensorflow/core/lib/io/record_writer.h) and holds a protocol-buffer map from
names to lists of numbers (tensorflow/core/example/feature.proto).
"""

import numpy as np
from google.protobuf.message import DecodeError

from bertjax.formats.compiled import compiled
from bertjax.formats.crc32c import masked_crc32c_of_array
from bertjax.formats.protobuf import declare


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

NO_EXAMPLE = "it is not a tf.train.Example"

# tensorflow/core/example/{example,feature}.proto
Example = declare(
    BytesList={1: "repeated bytes value"},
    FloatList={1: "repeated float value"},
    Int64List={1: "repeated int64 value"},
    Feature={1: "oneof BytesList bytes_list", 2: "oneof FloatList float_list", 3: "oneof Int64List int64_list"},
    Features={1: "map Feature feature"},
    Example={1: "Features features"},
)["Example"]


def parse_example(record: bytes) -> dict[str, np.ndarray]:
    """Features of a serialized tf.train.Example: int64 or float32 [n] (byte lists are left out).

    Raises:
      ValueError: the bytes are no such message.
    """
    try:
        features = Example.FromString(record).features.feature
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
