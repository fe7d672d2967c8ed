"""The paper's search over batch size, learning rate and epochs, for one task.

    python -m bertjax.tools.sweep --task=mrpc --data=glue --init_from=DIR --workdir=runs/mrpc \\
        --seeds=5

Runs in one process with shared compilation, goes on where it was interrupted, and ends with a
table, a picture (WORKDIR/sweep.png) and the best model of all runs (WORKDIR/best).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bertjax.tasks.sweep import PAPER_GRID
from bertjax.tools.arguments import json_object, make_parser, refusals

if TYPE_CHECKING:  # jax is set up before they are imported
    from bertjax.tasks.finetune import FineTuner, Trained


def parser() -> argparse.ArgumentParser:
    """The command line; what is searched are lists, separated by commas."""
    parser = make_parser("sweep", __doc__)
    add = parser.add_argument
    add("--task", required=True, help="cola, sst2, mrpc, ..., squad1.1, ner, table, ...")
    add("--data", required=True, help="directory of the task's files, or tfds:NAME")
    add("--init_from", required=True, metavar="DIR", help="model to start from")
    add("--workdir", required=True, type=_directory, help="where runs.jsonl, sweep.md, best/ go")
    add("--options", type=json_object, default={}, help="of the task, as a JSON object")
    for name, kind in (("batch_size", int), ("learning_rate", float), ("epochs", int)):
        add(
            f"--{name}",
            type=_list_of(kind),
            default=PAPER_GRID[name],
            metavar="N,N",
            help=f"default {','.join(f'{value:g}' for value in PAPER_GRID[name])}",
        )
    add("--seeds", type=int, default=1, help="seeds 0 to N-1 of every setting (default 1)")
    add("--max_length", type=int, default=128, help="tokens of a row (default 128)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="arithmetic")
    add("--buckets", type=int, default=3, help="padded lengths, each one compilation (default 3)")
    add("--compilation_cache", default="~/.cache/bertjax/xla", help="directory of compiled programs; '' = off")
    return parser


def _directory(text: str) -> pathlib.Path:
    return pathlib.Path(text).expanduser()


def _list_of(kind: type) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return numbers


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs or resumes the search."""
    flags = parser().parse_args(arguments)
    if flags.seeds < 1:
        raise SystemExit(f"sweep: --seeds={flags.seeds} must be at least 1")
    with refusals("sweep"):
        print(search(flags))


def search(flags: argparse.Namespace) -> str:
    """The table at the end of the search, and where it and the best model are."""
    import jax

    if flags.compilation_cache:  # before the first array, or the first compilations are not kept
        jax.config.update("jax_compilation_cache_dir", str(_directory(flags.compilation_cache)))
    from bertjax.config import finetune_config, frozen
    from bertjax.model.presets import Execution
    from bertjax.tasks import job, sweep
    from bertjax.tasks.results import recorded

    settings = frozen(finetune_config()).replace(
        {"task.max_length": flags.max_length, "task.buckets": flags.buckets, "task.options": flags.options}
    )
    task = job.make_task(flags.task, flags.data, flags.options)
    execution = Execution.for_backend(jax.default_backend(), dtype=flags.dtype)
    tuner = job.prepare_tuner(task, flags.init_from, settings, execution=execution)
    identity = {
        "task": task.name,
        "options": flags.options,
        "init_from": flags.init_from,
        "weights": tuner.load_params.source.fingerprint(),
        "settings": recorded(settings)["settings"],
        "data": {split: tuner.data(split, training=split == "train")[0].fingerprint for split in ("train", "dev")},
    }
    outcomes = sweep.sweep(
        tuner,
        sweep.grid(settings, flags.batch_size, flags.learning_rate, flags.epochs, range(flags.seeds)),
        flags.workdir,
        identity,
        keep=lambda run: _keep(tuner, run, flags),
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    table = sweep.write_report(task.name, task.metric, outcomes, flags.workdir)
    return "\n".join(
        [
            table,
            *(
                f"{name}: {flags.workdir / file}"
                for name, file in (("table", "sweep.md"), ("picture", "sweep.png"), ("best model", "best"))
            ),
        ]
    )


def _keep(tuner: FineTuner, run: Trained, flags: argparse.Namespace) -> None:
    """Writes the best model so far and what it scored."""
    from bertjax.tasks.results import result_json, save_model, write_json

    result = result_json(tuner, run, flags.init_from)
    write_json(flags.workdir / "result.json", result)
    save_model(tuner, run.params, flags.workdir / "best", result)


if __name__ == "__main__":
    main()
