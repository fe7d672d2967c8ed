"""Kills a real run of bertjax.main again and again, on whatever devices it uses.

In: the arguments of bertjax.main after `--`. Out: nothing, or SystemExit that says in what the
killed run differs from the same command left alone: losses, gradient norms and evaluations of all
logged steps, and the arrays of the last checkpoint.
"""

from __future__ import annotations

import math
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.log.logbook import METRICS_FILE, read_records
from bertjax.model.paths import flatten
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.starts import FILE as STARTS_FILE
from bertjax.run.starts import read as read_starts
from bertjax.training.programs import DIRECTORY as PROGRAMS

# Of a record; these tell of time and not of the model.
TIMES = {"time", "tokens_per_second", "mfu", "step_time", "data_wait", "seconds"}
IN_START = 0.2  # share of the kills that come before the first step


class RunSoak:
    """One command, left alone and under fire.

    Args:
      directory: of both runs; what is there is used again: an undisturbed run that has ended, and
        the compilation cache.
      command: arguments of bertjax.main.
      kills: how often the disturbed run is killed.
      minutes: after so many, no further kill; what was killed until then is compared.
      records: a kill comes after up to so many logged steps of a start.
      seed: of the moments.
    """

    def __init__(
        self, directory: pathlib.Path, command: Sequence[str], kills: int, minutes: float, records: int, seed: int
    ):
        self.directory, self.kills, self.records = directory, kills, records
        self.minutes = minutes
        self.cache = directory / "cache"
        self.command = [*command, f"--config.execution.compilation_cache={self.cache}", "--config.log.every_steps=1"]
        self.random = random.Random(seed)

    def launch(self, run: pathlib.Path) -> subprocess.Popen[bytes]:
        run.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bertjax.main", *self.command, f"--workdir={run}"]
        with open(run / "output.txt", "ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def finish(self, run: pathlib.Path) -> None:
        if code := self.launch(run).wait():
            raise SystemExit(
                f"the run in {run} ended with exit code {code}: {(run / 'output.txt').read_text()[-3000:]}"
            )

    def kill_once(self, run: pathlib.Path) -> str:
        """Starts the run and kills it at a random moment; says when."""
        before, began = size_of(run), time.monotonic()
        child = self.launch(run)
        in_start = self.random.random() < IN_START
        wait_s = self.random.uniform(0, 12 if in_start else 0.2)
        enough = self.random.randint(1, self.records)
        while child.poll() is None and not in_start:
            if size_of(run) - before >= enough:
                break
            time.sleep(0.01)
        deadline = time.monotonic() + wait_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
        code = child.wait()
        if code not in (-9, 0):
            raise SystemExit(
                f"before it was killed, the run ended with exit code {code}: {(run / 'output.txt').read_text()[-3000:]}"
            )
        last = read_records(run / METRICS_FILE)[-1:] if (run / METRICS_FILE).exists() else []
        return (
            f"{'ended' if code == 0 else 'killed'} at step {last[0]['step'] if last else 0} "
            f"after {time.monotonic() - began:.0f} s"
        )

    def run(self) -> None:
        """Raises SystemExit with an explanation if anything differs."""
        calm, rough = self.directory / "undisturbed", self.directory / "disturbed"
        if not (calm / "report.html").exists():
            self.finish(calm)
        shutil.rmtree(rough, ignore_errors=True)
        if (calm / PROGRAMS).exists():  # what each run compiles for itself may differ
            shutil.copytree(calm / PROGRAMS, rough / PROGRAMS)
        deadline, number = time.monotonic() + 60 * self.minutes, 0
        while number < self.kills and time.monotonic() < deadline:
            number += 1
            if emptied := number % 2 == 0:
                shutil.rmtree(self.cache, ignore_errors=True)
            print(
                f"kill {number}: {self.kill_once(rough)}{', with an empty compilation cache' if emptied else ''}",
                flush=True,
            )
        self.finish(rough)
        found = list(differences(calm, rough))
        if found:
            raise SystemExit(
                f"differs from the undisturbed run: {'; '.join(found[:8])}"
                f"{f' and {len(found) - 8} more' if len(found) > 8 else ''}"
            )
        starts = read_starts(rough / STARTS_FILE)
        steps = len(read_records(rough / METRICS_FILE))
        print(
            f"bit-equal after {number} kills: {steps} records, all arrays of the last "
            f"checkpoint; went on from steps {', '.join(str(s['step']) for s in starts)}"
        )


def differences(calm: pathlib.Path, rough: pathlib.Path) -> Iterator[str]:
    """What is not the same in two runs: 'loss of step 85: 7.1 and 7.2', 'params/... '."""
    expected, found = (read_records(run / METRICS_FILE) for run in (calm, rough))
    if len(expected) != len(found):
        yield f"{len(expected)} and {len(found)} records"
    for one, other in zip(expected, found, strict=False):
        for name in sorted((one.keys() | other.keys()) - TIMES):
            if not same(one.get(name), other.get(name)):
                yield (f"{name} of step {one['step']}: {one.get(name)!r} and {other.get(name)!r}")
    arrays = [last_arrays(run) for run in (calm, rough)]
    for name in sorted(arrays[0].keys() | arrays[1].keys()):
        one, other = (a.get(name) for a in arrays)
        if one is None or other is None or np.asarray(one).tobytes() != np.asarray(other).tobytes():
            yield name


def same(one: Any, other: Any) -> bool:
    nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one)
    return one == other or (nan and math.isnan(other))


def last_arrays(run: pathlib.Path) -> dict[str, Any]:
    """{path: array} of the newest checkpoint."""
    checkpoints = Checkpoints(str(run / "checkpoints"), read_only=True)
    tree, step = checkpoints.restore_numpy()
    checkpoints.close()
    return {"step": np.int64(step), **flatten(tree)}


def size_of(run: pathlib.Path) -> int:
    """Lines of metrics.jsonl."""
    path = run / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0
