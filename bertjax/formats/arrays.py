"""Arrays in files: the error of a file that cannot be read, their types, and safetensors."""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors.numpy


class LoadError(ValueError):
    """A checkpoint does not hold what the model needs, or cannot be read; the message lists it."""


class Header(NamedTuple):
    """What a file says of an array before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype


# What safetensors and torch's storages call a type, and its number in TensorFlow (core/framework/types.proto).
TYPES = (
    ("F64", "DoubleStorage", 2, np.float64),
    ("F32", "FloatStorage", 1, np.float32),
    ("F16", "HalfStorage", 19, np.float16),
    ("BF16", "BFloat16Storage", 14, ml_dtypes.bfloat16),
    ("I64", "LongStorage", 9, np.int64),
    ("I32", "IntStorage", 3, np.int32),
    ("I16", "ShortStorage", 5, np.int16),
    ("I8", "CharStorage", 6, np.int8),
    ("U8", "ByteStorage", 4, np.uint8),
    ("BOOL", "BoolStorage", 10, np.bool_),
)
_SAFETENSORS_TYPES = {name: kind for name, _, _, kind in TYPES}


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Name -> array of one file, bfloat16 included (as ml_dtypes.bfloat16).

    Raises:
      LoadError: truncated or malformed.
    """
    headers = safetensors_headers(path)  # checks header and size
    content = np.fromfile(path, np.uint8)  # safe_open would copy its tensors one by one
    start = 8 + int(content[:8].view("<u8")[0])
    entries = json.loads(content[8:start].tobytes())
    arrays = {}
    for name, (shape, dtype) in headers.items():
        first, last = entries[name]["data_offsets"]
        arrays[name] = content[start + first : start + last].view(dtype).reshape(shape)
    return arrays


def write_safetensors(path: str | Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes arrays by name. Raises OSError naming the file, as for other files."""
    try:
        safetensors.numpy.save_file(arrays, path, metadata)
    except safetensors.SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def safetensors_headers(path: str | Path) -> dict[str, Header]:
    """Name -> type and shape; LoadError as of `read_safetensors`."""
    headers = {}
    try:
        with safetensors.safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  it is not a dictionary
                part = file.get_slice(name)
                dtype = _SAFETENSORS_TYPES.get(part.get_dtype())
                if dtype is None:
                    raise LoadError(f"{path}: {name} has type {part.get_dtype()}, which is not supported")
                headers[name] = Header(tuple(part.get_shape()), np.dtype(dtype))
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(
            f"{path} is not a readable safetensors file: it was damaged or copied in part; copy it again ({error})"
        ) from error
    return headers
