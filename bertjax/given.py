"""Data that a program gives to a run as Python objects, as the files and stores that runs read.

In: a corpus of texts, or the rows of a task (data/objects.py says in what forms). Out: a token store; a file of JSON
lines for each split, and the options of the task that reads them.
"""

import collections
import contextlib
import hashlib
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.config import Config
from bertjax.data import objects
from bertjax.data.build import build_store
from bertjax.data.documents import Document, preview, read_documents
from bertjax.data.sources import Reading
from bertjax.formats.files import make_once, remove_empty, scratch_directory, whole_directory
from bertjax.interruption import REFUSALS
from bertjax.tasks.make import TASKS, task_name, with_column_names
from bertjax.tasks.task import file_fingerprint
from bertjax.tokenization import Tokenizer, load_tokenizer
from bertjax.tokenization.train_vocab import train_wordpiece

HELDOUT = 0.1  # share of texts, or of the rows of a task without a dev split, that are not trained on
# Columns of tags, the first that is there.
_TAGS = {"ner": ("tags", "ner_tags", "labels"), "tag": ("tags", "pos_tags", "labels")}


def _no_paths(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number == 0 and os.path.isfile(text):
            raise ValueError(
                f"texts: {text!r} is a file: give what is in it, as pathlib.Path({text!r}).read_text() does"
            )
        yield text


@contextlib.contextmanager
def text_store(
    texts: Any, workdir: str, tokenizer: Tokenizer | str | os.PathLike[str] | None, vocab_size: int
) -> Iterator[tuple[pathlib.Path, Callable[[], None]]]:
    """The token store of texts, a document each, in a work directory; made where it is not there yet.

    Args:
      tokenizer: None trains a vocabulary of `vocab_size` entries on the texts.

    Yields:
      (the store, a function that keeps it). Where the block is refused before that is called, what was made for the
      store here goes again; not after a CheckpointError, since another process may train on it.

    Raises ValueError for what is not text, and where there is none.
    """
    made: list[pathlib.Path] = []  # the innermost directory first
    if "://" in workdir:
        raise ValueError(f"the corpus of `texts` is made in the workdir, and {workdir} is not on a local disk")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    with scratch_directory() as temporary:
        file = temporary / "texts.jsonl"
        objects.write_rows(({"text": text} for text in _no_paths(objects.texts(texts, name="texts"))), file)
        made_of = tokenizer.fingerprint if tokenizer else f"WordPiece {vocab_size}"
        digest = hashlib.sha256(f"{file_fingerprint(file)} {made_of}".encode()).hexdigest()

        def read(**how: Any) -> Iterator[Document]:
            return read_documents([str(file)], "jsonl", max_line_mb=1 << 30, **how)  # a line is in memory already

        def build(store: pathlib.Path) -> None:
            seen = preview([str(file)], Reading(format="jsonl", max_line_mb=1 << 30))
            if not seen.lines:
                raise ValueError("texts: there is no word in them")
            print("\n".join(["Making a token store of the texts ...", *seen.warnings]), flush=True)
            own = tokenizer
            if own is None:
                lines = (line for document in read(segment=False) for line in document.sentences)
                own = train_wordpiece(lines, vocab_size, strip_accents="auto")
            documents = read()  # not the file, which later messages would name
            with whole_directory(store) as directory:  # judged by the run, whose settings say how
                manifest = build_store(
                    None, own, directory, documents=documents, judged=False, heldout_fraction=HELDOUT
                )
                if not manifest["splits"]["heldout"]["documents"]:
                    raise ValueError("texts: too little to hold some out: give several texts, or one of four sentences")
            made.extend(missing)

        store = pathlib.Path(workdir) / f"corpus-{digest[:8]}"
        missing = [path for path in (store, *store.parents) if not path.exists()]
        make_once(store, build, "the corpus of the texts", lambda path: (path / "manifest.json").exists())
    try:
        yield store, made.clear
    except REFUSALS:
        if made:
            shutil.rmtree(made[0])
            remove_empty(made[1:])
        raise


def write_splits(
    splits: Mapping[str, Any], config: Config, directory: pathlib.Path
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Writes NAME.jsonl for each split; returns the options of the task that reads them, and where a dev split was
    held out, the number of each row of it and of the others among those that were given.

    Without a dev split, a share of the rows of train is one. Raises ValueError for a task without such rows, and for
    rows that are none.
    """
    task, options = task_name(config.task.name, (*TASKS, "all")), with_column_names(config.task.options)
    if task not in ("table", *_TAGS):
        raise ValueError(f"task {task!r} takes files (config.task.data); rows of Python are for table, ner and tag")
    if "train" not in splits:
        raise ValueError(f"{', '.join(splits)} without train: give the rows to train on")
    splits = {
        name: data.tolist() if isinstance(data, np.ndarray) else list(data) if isinstance(data, Iterator) else data
        for name, data in splits.items()
    }
    if task == "table":
        label, found = options.get("label", "label"), _table_rows(splits, options)
    else:
        label, found = "tags", _tagged_rows(splits, task)
    numbers: dict[str, list[int]] = {}
    if "dev" not in found:
        rows = found["train"]
        numbers["train"], numbers["dev"] = held_out(rows, label, config.seed)
        found |= {name: [rows[number] for number in chosen] for name, chosen in numbers.items()}
    for name, rows in found.items():
        objects.write_rows(rows, directory / f"{name}.jsonl")
    return options | {"files": {name: f"{name}.jsonl" for name in found}}, numbers


def _table_rows(splits: Mapping[str, Any], options: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split by column; sets the options `head`, and `text` for a pair and its label."""
    text, label = options.get("text", "text"), options.get("label", "label")
    texts = [text] if isinstance(text, str) else list(text)
    first = _first(splits["train"])
    if isinstance(first, tuple | list) and len(first) == 3:  # a pair and its label
        texts = texts if len(texts) == 2 else ["text_a", "text_b"]
        options["text"] = tuple(texts)
    found = {}
    for name, data in splits.items():
        if isinstance(data, list | tuple):  # a text alone may be (text,)
            data = [row[0] if isinstance(row, list | tuple) and len(row) == 1 else row for row in data]
        first = _first(data)
        labelled = isinstance(first, tuple | list) and len(first) > len(texts)
        found[name] = list(objects.rows(data, [*texts, label] if labelled else texts, name))
        remedy = ". settings={'task.options.text': NAME, 'task.options.label': NAME} name others"
        _require_columns(found[name], texts, name, remedy)
    options["head"] = _head(options.get("head", "classification"), [row.get(label) for row in found["train"]])
    if options["head"] == "classification":
        for row in itertools.chain.from_iterable(found.values()):
            if isinstance(value := row.get(label), float) and value.is_integer():
                row[label] = int(value)  # pandas makes numbers of classes floats where one is missing
    return found


def _tagged_rows(splits: Mapping[str, Any], task: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split with the columns tokens and, where there are any, tags."""
    found = {}
    for name, data in splits.items():
        first = _first(data)
        tagged = isinstance(first, tuple | list) and len(first) > 0 and not isinstance(first[0], str)
        found[name] = [_sentence(row, task) for row in objects.rows(data, ["tokens", "tags"][: 1 + tagged], name)]
        if name == "train" and found[name] and not any("tags" in row for row in found[name]):
            raise ValueError("train: no row has tags; a row is (words, tags), two lists of the same length")
        _require_columns(found[name], ["tokens"], name)
    return found


def _require_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], name: str, remedy: str = "") -> None:
    for number, row in enumerate(rows):
        if missing := [column for column in columns if column not in row]:
            raise ValueError(f"{name}: row {number} has no column {missing[0]!r}; found {', '.join(row)}{remedy}")


def held_out(rows: Sequence[Mapping[str, Any]], label: str, seed: int) -> tuple[list[int], list[int]]:
    """(numbers of the others, numbers of HELDOUT of the rows): of each class its share, at least one row.

    Raises ValueError for one row.
    """
    if len(rows) < 2:
        raise ValueError(f"train has {len(rows)} rows: too few to hold some out; give `dev`")
    of_class = collections.defaultdict(list)
    for number in np.random.default_rng(seed).permutation(len(rows)).tolist():
        value = rows[number].get(label)
        of_class[value if isinstance(value, str | int) else None].append(number)
    out = {number for numbers in of_class.values() for number in numbers[: int(HELDOUT * len(numbers))]}
    if len(out) < (wanted := int(HELDOUT * len(rows))) // 2:  # many small classes: a row of some of them
        out |= {*[numbers[0] for numbers in of_class.values() if len(numbers) > 1][:wanted]}
    out = out or {max(of_class.values(), key=len)[0]}
    return [number for number in range(len(rows)) if number not in out], sorted(out)


def _head(head: str, labels: Sequence[Any]) -> str:
    """The head for what stands in the label column, where the setting is the usual one."""
    if head != "classification":
        return head
    if {type(label) for label in labels if label is not None} == {list}:  # a list among names is refused as a class
        return "multilabel"
    numbers = [label for label in labels if isinstance(label, float)]
    return "regression" if any(not number.is_integer() for number in numbers) else head


def _first(data: Any) -> Any:
    return data[0] if isinstance(data, list | tuple) and data else None


def _sentence(row: Mapping[str, Any], task: str) -> dict[str, Any]:
    words = row.get("tokens", row.get("words"))
    tags = next((row[name] for name in _TAGS[task] if row.get(name) is not None), None)
    return {name: values for name, values in (("tokens", words), ("tags", tags)) if values is not None}
