"""Useful tokens a second on real text: packed rows here against padded rows in transformers.

    python -m tests.benchmarks.packed --store=STORE            large, rows of 512, 32 a step

Both sides train on pairs of the same store. transformers gets them one a row, padded, as everybody
feeds it; bertjax several a row. Counted are the tokens that are not padding. Prints a table; writes
packed.json into --out.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np

from bertjax import markdown
from bertjax.data.batches import PretrainingBatches
from bertjax.data.store import TokenStore
from bertjax.tokenization import load_tokenizer
from tests.benchmarks import harness
from tests.benchmarks.step import run_jax, run_peers
from tests.benchmarks.workloads import Workload

SAMPLED = 50  # batches that the mean fill is taken from


def stream(store: pathlib.Path, work: Workload, packed: bool) -> PretrainingBatches:
    """The training rows of `store` in the shape of `work`."""
    opened = TokenStore(store)
    tokenizer = load_tokenizer(opened.tokenizer_directory)
    return PretrainingBatches([opened], work.seq_length, work.batch_size, seed=0, packed=packed, tokenizer=tokenizer)


def fill(batches: PretrainingBatches) -> tuple[float, int]:
    """(mean share of the rows that is not padding, step whose batch is closest to it)."""
    shares = [float((batches[step]["attention_mask"] > 0).mean()) for step in range(SAMPLED)]
    mean = float(np.mean(shares))
    return mean, int(np.argmin([abs(share - mean) for share in shares]))


def main(argv: list[str]) -> None:
    parser = harness.make_parser("packed", __doc__)
    parser.add_argument(
        "workload", nargs="?", type=Workload.parse, default=Workload.parse("large-512x32"), help="MODEL-LENGTHxROWS"
    )
    parser.add_argument("--store", type=pathlib.Path, required=True, help="token store")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no_peer", action="store_true")
    args = parser.parse_args(argv)

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
