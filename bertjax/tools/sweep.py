"""python -m bertjax.tools.sweep: the paper's search over batch size, learning rate and epochs.

    python -m bertjax.tools.sweep --task=mrpc --data=glue --init_from=DIR --workdir=runs/mrpc \\
        --seeds=5

Runs in one process with shared compilation, goes on where it was interrupted, and ends with a
table, a picture (WORKDIR/sweep.png) and the best model of all runs (WORKDIR/best).
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from bertjax.tasks.sweep import PAPER_GRID


def _texts(name: str) -> list[str]:
    return [f"{value:g}" for value in PAPER_GRID[name]]


_TASK = flags.DEFINE_string("task", None, "cola, sst2, mrpc, ..., squad1.1, ner, table, ...")
_DATA = flags.DEFINE_string("data", None, "Directory of the task's files, or tfds:NAME.")
_INIT = flags.DEFINE_string("init_from", None, "Model directory to start from.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where runs.jsonl, sweep.md and best/ go.")
_OPTIONS = flags.DEFINE_string("options", "{}", "Options of the task as a JSON object.")
_BATCH = flags.DEFINE_list("batch_size", _texts("batch_size"), "Batch sizes.")
_RATE = flags.DEFINE_list("learning_rate", _texts("learning_rate"), "Peak learning rates.")
_EPOCHS = flags.DEFINE_list("epochs", _texts("epochs"), "Epochs.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds 0 to N-1 of every setting.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("max_length", 128, "Tokens of a row.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Arithmetic.")
_BUCKETS = flags.DEFINE_integer("buckets", 3, "Padded lengths, each one compilation.")
_CACHE = flags.DEFINE_string(
    "compilation_cache", "~/.cache/bertjax/xla", "Directory of compiled programs; '' = off."
)


def main(arguments: Sequence[str]) -> None:
    """Runs or resumes the search."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {' '.join(arguments[1:])}")
    import jax

    if _CACHE.value:  # before the first array, or the first compilations are not kept
        cache = pathlib.Path(_CACHE.value).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache))
    from bertjax.model.presets import Execution
    from bertjax.tasks import job, sweep
    from bertjax.tasks.finetune import FineTuneSettings, RunSettings

    execution = Execution.for_backend(jax.default_backend(), dtype=_DTYPE.value)
    directory = pathlib.Path(_WORKDIR.value).expanduser()
    settings = FineTuneSettings(max_length=_LENGTH.value, buckets=_BUCKETS.value)
    try:
        options = json.loads(_OPTIONS.value)
        task = job.make_task(_TASK.value, _DATA.value, options)
        prepared = job.prepare_task(
            task, _INIT.value, directory, settings, RunSettings(), execution=execution
        )
        tuner = prepared.tuner
        identity = {
            "task": task.name,
            "options": options,
            "init_from": _INIT.value,
            "settings": dataclasses.asdict(settings),
            "data": {s: tuner.data(s, training=s == "train")[0].fingerprint
                     for s in ("train", "dev")},
        }  # fmt: skip
        runs = sweep.grid(
            [int(value) for value in _BATCH.value],
            [float(value) for value in _RATE.value],
            [int(value) for value in _EPOCHS.value],
            range(_SEEDS.value),
        )
        outcomes = sweep.sweep(tuner, runs, directory, identity,
                               keep=lambda run: _keep(tuner, run, directory))
    except (ValueError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        sys.exit(2)
    print(sweep.write_report(task.name, task.metric, outcomes, directory))


def _keep(tuner, run, directory: pathlib.Path) -> None:
    from bertjax.tasks.results import result_json, save_model, write_json

    result = result_json(tuner, run, _INIT.value)
    write_json(directory / "result.json", result)
    save_model(tuner, run.params, directory / "best", result)


if __name__ == "__main__":
    for name in ("task", "data", "init_from", "workdir"):
        flags.mark_flag_as_required(name)
    app.run(main)
