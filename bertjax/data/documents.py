"""Text files of any usual form -> documents, each a list of sentences.

In: patterns (wildcards expanded here, not by the shell) and a format, one of sources.FORMATS. Out: `Document`s. Files
but for Parquet are read plain, `.gz`, `.bz2`, `.xz` or `.zst`. Text is UTF-8 whatever the locale says. Big files are
read in extents (sources.py), so that processes and machines can share them: a document belongs to the extent in which
the line that opens it begins.
"""

import dataclasses
import itertools
import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bertjax.data.named import open_pieces
from bertjax.data.opening import line_blocks
from bertjax.data.sentences import guess_language, length_of, split_sentences
from bertjax.data.sources import BOM, Extent, Reading, detect_format, open_parquet, plan_extents, resolve

MAX_SENTENCES = 100_000  # of one document; a longer one goes on as the next document
MAX_CHARACTERS = 1 << 24  # likewise
PREVIEWED = 8, 1 << 15  # files, and characters of each, that a preview reads


class Document(NamedTuple):
    sentences: list[str]
    id: str = ""


def read_documents(
    patterns: str | Iterable[str], format: str = "auto", counts: Counter[str] | None = None, **reading: Any
) -> Iterator[Document]:
    """Documents of all files in order; keywords as `Reading`, counts as `read_extent`."""
    files = resolve(patterns)
    options = settled(files, Reading(format=format, **reading))
    for extents in plan_extents(files, options, 1 << 62):
        for extent in extents:
            yield from read_extent(extent, options, counts)


def read_extent(extent: Extent, reading: Reading, counts: Counter[str] | None = None) -> Iterator[Document]:
    """Documents of one extent; those without text are left out.

    `counts` receives what was noticed: 'empty_documents', 'long_documents_cut', 'undecodable_lines', and of
    WikiExtractor's files 'unclosed_documents' (read as far as they go) and 'lines_outside_documents' (left out).

    Raises:
      ValueError: not UTF-8, not JSON, a record without the field, a line beyond `max_line_mb`; with file and line.
    """
    counts = Counter() if counts is None else counts
    segment = extent.format != "text" if reading.segment is None else reading.segment
    language = "en" if reading.language == "auto" else reading.language
    for name, paragraphs in _READERS[extent.format](extent, reading, counts):
        sentences: list[str] = []
        size, cut = 0, False
        for paragraph in paragraphs:
            if segment:
                sentences.extend(split_sentences(paragraph, language))
            else:
                sentences.append(paragraph)
            size += len(paragraph)
            if len(sentences) >= MAX_SENTENCES or size >= MAX_CHARACTERS:
                counts["long_documents_cut"] += 1
                yield Document(sentences, name)
                sentences, size, cut = [], 0, True
        if sentences:
            yield Document(sentences, name)
        elif not cut:
            counts["empty_documents"] += 1


class Preview(NamedTuple):
    """How files will be read, and what their first lines look like."""

    reading: Reading  # with the language that 'auto' became
    formats: dict[str, int]  # format -> number of files
    lines: int  # read for this
    length: float  # of a line, mean
    unit: str  # of it, as of `length_of`
    several: float  # share of the lines that hold several sentences
    tabs: float  # share of the lines that are two columns
    wrapped: float  # share of the lines that end in the middle of a sentence

    @property
    def warnings(self) -> list[str]:
        """About text that no way of reading makes right."""
        found = f"{self.wrapped:.0%} of the lines end amid a sentence, and none goes on in the next line"
        return [f"warning: {found}. Join the lines of each paragraph"] if self.wrapped > 0.3 else []


def preview(files: Sequence[str], reading: Reading) -> Preview:
    """Reads the first lines of some of the files; errors as of `read_extent`."""
    formats = Counter(detect_format(path) if reading.format == "auto" else reading.format for path in files)
    lines: list[str] = []
    most_files, most_characters = PREVIEWED
    for path in files[:: -(-len(files) // most_files)]:
        size = 0
        for line in _paragraphs_of_file(path, reading):
            lines.append(line)
            size += len(line)
            if size >= most_characters:
                break
    language = guess_language("\n".join(lines)) if reading.language == "auto" else reading.language
    count, (length, unit) = max(len(lines), 1), length_of(lines)
    return Preview(
        reading=dataclasses.replace(reading, language=language),
        formats=dict(formats),
        lines=len(lines),
        length=length / count,
        unit=unit,
        several=sum(len(split_sentences(line[:2000], language)) > 1 for line in lines) / count,
        tabs=sum(line.count("\t") == 1 for line in lines) / count,
        wrapped=sum(line[-1].isalpha() and after[0].islower() for line, after in itertools.pairwise(lines)) / count,
    )


def _paragraphs_of_file(path: str, reading: Reading) -> Iterator[str]:
    for extent in plan_extents([path], reading, 1 << 62)[0]:
        for _, paragraphs in _READERS[extent.format](extent, reading, Counter()):
            yield from paragraphs


def settled(files: Sequence[str], reading: Reading) -> Reading:
    """The reading with the language that 'auto' means for these files."""
    return preview(files, reading).reading if reading.language == "auto" else reading


# Readers: each yields (id, iterable of stripped, non-empty paragraphs) for every document. The paragraphs of one must
# be taken before the next document is.
_Raw = Iterator[tuple[str, Iterable[str]]]
_line_of = operator.itemgetter(1)  # of (where, line)


def _read_blocks(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    lines = _lines(extent, reading, counts)
    if extent.start:  # its first lines belong to a document that the extent before this one opened
        lines = itertools.dropwhile(_line_of, lines)
    # A blank line opens the document after it, which is of the next extent if that line is.
    lines = itertools.takewhile(lambda found: found[1] or not 0 <= extent.end <= found[0], lines)
    for is_text, group in itertools.groupby(lines, lambda found: bool(found[1])):
        if is_text:
            yield "", map(_line_of, group)


def _read_prose(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    yield os.path.basename(extent.path), (line for _, line in _lines(extent, reading, counts) if line)


def _read_jsonl(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    for offset, line in _lines(extent, reading, counts):
        if 0 <= extent.end <= offset:
            return
        if not line:
            continue

        def wrong(problem: str, offset: int = offset) -> ValueError:
            return ValueError(f"{extent.path}, line {_line_number(extent.path, offset)}: {problem}")

        try:
            record = json.loads(line)
            texts = _picked(record, reading.field)
            if "\\ud" in line or "\\uD" in line:  # half of a surrogate pair is JSON, but no text
                texts = _whole_characters(texts, reading, counts)
        except RecursionError:
            raise wrong("the JSON is nested too deep") from None
        except json.JSONDecodeError as error:
            raise wrong(
                f"not JSON ({error}); each line must hold one object, as `jq -c '.[]'` writes the elements of an array"
            ) from None
        except UnicodeEncodeError:
            raise wrong(
                "an escape \\ud... without its other half is not a character; read it with --errors=replace, which "
                "counts such lines"
            ) from None
        except ValueError as error:
            raise wrong(f"not readable as JSON ({error})") from None
        except (KeyError, TypeError):
            raise wrong(_no_field(reading.field, record)) from None
        yield str(record.get("id", "")), _paragraphs(texts, wrong)


def _read_wikiextractor(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    for _, group in itertools.groupby(_tagged_lines(extent, reading, counts), operator.itemgetter(0)):
        lines = map(_line_of, group)
        tag = next(lines)
        title = _attribute(tag, "title")  # stands first, once more
        yield _attribute(tag, "id"), itertools.dropwhile(lambda line, title=title: line == title, lines)


def _tagged_lines(extent: Extent, reading: Reading, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    """(number of the document, line) of WikiExtractor's files, from the tag that opens a document on."""
    number, is_open = 0, False
    for offset, line in _lines(extent, reading, counts):
        if line.startswith("<doc "):
            if is_open:
                counts["unclosed_documents"] += 1
            if 0 <= extent.end <= offset:
                return
            number, is_open = number + 1, True
            yield number, line
        elif is_open and line.startswith("</doc>"):
            is_open = False
        elif is_open and line:
            yield number, line
        elif line and (number or not extent.start):  # before the first tag it is of the extent before this one
            counts["lines_outside_documents"] += 1
    if is_open:
        counts["unclosed_documents"] += 1


def _read_parquet(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    def wrong(problem: str) -> ValueError:
        return ValueError(f"{extent.path}: {problem}")

    file = open_parquet(extent.path)
    columns = {name: name for name in file.schema_arrow.names}
    try:
        wanted = _picked(columns, reading.field)
    except KeyError:
        raise wrong(_no_field(reading.field, columns)) from None
    groups = range(extent.start, file.num_row_groups if extent.end < 0 else extent.end)
    try:
        for batch in file.iter_batches(256, row_groups=list(groups), columns=wanted):
            for row in batch.to_pylist():
                yield "", _paragraphs([row[name] for name in wanted], wrong)
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{extent.path} is not a readable Parquet file: {error}") from error


def _read_named(extent: Extent, reading: Reading, counts: Counter[str]) -> _Raw:
    pieces = open_pieces(extent.path, reading.field)
    for where, row in pieces.rows(extent.start, extent.end):

        def wrong(problem: str, where: str = where) -> ValueError:
            return ValueError(f"{extent.path}, {where}: {problem}")

        try:
            texts = _picked(row, reading.field)
        except KeyError:
            raise wrong(_no_field(reading.field, row)) from None
        yield str(row.get("id", "")), _paragraphs(texts, wrong)


_READERS = {
    "text": _read_blocks,
    "blocks": _read_blocks,
    "prose": _read_prose,
    "jsonl": _read_jsonl,
    "wikiextractor": _read_wikiextractor,
    "parquet": _read_parquet,
    "tfds": _read_named,
    "hf": _read_named,
}


def _whole_characters(text: Any, reading: Reading, counts: Counter[str]) -> Any:
    """`text` with U+FFFD for lone surrogates; UnicodeEncodeError when reading strictly."""
    content = json.dumps(text, ensure_ascii=False)
    try:
        content.encode()
    except UnicodeEncodeError:
        if reading.errors == "strict":
            raise
        counts["undecodable_lines"] += 1
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(content)


def _picked(record: Any, field: str) -> list[Any]:
    """The value of a record's field, or of several given with commas; KeyError or TypeError if it has none."""
    names = [field] if field in record else field.split(",")
    return [record[name.strip()] for name in names]


def _no_field(field: str, record: Any) -> str:
    if not isinstance(record, dict):
        return "no JSON object; each line must hold one, as `jq -c '.[]'` writes the elements of an array"
    return f"no field {field!r} (there is {sorted(record)}); --field names another"


def _paragraphs(texts: Iterable[str | bytes | Sequence[str] | None], wrong: Callable[[str], ValueError]) -> list[str]:
    """Stripped, without empty ones; None is not a text. Raises `wrong` for what is neither."""
    found: list[str] = []
    for text in texts:
        if isinstance(text, bytes):  # as TFDS has it, and Parquet of programs that do not mark text as such
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise wrong(f"not valid UTF-8 ({error})") from None
        lines = text.split("\n") if isinstance(text, str) else [] if text is None else text
        if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
            raise wrong(f"the text must be a string or a list of strings, this is {text!r:.80}")
        found += [line for line in map(str.strip, lines) if line]
    return found


def _lines(extent: Extent, reading: Reading, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    """(byte offset, stripped text) of each line that begins at or after the extent's start.

    Does not stop at its end: where the last document ends is for the caller to say.
    """
    path = extent.path
    for offset, lines in _raw_lines(path, max(extent.start - 1, 0), reading.max_line_mb << 20):
        for data in lines:
            start = offset
            offset += len(data) + 1
            if start < extent.start:
                continue
            if start == 0:
                data = data.removeprefix(BOM)
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                if reading.errors == "strict":
                    raise ValueError(
                        f"{path}, line {_line_number(path, start)}: byte 0x{data[error.start]:02x} at offset "
                        f"{start + error.start} of the file is not valid UTF-8 ({error.reason}). Convert the file to "
                        "UTF-8, or read it with --errors=replace, which counts such lines"
                    ) from None
                counts["undecodable_lines"] += 1
                line = data.decode("utf-8", "replace")
            yield start, line.strip()


def _raw_lines(path: str, offset: int, longest: int) -> Iterator[tuple[int, list[bytes]]]:
    """(byte offset, lines from there on without their ends), from `offset` on: one byte before an extent, so that a
    line that begins there is told from a rest.

    ValueError at a line of more than `longest` bytes, of which no more is held.
    """
    rest, size = [], 0  # of a line that has not ended yet
    for block in line_blocks(path, offset):
        lines = block.split(b"\n")
        size += len(lines[0])
        if size > longest:
            raise ValueError(
                f"{path}, line {_line_number(path, offset)}: longer than {longest >> 20} MiB, and a line is held in "
                "memory; is a line feed missing, or is this no text? Cut the line, or raise --max_line_mb"
            )
        rest.append(lines[0])
        if len(lines) > 1:
            lines[0] = b"".join(rest)
            rest = [lines.pop()]
            size = len(rest[0])
            yield offset, lines
            offset += sum(map(len, lines)) + len(lines)
    if size:
        yield offset, [b"".join(rest)]


def _line_number(path: str, offset: int) -> int:
    number = 1
    for block in line_blocks(path):
        number += block.count(b"\n", 0, max(offset, 0))
        offset -= len(block)
        if offset <= 0:
            break
    return number


def _attribute(tag: str, name: str) -> str:
    _, _, rest = tag.partition(f' {name}="')
    return rest.partition('"')[0]
