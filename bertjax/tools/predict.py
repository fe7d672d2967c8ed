"""Asks a trained model: one question on the command line, or a file of them.

    python -m bertjax.tools.predict --model=DIR --task=fill-mask --text="Paris is a [MASK]."
    python -m bertjax.tools.predict --model=runs/reviews/model --file=new.csv --out=answers.csv

In a file of plain lines (.txt), each line is an input: a tab separates the two texts of a pair
(next-sentence, classify) or the question from its context (qa); words of ner are separated by
spaces. Blank lines at the end are not input.

A table (.csv, .tsv, .jsonl) is read as in training: by the columns that the model was fine-tuned
on, or those of --columns. So are .conll files (ner) and SQuAD's .json (qa). The answers have the
form of the input, or that of the suffix of --out: a CSV or TSV file gets its own columns back and
`prediction` (and more) beside them; JSON lines are one object an input; .json is SQuAD's object of
answers by question id. Of ner, .tsv is .conll, and a CSV file has the words of a sentence in a cell,
with blanks between them, or as a JSON list where some hold blanks. Inputs are answered in chunks, in
which batches hold inputs of similar length; a chunk is written when it is done. Of the settings only
those of `execution`, task.eval_batch_size and task.max_length have an effect.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

import jax
import ml_collections

from bertjax.config import Config, finetune_config
from bertjax.config_checks import check_config
from bertjax.formats.files import whole_file
from bertjax.interop.loading import LoadError, load_model, open_source
from bertjax.model.presets import DTYPES, Execution
from bertjax.prediction import QUESTIONS, asked
from bertjax.tasks.inputs import Input, Output, given_inputs, read_inputs
from bertjax.tasks.make import Remembered, remembered
from bertjax.tools.arguments import add_settings, file_or_stdin, make_parser, refusals, require_other_file, require_used

PAIRS = ("next-sentence", "classify", "qa")  # of which a line has two texts, separated by a tab
CHUNK = 64  # batches: enough to sort by length, few enough for the memory


def prediction_config() -> ml_collections.ConfigDict:
    """The defaults of a prediction: few inputs, answered in float32."""
    config = finetune_config()
    config.task.eval_batch_size = 32
    config.execution.dtype = "float32"
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR")
    add("--task", help=f"{', '.join(QUESTIONS)}, or the name of a fine-tuning task; default: the model's own")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", action="append", help="an input; may be given several times")
    text = "inputs: lines (- is the standard input), a table, .conll, SQuAD or hf:NAME,CONFIG:SPLIT"
    given.add_argument("--file", type=file_or_stdin, metavar="FILE", help=text)
    add("--columns", metavar="NAME,NAME", help="of the texts in a table; default: what the model was fine-tuned on")
    add("--out", metavar="FILE", help=".csv, .tsv, .jsonl, .conll (ner) or .json (qa); default: screen, as the input")
    add("--top_k", type=int, help="candidates for each [MASK] (default 5)")
    add("--dtype", choices=DTYPES, help="in place of --config.execution.dtype; float16 too")
    short = {"batch_size": "task.eval_batch_size", "max_length": "task.max_length"}
    add_settings(parser, prediction_config, short)
    flags = parser.parse_args(arguments)
    with refusals("predict"):
        predict(flags, check_config(flags.config))


def predict(flags: argparse.Namespace, config: Config) -> None:
    """Answers the inputs, and writes each chunk of answers when it is done."""
    out = None if flags.out == "-" else flags.out
    task = asked(flags.task, flags.model)
    cut = ["task.max_length"] * (task in ("classify", "ner", "qa"))  # as in training
    require_used(flags.given, ["execution.", "task.eval_batch_size", *cut], f"predict --task={task}")
    if flags.top_k is not None and task != "fill-mask":
        raise ValueError(f"--top_k={flags.top_k} has no effect on --task={task}: it is for fill-mask")
    if flags.columns and flags.text:
        raise ValueError(f"--columns={flags.columns} has no effect on --text; it is for tables (--file)")
    if not str(out).lower().endswith((".csv", ".tsv")):  # these hold all columns of the input
        require_other_file(flags.file, out)
    answer, kind = QUESTIONS[task]
    how = flags.top_k or 5, config.task.eval_batch_size
    execution = Execution.of(config.execution, jax.default_backend())
    execution = dataclasses.replace(execution, dtype=flags.dtype or execution.dtype)
    memory, labels = Remembered(), ()
    with contextlib.suppress(LoadError):  # load_model says it better
        source = open_source(flags.model)
        memory, labels = remembered(source.settings, flags.model), source.labels
    if flags.file:
        inputs = read_inputs(flags.file, task, memory, flags.columns, labels)
    else:
        inputs = given_inputs(flags.text, task, memory)
    with whole_file(out) if out else contextlib.nullcontext(sys.stdout) as stream:
        output = Output(stream, out, task, inputs, memory.options.get("separator") or "|", labels)
        loaded = load_model(flags.model, kind, execution)
        if "task.max_length" in flags.given:
            length, longest = config.task.max_length, loaded.config.max_position_embeddings
            if length > longest:
                raise ValueError(f"--max_length={length} exceeds the {longest} positions of the model")
            finetuned = {**(loaded.settings.get("finetuned") or {}), "max_length": length}
            loaded = dataclasses.replace(loaded, settings={**loaded.settings, "finetuned": finetuned})
        answer(loaded, [], *how)  # if the model cannot, it is no fault of a line
        done = 0
        for chunk in chunks(inputs.texts, config.task.eval_batch_size):
            last = done + len(chunk)
            if task in PAIRS:
                chunk = [one.split("\t", 1) if isinstance(one, str) and "\t" in one else one for one in chunk]
            with _located(flags.file, inputs.lines[done], inputs.lines[last - 1]):
                _, rows = answer(loaded, chunk, *how)
            for row in rows:
                output.write(row)
            stream.flush()
            done = last
        output.close()
    if out:
        print(f"{done:,} answers written to {out}", file=sys.stderr)


@contextlib.contextmanager
def _located(file: str | None, first: int, last: int) -> Iterator[None]:
    """Adds to a refusal the line of the file that it is about."""
    try:
        yield
    except ValueError as error:
        if file is None:
            raise
        where = f"line {first}" if first == last else f"one of the lines {first} to {last}"
        raise ValueError(f"{file}, {where}: {error}") from error


def chunks(inputs: list[Input], batch_size: int) -> Iterator[list[Input]]:
    """Inputs to answer together: two batches at first, to show something soon, then twice as many each
    time, up to CHUNK batches. The last takes in a rest of a batch or less, which would be compiled for padded rows.
    """
    start, size = 0, 2 * batch_size
    while start < len(inputs):
        end = start + size
        if len(inputs) - end <= batch_size:
            end = len(inputs)
        yield inputs[start:end]
        start, size = end, min(2 * size, CHUNK * batch_size)


if __name__ == "__main__":
    main()
