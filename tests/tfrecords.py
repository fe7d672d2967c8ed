"""Writes TFRecord files of tf.train.Example as TensorFlow does, and reads their records."""

import gzip
import struct

import numpy as np

from bertjax.formats.crc32c import masked_crc32c
from bertjax.formats.tfrecord import Example, record_offsets


def write_records(path, records, compressed=None):
    """GZIP if `compressed`, by default where the name ends in .gz."""
    compressed = str(path).endswith(".gz") if compressed is None else compressed
    with (gzip.open if compressed else open)(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(record + struct.pack("<I", masked_crc32c(record)))


def read_records(path):
    """The records of a file, of which the package gives the places."""
    with open(path, "rb") as file:
        content = file.read()
    content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    offsets = record_offsets(np.frombuffer(content, np.uint8), str(path)).tolist() if content else []
    return [content[at : at + struct.unpack("<Q", content[at - 12 : at - 4])[0]] for at in offsets]


def make_example(features):
    """A serialized tf.train.Example of integer and float lists."""
    example = Example()
    for name, values in features.items():
        values = np.asarray(values).ravel()
        feature = example.features.feature[name]
        numbers = feature.float_list if values.dtype.kind == "f" else feature.int64_list
        numbers.value.extend(values.tolist())
    return example.SerializeToString(deterministic=True)
