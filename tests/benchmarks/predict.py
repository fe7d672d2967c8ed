"""Inference beside transformers: sentences a second, from text to labelled probabilities.

    python -m tests.benchmarks.predict --model=DIR --file=glue/SST-2/dev.tsv

DIR is a classifier in Hugging Face's layout (an encoder alone gets a random head: the speed is the
same). Both sides read the same sentences, repeated to a measurable number, tokenise them, batch
rows of similar length, run in bfloat16 on a GPU and give every sentence's probabilities. For
transformers the faster of SDPA attention alone and with torch.compile counts. Prints a table and
writes predict.json and predict.png into --out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bertjax import markdown
from bertjax.tools.arguments import refusals
from tests.benchmarks import harness


def sentences(path: str, count: int) -> list[str]:
    """The first column of a GLUE file (or the lines of a text), repeated up to `count` texts."""
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    if path.endswith(".tsv"):
        lines = [line.split("\t")[0] for line in lines[1:]]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no sentence")
    return [lines[i % len(lines)] for i in range(count)]


def timed(run: Callable[[list[str]], Any], texts: list[str], repeats: int) -> dict[str, float]:
    """Seconds of the first pass (compilation included) and sentences a second of the others."""
    started = time.perf_counter()
    run(texts)
    first = time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(texts)
        seconds.append(time.perf_counter() - started)
    return {"first_seconds": first, "rows_per_second": len(texts) / statistics.median(seconds)}


def ours(args: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    """bertjax.inference.classify."""
    import jax

    from bertjax import inference
    from bertjax.interop import load_model
    from bertjax.model.presets import Execution

    loaded = load_model(
        args.model,
        "sequence-classification",
        Execution.for_backend(jax.default_backend(), dtype=args.dtype),
        reinitialise_head=True,
    )
    found = timed(lambda t: inference.classify(loaded, t, args.batch_size), texts, args.repeats)
    return {"bertjax": found, "device": jax.devices()[0].device_kind, "versions": f"jax {jax.__version__}"}


def peer(args: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    """transformers: all texts through the fast tokenizer, rows sorted by length, sdpa."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    kind = torch.bfloat16 if args.dtype == "bfloat16" or args.dtype == "auto" and cuda else (torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        args.model, dtype=kind, attn_implementation="sdpa"
    ).eval()
    model = model.cuda() if cuda else model

    def classify(forward: Any, texts: list[str]) -> list[dict[str, float]]:
        encoded = tokenizer(texts, truncation=True, max_length=512)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
        answers: list[Any] = [None] * len(texts)
        waiting: list[tuple[list[int], Any]] = []
        with torch.inference_mode():
            for start in range(0, len(order), args.batch_size):
                chosen = order[start : start + args.batch_size]
                batch = tokenizer.pad(
                    {"input_ids": [encoded[i] for i in chosen]}, return_tensors="pt", pad_to_multiple_of=32
                )
                if cuda:
                    batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
                waiting.append((chosen, forward(**batch).logits.float().softmax(-1)))
        names = model.config.id2label
        for chosen, probabilities in waiting:
            for i, row in zip(chosen, probabilities.tolist(), strict=True):
                answers[i] = {names[k]: p for k, p in enumerate(row)}
        return answers

    results = {"transformers sdpa": timed(lambda t: classify(model, t), texts, args.repeats)}
    if not args.no_compile:
        forward = torch.compile(model)
        results["transformers sdpa + torch.compile"] = timed(lambda t: classify(forward, t), texts, args.repeats)
    device = torch.cuda.get_device_name() if cuda else "cpu"
    return {
        **results,
        "device": device,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def draw(results: dict[str, dict[str, float]], device: str, path: pathlib.Path) -> None:
    """Sentences a second of each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    names = list(results)[::-1]
    speeds = [results[name]["rows_per_second"] for name in names]
    colours = ["tab:blue" if name == "bertjax" else "tab:orange" for name in names]
    axes.barh(names, speeds, color=colours)
    for place, speed in enumerate(speeds):
        axes.text(speed, place, f" {speed:,.0f}", va="center")
    axes.set_xlim(0, 1.15 * max(speeds))
    axes.set_xlabel("sentences a second, text to probabilities")
    axes.set_title(device)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    """Runs both sides, each in a process of its own, and prints the table."""
    parser = harness.make_parser("predict", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--file", required=True, help="sentences: a GLUE .tsv, or one a line")
    parser.add_argument("--rows", type=int, default=20_000, help="sentences a pass")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="timed passes; the median counts")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--no_compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--side", default="both", choices=("both", "ours", "peer"), help="one side only, as JSON on the last line"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_predict"))
    args = parser.parse_args(argv)
    if args.side != "both":
        texts = sentences(args.file, args.rows)
        print(json.dumps((ours if args.side == "ours" else peer)(args, texts)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    heads = []
    for side in ("ours", "peer"):
        with refusals("predict"):
            found = harness.measure("tests.benchmarks.predict", *argv, f"--side={side}")
        heads.append(f"{found.pop('device')}, {found.pop('versions')}")
        results |= found
    base = max(v["rows_per_second"] for name, v in results.items() if name != "bertjax")
    print("\n".join(heads) + "\n")
    print(
        markdown.table(
            ["", "sentences/s", "ratio", "first pass, s"],
            [
                (name, f"{speed:,.0f}", f"{speed / base:.2f}", f"{values['first_seconds']:.1f}")
                for name, values in results.items()
                for speed in [values["rows_per_second"]]
            ],
        )
    )
    (args.out / "predict.json").write_text(json.dumps({"heads": heads, **results}, indent=1))
    draw(results, heads[0], args.out / "predict.png")


if __name__ == "__main__":
    main(sys.argv[1:])
