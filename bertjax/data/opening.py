"""Files as bytes, text or lines, unpacked where their name says that they are compressed.

Text is UTF-8 whatever the locale says. A line feed ends a line and nothing else does, since sentences contain U+2028
and the like; only in a file without any is it the carriage return.
"""

import bz2
import contextlib
import functools
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from typing import IO

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BEGINNINGS = {b"\x1f\x8b": ".gz", b"BZh91AY&SY": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
# A compressed text may grow to this many bytes, or times its size: no real one grows more.
_LEAST, _EXPANSION = 1 << 28, 300


def is_compressed(path: str) -> bool:
    return path.lower().endswith(COMPRESSED)


def plain_name(path: str) -> str:
    """The name in lower case, without the suffix of the compression."""
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """A file's plain bytes; ValueError while reading, where the compressed data are damaged or cut short."""
    suffix = os.path.splitext(path.lower())[1]
    try:
        if suffix == ".zst":
            import pyarrow  # unlike the package zstandard it sees that a stream was cut short

            with pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd") as file:
                yield io.BufferedReader(file, 1 << 18)  # type: ignore[arg-type]
        elif suffix in _OPENERS:
            with _OPENERS[suffix](path, "rb") as file:
                yield file
        else:
            with open(path, "rb", buffering=1 << 18) as file:
                yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None):
            raise  # of the file system
        raise ValueError(f"{path}: the compressed file is damaged or cut short ({error}); copy it again") from error


def line_blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """A text file's plain bytes from `start` on, in blocks, with line feeds where its lines end in carriage returns."""
    with open_bytes(path) as file:
        first = file.read(1 << 16)
    refuse_other_text(first, path)
    returns = b"\r" in first[:-1] and b"\n" not in first
    with open_bytes(path) as file:
        if start:  # not every compressed file can be sought in
            file.seek(start)
        while block := file.read(1 << 18):
            yield block.replace(b"\r", b"\n") if returns else block


def refuse_other_text(first: bytes, path: str | os.PathLike[str]) -> None:
    """ValueError where a file begins like UTF-16, UTF-32, something compressed, a PDF or no text at all."""
    if suffix := next((suffix for beginning, suffix in _BEGINNINGS.items() if first.startswith(beginning)), ""):
        raise ValueError(f"{path} begins like a compressed file: let its name end in {suffix}, or unpack it")
    if first.startswith((b"%PDF-", b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"{\\rtf")):
        raise ValueError(
            f"{path} is a PDF, an archive or a file of a word processor: save its text as plain UTF-8 text"
        )
    marked = first.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    # Without a mark: spaces, digits and line ends of UTF-16 have a zero byte, text in UTF-8 none.
    if marked or first.count(0) * 200 > len(first):
        raise ValueError(
            f"{path}: this is text in UTF-16 or UTF-32, or no text (zero bytes among the first); convert it, as "
            "`iconv -f UTF-16 -t UTF-8` does"
        )


@functools.lru_cache(1)
def _piped(path: str, number: int) -> bytes:
    """What comes through a pipe such as /dev/stdin, kept: it can be read once, and readers look at a file first."""
    with open(path, "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """A whole UTF-8 file without its byte order mark.

    Raises:
      ValueError: not UTF-8, or with NUL bytes (with line and byte), a pipe or device in a directory of data, or a
        compressed file that grows out of all proportion; or as `open_bytes`.
    """
    path = os.path.expanduser(path)
    status = os.stat(path)
    # Readers of data open a file twice, for its text and for its hash.
    if not stat.S_ISREG(status.st_mode) and not (stat.S_ISDIR(status.st_mode) or str(path).startswith("/dev/")):
        raise ValueError(f"{path} is a pipe, socket or device, not a file; write its content to a file first")
    limit = max(_LEAST, _EXPANSION * status.st_size) if is_compressed(str(path)) else -1
    with io.BytesIO(_piped(path, status.st_ino)) if stat.S_ISFIFO(status.st_mode) else open_bytes(path) as file:
        data = file.read(limit)
        if limit > 0 and file.read(1):
            raise ValueError(f"{path} unpacks to more than {_EXPANSION} times its size; unpack it and look at it")
    refuse_other_text(data[: 1 << 16], path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # What utf-8-sig says of a place leaves the byte order mark out.
        place = error.start + (len(data) - len(error.object))
        raise ValueError(
            f"{path}, line {data.count(10, 0, place) + 1}: byte 0x{data[place]:02x} is not valid UTF-8 "
            f"({error.reason}); convert the file, as `iconv -f FROM -t UTF-8` does"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"{path}, line {data.count(10, 0, data.index(0)) + 1}: a NUL byte, so the file is not UTF-8 text "
            "(UTF-16?); convert it, as `iconv -f UTF-16LE -t UTF-8` does"
        )
    return text


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a whole UTF-8 file, without their ends (\\r\\n is one)."""
    text = read_text(path)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
