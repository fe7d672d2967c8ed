"""The paper's ablations at a budget of your own: pre-trains, fine-tunes, draws up the table.

    python -m bertjax.tools.bench transfer prepare --data=SOURCE --out=DIR
    python -m bertjax.tools.ablate --store=STORE --out=DIR --names=base,no_nsp,ltr --steps=20000 \\
        --seq_length=128 --tasks=qnli,mrpc,sst2 --seeds=5

NAMES are those of configs/ablations.py (size=6/768/12, masking=80/20/0, ...), and ltr_bilstm, which
is ltr fine-tuned with a BiLSTM above it. What follows `--` goes to every pre-training
(-- --config.batch_size=64). `prepare` puts the data under DIR/data.
Writes DIR/ablate.md: each name's mean and standard deviation over the seeds, and the paper's
numbers, which were had with 1,000,000 steps and compare in their differences only. A pre-training
that is finished, and a fine-tuning run that is, is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from bertjax import markdown
from bertjax.tools.arguments import make_parser
from bertjax.tools.bench import jobs, transfer

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


def label(name: str) -> str:
    """A name as a directory: 'size=3/768/12' has slashes."""
    return name.replace("/", "-").replace("=", "-")


def directory(out: pathlib.Path, name: str) -> pathlib.Path:
    """Where the pre-training of a name lies."""
    return out / "pretrained" / label(name.removesuffix(BILSTM))


def pretrain(name: str, args: argparse.Namespace, extra: Sequence[str]) -> None:
    """One pre-training as a user would start it; nothing where its model exists."""
    workdir = directory(args.out, name)
    if (workdir / "model" / "config.json").exists():
        return
    experiment = f"ablations:{name.removesuffix(BILSTM)}"
    subprocess.run([*jobs.pretraining(experiment, workdir, {
        "data.corpus": args.store, "phases": ((args.steps, args.seq_length),),
        "optimizer.warmup_steps": max(1, round(0.06 * args.steps)),
        "eval.every_steps": args.steps, "checkpoint.every_steps": args.steps,
        "checkpoint.keep_every": 0}), *extra], check=True)


def perplexity(workdir: pathlib.Path) -> float | None:
    """exp of the last held-out MLM loss (of the next token's for a left-to-right model)."""
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["eval/mlm_loss"] for record in map(json.loads, lines)
              if "eval/mlm_loss" in record]
    return math.exp(losses[-1]) if losses else None


def table(names: Sequence[str], tasks: Sequence[str], out: pathlib.Path) -> str:
    """A Markdown table: an ablation a row."""
    found = transfer.results(out, [label(name) for name in names])
    rows = []
    for name in names:
        score = perplexity(directory(out, name))
        rows.append([name, f"{score:.2f}" if score is not None else "-",
                     *(transfer.spread(found.get(task, {}).get(label(name))) for task in tasks),
                     PAPER.get(name, "-")])
    columns = ["ablation", "perplexity", *(transfer.WORK[task].title for task in tasks),
               "the paper, 1,000,000 steps"]
    return markdown.table(columns, rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = make_parser("ablate", __doc__)
    add = parser.add_argument
    add("--store", required=True, help="token store to pre-train on")
    add("--out", type=pathlib.Path, required=True, help="directory; DIR/data holds the tasks")
    add("--names", default="base,no_nsp,ltr", help="ablations, comma-separated")
    add("--steps", type=int, required=True, help="of each pre-training")
    add("--seq_length", type=int, default=128)
    add("--tasks", default="qnli,mrpc,sst2", help=", ".join(transfer.WORK))
    add("--seeds", type=int, default=5)
    add("--learning_rate", type=float, default=transfer.LEARNING_RATE, help="of the fine-tuning")
    add("--gpus", default="0", help="CUDA devices of the fine-tuning; '' = the CPU")
    args = parser.parse_args(arguments[:cut])
    names, tasks = args.names.split(","), args.tasks.split(",")
    if unknown := [task for task in tasks if task not in transfer.WORK]:
        parser.error(f"--tasks: {', '.join(unknown)}; one of {', '.join(transfer.WORK)}")
    if not (args.out / "data").is_dir():
        parser.error(f"{args.out / 'data'} is missing: python -m bertjax.tools.bench transfer "
                     f"prepare --data=SOURCE --out={args.out}")
    for name in names:
        pretrain(name, args, arguments[cut + 1 :])
    models = {label(name): ("bilstm:" if name.endswith(BILSTM) else "")
              + str(directory(args.out, name) / "model") for name in names}
    transfer.run_all(tasks, models, args.out, args.gpus.split(","), [
        f"--seeds={args.seeds}", f"--learning_rate={args.learning_rate}"])
    text = table(names, tasks, args.out)
    (args.out / "ablate.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
