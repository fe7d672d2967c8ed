"""Asks a trained model: one question on the command line, or a file with one input a line.

    python -m bertjax.tools.predict --model=DIR --task=fill-mask --text="Paris is a [MASK]."
    python -m bertjax.tools.predict --model=DIR --task=classify --file=in.tsv --out=out.jsonl

In a file, a tab separates the two texts of a pair (next-sentence, classify) or the question from
its context (qa); words of ner are separated by spaces. The answers are JSON, one object a line, as
many as there are lines (blank ones at the end of a file are no input). Lines are answered in
chunks, in which batches hold inputs of similar length; a chunk is written when it is done.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from bertjax import inference
from bertjax.data.opening import read_lines
from bertjax.files import whole_file
from bertjax.interop.loading import LoadedModel, load_model
from bertjax.model.presets import DTYPES, Execution
from bertjax.tools.arguments import make_parser, refusals

CHUNK = 64  # batches: enough to sort by length, few enough for the memory


def _pair(line: str, purpose: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise ValueError(f"{purpose} needs two texts separated by a tab, got {line!r}")
    return first, second


def _fill(loaded: LoadedModel, lines: list[str], options: Any) -> list[dict]:
    filled = inference.fill_mask(loaded, lines, options.top_k, options.batch_size)
    return [{"text": line, "masks": [[f._asdict() for f in mask] for mask in masks]}
            for line, masks in zip(lines, filled, strict=True)]


def _next(loaded: LoadedModel, lines: list[str], options: Any) -> list[dict]:
    pairs = [_pair(line, "next-sentence") for line in lines]
    scores = inference.next_sentence(loaded, pairs, options.batch_size)
    return [{"first": a, "second": b, "is_next": p}
            for (a, b), p in zip(pairs, scores, strict=True)]


def _classify(loaded: LoadedModel, lines: list[str], options: Any) -> list[dict]:
    texts = [_pair(line, "") if "\t" in line else line for line in lines]
    answers = inference.classify(loaded, texts, options.batch_size)
    # What is chosen of the labels: one class, all that are likelier than not, of a number nothing.
    choose = {
        "regression": lambda values: {},
        "multi_label_classification": lambda p: {"chosen": [name for name in p if p[name] > 0.5]},
    }.get(inference.problem_type(loaded), lambda p: {"label": max(p, key=p.get)})
    return [{"text": text, "labels": answer, **choose(answer)}
            for text, answer in zip(texts, answers, strict=True)]


def _tag(loaded: LoadedModel, lines: list[str], options: Any) -> list[dict]:
    words = [line.split() for line in lines]
    tags = inference.tag_words(loaded, words, options.batch_size)
    return [{"words": w, "tags": t} for w, t in zip(words, tags, strict=True)]


def _answer(loaded: LoadedModel, lines: list[str], options: Any) -> list[dict]:
    questions, contexts = zip(*(_pair(line, "qa") for line in lines), strict=True)
    answers = inference.answer(loaded, questions, contexts, batch_size=options.batch_size)
    return [{"question": q, **a._asdict()} for q, a in zip(questions, answers, strict=True)]


# task -> (answers, the model that load_model makes; None = what the checkpoint says)
TASKS: dict[str, tuple[Callable[..., list[dict]], str | None]] = {
    "fill-mask": (_fill, None),
    "next-sentence": (_next, "pretraining"),
    "classify": (_classify, "sequence-classification"),
    "ner": (_tag, "token-classification"),
    "qa": (_answer, "question-answering"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("predict", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--task", required=True, choices=tuple(TASKS))
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", action="append", help="an input; may be given several times")
    given.add_argument("--file", metavar="FILE", help="inputs, one a line")
    parser.add_argument("--out", metavar="FILE", help="JSON lines; default: the screen")
    parser.add_argument("--top_k", type=int, default=5, help="candidates for each [MASK]")
    parser.add_argument("--batch_size", type=int, default=32, help="rows")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    options = parser.parse_args(arguments)
    with refusals("predict"):
        lines = options.text or _inputs(options.file)
        answer, task = TASKS[options.task]
        execution = Execution.for_backend(jax.default_backend(), dtype=options.dtype)
        out = whole_file(options.out) if options.out else contextlib.nullcontext(sys.stdout)
        with out as stream:
            loaded = load_model(options.model, task, execution)
            done = 0
            for chunk in chunks(lines, options.batch_size):
                with _located(options.file, done + 1, done + len(chunk)):
                    rows = answer(loaded, chunk, options)
                for row in rows:
                    print(json.dumps(row, ensure_ascii=False), file=stream)
                stream.flush()
                done += len(chunk)


@contextlib.contextmanager
def _located(file: str | None, first: int, last: int) -> Iterator[None]:
    """A refusal of what is in a file says in which of its lines."""
    try:
        yield
    except ValueError as error:
        if file is None:
            raise
        where = f"line {first}" if first == last else f"one of the lines {first} to {last}"
        raise ValueError(f"{file}, {where}: {error}") from error


def chunks(lines: list[str], batch_size: int) -> Iterator[list[str]]:
    """Lines to answer together: a batch at first, to show something soon, then twice as many each
    time, up to CHUNK batches. The last takes in a rest below a batch: it would be compiled anew.
    """
    batch_size = max(1, batch_size)  # forward.run refuses less
    start, size = 0, batch_size
    while start < len(lines):
        end = start + size
        if len(lines) - end < batch_size:
            end = len(lines)
        yield lines[start:end]
        start, size = end, min(2 * size, CHUNK * batch_size)


def _inputs(path: str) -> list[str]:
    lines = read_lines(path)
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


if __name__ == "__main__":
    main()
