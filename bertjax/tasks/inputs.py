"""Files of questions for a model, and of its answers, for tools/predict.py.

In: a file of lines, a table, CoNLL columns, a SQuAD file or a data set by name, read by the same readers as training
data, and what the model remembers of its task. Out: `Inputs`; then answers in a file of the same form, or of the form
that the suffix of the output names.
"""

import csv
import itertools
import json
import logging
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from bertjax.data.named import is_name
from bertjax.data.opening import plain_name, read_lines
from bertjax.tasks.conll import Sentence, in_columns, read_tagged
from bertjax.tasks.make import ASKED, Remembered
from bertjax.tasks.squad import SquadTask
from bertjax.tasks.tables import TableWriter, check_tsv, read_table

log = logging.getLogger(__name__)
Input = str | tuple[str, ...]

COLUMNS = {
    "fill-mask": ("text",),
    "classify": ("text",),
    "qa": ("question", "context"),
    "next-sentence": ("first", "second"),
}
# Columns of the answers in a table.
_ADDED = {
    "classify": ("prediction", "probability", "probabilities"),
    "ner": ("prediction",),
    "next-sentence": ("is_next",),
    "fill-mask": ("prediction", "masks"),
    "qa": ("prediction", "start", "end", "score"),
}
_TABLES = (".csv", ".tsv", ".jsonl")
_OTHER = tuple(".json .ndjson .parquet .arrow .xls .xlsx .ods .pdf .docx .html .xml .zip .npz .pkl".split())
_CONLL = (".conll", ".tsv", ".bio", ".iob", ".iob2", ".bioes", ".tags")


@dataclass(frozen=True)
class Inputs:
    """What is asked, in file order.

    `texts` holds plain lines, or tuples: the texts of a row, the words of a sentence, or of a document where the model
    was fine-tuned on documents; then `units` are the sentences of each. `lines` [n] says where each
    stands, `kind` (lines, csv, tsv, jsonl, conll, json) what the file is; `rows` are those of a table, `ids` those of a
    file that names its questions.
    """

    texts: list[Input]
    lines: list[int]
    kind: str = "lines"
    columns: tuple[str, ...] = ()
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    units: list[list[Sentence]] = field(default_factory=list)


def read_inputs(
    file: str,
    task: str,
    memory: Remembered,
    columns: str | None = None,
    labels: Sequence[str] = (),
    as_many: bool = True,
) -> Inputs:
    """The inputs of a file for `task`, a name of COLUMNS or 'ner'.

    Args:
      memory: of the model: columns and files of its task.
      columns: names of the text columns of a table, with commas, in place of the remembered ones.
      labels: of the model's head, by which lines that are columns of words and tags are known.
      as_many: whether a line must have as many texts as those that the model was fine-tuned on.

    Raises ValueError with file and line for what does not fit, and for columns of a file that is no table.
    """
    suffix = ".jsonl" if is_name(file) else pathlib.PurePath(plain_name(file)).suffix  # rows by the names of columns
    memory = memory if ASKED.get(memory.task) == task else Remembered()
    if task == "ner":
        found = _read_words(file, suffix, memory, labels)
    else:
        found = _read_texts(file, suffix, task, memory, columns, as_many)
    if columns and not found.columns:
        raise ValueError(f"--columns={columns} has no effect: {file} is no table with a header of these names")
    if not found.texts:
        log.warning("%s holds no inputs", file)
    return found


def _read_words(file: str, suffix: str, memory: Remembered, labels: Sequence[str]) -> Inputs:
    """Sentences in columns or JSON lines, or text of a sentence a line."""
    path = pathlib.Path(file).expanduser()
    own = {pathlib.PurePath(plain_name(str(f))).suffix for f in dict(memory.options.get("files") or {}).values()}
    if suffix in (*_CONLL, ".jsonl") or suffix in own - {".txt", "", ".csv"}:
        return _sentences(path, memory)
    if suffix in (*_OTHER, ".csv"):
        raise ValueError(f"{file}: cannot be read for ner; save it as .conll, .jsonl or .txt")
    lines = _lines(file)
    words = [line.split() for line in lines if line.strip()]
    if len(words) > 1 and all(len(cells) > 1 and cells[-1] in labels for cells in words):
        return _sentences(path, memory)
    return _of_lines(lines)


def _read_texts(file: str, suffix: str, task: str, memory: Remembered, columns: str | None, as_many: bool) -> Inputs:
    """A table, a SQuAD file, or lines of one text or of several with tabs between them."""
    path = pathlib.Path(file).expanduser()
    if task == "qa" and suffix == ".json":
        return _squad(path)
    if suffix in _OTHER:
        raise ValueError(f"{file}: cannot be read for {task}; save it as .csv, .tsv, .jsonl or .txt")
    if suffix in _TABLES:
        return _table(path, suffix[1:], task, memory, columns)
    lines = _lines(file)
    first = lines[0].strip() if lines else ""
    wanted = _given(columns) or _remembered(task, memory)
    if wanted and set(wanted) <= {cell.strip() for cell in first.split("\t")}:
        return _table(path, "tsv", task, memory, columns)
    if wanted and "," in first and set(wanted) <= {cell.strip() for cell in next(csv.reader([first]))}:
        raise ValueError(f"{file}:1: looks like the header of a CSV table; call the file .csv")
    _check_parts(file, task, lines, len(wanted) if wanted and as_many else None)
    if task == "qa":  # an editor may have cut off the tab before an empty context
        lines = [line if "\t" in line else f"{line}\t" for line in lines]
    return _of_lines(lines)


def _lines(file: str) -> list[str]:
    """The lines of a file, without blank ones at its end. Raises ValueError for JSON lines."""
    lines = read_lines(file)
    while lines and not lines[-1].strip():
        lines.pop()
    first = lines[0].strip() if lines else ""
    if first[:1] == "{" and first[-1:] == "}":
        raise ValueError(f"{file}:1: looks like JSON lines; call the file .jsonl")
    return lines


def _of_lines(lines: Sequence[str]) -> Inputs:
    return Inputs(list(lines), [*range(1, len(lines) + 1)])


def read_texts(file: str, columns: str | None = None, memory: Remembered = Remembered()) -> list[Input]:  # noqa: B008
    """Texts and pairs, (first, second), of a file of lines or of a table; errors as `read_inputs`.

    A table is read by `columns`, which may be any, or as the model of `memory` was fine-tuned.
    """
    inputs = read_inputs(file, "classify", Remembered() if columns else memory, columns, as_many=False)
    if inputs.kind != "lines":
        return [texts[0] if len(texts) == 1 else texts for texts in inputs.texts]
    return [tuple(line.split("\t")) if "\t" in line else line for line in read_lines(file)]


def given_inputs(texts: list[str], task: str, memory: Remembered) -> Inputs:
    """The inputs of a command line; errors as `read_inputs`, and for what is not UTF-8."""
    if strange := [text for text in texts if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text)]:
        raise ValueError(
            f"--text={ascii(strange[0]):.80} is not UTF-8; give it in a file that is (--file), or in UTF-8"
        )
    wanted = _remembered(task, memory)
    _check_parts("--text", task, texts, len(wanted) if wanted else None)
    return _of_lines(texts)


def _remembered(task: str, memory: Remembered) -> tuple[str, ...] | None:
    """The columns of the texts that a model was fine-tuned on, if this is its task."""
    return memory.columns()[0] if task in COLUMNS and ASKED.get(memory.task) == task else None


def _check_parts(file: str, task: str, lines: Sequence[str], wanted: int | None) -> None:
    """Raises ValueError for lines with another number of texts than the task or the model takes."""
    counts = [line.count("\t") + 1 for line in lines]
    if task == "classify":
        fits = {wanted} if wanted else {1, 2}
        takes = f"{wanted or '1 or 2'} text{'s' * (wanted != 1)}"
    elif task in ("next-sentence", "qa"):
        # Where one line has a context, those without a tab have an empty one.
        fits = set(counts) - {1} | ({1} if task == "qa" and max(counts, default=1) > 1 else set())
        takes = "two texts separated by a tab"
    else:
        return
    for number, (line, count) in enumerate(zip(lines, counts, strict=True), 1):
        if count not in fits:
            raise ValueError(
                f"{file}:{number}: {task} takes {takes} a line, found {count}: {line!r:.80} (a table with a header is "
                "called .csv or .tsv, and read by its columns)"
            )


def _given(columns: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in next(csv.reader([columns]))) if columns else None


def _table(path: pathlib.Path, kind: str, task: str, memory: Remembered, columns: str | None) -> Inputs:
    remembered, headerless = memory.columns(is_name(path))
    wanted = _given(columns) or remembered or COLUMNS[task]
    if remembered and len(wanted) != len(remembered):
        raise ValueError(
            f"--columns={columns} names {len(wanted)} columns; the model was "
            f"fine-tuned on {len(remembered)} ({', '.join(remembered)})"
        )
    if len(wanted) not in ((1, 2) if task == "classify" else (len(COLUMNS[task]),)):
        raise ValueError(f"--columns={columns}: {task} takes {len(COLUMNS[task])}")
    if kind == "tsv" and headerless is None and not columns and len(COLUMNS[task]) == 2:
        headerless = wanted  # two columns are a question and its context
    table = read_table(
        path,
        wanted,
        headerless=headerless if set(wanted) <= set(headerless or ()) else None,
        remedy=". --columns=NAME, or NAME,NAME for a pair, says which hold the texts",
        own=memory.task in (None, "table"),
    )
    texts: list[Input] = [values for _, _, values in table.texts(wanted)]
    key = next(iter(table.keys), None)
    rows = [row for _, row in table.rows]
    ids = [row.get(key) for row in rows] if key else []
    return Inputs(texts, [line for line, _ in table.rows], kind, table.columns, rows, ids)


def _sentences(path: pathlib.Path, memory: Remembered) -> Inputs:
    sentences = read_tagged(path, ("tags", "ner_tags", "pos_tags"))
    alone = not memory.task or memory.options.get("context") == "sentence"
    units = [list(unit) for _, unit in itertools.groupby(sentences, key=id if alone else lambda s: s.document)]
    words = [tuple(word for sentence in unit for word in sentence.words) for unit in units]
    lines = [int(unit[0].where.rpartition(":")[2]) for unit in units]
    kind = "jsonl" if is_name(path) or plain_name(path.name).endswith(".jsonl") else "conll"
    return Inputs(words, lines, kind, units=units)


def _squad(path: pathlib.Path) -> Inputs:
    questions = SquadTask(path.parent, "2.0", {"file": path.name}).read("file").records
    texts: list[Input] = [(q.question, q.context) for q in questions]
    return Inputs(texts, [1] * len(texts), "json", ids=[q.id for q in questions])


class Output:
    """Writes answers in the form of the suffix of `out`, or of the inputs where there is none."""

    def __init__(
        self,
        stream: IO[str],
        out: str | None,
        task: str,
        inputs: Inputs,
        separator: str = "|",
        labels: Sequence[str] = (),
    ):
        """Raises ValueError for a form that cannot hold the answers, before any work.

        separator, labels: of the classes of a text, and of tags.
        """
        self._stream, self._task, self._inputs, self._done = stream, task, inputs, 0
        self._separator, self._answers = separator, {}
        suffix = pathlib.PurePath(out or "").suffix.lower()[1:] or inputs.kind
        self._kind = "jsonl" if suffix == "lines" else suffix
        if task == "ner" and self._kind == "tsv":
            self._kind = "conll"  # as which it is read again
        kinds = ["jsonl", "csv", "tsv"]
        kinds += ["conll"] * (task == "ner") + ["json"] * bool(task == "qa" and inputs.ids)
        if self._kind not in kinds:
            raise ValueError(f"--out={out}: answers of {task} are written as {', '.join('.' + kind for kind in kinds)}")
        if self._kind == "json" and (twice := [key for key, n in Counter(map(str, inputs.ids)).items() if n > 1]):
            raise ValueError(f"several questions have the id {twice[0]!r}; write --out=FILE.jsonl")
        if self._kind not in ("csv", "tsv"):
            return
        two = any("\t" in text if isinstance(text, str) else len(text) > 1 for text in inputs.texts)
        usual = COLUMNS | {"ner": ("words",), "classify": ("text_a", "text_b") if two else ("text",)}
        self._columns = inputs.columns or usual[task]
        columns = [*self._columns, *_ADDED[task]]
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise ValueError(f"the answers would have two columns {twice[0]!r}; rename it, or write --out=FILE.jsonl")
        if self._kind == "tsv":
            for number, row in enumerate(map(self._row, range(len(inputs.texts)))):
                try:
                    check_tsv(self._columns, [str(row.get(name, "")) for name in self._columns])
                except ValueError as error:
                    raise ValueError(f"line {inputs.lines[number]}: {error}") from None
        self._table: TableWriter | None = None  # the first answer says which columns it needs
        words = itertools.chain(labels, *(words for words in inputs.texts if not isinstance(words, str)))
        self._listed = task == "ner" and any(word.split() != [word] for word in words)

    def _row(self, number: int) -> Mapping[str, Any]:
        if self._inputs.rows:
            return self._inputs.rows[number]
        given = self._inputs.texts[number]
        parts = given.split("\t", len(self._columns) - 1) if isinstance(given, str) else given
        return dict(zip(self._columns, parts, strict=False))

    def write(self, answer: Mapping[str, Any]) -> None:
        """The answer to the next input, as tools/predict.py makes it."""
        number, self._done = self._done, self._done + 1
        if not self._inputs.units:
            self._write(answer, number)
            return
        start = 0
        for sentence in self._inputs.units[number]:
            part = slice(start, start := start + len(sentence.words))
            self._write({"words": sentence.words, "tags": answer["tags"][part]}, number, sentence.tags)

    def _write(self, answer: Mapping[str, Any], number: int, gold: Sequence[str] | None = None) -> None:
        if self._kind == "jsonl":
            key = {"id": self._inputs.ids[number]} if self._inputs.ids else {}
            self._stream.write(json.dumps({**key, **answer}, ensure_ascii=False) + "\n")
        elif self._kind == "json":
            self._answers[self._inputs.ids[number]] = answer["text"]
        elif self._kind == "conll":
            self._stream.write(in_columns(answer["words"], gold, answer["tags"]))
        else:
            cells = self._cells(answer)
            if self._table is None:
                self._table = TableWriter(self._stream, self._kind, (*self._columns, *cells))
            row = {"words": self._joined(answer["words"])} if self._task == "ner" else self._row(number)
            self._table.write({**row, **cells})

    def _cells(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that a table gets, see _ADDED."""
        if self._task == "ner":
            return {"prediction": self._joined(answer["tags"])}
        if self._task == "next-sentence":
            return {"is_next": answer["is_next"]}
        if self._task == "fill-mask":
            return {"prediction": " ".join(mask[0]["token"] for mask in answer["masks"]), "masks": answer["masks"]}
        if self._task == "qa":
            return {"prediction": answer["text"], **{name: answer[name] for name in ("start", "end", "score")}}
        values = answer["labels"]
        if "label" in answer:
            best = answer["label"]
            return {"prediction": best, "probability": values[best], "probabilities": values}
        if "chosen" in answer:
            names = answer["chosen"]
            # A table reads a list, too, as several labels: the way to write names that hold the separator.
            joined = names if any(self._separator in name for name in values) else self._separator.join(names)
            return {"prediction": joined, "probabilities": values}
        return {"prediction": next(iter(values.values())) if len(values) == 1 else values}

    def _joined(self, words: Sequence[str]) -> str | list[str]:
        """With blanks between them; where a word or tag of the file holds one, all are written as lists."""
        return list(words) if self._listed else " ".join(words)

    def close(self) -> None:
        """Writes what can only be written at the end."""
        if self._kind == "json":
            json.dump(self._answers, self._stream, indent=1, ensure_ascii=False)
            self._stream.write("\n")
        elif self._kind in ("csv", "tsv") and self._table is None:
            TableWriter(self._stream, self._kind, (*self._columns, _ADDED[self._task][0]))  # a header alone
