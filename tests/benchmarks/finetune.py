"""Fine-tuning beside transformers' Trainer: scores over seeds, rows a second, time to the score.

    python -m tests.benchmarks.finetune --checkpoint=DIR --data=GLUE --tasks=mrpc,rte,cola,stsb
    python -m tests.benchmarks.finetune --speed --checkpoint=DIR --data=GLUE --tasks=mrpc,sst2

Every side fine-tunes one task with all seeds in one process, as a search would: the first score
tells what a single run costs (imports, data, weights, compilation included), the last what all
cost. bertjax starts with an empty compilation cache, then once more with a full one. --speed takes
the tokenizer of the checkpoint and random weights of BERT-base: only the times mean something.
A side's results are kept in --out after every seed, and the same command again goes on after them;
so the sides may run apart, each on its own GPU: --side=ours, --side=peer, and --side=report to draw
what both have left.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from bertjax import markdown
from bertjax.formats.files import write_whole
from tests.benchmarks import harness
from tests.benchmarks.finetune_work import Result, Work, mean_and_error

SIDES = {"ours": "bertjax", "peer": "transformers"}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("finetune", __doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="Hugging Face directory that both sides start from"
    )
    parser.add_argument(
        "--data", default="", metavar="DIR", help="directory with the GLUE folders, or of the one task's files"
    )
    parser.add_argument(
        "--tasks", default="mrpc,rte,cola,stsb", help="GLUE tasks, ner, squad1.1 or squad2.0; comma-separated"
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON: options of the task's class, such as its files"
    )
    for name, kind in (
        ("seeds", int),
        ("batch_size", int),
        ("learning_rate", float),
        ("epochs", int),
        ("max_length", int),
        ("max_rows", int),
    ):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Work, name))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument(
        "--group_by_length", action="store_true", help="batches of rows of similar length instead of random ones"
    )
    parser.add_argument("--speed", action="store_true", help="BERT-base, random weights, 1 seed")
    parser.add_argument("--preset", default="base", help="network of --speed")
    parser.add_argument("--side", default="both", choices=(*SIDES, "both", "report"))
    parser.add_argument(
        "--no_warm", action="store_true", help="do not start bertjax again with a full compilation cache"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_finetune"))
    return parser.parse_args(argv)


def run_side(
    side: str,
    work: Work,
    environment: Mapping[str, str] | None = None,
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Starts a side as a process and reads its results; `keep` gets what is known after each seed.

    Raises:
      ValueError: it failed, or printed no result.
    """
    module = f"tests.benchmarks.finetune_{side}"
    command = [sys.executable, "-m", module, work.dumps(started=time.time())]
    result, said = None, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    ) as process:
        for line in process.stdout or ():
            if line.startswith('{"metric"'):
                result = Result(**json.loads(line))
                keep(result)
            else:
                said.append(line)
    if process.returncode or result is None:
        raise ValueError(
            f"{SIDES[side]} on {work.task} ended with code {process.returncode}; its "
            f"output ends with:\n{''.join(said)[-2000:]}"
        )
    return result


def random_checkpoint(directory: pathlib.Path, preset: str, tokenizer_of: str) -> None:
    """Writes a Hugging Face directory with random weights of a preset."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from bertjax.interop.huggingface import write_directory
    from bertjax.model.heads import BertModel, init_params
    from bertjax.model.presets import PRESETS
    from bertjax.tokenization import load_tokenizer

    config = PRESETS[preset]
    params = jax.device_get(jax.jit(lambda key: init_params(BertModel(config), key))(jax.random.key(0)))
    tokenizer = load_tokenizer(tokenizer_of)
    write_directory(directory, config, params, "BertModel", tokenizer, overwrite=True)


def make_random_checkpoint(out: pathlib.Path, preset: str, tokenizer_of: str) -> str:
    """`random_checkpoint` in a process of its own, so that this one, which waits, holds no device.

    Returns its directory, in `out`.
    """
    path = str(out / f"random-{preset}")
    code = (
        f"from tests.benchmarks.finetune import random_checkpoint as r; import pathlib; "
        f"r(pathlib.Path({path!r}), {preset!r}, {tokenizer_of!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return path


def measure(args: argparse.Namespace) -> None:
    """Runs the sides that were asked for and keeps SIDE_TASK.json in --out."""
    checkpoint = args.checkpoint
    if args.speed:
        checkpoint = make_random_checkpoint(args.out, args.preset, checkpoint)
    for task in args.tasks.split(","):
        work = Work(
            task,
            args.data,
            checkpoint,
            args.options,
            1 if args.speed else args.seeds,
            batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            epochs=args.epochs,
            max_length=args.max_length,
            dtype=args.dtype,
            group_by_length=args.group_by_length,
            max_rows=args.max_rows,
        )
        for side in SIDES if args.side == "both" else (args.side,):
            try:
                path = args.out / f"{side}_{task}.json"
                measure_side(side, work, path, again=side == "ours" and not args.no_warm)
            except ValueError as error:
                print(f"bench finetune: {error}", file=sys.stderr)
    if args.speed:
        shutil.rmtree(checkpoint, ignore_errors=True)


def measure_side(side: str, work: Work, path: pathlib.Path, again: bool) -> None:
    """The seeds that `path` lacks, written to it one by one; then once more with a full cache.

    Raises:
      ValueError: as run_side; or `path` is of other work.
    """
    kept = json.loads(path.read_text()) if path.exists() else {"work": json.loads(work.dumps())}
    if differ := [
        name for name, value in json.loads(work.dumps()).items() if name != "seeds" and kept["work"].get(name) != value
    ]:
        raise ValueError(f"{path} was measured with another {', '.join(differ)}; delete it, or choose another --out")
    earlier = Result(**kept["cold"]) if "cold" in kept else None
    done = len(earlier.best) if earlier else 0

    def keep(start: str, result: Result) -> None:
        if start == "cold" and earlier:
            result = earlier.followed_by(result)
        kept[start] = vars(result)
        write_whole(path, json.dumps(kept, indent=1) + "\n")
        print(f"{path}, {start}: {result.summary()}", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        environment = {"JAX_COMPILATION_CACHE_DIR": cache} if side == "ours" else {}
        if done < work.seeds:
            one = Work.parse(work.dumps(first_seed=done))
            run_side(side, one, environment, lambda result: keep("cold", result))
        if again and "warm" not in kept:
            one = Work.parse(work.dumps(seeds=1))
            if done >= work.seeds:  # the cache of the process that was stopped is gone
                run_side(side, one, environment)
            run_side(side, one, environment, lambda result: keep("warm", result))


def collect(out: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{task: {side: what measure kept}} of all results in a directory."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for side in SIDES:
        for path in sorted(out.glob(f"{side}_*.json")):
            task = path.stem.removeprefix(f"{side}_")
            found.setdefault(task, {})[side] = json.loads(path.read_text())
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The comparison in Markdown: scores, then times; '-' for what has not been measured."""
    heads: dict[str, str] = {}
    scores, times = [], []
    for task, sides in found.items():
        ours, warm, peer = (
            Result(**sides[side][start]) if start in sides.get(side, {}) else None
            for side, start in (("ours", "cold"), ("ours", "warm"), ("peer", "cold"))
        )
        known = ours or peer
        if known is None:
            continue
        for side, result in (("ours", ours), ("peer", peer)):
            if result:
                heads[side] = f"{SIDES[side]}: {result.device}, {result.versions}"
        scores.append(
            (
                task,
                known.metric,
                _score(ours),
                _score(peer),
                _difference(ours, peer),
                " : ".join(str(len(r.best)) if r else "-" for r in (ours, peer)),
            )
        )
        starts = [r.score_seconds if r else 0 for r in (ours, warm, peer)]
        ratios = [f"{starts[2] / s:.2f}" if s and starts[2] else "-" for s in starts[:2]]
        times.append(
            (
                task,
                f"{known.rows:,}",
                *_pair(ours, peer, "rows_per_second", ",.0f", 1),
                " / ".join(f"{s:.1f}" if s else "-" for s in starts),
                " / ".join(ratios),
                *_pair(ours, peer, "all_seconds", ".1f", -1),
            )
        )
    title = "Best evaluation of a run, one an epoch, in percent; mean +- standard deviation over the seeds:"
    return "\n".join(
        [
            *heads.values(),
            "",
            title,
            "",
            markdown.table(
                ("task", "metric", "bertjax", "transformers", "difference / standard error", "seeds"), scores
            ),
            "",
            markdown.table(
                (
                    "task",
                    "rows",
                    "training, rows/s",
                    "ratio",
                    "start to first score, s (empty cache / full cache / transformers)",
                    "ratios",
                    "all seeds, s",
                    "ratio",
                ),
                times,
            ),
            "",
        ]
    )


def _pair(ours: Result | None, peer: Result | None, name: str, form: str, better: int) -> tuple[str, str]:
    """'ours : theirs' of a number, and how many times better ours is (`better` -1: the smaller)."""
    values = [getattr(result, name) if result else 0 for result in (ours, peer)]
    shown = " : ".join(format(value, form) if value else "-" for value in values)
    return shown, f"{(values[0] / values[1]) ** better:.2f}" if all(values) else "-"


def _score(result: Result | None) -> str:
    if result is None:
        return "-"
    mean, deviation, _ = mean_and_error(result.best)
    return f"{100 * mean:.2f} +- {100 * deviation:.2f}"


def _difference(ours: Result | None, peer: Result | None) -> str:
    """'difference / its standard error = z', in percent."""
    if ours is None or peer is None:
        return "-"
    (a, _, ea), (b, _, eb) = mean_and_error(ours.best), mean_and_error(peer.best)
    error = (ea**2 + eb**2) ** 0.5
    return f"{100 * (a - b):+.2f} / {100 * error:.2f} = " + (f"{(a - b) / error:+.2f}" if error else "-")


def draw(found: dict[str, dict[str, dict[str, Any]]], path: pathlib.Path) -> None:
    """Every seed's score, and where the time to the first score goes."""
    tasks = [task for task, sides in found.items() if set(sides) == set(SIDES)]
    if not tasks:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.75 * len(tasks)), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {"ours": "tab:blue", "peer": "tab:orange"}
    for place, task in enumerate(reversed(tasks)):
        for side, up in (("ours", 0.14), ("peer", -0.14)):
            values = [100 * v for v in found[task][side]["cold"]["best"]]
            label = SIDES[side] if place == 0 else None
            left.plot(values, [place + up] * len(values), "o", color=colours[side], alpha=0.6, label=label)
            mean, _, error = mean_and_error(values)
            left.errorbar(mean, place + up, xerr=error, color="black", capsize=4, marker="|", markersize=12)
        bars = [
            ("ours", "cold", 0.27, "bertjax"),
            ("ours", "warm", 0.0, "bertjax, full cache"),
            ("peer", "cold", -0.27, "transformers"),
        ]
        for side, start, up, name in bars:
            kept = found[task][side].get(start)
            if kept is None:
                continue
            ready, score = kept["ready_seconds"], kept["score_seconds"]
            right.barh(place + up, ready, 0.24, color=colours[side], alpha=0.4)
            right.barh(place + up, score - ready, 0.24, left=ready, color=colours[side])
            right.text(score, place + up, f" {score:.1f} s  {name}", va="center", fontsize=8)
    for axes in (left, right):
        axes.set_yticks(
            range(len(tasks)), [f"{task}\n{found[task]['ours']['cold']['metric']}" for task in reversed(tasks)]
        )
        axes.grid(axis="x", alpha=0.3)
    left.set_xlabel("dev score of each seed, percent (bar: standard error of the mean)")
    left.legend(fontsize=8)
    right.set_xlabel("seconds from start to first score (pale: until the first step)")
    longest = max(found[t][s]["cold"]["score_seconds"] for t in tasks for s in SIDES)
    right.set_xlim(0, 1.35 * longest)
    figure.suptitle(f"Fine-tuning on {found[tasks[0]]['ours']['cold']['device']}")
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    """Measures, prints the table, and writes finetune.md and finetune.png into --out."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.side != "report":
        measure(args)
    found = collect(args.out)
    text = table(found)
    print(text)
    (args.out / "finetune.md").write_text(text)
    draw(found, args.out / "finetune.png")


if __name__ == "__main__":
    main(sys.argv[1:])
