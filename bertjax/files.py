"""Files and directories that appear whole or not at all, whatever ends the process meanwhile.

What is being written stands beside its place under another name, and takes the place by one rename.
Also the reader of JSON files that users bring, whose errors name the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """A stream that becomes the file `path` when the block ends without an error.

    Opens at once, so a place that cannot be written shows before the work and not after it. Makes
    the directory that it is in. Text is UTF-8, its line ends are written as they are.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")
    partial = path.with_name(f"{path.name}.partial")
    # Half a surrogate pair, which JSON can escape, has no other form in UTF-8.
    text = {} if "b" in mode else dict(encoding="utf-8", errors="backslashreplace", newline="")
    try:
        with open(partial, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, or leaves the one that was there. An object of a store (an epath.Path of a
    URL) never is half there, and is written in its place.
    """
    if "://" in str(path):
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
        return
    with whole_file(path, "wb" if isinstance(content, bytes) else "w") as file:
        file.write(content)


@contextlib.contextmanager
def whole_directory(target: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside `target` that becomes it when the block ends without an error.

    Raises:
      FileExistsError: `target` exists, is not empty, and `overwrite` is False.
    """
    target = Path(target).expanduser().absolute()
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(f"{target} exists and is not empty; choose another, or overwrite it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        # mkdtemp and safetensors keep what they make for its owner alone.
        temporary.chmod(0o777 & ~_umask())
        for path in temporary.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old / "it")
            os.replace(temporary, target)
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file that a user brings (UTF-8, with or without a byte-order mark).

    Raises:
      ValueError: not UTF-8 or not JSON, nested too deeply, a number too long; names the file.
      OSError: the file cannot be read.
    """
    return parse_json(Path(path).read_bytes(), str(path))


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


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
