"""bertjax's side of the fine-tuning benchmark: seeds in one process, sharing compiled steps.

    python -m bertjax.tools.bench.finetune_ours WORK    -> one JSON object on the last line
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from bertjax.tools.bench.finetune_work import SKIPPED, Result, Work


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


def measure(work: Work) -> Result:
    """Fine-tunes with every seed and times it."""
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    compiled: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    from bertjax.model.presets import Execution
    from bertjax.tasks import job
    from bertjax.tasks.finetune import FineTuneSettings, RunSettings

    recipe = FineTuneSettings(
        max_length=work.max_length, warmup=work.warmup, weight_decay=work.weight_decay,
        schedule="linear_after_warmup", bias_correction=True,
    )  # fmt: skip
    settings = RunSettings(work.learning_rate, work.batch_size, work.epochs, 0)
    tuner = job.prepare_task(
        job.make_task(work.task, work.data, work.options), work.checkpoint, "", recipe, settings,
        execution=Execution.for_backend(jax.default_backend(), dtype=work.dtype),
    ).tuner  # fmt: skip
    runs, recorders, ends = [], [], []
    for seed in range(work.seeds):
        recorders.append(_Recorder())
        one = RunSettings(work.learning_rate, work.batch_size, work.epochs, seed)
        runs.append(tuner.run(one, recorders[-1], log_every=10))
        ends.append(time.time())
    speeds = [statistics.fmean(r.step_seconds) for r in recorders if r.step_seconds]
    rows = len(tuner.data("train", training=True)[1])
    # The last batch of an epoch is not full.
    full = rows / (-(-rows // work.batch_size) * work.batch_size)
    return Result(
        metric=tuner.task.metric,
        best=[run.value for run in runs],
        last=[run.history[-1][1] for run in runs],
        ready_seconds=recorders[0].first_step - work.started,
        score_seconds=ends[0] - work.started,
        all_seconds=ends[-1] - work.started,
        compile_seconds=sum(compiled),
        compilations=len(compiled),
        rows_per_second=full * work.batch_size / statistics.median(speeds) if speeds else 0.0,
        rows=rows,
        steps=runs[0].steps,
        device=jax.devices()[0].device_kind,
        versions=f"jax {jax.__version__}",
    )


if __name__ == "__main__":
    measure(Work.parse(sys.argv[1])).print()
