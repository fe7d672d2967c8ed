"""Reads `pytorch_model.bin` without torch and without running what a pickle may ask to run.

A pickle is a program: unpickling one calls any function that it names. This reader gives the
unpickler a closed list of names (dictionaries, tensors, storages) and refuses every other, so that
a file can hold numbers and nothing else. Both formats of torch.save are read: the zip archive
(torch >= 1.6) and the older sequence of pickles followed by raw storages.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from bertjax.interop.names import Header, LoadError

_STORAGE_TYPES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


class _StorageType:
    """Stands for torch.FloatStorage and its kind; never called."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


class _Storage:
    """A flat array that is filled after the pickle has been read."""

    def __init__(self, dtype: np.dtype, size: int) -> None:
        self.dtype = dtype
        self.size = size
        self.data: np.ndarray | None = None


class _Tensor:
    """A strided view of a storage, resolved once the storage is filled.

    Raises:
      LoadError: it reaches beyond its storage, or has more elements than it (an expanded tensor),
        which would let a small file ask for any amount of memory.
    """

    def __init__(self, storage: _Storage, offset: int, shape: tuple, strides: tuple) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = tuple(shape), tuple(strides)
        if not all(type(n) is int and n >= 0 for n in (offset, *self.shape, *self.strides)):
            raise LoadError("a tensor with a negative offset or stride")
        last = offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)
        if 0 not in self.shape and last >= storage.size:
            raise LoadError(f"a tensor of shape {self.shape} reaches beyond its storage")
        if math.prod(self.shape) > storage.size:
            raise LoadError(
                f"a tensor of shape {self.shape} repeats the {storage.size} elements "
                "of its storage; save it with .contiguous()"
            )

    def resolve(self) -> np.ndarray:
        if self.storage.data is None:
            raise LoadError(f"a tensor of shape {self.shape} has no storage in the file")
        item = self.storage.dtype.itemsize
        return np.lib.stride_tricks.as_strided(
            self.storage.data[self.offset :], self.shape, tuple(s * item for s in self.strides), writeable=False
        )


def _check_sizes(stream: BinaryIO) -> None:
    """Raises ValueError for a pickle that asks for more memory than its bytes hold: the unpickler
    makes room for what a number says before it looks whether that is there."""
    start = stream.tell()
    for number, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > number:
            raise LoadError(f"the pickle puts an object at place {argument} of its memory")
    stream.seek(start)


def _rebuild_tensor(storage, offset, shape, strides, *_ignored) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


def _rebuild_parameter(tensor, *_ignored) -> _Tensor:
    return tensor


class _Unpickler(pickle.Unpickler):
    """Knows the names that a state dict consists of, and no other."""

    def __init__(self, stream: BinaryIO, source: str) -> None:
        _check_sizes(stream)
        super().__init__(stream, encoding="utf-8")
        self.source = source
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _STORAGE_TYPES:
            return _StorageType(_STORAGE_TYPES[name])
        if (module, name) == ("torch", "Size"):
            return tuple
        raise LoadError(
            f"{self.source}: the pickle asks for {module}.{name}, which a file of weights has no "
            "need of; it was not run. Convert the file to safetensors where you trust it"
        )

    def persistent_load(self, reference: Any) -> _Storage:
        if not isinstance(reference, tuple) or reference[0] != "storage":
            raise LoadError(f"{self.source}: unknown reference {reference!r}")
        _, storage_type, key, _device, size = reference[:5]
        if len(reference) > 5 and reference[5] is not None:
            raise LoadError(f"{self.source}: views of storages (torch < 0.4) are not supported")
        if key not in self.storages:
            self.storages[key] = _Storage(storage_type.dtype, int(size))
        return self.storages[key]


def _state_dict(value: Any, source: str) -> dict[str, _Tensor]:
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict):
        raise LoadError(f"{source} holds a {type(value).__name__}, not a dictionary of tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, _Tensor):
            remedy = (
                ". It is the state of a training program; save the weights alone, in torch: "
                f"torch.save(torch.load(FILE)[{name!r}], 'pytorch_model.bin')"
            )
            raise LoadError(f"{source}: entry {name!r} is not a tensor" + (remedy if isinstance(tensor, dict) else ""))
    return {str(name): tensor for name, tensor in value.items()}


def read_torch_pickle(path: str | Path) -> dict[str, np.ndarray]:
    """State dict name -> read-only array (bfloat16 as ml_dtypes.bfloat16).

    Raises:
      LoadError: truncated file, foreign content, or a pickle that asks for anything but tensors.
    """
    return {name: tensor.resolve() for name, tensor in _tensors(path, fill=True).items()}


def torch_headers(path: str | Path) -> dict[str, Header]:
    """State dict name -> type and shape; the numbers are not read. Raises LoadError as above."""
    return {name: Header(tensor.shape, tensor.storage.dtype) for name, tensor in _tensors(path, fill=False).items()}


def _tensors(path: str | Path, fill: bool) -> dict[str, _Tensor]:
    path = Path(path)
    source = str(path)
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path, source, fill)
        with path.open("rb") as stream:
            return _read_legacy(stream, source, fill)
    except LoadError as error:
        raise LoadError(str(error) if source in str(error) else f"{source}: {error}") from error
    # The unpickler and the archive raise nearly anything about damaged files.
    except Exception as error:
        raise LoadError(f"{source} is not a readable torch file: {error!r:.300}") from error


def _read_zip(path: Path, source: str, fill: bool) -> dict[str, _Tensor]:
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise LoadError(
                f"{source}: its entries are larger than the file. torch.save does not "
                "compress; unpack it, and pack it again with `zip -0`"
            )
        entries = archive.namelist()
        pickles = [name for name in entries if name.split("/")[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise LoadError(f"{source}: expected one data.pkl in the archive, found {len(pickles)}")
        root = pickles[0][: -len("data.pkl")]
        order = "<"
        if root + "byteorder" in entries:
            order = {b"little": "<", b"big": ">"}[archive.read(root + "byteorder").strip()]
        unpickler = _Unpickler(io.BytesIO(archive.read(pickles[0])), source)
        tensors = _state_dict(unpickler.load(), source)
        for key, storage in unpickler.storages.items() if fill else ():
            raw = archive.read(f"{root}data/{key}")
            _fill(storage, raw, order, source)
    return tensors


def _read_legacy(stream: BinaryIO, source: str, fill: bool) -> dict[str, _Tensor]:
    if _Unpickler(stream, source).load() != _LEGACY_MAGIC:
        raise LoadError(f"{source} is not a file of torch.save")
    if _Unpickler(stream, source).load() != _LEGACY_PROTOCOL:
        raise LoadError(f"{source}: unknown protocol of torch.save")
    system = _Unpickler(stream, source).load()
    order = "<" if system.get("little_endian", True) else ">"
    unpickler = _Unpickler(stream, source)
    tensors = _state_dict(unpickler.load(), source)
    keys = _Unpickler(stream, source).load()
    for key in keys if fill else ():
        storage = unpickler.storages[key]
        count = int(np.frombuffer(_exactly(stream, 8, source), order + "i8")[0])
        if count != storage.size:
            raise LoadError(f"{source}: storage {key} has {count} elements, not {storage.size}")
        raw = _exactly(stream, count * storage.dtype.itemsize, source)
        _fill(storage, raw, order, source)
    return tensors


def _exactly(stream: BinaryIO, count: int, source: str) -> bytes:
    left = os.fstat(stream.fileno()).st_size - stream.tell()
    data = stream.read(count) if 0 <= count <= left else b""
    if len(data) != count:
        raise LoadError(f"{source} is truncated: {count} bytes expected, {left} found")
    return data


def _fill(storage: _Storage, raw: bytes, order: str, source: str) -> None:
    if len(raw) < storage.size * storage.dtype.itemsize:
        raise LoadError(f"{source}: a storage of {len(raw)} bytes is too short")
    data = np.frombuffer(raw, storage.dtype, count=storage.size)
    storage.data = data.byteswap() if order == ">" else data
