"""Which files a corpus is read from, in which format, and in which parts.

In: patterns (wildcards expanded here, not by the shell) and a `Reading`. Out: files, and `Extent`s of them that
processes and machines can share. The plan depends only on the files, never on the number of readers. documents.py reads
the extents.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bertjax.config.setting import AT_LEAST_1, check_all, setting
from bertjax.data.named import is_name, open_pieces, pinned
from bertjax.data.opening import is_compressed, open_bytes, plain_name
from bertjax.data.sentences import check_language

FORMATS = {
    "text": "a line is a sentence, a blank line ends a document",  # the original's input
    "prose": "paragraphs that are split into sentences, a file is a document",
    "blocks": "paragraphs that are split into sentences, a blank line ends a document",
    "jsonl": "a line is a document",  # an object, whose `field` holds prose or a list of sentences
    "parquet": "a record is a document",
    "wikiextractor": "<doc> ... </doc> is a document",
    "tfds": "a record is a document",  # tfds:name/config:split, any text data set prepared on disk
    "hf": "a row is a document",  # hf:name,config:split, through the library datasets
}
BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Reading:
    """How files become documents; `build_corpus` has a flag for each."""

    format: str = setting(
        "auto", "auto = by names (.jsonl, .parquet, hf: ...), then by the first bytes, else text", ("auto", *FORMATS)
    )
    field: str = setting("text", "of JSONL, Parquet, TFDS and hf: records; several with commas, one after the other")
    language: str = setting("auto", "for splitting prose into sentences: an ISO 639-1 code, or auto = a guess")
    segment: bool | None = setting(None, "split lines and strings into sentences (default: of all formats but text)")
    errors: str = setting("strict", "not UTF-8: strict = refuse, replace = count the line", ("strict", "replace"))
    max_line_mb: int = setting(16, "refuse longer lines, MiB: a line is held in memory, several times", AT_LEAST_1)

    def __post_init__(self) -> None:
        check_all(self)
        if self.language != "auto":
            check_language(self.language)


class Extent(NamedTuple):
    """A part of a file: bytes [start, end) of text formats, else records, row groups or parts of a data set."""

    path: str
    format: str
    start: int
    end: int  # -1: to the end
    size: int  # bytes, about; what progress is measured in


def resolve(patterns: str | Iterable[str]) -> list[str]:
    """Files that the patterns (also comma-separated) match, sorted within each.

    Each file once, also where links lead to it under several names. hf:NAME is to its end one pattern, and comes out
    with the commit that it now stands for.

    Raises:
      ValueError: a pattern without a match, or of files that are not on a local disk.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [str(patterns)]
    parts = [part for given in map(str, patterns) for part in _parts(given)]
    files: dict[str, str] = {}  # by their real path
    for pattern in map(str.strip, parts):
        if is_name(pattern):
            pattern = pinned(pattern) if pattern.startswith("hf:") else pattern
            files.setdefault(pattern, pattern)
            continue
        path = os.path.expanduser(pattern)
        matches = []
        for name in [path] if os.path.isfile(path) else sorted(_matches(path)):
            if os.path.isfile(name):
                matches.append(name)
            elif not os.path.isdir(name) and glob.has_magic(path):
                raise ValueError(
                    f"{name} matches the input pattern {pattern!r} and is not a file (a pipe, a device or a broken "
                    "link); remove it, or name the others"
                )
        if not matches and "://" in pattern:
            raise ValueError(
                f"{pattern}: text and TFRecords are read from a local disk; copy them there first, as `gcloud storage "
                "cp` does, and name the copies. (A token store may be at gs://)"
            )
        if not matches:
            hint = ""
            if os.path.isdir(path):
                hint = f"; it is a directory, write '{pattern.rstrip('/')}/*'"
            elif os.path.exists(path):
                hint = "; it is a pipe or a device, and a corpus is read more than once: write it to a file"
            raise ValueError(f"no file matches the input pattern {pattern!r}{hint}")
        for match in matches:
            files.setdefault(os.path.realpath(match), match)
    return list(files.values())


def described(files: Iterable[str], field: str) -> list[tuple[str, int, int | str]]:
    """(name, bytes, stamp) of each of the files of `resolve`: equal where they are the same, and have not changed."""
    found: list[tuple[str, int, int | str]] = []
    for path in files:
        if path.startswith("hf:"):
            pieces = open_pieces(path, field)
            found.append((path, pieces.size, pieces.stamp))
        elif path.startswith("tfds:"):
            found.append((path, 0, 0))
        else:
            status = os.stat(path)
            found.append((path, status.st_size, status.st_mtime_ns))
    return found


def _parts(patterns: str) -> Iterator[str]:
    """Patterns with commas between them; the comma of hf:NAME,CONFIG is its own, and so are those of names of files."""
    whole = os.path.expanduser(patterns)
    if os.path.isfile(whole) or ("," in whole and any(_matches(whole))):
        yield patterns
        return
    for part in re.split(r",(?=hf:)", patterns):
        yield from [part] if part.startswith("hf:") else part.split(",")


def _matches(pattern: str) -> Iterator[str]:
    """As glob.glob, but `**` enters each directory once, since links may lead back; files only."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index("**")
    rest = os.sep.join(parts[place + 1 :] or "*")
    beginning, seen = os.sep.join([*parts[:place], ""]), set()
    for root in glob.glob(beginning) if glob.has_magic(beginning) else [beginning]:
        for directory, names, _ in os.walk(root or os.curdir, followlinks=True):
            names[:] = sorted(name for name in names if not name.startswith("."))
            if (real := os.path.realpath(directory)) in seen:
                names.clear()
                continue
            seen.add(real)
            inside = os.path.relpath(directory, root) if root else os.path.normpath(directory)
            where = root if inside == os.curdir else os.path.join(root, inside)
            yield from _matches(os.path.join(glob.escape(where), rest))


def detect_format(path: str) -> str:
    """The format of one file by its name, else by its first bytes. ValueError for a table or markup: no text."""
    if is_name(path):
        return path.partition(":")[0]
    name = plain_name(path)
    if name.endswith((".jsonl", ".json", ".ndjson")):
        return "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith((".csv", ".tsv")):
        raise ValueError(
            f"{path} is called a table, and a corpus is text, JSON lines or Parquet: write the column of texts as JSON "
            "lines, as pandas.read_csv(FILE).to_json(NEW, orient='records', lines=True) does, or say --format=text"
        )
    with open_bytes(path) as file:
        beginning = file.read(64).removeprefix(BOM).lstrip()
    if beginning.startswith(b"<doc "):
        return "wikiextractor"
    if beginning.lower().startswith((b"<mediawiki", b"<?xml", b"<!doctype html", b"<html")):
        raise ValueError(
            f"{path} is XML or HTML, whose tags would be taken as words: extract its text first, as WikiExtractor does "
            "for a dump of Wikipedia and trafilatura for web pages, or say --format=text"
        )
    return "jsonl" if re.match(rb'\{\s*"', beginning) else "text"


def plan_extents(files: Sequence[str], reading: Reading, extent_bytes: int) -> list[list[Extent]]:
    """Files as groups of extents of about `extent_bytes` bytes of input each, in order."""
    extents = [extent for path in files for extent in _extents(path, reading, extent_bytes)]
    total = sum(extent.size for extent in extents)
    target = total / max(round(total / extent_bytes), 1)  # so that the last is not a small rest
    groups: dict[int, list[Extent]] = {}
    before = 0
    for extent in extents:
        middle = before + extent.size / 2  # an extent goes where its middle lies
        groups.setdefault(int(middle / target) if target else 0, []).append(extent)
        before += extent.size
    return list(groups.values())


def _extents(path: str, reading: Reading, extent_bytes: int) -> Iterator[Extent]:
    form = detect_format(path) if reading.format == "auto" or is_name(path) else reading.format
    if is_name(path):
        pieces = open_pieces(path, reading.field)
        mean = max(pieces.size // max(pieces.count, 1), 1)
        step = max(extent_bytes // mean, 1)
        for start in range(0, pieces.count, step):
            end = min(start + step, pieces.count)
            yield Extent(path, form, start, end, (end - start) * mean)
        return
    if form in ("tfds", "hf"):
        raise ValueError(f"{path}: format {form} reads data sets by name, {form}:NAME")
    size = os.path.getsize(path)
    if form == "parquet":
        groups = open_parquet(path).num_row_groups
        for group in range(groups):
            yield Extent(path, form, group, group + 1, size // groups)
    elif form == "prose" or is_compressed(path):
        yield Extent(path, form, 0, -1, size)
    else:
        step = -(-size // max(round(size / extent_bytes), 1)) or 1
        for start in range(0, max(size, 1), step):
            end = min(start + step, size)
            yield Extent(path, form, start, -1 if end == size else end, end - start)


def open_parquet(path: str) -> Any:
    """The `pyarrow.parquet.ParquetFile`; ValueError where it is none."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error
