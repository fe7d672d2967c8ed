"""Scores a fine-tuned model on a split, as the run that made it did, and writes its predictions.

    python -m bertjax.tools.evaluate --model=runs/mnli/model --task=mnli --data=glue \\
        --split=dev_mismatched
    python -m bertjax.tools.evaluate --model=runs/mnli/model --task=ax --data=glue --split=test \\
        --out=runs/ax

A split without labels has predictions (and a submission file) alone. The task takes over the label
names and the order of the model's head, and of SQuAD 2.0 the null threshold found on dev.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from bertjax.tools.arguments import make_parser, parse, refusals


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    made = make_parser("evaluate", __doc__)
    add = made.add_argument
    add("--model", required=True, help="directory of a fine-tuned model")
    add("--task", required=True, help="cola, sst2, ..., ax, squad1.1, ner, table, ...")
    add("--data", required=True, help="directory of the task's files, or tfds:NAME")
    add("--options", type=json.loads, default={}, help="of the task, as a JSON object")
    add("--labels", type=lambda names: tuple(names.split(",")), default=(), help="names of the "
        "head's classes in its order, with commas: for a model that does not store them")
    add("--split", default="dev", help="default dev")
    add("--out", type=pathlib.Path, help="directory for predictions and submission files")
    add("--max_length", type=int, help="tokens of a row; default: what it was fine-tuned with")
    add("--batch_size", type=int, default=128, help="rows (default 128)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="arithmetic")
    flags = parse(made, arguments)
    with refusals("evaluate"):
        print(json.dumps(evaluate(flags), indent=1))


def evaluate(flags: Any) -> dict[str, Any]:
    """The scores of the split, flags that make them doubtful, and where predictions are."""
    import jax

    from bertjax.model.presets import Execution
    from bertjax.tasks import job
    from bertjax.tasks.finetune import FineTuneSettings
    from bertjax.tasks.pretrained import Pretrained

    model = Pretrained(flags.model)  # a model that cannot be used is refused before data are read
    stored = model.source.settings.get("finetuned") or {}
    options = dict(flags.options)
    labels = flags.labels or (() if model.labels() else tuple(options.get("labels", ())))
    if flags.task in ("table", "ner", "tag") and options.get("head") != "regression":
        # These would read their label names from a training file, which need not be there.
        options.setdefault("labels", model.labels() or labels)
    settings = FineTuneSettings(
        max_length=flags.max_length or stored.get("max_length", FineTuneSettings.max_length),
        eval_batch_size=flags.batch_size)
    task = job.make_task(flags.task, flags.data, options)
    if flags.out:
        flags.out.mkdir(parents=True, exist_ok=True)
    scores = job.evaluate(
        task, flags.model, flags.split, settings, write_to=flags.out, labels=labels,
        execution=Execution.for_backend(jax.default_backend(), dtype=flags.dtype))
    found = {"scores": None} if scores is None else {
        "scores": dict(scores.values), "flags": list(scores.flags)}
    return {"split": flags.split, **found, **({"out": str(flags.out)} if flags.out else {})}


if __name__ == "__main__":
    main()
