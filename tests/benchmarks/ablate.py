"""The paper's ablations at a budget of your own: pre-trains, fine-tunes, draws up the table.

    python -m tests.benchmarks.transfer prepare --data=SOURCE --out=DIR
    python -m tests.benchmarks.ablate --store=STORE --out=DIR --names=base,no_nsp,ltr --steps=20000 \\
        --seq_length=128 --tasks=qnli,mrpc,sst2 --seeds=5

NAMES are those of configs/ablations.py (size=6/768/12, masking=80/20/0, ...), and ltr_bilstm, which
is ltr fine-tuned with a BiLSTM above it. What follows `--` goes to every pre-training
(-- --config.batch_size=64). `prepare` puts the data under DIR/data. --points=5 also fine-tunes four
equally spaced checkpoints of each pre-training: the paper's figure 5.
Writes DIR/ablate.md: each name's mean and standard deviation over the seeds, and the paper's
numbers, which were had with 1,000,000 steps and compare in their differences only; and
DIR/ablate.png, the scores, over the steps where there are several points. A pre-training that is
finished, and a fine-tuning run that is, is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bertjax import markdown
from bertjax.tools.arguments import refusals
from tests.benchmarks import harness, transfer

# Tables 5, 6 and 8 of the paper: scores on dev (table 6: perplexity of held-out text first).
PAPER = {
    "base": "MNLI 84.4, QNLI 88.4, MRPC 86.7, SST-2 92.7, SQuAD 88.5",
    "no_nsp": "MNLI 83.9, QNLI 84.9, MRPC 86.5, SST-2 92.6, SQuAD 87.9",
    "ltr": "MNLI 82.1, QNLI 84.3, MRPC 77.5, SST-2 92.1, SQuAD 77.8",
    "ltr_bilstm": "MNLI 82.1, QNLI 84.1, MRPC 75.7, SST-2 91.6, SQuAD 84.9",
    "size=3/768/12": "perplexity 5.84, MNLI 77.9, MRPC 79.8, SST-2 88.4",
    "size=6/768/3": "perplexity 5.24, MNLI 80.6, MRPC 82.2, SST-2 90.7",
    "size=6/768/12": "perplexity 4.68, MNLI 81.9, MRPC 84.8, SST-2 91.3",
    "size=12/768/12": "perplexity 3.99, MNLI 84.4, MRPC 86.7, SST-2 92.9",
    "size=12/1024/16": "perplexity 3.54, MNLI 85.7, MRPC 86.9, SST-2 93.3",
    "size=24/1024/16": "perplexity 3.23, MNLI 86.6, MRPC 87.8, SST-2 93.7",
    "masking=80/10/10": "MNLI 84.2, NER 95.4",
    "masking=100/0/0": "MNLI 84.3, NER 94.9",
    "masking=80/0/20": "MNLI 84.1, NER 95.2",
    "masking=80/20/0": "MNLI 84.4, NER 95.2",
    "masking=0/20/80": "MNLI 83.7, NER 94.8",
    "masking=0/0/100": "MNLI 83.6, NER 94.9",
}

BILSTM = "_bilstm"  # at the end of a name: a matter of the fine-tuning alone
Scores = Mapping[str, Mapping[str, Sequence[float]]]  # {task: {label: one a seed, in percent}}


def label(name: str, step: int = 0) -> str:
    """A name as a directory: 'size=3/768/12' has slashes. `step` is 0 for the end."""
    return name.replace("/", "-").replace("=", "-") + (f"@{step}" if step else "")


def intermediate(steps: int, points: int) -> list[int]:
    """The steps of the checkpoints that are fine-tuned beside the last."""
    return [number * (steps // points) for number in range(1, points)]


def directory(out: pathlib.Path, name: str) -> pathlib.Path:
    """Where the pre-training of a name lies."""
    return out / "pretrained" / label(name.removesuffix(BILSTM))


def pretrain(name: str, args: argparse.Namespace, extra: Sequence[str]) -> None:
    """One pre-training as a user would start it; nothing where its model exists."""
    workdir = directory(args.out, name)
    if (workdir / "model" / "config.json").exists():
        return
    experiment = f"ablations:{name.removesuffix(BILSTM)}"
    command = harness.pretraining(
        experiment,
        workdir,
        {
            "data.corpus": args.store,
            "phases": ((args.steps, args.seq_length),),
            "optimizer.warmup_steps": max(1, round(0.06 * args.steps)),
            "eval.every_steps": args.steps,
            "checkpoint.every_steps": args.steps // args.points,
            "checkpoint.keep_every": args.steps // args.points if args.points > 1 else 0,
        },
    )
    try:
        subprocess.run([*command, *extra], check=True)
    except subprocess.CalledProcessError as error:  # it has said why
        raise SystemExit(f"ablate: the pre-training of {name} ended with code {error.returncode}") from None


def models(names: Sequence[str], args: argparse.Namespace) -> dict[str, str]:
    """{label: what bench transfer calls the model} of every point."""
    found = {}
    for name in names:
        how, workdir = "bilstm:" if name.endswith(BILSTM) else "", directory(args.out, name)
        for step in intermediate(args.steps, args.points):
            found[label(name, step)] = f"{how}{workdir}@{step}"
        found[label(name)] = f"{how}{workdir / 'model'}"
    return found


def perplexity(workdir: pathlib.Path) -> float | None:
    """exp of the last held-out MLM loss (of the next token's for a left-to-right model)."""
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["eval/mlm_loss"] for record in map(json.loads, lines) if "eval/mlm_loss" in record]
    return math.exp(losses[-1]) if losses else None


def table(names: Sequence[str], tasks: Sequence[str], out: pathlib.Path, found: Scores) -> str:
    """A Markdown table: an ablation a row."""
    rows = []
    for name in names:
        score = perplexity(directory(out, name))
        rows.append(
            [
                name,
                f"{score:.2f}" if score is not None else "-",
                *(transfer.spread(found.get(task, {}).get(label(name))) for task in tasks),
                PAPER.get(name, "-"),
            ]
        )
    columns = ["ablation", "perplexity", *(transfer.WORK[task].title for task in tasks), "the paper, 1,000,000 steps"]
    return markdown.table(columns, rows) + "\n"


def table_of_steps(names: Sequence[str], tasks: Sequence[str], steps: Sequence[int], found: Scores) -> str:
    """A Markdown table: a task and an ablation a row, a column for each number of steps."""
    rows = [
        [
            transfer.WORK[task].title,
            name,
            *(transfer.spread(found.get(task, {}).get(label(name, step))) for step in (*steps[:-1], 0)),
        ]
        for task in tasks
        for name in names
    ]
    return markdown.table(["task", "ablation", *(f"{step:,} steps" for step in steps)], rows) + "\n"


def draw(path: pathlib.Path, names: Sequence[str], tasks: Sequence[str], steps: Sequence[int], found: Scores) -> None:
    """A panel a task: mean over the seeds, with its standard deviation, after so many steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(tasks), 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for name in names:
            seeds = [(step, found.get(task, {}).get(label(name, step if step != steps[-1] else 0))) for step in steps]
            had = [(step, values) for step, values in seeds if values]
            spreads = [statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in had]
            axes.errorbar(
                [step for step, _ in had],
                [statistics.fmean(v) for _, v in had],
                spreads,
                marker="o",
                capsize=3,
                label=name,
            )
        axes.set_title(transfer.WORK[task].title, fontsize=10)
        axes.set_xlabel("steps of pre-training")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("score on dev, %")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = harness.make_parser("ablate", __doc__)
    add = parser.add_argument
    add("--store", required=True, help="token store to pre-train on")
    add("--out", type=pathlib.Path, required=True, help="directory; DIR/data holds the tasks")
    add("--names", default="base,no_nsp,ltr", help="ablations, comma-separated")
    add("--steps", type=int, required=True, help="of each pre-training")
    add("--seq_length", type=int, default=128)
    add(
        "--points",
        type=int,
        default=1,
        help="checkpoints of each that are fine-tuned, the last being the end (default 1)",
    )
    add("--tasks", default="qnli,mrpc,sst2", help=", ".join(transfer.WORK))
    add("--seeds", type=int, default=5)
    add("--learning_rate", type=float, default=transfer.LEARNING_RATE, help="of the fine-tuning")
    add("--gpus", default=harness.default_gpus(1), help="of the fine-tuning; '' = the CPU")
    args = parser.parse_args(arguments[:cut])
    with refusals("ablate"):
        ablate(args, arguments[cut + 1 :])


def ablate(args: argparse.Namespace, extra: Sequence[str]) -> None:
    """Pre-trains, fine-tunes and draws up the table; `extra` goes to every pre-training."""
    names, tasks = args.names.split(","), args.tasks.split(",")
    if unknown := [task for task in tasks if task not in transfer.WORK]:
        raise ValueError(f"--tasks: {', '.join(unknown)}; one of {', '.join(transfer.WORK)}")
    if not (args.out / "data").is_dir():
        raise ValueError(
            f"{args.out / 'data'} is missing: python -m tests.benchmarks.transfer "
            f"prepare --data=SOURCE --out={args.out}"
        )
    if not 1 <= args.points <= args.steps:
        raise ValueError(f"--points={args.points} must be from 1 to the {args.steps} steps")
    for name in names:
        pretrain(name, args, extra)
    asked = models(names, args)
    failed = transfer.run_all(
        tasks, asked, args.out, args.gpus.split(","), [f"--seeds={args.seeds}", f"--learning_rate={args.learning_rate}"]
    )
    found = transfer.results(args.out, list(asked))
    text = table(names, tasks, args.out, found)
    if args.points > 1:
        steps = [*intermediate(args.steps, args.points), args.steps]
        text += "\n" + table_of_steps(names, tasks, steps, found)
        draw(args.out / "ablate.png", names, tasks, steps, found)
    elif found:
        transfer.draw(args.out / "ablate.png", found, list(asked))
    (args.out / "ablate.md").write_text(text, encoding="utf-8")
    print(f"{text}\ntable: {args.out / 'ablate.md'}")
    if found:
        print(f"picture: {args.out / 'ablate.png'}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
