"""Text files of any usual form -> documents, each a list of sentences.

In: patterns (wildcards expanded here, not by the shell) and a format. Out: `Document`s. Formats:

    text           a sentence a line, a blank line between documents (the original's input)
    prose          raw paragraphs, a document a file
    blocks         raw paragraphs, a blank line between documents
    jsonl          an object a line; its `field` holds prose, or a list of sentences
    parquet        a record a row; column `field`
    wikiextractor  <doc id= url= title=> ... </doc>
    tfds           tfds:name/config:split, any text data set prepared on disk; feature `field`

All but Parquet and TFDS are read plain, `.gz`, `.bz2`, `.xz` or `.zst`. Text is UTF-8 whatever the
locale says.

Big files are read in extents (`plan_extents`), so that processes and machines can share them: a
document belongs to the extent in which the line that opens it begins. The plan depends only on the
files, never on the number of readers.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bertjax.data.opening import is_compressed, open_bytes, open_lines, plain_name
from bertjax.data.sentences import split_sentences

FORMATS = ("text", "prose", "blocks", "jsonl", "parquet", "wikiextractor", "tfds")
BOM = b"\xef\xbb\xbf"
MAX_SENTENCES = 100_000  # of one document; a longer one goes on as the next document


class Document(NamedTuple):
    sentences: list[str]
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
      format: one of FORMATS, or 'auto': by name (.jsonl, .json, .parquet, tfds:), then by the first
        bytes ('<doc ', '{'), else 'text'.
      field: the text's field (jsonl), column (parquet) or feature (tfds).
      language: ISO 639-1 code for the sentence segmentation of prose.
      segment: split lines of 'text' into sentences too (True), or take the lines and strings of
        every other format as sentences (False). None: as the format says.
      errors: 'strict' refuses bytes that are not UTF-8; 'replace' reads U+FFFD and counts the line.
      data_dir: where TFDS data sets are prepared; None is TFDS's own default.
    """

    format: str = "auto"
    field: str = "text"
    language: str = "en"
    segment: bool | None = None
    errors: str = "strict"
    data_dir: str | None = None

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise ValueError(f"format {self.format!r}: use auto or one of {', '.join(FORMATS)}")
        if self.errors not in ("strict", "replace"):
            raise ValueError(f"errors {self.errors!r}: use strict or replace")


class Extent(NamedTuple):
    """A part of a file: bytes [start, end) of text formats, else records or row groups."""

    path: str
    format: str
    start: int
    end: int  # -1: to the end
    size: int  # bytes, about; what progress is measured in


def resolve(patterns: str | Iterable[str]) -> list[str]:
    """Files that the patterns (also comma-separated) match, sorted within each, each once.

    Raises:
      ValueError: a pattern without a match.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [str(patterns)]
    parts = [part for given in map(str, patterns)
             for part in ([given] if os.path.isfile(given) else given.split(","))]
    files: dict[str, None] = {}
    for pattern in map(str.strip, parts):
        if pattern.startswith("tfds:"):
            matches = [pattern]
        else:
            path = os.path.expanduser(pattern)
            found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
            matches = sorted(f for f in found if os.path.isfile(f))
        if not matches:
            hint = f"; it is a directory, write '{pattern}/*'" if os.path.isdir(path) else ""
            raise ValueError(f"no file matches the input pattern {pattern!r}{hint}")
        files.update(dict.fromkeys(matches))
    return list(files)


def detect_format(path: str) -> str:
    """The format of one file by its name, else by its first bytes."""
    if path.startswith("tfds:"):
        return "tfds"
    name = plain_name(path)
    if name.endswith((".jsonl", ".json", ".ndjson")):
        return "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    with open_bytes(path) as file:
        head = file.read(64).removeprefix(BOM).lstrip()
    if head.startswith(b"<doc "):
        return "wikiextractor"
    return "jsonl" if head.startswith(b'{"') else "text"


def plan_extents(files: Sequence[str], reading: Reading, extent_bytes: int) -> list[list[Extent]]:
    """Files as groups of extents of about `extent_bytes` bytes of input each, in order."""
    extents = list(_extents(files, reading, extent_bytes))
    total = sum(extent.size for extent in extents)
    target = total / max(round(total / extent_bytes), 1)  # so that the last is not a small rest
    groups: list[list[Extent]] = []
    before, placed = 0, -1
    for extent in extents:
        # An extent goes where its middle lies.
        group = int((before + extent.size / 2) / target) if target else 0
        if group > placed:
            groups.append([])
            placed = group
        groups[-1].append(extent)
        before += extent.size
    return groups


def _extents(files: Sequence[str], reading: Reading, extent_bytes: int) -> Iterator[Extent]:
    for path in files:
        form = detect_format(path) if reading.format == "auto" else reading.format
        if form == "tfds":
            yield from _tfds_extents(path, reading, extent_bytes)
            continue
        size = os.path.getsize(path)
        if form == "parquet":
            groups = _parquet(path).num_row_groups
            for group in range(groups):
                yield Extent(path, form, group, group + 1, size // groups)
        elif form == "prose" or is_compressed(path):
            yield Extent(path, form, 0, -1, size)
        else:
            step = -(-size // max(round(size / extent_bytes), 1)) or 1
            for start in range(0, max(size, 1), step):
                end = min(start + step, size)
                yield Extent(path, form, start, -1 if end == size else end, end - start)


def read_documents(
    patterns: str | Iterable[str],
    format: str = "auto",
    counts: dict[str, int] | None = None,
    **reading: Any,
) -> Iterator[Document]:
    """Documents of all files in order; keywords as `Reading`, counts as `read_extent`."""
    options = Reading(format=format, **reading)
    for extents in plan_extents(resolve(patterns), options, 1 << 62):
        for extent in extents:
            yield from read_extent(extent, options, counts)


def read_extent(
    extent: Extent, reading: Reading, counts: dict[str, int] | None = None
) -> Iterator[Document]:
    """Documents of one extent; those without text are left out.

    `counts` receives what was noticed: 'empty_documents', 'long_documents_cut',
    'undecodable_lines'.

    Raises:
      ValueError: not UTF-8, not JSON, a record without the field; with file and line.
    """
    counts = {} if counts is None else counts
    readers = {"text": _read_blocks, "blocks": _read_blocks, "prose": _read_prose,
               "jsonl": _read_jsonl, "wikiextractor": _read_wikiextractor,
               "parquet": _read_parquet, "tfds": _read_tfds}
    segment = extent.format != "text" if reading.segment is None else reading.segment

    for name, paragraphs in readers[extent.format](extent, reading, counts):
        sentences: list[str] = []
        cut = False
        for paragraph in paragraphs:
            if segment:
                sentences.extend(split_sentences(paragraph, reading.language))
            else:
                sentences.append(paragraph)
            if len(sentences) >= MAX_SENTENCES:
                _count(counts, "long_documents_cut")
                yield Document(sentences, name)
                sentences, cut = [], True
        if sentences:
            yield Document(sentences, name)
        elif not (cut or name == _NO_DOCUMENT):
            _count(counts, "empty_documents")


# Readers: each yields (id, iterable of stripped, non-empty paragraphs) for every document.
_NO_DOCUMENT = "\0"  # the name of what lies between two blank lines in a row
_Raw = Iterator[tuple[str, Iterable[str]]]


def _read_blocks(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    lines = _lines(extent, reading, counts)
    if extent.start:  # its first lines belong to a document that the extent before this one opened
        for offset, line in lines:
            if not line:
                if 0 <= extent.end <= offset:
                    return
                break
        else:
            return
    ended = False
    while not ended:
        paragraphs: list[str] = []
        ended = True
        for offset, line in lines:
            if line:
                paragraphs.append(line)
                if len(paragraphs) >= MAX_SENTENCES:
                    ended = False
                    break
            else:
                ended = 0 <= extent.end <= offset
                break
        yield ("" if paragraphs else _NO_DOCUMENT), paragraphs


def _read_prose(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    lines = _lines(extent, reading, counts)
    yield os.path.basename(extent.path), (line for _, line in lines if line)


def _read_jsonl(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    for offset, line in _lines(extent, reading, counts):
        if 0 <= extent.end <= offset:
            return
        if not line:
            continue
        try:
            record = json.loads(line)
            text = record[reading.field]
            if "\\ud" in line or "\\uD" in line:  # half of a surrogate pair is JSON, but no text
                text = _whole_characters(text, reading, counts)
        except (ValueError, KeyError, TypeError) as error:
            where = _line_number(extent.path, offset)
            if isinstance(error, json.JSONDecodeError):
                problem = (f"not JSON ({error}); each line must hold one object, as `jq -c '.[]'` "
                           "writes the elements of an array")
            elif isinstance(error, UnicodeEncodeError):
                problem = ("an escape \\ud... without its other half is no character; read it with "
                           "errors=replace, which counts such lines")
            else:
                fields = sorted(record) if isinstance(record, dict) else type(record).__name__
                problem = f"no field {reading.field!r} (there is {fields}); set the field's name"
            raise ValueError(f"{extent.path}, line {where}: {problem}") from None
        yield str(record.get("id", "")), _paragraphs(text, extent.path)


def _read_wikiextractor(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    lines = _lines(extent, reading, counts)
    for offset, line in lines:
        if not line.startswith("<doc "):
            continue
        if 0 <= extent.end <= offset:
            return
        title = _attribute(line, "title")
        paragraphs: list[str] = []
        for _, inner in lines:
            if inner.startswith("</doc>"):
                break
            if inner and (paragraphs or inner != title):  # the title stands first, once more
                paragraphs.append(inner)
        yield _attribute(line, "id"), paragraphs


def _read_parquet(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    file = _parquet(extent.path)
    if reading.field not in file.schema_arrow.names:
        raise ValueError(f"{extent.path}: no column {reading.field!r} (there is "
                         f"{file.schema_arrow.names}); set the field's name")
    groups = range(extent.start, file.num_row_groups if extent.end < 0 else extent.end)
    for batch in file.iter_batches(256, row_groups=list(groups), columns=[reading.field]):
        for text in batch.column(0):
            yield "", _paragraphs(text.as_py(), extent.path)


def _read_tfds(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    source = _tfds_source(extent.path, reading)
    for index in range(extent.start, extent.end):
        record = source[index]
        if reading.field not in record:
            raise ValueError(f"{extent.path}: no feature {reading.field!r} (there is "
                             f"{sorted(record)}); set the field's name")
        text = record[reading.field]
        yield "", _paragraphs(text.decode() if isinstance(text, bytes) else text, extent.path)


def _whole_characters(text: Any, reading: Reading, counts: dict[str, int]) -> Any:
    """`text` with U+FFFD for lone surrogates; UnicodeEncodeError when reading strictly."""
    content = json.dumps(text, ensure_ascii=False)
    try:
        content.encode()
    except UnicodeEncodeError:
        if reading.errors == "strict":
            raise
        _count(counts, "undecodable_lines")
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(content)


def _paragraphs(text: str | Sequence[str] | None, path: str) -> list[str]:
    if text is None:
        return []
    if isinstance(text, str):
        text = text.split("\n")
    try:
        return [line for line in map(str.strip, text) if line]
    except TypeError:
        raise ValueError(f"{path}: the text must be a string or a list of strings, "
                         f"this is {text!r:.80}") from None


def _lines(extent: Extent, reading: Reading, counts: dict[str, int]) -> Iterator[tuple[int, str]]:
    """(byte offset, stripped text) of each line that begins at or after the extent's start.

    Does not stop at its end: where the last document ends is for the caller to say.
    """
    with open_lines(extent.path) as file:
        offset = 0
        if extent.start:
            file.seek(extent.start - 1)
            offset = extent.start - 1 + len(file.readline())
        for data in file:
            start, offset = offset, offset + len(data)
            if start == 0:
                data = data.removeprefix(BOM)
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                if reading.errors == "strict":
                    raise ValueError(
                        f"{extent.path}, line {_line_number(extent.path, start)}: byte "
                        f"0x{data[error.start]:02x} at offset {start + error.start} of the file is "
                        f"not valid UTF-8 ({error.reason}). Convert the file to UTF-8, or read it "
                        "with errors=replace, which counts such lines") from None
                line = data.decode("utf-8", "replace")
                _count(counts, "undecodable_lines")
            yield start, line.strip()


def _line_number(path: str, offset: int) -> int:
    with open_lines(path) as file:
        number = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def _attribute(tag: str, name: str) -> str:
    _, _, rest = tag.partition(f' {name}="')
    return rest.partition('"')[0]


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _parquet(path: str) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _tfds_source(path: str, reading: Reading) -> Any:
    parts = path.removeprefix("tfds:").split(":")
    split = parts.pop() if len(parts) > 1 and not parts[-1][:1].isdigit() else "train"
    name = ":".join(parts)  # may end with :version
    try:
        import tensorflow_datasets as tfds

        return tfds.data_source(name, split=split, data_dir=reading.data_dir, download=False)
    except ValueError as error:
        where = reading.data_dir or "TFDS's default data_dir"
        raise ValueError(f"{path}: {error} (looked for in {where})") from error
    except (ImportError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: TFDS cannot read this data set here ({error}). Without TensorFlow it reads "
            "what was prepared as ArrayRecord or Parquet: prepare it with "
            f"tfds.builder({name!r}, file_format='array_record').download_and_prepare(); for "
            "TFRecord files, pip install tensorflow-cpu") from error


def _tfds_extents(path: str, reading: Reading, extent_bytes: int) -> Iterator[Extent]:
    source = _tfds_source(path, reading)
    total = len(source)
    sample = [source[i * max(total // 16, 1)] for i in range(min(total, 16))]
    mean = sum(len(r.get(reading.field) or "") for r in sample) // max(len(sample), 1) + 1
    step = max(extent_bytes // mean, 1)
    for start in range(0, total, step):
        end = min(start + step, total)
        yield Extent(path, "tfds", start, end, (end - start) * mean)
