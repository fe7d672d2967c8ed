"""Files as streams of bytes, unpacked on the way where their name says that they are compressed."""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def is_compressed(path: str) -> bool:
    """Whether the name ends like that of a compressed file, in any case."""
    return path.lower().endswith(COMPRESSED)


def plain_name(path: str) -> str:
    """The name in lower case, without the suffix of the compression."""
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """A file's plain bytes.

    Raises:
      ValueError: while reading, where the compressed data are damaged or cut short.
    """
    name = path.lower()
    try:
        if name.endswith(".zst"):
            import pyarrow  # unlike the package zstandard it sees that a stream was cut short

            with pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd") as file:
                yield io.BufferedReader(file, 1 << 18)  # type: ignore[arg-type]
        else:
            opener = next((module.open for suffix, module in
                           ((".gz", gzip), (".bz2", bz2), (".xz", lzma)) if name.endswith(suffix)),
                          None)
            with opener(path, "rb") if opener else open(path, "rb", buffering=1 << 18) as file:
                yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None):
            raise  # of the file system
        raise ValueError(f"{path}: the compressed file is damaged or cut short ({error}); "
                         "copy it again") from error
