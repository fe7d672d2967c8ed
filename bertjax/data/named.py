"""Data sets by name: hf:NAME through the library `datasets`, tfds:NAME as TensorFlow Datasets has prepared it.

    hf:NAME[@REVISION][,CONFIG][:SPLIT]     at the Hugging Face Hub, or a folder here
    tfds:NAME[/CONFIG][:VERSION][:SPLIT]    read without TensorFlow

In: such a name. Out: for a corpus its `Pieces`, which processes read apart and nothing downloads as a whole; for a task
all rows of a split, with the names of classes in place of their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.objects import class_names, named
from bertjax.formats.hub import network_errors, reachable

# Data sets of fewer files are cut further, where their format allows that: Parquet at its row groups.
_FEW_FILES = 64
# A task's split -> what data sets call it, the first that is there.
_SPLITS = {"train": "train", "dev": "validation dev val valid validation_matched", "test": "test test_matched"}
_HF = re.compile(r"hf:(?P<name>[^@,:]+)(@(?P<revision>[^,:]+))?(,(?P<config>[^,:]+))?(:(?P<split>.+))?")


def is_name(path: Any) -> bool:
    return str(path).startswith(("hf:", "tfds:"))


class Pieces(NamedTuple):
    """A data set in parts that are read apart, in order."""

    count: int
    size: int  # bytes, about
    stamp: str  # of its content, as far as it can be told without reading it
    rows: Callable[[int, int], Iterator[tuple[str, Mapping[str, Any]]]]  # (where, row) of the parts [start, end)


def open_pieces(path: str, field: str) -> Pieces:
    """The pieces of a data set, and the size of a TFDS record by the text in `field`.

    Raises ValueError that says what there is instead.
    """
    if path.startswith("tfds:"):
        return _tfds_pieces(path, field)
    # What the Hub has under a commit does not change.
    return (_hub_pieces if re.search(r"@[0-9a-f]{40}\b", path) else _hf_pieces)(path)


# --- hf:


class HfName(NamedTuple):
    """The parts of hf:NAME@REVISION,CONFIG:SPLIT; '' is the default of each."""

    name: str
    revision: str
    config: str
    split: str

    @staticmethod
    def parse(path: str) -> HfName:
        found = _HF.fullmatch(path)
        if found is None:
            raise ValueError(f"{path}: a data set is named hf:NAME, hf:NAME,CONFIG or hf:NAME@REVISION,CONFIG:SPLIT")
        name = os.path.expanduser(found["name"])
        if found["revision"] and os.path.isdir(name):
            raise ValueError(f"{path}: a folder has no revisions; leave @{found['revision']} out")
        return HfName(name, *(found[part] or "" for part in ("revision", "config", "split")))

    def __str__(self) -> str:
        marks = (("@", self.revision), (",", self.config), (":", self.split))
        return f"hf:{self.name}" + "".join(mark + part for mark, part in marks if part)


@functools.lru_cache(1)
def _prepared(name: HfName) -> Any:
    """The builder of a data set, named without a split, that is in the cache of `datasets` as a whole."""
    builder = _builder(name, streamed=False)
    with _explained(name):
        builder.download_and_prepare()
    return builder


def pinned(path: str) -> str:
    """The same data set at the commit that its revision now stands for, so that all processes read the same."""
    name = HfName.parse(path)
    if os.path.isdir(name.name) or re.fullmatch(r"[0-9a-f]{40}", name.revision):
        return path
    files = next(iter(_builder(name).config.data_files.values()))
    return str(name._replace(revision=files.origin_metadata[0][1]))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf:NAME needs the package datasets: pip install 'bertjax[datasets]'") from error
    return datasets


def _builder(name: HfName, streamed: bool = True) -> Any:
    """The `datasets.DatasetBuilder`; ValueError that says what there is instead. Not `streamed`, the cache will do."""
    library = _library()
    load = functools.partial(library.load_dataset_builder, revision=name.revision or None)
    with _explained(name):
        if os.path.isdir(name.name) or reachable():
            return load(name.name, name.config or None)
        gone = f"{library.config.HF_ENDPOINT} cannot be reached"
        if streamed:
            raise FileNotFoundError(f"{gone}, from where a corpus is read: build its store elsewhere, and copy that")
        before, library.config.HF_HUB_OFFLINE = library.config.HF_HUB_OFFLINE, True  # to its cache at once
        try:
            return load(name.name, name.config or None)
        except network_errors():
            cache = library.config.HF_DATASETS_CACHE
            remedy = "copy the directory of HF_HOME from a machine that has fetched it"
            raise FileNotFoundError(f"{gone}, and the cache {cache} does not hold it: {remedy}") from None
        finally:
            library.config.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _explained(name: HfName) -> Iterator[None]:
    """Turns what the library raises for a name into a ValueError of one line."""
    library = _library()
    try:
        yield
    except network_errors() as error:  # those of files too
        where = "" if os.path.isdir(name.name) else f" ({name.name} is not a folder here)"
        raise ValueError(f"{name}: {_line(error)}{where}") from error
    except (ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        if str(error).startswith("Dataset scripts") and not os.path.isdir(name.name):
            parquet = name._replace(revision="refs/convert/parquet")
            raise ValueError(f"{name}: {_line(error)}; what the Hub made of it may be there as {parquet}") from None
        if not str(error).startswith(("BuilderConfig", "Config name")):
            raise ValueError(f"{name}: {_line(error)}") from error
        with _explained(name._replace(config="")):
            known = library.get_dataset_config_names(name.name, revision=name.revision or None)
        wrong = f"there is no configuration {name.config!r}" if name.config else "which configuration is meant?"
        raise ValueError(f"{name}: {wrong} hf:{name.name},CONFIG has {', '.join(known)}") from None


def _line(error: BaseException) -> str:
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


def _hf_pieces(path: str) -> Pieces:
    name = HfName.parse(path)
    split = name.split or "train"
    builder = _builder(name)
    with _explained(name):
        streams = builder.as_streaming_dataset()
    if split not in streams:
        raise ValueError(f"{name}: there is no split {split!r}; it has {', '.join(map(str, streams))}")
    with _explained(name):
        stream = streams[split]
        parts, count = [stream], stream.num_shards
        if count < _FEW_FILES:  # apart, since finding a shard takes the time of looking at all
            parts = [stream.shard(num_shards=count, index=number).reshard() for number in range(count)]
        ends = np.cumsum([part.num_shards for part in parts])
        files = builder.config.data_files[split]
        sizes = [_size(file) for file in files]
    # The library keeps the times and commits also of the files beside them that it does not read.
    facts = [*itertools.zip_longest(files, sizes, files.origin_metadata)]
    stamp = hashlib.sha256(repr(facts).encode()).hexdigest()

    def rows(start: int, end: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for place in range(start, end):
            which = int(np.searchsorted(ends, place, "right"))
            part, count = parts[which], parts[which].num_shards
            try:
                for number, row in enumerate(part.shard(num_shards=count, index=place - (int(ends[which]) - count))):
                    yield f"part {place}, row {number}", row
            except network_errors() as error:
                raise OSError(
                    f"{path}, part {place}: {_line(error)}. Run the same command again: what is finished is kept"
                ) from error
            except ValueError as error:
                raise ValueError(f"{path}, part {place}: {_line(error)}") from error

    return Pieces(int(ends[-1]), sum(sizes), stamp, rows)


_hub_pieces = functools.cache(_hf_pieces)


def _size(file: str) -> int:
    import fsspec

    system, place = fsspec.url_to_fs(file)
    return system.info(place)["size"]


# --- tfds:


def _tfds_name(path: str) -> tuple[str, str]:
    """(NAME/CONFIG:VERSION, the split) of tfds:NAME/CONFIG:VERSION:SPLIT."""
    parts = path.removeprefix("tfds:").split(":")
    split = parts.pop() if len(parts) > 1 and not parts[-1][:1].isdigit() else "train"
    return ":".join(parts), split


def _open_tfds(path: str) -> Any:
    """The records of tfds:NAME, by number; ValueError where TFDS cannot read them here."""
    name, split = _tfds_name(path)
    prepare = (
        f"prepare it with: python -c \"import tensorflow_datasets as t; t.builder('{name}', "
        f"file_format='array_record').download_and_prepare()\""
    )
    try:
        import tensorflow_datasets as tfds
        import tensorflow_datasets.text  # noqa: F401  registers glue, squad and others

        return tfds.data_source(name, split=split, download=False)
    except (ImportError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: TFDS cannot read this data set here ({error}). Without TensorFlow it reads what was prepared as "
            f"ArrayRecord or Parquet: {prepare}; for TFRecord files, pip install tensorflow-cpu"
        ) from error
    except Exception as error:
        where = "TFDS_DATA_DIR, by default ~/tensorflow_datasets"
        raise ValueError(f"{path}: {_line(error)} (looked for in {where}); {prepare}") from error


def _tfds_pieces(path: str, field: str) -> Pieces:
    source = _open_tfds(path)
    total = len(source)
    sample = [source[i * max(total // 16, 1)] for i in range(min(total, 16))]
    mean = sum(len(record.get(field) or "") for record in sample) // max(len(sample), 1) + 1

    def rows(start: int, end: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for index in range(start, end):
            yield f"record {index}", source[index]

    return Pieces(total, total * mean, "", rows)


# --- for tasks


def splits_of(path: str) -> dict[str, str]:
    """A task's name of each split of hf:NAME -> the data set's; of tfds:NAME the usual ones.

    What the name stands for is looked up again, and then kept for `read_rows`.
    """
    _prepared.cache_clear()
    read_rows.cache_clear()
    if path.startswith("tfds:"):
        return {"train": "train", "dev": "validation", "test": "test"}
    name = HfName.parse(path)
    if name.split:
        raise ValueError(
            f"{path} names a split; leave it out: the task's option files={{'train': {name.split!r}, 'dev': ...}} says "
            "which is which"
        )
    left, found = list(map(str, _prepared(name).info.splits)), {}
    for split, theirs in _SPLITS.items():
        if known := [own for own in theirs.split() if own in left]:
            found[split] = known[0]
            left.remove(known[0])
    return found | {split: split for split in left if split not in found}


@functools.lru_cache(1)
def read_rows(path: str) -> tuple[list[dict[str, Any]], str]:
    """All rows of a split as plain values, classes by their names, and a fingerprint of them.

    A split of hf:NAME may be a slice, train[:90%]. Raises ValueError that says what there is instead.
    """
    if path.startswith("tfds:"):
        source = _open_tfds(path)
        info = source.dataset_info
        identity = [info.full_name, _tfds_name(path)[1], len(source)]
    else:
        name = HfName.parse(path)
        builder = _prepared(name._replace(split=""))
        with _explained(name):
            source = info = builder.as_dataset(split=name.split or "train")
    names = class_names(info)
    rows = [{key: named(_plain(value), names.get(key)) for key, value in row.items()} for row in source]
    if path.startswith("hf:"):
        identity = rows
    return rows, hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """bytes -> str, numpy scalars -> Python numbers, arrays -> lists, at any depth."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
