"""Accidents that happen to a small training run, and what must be left of it after each.

    python -m tests.benchmarks.soak --kills=100

A tiny model trains on the CPU with the real trainer, checkpoints and logbook in a child process
(soak_child.py). Each round one accident happens to it: SIGTERM, SIGKILL at a random moment, SIGKILL
during a save, a full disk, a newest checkpoint truncated or emptied, leftovers of a save, a
directory that has lost all its checkpoints (the run must refuse to start; then they come back).
Then it is started again, and must begin at the newest intact checkpoint. In the end parameters,
optimizer state and every logged loss must equal, bit for bit, those of an undisturbed run. Exit
code 0: they do. A run of bertjax.main is killed by `python -m tests.benchmarks.soak_run`.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import numpy as np

from tests.benchmarks import harness

BYTES_PER_RECORD = 270
ACCIDENTS = ("sigterm", "sigkill", "sigkill_during_save", "full_disk", "truncated", "emptied", "leftovers", "all_lost")
REFUSAL = "Put the checkpoints back"  # of a run that had checkpoints and finds none


class Soak:
    """One run under fire.

    Args:
      directory: emptied and used for the undisturbed and the disturbed run.
      kills: accidents in all.
      seed: of the accidents and their moments.
    """

    def __init__(self, directory: pathlib.Path, kills: int, seed: int):
        self.directory, self.kills = directory, kills
        self.random = random.Random(seed)
        self.steps, self.save_every = 60 * kills + 60, 10
        self.counts: Counter[str] = Counter()
        self.begun_at: list[int] = []

    def launch(self, run: pathlib.Path, pause_s: float, full_disk: bool = False) -> subprocess.Popen[str]:
        """A child that is to train in `run`."""
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.soak_child",
            str(run),
            str(self.steps),
            str(self.save_every),
            str(pause_s),
            *(["full_disk"] if full_disk else []),
        ]
        # One CPU device: bit-equality is promised for the same number of devices.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        with open(run / "stderr.txt", "a") as stderr:
            return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr)

    def start(self, run: pathlib.Path, pause_s: float, full_disk: bool = False) -> subprocess.Popen[str]:
        """`launch`; returns when the child has made its first steps, from the right one."""
        expected = newest_intact(run)
        child = self.launch(run, pause_s, full_disk)
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("training from step"):
            raise SystemExit(f"the run did not start: {(run / 'stderr.txt').read_text()[-3000:]}")
        self.begun_at.append(int(line.split()[-1]))
        if self.begun_at[-1] != expected:
            child.kill()
            raise SystemExit(
                f"the run began at step {self.begun_at[-1]}, but its newest intact checkpoint is of step {expected}"
            )
        return child

    def hurt(self, run: pathlib.Path, accident: str) -> None:
        """One round: starts the run, lets the accident happen, checks how the child ended."""
        child = self.start(run, 0.005, full_disk=accident == "full_disk")
        if accident == "sigkill_during_save":
            while child.poll() is None and not list((run / "checkpoints").glob("tmp.*")):
                time.sleep(0.001)
            time.sleep(self.random.uniform(0, 0.03))
        elif accident != "full_disk":
            # After a number of steps rather than seconds, so that a busy machine gets on as well.
            enough = size_of(run) + BYTES_PER_RECORD * self.random.randrange(100)
            while child.poll() is None and size_of(run) < enough:
                time.sleep(0.005)
            time.sleep(self.random.uniform(0, 0.02))
        if accident == "sigterm":
            child.send_signal(signal.SIGTERM)
        elif accident != "full_disk":
            child.kill()
        code = child.wait(timeout=120)
        expected = {"sigterm": (75, 0), "full_disk": (1, 0)}.get(accident, (-signal.SIGKILL, 0))
        if code not in expected:
            raise SystemExit(
                f"after {accident} the run ended with code {code}, not {expected[0]}: "
                f"{(run / 'stderr.txt').read_text()[-3000:]}"
            )
        steps = sorted(
            (path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
        )
        if accident in ("truncated", "emptied") and len(steps) > 1:
            spoil(steps[-1], emptied=accident == "emptied")
        if accident == "leftovers" and steps:
            shutil.copytree(steps[-1], run / "checkpoints" / "tmp.99999999")
        if accident == "all_lost" and steps:
            self.lose_all(run, steps)
        self.counts[accident] += 1

    def lose_all(self, run: pathlib.Path, steps: list[pathlib.Path]) -> None:
        """Takes all checkpoints away, sees that the run refuses to begin afresh, puts them back."""
        safe = run / "taken_away"
        safe.mkdir()
        for path in steps:
            path.rename(safe / path.name)
        code = self.launch(run, 0).wait(timeout=120)
        if code == 0 or REFUSAL not in (run / "stderr.txt").read_text().splitlines()[-1]:
            raise SystemExit(
                f"without its checkpoints the run ended with code {code} and did not "
                f"say {REFUSAL!r}: {(run / 'stderr.txt').read_text()[-3000:]}"
            )
        for path in steps:
            (safe / path.name).rename(path)
        safe.rmdir()

    def run(self) -> None:
        """Raises SystemExit with an explanation if anything differs."""
        calm, rough = self.directory / "undisturbed", self.directory / "disturbed"
        for run in (calm, rough):
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir(parents=True)
        if self.start(calm, 0).wait():
            raise SystemExit(f"the undisturbed run failed: {(calm / 'stderr.txt').read_text()}")
        self.begun_at.clear()

        order = [ACCIDENTS[i % len(ACCIDENTS)] for i in range(self.kills)]
        self.random.shuffle(order)
        for number, accident in enumerate(order, 1):
            self.hurt(rough, accident)
            if number % 10 == 0:
                print(f"{number} accidents, last start at step {self.begun_at[-1]}", flush=True)
        if self.start(rough, 0).wait():
            raise SystemExit(f"the last start failed: {(rough / 'stderr.txt').read_text()[-3000:]}")
        self.compare(calm, rough)
        accidents = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        print(
            f"bit-equal after {self.kills} accidents in {self.steps} steps ({accidents}); "
            f"started at steps {self.begun_at[:8]} ... {self.begun_at[-1]}"
        )

    def compare(self, calm: pathlib.Path, rough: pathlib.Path) -> None:
        """Final arrays and the whole history of losses, bit for bit."""
        with np.load(calm / "final.npz") as expected, np.load(rough / "final.npz") as found:
            different = [name for name in expected.files if expected[name].tobytes() != found[name].tobytes()]
        if different:
            raise SystemExit(f"differs from the undisturbed run: {', '.join(different)}")
        if history(calm) != history(rough):
            raise SystemExit("metrics.jsonl differs from the undisturbed run's")


def history(run: pathlib.Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every record."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def newest_intact(run: pathlib.Path) -> int:
    """Step of the newest checkpoint whose files have the sizes of its manifest; 0 = there is none.

    Not asked of the code under test. `old.STEP` is one that a killed save was about to replace.
    """
    intact = [0]
    for path in (run / "checkpoints").glob("*"):
        step = path.name.removeprefix("old.")
        manifest = path / "manifest.json"
        if step.isdigit() and manifest.exists():
            files = json.loads(manifest.read_text())["files"]
            if all(
                (path / name).exists() and (path / name).stat().st_size == size for name, (size, _) in files.items()
            ):
                intact.append(int(step))
    return max(intact)


def size_of(run: pathlib.Path) -> int:
    """Bytes of metrics.jsonl, which grows by a record a step."""
    return (run / "metrics.jsonl").stat().st_size


def spoil(checkpoint: pathlib.Path, emptied: bool) -> None:
    """Deletes everything in a checkpoint directory, or the second half of its largest file."""
    if emptied:
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()
    else:
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        path = max(files, key=lambda path: path.stat().st_size)
        os.truncate(path, path.stat().st_size // 2)


def main(argv: list[str]) -> None:
    """Command line."""
    parser = harness.make_parser("soak", __doc__)
    parser.add_argument("--kills", type=int, default=100, help="accidents in all")
    parser.add_argument("--seed", type=int, default=0, help="of the accidents")
    parser.add_argument("--directory", type=pathlib.Path, help="default: a temporary one")
    options = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        directory = options.directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        Soak(directory, options.kills, options.seed).run()


if __name__ == "__main__":
    main(sys.argv[1:])
