"""Asks a trained model: one question on the command line, or a file of them.

    python -m bertjax.tools.predict --model=DIR --task=fill-mask --text="Paris is a [MASK]."
    python -m bertjax.tools.predict --model=runs/reviews/model --file=new.csv --out=answers.csv

In a file of plain lines (.txt), each line is an input: a tab separates the two texts of a pair
(next-sentence, classify) or the question from its context (qa); words of ner are separated by
spaces. Blank lines at the end are no input.

A table (.csv, .tsv, .jsonl) is read as in training: by the columns that the model was fine-tuned
on, or those of --columns. So are .conll files (ner) and SQuAD's .json (qa). The answers have the
form of the input, or that of the suffix of --out: a CSV or TSV file gets its own columns back and
`prediction` (and more) beside them; JSON lines are one object an input; .json is SQuAD's object of
answers by question id. Inputs are answered in chunks, in which batches hold inputs of similar
length; a chunk is written when it is done. Of the settings, those of `execution` and task.eval_batch_size count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_collections

from bertjax import inference
from bertjax.config import finetune_config
from bertjax.config_checks import check_config
from bertjax.formats.files import whole_file
from bertjax.interop.loading import LoadedModel, LoadError, load_model, open_source
from bertjax.model.presets import DTYPES, Execution
from bertjax.tasks.inputs import Input, Inputs, Output, read_inputs
from bertjax.tasks.make import ASKED, Remembered, remembered, task_name
from bertjax.tools.arguments import add_settings, make_parser, refusals

CHUNK = 64  # batches: enough to sort by length, few enough for the memory


def _pair(given: Input, purpose: str) -> tuple[str, str]:
    if not isinstance(given, str):
        first, second = given
        return first, second
    first, tab, second = given.partition("\t")
    if not tab:
        raise ValueError(f"{purpose} needs two texts separated by a tab, got {given!r}")
    return first, second


def _text(given: Input) -> str:
    return given if isinstance(given, str) else given[0]


def _fill(loaded: LoadedModel, inputs: list[Input], options: Any) -> list[dict]:
    texts = [_text(given) for given in inputs]
    filled = inference.fill_mask(loaded, texts, options.top_k, options.batch_size)
    return [
        {"text": text, "masks": [[f._asdict() for f in mask] for mask in masks]}
        for text, masks in zip(texts, filled, strict=True)
    ]


def _next(loaded: LoadedModel, inputs: list[Input], options: Any) -> list[dict]:
    pairs = [_pair(given, "next-sentence") for given in inputs]
    scores = inference.next_sentence(loaded, pairs, options.batch_size)
    return [{"first": a, "second": b, "is_next": p} for (a, b), p in zip(pairs, scores, strict=True)]


def _classify(loaded: LoadedModel, inputs: list[Input], options: Any) -> list[dict]:
    texts = [
        given if isinstance(given, str) and "\t" not in given else given[0] if len(given) == 1 else _pair(given, "")
        for given in inputs
    ]
    answers = inference.classify(loaded, texts, options.batch_size)
    # What is chosen of the labels: one class, all that are likelier than not, of a number nothing.
    choose = {
        "regression": lambda values: {},
        "multi_label_classification": lambda p: {"chosen": [name for name in p if p[name] > 0.5]},
    }.get(inference.problem_type(loaded), lambda p: {"label": max(p, key=p.get)})
    return [{"text": text, "labels": answer, **choose(answer)} for text, answer in zip(texts, answers, strict=True)]


def _tag(loaded: LoadedModel, inputs: list[Input], options: Any) -> list[dict]:
    words = [given.split() if isinstance(given, str) else list(given) for given in inputs]
    tags = inference.tag_words(loaded, words, options.batch_size)
    return [{"words": w, "tags": t} for w, t in zip(words, tags, strict=True)]


def _answer(loaded: LoadedModel, inputs: list[Input], options: Any) -> list[dict]:
    pairs = [_pair(given, "qa") for given in inputs]
    # A context of nothing, or of characters that the tokenizer drops, has no answer in it.
    full = [i for i, (_, context) in enumerate(pairs) if loaded.tokenizer.encode(context)]
    rows = [
        {"question": q, "text": "", "start": 0, "end": 0, "score": None, "note": "the context is empty"}
        for q, _ in pairs
    ]
    if full:
        questions, contexts = zip(*(pairs[i] for i in full), strict=True)
        answers = inference.answer(loaded, questions, contexts, batch_size=options.batch_size)
        for i, found in zip(full, answers, strict=True):
            rows[i] = {"question": pairs[i][0], **found._asdict()}
    return rows


# task -> (answers, the task of load_model, which asks for the heads of these answers alone)
TASKS: dict[str, tuple[Callable[..., list[dict]], str]] = {
    "fill-mask": (_fill, "mlm"),
    "next-sentence": (_next, "next-sentence"),
    "classify": (_classify, "sequence-classification"),
    "ner": (_tag, "token-classification"),
    "qa": (_answer, "question-answering"),
}
_ALIASES = {
    "mlm": "fill-mask",
    "masked-lm": "fill-mask",
    "nsp": "next-sentence",
    "squad": "qa",
    "question-answering": "qa",
}


def asked(name: str | None, model: str) -> str:
    """The one of TASKS that is meant by --task, or that the model was fine-tuned for."""
    if name is None:
        name = remembered(open_source(model).settings, model).task
        if name is None:
            raise ValueError(f"{model} does not say what it was fine-tuned for: give --task, one of {', '.join(TASKS)}")
    found = task_name(_ALIASES.get(name, name), (*TASKS, *ASKED, "swag"))
    if found == "swag":
        raise ValueError("multiple choice is answered by bertjax.tools.evaluate --out=DIR")
    return ASKED.get(found, found)


def prediction_config() -> ml_collections.ConfigDict:
    """What holds where no setting says otherwise: few inputs, answered with all digits."""
    config = finetune_config()
    config.task.eval_batch_size = 32
    config.execution.dtype = "float32"
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("predict", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument(
        "--task",
        help=f"{', '.join(TASKS)}, or the name of a fine-tuning task; default: what the model was fine-tuned for",
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", action="append", help="an input; may be given several times")
    given.add_argument("--file", metavar="FILE", help="inputs: lines, a table, .conll or SQuAD")
    parser.add_argument(
        "--columns",
        metavar="NAME,NAME",
        help="of the texts in a table; default: those that the model was fine-tuned on",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=".csv, .tsv, .jsonl, .conll (ner) or .json (qa); default: the screen, in the form of the input",
    )
    parser.add_argument("--top_k", type=int, default=5, help="candidates for each [MASK]")
    parser.add_argument("--dtype", choices=DTYPES, help="in place of --config.execution.dtype; float16 too")
    add_settings(parser, prediction_config, {"batch_size": "task.eval_batch_size"})
    options = parser.parse_args(arguments)
    with refusals("predict"):
        config = check_config(options.config)
        options.batch_size = config.task.eval_batch_size
        task = asked(options.task, options.model)
        answer, kind = TASKS[task]
        execution = Execution.of(config.execution, jax.default_backend())
        execution = dataclasses.replace(execution, dtype=options.dtype or execution.dtype)
        memory, labels = Remembered(), ()
        with contextlib.suppress(LoadError):  # load_model says it better
            source = open_source(options.model)
            memory, labels = remembered(source.settings, options.model), source.labels
        if options.file:
            inputs = read_inputs(options.file, task, memory, options.columns, labels)
        else:
            inputs = Inputs(options.text, [*range(1, len(options.text) + 1)])
        out = whole_file(options.out) if options.out else contextlib.nullcontext(sys.stdout)
        with out as stream:
            output = Output(stream, options.out, task, inputs, memory.options.get("separator") or "|")
            loaded = load_model(options.model, kind, execution)
            done = 0
            for chunk in chunks(inputs.texts, options.batch_size):
                last = done + len(chunk)
                with _located(options.file, inputs.lines[done], inputs.lines[last - 1]):
                    rows = answer(loaded, chunk, options)
                for row in rows:
                    output.write(row)
                stream.flush()
                done = last
            output.close()


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


def chunks(inputs: list[Input], batch_size: int) -> Iterator[list[Input]]:
    """Inputs to answer together: a batch at first, to show something soon, then twice as many each
    time, up to CHUNK batches. The last takes in a rest below a batch: it would be compiled anew.
    """
    batch_size = max(1, batch_size)  # forward.run refuses less
    start, size = 0, batch_size
    while start < len(inputs):
        end = start + size
        if len(inputs) - end < batch_size:
            end = len(inputs)
        yield inputs[start:end]
        start, size = end, min(2 * size, CHUNK * batch_size)


if __name__ == "__main__":
    main()
