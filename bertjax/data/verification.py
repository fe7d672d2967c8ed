"""Whether the files of a token store still are what its manifest says.

In: a store's directory, manifest and memory maps. Out: nothing, or a ValueError that names a file. Checked are the
content hash of every shard, table and tokenizer file, and that ids, sentence ends and addresses are in range, since
compiled code follows them unchecked.

A file is read only where its size, its times or the hash that it must have differ from those at its last check, which
are kept in DIR/verified.json (or, where that cannot be written, in CACHE): the first start reads the store once, later
ones look at the files' metadata only.
"""

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax.formats.files import read_json

ADDRESS_BITS = 40  # a shard holds at most 2**40 tokens
TABLES = ("sentences", "documents", "addresses")  # the files SPLIT.NAME
STAMPS = "verified.json"
CACHE = "~/.cache/bertjax/verified"
_RECENT = 2 * 10**9  # ns; a file that changed so lately may change again without another time
_ANNOUNCED = 1 << 30  # bytes to read that take so long that a line says why
_BLOCK = 1 << 22  # bytes hashed, and documents checked, at a time
_REMEDY = "copy the store again, or build it again (--overwrite)"


class SplitTables(NamedTuple):
    """The tables of one split, see store.py."""

    sentences: np.ndarray  # uint32 [S]
    documents: np.ndarray  # int64 [D+1]
    addresses: np.ndarray  # int64 [D]


class _Unit(NamedTuple):
    """Files that are checked together."""

    files: list[Path]
    expected: str  # what the manifest says of them
    check: Callable[[], None]

    def stamp(self) -> list[Any]:
        """Equal to the stamp of the last check where the files need no further one."""
        return [self.expected, *([s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in map(_stat, self.files))]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing: the store is damaged or was copied in part; {_REMEDY}") from None


def map_file(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """A file of `length` numbers as a read-only memory map; ValueError at another size."""
    size = _stat(path).st_size
    if size != length * dtype.itemsize:
        raise ValueError(
            f"{path} has {size:,} bytes, its manifest says {length * dtype.itemsize:,}: the store is damaged or was "
            f"copied in part; {_REMEDY}"
        )
    if not length:
        return np.empty(0, dtype)
    with open(path, "rb") as file:  # np.memmap takes four times as long
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), dtype)


def hash_file(path: Path, digest: Any = None) -> Any:
    """A hash object after the content of a file; a new one, or the one given."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: digest or hashlib.blake2b(digest_size=32))


def verify(
    path: Path, manifest: Mapping[str, Any], shards: list[np.ndarray], splits: Mapping[str, SplitTables]
) -> None:
    """Checks what was not checked yet, or has changed since.

    Raises:
      ValueError: a file that is not the one that was built, or whose numbers are out of range.
    """
    units = {f"shards/{number:05d}": _shard_unit(path, manifest, number, ids) for number, ids in enumerate(shards)}
    lengths = np.array([shard["tokens"] for shard in manifest["shards"]], np.int64)

    def check_splits() -> None:
        for split, tables in splits.items():
            check_tables(path / split, tables, lengths, manifest["splits"][split]["tokens"])

    names = [f"{split}.{table}" for split in splits for table in TABLES]
    units["tables"] = _parts_unit(path, manifest, names, check_splits)
    if names := [name for name in manifest["parts"] if name.startswith("tokenizer/")]:
        units["tokenizer"] = _parts_unit(path, manifest, names)
    known = [_read_stamps(file) for file in _stamp_files(path)]
    stamps = {name: unit.stamp() for name, unit in units.items()}
    pending = [unit for name, unit in units.items() if all(stored.get(name) != stamps[name] for stored in known)]
    if not pending:
        return
    size = sum(file.stat().st_size for unit in pending for file in unit.files)
    if size >= _ANNOUNCED:
        print(f"checking {size / 1e9:.1f} GB of {path}, which is new here or has changed", flush=True)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as threads:
        list(threads.map(lambda unit: unit.check(), pending))
    _write_stamps(path, stamps)


def _changed(path: Path) -> ValueError:
    return ValueError(
        f"{path} is not the file that was built (its content hash differs): it was damaged, edited or replaced; "
        f"{_REMEDY}"
    )


def _shard_unit(path: Path, manifest: Mapping[str, Any], number: int, ids: np.ndarray) -> _Unit:
    tokens, expected = path / "shards" / f"{number:05d}.tokens", manifest["shards"][number]["tokens_hash"]

    def check() -> None:
        digest, largest = hashlib.blake2b(digest_size=32), -1
        for start in range(0, len(ids), _BLOCK):
            block = ids[start : start + _BLOCK]
            digest.update(block)
            largest = max(largest, int(block.max()))
        if largest >= (size := manifest["tokenizer"]["vocab_size"]):
            raise ValueError(
                f"{tokens} has the id {largest}, its vocabulary {size} entries: it was damaged or replaced; {_REMEDY}"
            )
        if digest.hexdigest() != expected:
            raise _changed(tokens)

    return _Unit([tokens], expected, check)


def _parts_unit(
    path: Path, manifest: Mapping[str, Any], names: Iterable[str], then: Callable[[], None] = lambda: None
) -> _Unit:
    """`then` is called once the files are known to be those of the build: it need not say which is damaged."""
    parts = {path / name: manifest["parts"][name] for name in names}

    def check() -> None:
        for file, expected in parts.items():
            if hash_file(file).hexdigest() != expected:
                raise _changed(file)
        then()

    return _Unit(list(parts), " ".join(parts.values()), check)


def check_tables(prefix: Path, tables: SplitTables, shard_lengths: np.ndarray, tokens: int) -> None:
    """ValueError, with the file, where the tables of a split lead anywhere but into its shards.

    Args:
      prefix: path of the tables without the names' ends.
      shard_lengths: int64 [shards], tokens of each.
      tokens: that the split has.
    """

    def bad(name: str, what: str) -> ValueError:
        return ValueError(f"{prefix}.{name} is damaged: {what}; {_REMEDY}")

    ends, firsts, addresses = tables
    if firsts[0] != 0 or firsts[-1] != len(ends) or (firsts[1:] <= firsts[:-1]).any():
        raise bad("documents", "the first sentences of the documents do not ascend from 0 to the number of sentences")
    shards, starts = addresses >> ADDRESS_BITS, addresses & ((1 << ADDRESS_BITS) - 1)
    if len(addresses) and not 0 <= shards.min() <= shards.max() < len(shard_lengths):
        raise bad("addresses", f"a document lies beyond the {len(shard_lengths)} shards")
    total = 0
    for begin in range(0, len(addresses), _BLOCK):
        some = slice(begin, begin + _BLOCK)
        first = firsts[begin : begin + _BLOCK + 1]
        part = ends[first[0] : first[-1]].astype(np.int64)
        steps = np.diff(part, prepend=0)
        steps[first[:-1] - first[0]] = part[first[:-1] - first[0]]
        if (steps <= 0).any():
            raise bad("sentences", "the ends of a document's sentences do not ascend")
        lengths = part[first[1:] - first[0] - 1]
        if (starts[some] + lengths > shard_lengths[shards[some]]).any():
            raise bad("addresses", "a document ends beyond its shard")
        total += int(lengths.sum())
    if total != tokens:
        raise bad("sentences", f"its documents have {total:,} tokens, the manifest says {tokens:,}")


def _stamp_files(path: Path) -> list[Path]:
    """Where the stamps of a store are, the preferred place first."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return [path / STAMPS, Path(CACHE).expanduser() / f"{name}.json"]


def _read_stamps(file: Path) -> dict[str, Any]:
    """By unit; what cannot be read is as good as absent."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(file, dict)
    return {}


def _write_stamps(path: Path, stamps: Mapping[str, list[Any]]) -> None:
    """Keeps the stamps where they can be kept. What has just changed is checked again next time."""
    for file in _stamp_files(path):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=file.parent)
            before = os.fstat(descriptor).st_mtime_ns - _RECENT  # by the clock of the file system
            old = {k: stamp for k, stamp in stamps.items() if all(max(times) < before for _, *times in stamp[1:])}
            with open(descriptor, "w") as stream:
                json.dump(old, stream)
            os.chmod(temporary, 0o644)
            os.replace(temporary, file) if old else os.unlink(temporary)
            return
