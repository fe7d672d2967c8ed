"""Scores a fine-tuned model on a split, as the run that made it did, and writes its predictions.

    python -m bertjax.tools.evaluate --model=runs/mnli/model --data=glue --split=dev_mismatched
    python -m bertjax.tools.evaluate --model=runs/mnli/model --task=ax --data=glue --split=test \\
        --out=runs/ax
    python -m bertjax.tools.evaluate --model=runs/reviews/model --data=reviews/more.csv

A model that was fine-tuned here remembers its task, the task's options and the length of a row; settings
(--config.task.name, ..., and the flags that are short for them) name others. Of a split without labels only
predictions (and a submission file) are written, to --out. The labels are those of the model's head, in its order, and
the null threshold of SQuAD 2.0 is the one found on dev.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bertjax.config import Config, TaskSettings, finetune_config
from bertjax.config_checks import check_config
from bertjax.data.named import is_name
from bertjax.formats.files import directory_for_work
from bertjax.tools.arguments import add_settings, make_parser, refusals, require_used

if TYPE_CHECKING:  # jax is set up before they are imported
    from bertjax.interop.source import Source
    from bertjax.tasks.make import Remembered

SHORT = {
    "task": "task.name",
    "data": "task.data",
    "options": "task.options",
    "max_length": "task.max_length",
    "batch_size": "task.eval_batch_size",
    "dtype": "execution.dtype",
}

USED = ("task.name", "task.data", "task.options", "task.max_length", "task.eval_batch_size", "task.pack", "execution.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="directory of a fine-tuned model")
    add(
        "--labels",
        type=lambda names: tuple(names.split(",")),
        default=(),
        help="names of the head's classes in its order, with commas: for a model that does not store them",
    )
    add("--split", default="dev", help="which to score (default dev); if --data is one file, it is read as this split")
    add("--out", type=pathlib.Path, help="directory for predictions and submission files")
    add_settings(parser, finetune_config, SHORT)
    flags = parser.parse_args(arguments)
    with refusals("evaluate"):
        config = check_config(flags.config)
        require_used(flags.given, USED, "evaluate")
        if not config.task.data:
            raise ValueError("--data is missing: the directory of the task's files, one file, hf:NAME or tfds:NAME")
        print(json.dumps(evaluate(flags, config), indent=1))


def evaluate(flags: Any, config: Config) -> dict[str, Any]:
    """The scores of the split, flags that make them doubtful, what was scored, and where predictions are."""
    import jax

    from bertjax.interop import open_source
    from bertjax.interop.loading import stored_labels
    from bertjax.model.presets import Execution
    from bertjax.tasks import job
    from bertjax.tasks.make import TASKS, make_task, names_in, remembered, task_name

    source = open_source(flags.model)  # a model that cannot be used is refused before data are read
    stored = remembered(source.settings, flags.model)
    if not config.task.name and stored.task is None:
        raise ValueError(f"{flags.model} does not say its task: give --task, one of {', '.join(TASKS)}")
    name = task_name(config.task.name or stored.task, TASKS)
    labels = flags.labels or (() if source.labels else tuple(names_in(config.task.options.get("labels", ()))))
    if labels and (rows := stored_labels(source)) not in (None, len(labels)):
        raise ValueError(f"{len(labels)} labels are named, but the head of {flags.model} has {rows}: name them all")
    options = _options(name, config.task, stored, source, labels)
    if stored.max_length and "task.max_length" not in flags.given:
        config = config.replace({"task.max_length": stored.max_length})
    directory, options = _one_file(name, config.task.data, flags.split, options)
    task = make_task(name, directory, options)
    execution = Execution.of(config.execution, jax.default_backend())
    how = dict(write_to=flags.out, labels=labels, must_score=not flags.out)
    with directory_for_work(flags.out) if flags.out else contextlib.nullcontext():
        scores = job.evaluate(task, flags.model, config, flags.split, execution, **how)
    found = {"scores": None} if scores is None else {"scores": dict(scores.values), "flags": list(scores.flags)}
    return {
        "model": str(source.directory if source.kind == "huggingface" else flags.model),
        "step": stored.step,
        "task": name,
        "data": config.task.data,
        "split": flags.split,
        **({"null_threshold": task.null_threshold} if name == "squad2.0" else {}),
        **found,
        **({"out": str(flags.out)} if flags.out else {}),
    }


def _options(
    name: str, task: TaskSettings, stored: Remembered, source: Source, labels: Sequence[str]
) -> dict[str, Any]:
    """The options of the task `name`: those given, else those that the model remembers or its files tell.

    `labels`: of a model that does not name them.
    """
    from bertjax.tasks.kinds import KINDS

    own = dict(stored.options) if name == stored.task else {}
    own.pop("null_threshold", None)  # the one that was found on dev counts, not the one that training began with
    files = [pathlib.Path(task.data).expanduser() / str(file) for file in dict(own.get("files") or {}).values()]
    if not any(file.exists() for file in files):  # a data set by name, or another folder, has others
        own.pop("files", None)
    options = {**own, **task.options}
    if name == "table" and "head" not in options:  # of a model of another program
        heads = {kind.problem_type: head for head, kind in KINDS.items() if kind.problem_type}
        options["head"] = heads.get(source.settings.get("problem_type"), "classification")
    if name in ("table", "ner", "tag") and options.get("head") != "regression":
        # These would read their label names from a training file, which need not be there.
        options["labels"] = task.options.get("labels", source.labels or labels)
    return options


def _one_file(name: str, data: str, split: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(directory, options) of --data; a file in place of a directory is that of the split."""
    path = os.path.expanduser(data)
    if data == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
        raise ValueError(f"--data={data} is read more than once, and by its suffix: write it to a file such as dev.csv")
    if not os.path.exists(path) and not is_name(data) and "://" not in data:
        raise ValueError(f"--data={data} does not exist: name the directory of the task's files, one file, or hf:NAME")
    if not os.path.isfile(path):
        return data, options
    if name not in ("table", "ner", "tag", "swag", "squad1.1", "squad2.0"):
        raise ValueError(f"--data={data} is a file; task {name!r} takes the directory of its official files")
    directory, file = os.path.split(path)
    return directory or ".", {**options, "files": {split: file}}


if __name__ == "__main__":
    main()
