"""The manifest of a checkpoint: what makes a directory whole, and how to see that it is.

In: a directory with the files of a checkpoint. Out: manifest.json in it, with the step, metrics,
size and crc32 of every file; later what differs from it.
"""

import json
import logging
import os
import pathlib
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from bertjax.formats.files import write_whole

log = logging.getLogger(__name__)

FILE = "manifest.json"


class CheckpointError(RuntimeError):
    """No checkpoint can be restored, or one could not be written; the message says what to do."""


def write(directory: epath.Path, step: int, metrics: Mapping[str, float]) -> None:
    """Describes all files that are there now."""
    write_whole(
        directory / FILE,
        json.dumps(
            {
                "step": step,
                "time": time.time(),
                "metrics": {name: float(value) for name, value in metrics.items()},
                "files": _fingerprints(directory),
            },
            indent=1,
        ),
    )


def read(directory: epath.Path) -> dict[str, Any]:
    """The content; OSError or ValueError where there is none."""
    return json.loads((directory / FILE).read_text())


def problem(directory: epath.Path, step: int) -> str | None:
    """Why the checkpoint of `step` is not intact, or None: every file is compared."""
    try:
        content = read(directory)
        expected = {name: tuple(value) for name, value in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{FILE} is missing or unreadable ({error})"
    if content.get("step") != step:
        return f"{FILE} is of step {content.get('step')}"
    found = _fingerprints(directory)
    for name, (size, checksum) in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != (size, checksum):
            return f"{name} has {found[name][0]} bytes and checksum {found[name][1]}, not {size} and {checksum}"
    return None


def resolve_directory(path: str | os.PathLike[str]) -> epath.Path:
    """An absolute path: relative ones and ~ are resolved, URLs such as gs://bucket/x are kept."""
    if re.match(r"^[a-z0-9]+://", os.fspath(path)):
        return epath.Path(path)
    return epath.Path(pathlib.Path(path).expanduser().absolute())


def remove_quietly(path: epath.Path) -> None:
    """Removes a file or a tree; a failure is only logged."""
    try:
        path.rmtree() if path.is_dir() else path.unlink()
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)


def is_remote(path: epath.Path) -> bool:
    """Whether it is a URL such as gs://bucket/x."""
    return "://" in str(path)


def _fingerprints(directory: epath.Path) -> dict[str, tuple[int, int]]:
    """{relative name: (bytes, crc32)} of all files but the manifest; of a URL, bytes only."""
    found = {}
    for path in _files(directory):
        name = str(path.relative_to(directory))
        if name == FILE:
            continue
        if is_remote(directory):  # reading back a whole checkpoint would cost more than the upload
            found[name] = (path.stat().length, 0)
            continue
        checksum, size = 0, 0
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                checksum, size = zlib.crc32(block, checksum), size + len(block)
        found[name] = (size, checksum)
    return found


def _files(directory: epath.Path) -> Iterator[epath.Path]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path
