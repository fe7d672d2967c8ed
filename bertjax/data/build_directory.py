"""The directory that a token store is built in: its lock, its beginning, and how it gives way to another store.

`build.py` fills it with shards, `splits.py` with the tables and the manifest.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertjax.data import store as stores
from bertjax.data.verification import STAMPS
from bertjax.formats.files import read_json
from bertjax.tokenization import Tokenizer

LOCK = "build.lock"  # held while a directory is written to
BESIDE = "new"  # in the directory of a store: another one, until it is whole


def is_beginning(path: Path) -> bool:
    """Whether the directory holds no more than a build leaves that was killed at its start."""
    if path.name == "shards" and path.is_dir():
        return not any(path.iterdir())
    return path.name == LOCK or path.name.startswith("build.json.")


def is_begun(out_dir: Path, build: dict[str, Any]) -> bool:
    """Whether the directory holds a beginning of this very build."""
    with contextlib.suppress(ValueError, FileNotFoundError):
        return read_json(out_dir / "build.json", dict) == json.loads(stores.to_json(build))
    return False


@contextlib.contextmanager
def locked(out_dir: Path, shared: bool) -> Iterator[None]:
    """Keeps other builds out of the directory, but for those that share its shards. The lock ends with the process.

    What a killed build left half-written is removed where no other one is at work.
    """
    (out_dir / "shards").mkdir(parents=True, exist_ok=True)
    with open(out_dir / LOCK, "ab") as file:
        try:
            alone = _lock(file, fcntl.LOCK_EX, 0 if shared else 1)
            if not alone and not (shared and _lock(file, fcntl.LOCK_SH)):
                raise ValueError(
                    f"another build is writing to {out_dir}; wait until it has ended, or end it. (Several machines "
                    "share a build with --shard=i/n)"
                )
        except OSError:  # a file system without locks: names of their own keep writers apart
            alone = False
        if alone:
            for path in [path for where in ("", "shards/", f"{BESIDE}/**/") for path in out_dir.glob(f"{where}*.tmp")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if shared:
                _lock(file, fcntl.LOCK_SH)
        yield


def _lock(file: IO[bytes], mode: int, seconds: float = 1) -> bool:
    """Tries to lock for as long as a killed process may need to end; returns whether it succeeded."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def clear(out_dir: Path) -> None:
    """Throws away what the directory holds, the manifest first: the rest is not a store any more."""
    (out_dir / "manifest.json").unlink(missing_ok=True)
    for path in out_dir.iterdir():  # build.json stays, and says whose it is
        if path.name in ("shards", "tokenizer"):
            shutil.rmtree(path)
        elif path.name.startswith(("train.", "heldout.", STAMPS)):
            path.unlink()
    (out_dir / "shards").mkdir()


def replace_by(out_dir: Path, place: Path) -> None:
    """Puts the store in `place`, a directory within `out_dir`, in the place of the one there, the manifest last."""
    clear(out_dir)
    for path in sorted(place.iterdir(), key=lambda path: path.name == "manifest.json"):
        os.replace(path, out_dir / path.name)
    place.rmdir()


def prepare(out_dir: Path, build: dict[str, Any], tokenizer: Tokenizer, overwrite: bool) -> None:
    """Makes the directory ready for the shards; `overwrite` deletes what it holds."""
    out_dir.mkdir(exist_ok=True)
    if overwrite:
        shutil.rmtree(out_dir / BESIDE, ignore_errors=True)  # left by a kill
        clear(out_dir)
    stores.write_json(out_dir / "build.json", build)
    temporary, target = stores.temporary_name(out_dir / "tokenizer"), out_dir / "tokenizer"
    tokenizer.save(temporary)
    if _contents(temporary) == _contents(target):
        shutil.rmtree(temporary)
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(temporary, target)
    except OSError:  # another machine of a shared build was first
        shutil.rmtree(temporary)


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
