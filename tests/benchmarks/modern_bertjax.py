"""bertjax's side of `modern`: the trainer's own compiled steps of the workloads, timed in one process."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# The peers' processes hold memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from bertjax.config import ModelSettings, walk
from bertjax.model.presets import BertConfig
from bertjax.tools.bench import Program, configurations
from tests.benchmarks import modern
from tests.benchmarks.modern import Workload


def settings(work: Workload, config: BertConfig) -> list[str]:
    """Settings of configs/base.py that make it the step of `work`."""
    fields = dataclasses.asdict(config)
    return [
        *(f"--config.model.{name}={fields[name]}" for name, _ in walk(ModelSettings) if name in fields),
        f"--config.phases=((1000000, {work.length}),)",
        f"--config.batch_size={work.rows}",
        f"--config.data.packed={work.several}",
        "--config.data.nsp=False",
        f"--config.masking.rate={modern.RATE}",
    ]


def program(work: Workload, config: BertConfig) -> Program:
    """The compiled step of `work`, with random weights and the batch that both sides train on."""
    import jax

    from bertjax.tools.stages import stages
    from tests.benchmarks.jax_step import random_params

    checked = configurations([], ["bertjax:base"], settings(work, config))["bertjax:base"]
    (stage,) = stages(checked, jax.devices())
    params = random_params(stage.trainer.abstract_state(stage.objective).params)
    return Program(work.name, stage, work.batch(config, work.several), params)


def main() -> None:
    parser = modern.side_parser("modern_bertjax", __doc__)
    parser.add_argument("--profile", action="store_true")
    args = modern.parse(parser)
    config = modern.MINIATURE if args.miniature else modern.BASE

    import jax

    from bertjax.process.hardware import peak_flops
    from tests.benchmarks.jax_step import profile

    with ThreadPoolExecutor(len(args.workloads)) as pool:
        programs = dict(
            zip(
                (work.name for work in args.workloads),
                pool.map(lambda work: program(work, config), args.workloads),
                strict=True,
            )
        )
    profiled: set[str] = set()

    def time_round(name: str, steps: int) -> dict[str, Any]:
        found = programs[name]
        found.time(steps)
        result = {"step_seconds": min(found.times[-1]), "loss": found.loss}
        if args.profile and name not in profiled:
            profiled.add(name)
            with tempfile.TemporaryDirectory() as directory:
                result |= profile(found.run, 3, directory)
        return result | {"peak_bytes": found.result()["peak_bytes"]}

    device = jax.devices()[0]
    ready = {
        "device": device.device_kind,
        "versions": f"jax {jax.__version__}",
        "nominal_flops": peak_flops(device),
        "compile_seconds": {name: round(found.compile_seconds, 1) for name, found in programs.items()},
    }
    modern.serve(ready, time_round)


if __name__ == "__main__":
    main()
