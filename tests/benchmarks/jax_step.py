"""bertjax's whole training step on the accelerator: the trainer's own compiled step, timed.

Masks drawn on the device, encoder, both heads, loss, clipping, AdamW and the finiteness check are
all inside; only the input pipeline is left out, because one batch is fed again and again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import OptimizerSettings
from bertjax.data.masking import MaskingSpec, packed_predictions
from bertjax.model.heads import BertForPreTraining
from bertjax.model.kernels import compiler_options as kernel_options
from bertjax.model.presets import PRESETS, BertConfig, Execution
from bertjax.pretraining.objective import PretrainingObjective
from bertjax.process.hardware import peak_flops
from bertjax.training import sharding
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.trainer import Trainer
from tests.benchmarks import harness, kernels
from tests.benchmarks.workloads import MASK_ID, SPECIAL_IDS, Workload, rows


@dataclasses.dataclass
class Compiled:
    """A step ready to run: executable, maker of a fresh state (many steps can wait), batch."""

    work: Workload
    step: Any
    start: Callable[[], Any]
    batch: dict[str, jax.Array]
    compile_seconds: float


def prepare(
    work: Workload,
    execution: Execution,
    config: BertConfig | None = None,
    compiler_options: dict[str, Any] | None = None,
    batch: dict[str, np.ndarray] | None = None,
    fsdp: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Compiled:
    """Builds and compiles the step of `work`; may run in a thread.

    Args:
      batch: rows to train on instead of random words; may hold several pairs a row.
      compiler_options: XLA options beside those of XLA_FLAGS, to try one out.
      fsdp: devices that parameters and optimizer state are split over.
      devices: to run on; all by default.
    """
    config = config or PRESETS[work.model]
    batch = rows(work) if batch is None else batch
    pairs = batch["nsp_labels"].shape[1]
    objective = PretrainingObjective(
        BertForPreTraining(config, execution),
        MaskingSpec(
            mask_id=MASK_ID,
            special_ids=SPECIAL_IDS,
            replacement_ids=np.arange(1000, config.vocab_size, dtype=np.int32),
            max_predictions=work.predictions,
            predictions_per_row=(packed_predictions(work.seq_length, pairs, 0.15) if pairs > 1 else None),
        ),
    )
    mesh = sharding.make_mesh(fsdp=fsdp, devices=devices)
    schedule = learning_rate_schedule("linear", 1e-4, 0, 1_000_000)  # as of the other side
    trainer = Trainer(make_optimizer(OptimizerSettings(), schedule), mesh)
    batch = sharding.put_batch(batch, mesh)
    abstract = trainer.abstract_state(objective)
    started = time.perf_counter()
    options = compiler_options
    if options is None:
        options = kernel_options(jax.default_backend())
    step = trainer.train_step(objective).lower(abstract, batch).compile(compiler_options=options)
    seconds = time.perf_counter() - started
    return Compiled(work, step, lambda: trainer.init(objective, random_params(abstract.params)), batch, seconds)


def random_params(shapes: Any) -> Any:
    """Initial values drawn on the host: the real initialisation takes longer to compile than to
    time a step."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        name = path[-1].key
        if name in ("scale", "bias"):
            return np.full(leaf.shape, float(name == "scale"), np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(0.02)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def time_step(compiled: Compiled, steps: int = 20, trace: str | None = None) -> dict[str, Any]:
    """Times `steps` steps one by one after a warm-up; the median counts.

    Args:
      trace: directory for a jax.profiler trace of five more steps.

    Returns:
      Numbers of the run: see the keys. `loss` is the last step's, so that a broken step is seen.
    """
    state, metrics = compiled.start(), None
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
    energy, started = harness.joules(), time.perf_counter()
    for _ in range(steps):
        state, metrics = compiled.step(state, compiled.batch)
    jax.block_until_ready(state)
    energy = harness.spent(energy)
    pipelined = (time.perf_counter() - started) / steps
    analysis = compiled.step.memory_analysis()
    temporary = getattr(analysis, "temp_size_in_bytes", 0)
    result = {
        "step_seconds": min(pipelined, statistics.median(seconds)),
        "step_seconds_one_by_one": statistics.median(seconds),
        "compile_seconds": compiled.compile_seconds,
        "step_joules": energy and energy / steps,
        "loss": float(metrics["loss"]),
        "temporary_bytes": temporary,
        # What this step needs by itself; the allocator's own peak spans all steps of the process.
        "peak_bytes": temporary + getattr(analysis, "argument_size_in_bytes", 0),
    }
    if trace is not None:

        def traced(steps: int) -> None:
            nonlocal state, metrics
            for _ in range(steps):
                state, metrics = compiled.step(state, compiled.batch)
            jax.block_until_ready(state)

        result |= profile(traced, 5, trace)
    return result


def profile(run: Callable[[int], None], steps: int, directory: str) -> dict[str, Any]:
    """What jax.profiler sees while `run(steps)` runs: milliseconds a step by kind of kernel, of all
    devices together, the largest kernels, launches, idle time and its gaps."""
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    with jax.profiler.trace(directory):
        run(steps)
    launched = kernels.read_trace(directory)
    found, gaps = kernels.totals(launched), kernels.idle(launched)
    return {
        "profile_ms": kernels.by_kind(found, steps),
        "kernels": kernels.largest(found, steps, count=40),
        "launches": len(launched) / steps,
        "idle_ms": 1e3 * sum(seconds for _, seconds in gaps.values()) / steps,
        "gaps": kernels.largest(gaps, steps, count=15),
    }


def measured_peak() -> float:
    """FLOP/s of a large bfloat16 product of random square matrices on this device."""
    size, repeats = (1024 if jax.default_backend() == "cpu" else 8192), 20
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    started = time.perf_counter()
    for _ in range(repeats):
        c = product(a, b)
    c.block_until_ready()
    return 2.0 * size**3 * repeats / (time.perf_counter() - started)


def main() -> None:
    """Times workloads and prints one JSON object on the last line."""
    parser = harness.make_parser("jax_step", __doc__)
    parser.add_argument("workloads", nargs="+", type=Workload.parse)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--execution",
        type=json.loads,
        default={},
        help="fields of model.presets.Execution that differ from the trainer's choice, as JSON",
    )
    parser.add_argument("--xla", type=json.loads, default=None, help="JSON: XLA options instead of the step's own")
    parser.add_argument("--rows", help="npz of a batch to train on instead of random words")
    args = parser.parse_args()
    batch = dict(np.load(args.rows)) if args.rows else None
    execution = Execution.for_backend(jax.default_backend(), **args.execution)
    with ThreadPoolExecutor(len(args.workloads)) as pool:
        ready = list(pool.map(lambda w: prepare(w, execution, compiler_options=args.xla, batch=batch), args.workloads))
    results = {}
    for compiled in ready:
        with tempfile.TemporaryDirectory() as trace:
            results[compiled.work.name] = time_step(compiled, args.steps, trace)
    device = jax.devices()[0]
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "nominal_flops": peak_flops(device),
                "measured_flops": measured_peak(),
                "versions": f"jax {jax.__version__}",
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
