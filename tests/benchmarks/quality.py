"""Time to quality: held-out MLM loss over wall clock, bertjax beside transformers + torch.compile.

    python -m tests.benchmarks.quality --store=STORE --out=DIR

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
    modern   configs/modern.py:budget with its own optimizer and schedule, no next sentences
    muon     configs/modern.py:budget,muon with a learning rate of 1.2e-3

Behind the name of a run of bertjax may stand settings of its own, so that a search is one command:
--runs=recipe,recipe+masking.rate=0.4,modern+data.nsp=True+model.type_vocab_size=2

Batch in rows, learning rate, shape of the schedule, optimizer and dropout are the same in all, but
for what 'recipe', 'modern' and such settings change. The schedule follows the clock
(process/clock.py), so each run ends its decay when its time ends and no speed has to be known
beforehand. Every run evaluates the same held-out rows with the same masks, about 24 times; the time
this takes counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.benchmarks import harness
from tests.benchmarks.quality_curves import LABELS, SHORTER, STARTED_FILE, draw, table

UNITS = 100_000  # steps of the schedule's scale: more than any run takes
FIELDS = (
    "input_ids",
    "token_type_ids",
    "attention_mask",
    "mlm_positions",
    "mlm_labels",
    "mlm_weights",
    "nsp_labels",
    "nsp_weights",
)
FILL_MASK = (
    "The capital of France is [MASK].",
    "He was [MASK] in London in 1908.",
    "The album was released in [MASK] 2004.",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs share."""

    store: str
    model: str = "base"
    minutes: float = 10.0
    # (length, share of the time). A step of 512 takes 4.6 times as long as one of 128 on either
    # side, so the paper's last 10 % of the steps (A.2) are a third of the time.
    phases: tuple[tuple[int, float], ...] = ((128, 0.67), (512, 0.33))
    batch_size: int = 128
    learning_rate: float = 2e-4  # twice that (tried for two minutes) stays on the plateau
    warmup: float = 0.1  # share of the time after compilation
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

        name, *changes = name.split("+")
        modern = name in ("modern", "muon")
        model = PRESETS["modernbert-base" if modern and self.model == "base" else self.model]
        values: dict[str, Any] = {
            "data.corpus": self.store,
            "seed": self.seed,
            "phases": self.scaled_phases,
            "budget_minutes": self.minutes_of(name),
            "batch_size": self.batch_size,
            "data.packed": name != "padded",
            "eval.every_steps": UNITS // self.evaluations,
            "eval.rows": self.heldout_rows,
            "eval.seq_length": self.length,
            "eval.masking_rate": 0.15,
            "checkpoint.every_steps": UNITS,
            "checkpoint.keep_best": 0,
            "execution.compilation_cache": "",
            "log.tensorboard": False,
            "log.fill_mask": FILL_MASK,
        }
        for field in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            values[f"model.{field}"] = getattr(model, field)
        values["optimizer.warmup_steps"] = round(UNITS * self.warmup)
        if name == "muon":
            values["optimizer.learning_rate"] = 1.2e-3
        elif not modern:
            values["optimizer.learning_rate"] = self.learning_rate
        if name == "recipe":  # the held-out rows are pairs
            values |= {"data.nsp": True, "data.short_seq_prob": 0.1, "accumulation": 1}
        elif not modern:
            values |= {
                "optimizer.schedule": "linear_after_warmup",
                "optimizer.bias_correction": True,  # torch.optim.AdamW has it
            }
        return values | dict(change.split("=", 1) for change in changes)

    def save(self, out: pathlib.Path) -> None:
        (out / "settings.json").write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, out: pathlib.Path) -> Settings:
        values = json.loads((out / "settings.json").read_text())
        values["phases"] = tuple((int(length), share) for length, share in values["phases"])
        return cls(**values | {"runs": tuple(values["runs"])})


def parse_phases(text: str) -> tuple[tuple[int, float], ...]:
    """'128:0.67,512:0.33' -> ((128, 0.67), (512, 0.33))."""
    try:
        phases = tuple((int(length), float(share)) for length, share in (part.split(":") for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--phases={text} is not LENGTH:SHARE,LENGTH:SHARE") from None
    if abs(sum(share for _, share in phases) - 1) > 1e-6:
        raise ValueError(f"--phases={text}: the shares of the time must add up to 1")
    return phases


# --------------------------------------------------------------------------------------- prepare


def prepare(settings: Settings, out: pathlib.Path) -> None:
    """Writes settings.json and heldout_LENGTH.npz for each length of the phases.

    The masks are those that bertjax's own evaluation draws, so that bertjax runs unchanged and the
    peer reads the file. Raises ValueError if `out` holds runs with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / "settings.json").exists():
        before = dataclasses.replace(Settings.load(out), runs=settings.runs)
        if before != settings:
            raise ValueError(f"{out} holds runs with other settings ({before}); choose another --out")
    settings.save(out)
    for length, _ in settings.phases:
        batches = list(heldout(settings, length))
        np.savez(
            out / f"heldout_{length}.npz",
            **{name: np.concatenate([batch[name] for batch in batches]) for name in FIELDS},
        )


def heldout(settings: Settings, length: int) -> Iterator[dict[str, np.ndarray]]:
    """The batches that a run with these settings evaluates on rows of `length` tokens, masked."""
    import jax

    from bertjax.config import OptimizerSettings, default_config, frozen
    from bertjax.pretraining import job as pretraining
    from bertjax.training.optimizer import make_optimizer
    from bertjax.training.trainer import Trainer

    config = default_config()
    config.update_from_flattened_dict(
        settings.overrides("bertjax", "")
        | {"phases": ((UNITS, length),), "eval.seq_length": length, "data.packed": False}
    )
    with tempfile.TemporaryDirectory() as workdir:
        job = pretraining.prepare(frozen(config), workdir)
    trainer = Trainer(make_optimizer(OptimizerSettings(), 0.0), job.mesh, config.seed)
    evaluation = job.evaluations[0]
    mask = jax.jit(lambda batch, number: evaluation.objective.prepare(batch, trainer.evaluation_key(number)))
    for number, batch in enumerate(evaluation.batches):
        yield jax.device_get(mask(batch, np.uint32(number)))


# ------------------------------------------------------------------------------------------- run


def finished(directory: pathlib.Path) -> bool:
    """Whether a run got to its end, where it writes its model."""
    return (directory / "model" / "config.json").exists()


def experiment(name: str) -> str:
    """The shipped configuration of a run of bertjax."""
    shipped = {"recipe": "recipes:budget", "modern": "modern:budget", "muon": "modern:budget,muon"}
    return shipped.get(name.split("+")[0], "base")


def run(name: str, out: pathlib.Path) -> None:
    """One run from its start, in this process (peer) or in a child of it (bertjax)."""
    settings, directory = Settings.load(out), out / name
    if finished(directory):
        raise ValueError(f"{directory} holds a finished run; choose another --out")
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed: its clock has stopped
    directory.mkdir(parents=True)
    if name == "peer":
        from tests.benchmarks import quality_peer

        quality_peer.train(settings, out / f"heldout_{settings.length}.npz", directory)
        return
    (directory / STARTED_FILE).write_text(str(time.time()))
    subprocess.run(harness.pretraining(experiment(name), directory, settings.overrides(name, out)), check=True)


def run_all(settings: Settings, out: pathlib.Path, gpus: list[str]) -> list[str]:
    """Does the runs that are not finished; returns the names of those that failed."""
    with tempfile.TemporaryDirectory() as cache:
        # Compilation counts, so no side may find what an earlier run compiled.
        return harness.run_all(
            [
                harness.Job(
                    name,
                    harness.python("tests.benchmarks.quality", "run", name, f"--out={out}"),
                    {
                        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{name}/inductor",
                        "TRITON_CACHE_DIR": f"{cache}/{name}/triton",
                        "TOKENIZERS_PARALLELISM": "false",
                    },
                )
                for name in settings.runs
                if not finished(out / name)
            ],
            gpus,
            out,
        )


# ----------------------------------------------------------------------------------------- score


def score(out: pathlib.Path) -> dict[str, dict[str, dict[str, float]]]:
    """Held-out metrics of every exported model at every length, all by bertjax; scores.json.

    All see the same rows, pairs of sentences, also a model that never learnt next sentences. This also checks the
    peer's own evaluation: at the curve's length it must agree with its end.
    'mlm_loss_beyond' is that of the positions which only rows longer than the curve's have.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.interop import load_model
    from bertjax.model.presets import Execution
    from bertjax.training import losses

    settings, results = Settings.load(out), {}
    execution = Execution.for_backend(jax.default_backend())
    for name in settings.runs:
        if not finished(out / name):
            continue
        loaded = load_model(out / name / "model")
        model = loaded.model.clone(execution=execution)

        @jax.jit
        def sums(params, batch, model=model):
            logits = model.apply(
                {"params": params},
                batch["input_ids"],
                batch["attention_mask"],
                batch["token_type_ids"],
                None,
                batch["mlm_positions"],
            )
            mlm, nsp = logits if isinstance(logits, tuple) else (logits, None)
            weights = batch["mlm_weights"]
            beyond = weights * (batch["mlm_positions"] >= settings.length)
            sums = [losses.classification_sums(mlm, batch["mlm_labels"], each) for each in (weights, beyond)]
            if nsp is None:
                return *sums, jnp.zeros(3)
            return *sums, losses.classification_sums(nsp, batch["nsp_labels"], batch["nsp_weights"])

        for length, _ in settings.phases:
            rows = dict(np.load(out / f"heldout_{length}.npz"))
            total = np.zeros((3, 3))
            for start in range(0, len(rows["input_ids"]), settings.batch_size):
                part = {k: v[start : start + settings.batch_size] for k, v in rows.items()}
                total += np.asarray(jax.device_get(sums(loaded.params, part)), np.float64)
            (mlm, correct, words), (mlm_beyond, _, words_beyond), (_, right, pairs) = total
            results.setdefault(name, {})[str(length)] = {
                "mlm_loss": mlm / words,
                "mlm_accuracy": correct / words,
                **({"nsp_accuracy": right / pairs} if pairs else {}),
                **({"mlm_loss_beyond": mlm_beyond / words_beyond} if words_beyond else {}),
            }
    (out / "scores.json").write_text(json.dumps(results, indent=1))
    return results


# ------------------------------------------------------------------------------------------ main


def parser() -> argparse.ArgumentParser:
    made = harness.make_parser("quality", __doc__)
    add, default = made.add_argument, Settings(store="")
    add("what", nargs="?", default="all", choices=("all", "prepare", "run", "score", "draw"))
    add("name", nargs="?", help="which run")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench/quality"))
    add("--store", help="token store (python -m bertjax.tools.build_corpus)")
    add("--gpus", default=harness.default_gpus(2), help="CUDA devices, one a run; '' = the CPU")
    add("--model", default=default.model, help="a preset: base, large, medium, small, mini, tiny")
    add("--minutes", type=float, default=default.minutes, help="wall clock of each run")
    add("--phases", type=parse_phases, default=default.phases, help="LENGTH:SHARE of the time, ... (128:0.67,512:0.33)")
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
        for name in args.runs.split(","):
            first, *changes = name.split("+")
            if first not in LABELS or not all("=" in change for change in changes):
                parser().error(f"--runs: {name} is not NAME or NAME+SETTING=VALUE, NAME one of {', '.join(LABELS)}")
        settings = Settings(
            str(pathlib.Path(args.store).absolute()),
            args.model,
            args.minutes,
            args.phases,
            args.batch_size,
            args.learning_rate,
            args.warmup,
            args.heldout_rows,
            args.evaluations,
            args.seed,
            tuple(args.runs.split(",")),
            args.eager,
        )
        # Leaves the GPUs to the runs; the held-out masks are the same on every backend.
        os.environ["JAX_PLATFORMS"] = "cpu"
        prepare(settings, args.out)
    if args.what == "run":
        run(args.name, args.out)
        return
    if args.what == "prepare":
        return
    settings, failed = Settings.load(args.out), []
    if args.what == "all":
        failed = run_all(settings, args.out, args.gpus.split(","))
    if args.what == "score":
        print(json.dumps(score(args.out), indent=1))
    text = table(settings, args.out)
    (args.out / "quality.md").write_text(text)
    print(text)
    draw(settings, args.out)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
