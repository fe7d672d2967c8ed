"""Does pre-training help? Fine-tunes several models on eight small tasks, five seeds each.

    python -m tests.benchmarks.transfer prepare --data=SOURCE --out=DIR
    python -m tests.benchmarks.transfer --out=DIR --gpus=0,1 \\
        scratch=scratch:runs/base/model ours=runs/base/model other=MODEL

A model is NAME=DIRECTORY; NAME=scratch:DIRECTORY for random weights in the same architecture with
the same vocabulary; NAME=bilstm:DIRECTORY with a BiLSTM between encoder and head.

`prepare` writes the tasks' data to DIR/data from a folder with glue/, squad/ and ner/: where the
training set is not at hand (QNLI, SQuAD) the development set is split, QNLI by its first three
quarters and SQuAD by its first three quarters of the articles, so these two numbers compare only
with each other; SST-2 keeps its first 10,000 training rows.

Every task is a process of its own, in which the models of one architecture share compiled steps;
with several GPUs the tasks are spread over them. A finished run is never repeated. Prints a table
of mean and standard deviation over the seeds of the best score on dev, and writes transfer.md,
transfer.json and transfer.png.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bertjax import markdown
from bertjax.tools.arguments import json_object, refusals
from tests.benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Work:
    """One task: where its files are in DIR/data and how it is trained (BERT paper, A.3)."""

    task: str  # of tasks.job.make_task
    folder: str
    title: str
    epochs: int = 3
    max_length: int = 128
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


# Longest first, which fills several GPUs best.
WORK = {
    "squad": Work("squad1.1", "SQuAD", "SQuAD 1.1, dev split", 2, 384),
    "sst2": Work("sst2", "SST-2", "SST-2, 10,000 rows"),
    "cola": Work("cola", "CoLA", "CoLA"),
    "qnli": Work("qnli", "QNLI", "QNLI, dev split"),
    "stsb": Work("stsb", "STS-B", "STS-B", 4),
    "mrpc": Work("mrpc", "MRPC", "MRPC", 4),
    "rte": Work("rte", "RTE", "RTE", 4),
    "wnut17": Work("ner", "WNUT-17", "WNUT-17", 4),
}
SST2_ROWS = 10_000
TRAIN_SHARE = 0.75  # of a development set that is split
BATCH_SIZE, LEARNING_RATE = 32, 5e-5  # A.3: both of the grid; small sets want the higher rate


# --------------------------------------------------------------------------------------- prepare


def prepare(source: pathlib.Path, data: pathlib.Path) -> None:
    """Writes every task's train and dev files in their official layout under `data`."""
    for name in ("CoLA", "STS-B", "MRPC", "RTE", "SST-2"):
        for split in ("train.tsv", "dev.tsv"):
            _copy(source / "glue" / name / split, data / name / split)
    sst2 = data / "SST-2" / "train.tsv"
    # The file says itself whether it has a header: the task's reader knows both layouts.
    lines = sst2.read_text(encoding="utf-8").splitlines(keepends=True)
    sst2.write_text("".join(lines[: SST2_ROWS + lines[0].startswith("sentence\t")]), encoding="utf-8")
    split_table(source / "glue" / "QNLI" / "dev.tsv", data / "QNLI")
    split_squad(_first(source / "squad", "dev-v1.1*.json"), data / "SQuAD")
    for split, pattern in (("train", "wnut17train*"), ("dev", "emerging.dev*")):
        _copy(_first(source / "ner" / "wnut17", pattern), data / "WNUT-17" / f"{split}.conll")


def _first(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    if found := sorted(folder.glob(pattern)):
        return found[0]
    raise ValueError(f"no {folder / pattern}")


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def split_table(path: pathlib.Path, out: pathlib.Path) -> None:
    """A table with a header as train.tsv (its first part) and dev.tsv (the rest)."""
    header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    cut = round(TRAIN_SHARE * len(rows))
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.tsv", rows[:cut]), ("dev.tsv", rows[cut:])):
        (out / name).write_text(header + "".join(part), encoding="utf-8")


def split_squad(path: pathlib.Path, out: pathlib.Path, version: str = "1.1") -> None:
    """A SQuAD file as train-vX.json (its first articles) and dev-vX.json (the rest)."""
    content = json.loads(path.read_text(encoding="utf-8"))
    articles = content["data"]
    cut = round(TRAIN_SHARE * len(articles))
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", articles[:cut]), ("dev", articles[cut:])):
        text = json.dumps({**content, "data": part}, ensure_ascii=False)
        (out / f"{name}-v{version}.json").write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------- run


def run(name: str, models: dict[str, str], out: pathlib.Path, seeds: int, rate: float, given: dict[str, Any]) -> None:
    """All models and seeds of one task, with the `given` settings; leaves OUT/TASK/MODEL/runs.jsonl."""
    import jax

    from bertjax.config import finetune_config, frozen
    from bertjax.model.heads import init_params
    from bertjax.model.presets import Execution
    from bertjax.tasks import job, sweep
    from bertjax.tasks.results import recorded

    work = WORK[name]
    (out / name).mkdir(parents=True, exist_ok=True)
    execution = Execution.for_backend(jax.default_backend())
    tuners: dict[Any, Any] = {}
    for model, where in models.items():
        how, directory = _start(where)
        start = job.Pretrained(directory)
        settings = frozen(finetune_config()).replace(
            {"task.max_length": work.max_length, "task.bilstm": int(how == "bilstm"), **given}
        )
        kind = start.source.config, _vocabulary(directory), how
        if kind not in tuners:
            task = job.make_task(work.task, str(out / "data" / work.folder), work.options)
            tuners[kind] = job.prepare_tuner(task, directory, settings, execution=execution)
        tuner = tuners[kind]
        (out / name / "metric.txt").write_text(tuner.task.metric)
        tuner.load_params = jax.jit(init_params, static_argnums=0) if how == "scratch" else start
        search = {"batch_size": [BATCH_SIZE], "optimizer.learning_rate": [rate], "task.epochs": [work.epochs]}
        outcomes = sweep.sweep(
            tuner.run,
            sweep.grid(settings, search, range(seeds)),
            out / name / model,
            {"task": name, "model": where, "settings": recorded(settings)["settings"]},
        )
        values = [outcome.value for outcome in outcomes]
        print(
            f"{name}, {model}: {tuner.task.metric} {statistics.fmean(values):.4f} over "
            f"{len(values)} seeds, {sum(o.seconds for o in outcomes):.0f} s",
            flush=True,
        )


def _start(where: str) -> tuple[str, str]:
    """('scratch' or 'bilstm' or '', directory) of a model as it is named on the command line."""
    how, _, directory = where.partition(":")
    return (how, directory) if how in ("scratch", "bilstm") else ("", where)


def _vocabulary(directory: str) -> str:
    from bertjax.interop import open_source
    from bertjax.tokenization import load_tokenizer

    return load_tokenizer(open_source(directory).directory).fingerprint


def run_all(
    tasks: Sequence[str], models: dict[str, str], out: pathlib.Path, gpus: list[str], options: list[str]
) -> list[str]:
    """Every task in a process of its own; returns the names of those that failed."""
    arguments = [f"{name}={where}" for name, where in models.items()]
    return harness.run_all(
        [
            harness.Job(
                task,
                harness.python(
                    "tests.benchmarks.transfer", "run", *arguments, f"--tasks={task}", f"--out={out}", *options
                ),
            )
            for task in tasks
        ],
        gpus,
        out,
    )


# ----------------------------------------------------------------------------------------- table


def results(out: pathlib.Path, models: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """{task: {model: the scores of its seeds, in percent}} of what has been run."""
    from bertjax.tasks.sweep import read_outcomes

    found: dict[str, dict[str, list[float]]] = {}
    for task in WORK:
        for model in models:
            if outcomes := read_outcomes(out / task / model / "runs.jsonl"):
                found.setdefault(task, {})[model] = [100 * o.value for o in outcomes]
    return found


def table(found: dict[str, dict[str, list[float]]], models: Sequence[str], metrics: dict[str, str]) -> str:
    """A Markdown table: a task a row, mean +- standard deviation of each model."""
    rows = [
        [WORK[task].title, metrics.get(task, ""), *(spread(of_model.get(m)) for m in models)]
        for task, of_model in found.items()
    ]
    complete = [by_model for by_model in found.values() if set(models) <= set(by_model)]
    if complete:
        means = [statistics.fmean(statistics.fmean(by_model[model]) for by_model in complete) for model in models]
        rows.append(["mean", "", *(f"{mean:.1f}" for mean in means)])
    return markdown.table(["task", "score", *models], rows) + "\n"


def spread(values: Sequence[float] | None) -> str:
    """'51.0 ± 1.4': mean and standard deviation over the seeds, if there are several; '-': none."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def draw(path: pathlib.Path, found: dict[str, dict[str, list[float]]], models: Sequence[str]) -> None:
    """Every seed as a dot, the mean as a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 * len(found) + 3, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        colour, label = f"C{number}", model
        for place, by_model in enumerate(found.values()):
            values = by_model.get(model)
            if values:
                x = place + (number - (len(models) - 1) / 2) * width
                axes.bar(x, statistics.fmean(values), width * 0.95, color=colour, alpha=0.5, label=label)
                axes.plot([x] * len(values), values, ".", color=colour, markersize=4)
                label = None  # once in the legend
    axes.set_xticks(range(len(found)), [WORK[task].title.replace(", ", ",\n") for task in found], fontsize=8)
    axes.set_ylabel("score on dev, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------ main


def main(argv: list[str]) -> None:
    made = harness.make_parser("transfer", __doc__)
    made.add_argument(
        "words",
        nargs="+",
        metavar="[prepare|run|table] NAME=MODEL",
        help="models to compare, after the step to take (default: everything)",
    )
    made.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/transfer"))
    made.add_argument("--data", type=pathlib.Path, help="source of `prepare`")
    made.add_argument("--tasks", default=",".join(WORK), help=", ".join(WORK))
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--learning_rate", type=float, default=LEARNING_RATE)
    made.add_argument("--settings", type=json_object, default={}, help='others: {"optimizer.bias_correction": true}')
    made.add_argument("--gpus", default=harness.default_gpus(1), help="CUDA devices; '' = the CPU")
    made.add_argument("--compilation_cache", default="~/.cache/bertjax/xla", help="'' = off")
    args = made.parse_intermixed_args(argv)  # options may stand between the words
    what = args.words.pop(0) if "=" not in args.words[0] else "all"
    tasks = args.tasks.split(",")
    if unknown := [task for task in tasks if task not in WORK]:
        made.error(f"--tasks: {', '.join(unknown)}; one of {', '.join(WORK)}")
    if what not in ("all", "prepare", "run", "table"):
        made.error(f"{what}: one of prepare, run, table, or NAME=MODEL")
    if what == "prepare":
        if args.data is None:
            made.error("--data=SOURCE is missing: a folder with glue/, squad/ and ner/")
        with refusals("transfer"):
            prepare(args.data, args.out / "data")
        return
    models = dict(word.split("=", 1) for word in args.words)
    if not models:
        made.error("no model given: NAME=DIRECTORY, NAME=scratch:DIRECTORY or NAME=bilstm:DIRECTORY")
    if what == "run":
        import jax

        if args.compilation_cache:
            cache = pathlib.Path(args.compilation_cache).expanduser()
            jax.config.update("jax_compilation_cache_dir", str(cache))
        for task in tasks:
            run(task, models, args.out, args.seeds, args.learning_rate, args.settings)
        return
    failed = []
    if what == "all":
        failed = run_all(
            tasks,
            models,
            args.out,
            args.gpus.split(","),
            [
                f"--seeds={args.seeds}",
                f"--learning_rate={args.learning_rate}",
                f"--settings={json.dumps(args.settings)}",
                f"--compilation_cache={args.compilation_cache}",
            ],
        )
    found = results(args.out, list(models))
    metrics = {task: path.read_text() for task in WORK if (path := args.out / task / "metric.txt").exists()}
    text = table(found, list(models), metrics)
    (args.out / "transfer.md").write_text(text)
    (args.out / "transfer.json").write_text(json.dumps(found, indent=1))
    print(text)
    if found:
        draw(args.out / "transfer.png", found, list(models))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
