"""Time to quality: held-out MLM loss over wall clock, bertjax beside transformers + torch.compile.

    python -m bertjax.tools.bench quality --store=STORE --out=DIR

pre-trains the same model on the same token store for the same minutes by both, start-up and
compilation included, each side in a process of its own on a GPU of its own (--gpus=0,1; with fewer
GPUs one after the other), and draws DIR/quality.png. The steps can be taken one by one:

    ... quality prepare --store=STORE --out=DIR    settings.json and the held-out rows with masks
    ... quality run NAME --out=DIR                 one of the runs of settings.json
    ... quality score --out=DIR                    the finished models, read by one program
    ... quality draw --out=DIR                     the table and the picture

The runs (--runs=NAME,NAME):
    peer     BertForPreTraining, SDPA, bfloat16 autocast, fused AdamW, padded rows (quality_peer.py)
    bertjax  python -m bertjax.main, several pairs packed in a row
    padded   the same with one pair a row
    shorter  'bertjax' in 70 % of the minutes
    recipe   'bertjax' with masking, dropout, b2 and clipping of configs/recipes.py:budget

Batch in rows, learning rate, shape of the schedule, optimizer and dropout are the same in all, but
for what 'recipe' changes. The schedule follows the clock (training/budget.py), so each run ends its
decay when its time ends and no speed has to be known beforehand. Every run evaluates the same
held-out rows with the same masks, about 24 times; the time this takes counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

UNITS = 100_000  # steps of the schedule's scale: more than any run takes
FIELDS = ("input_ids", "token_type_ids", "attention_mask", "mlm_positions", "mlm_labels",
          "mlm_weights", "nsp_labels", "nsp_weights")
SHORTER = 0.7  # the bar: bertjax reaches the peer's final loss in this share of its time
LABELS = {
    "peer": "transformers + torch.compile",
    "bertjax": "bertjax",
    "padded": "bertjax, one pair a row",
    "shorter": f"bertjax in {SHORTER:.0%} of the time",
    "recipe": "bertjax, masking 25 %, no dropout",
}
FILL_MASK = ("The capital of France is [MASK].", "He was [MASK] in London in 1908.",
             "The album was released in [MASK] 2004.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs share."""

    store: str
    model: str = "base"
    minutes: float = 8.0
    phases: tuple[tuple[int, float], ...] = ((128, 0.85), (512, 0.15))  # length, share of the time
    batch_size: int = 128
    learning_rate: float = 3e-4
    warmup: float = 0.06  # share of the time after compilation
    heldout_rows: int = 2048
    evaluations: int = 24
    seed: int = 0
    runs: tuple[str, ...] = ("bertjax", "peer")
    eager: bool = False  # the peer without torch.compile

    @property
    def length(self) -> int:
        """Tokens of the held-out rows of the curve: those of the first phase."""
        return self.phases[0][0]

    @property
    def scaled_phases(self) -> tuple[tuple[int, int], ...]:
        """((steps of the scale, length), ...); the shares add up to UNITS."""
        return tuple((round(UNITS * share), length) for length, share in self.phases)

    def minutes_of(self, name: str) -> float:
        return self.minutes * (SHORTER if name == "shorter" else 1.0)

    def overrides(self, name: str, workdir: pathlib.Path | str) -> dict[str, Any]:
        """Settings of `bertjax.main` for a run, by name."""
        from bertjax.model.presets import PRESETS

        model = PRESETS[self.model]
        values: dict[str, Any] = {
            "data.corpus": self.store, "seed": self.seed, "phases": self.scaled_phases,
            "budget_minutes": self.minutes_of(name), "batch_size": self.batch_size,
            "data.packed": name != "padded",
            "eval.every_steps": UNITS // self.evaluations, "eval.rows": self.heldout_rows,
            "eval.seq_length": self.length, "eval.masking_rate": 0.15,
            "checkpoint.every_steps": UNITS, "checkpoint.keep_best": 0,
            "execution.compilation_cache": "", "log.tensorboard": False,
            "log.fill_mask": FILL_MASK,
        }
        for field in ("num_hidden_layers", "hidden_size", "num_attention_heads",
                      "intermediate_size", "max_position_embeddings"):
            values[f"model.{field}"] = getattr(model, field)
        values["optimizer.learning_rate"] = self.learning_rate
        values["optimizer.warmup_steps"] = round(UNITS * self.warmup)
        if name == "recipe":  # the held-out rows are pairs
            values |= {"data.nsp": True, "data.short_seq_prob": 0.1, "accumulation": 1}
        else:
            values |= {
                "optimizer.schedule": "linear_after_warmup",
                "optimizer.bias_correction": True,  # torch.optim.AdamW has it
            }
        return values

    def save(self, out: pathlib.Path) -> None:
        (out / "settings.json").write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, out: pathlib.Path) -> Settings:
        values = json.loads((out / "settings.json").read_text())
        values["phases"] = tuple((int(length), share) for length, share in values["phases"])
        return cls(**values | {"runs": tuple(values["runs"])})


def parse_phases(text: str) -> tuple[tuple[int, float], ...]:
    """'128:0.85,512:0.15' -> ((128, 0.85), (512, 0.15))."""
    try:
        phases = tuple((int(length), float(share)) for length, share in
                       (part.split(":") for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--phases={text} is not LENGTH:SHARE,LENGTH:SHARE") from None
    if abs(sum(share for _, share in phases) - 1) > 1e-6:
        raise ValueError(f"--phases={text}: the shares of the time must add up to 1")
    return phases


# --------------------------------------------------------------------------------------- prepare


def prepare(settings: Settings, out: pathlib.Path) -> None:
    """Writes settings.json and heldout_LENGTH.npz for each length of the phases.

    The masks are those that bertjax's own evaluation draws, so that bertjax runs unchanged and the
    peer reads the file.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings.save(out)
    for length, _ in settings.phases:
        batches = list(heldout(settings, length))
        np.savez(out / f"heldout_{length}.npz",
                 **{name: np.concatenate([batch[name] for batch in batches]) for name in FIELDS})


def heldout(settings: Settings, length: int) -> Iterator[dict[str, np.ndarray]]:
    """The batches that a run with these settings evaluates on rows of `length` tokens, masked."""
    import jax

    from bertjax.config import default_config
    from bertjax.training import pretraining
    from bertjax.training.optimizer import make_optimizer
    from bertjax.training.trainer import Trainer

    config = default_config()
    config.update_from_flattened_dict(settings.overrides("bertjax", "") | {
        "phases": ((UNITS, length),), "eval.seq_length": length, "data.packed": False})
    with tempfile.TemporaryDirectory() as workdir:
        job = pretraining.prepare(config, workdir)
    trainer = Trainer(make_optimizer(0.0), job.mesh, config.seed)
    evaluation = job.evaluations[0]
    mask = jax.jit(lambda batch, number: evaluation.objective.prepare(
        batch, trainer.evaluation_key(number)))
    for number, batch in enumerate(evaluation.batches):
        yield jax.device_get(mask(batch, np.uint32(number)))


# ------------------------------------------------------------------------------------------- run


def run(name: str, out: pathlib.Path) -> None:
    """One run in this process (peer) or in a child of it (bertjax); leaves OUT/NAME/curve.jsonl."""
    settings, directory = Settings.load(out), out / name
    if (directory / "curve.jsonl").exists():
        raise ValueError(f"{directory} holds a finished run; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    if name == "peer":
        from bertjax.tools.bench import quality_peer

        quality_peer.train(settings, out / f"heldout_{settings.length}.npz", directory)
        return
    experiment = "bertjax:recipes:budget" if name == "recipe" else "bertjax:base"
    flags = [f"--config.{key}={value}" for key, value in settings.overrides(name, out).items()]
    started = time.time()
    subprocess.run([sys.executable, "-m", "bertjax.main", f"--config={experiment}",
                    f"--workdir={directory}", *flags], check=True)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    points = [{"seconds": record["time"] - started, "step": record["step"],
               "mlm_loss": record["eval/mlm_loss"], "mlm_accuracy": record["eval/mlm_accuracy"],
               "nsp_accuracy": record["eval/nsp_accuracy"]}
              for record in map(json.loads, lines) if "eval/mlm_loss" in record]
    write_curve(directory, points)


def write_curve(directory: pathlib.Path, points: list[dict[str, float]]) -> None:
    """curve.jsonl: seconds since the process started, step, held-out metrics."""
    text = "".join(json.dumps(point) + "\n" for point in points)
    (directory / "curve.jsonl").write_text(text)


def run_all(settings: Settings, out: pathlib.Path, gpus: list[str]) -> None:
    """All runs, as many at a time as there are GPUs ('' = the CPU)."""
    waiting = [name for name in settings.runs if not (out / name / "curve.jsonl").exists()]
    free, running, failed = list(gpus), {}, []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and free:
                name, gpu = waiting.pop(0), free.pop(0)
                cache = stack.enter_context(tempfile.TemporaryDirectory())
                log = stack.enter_context(open(out / f"{name}.log", "w"))
                environment = os.environ | {
                    # Compilation counts, so neither side may find what an earlier run compiled.
                    "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
                    "TRITON_CACHE_DIR": f"{cache}/triton",
                    "TOKENIZERS_PARALLELISM": "false",
                }
                if gpu:
                    environment["CUDA_VISIBLE_DEVICES"] = gpu
                    environment.pop("JAX_PLATFORMS", None)
                print(f"{name}: started" + (f" on GPU {gpu}" if gpu else ""), flush=True)
                running[name] = gpu, subprocess.Popen(
                    [sys.executable, "-m", "bertjax.tools.bench", "quality", "run", name,
                     f"--out={out}"], stdout=log, stderr=subprocess.STDOUT, env=environment)
            time.sleep(0.5)
            for name, (gpu, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    free.append(gpu)
                    print(f"{name}: exit code {process.returncode}", flush=True)
                    if process.returncode:
                        failed.append(name)
    for name in failed:
        tail = (out / f"{name}.log").read_text().splitlines()[-20:]
        print(f"--- {name}.log ends with:\n" + "\n".join(tail), file=sys.stderr)


# ----------------------------------------------------------------------------------------- score


def score(out: pathlib.Path) -> dict[str, dict[str, float]]:
    """Held-out metrics of every exported model at every length, all by bertjax; scores.json.

    This also checks the peer's own evaluation: at the curve's length it must agree with its end.
    """
    import jax

    from bertjax.interop import load_model
    from bertjax.model.presets import Execution
    from bertjax.training import losses

    settings, results = Settings.load(out), {}
    execution = Execution.for_backend(jax.default_backend())
    for name in settings.runs:
        if not (out / name / "model").is_dir():
            continue
        loaded = load_model(out / name / "model")
        model = loaded.model.clone(execution=execution, parent=None)

        @jax.jit
        def sums(params, batch, model=model):
            mlm, nsp = model.apply(
                {"params": params}, batch["input_ids"], batch["attention_mask"],
                batch["token_type_ids"], None, batch["mlm_positions"])
            return (losses.mlm_sums(mlm, batch["mlm_labels"], batch["mlm_weights"]),
                    losses.nsp_sums(nsp, batch["nsp_labels"], batch["nsp_weights"]))

        for length, _ in settings.phases:
            rows = dict(np.load(out / f"heldout_{length}.npz"))
            total = np.zeros((2, 3))
            for start in range(0, len(rows["input_ids"]), settings.batch_size):
                part = {k: v[start : start + settings.batch_size] for k, v in rows.items()}
                total += np.asarray(jax.device_get(sums(loaded.params, part)), np.float64)
            (mlm, correct, words), (_, right, pairs) = total
            results.setdefault(name, {})[str(length)] = {
                "mlm_loss": mlm / words, "mlm_accuracy": correct / words,
                "nsp_accuracy": right / pairs}
    (out / "scores.json").write_text(json.dumps(results, indent=1))
    return results


# ------------------------------------------------------------------------------------------ draw


def read_curve(directory: pathlib.Path) -> list[dict[str, float]]:
    path = directory / "curve.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def time_to(curve: list[dict[str, float]], loss: float) -> float | None:
    """Seconds at which the curve first reaches `loss`, between two points by a line; or None."""
    for before, after in zip(curve, curve[1:], strict=False):
        if after["mlm_loss"] <= loss:
            fall = before["mlm_loss"] - after["mlm_loss"]
            share = (before["mlm_loss"] - loss) / fall if fall > 0 else 0.0
            return before["seconds"] + max(0.0, share) * (after["seconds"] - before["seconds"])
    return None


def table(settings: Settings, out: pathlib.Path) -> str:
    """A Markdown table: each run's end, and when it reached the peer's final loss."""
    curves = {name: read_curve(out / name) for name in settings.runs}
    scores_file = out / "scores.json"
    scores = json.loads(scores_file.read_text()) if scores_file.exists() else {}
    longest = str(settings.phases[-1][0])
    lines = [
        f"{settings.model}, {settings.batch_size} rows a step, "
        + ", then ".join(f"{length} tokens for {share:.0%}" for length, share in settings.phases)
        + f" of the time; {settings.heldout_rows:,} held-out rows",
        "",
        f"| run | seconds | steps | MLM loss, {settings.length} | accuracy | NSP accuracy | "
        f"MLM loss, {longest} | reaches the peer's end after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    goal = curves["peer"][-1] if curves.get("peer") else None
    for name, curve in curves.items():
        if not curve:
            continue
        end = curve[-1]
        long = scores.get(name, {}).get(longest, {}).get("mlm_loss")
        reached = time_to(curve, goal["mlm_loss"]) if goal and name != "peer" else None
        lines.append(
            f"| {LABELS[name]} | {end['seconds']:.0f} | {end['step']:,} | {end['mlm_loss']:.3f} | "
            f"{end['mlm_accuracy']:.1%} | {end['nsp_accuracy']:.1%} | "
            + (f"{long:.3f}" if long is not None else "-") + " | "
            + (f"{reached:.0f} s ({reached / goal['seconds']:.0%})" if reached else "-") + " |")
    return "\n".join(lines) + "\n"


def draw(settings: Settings, out: pathlib.Path) -> None:
    """quality.png: held-out MLM loss over wall clock, and NSP accuracy below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    colours = dict(zip(LABELS, ("tab:orange", "tab:blue", "tab:cyan", "tab:green", "tab:purple"),
                       strict=True))
    curves = {name: curve for name in settings.runs if (curve := read_curve(out / name))}
    for name, curve in curves.items():
        minutes = [point["seconds"] / 60 for point in curve]
        label = f"{LABELS[name]}: {curve[-1]['mlm_loss']:.3f} after {curve[-1]['step']:,} steps"
        upper.plot(minutes, [point["mlm_loss"] for point in curve], "o-", markersize=3,
                   color=colours[name], label=label)
        lower.plot(minutes, [100 * point["nsp_accuracy"] for point in curve], "o-", markersize=2,
                   color=colours[name])
    if "peer" in curves:
        goal = curves["peer"][-1]
        upper.axhline(goal["mlm_loss"], color=colours["peer"], linewidth=0.8, linestyle=":")
        for name in ("bertjax", "padded"):
            seconds = time_to(curves.get(name, []), goal["mlm_loss"])
            if seconds:
                upper.annotate(
                    f"the peer's final loss after {seconds / 60:.1f} min "
                    f"({seconds / goal['seconds']:.0%} of its time)",
                    (seconds / 60, goal["mlm_loss"]), xytext=(0, 28), ha="center",
                    textcoords="offset points", fontsize=8, color=colours[name],
                    arrowprops={"arrowstyle": "->", "color": colours[name]})
                break
    upper.set_ylabel(f"held-out MLM loss, rows of {settings.length} tokens")
    upper.set_title(f"BERT-{settings.model} from scratch on one GPU each, start-up included")
    upper.legend(fontsize=9)
    lower.set_ylabel("NSP accuracy, %")
    lower.set_xlabel("minutes of wall clock since the process was started")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    figure.savefig(out / "quality.png", dpi=120)


# ------------------------------------------------------------------------------------------ main


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m bertjax.tools.bench quality", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = made.add_argument, Settings(store="")
    add("what", nargs="?", default="all", choices=("all", "prepare", "run", "score", "draw"))
    add("name", nargs="?", choices=tuple(LABELS), help="which run")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench/quality"))
    add("--store", help="token store (python -m bertjax.tools.build_corpus)")
    add("--gpus", default="0,1", help="CUDA devices, one a run; '' = the CPU")
    add("--model", default=default.model, help="a preset: base, large, medium, small, mini, tiny")
    add("--minutes", type=float, default=default.minutes, help="wall clock of each run")
    add("--phases", type=parse_phases, default=default.phases,
        help="LENGTH:SHARE of the time, ... (128:0.85,512:0.15)")
    add("--batch_size", type=int, default=default.batch_size, help="rows a step")
    add("--learning_rate", type=float, default=default.learning_rate)
    add("--warmup", type=float, default=default.warmup, help="share of the time")
    add("--heldout_rows", type=int, default=default.heldout_rows)
    add("--evaluations", type=int, default=default.evaluations)
    add("--seed", type=int, default=default.seed)
    add("--runs", default=",".join(default.runs), help=", ".join(LABELS))
    add("--eager", action="store_true", help="the peer without torch.compile")
    return made


def main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    if args.what in ("all", "prepare"):
        if not args.store:
            parser().error("--store=DIR is missing")
        unknown = set(args.runs.split(",")) - set(LABELS)
        if unknown:
            parser().error(f"--runs: {', '.join(unknown)}; one of {', '.join(LABELS)}")
        settings = Settings(
            str(pathlib.Path(args.store).absolute()), args.model, args.minutes, args.phases,
            args.batch_size, args.learning_rate, args.warmup, args.heldout_rows, args.evaluations,
            args.seed, tuple(args.runs.split(",")), args.eager)
        # Leaves the GPUs to the runs; the held-out masks are the same on every backend.
        os.environ["JAX_PLATFORMS"] = "cpu"
        prepare(settings, args.out)
    if args.what == "run":
        run(args.name, args.out)
        return
    if args.what == "prepare":
        return
    settings = Settings.load(args.out)
    if args.what == "all":
        run_all(settings, args.out, args.gpus.split(","))
    if args.what == "score":
        print(json.dumps(score(args.out), indent=1))
    text = table(settings, args.out)
    (args.out / "quality.md").write_text(text)
    print(text)
    draw(settings, args.out)
