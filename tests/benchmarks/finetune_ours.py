"""bertjax's side of the fine-tuning benchmark: seeds in one process, sharing compiled steps.

python -m tests.benchmarks.finetune_ours WORK    -> a JSON object a seed; the last has all
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from tests.benchmarks.finetune_work import SKIPPED, Result, Work


class _Recorder:
    """A logbook that keeps the step times and the moment of the first step."""

    def __init__(self) -> None:
        self.first_step = 0.0
        self.step_seconds: list[float] = []

    def train(self, step: int, last_step: int, metrics: Mapping[str, Any]) -> None:
        self.first_step = self.first_step or time.time()
        if step > SKIPPED and metrics.get("step_time"):
            self.step_seconds.append(metrics["step_time"])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"step {step}: {dict(metrics)}", file=sys.stderr)

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def measure(work: Work) -> None:
    """Fine-tunes with every seed, times it, and prints what is known after each."""
    import jax

    from bertjax import jax_settings
    from bertjax.process import hardware, runtime

    if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax_settings.fix(runtime.compilation_cache(cache))
    milestones = {"jax imported": time.time() - work.started}
    hardware.wake()
    programs = _record_programs()
    from bertjax.config import finetune_config, frozen
    from bertjax.model.presets import Execution
    from bertjax.process import clock
    from bertjax.tasks import job

    milestones["all imported"] = time.time() - work.started
    jax.devices()
    milestones["devices"] = time.time() - work.started
    settings = frozen(finetune_config()).replace(
        {
            "batch_size": work.batch_size,
            "optimizer.learning_rate": work.learning_rate,
            "optimizer.weight_decay": work.weight_decay,
            "optimizer.schedule": "linear_after_warmup",
            "task.epochs": work.epochs,
            "task.max_length": work.max_length,
            "task.warmup": work.warmup,
            "task.head_init": "normal",
            "task.group_by_length": work.group_by_length,
            "log.every_steps": 10,
        }
    )
    task = work.limit(job.make_task(work.task, work.data, work.options))
    execution = Execution.for_backend(jax.default_backend(), dtype=work.dtype, **work.execution)
    tuner = job.prepare_tuner(task, work.checkpoint, settings, execution=execution)
    tuner.load_params.read_ahead()  # as job.run does
    milestones["data"] = time.time() - work.started
    rows = len(tuner.data("train", training=True)[1])
    # The last batch of an epoch is not full.
    full = rows / -(-rows // work.batch_size)
    late = time.time() - work.started - clock.process_age()  # of the process, behind the clock's start
    runs, recorders, ends = [], [], []
    for seed in range(work.first_seed, work.seeds):
        recorders.append(_Recorder())
        runs.append(tuner.run(settings.replace({"seed": seed}), recorders[-1]))
        ends.append(time.time())
        reached = {name: age + late for name, age in clock.milestones().items()}
        reached["first step"] = recorders[0].first_step - work.started
        compiled = [compiling for _, _, _, compiling in programs if compiling]
        Result(
            metric=tuner.task.metric,
            best=[run.value for run in runs],
            last=[run.history[-1][1] for run in runs],
            ready_seconds=reached["first step"],
            score_seconds=ends[0] - work.started,
            all_seconds=ends[-1] - work.started,
            compile_seconds=sum(compiled),
            compilations=len(compiled),
            speeds=[full / statistics.fmean(r.step_seconds) for r in recorders if r.step_seconds],
            rows=rows,
            steps=runs[0].steps,
            device=jax.devices()[0].device_kind,
            versions=f"jax {jax.__version__}",
            milestones=milestones | dict(sorted(reached.items(), key=lambda pair: pair[1])),
            programs=[tuple(program) for program in programs],
        ).print()


def _record_programs() -> list[list[Any]]:
    """A list that gains [name, seconds of tracing, lowering, compiling] for every program."""
    import jax

    names = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
    places = {f"/jax/core/compile/{name}": place for place, name in enumerate(names, 1)}
    programs: list[list[Any]] = []

    def listen(event: str, seconds: float, fun_name: str = "?", **_: Any) -> None:
        if place := places.get(event):
            name = fun_name.removeprefix("jit(").removesuffix(")")
            row = next((row for row in programs if row[0] == name and not row[3]), None)
            if row is None:
                programs.append(row := [name, 0.0, 0.0, 0.0])
            row[place] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    return programs


if __name__ == "__main__":
    measure(Work.parse(sys.argv[1]))
