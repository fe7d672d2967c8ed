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

Big files are read in extents (sources.py), so that processes and machines can share them: a
document belongs to the extent in which the line that opens it begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bertjax.data.opening import open_lines
from bertjax.data.sentences import split_sentences
from bertjax.data.sources import (
    BOM,
    Extent,
    Reading,
    open_parquet,
    open_tfds,
    plan_extents,
    resolve,
)

MAX_SENTENCES = 100_000  # of one document; a longer one goes on as the next document


class Document(NamedTuple):
    sentences: list[str]
    id: str = ""


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

        def where(offset: int = offset) -> str:
            return f"{extent.path}, line {_line_number(extent.path, offset)}"

        try:
            record = json.loads(line)
            text = record[reading.field]
            if "\\ud" in line or "\\uD" in line:  # half of a surrogate pair is JSON, but no text
                text = _whole_characters(text, reading, counts)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, json.JSONDecodeError):
                problem = (f"not JSON ({error}); each line must hold one object, as `jq -c '.[]'` "
                           "writes the elements of an array")
            elif isinstance(error, UnicodeEncodeError):
                problem = ("an escape \\ud... without its other half is no character; read it with "
                           "errors=replace, which counts such lines")
            else:
                fields = sorted(record) if isinstance(record, dict) else type(record).__name__
                problem = f"no field {reading.field!r} (there is {fields}); set the field's name"
            raise ValueError(f"{where()}: {problem}") from None
        yield str(record.get("id", "")), _paragraphs(text, where)


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
    file = open_parquet(extent.path)
    if reading.field not in file.schema_arrow.names:
        raise ValueError(f"{extent.path}: no column {reading.field!r} (there is "
                         f"{file.schema_arrow.names}); set the field's name")
    groups = range(extent.start, file.num_row_groups if extent.end < 0 else extent.end)
    for batch in file.iter_batches(256, row_groups=list(groups), columns=[reading.field]):
        for text in batch.column(0):
            yield "", _paragraphs(text.as_py(), lambda: extent.path)


def _read_tfds(extent: Extent, reading: Reading, counts: dict[str, int]) -> _Raw:
    source = open_tfds(extent.path, reading)
    for index in range(extent.start, extent.end):
        record = source[index]
        if reading.field not in record:
            raise ValueError(f"{extent.path}: no feature {reading.field!r} (there is "
                             f"{sorted(record)}); set the field's name")
        text = record[reading.field]
        yield "", _paragraphs(text.decode() if isinstance(text, bytes) else text,
                              lambda: extent.path)


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


def _paragraphs(text: str | Sequence[str] | None, where: Callable[[], str]) -> list[str]:
    """Stripped, without empty ones; None is no text. ValueError for what is neither, with `where`.
    """
    lines = text.split("\n") if isinstance(text, str) else [] if text is None else text
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{where()}: the text must be a string or a list of strings, this is "
                         f"{text!r:.80}")
    return [line for line in map(str.strip, lines) if line]


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
