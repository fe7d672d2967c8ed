"""Weak scaling: the same rows a device on 1, 2, 4 ... devices of this machine.

    python -m bertjax.tools.bench scaling base-128x256 large-512x32 --devices 1 2 4 --fsdp

All in one process, in turn and several rounds, so that every line meets the same clocks and
temperatures: a GPU at its power limit slows down within seconds. Perfect scaling is what the
devices do apart: as many programs as devices, all at once and without a word between them. The
line of one device has the others idle.

Prints milliseconds a step, rows a second, the share of perfect scaling and the time spent in
collectives; writes scaling.json into --out.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from bertjax.model.presets import Execution
from bertjax.tools.arguments import make_parser
from bertjax.tools.bench import jax_step
from bertjax.tools.bench.workloads import Workload

WARM_UP = 2  # steps before each timing


class Run:
    """A line of the table: one program over several devices, or one program on each."""

    def __init__(self, name: str, devices: int, programs: list[jax_step.Compiled]):
        self.name, self.devices, self.programs = name, devices, programs
        self.seconds: list[float] = []  # a step, by round
        self._states: list[Any] = []

    def steps(self, count: int) -> None:
        """Runs steps on all devices and waits for them."""
        self._states = self._states or [program.start() for program in self.programs]
        for _ in range(count):
            for place, program in enumerate(self.programs):
                self._states[place], _ = program.step(self._states[place], program.batch)
        jax.block_until_ready(self._states)

    def time(self, seconds: float) -> None:
        """Adds the time of a step, measured over about `seconds`."""
        self.steps(WARM_UP)
        count = max(3, int(seconds / self.seconds[-1])) if self.seconds else 3
        started = time.perf_counter()
        self.steps(count)
        self.seconds.append((time.perf_counter() - started) / count)

    def collectives_ms(self) -> float:
        """A step's time in collectives on one device, by a profile."""
        with tempfile.TemporaryDirectory() as directory:
            found = jax_step.profile(self.steps, 3, directory)["profile_ms"]
        return found.get("collectives", 0.0) / self.devices


def make_runs(work: Workload, counts: list[int], fsdp: bool, xla: dict[str, Any] | None
              ) -> list[Run]:
    """Compiles the programs of every line, side by side."""
    devices, execution = jax.devices(), Execution.for_backend(jax.default_backend())
    largest = max(counts)

    def compiled(first: int, count: int, fsdp: int = 1) -> jax_step.Compiled:
        larger = dataclasses.replace(work, batch_size=count * work.batch_size)
        return jax_step.prepare(larger, execution, compiler_options=xla, fsdp=fsdp,
                                devices=devices[first : first + count])

    with ThreadPoolExecutor() as pool:
        apart = [pool.submit(compiled, place, 1) for place in range(largest)]
        together = {f"{n}": (n, pool.submit(compiled, 0, n)) for n in counts if n > 1}
        if fsdp:
            together |= {f"{n}, fsdp={n}": (n, pool.submit(compiled, 0, n, n))
                         for n in counts if n > 1}
        return [Run(f"{largest} apart", largest, [one.result() for one in apart]),
                *([Run("1", 1, [apart[0].result()])] if 1 in counts else []),
                *(Run(name, n, [program.result()]) for name, (n, program) in together.items())]


def measure(work: Workload, runs: list[Run], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Times all lines in turn, `rounds` times after a first one that does not count."""
    for _ in range(rounds + 1):
        for run in runs:
            run.time(seconds)
    perfect = statistics.median(runs[0].seconds[1:])
    results = []
    for run in runs:
        median = statistics.median(run.seconds[1:])
        results.append({
            "workload": work.name, "devices": run.name, "step_ms": 1e3 * median,
            "rounds_ms": [1e3 * s for s in run.seconds[1:]],
            "rows_per_second": run.devices * work.batch_size / median,
            "scaling": perfect / median, "collectives_ms": run.collectives_ms()})
    return results


def main(argv: list[str]) -> None:
    parser = make_parser("bench scaling", __doc__)
    parser.add_argument("workloads", nargs="*", type=Workload.parse,
                        default=[Workload.parse("base-128x256"), Workload.parse("large-512x32")],
                        help="MODEL-LENGTHxROWS, rows a device")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fsdp", action="store_true",
                        help="lines with the training state split over the devices, too")
    parser.add_argument("--xla", type=json.loads, help="JSON: XLA options instead of the step's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each timing")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    args = parser.parse_args(argv)
    if not 0 < min(args.devices) <= max(args.devices) <= jax.device_count():
        parser.error(f"--devices: this machine has {jax.device_count()}")

    args.out.mkdir(parents=True, exist_ok=True)
    report: list[dict[str, Any]] = []
    print(f"{'workload':16s} {'devices':>10s} {'step ms':>8s} {'rows/s':>9s} {'scaling':>8s} "
          f"{'collectives ms':>14s}", flush=True)
    for work in args.workloads:
        runs = make_runs(work, args.devices, args.fsdp, args.xla)
        report += measure(work, runs, args.rounds, args.seconds)
        for line in report[-len(runs):]:
            print(f"{work.name:16s} {line['devices']:>10s} {line['step_ms']:8.2f} "
                  f"{line['rows_per_second']:9.0f} {line['scaling']:8.1%} "
                  f"{line['collectives_ms']:14.2f}", flush=True)
        (args.out / "scaling.json").write_text(json.dumps(report, indent=1))
