"""Files and directories that appear whole or not at all, whatever ends the process meanwhile.

What is being written stands beside its place under another name, and takes the place by one rename.
Also the reader of JSON files that users bring, whose errors name the file.
What several processes want at once is made by one of them (`make_once`).
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

WAITING_LINE_S = 15.0  # between two lines of a process that waits
_POLL_S = 0.2
_FAILED = "failed: "
_SCRATCH = "bertjax-scratch-"
_STREAM = re.compile("/dev/(stdout|stderr|fd/.*)|/proc/self/fd/.*")  # whatever they stand for

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], mode: str = "w", partial: Path | None = None) -> Iterator[IO[Any]]:
    """A stream that becomes the file `path` when the block ends without an error, also where the power fails.

    Opens at once, so a place that cannot be written shows before the work and not after it. Makes
    the directory that it is in. Text is UTF-8, its line ends are written as they are. A device or a pipe, such as
    /dev/null or bash's >(gzip > FILE), is written to and stays what it is. So does a symbolic link, as with `open`.

    partial: what it is called meanwhile, where several processes may write it at once.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")
    # Half a surrogate pair, which JSON can escape, has no other form in UTF-8.
    text = {} if "b" in mode else dict(encoding="utf-8", errors="backslashreplace", newline="")
    if _STREAM.fullmatch(str(path)) or (path.exists() and not path.is_file()):
        with open(path, mode, **text) as file:
            yield file
        return
    path = _linked(path)
    partial = path.with_name(partial.name if partial else f"{path.name}.partial")
    with directory_for_work(path.parent), _named(path):
        with _alone(path, partial, mode, text) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        directory = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system has this
            os.fsync(directory)
        os.close(directory)


def _linked(path: Path) -> Path:
    """What a symbolic link names, there or not, so that a rename does not replace the link; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _alone(path: Path, partial: Path, mode: str, text: dict[str, str]) -> IO[Any]:
    """The empty file `partial`, locked while it is open: two programs that write one file at once would mix it."""
    while True:
        file = open(partial, mode, opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666), **text)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BlockingIOError(error.errno, "another process is writing this file", str(path)) from None
        except OSError:  # some network file systems have no locks
            pass
        if same_file(file, partial):  # or it has become another process's `path` meanwhile
            file.truncate()
            return file
        file.close()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds to an error of the disk the file that could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in OF_THE_DISK and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def directory_for_work(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes the directory `path` for the block; after an error, what was made here and is empty is removed again."""
    path = Path(path).expanduser().absolute()
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise


def remove_empty(directories: Iterable[Path]) -> None:
    """Removes directories, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, or leaves the one that was there. On an object store (an epath.Path of a URL) files are never half
    there, so it is written in its place."""
    if "://" in str(path):
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
        return
    with whole_file(path, "wb" if isinstance(content, bytes) else "w") as file:
        file.write(content)


@contextlib.contextmanager
def whole_directory(target: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside `target`, or what a link of that name leads to, that becomes it when the block ends
    without an error.

    What a killed process has left of an earlier attempt is removed; where it was killed between
    taking away the old directory and putting the new one in its place, the old one comes back.

    Raises:
      FileExistsError: `target` exists, is not empty, and `overwrite` is False.
    """
    target = _linked(Path(target).expanduser().absolute())
    if target.parent.is_dir():
        with _locked(target.parent):
            _remove_orphans(target)
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(f"{target} exists and is not empty; choose another, or overwrite it")
    with directory_for_work(target.parent), _named(target), contextlib.ExitStack() as held:
        with _locked(target.parent):
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            held.enter_context(_locked(temporary))  # until this process ends, however it does
        try:
            yield temporary
            # mkdtemp and safetensors keep what they make for its owner alone.
            umask = _umask()
            temporary.chmod(0o777 & ~umask)
            for path in temporary.rglob("*"):
                path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
            with _locked(target.parent):
                _put_in_place(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _put_in_place(new: Path, target: Path) -> None:
    if not target.exists():
        os.replace(new, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.replace(target, old / "it")  # `_remove_orphans` puts it back where the process is killed here
    os.replace(new, target)
    shutil.rmtree(old)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for temporary files, which is removed when the block ends.

    A process that is killed leaves it behind; then the next call of any process removes it.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), _locked(left, wait=False) as free:  # another user's cannot be opened
            if free:
                shutil.rmtree(left, ignore_errors=True)
    # It gets its name once it is locked: until then another process would take it for one that was left.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=place))
    with _locked(unnamed):
        directory = unnamed.rename(place / unnamed.name.removeprefix("."))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _remove_orphans(target: Path) -> None:
    """Temporary directories of `whole_directory(target)` whose process has ended."""
    name = re.compile(re.escape(f".{target.name}.") + r"(old\.)?[a-z0-9_]{8}")
    for path in target.parent.iterdir():
        if not name.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
            continue
        with _locked(path, wait=False) as free:
            if not free:
                continue
            if (path / "it").is_dir() and not target.exists():
                os.replace(path / "it", target)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, wait: bool = True) -> Iterator[bool]:
    """The kernel's lock on a directory, which ends with the process; False where another process
    holds it or the file system has no such locks."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(handle)


def on_disk(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path. ValueError for gs://BUCKET/NAME, which would be a directory called gs: here."""
    if "://" in os.fspath(path):
        raise ValueError(
            f"{path} is not on a local disk; copy it here first (for example gcloud storage cp -r) and name the copy"
        )
    return path


def read_json(path: str | os.PathLike[str], kind: type = object) -> Any:
    """The content of a JSON file that a user brings (UTF-8, with or without a byte-order mark).

    Raises:
      ValueError: not UTF-8 or not JSON, nested too deeply, a number too long, no `kind` (dict, list); names the file.
      OSError: the file cannot be read.
    """
    value = parse_json(Path(path).read_bytes(), str(path))
    if not isinstance(value, kind):
        raise ValueError(f"{path} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def write_json(path: str | os.PathLike[str], value: Any, **form: Any) -> None:
    """Writes JSON as `write_whole` does; `form`: arguments of json.dumps, whose indent is 1 here."""
    write_whole(path, json.dumps(value, **{"indent": 1, **form}) + "\n")


def parse_json(content: str | bytes, source: str) -> Any:
    """The value of JSON text; ValueError names `source`, the file (and line) that it is from."""
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{source} is not valid JSON: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise ValueError(f"{source} is not valid JSON: {error}") from None


def make_once(
    target: str | os.PathLike[str],
    make: Callable[[Path], object],
    what: str,
    is_there: Callable[[Path], bool] = Path.exists,
) -> Path:
    """Has one process call `make(target)`; others that ask meanwhile wait and find what it made.

    Also between processes that know nothing of each other, and on a file system that machines
    share: the lock is the kernel's, on a file beside `target`. It is released however its holder
    ends; if that was in the middle of `make`, one of the others makes it.

    Args:
      make: leaves `target` whole or not there (`whole_file`, `whole_directory`).
      what: 'the demo corpus', for the lines of those that wait.
      is_there: whether `target` is made.

    Raises:
      ValueError: the process that was waited for has failed; with its reason.
    """
    target = Path(target).expanduser()
    while not is_there(target):
        path = target.with_name(f".{target.name}.lock")
        with directory_for_work(target.parent), open(path, "a+", encoding="utf-8") as lock:
            locked, waited_for = _lock(lock, what)
            note = _read(lock)
            if waited_for and note.startswith(_FAILED):
                raise ValueError(f"{waited_for} could not make {what}: {note.removeprefix(_FAILED)}")
            if locked and not same_file(lock, path):
                continue  # of a process that has finished, and removed its lock
            try:
                if not is_there(target):
                    _make_locked(target, make, lock if locked else None)
            finally:
                if locked:
                    path.unlink(missing_ok=True)
    return target


def _make_locked(target: Path, make: Callable[[Path], object], lock: IO[str] | None) -> None:
    """Calls `make`; those that wait for the lock find the reason if it fails."""
    if lock is None:
        try:
            make(target)
        except OSError:  # target may have become another process's meanwhile
            if not target.exists():
                raise
        return
    _write(lock, f"process {os.getpid()} on {platform.node()}")
    for left in target.parent.glob(f".{target.name}.*"):  # by a maker that was killed
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    try:
        make(target)
    except Exception as error:
        _write(lock, f"{_FAILED}{error}")
        raise


def _lock(file: IO[str], what: str) -> tuple[bool, str]:
    """Waits for the lock: (whether there are locks, the process that was waited for or '')."""
    holder, begin = "", time.monotonic()
    said = begin + min(1.0, WAITING_LINE_S) - WAITING_LINE_S  # shorter waits are not worth a line
    while True:
        try:
            # Not lockf: that lets two threads of a process in.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True, holder
        except BlockingIOError:
            holder = _read(file) or holder or "another process"
        except OSError:  # some network file systems have none: the first rename wins
            return False, ""
        if time.monotonic() - said >= WAITING_LINE_S:
            said = time.monotonic()
            print(f"waiting for {holder}, which makes {what} ({said - begin:.0f} s)", flush=True)
        time.sleep(_POLL_S)


def same_file(file: IO[str], path: str | os.PathLike[str]) -> bool:
    """Whether `path` still is the file that was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _write(file: IO[str], text: str) -> None:
    with contextlib.suppress(OSError):  # only for those that wait; a full disk is told by `make`
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
