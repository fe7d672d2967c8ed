"""bertjax's whole training step on the accelerator: the trainer's own compiled step, timed.

Masks drawn on the device, encoder, both heads, loss, clipping, AdamW and the finiteness check are
all inside; only the input pipeline is left out, because one batch is fed again and again.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.masking import MaskingSpec
from bertjax.model.heads import BertForPreTraining
from bertjax.model.presets import PRESETS, BertConfig, Execution
from bertjax.tools.bench import kernels
from bertjax.tools.bench.workloads import MASK_ID, Workload, rows
from bertjax.training import sharding
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.pretraining import PretrainingObjective
from bertjax.training.trainer import Trainer


@dataclasses.dataclass
class Compiled:
    """A step ready to run: executable, fresh state, batch."""

    work: Workload
    step: Any
    state: Any
    batch: dict[str, jax.Array]
    compile_seconds: float


def prepare(work: Workload, execution: Execution, config: BertConfig | None = None) -> Compiled:
    """Builds and compiles the step of `work`; may run in a thread."""
    config = config or PRESETS[work.model]
    objective = PretrainingObjective(
        BertForPreTraining(config, execution),
        MaskingSpec(
            mask_id=MASK_ID,
            special_ids=(0, 101, 102),
            replacement_ids=np.arange(1000, config.vocab_size, dtype=np.int32),
            max_predictions=work.predictions,
        ),
    )
    mesh = sharding.make_mesh()
    schedule = learning_rate_schedule("linear", 1e-4, 10_000, 1_000_000)
    trainer = Trainer(make_optimizer(schedule), mesh)
    batch = sharding.put_batch(rows(work), mesh)
    state = trainer.init(objective)
    started = time.perf_counter()
    step = trainer.train_step(objective).lower(state, batch).compile()
    return Compiled(work, step, state, batch, time.perf_counter() - started)


def time_step(compiled: Compiled, steps: int = 20, trace: str | None = None) -> dict[str, Any]:
    """Times `steps` steps one by one after a warm-up; the median counts.

    Args:
      trace: directory for a jax.profiler trace of five more steps.

    Returns:
      Numbers of the run: see the keys. `loss` is the last step's, so that a broken step is seen.
    """
    state, metrics = compiled.state, None
    for _ in range(5):
        state, metrics = compiled.step(state, compiled.batch)
    jax.block_until_ready(metrics)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        state, metrics = compiled.step(state, compiled.batch)
        jax.block_until_ready(metrics["loss"])
        seconds.append(time.perf_counter() - started)
    # As a training loop runs: the next step is sent off before the last one is done.
    started = time.perf_counter()
    for _ in range(steps):
        state, metrics = compiled.step(state, compiled.batch)
    jax.block_until_ready(state)
    pipelined = (time.perf_counter() - started) / steps
    memory = jax.local_devices()[0].memory_stats() or {}
    analysis = compiled.step.memory_analysis()
    result = {
        "step_seconds": min(pipelined, statistics.median(seconds)),
        "step_seconds_one_by_one": statistics.median(seconds),
        "compile_seconds": compiled.compile_seconds,
        "loss": float(metrics["loss"]),
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
    }
    if trace is not None:
        pathlib.Path(trace).mkdir(parents=True, exist_ok=True)
        with jax.profiler.trace(trace):
            for _ in range(5):
                state, metrics = compiled.step(state, compiled.batch)
            jax.block_until_ready(state)
        found = kernels.read_trace(trace)
        result["profile_ms"] = kernels.by_kind(found, 5)
        result["kernels"] = kernels.largest(found, 5, count=40)
    compiled.state = state
    return result


def measured_peak(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a size^3 bfloat16 product of random matrices on this device."""
    a, b = (
        jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(jnp.bfloat16)
        for i in range(2)
    )
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    started = time.perf_counter()
    for _ in range(repeats):
        c = product(a, b)
    c.block_until_ready()
    return 2.0 * size**3 * repeats / (time.perf_counter() - started)
