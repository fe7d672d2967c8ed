"""All GLUE tasks that a folder holds, one after the other, and the benchmark's table.

In: a config whose task is 'all' and whose data is the folder with CoLA/, MRPC/ and so on, or hf:nyu-mll/glue. Out: a
run a task under WORKDIR/TASK (an interrupted suite goes on where it was), WORKDIR/glue.md and glue.png. MNLI is scored
on both development sets, and its model answers the diagnostic set.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from bertjax.config import Config
from bertjax.data.named import is_name
from bertjax.formats.files import write_whole
from bertjax.run.run import writing_results
from bertjax.tasks import job
from bertjax.tasks.finetune import NoFiniteScore
from bertjax.tasks.glue import GLUE, glue_table
from bertjax.tasks.make import make_task
from bertjax.training.loop import NotFiniteError


@dataclasses.dataclass(frozen=True)
class Suite:
    """The jobs of a suite by task name; their data and settings have been checked."""

    jobs: dict[str, job.TaskJob]
    data: str
    workdir: pathlib.Path


def prepare(config: Config, workdir: str, mesh: Any = None) -> Suite:
    """Prepares every task whose folder is there, before the first is trained.

    Raises ValueError if there is none, and for whatever job.prepare refuses.
    """
    if "://" in str(workdir):
        raise ValueError(f"workdir={workdir}: config.task.name=all needs a local disk; a single task does not")
    data = str(config.task.data)
    if not data or data.startswith("tfds:"):
        raise ValueError(
            f"config.task.data={data!r}: the suite needs the folder that holds CoLA/, SST-2/, MRPC/ and so on, or "
            "hf:nyu-mll/glue"
        )
    folders = {name: pathlib.Path(data) / spec.folder for name, spec in GLUE.items() if "train" in spec.files}
    present = [name for name, folder in folders.items() if folder.is_dir() and any(folder.glob("*train*"))]
    present = list(folders) if is_name(data) else present
    if not present:
        raise ValueError(
            f"{data} holds no training data of a GLUE task; expected a folder such as "
            f"{', '.join(folder.name for folder in folders.values())}"
        )
    missing = ", ".join(name for name in folders if name not in present)
    left_out = f"; not there, so left out: {missing}" if missing else ""
    print(f"GLUE from {data}: {', '.join(present)}{left_out}", flush=True)
    jobs = {}
    for name in present:
        predict = config.task.predict
        if name == "mnli" and "test" in ",".join(predict).split(","):
            predict = (*predict, "test_mismatched")  # a submission has both
        one = config.replace({"task.name": name, "task.data": data_of(data, name), "task.predict": predict})
        jobs[name] = job.prepare(one, str(pathlib.Path(workdir) / name), mesh)
        if name == "mnli":  # a file that is missing shows now, not after the training
            jobs[name].tuner.read("dev_mismatched")
    return Suite(jobs, data, pathlib.Path(workdir))


def data_of(data: str, name: str) -> str:
    """The folder with all tasks, in which each finds its own, or the task's configuration of hf:NAME."""
    return f"{data},{name}" if is_name(data) else data


def run(suite: Suite, **output: Any) -> dict[str, dict[str, float]]:
    """Trains every task and prints the table. Returns {task: scores on dev}. `output` is that of run.run.

    Raises NotFiniteError for tasks that diverged, after the others.
    """
    results: dict[str, dict[str, float]] = {}
    diverged: dict[str, str] = {}
    first = jax.process_index() == 0
    for number, (name, prepared) in enumerate(suite.jobs.items(), 1):
        if first:
            print(f"\n--- {name} ({number} of {len(suite.jobs)})", flush=True)
        try:
            results[name] = job.run(prepared, **output)["scores"]
        except (NotFiniteError, NoFiniteScore) as error:
            diverged[name] = f"{name}: {error}"
            continue
        if name == "mnli":
            tuner, model = prepared.tuner, prepared.workdir / "model"
            how = dict(settings=tuner.settings, execution=tuner.model.execution, mesh=tuner.mesh, model_directory=model)
            scores = job.evaluate(make_task("mnli", data_of(suite.data, "mnli")), split="dev_mismatched", **how)
            results["mnli_mm"] = dict(scores.values)
            if is_name(suite.data) or (pathlib.Path(suite.data) / GLUE["ax"].folder).is_dir():
                diagnostic = make_task("ax", data_of(suite.data, "ax"))
                job.evaluate(diagnostic, split="test", write_to=prepared.workdir if first else None, **how)
    if first and results:
        write(results, suite.workdir)
    if diverged:
        raise NotFiniteError("\n".join(diverged.values()))
    return results


def write(results: Mapping[str, Mapping[str, float]], workdir: pathlib.Path) -> None:
    """glue.md and glue.png, and the table on the screen."""
    table = glue_table(results)
    with writing_results(workdir):
        write_whole(workdir / "glue.md", table)
        draw(results, workdir / "glue.png")
    files = f"table: {workdir / 'glue.md'}\npicture: {workdir / 'glue.png'}"
    print(f"\nGLUE, development sets, percent:\n\n{table}\n{files}", flush=True)


def draw(results: Mapping[str, Mapping[str, float]], path: pathlib.Path) -> None:
    """A bar for every score that the benchmark reports; a line where the majority's accuracy is."""
    from matplotlib.figure import Figure

    bars = [
        (
            f"{name}\n{metric}",
            100 * scores[metric],
            100 * scores["majority"] if metric == "accuracy" and "majority" in scores else None,
        )
        for name, scores in results.items()
        for metric in GLUE[name.removesuffix("_mm")].reported
    ]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (_, value, majority) in enumerate(reversed(bars)):
        axes.barh(place, value, 0.62, color="tab:blue")
        # At the end of its bar; beyond the line where the number (7 wide) would be written over it.
        over = majority is not None and value - 1 < majority < value + 8
        axes.text((majority if over else max(value, 0)) + 1, place, f"{value:.1f}", va="center")
        if majority is not None:
            axes.plot([majority] * 2, [place - 0.38, place + 0.38], color="black")
    axes.set_yticks(range(len(bars)), [label for label, _, _ in reversed(bars)])
    axes.set_xlim(min(0, *(value for _, value, _ in bars)), 108)
    axes.set_xlabel("percent on the development set (black line: always the most frequent class)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
