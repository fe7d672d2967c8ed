"""A search over settings of a fine-tuning: by default the paper's, of batch size, learning rate and epochs.

    python -m bertjax.tools.sweep --task=mrpc --data=glue --init_from=DIR --workdir=runs/search --seeds=5
    python -m bertjax.tools.sweep --config=configs/glue.py:mrpc --config.task.data=glue/MRPC \\
        --config.init_from=DIR --workdir=runs/optimizers \\
        --search=optimizer.name=adamw,optax.lion --search=optimizer.learning_rate=1e-5,2e-5

Runs in one process, in which runs share data and compiled programs where they can; goes on where it was interrupted,
and ends with a table, a picture (WORKDIR/sweep.png) and the best model of all runs (WORKDIR/best).
"""

from __future__ import annotations

import ast
import functools
import operator
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bertjax.config import Config, finetune_config
from bertjax.config_checks import check_config, check_name
from bertjax.interruption import one_line
from bertjax.tools.arguments import Parser, add_settings, make_parser, refusals

if TYPE_CHECKING:  # jax is set up before they are imported
    from bertjax.tasks.finetune import Trained

SHORT = {
    "task": "task.name",
    "data": "task.data",
    "options": "task.options",
    "init_from": "init_from",
    "max_length": "task.max_length",
    "buckets": "task.buckets",
    "dtype": "execution.dtype",
    "compilation_cache": "execution.compilation_cache",
}
# Of the paper's grid.
LISTS = {"batch_size": "batch_size", "learning_rate": "optimizer.learning_rate", "epochs": "task.epochs"}


def parser() -> Parser:
    """The command line."""
    parser = make_parser("sweep", __doc__)
    add = parser.add_argument
    add("--workdir", required=True, type=pathlib.Path, metavar="DIR", help="where runs.jsonl, sweep.md, best/ go")
    add(
        "--search",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="a setting and what it is to be; may be repeated: all combinations. Default: the paper's grid",
    )
    for flag, name in LISTS.items():
        add(f"--{flag}", metavar="N,N", help=f"short for --search={name}=N,N; the rest of the paper's grid stays")
    add("--seeds", type=int, default=1, help="seeds 0 to N-1 of every setting (default 1)")
    add_settings(parser, finetune_config, SHORT)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs or resumes the search."""
    flags = parser().parse_args(arguments)
    with refusals("sweep", 2):
        search = searched(flags)
        config = check_config(flags.config)
        if config.job != "finetune":
            raise ValueError(f"config.job={config.job!r}: a search is over fine-tunings")
        if config.export.push:
            raise ValueError(
                "config.export.push has no effect on a search; push its best model afterwards: python -m "
                f"bertjax.tools.convert --from={flags.workdir}/best --push={config.export.push}"
            )
    from bertjax.formats.checkpoint import CheckpointError
    from bertjax.process.preemption import Preempted

    try:
        with refusals("sweep", 1, CheckpointError):
            print(run(config, search, range(flags.seeds), flags.workdir.expanduser()))
    except Preempted as stopped:
        print(f"stopped by {stopped.reason}; the same command goes on with the runs that are missing", file=sys.stderr)
        raise


def searched(flags: Any) -> dict[str, list[Any]]:
    """{setting: values} of --search and its short forms, or the paper's grid but for what the command line sets."""
    from bertjax.tasks.sweep import PAPER_GRID

    found = {} if flags.search else {n: [*values] for n, values in PAPER_GRID.items() if n not in flags.given}
    for flag, name in LISTS.items():
        if (text := getattr(flags, flag)) is not None:
            found[name] = values_of(name, text, f"--{flag}={text}")
    for text in flags.search:
        name, equals, values = text.removeprefix("config.").partition("=")
        if not equals or not values:
            raise ValueError(f"--search={text}: write NAME=VALUE,VALUE, such as optimizer.learning_rate=1e-5,2e-5")
        check_name(name)
        if name == "seed":
            raise ValueError("--search=seed: give --seeds=N, whose runs are averaged")
        if name in found:
            raise ValueError(f"--search={name} is given twice; write all its values in one list")
        found[name] = values_of(name, values, f"--search={text}")
    return found


def values_of(name: str, text: str, given: str) -> list[Any]:
    """The values of a setting, separated by commas, each read as --config.NAME=VALUE is."""
    from bertjax.command_line import load_config

    try:
        values = [str(value) for value in ast.literal_eval(f"[{text}]")]
    except (ValueError, SyntaxError):  # words among them
        values = text.split(",")
    try:
        configs = [load_config(None, [f"--config.{name}={value}"], finetune_config()) for value in values]
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    return [operator.attrgetter(name)(config) for config in configs]


def run(config: Config, search: dict[str, list[Any]], seeds: range, workdir: pathlib.Path) -> str:
    """The table at the end of the search, and where it and the best model are."""
    import jax

    if cache := config.execution.compilation_cache:  # before the first array, or the first compilations are not kept
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
    from bertjax.tasks import job, sweep
    from bertjax.tasks.finetune import PER_RUN
    from bertjax.tasks.results import recorded

    runs = [(setting, check_config(settings)) for setting, settings in sweep.grid(config, search, seeds)]
    base = {name: operator.attrgetter(name)(config) for name in PER_RUN}
    tuner, made_for = None, None

    def tuner_for(settings: Config) -> Any:
        """The tuner of the run before, if the two differ in PER_RUN only."""
        nonlocal tuner, made_for
        if settings.replace(base) != made_for:
            tuner = None  # its memory first
            tuner, made_for = job.tuner_of(settings)[0], settings.replace(base)
        return tuner

    _check(runs, base)
    for name in ("task.name", "task.metric"):
        if len(search.get(name, ())) > 1:
            raise ValueError(f"--search={name}: runs of other scores have no best one; make a search for each")
    first = tuner_for(runs[0][1])
    settings = {"options": config.task.options, **recorded(config)["settings"]}
    identity = job.facts_of(first) | {"task": first.task.name, "settings": settings}
    task, metric = first.task.name, first.task.metric
    del first
    outcomes = sweep.sweep(
        lambda settings: tuner_for(settings).run(settings),
        runs,
        workdir,
        identity,
        keep=lambda trained: _keep(tuner, trained, workdir),
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    table = sweep.write_report(task, metric, outcomes, workdir)
    places = {"table": "sweep.md", "picture": "sweep.png", "best model": "best"}
    there = {name: workdir / file for name, file in places.items() if (workdir / file).exists()}
    return "\n".join([table, *(f"{name}: {path}" for name, path in there.items())])


def _check(runs: Iterable[tuple[Mapping[str, Any], Config]], base: Mapping[str, Any]) -> None:
    """Raises ValueError for a run that could not start, with what it searches, before the first run."""
    from bertjax.tasks import job, sweep
    from bertjax.training.sharding import check_batch

    made_for, mesh = None, None
    for setting, settings in runs:
        try:
            if (shared := settings.replace(base)) != made_for:
                mesh, made_for = job.tuner_of(shared, read=False)[0].mesh, shared
            check_batch(settings.batch_size, mesh, settings.accumulation)
        except (ValueError, OSError) as error:
            raise ValueError(f"the run with {sweep.described(setting)}: {one_line(error)}") from error


def _keep(tuner: Any, trained: Trained, workdir: pathlib.Path) -> None:
    """Writes the best model so far, with its scores."""
    from bertjax.formats.files import write_json
    from bertjax.tasks.results import result_json, save_model

    result = result_json(tuner, trained, trained.settings.init_from)
    write_json(workdir / "result.json", result, allow_nan=False)
    save_model(tuner, trained.params, workdir / "best", result)


if __name__ == "__main__":
    main()
