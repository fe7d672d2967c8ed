"""Scores a fine-tuned model on a split, as the run that made it did, and writes its predictions.

    python -m bertjax.tools.evaluate --model=runs/mnli/model --data=glue --split=dev_mismatched
    python -m bertjax.tools.evaluate --model=runs/mnli/model --task=ax --data=glue --split=test \\
        --out=runs/ax
    python -m bertjax.tools.evaluate --model=runs/reviews/model --data=reviews/more.csv

A model that was fine-tuned here remembers its task and the task's options; --task and --options
name others. A split without labels has predictions (and a submission file) alone. The task takes
over the label names and the order of the model's head, and of SQuAD 2.0 the null threshold found on
dev.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from bertjax.tools.arguments import json_object, make_parser, refusals


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    made = make_parser("evaluate", __doc__)
    add = made.add_argument
    add("--model", required=True, help="directory of a fine-tuned model")
    add("--task", help="cola, sst2, ..., ax, squad1.1, ner, table, ...; default: the model's own")
    add("--data", required=True, help="directory of the task's files, one file that is read as the split, or tfds:NAME")
    add(
        "--options",
        type=json_object,
        default={},
        help="of the task, as a JSON object; the others are those that it was fine-tuned with",
    )
    add(
        "--labels",
        type=lambda names: tuple(names.split(",")),
        default=(),
        help="names of the head's classes in its order, with commas: for a model that does not store them",
    )
    add("--split", default="dev", help="default dev")
    add("--out", type=pathlib.Path, help="directory for predictions and submission files")
    add("--max_length", type=int, help="tokens of a row; default: what it was fine-tuned with")
    add("--batch_size", type=int, default=128, help="rows (default 128)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="arithmetic")
    flags = made.parse_args(arguments)
    with refusals("evaluate"):
        print(json.dumps(evaluate(flags), indent=1))


def evaluate(flags: Any) -> dict[str, Any]:
    """The scores of the split, flags that make them doubtful, what was scored, and where
    predictions are.
    """
    import jax

    from bertjax.config import finetune_config, frozen
    from bertjax.model.presets import Execution
    from bertjax.tasks import job
    from bertjax.tasks.make import remembered
    from bertjax.tasks.pretrained import Pretrained

    model = Pretrained(flags.model)  # a model that cannot be used is refused before data are read
    stored = remembered(model.source.settings, flags.model)
    if flags.task is None and stored.task is None:
        raise ValueError(
            f"{flags.model} does not say which task it was fine-tuned for: give --task, one of {', '.join(job.TASKS)}"
        )
    name = job.task_name(flags.task or stored.task, job.TASKS)
    own = stored.options if name == stored.task else {}
    # The threshold that was found on dev counts, not the one that training began with.
    options = {**{k: v for k, v in own.items() if k != "null_threshold"}, **flags.options}
    labels = flags.labels or (() if model.labels() else tuple(flags.options.get("labels", ())))
    if name in ("table", "ner", "tag") and options.get("head") != "regression":
        # These would read their label names from a training file, which need not be there.
        options["labels"] = flags.options.get("labels", model.labels() or labels)
    settings = frozen(finetune_config())
    settings = settings.replace(
        {
            "task.max_length": flags.max_length or stored.max_length or settings.task.max_length,
            "task.eval_batch_size": flags.batch_size,
        }
    )
    directory, options = _one_file(name, flags, options)
    task = job.make_task(name, directory, options)
    if flags.out:
        flags.out.mkdir(parents=True, exist_ok=True)
    scores = job.evaluate(
        task,
        flags.model,
        settings,
        flags.split,
        write_to=flags.out,
        labels=labels,
        execution=Execution.for_backend(jax.default_backend(), dtype=flags.dtype),
    )
    found = {"scores": None} if scores is None else {"scores": dict(scores.values), "flags": list(scores.flags)}
    return {
        "model": str(model.source.directory if model.source.kind == "huggingface" else flags.model),
        "step": stored.step,
        "task": name,
        "data": flags.data,
        "split": flags.split,
        **({"null_threshold": task.null_threshold} if name == "squad2.0" else {}),
        **found,
        **({"out": str(flags.out)} if flags.out else {}),
    }


def _one_file(name: str, flags: Any, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(directory, options) of --data; a file in place of a directory is that of the split."""
    data = os.path.expanduser(flags.data)
    if not os.path.isfile(data):
        return flags.data, options
    if name not in ("table", "ner", "tag", "swag", "squad1.1", "squad2.0"):
        raise ValueError(f"--data={flags.data} is a file; task {name!r} takes the directory of its official files")
    directory, file = os.path.split(data)
    return directory or ".", {**options, "files": {flags.split: file}}


if __name__ == "__main__":
    main()
