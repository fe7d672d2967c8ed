"""Reads `pytorch_model.bin` without torch and without running what a pickle may ask to run.

A pickle is a program: unpickling one calls any function that it names. This reader gives the
unpickler a closed list of names (dictionaries, tensors, storages) and refuses every other, so that
a file can hold numbers and nothing else. Both formats of torch.save are read: the zip archive
(torch >= 1.6) and the older sequence of pickles followed by raw storages.
"""

import collections
import io
import math
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bertjax.formats.arrays import TYPES, Header, LoadError

_STORAGE_TYPES = {storage: kind for _, storage, _, kind in TYPES}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


# Tuples, so that a pickle cannot change them (BUILD sets attributes of what has some).
class _StorageType(NamedTuple):
    """Stands for torch.FloatStorage and its kind."""

    dtype: np.dtype


class _Storage(NamedTuple):
    """A flat array, whose bytes are read after the pickle."""

    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    """A strided view of a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_pickle(path: str | Path) -> dict[str, np.ndarray]:
    """State dict name -> read-only array (bfloat16 as ml_dtypes.bfloat16).

    Raises:
      LoadError: truncated file, foreign content, or a pickle that asks for anything but tensors.
    """
    tensors, storages = _read(path, fill=True)
    arrays = {}
    for name, tensor in tensors.items():
        data, item = storages.get(tensor.storage.key), tensor.storage.dtype.itemsize
        if data is None:
            raise LoadError(f"{path}: a tensor of shape {tensor.shape} has no storage in the file")
        offset = tensor.offset * item if math.prod(tensor.shape) else 0
        strides = tuple(stride * item for stride in tensor.strides)
        arrays[name] = np.ndarray(tensor.shape, data.dtype, data, offset, strides)
        arrays[name].flags.writeable = False
    return arrays


def torch_headers(path: str | Path) -> dict[str, Header]:
    """State dict name -> type and shape; the numbers are not read. Raises LoadError as above."""
    tensors, _ = _read(path, fill=False)
    return {name: Header(tensor.shape, tensor.storage.dtype) for name, tensor in tensors.items()}


def _read(path: str | Path, fill: bool) -> tuple[dict[str, _Tensor], dict[str, np.ndarray]]:
    """(tensors by name, data of the storages by key if `fill`)."""
    path = Path(path)
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path, fill)
        with path.open("rb") as stream:
            if stream.read(4) == b"PK\x03\x04":
                raise LoadError("the archive has no end: it was damaged or copied in part; copy it again")
            stream.seek(0)
            return _read_legacy(stream, fill)
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    # The unpickler and the archive raise nearly anything about damaged files.
    except Exception as error:
        raise LoadError(f"{path} is not a readable torch file: {error!r:.300}") from error


def _read_zip(path: Path, fill: bool) -> tuple[dict[str, _Tensor], dict[str, np.ndarray]]:
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise LoadError(
                "its entries are larger than the file. torch.save does not "
                "compress; unpack it, and pack it again with `zip -0`"
            )
        entries = archive.namelist()
        pickles = [name for name in entries if name.split("/")[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise LoadError(f"expected one data.pkl in the archive, found {len(pickles)}")
        root = pickles[0][: -len("data.pkl")]
        order = "<"
        if root + "byteorder" in entries:
            order = {b"little": "<", b"big": ">"}[archive.read(root + "byteorder").strip()]
        unpickler = _Unpickler(io.BytesIO(archive.read(pickles[0])))
        tensors = _state_dict(unpickler.load())
        read = unpickler.storages.values() if fill else ()
        return tensors, {each.key: _data(each, archive.read(f"{root}data/{each.key}"), order) for each in read}


def _read_legacy(stream: BinaryIO, fill: bool) -> tuple[dict[str, _Tensor], dict[str, np.ndarray]]:
    if _Unpickler(stream).load() != _LEGACY_MAGIC:
        raise LoadError("it is not a file of torch.save")
    if _Unpickler(stream).load() != _LEGACY_PROTOCOL:
        raise LoadError("unknown protocol of torch.save")
    system = _Unpickler(stream).load()
    order = "<" if system.get("little_endian", True) else ">"
    unpickler = _Unpickler(stream)
    tensors, storages = _state_dict(unpickler.load()), {}
    keys = _Unpickler(stream).load()
    for key in keys if fill else ():
        storage = unpickler.storages[key]
        count = int(np.frombuffer(_exactly(stream, 8), order + "i8")[0])
        if count != storage.size:
            raise LoadError(f"storage {key} has {count} elements, not {storage.size}")
        storages[key] = _data(storage, _exactly(stream, count * storage.dtype.itemsize), order)
    return tensors, storages


class _Unpickler(pickle.Unpickler):
    """Knows the names that a state dict consists of, and no other."""

    def __init__(self, stream: BinaryIO) -> None:
        _check_sizes(stream)
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _STORAGE_TYPES:
            return _StorageType(np.dtype(_STORAGE_TYPES[name]))
        if (module, name) == ("torch", "Size"):
            return tuple
        raise LoadError(
            f"the pickle asks for {module}.{name}, which a file of weights has no "
            "need of; it was not run. Convert the file to safetensors where you trust it"
        )

    def persistent_load(self, reference: Any) -> _Storage:
        if not isinstance(reference, tuple) or reference[0] != "storage":
            raise LoadError(f"unknown reference {reference!r}")
        _, storage_type, key, _device, size = reference[:5]
        if len(reference) > 5 and reference[5] is not None:
            raise LoadError("views of storages (torch < 0.4) are not supported")
        return self.storages.setdefault(key, _Storage(key, storage_type.dtype, int(size)))


def _check_sizes(stream: BinaryIO) -> None:
    """Raises LoadError for a pickle that asks for more memory than its bytes hold: the unpickler
    makes room for what a number says before it looks whether that is there."""
    start = stream.tell()
    for number, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > number:
            raise LoadError(f"the pickle puts an object at place {argument} of its memory")
    stream.seek(start)


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple, strides: tuple, *_ignored: Any) -> _Tensor:
    """Refuses a tensor that reaches beyond its storage, or has more elements than it (an expanded
    tensor), which would let a small file ask for any amount of memory."""
    shape, strides = tuple(shape), tuple(strides)
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
        raise LoadError("a tensor with a negative offset or stride")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n)
    if 0 not in shape and last >= storage.size:
        raise LoadError(f"a tensor of shape {shape} reaches beyond its storage")
    if math.prod(shape) > storage.size:
        raise LoadError(f"a tensor of shape {shape} repeats its {storage.size} elements; save it with .contiguous()")
    return _Tensor(storage, offset, shape, strides)


def _state_dict(value: Any) -> dict[str, _Tensor]:
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict):
        raise LoadError(f"it holds a {type(value).__name__}, not a dictionary of tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, _Tensor):
            remedy = (
                ". It is the state of a training program; save the weights alone, in torch: "
                f"torch.save(torch.load(FILE)[{name!r}], 'pytorch_model.bin')"
            )
            raise LoadError(f"entry {name!r} is not a tensor" + (remedy if isinstance(tensor, dict) else ""))
    return {str(name): tensor for name, tensor in value.items()}


def _exactly(stream: BinaryIO, count: int) -> bytes:
    left = os.fstat(stream.fileno()).st_size - stream.tell()
    data = stream.read(count) if 0 <= count <= left else b""
    if len(data) != count:
        raise LoadError(f"it is truncated: {count} bytes expected, {left} found")
    return data


def _data(storage: _Storage, raw: bytes, order: str) -> np.ndarray:
    if len(raw) < storage.size * storage.dtype.itemsize:
        raise LoadError(f"a storage of {len(raw)} bytes is too short")
    data = np.frombuffer(raw, storage.dtype, count=storage.size)
    return data.byteswap() if order == ">" else data
