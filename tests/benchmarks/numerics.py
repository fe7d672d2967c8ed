"""Loss curves of the fast mode beside those of the float32 reference path, on real text.

    python -m tests.benchmarks.numerics --store=STORE --out=DIR --gpus=0,1,2

The same pre-training three times by `bertjax.main`, from the same initial weights over the same
rows and masks:

    fast       bfloat16 and the hand-written kernels, as a user gets them on a GPU
    reference  float32 by plain XLA, matrix products at highest precision
    seed       'reference' with another seed: other weights, rows and masks

On a GPU each mode has its own generator for dropout. How far two seeds lie apart is the noise: the
fast mode is within it if, of the curves smoothed over SMOOTHING of the steps, both the mean and the
largest |fast - reference| are at most those of |seed - reference|. Writes numerics.json (losses of
every step), numerics.md and numerics.png into --out; a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import numpy as np

from bertjax import markdown
from bertjax.model.presets import PRESETS
from tests.benchmarks import harness

RUNS = {
    "fast": "fast: bfloat16, kernels",
    "reference": "reference: float32, plain XLA",
    "seed": "reference, another seed",
}
SMOOTHING = 1 / 20  # share of the steps that a moving average spans
WARMUP = 0.1  # share of the steps


def job(name: str, args: argparse.Namespace) -> harness.Job:
    """The pre-training `name` of RUNS."""
    model = PRESETS[args.preset]
    settings: dict[str, Any] = {
        "data.corpus": args.store,
        "data.packed": False,
        "seed": args.seed + (name == "seed"),
        "phases": ((args.steps, args.length),),
        "batch_size": args.batch,
        "optimizer.learning_rate": args.learning_rate,
        "optimizer.warmup_steps": round(WARMUP * args.steps),
        "log.every_steps": 1,
        "log.tensorboard": False,
        "eval.every_steps": 0,
        "eval.rows": args.heldout_rows,
        "checkpoint.every_steps": args.steps,
        "checkpoint.keep_best": 0,
        "execution.dtype": "bfloat16" if name == "fast" else "float32",
        "execution.kernels": "auto" if name == "fast" else "xla",
    }
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        settings[f"model.{field}"] = getattr(model, field)
    environment = {} if name == "fast" else {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return harness.Job(name, harness.pretraining("base", args.out / name, settings), environment)


def finished(directory: pathlib.Path) -> bool:
    return (directory / "model" / "config.json").exists()


def read(directory: pathlib.Path) -> dict[str, Any]:
    """{'loss': of every step, 'heldout_mlm_loss': at the end, 'device': its name}."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "loss": [record["loss"] for record in records if "loss" in record],
        "heldout_mlm_loss": next(record["eval/mlm_loss"] for record in reversed(records) if "eval/mlm_loss" in record),
        "device": json.loads((directory / "hardware.json").read_text())["device_kind"],
    }


def smooth(losses: list[float]) -> np.ndarray:
    """Moving average; element i is the mean of the `span` losses that begin at step i."""
    span = max(1, round(SMOOTHING * len(losses)))
    return np.convolve(np.asarray(losses, np.float64), np.full(span, 1 / span), "valid")


def distances(found: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """The smoothed curves of 'fast' and of 'seed' minus that of 'reference'."""
    curves = {name: smooth(found[name]["loss"]) for name in RUNS}
    return {name: curves[name] - curves["reference"] for name in ("fast", "seed")}


def verdict(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and largest distance of 'fast' and of 'seed', and whether the first are no larger."""
    result: dict[str, Any] = {}
    for name, distance in distances(found).items():
        result[name] = {"mean": float(np.abs(distance).mean()), "max": float(np.abs(distance).max())}
    result["within_noise"] = all(result["fast"][how] <= result["seed"][how] for how in ("mean", "max"))
    return result


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: the end of each run, its distance from the reference, the verdict."""
    columns = ("run", "loss at the end, smoothed", "held-out MLM loss", "mean distance from the reference", "largest")
    judged, rows = verdict(found), []
    for name, label in RUNS.items():
        rows.append(
            (
                label,
                f"{smooth(found[name]['loss'])[-1]:.4f}",
                f"{found[name]['heldout_mlm_loss']:.4f}",
                *(f"{judged[name][how]:.4f}" if name in judged else "-" for how in ("mean", "max")),
            )
        )
    said = "within" if judged["within_noise"] else "NOT within"
    steps = len(found["fast"]["loss"])
    return (
        f"{markdown.table(columns, rows)}\n\nThe fast mode is {said} the noise of a seed, over "
        f"{steps} steps on {found['fast']['device']}.\n"
    )


def draw(path: pathlib.Path, found: dict[str, dict[str, Any]], title: str) -> None:
    """The three curves, and below the two distances from the reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colours = {"fast": "tab:blue", "reference": "black", "seed": "tab:orange"}
    widths = {"fast": 1.2, "reference": 3.0, "seed": 1.2}
    for name in ("seed", "reference", "fast"):  # the thick one below the one that lies on it
        curve, losses = smooth(found[name]["loss"]), found[name]["loss"]
        steps = len(losses) - len(curve) + 1 + np.arange(len(curve))
        upper.plot(
            steps,
            curve,
            color=colours[name],
            linewidth=widths[name],
            label=RUNS[name],
            alpha=0.45 if name == "reference" else 1.0,
        )
        if name != "reference":
            lower.plot(
                steps, distances(found)[name], color=colours[name], linewidth=1.2, label=f"{RUNS[name]} - reference"
            )
    lower.axhline(0, color="black", linewidth=0.8, alpha=0.45)
    upper.set_title(title)
    upper.set_ylabel("training loss (MLM + NSP), smoothed")
    lower.set_ylabel("difference")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = harness.make_parser("numerics", __doc__)
    add = parser.add_argument
    add("--store", required=True, help="token store (python -m bertjax.tools.build_corpus)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench/numerics"))
    add("--gpus", default=harness.default_gpus(1), help="CUDA devices, one a run; '' = the CPU")
    add("--steps", type=int, default=300)
    add("--preset", default="base", choices=tuple(PRESETS))
    add("--length", type=int, default=128, help="tokens of a row")
    add("--batch", type=int, default=256, help="rows a step")
    add("--learning_rate", type=float, default=2e-4)
    add("--heldout_rows", type=int, default=2048)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = harness.run_all(
        [job(name, args) for name in RUNS if not finished(args.out / name)], args.gpus.split(","), args.out
    )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see {args.out}/NAME.log")
    found = {name: read(args.out / name) for name in RUNS}
    settings = {name: str(value) for name, value in vars(args).items()}
    (args.out / "numerics.json").write_text(
        json.dumps({"settings": settings, "verdict": verdict(found), "runs": found}, indent=1)
    )
    text = table(found)
    (args.out / "numerics.md").write_text(text, encoding="utf-8")
    print(text)
    draw(
        args.out / "numerics.png",
        found,
        f"BERT-{args.preset}, {args.batch} rows of {args.length} tokens, {found['fast']['device']}",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
