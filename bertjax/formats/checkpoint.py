"""Saved states on a disk or at gs://: which there are, and whether they are intact.

DIR/<step>/ has the arrays in `state/` (orbax) and `manifest.json` with step, metrics, size and crc32 of every file. The
manifest is written last, so a directory without one is not complete. DIR.committed.json beside it says that there were
checkpoints at all. run/checkpoint.py writes them.
"""

import functools
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

from bertjax.formats.files import write_json

log = logging.getLogger(__name__)

MANIFEST, STATE = "manifest.json", "state"


class CheckpointError(RuntimeError):
    """No checkpoint can be restored, or one could not be written; the message says what to do."""


def resolve_directory(path: str | os.PathLike[str]) -> epath.Path:
    """An absolute path: relative ones and ~ are resolved, URLs such as gs://bucket/x are kept.

    Raises ValueError for other URLs, and a name that is not UTF-8, which orbax and TensorBoard cannot write to.
    """
    if re.search("[\ud800-\udfff]", os.fspath(path)):  # Python's signs for such bytes
        raise ValueError(f"{os.fspath(path)!r}: the name of this directory is not UTF-8; choose another")
    if re.match(r"^[a-z0-9]+://", os.fspath(path)):
        try:
            return epath.Path(path)
        except KeyError as scheme:
            raise ValueError(
                f"{path}: {scheme.args[0]} is not read or written; give a path of this machine or gs://BUCKET/NAME"
            ) from None
    return epath.Path(pathlib.Path(path).expanduser().absolute())


def is_remote(path: epath.Path) -> bool:
    """Whether it is a URL such as gs://bucket/x."""
    return "://" in str(path)


def write_manifest(directory: epath.Path, step: int, metrics: Mapping[str, float]) -> None:
    """Describes all files that are in the directory of a checkpoint now."""
    numbers = {name: float(value) for name, value in metrics.items()}
    content = {"step": step, "time": time.time(), "metrics": numbers, "files": _fingerprints(directory)}
    write_json(directory / MANIFEST, content)


def amend_manifest(directory: epath.Path, metrics: Mapping[str, float]) -> None:
    """Adds to the metrics in the manifest of a checkpoint, and leaves the rest as it is."""
    content = json.loads((directory / MANIFEST).read_text())
    content["metrics"] |= {name: float(value) for name, value in metrics.items()}
    write_json(directory / MANIFEST, content)


def _fingerprints(directory: epath.Path) -> dict[str, tuple[int, int]]:
    """{relative name: (bytes, crc32)} of all files but the manifest; of a URL, bytes only."""
    found = {}
    for path in files_under(directory):
        name = str(path.relative_to(directory))
        if name == MANIFEST:
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


def files_under(directory: epath.Path) -> Iterator[epath.Path]:
    """All files in a directory and those in it."""
    for path in directory.iterdir():
        if path.is_dir():
            yield from files_under(path)
        else:
            yield path


class SavedStates:
    """The checkpoints in a directory, which a run may be writing to meanwhile; only reads.

    Args:
      directory: see `resolve_directory`.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = resolve_directory(directory)
        self._in_place = is_remote(self.directory)
        # Beside the directory, so that emptying the directory does not erase that it was full.
        self._ledger = self.directory.parent / f"{self.directory.name}.committed.json"

    @functools.cached_property
    def _orbax(self) -> Any:
        import orbax.checkpoint as ocp  # late: it takes a second to import

        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def steps(self) -> list[int]:
        """Committed steps in ascending order, intact or not."""
        steps = [int(path.name) for path in self._entries() if path.name.isdigit()]
        if self._in_place:
            steps = [step for step in steps if (self.directory / str(step) / MANIFEST).exists()]
        return sorted(steps)

    def _entries(self) -> list[epath.Path]:
        """What the directory holds; nothing where it is not there, as empty ones are not in object stores."""
        try:  # not exists() first: another process that tries whether it can write makes it and removes it again
            return list(self.directory.iterdir())
        except FileNotFoundError:
            return []

    def latest(self) -> int | None:
        """The newest step, or None if no checkpoint was ever committed.

        Raises CheckpointError if there were checkpoints and now there are none.
        """
        return self._newest()

    def _newest(self) -> int | None:
        if steps := self.steps():
            return steps[-1]
        if not self._ledger.exists():
            return None
        try:
            what = f"step {json.loads(self._ledger.read_text())['newest']} was saved"
        except (ValueError, KeyError, TypeError):  # damaged, but it is there
            what = "some were saved"
        raise CheckpointError(
            f"{self.directory} holds no checkpoint, but {self._ledger.name} says that {what}. "
            f"Put the checkpoints back, or delete {self._ledger} to begin at step 0."
        )

    def manifest(self, step: int) -> dict[str, Any]:
        """Content of a manifest; OSError or ValueError where there is none."""
        return json.loads((self.directory / str(step) / MANIFEST).read_text())

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics saved with a step; KeyError, OSError or ValueError if its manifest is damaged."""
        return self.manifest(step)["metrics"]

    def problem(self, step: int) -> str | None:
        """Why a checkpoint is not intact, or None: every file is compared with the manifest."""
        try:
            content = self.manifest(step)
            expected = {name: tuple(value) for name, value in content["files"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{MANIFEST} is missing or unreadable ({error})"
        if content.get("step") != step:
            return f"{MANIFEST} is of step {content.get('step')}"
        found = _fingerprints(self.directory / str(step))
        for name, (size, checksum) in expected.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != (size, checksum):
                return f"{name} has {found[name][0]} bytes and checksum {found[name][1]}, not {size} and {checksum}"
        return None

    def require(self, step: int | None) -> None:
        """Raises CheckpointError where there is no checkpoint at all, or none of `step`; reads none."""
        if self._newest() is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        if step not in (None, *self.steps()):
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are {self.steps()}")

    def intact(self, step: int | None = None) -> int:
        """The step to restore: the newest that is intact, with a message for each one that is not; or `step`.

        Raises CheckpointError if none, or `step`, is intact.
        """
        self.require(step)
        problems = []
        for candidate in self.steps()[::-1] if step is None else [step]:
            problem = self.problem(candidate)
            if problem is None:
                if problems:
                    log.error("falling back to the checkpoint of step %d: the work since then is repeated", candidate)
                return candidate
            problems.append(f"step {candidate}: {problem}")
            log.error("checkpoint of step %d in %s is CORRUPT: %s", candidate, self.directory, problem)
        raise CheckpointError(
            f"no intact checkpoint in {self.directory} ({'; '.join(problems)}). Restore one from a "
            "backup, or begin the run at step 0 with --config.resume=overwrite"
        )

    def restore_numpy(self, step: int | None = None) -> tuple[dict[str, Any], int]:
        """(nested dict of numpy arrays, step): the newest that is intact, or `step`."""
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        step = self.intact(step)
        path = self.directory / str(step) / STATE
        tree = self._orbax.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return self._orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args)), step
