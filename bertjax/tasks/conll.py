"""Words with their tags, as in CoNLL-2003: files in columns or JSON lines to sentences.

In: a word a line, the tag in the last column, a blank line between sentences and -DOCSTART- between documents; or JSON
lines, {"tokens": [...], "tags": [...]} a sentence. Out: `Sentence`s. Also the schemes by which tags write entities, and
the way from one to another.
"""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bertjax.data.named import is_name
from bertjax.data.opening import plain_name, read_lines
from bertjax.tasks import metrics
from bertjax.tasks.tables import read_objects

_WORDS = ("tokens", "words")  # keys of JSON lines
_TAGS = ("tags", "ner_tags", "pos_tags", "labels")
# A place in a sentence or document: 1, 001, 2-1, 3.1, 1:4, #7.
_PLACE = re.compile(r"\W?\d+(?:[-.:_]\d+)*[.:)]?", re.ASCII)
# In Universal Dependencies (# sent_id = 3), MultiCoNER (# id 5f\tdomain=en) and GermEval (#\thttp://...).
_COMMENT = re.compile(r"#\s*(?:[\w.:-]+ = |(?:newdoc|newpar)\b|id \S+\tdomain=|https?://)")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, their tags (None in an untagged file), and its document."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    where: str  # "file:line" of the first word


def read_tagged(path: pathlib.Path, prefer: Sequence[str] = ()) -> list[Sentence]:
    """Sentences of a file in columns, of .jsonl, or of a data set by name; `prefer`: of several kinds of tags."""
    name = plain_name(path.name)
    if name.endswith(".jsonl") or is_name(path):
        return _read_json_sentences(path, prefer)
    if name.endswith((".json", ".ndjson", ".csv", ".parquet", ".xls", ".xlsx")):
        raise ValueError(
            f"{path}: words with tags are a file in columns (.conll), or .jsonl with "
            '{"tokens": [...], "tags": [...]} a line; save it as one of these'
        )
    return read_conll(path)


def _read_json_sentences(path: pathlib.Path, prefer: Sequence[str]) -> list[Sentence]:
    sentences: list[Sentence] = []
    for number, row in read_objects(path):
        where = f"{path}:{number}"
        found = [[key for key in keys if row.get(key) is not None] for keys in (_WORDS, _TAGS)]
        if len(found[1]) > 1:
            found[1] = [key for key in prefer if key in found[1]][:1] or found[1]
        if len(found[0]) != 1 or len(found[1]) > 1:
            raise ValueError(
                f"{where}: expected one key of {', '.join(_WORDS)} and at most one of "
                f"{', '.join(_TAGS)}; found {', '.join(row)}"
            )
        words, tags = row[found[0][0]], row[found[1][0]] if found[1] else None
        for values, what, remark in ((words, "words", ""), (tags, "tags", " (names of tags, not their numbers)")):
            texts = isinstance(values, list) and all(isinstance(value, str) and value for value in values)
            if values is not None and not texts:
                raise ValueError(f"{where}: the {what} are {str(values):.80}, not a list of text{remark}")
        if tags is not None and len(tags) != len(words):
            raise ValueError(f"{where}: {len(words)} words, but {len(tags)} tags")
        if not words:
            continue
        sentences.append(Sentence(tuple(words), None if tags is None else tuple(tags), len(sentences), where))
        if (tags is None) != (sentences[0].tags is None):
            has = "without" if tags is None else "with"
            raise ValueError(f"{where}: a sentence {has} tags, unlike that of {sentences[0].where}")
    return sentences


def read_conll(path: pathlib.Path) -> list[Sentence]:
    """Sentences of a file in columns: word first, tag last, separated by tabs or by blanks; comments are left out.

    Raises ValueError with file and line for a line of another width, and for a first column that holds numbers or names
    of places where another one holds words.
    """
    blocks: list[tuple[int, int, list[list[str]]]] = []  # document, first line, cells of each word
    document, width, first, open_block = 0, 0, 0, False
    for number, line in enumerate(read_lines(path), 1):
        marks_document = line.startswith("-DOCSTART-")
        if _COMMENT.match(line):
            continue
        if marks_document or not line.strip(" \t"):
            document += marks_document
            open_block = False
            continue
        cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        if not width:
            width, first = len(cells), number
        if len(cells) != width or not cells[0].strip(" "):
            comment = any(row[0].startswith("#") for row in (cells, *(blocks[0][2][:1] if blocks else ())))
            raise ValueError(
                f"{path}:{number}: expected {width} columns, as on line {first}, a word first; "
                f"found {len(cells)}: {line!r:.200}" + comment * " (delete lines that are comments)"
            )
        if width > 1 and not cells[-1].strip():
            raise ValueError(f"{path}:{number}: the last column, the tag, is empty: {line!r:.200}")
        if not open_block:
            blocks.append((document, number, []))
            open_block = True
        blocks[-1][2].append(cells)
    sentences = []
    for number, (place, line, cells) in enumerate(blocks):
        columns = list(zip(*cells, strict=True))
        tags = tuple(map(str.strip, columns[-1])) if width > 1 else None
        # Without a mark between documents nothing says which sentences belong together.
        sentences.append(Sentence(columns[0], tags, place if document else number, f"{path}:{line}"))
    every = [cells for _, _, lines in blocks for cells in lines]
    _check_first_column(path, sentences, [set(column) for column in zip(*every, strict=True)])
    return sentences


def _check_first_column(path: pathlib.Path, sentences: Sequence[Sentence], columns: Sequence[set[str]]) -> None:
    """Raises ValueError if the first column numbers the words or names their document, instead of holding the words.

    Beside a column of words numbers are not words; alone with the tags, only if they count.
    """
    numbers = bool(columns) and all(map(_PLACE.fullmatch, columns[0]))
    beside = [seen for seen in columns[1:-1] if any(any(c.isalpha() for c in cell) for cell in seen)]
    counts = max((len(s.words) for s in sentences), default=0) > 1 and all(map(_is_count, sentences))
    different = any(len(seen) > 2 for seen in columns[1:-1])
    same = different and len(columns[0]) == 1 and len(sentences) > 1
    if counts or (numbers and beside) or same:
        holds = "is the same in every line" if same else "numbers the words of a sentence"
        raise ValueError(
            f"{path}: its first column {holds}, but must hold the words: leave it out, as "
            "`cut -f2-` does (`cut -d' ' -f2-` where blanks separate them)"
        )


def _is_count(sentence: Sentence) -> bool:
    """Whether the words are numbers that go up by one."""
    first = sentence.words[0]
    if not (first.isascii() and first.isdecimal() and len(first) < 10):
        return False
    return all(word == str(place) for place, word in enumerate(sentence.words, int(first)))


def in_columns(*columns: Sequence[str] | None) -> str:
    """The lines of a sentence in columns, and the blank one after it. White space that would end a cell is a blank."""
    cells = zip(*(column for column in columns if column), strict=True)
    return "".join("\t".join(re.sub(r"[\t\n\r]", " ", cell) for cell in line) + "\n" for line in cells) + "\n"


def check_tags(sentences: Sequence[Sentence]) -> None:
    """Raises ValueError, with file and line, for a tag that is not an entity tag."""
    for sentence in sentences:
        for tag in sentence.tags or ():
            try:
                metrics.split_tag(tag)
            except ValueError as error:
                raise ValueError(
                    f"{sentence.where}: in the sentence from this line on, {error} (tags that are "
                    "no entities: configs/tag.py:tokens)"
                ) from None


def detect_scheme(tags: Sequence[Sequence[str]]) -> str:
    """BIOES if there are E- or S- tags, IOB1 if an I- tag opens an entity, else IOB2."""
    found = "IOB2"
    for sentence in tags:
        before = ("O", "_")
        for tag in sentence:
            current = metrics.split_tag(tag)
            if current[0] in "ES":
                return "BIOES"
            if current[0] == "I" and (before[0] == "O" or before[1] != current[1]):
                found = "IOB1"
            before = current
    return found


def convert_tags(tags: Sequence[str], scheme: str) -> tuple[str, ...]:
    """The same entities, by conlleval's reading, written in another scheme."""
    converted = ["O"] * len(tags)
    previous: metrics.Entity | None = None
    for entity in metrics.lenient_entities(tags):
        kind, first, end = entity
        for i in range(first, end):
            converted[i] = f"I-{kind}"
        touches = previous is not None and previous[2] == first and previous[0] == kind
        if scheme != "IOB1" or touches:
            converted[first] = f"B-{kind}"
        if scheme == "BIOES":
            converted[end - 1] = f"S-{kind}" if end - first == 1 else f"E-{kind}"
        previous = entity
    return tuple(converted)
