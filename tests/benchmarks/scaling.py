"""Weak scaling: the same rows a device on 1, 2, 4 ... devices of this machine.

    python -m tests.benchmarks.scaling base-128x256 large-512x32 --devices 1 2 4 --fsdp

All in one process, in turn and several rounds, so that every line meets the same clocks and
temperatures: a GPU at its power limit slows down within seconds. The line of one device is the
slowest by itself, since a step on several waits for that one; it is what perfect scaling means.

Prints milliseconds a step, rows a second, the share of perfect scaling and the time spent in
collectives; writes scaling.json into --out.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from bertjax import markdown
from bertjax.model.presets import Execution
from tests.benchmarks import harness, jax_step
from tests.benchmarks.workloads import Workload

WARM_UP = 2  # steps before each timing


class Run:
    """A line of the table: a program over some devices and the state that it trains."""

    def __init__(self, name: str, devices: int, program: jax_step.Compiled):
        self.name, self.devices, self.program = name, devices, program
        self.seconds: list[float] = []  # a step, by round
        self._state: Any = None

    def steps(self, count: int) -> None:
        """Runs steps and waits for them."""
        if self._state is None:
            self._state = self.program.start()
        for _ in range(count):
            self._state, _ = self.program.step(self._state, self.program.batch)
        jax.block_until_ready(self._state)

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


def make_runs(work: Workload, counts: list[int], fsdp: bool, xla: dict[str, Any] | None) -> list[Run]:
    """Compiles the programs of every line, side by side: each device by itself, then several."""
    devices, execution = jax.devices(), Execution.for_backend(jax.default_backend())

    def compiled(first: int, count: int, fsdp: int = 1) -> jax_step.Compiled:
        larger = dataclasses.replace(work, batch_size=count * work.batch_size)
        return jax_step.prepare(
            larger, execution, compiler_options=xla, fsdp=fsdp, devices=devices[first : first + count]
        )

    several = [n for n in counts if n > 1]
    with ThreadPoolExecutor() as pool:
        programs = [("1", 1, pool.submit(compiled, place, 1)) for place in range(max(counts))]
        programs += [(f"{n}", n, pool.submit(compiled, 0, n)) for n in several]
        if fsdp:
            programs += [(f"{n}, fsdp={n}", n, pool.submit(compiled, 0, n, n)) for n in several]
        return [Run(name, n, program.result()) for name, n, program in programs]


def measure(work: Workload, runs: list[Run], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Times all runs in turn, `rounds` times after a first one that does not count."""
    for _ in range(rounds + 1):
        for run in runs:
            run.time(seconds)
    medians = [statistics.median(run.seconds[1:]) for run in runs]
    perfect = max(median for median, run in zip(medians, runs, strict=True) if run.devices == 1)
    return [
        {
            "workload": work.name,
            "devices": run.name,
            "step_ms": 1e3 * median,
            "rounds_ms": [1e3 * s for s in run.seconds[1:]],
            "rows_per_second": run.devices * work.batch_size / median,
            "scaling": perfect / median,
            "collectives_ms": run.collectives_ms(),
        }
        for median, run in zip(medians, runs, strict=True)
    ]


def main(argv: list[str]) -> None:
    parser = harness.make_parser("scaling", __doc__)
    parser.add_argument(
        "workloads",
        nargs="*",
        type=Workload.parse,
        default=[Workload.parse("base-128x256"), Workload.parse("large-512x32")],
        help="MODEL-LENGTHxROWS, rows a device",
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fsdp", action="store_true", help="lines with the training state split over the devices, too")
    parser.add_argument("--xla", type=json.loads, help="JSON: XLA options instead of the step's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each timing")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    args = parser.parse_args(argv)
    if not 0 < min(args.devices) <= max(args.devices) <= jax.device_count():
        parser.error(f"--devices: this machine has {jax.device_count()}")

    args.out.mkdir(parents=True, exist_ok=True)
    report: list[dict[str, Any]] = []
    lines = []
    for work in args.workloads:
        runs = make_runs(work, args.devices, args.fsdp, args.xla)
        report += measure(work, runs, args.rounds, args.seconds)
        alone = [line for line in report[-len(runs) :] if line["devices"] == "1"]
        several = [line for line in report[-len(runs) :] if line["devices"] != "1"]
        for line in [max(alone, key=lambda line: line["step_ms"]), *several]:
            numbers = f"{line['step_ms']:.2f}", f"{line['rows_per_second']:,.0f}", f"{line['scaling']:.1%}"
            lines.append((work.name, line["devices"], *numbers, f"{line['collectives_ms']:.2f}"))
            print(*lines[-1], flush=True)
        (args.out / "scaling.json").write_text(json.dumps(report, indent=1))
    print()
    print(markdown.table(("step", "devices", "ms", "rows/s", "share of perfect scaling", "collectives, ms"), lines))


if __name__ == "__main__":
    main(sys.argv[1:])
