"""Kills a run again and again, and shows that the result is the same, bit for bit.

    python -m tests.benchmarks.soak_run --kills=20 -- --config=configs/base.py:packed ...

What follows -- are the arguments of bertjax.main. The run is done twice: once undisturbed, once
killed with SIGKILL at random moments, with an empty compilation cache at every second start. Losses,
gradient norms and evaluations of all steps and the arrays of the last checkpoint must be equal.
Exit code 0: they are.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.formats.checkpoint import SavedStates
from bertjax.log.logbook import METRICS_FILE, read_records
from bertjax.log.report.runs import STARTS_FILE
from bertjax.model.paths import flatten
from bertjax.tools.arguments import refusals
from bertjax.training.programs import DIRECTORY as PROGRAMS
from tests.benchmarks.harness import make_parser

# Of a record; these tell of time and not of the model.
TIMES = {"time", "tokens_per_second", "mfu", "step_time", "data_wait", "seconds"}
IN_START = 0.2  # share of the kills that come before the first step


class Soak:
    """One command, undisturbed and disturbed; arguments as the flags of the command line.

    A finished undisturbed run and the compilation cache are reused if `directory` holds them.
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
            raise SystemExit(f"soak_run: the run in {run} ended with exit code {code}: {output_of(run)}")

    def kill_once(self, run: pathlib.Path) -> tuple[bool, str]:
        """Starts the run and kills it at a random moment; (whether it came to that, when)."""
        before, began = size_of(run), time.monotonic()
        child = self.launch(run)
        in_start = self.random.random() < IN_START
        wait_s = self.random.uniform(0, 12 if in_start else 0.2)
        enough = self.random.randint(1, self.records) * (not in_start)
        while child.poll() is None and size_of(run) - before < enough:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
        child.kill()
        code = child.wait()
        if code not in (-9, 0):
            raise SystemExit(f"soak_run: before it was killed, the run ended with exit code {code}: {output_of(run)}")
        last = read_records(run / METRICS_FILE)[-1:] if (run / METRICS_FILE).exists() else []
        how, step = "killed" if code else "ended", last[0]["step"] if last else 0
        return bool(code), f"{how} at step {step} after {time.monotonic() - began:.0f} s"

    def run(self) -> None:
        """Raises SystemExit with an explanation if anything differs."""
        calm, rough = self.directory / "undisturbed", self.directory / "disturbed"
        if not (calm / "report.html").exists():
            self.finish(calm)
        shutil.rmtree(rough, ignore_errors=True)
        if (calm / PROGRAMS).exists():  # what each run compiles for itself may differ
            shutil.copytree(calm / PROGRAMS, rough / PROGRAMS)
        deadline, kills, killed = time.monotonic() + 60 * self.minutes, 0, True
        while killed and kills < self.kills and time.monotonic() < deadline:
            if emptied := kills % 2 == 1:
                shutil.rmtree(self.cache, ignore_errors=True)
            killed, when = self.kill_once(rough)
            kills += killed
            print(f"start {kills + (not killed)}: {when}{', with an empty compilation cache' * emptied}", flush=True)
        if killed:
            self.finish(rough)
        found = list(differences(calm, rough))
        if found:
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            raise SystemExit(f"soak_run: differs from the undisturbed run: {'; '.join(found[:8])}{more}")
        starts = read_records(rough / STARTS_FILE)
        steps = len(read_records(rough / METRICS_FILE))
        print(
            f"bit-equal after {kills} kills: {steps} records, all arrays of the last "
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
    tree, step = SavedStates(run / "checkpoints").restore_numpy()
    return {"step": np.int64(step), **flatten(tree)}


def output_of(run: pathlib.Path) -> str:
    """The end of what a run printed."""
    return (run / "output.txt").read_text(errors="replace")[-3000:]


def size_of(run: pathlib.Path) -> int:
    """Lines of metrics.jsonl."""
    path = run / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("soak_run", __doc__)
    add = parser.add_argument
    add("--kills", type=int, least=0, default=100, help="how often the run is killed (default 100)")
    add("--seed", type=int, least=0, default=0, help="of the moments")
    add("--directory", type=pathlib.Path, help="of both runs (default: a temporary one)")
    add("--minutes", type=float, default=math.inf, help="no kill after so many minutes; what was done is compared")
    add("--records", type=int, default=40, help="a kill comes within so many logged steps of a start (default 40)")
    add("command", nargs="*", help="after --: arguments of bertjax.main")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error(
            "give the run after --, such as -- --config=configs/demo.py. The accidents that happen to a small "
            "model (without a run) are python -m tests.benchmarks.soak --kills=100"
        )
    with refusals("soak_run"), contextlib.ExitStack() as stack:
        directory = options.directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        Soak(directory, options.command, options.kills, options.minutes, options.records, options.seed).run()


if __name__ == "__main__":
    main()
