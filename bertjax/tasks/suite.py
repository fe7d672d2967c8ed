"""All GLUE tasks that a folder holds, one after the other, and the benchmark's table.

In: a config whose task is 'all' and whose data is the folder with CoLA/, MRPC/ and so on. Out: a
run a task under WORKDIR/TASK (an interrupted suite goes on where it was), and WORKDIR/glue.md. MNLI
is scored on both development sets, and its model answers the diagnostic set.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pathlib
from typing import Any

from bertjax.tasks import job
from bertjax.tasks.glue import GLUE, glue_table

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Suite:
    """The jobs of a suite by task name; their data and settings have been checked."""

    jobs: dict[str, job.Job]
    data: str
    workdir: pathlib.Path


def prepare(config: Any, workdir: str, mesh: Any = None) -> Suite:
    """Prepares every task whose folder is there, before the first is trained.

    Raises ValueError if there is none, and for whatever job.prepare refuses.
    """
    data = str(config.task.data)
    if not data or data.startswith("tfds:"):
        raise ValueError(f"config.task.data={data!r}: the suite needs the folder that holds "
                         "CoLA/, SST-2/, MRPC/ and so on")
    folders = {name: pathlib.Path(data) / spec.folder for name, spec in GLUE.items()
               if "train" in spec.files}
    present = [name for name, folder in folders.items() if folder.is_dir()
               and any(folder.glob("*train*"))]
    if not present:
        raise ValueError(f"{data} holds no training data of a GLUE task; expected a folder such as "
                         f"{', '.join(folder.name for folder in folders.values())}")
    if missing := [name for name in folders if name not in present]:
        log.warning("not in %s, so left out: %s", data, ", ".join(missing))
    jobs = {}
    for name in present:
        one = copy.deepcopy(config)
        one.task.name = name
        jobs[name] = job.prepare(one, str(pathlib.Path(workdir) / name), mesh)
    return Suite(jobs, data, pathlib.Path(workdir))


def run(suite: Suite) -> dict[str, dict[str, float]]:
    """Trains every task and prints the table. Returns {task: scores on dev}."""
    results: dict[str, dict[str, float]] = {}
    for name, prepared in suite.jobs.items():
        results[name] = job.run(prepared)["scores"]
        if name == "mnli":
            model = prepared.workdir / "model"
            tuner = prepared.tuner
            scores = job.evaluate(job.make_task("mnli", suite.data), model, "dev_mismatched",
                                  tuner.settings, mesh=tuner.mesh)
            results["mnli_mm"] = dict(scores.values)
            if (pathlib.Path(suite.data) / GLUE["ax"].folder).is_dir():
                job.evaluate(job.make_task("ax", suite.data), model, "test", tuner.settings,
                             mesh=tuner.mesh, write_to=prepared.workdir)
    table = glue_table(results)
    (suite.workdir / "glue.md").write_text(table, encoding="utf-8")
    print(f"\nGLUE, development sets, percent:\n\n{table}", flush=True)
    return results
