"""Rows of a data set that TensorFlow Datasets has prepared, without TensorFlow.

In: 'tfds:glue/mrpc', a split name of TFDS, and the directory of prepared data sets. Out: plain dicts of str, int and
float: TFDS gives bytes from real data and str from mocked data, and numpy scalars for numbers.
"""

import hashlib
import json
from typing import Any

import numpy as np


def read_tfds(source: str, split: str, data_dir: str | None) -> tuple[list[dict[str, Any]], str]:
    """All rows of `split` and a fingerprint of data set, version and split.

    Raises ValueError if the data set is not prepared in a format that needs no TensorFlow.
    """
    name = source.removeprefix("tfds:")
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text  # noqa: F401  registers glue, squad and others

    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        data = builder.as_data_source(split=split)
    except Exception as error:
        raise ValueError(
            f"{source}, split {split!r}: {error}\nPrepare it once with: tfds.builder({name!r}, "
            "file_format='array_record').download_and_prepare()"
        ) from error
    rows = [plain(row) for row in data]
    identity = json.dumps([builder.info.full_name, split, len(rows)])
    return rows, hashlib.sha256(identity.encode()).hexdigest()


def plain(value: Any) -> Any:
    """bytes -> str, numpy scalars -> Python numbers, arrays -> lists, at any depth."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
