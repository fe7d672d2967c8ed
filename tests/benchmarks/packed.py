"""Useful tokens a second on real text: packed rows here against padded rows in transformers.

    python -m tests.benchmarks.packed --store=STORE            large, rows of 512, 32 a step
    python -m tests.benchmarks.packed --tasks=sst2,rte --data=GLUE --tokenizer=DIR        fine-tuning

Both sides train on pairs of the same store. transformers gets them one a row, padded, as everybody
feeds it; bertjax several a row. Counted are the tokens that are not padding. Prints a table; writes
packed.json into --out.

--tasks compares bertjax with itself, with random weights, alternating in one process: examples a second of training
steps (batches made ahead), of evaluation (from rows to logits) and of prediction (the same, in buckets of 32).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from bertjax import markdown
from bertjax.data.batches import PretrainingBatches
from bertjax.data.store import TokenStore
from bertjax.tools.arguments import refusals
from tests.benchmarks import harness
from tests.benchmarks.finetune import make_random_checkpoint
from tests.benchmarks.step import run_jax, run_peers
from tests.benchmarks.workloads import Workload

SAMPLED = 50  # batches that the mean fill is taken from


def stream(store: pathlib.Path, work: Workload, packed: bool) -> PretrainingBatches:
    """The training rows of `store` in the shape of `work`."""
    opened = TokenStore(store)
    return PretrainingBatches([opened], work.seq_length, work.batch_size, seed=0, packed=packed)


def fill(batches: PretrainingBatches) -> tuple[float, int]:
    """(mean share of the rows that is not padding, step whose batch is closest to it)."""
    shares = [float((batches[step]["attention_mask"] > 0).mean()) for step in range(SAMPLED)]
    mean = float(np.mean(shares))
    return mean, int(np.argmin([abs(share - mean) for share in shares]))


def alternating(runs: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Examples a second of each, the median of `repeats` turns after one that compiles."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            count = run()
            if turn:
                speeds[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in speeds.items()}


def of_task(name: str, args: argparse.Namespace, checkpoint: str) -> list[tuple[str, ...]]:
    """The lines of the table for one task."""
    import jax

    from bertjax import forward
    from bertjax.config import finetune_config, frozen
    from bertjax.interop.loading import LoadedModel
    from bertjax.model.presets import Execution
    from bertjax.tasks import job
    from bertjax.tasks.batches import as_one_array, row_length
    from bertjax.training import sharding

    execution = Execution.for_backend(jax.default_backend(), dtype=args.dtype)
    settings = frozen(finetune_config()).replace(
        {"batch_size": args.batch_size, "task.eval_batch_size": args.eval_batch_size, "task.max_length": 128}
    )
    steps, evaluations, predictions, shapes, host = {}, {}, {}, {}, {}
    for way, pack in (("padded", "none"), ("packed", "all")):
        own = settings.replace({"task.pack": pack})
        task = job.make_task(name, args.data, args.options)
        tuner = job.prepare_tuner(task, checkpoint, own, execution=execution)
        params = tuner.load_params(tuner.model, jax.random.key(0))
        batches, train_step = tuner.training_batches(own), tuner.trainer.train_step(tuner.objective)
        rows = tuner.data("train", training=True)[1][: args.rows]
        shapes[way] = " or ".join(f"{s.rows} x {s.length}" for s in tuner.training_shapes(own.batch_size))
        numbers = range(min(args.steps, batches.steps_per_epoch - 1))
        started = time.perf_counter()
        made = [as_one_array(batches[i] | {"run": np.zeros(len(batches[i]["weights"]), np.int32)}) for i in numbers]
        host[way] = 1e3 * (time.perf_counter() - started) / len(made)
        made, state = [sharding.put_batch(batch, tuner.mesh) for batch in made], [None]
        state[0] = tuner.trainer.init(tuner.objective, params)

        def train(made: list = made, state: list = state, train_step: Any = train_step) -> int:
            for batch in made:
                state[0], metrics = train_step(state[0], batch)
            jax.block_until_ready(metrics)
            return len(made) * args.batch_size

        def evaluate(tuner: Any = tuner, params: Any = jax.device_put(params), rows: list = rows) -> int:  # noqa: B008
            return len(tuner.predict(params, rows))

        loaded = LoadedModel(tuner.model, jax.device_put(params), tuner.tokenizer)
        inputs = [forward.Row(row["input_ids"], row["token_type_ids"]) for row in rows]
        alone = {"slots": lambda length: 1, "SHORTEST": forward.BUCKET} if way == "padded" else {"BUCKET": 32}

        def predict(loaded: Any = loaded, inputs: list = inputs, alone: dict = alone) -> int:
            with mock.patch.multiple(forward, **alone):
                return len(forward.run(loaded, inputs, args.eval_batch_size))

        steps[way], evaluations[way], predictions[way] = train, evaluate, predict
    lengths = [row_length(row) for row in rows]
    lines = []
    for what, runs in (("training", steps), ("evaluation", evaluations), ("prediction", predictions)):
        found = alternating(runs, args.repeats)
        note = f"{shapes['packed']}, padded {shapes['padded']}; host ms {host['packed']:.2f}, {host['padded']:.2f}"
        lines.append(
            (f"{name}, {np.mean(lengths):.0f} tokens of at most {max(lengths)}", what)
            + tuple(f"{found[way]:,.0f}" for way in ("padded", "packed"))
            + (f"{found['packed'] / found['padded']:.2f}", note if what == "training" else "")
        )
    return lines


def measure_tasks(args: argparse.Namespace) -> None:
    """Prints the table of --tasks."""
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = make_random_checkpoint(args.out, args.preset, args.tokenizer)
    head = (f"{args.preset}, batches of {args.batch_size}", "examples/s", "padded", "packed", "ratio", "rows x tokens")
    lines = []
    for name in args.tasks.split(","):
        lines += of_task(name, args, checkpoint)
        print(markdown.table(head, lines), flush=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def main(argv: list[str]) -> None:
    parser = harness.make_parser("packed", __doc__)
    parser.add_argument(
        "workload", nargs="?", type=Workload.parse, default=Workload.parse("large-512x32"), help="MODEL-LENGTHxROWS"
    )
    parser.add_argument("--store", type=pathlib.Path, help="token store")
    parser.add_argument("--tasks", help="fine-tuning tasks in place of pre-training, with commas")
    parser.add_argument("--data", default="", metavar="DIR", help="of the tasks: the GLUE folders, or one task's files")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: options of the task's class")
    parser.add_argument("--tokenizer", metavar="DIR", help="of the tasks' random weights")
    parser.add_argument("--preset", default="base", help="their network")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--eval_batch_size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=10_000, help="of an evaluation and a prediction")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no_peer", action="store_true")
    args = parser.parse_args(argv)
    if args.tasks:
        with refusals("packed"):
            measure_tasks(args)
        return
    if args.store is None:
        parser.error("--store=STORE, or --tasks=NAMES")

    work, report = args.workload, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, packed in (("packed", True), ("padded", False)):
            batches = stream(args.store, work, packed)
            mean, step = fill(batches)
            rows = pathlib.Path(scratch) / f"{name}.npz"
            np.savez(rows, **batches[step])
            options = [f"--steps={args.steps}", f"--rows={rows}"]
            runs = {f"bertjax, {name}": run_jax([work], options)["results"][work.name]}
            if not packed and not args.no_peer:
                peers = run_peers([work], args.steps, 1, options[1:])
                runs["transformers, padded"] = peers[work.name]
            for who, result in runs.items():
                seconds = result["step_seconds"]
                report[who] = {
                    "step_ms": 1e3 * seconds,
                    "fill": mean,
                    "useful_tokens_per_second": mean * work.batch_size * work.seq_length / seconds,
                    **result,
                }

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "packed.json").write_text(json.dumps(report, indent=1))
    slowest = min(r["useful_tokens_per_second"] for r in report.values())
    lines = [
        (who, f"{result['step_ms']:.2f}", f"{result['fill']:.1%}", f"{rate:,.0f}", f"{rate / slowest:.2f}")
        for who, result in report.items()
        for rate in [result["useful_tokens_per_second"]]
    ]
    print(
        f"{work.name} on {args.store}\n\n{markdown.table((work.name, 'ms', 'full', 'useful tokens/s', 'ratio'), lines)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
