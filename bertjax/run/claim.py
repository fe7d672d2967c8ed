"""Checks that a run can use a directory: it is writable, no other run uses it, all processes see it.

If not, an error with the remedy comes before anything is trained that could not be saved.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import platform
import threading
import time
from collections.abc import Iterator
from typing import IO

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bertjax.formats.checkpoint import CheckpointError, is_remote
from bertjax.formats.files import remove_empty, same_file

log = logging.getLogger(__name__)

SHARED_WITHIN_S = 20  # a network file system may show late what another machine has written
_LOCKS: dict[str, IO[str]] = {}  # path -> open file that holds the lock until the process ends
_USED: set[str] = set()  # work directories of `released`
_MADE: list[pathlib.Path] = []  # locks and directories that this process has made


def claim(directory: epath.Path) -> None:
    """Makes the directory, tries to write there, and locks it; raises CheckpointError."""
    remote = is_remote(directory)  # a bucket has no directories, and no locks
    lock = _lock_of(directory)
    if not remote:
        _MADE.extend(pathlib.Path(path) for path in (lock, directory, *directory.parents) if not path.exists())
    probe = directory / f"tmp.probe.{threading.get_ident()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("written at start to see that checkpoints can be")
        probe.unlink()
    except Exception as error:  # clients of object stores have classes of their own
        remedy = "Choose another directory."
        if isinstance(error, ImportError):
            remedy = "pip install gcsfs, which bertjax[tpu] brings." * str(directory).startswith("gs://")
            remedy = remedy or "Choose a local directory, or one at gs://."
        elif remote:
            remedy = "Is that its name, and may this machine write there?"
        raise CheckpointError(f"cannot write checkpoints to {directory}: {error}. {remedy}") from error
    if not remote:
        _lock(str(lock), directory)


def require_in_place(directory: epath.Path) -> None:
    """Raises CheckpointError where a directory that this process has claimed was deleted, moved or emptied since.

    Checkpoints would be written to a new one, which lacks what a run needs to go on.
    """
    lock = str(_lock_of(directory))
    if lock in _LOCKS and not same_file(_LOCKS[lock], lock):
        raise CheckpointError(
            f"{directory.parent} was deleted, moved or emptied while a run was training in it. If it was moved, the "
            "same command with its new --workdir goes on from the newest checkpoint"
        )


def _lock_of(directory: epath.Path) -> epath.Path:
    return directory.parent / f"{directory.name}.lock"


def _lock(path: str, directory: epath.Path) -> None:
    """Refuses a second process that trains here (a job requeued while the first still runs)."""
    if path in _LOCKS:
        if same_file(_LOCKS[path], path):
            return
        _LOCKS.pop(path).close()  # of a directory that was deleted
    # A POSIX lock: the kernel drops it however the process ends, and forked data workers do not inherit it. Closing the
    # file would drop it, so it stays open.
    file = open(path, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise CheckpointError(
            f"{holder} is training in {directory.parent} and holds {path}; wait "
            "for it, stop it, or choose another directory"
        ) from error
    except OSError as error:
        log.warning("%s does not support locks (%s): nothing keeps a second process from training here", path, error)
    else:
        file.truncate(0)
        file.write(f"another process ({os.getpid()} on {platform.node()})\n")
        file.flush()
    _LOCKS[path] = file


@contextlib.contextmanager
def released(workdir: epath.Path) -> Iterator[None]:
    """After this block, what was claimed below `workdir` is free again: a notebook goes on after its run.

    Raises ValueError where another thread is in such a block.
    """
    if (name := str(workdir)) in _USED:
        raise ValueError(f"another thread is training in {name}; wait for it, or choose another directory")
    _USED.add(name)
    try:
        yield
    finally:
        _USED.remove(name)
        for path in [path for path in _LOCKS if path.startswith(f"{name}/")]:
            _LOCKS.pop(path).close()


@contextlib.contextmanager
def withdrawn_after_errors() -> Iterator[None]:
    """A start that is refused in this block leaves no lock and no empty directory that it made."""
    _MADE.clear()
    try:
        yield
    except BaseException:
        for path in sorted(_MADE, key=lambda path: -len(path.parts)):
            if lock := _LOCKS.pop(str(path), None):
                path.unlink(missing_ok=True)
                lock.close()
            else:
                remove_empty([path])
        raise


def require_shared(directory: epath.Path) -> None:
    """Raises ValueError if a process finds another directory there; all processes call it."""
    if jax.process_count() == 1:
        return
    sign = directory / "tmp.shared"
    if jax.process_index() == 0:
        sign.write_text("written at start to see that all processes see it")
    multihost_utils.sync_global_devices("checkpoint_sign_written")
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not (seen := sign.exists()) and time.monotonic() < deadline:
        time.sleep(0.5)
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.bool_(seen))).tolist()
    if jax.process_index() == 0:
        sign.unlink()
    if blind:
        raise ValueError(
            f"{directory} is not the same directory for all processes: what process 0 writes there is not seen by "
            f"{', '.join(map(str, blind))}. --workdir must name storage that all machines share, such as NFS or gs://"
        )
