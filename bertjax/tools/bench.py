"""Times the training step or the input pipeline on this machine.

    python -m bertjax.tools.bench step base@128x256 large@512x32        MODEL@LENGTHxROWS
    python -m bertjax.tools.bench step --config=configs/base.py:packed --config=configs/large.py
    python -m bertjax.tools.bench input --store=store

`step` compiles the real training step of every shape and config (random words, all rows full), then
times them in turn, --rounds times: a warm-up, steps one by one, steps in a row as in training. The
faster of both counts, and of the rounds the median. `input` measures in CPU time of one core.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bertjax.tools.arguments import add_settings, make_parser, refusals

if TYPE_CHECKING:  # --help needs neither
    from bertjax.tools.stages import Stage

SHAPES = ("base@128x256", "base@512x64", "large@128x128", "large@512x32")
SHAPE = re.compile(r"(\w+)[@-](\d+)x(\d+)")
WARM_UP = 5  # steps before each timing


def shape_settings(text: str) -> list[str]:
    """Settings of configs/base.py that make it 'base@128x256': a published size, tokens of a row, rows a step.

    Raises:
      ValueError: it is no such name.
    """
    from bertjax.model.presets import PRESETS

    found = SHAPE.fullmatch(text)
    if found is None or found[1] not in PRESETS:
        raise ValueError(f"{text!r} is not MODEL@LENGTHxROWS with a model of {', '.join(PRESETS)}: base@128x256")
    model, length, rows = PRESETS[found[1]], int(found[2]), int(found[3])
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    return [
        *(f"--config.model.{name}={getattr(model, name)}" for name in fields),
        f"--config.model.max_position_embeddings={max(length, model.max_position_embeddings)}",
        f"--config.phases=((1000000, {length}),)",
        f"--config.batch_size={rows}",
        "--config.data.packed=False",
    ]


def configurations(shapes: Sequence[str], files: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """{name: checked configuration} of everything that is to be timed."""
    from bertjax.command_line import load_config
    from bertjax.config_checks import check_config

    named = {text.replace("-", "@"): ("bertjax:base", [*shape_settings(text), *settings]) for text in shapes}
    named |= {text: (text, settings) for text in files}
    return {name: check_config(load_config(*config)) for name, config in named.items()}


class Program:
    """The compiled training step of a stage, and the state and batch that it runs on.

    batch, params: arrays in place of full rows of random words and the parameters of a new run.
    """

    def __init__(self, name: str, stage: Stage, batch: Any = None, params: Any = None):
        self.name, self.stage = name, stage
        started = time.perf_counter()
        trainer, objective = stage.trainer, stage.objective
        step = trainer.train_step(objective).lower(trainer.abstract_state(objective), stage.batch)
        self.executable = step.compile()
        self.compile_seconds = time.perf_counter() - started
        self.times: list[tuple[float, float]] = []  # of each round: seconds a step one by one, in a row
        self.loss = float("nan")
        self._state: Any = None
        self._batch, self._params = batch, params

    def run(self, steps: int) -> float:
        """Runs steps and waits for the last; returns the seconds that took."""
        import jax

        from bertjax.training.sharding import put_batch

        if self._state is None:
            trainer = self.stage.trainer
            self._state = trainer.init(self.stage.objective, self._params)
            self._batch = put_batch(self._batch, trainer.mesh) if self._batch else self.stage.random_batch()
        started = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self.executable(self._state, self._batch)
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - started
        self.loss = float(metrics["loss"])
        return seconds

    def time(self, steps: int) -> None:
        """Adds a round."""
        self.run(WARM_UP)
        one_by_one = statistics.median(self.run(1) for _ in range(steps))
        self.times.append((one_by_one, self.run(steps) / steps))

    def result(self) -> dict[str, Any]:
        """The numbers of all rounds."""
        memory = self.executable.memory_analysis()
        temporary = getattr(memory, "temp_size_in_bytes", 0)
        return {
            "step_seconds": statistics.median(min(times) for times in self.times),
            "step_seconds_one_by_one": statistics.median(times[0] for times in self.times),
            "rounds_seconds": [min(times) for times in self.times],
            "compile_seconds": self.compile_seconds,
            "loss": self.loss,
            "rows": self.stage.info.rows,
            "tokens": self.stage.info.tokens,
            "flops": self.stage.info.flops,
            "peak_bytes": temporary + getattr(memory, "argument_size_in_bytes", 0),
        }


def time_steps(configs: Mapping[str, Any], steps: int, rounds: int) -> dict[str, Any]:
    """Compiles the step of every stage of the configurations and times them in turn.

    Returns:
      {'device', 'devices', 'nominal_flops' (of all devices, or None), 'results': {name: numbers}}.
    """
    import jax

    from bertjax.process.hardware import peak_flops
    from bertjax.tools.stages import stages

    devices = jax.devices()
    found = {}
    for name, config in configs.items():
        of_config = stages(config, devices)
        found |= {name if len(of_config) == 1 else f"{name} {stage.info.name}": stage for stage in of_config}
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(Program, found.keys(), found.values()))
    for _ in range(rounds):
        for program in programs:
            program.time(steps)
    peak = peak_flops(devices[0])
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "nominal_flops": peak and peak * len(devices),
        "versions": f"jax {jax.__version__}",
        "results": {program.name: program.result() for program in programs},
    }


def step_table(report: Mapping[str, Any]) -> str:
    """The lines of the table."""
    width = max(map(len, [*report["results"], "step"]))
    lines = [
        f"{report['devices']} x {report['device']}, {report['versions']}",
        f"{'step':{width}} {'ms':>9} {'rows/s':>9} {'tokens/s':>11} {'MFU':>6} {'GB':>6} {'compile s':>9} {'loss':>8}",
    ]
    for name, found in report["results"].items():
        seconds, peak = found["step_seconds"], report["nominal_flops"]
        mfu = f"{found['flops'] / seconds / peak:.3f}" if peak else "-"
        lines.append(
            f"{name:{width}} {1e3 * seconds:9.2f} {found['rows'] / seconds:9,.0f} {found['tokens'] / seconds:11,.0f} "
            f"{mfu:>6} {found['peak_bytes'] / 1e9:6.1f} {found['compile_seconds']:9.1f} {found['loss']:8.4f}"
        )
    return "\n".join(lines)


def run_step(flags: argparse.Namespace) -> None:
    """`bench step`."""
    shapes = flags.shapes or ([] if flags.files else list(SHAPES))
    configs = configurations(shapes, flags.files, flags.settings)
    report = time_steps(configs, flags.steps, flags.rounds)
    print(json.dumps(report) if flags.json else step_table(report))


def rows_per_second(store: Any, seq_length: int, packed: bool, rows: int = 20_000) -> dict[str, float]:
    """Rows a CPU second that training gets from a token store, and the share of positions that hold a token."""
    import numpy as np

    from bertjax.data.batches import PretrainingBatches

    batches = PretrainingBatches(store, seq_length, 256, seed=1, packed=packed)
    _ = batches[0]  # compiles, and makes the first epoch's index
    started, held = time.process_time(), 0
    steps = -(-rows // 256)
    for step in range(steps):
        held += np.count_nonzero(batches[step]["attention_mask"])
    seconds = time.process_time() - started
    return {"rows_per_cpu_second": steps * 256 / seconds, "fill": held / (steps * 256 * seq_length)}


def run_input(flags: argparse.Namespace) -> None:
    """`bench input`."""
    from bertjax.data.remote import local_store
    from bertjax.data.store import TokenStore

    if not flags.store:
        raise ValueError("give --store=DIR, a token store (python -m bertjax.tools.build_corpus makes one)")
    store = TokenStore(local_store(flags.store))
    report = {
        f"{length} {kind}": rows_per_second(store, length, kind == "packed", flags.rows)
        for length in flags.lengths
        for kind in ("padded", "packed")
    }
    if flags.json:
        print(json.dumps(report))
        return
    print(f"{'rows':>12} {'rows/s':>9} {'tokens/s':>12} {'fill':>6}   of one core")
    for name, found in report.items():
        rate = found["rows_per_cpu_second"]
        print(f"{name:>12} {rate:9,.0f} {rate * found['fill'] * int(name.split()[0]):12,.0f} {found['fill']:6.1%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("bench", __doc__)
    add = parser.add_argument
    add("what", choices=("step", "input"))
    add("shapes", nargs="*", metavar="MODEL@LENGTHxROWS", help=f"steps to time (default: {' '.join(SHAPES)})")
    add("--steps", type=int, default=20, help="timed steps of a round (default 20)")
    add("--rounds", type=int, default=3, help="how often each is timed (default 3)")
    add("--store", help="input: a token store (at gs:// too)")
    add("--lengths", type=int, nargs="+", default=[128, 512], help="input: tokens of a row (default 128 512)")
    add("--rows", type=int, default=20_000, help="input: rows that are timed (default 20000)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_settings(parser)
    flags = parser.parse_args(arguments)
    others = {"step": ("store", "lengths", "rows"), "input": ("shapes", "files", "settings", "steps", "rounds")}
    with refusals("bench"):
        for name in others[flags.what]:
            if (value := getattr(flags, name)) and value != parser.get_default(name):
                raise ValueError(f"{name} {value!r:.80} has no effect on `bench {flags.what}`")
        (run_step if flags.what == "step" else run_input)(flags)


if __name__ == "__main__":
    main()
