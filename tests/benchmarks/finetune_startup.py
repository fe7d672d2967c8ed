"""Where the seconds from the start of a fine-tuning run to its first score go.

    python -m tests.benchmarks.finetune_startup --checkpoint=DIR --data=GLUE --task=mrpc
    python -m tests.benchmarks.finetune_startup ... --preset=base --variants=default,scan

Each variant fine-tunes for one epoch in a process of its own, with an empty compilation cache and
then once more with a full one. The table has the milestones (imports, devices, data, weights read,
programs compiled, first step, first score) and the programs that took longest. A variant changes
how the network is run or how XLA compiles it, never what is computed: see VARIANTS.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

from bertjax import markdown
from tests.benchmarks import harness
from tests.benchmarks.finetune import make_random_checkpoint, run_side
from tests.benchmarks.finetune_work import Result, Work

# name -> (fields of Execution, additions to XLA_FLAGS)
VARIANTS: dict[str, tuple[dict[str, str], str]] = {
    "default": ({}, ""),
    "scan": ({"layers": "scan"}, ""),
    "pointwise": ({"pointwise": "xla"}, ""),
    "plain": ({"pointwise": "xla", "attention": "reference"}, ""),
    "no_autotune": ({}, "--xla_gpu_autotune_level=0"),
    "autotune_1": ({}, "--xla_gpu_autotune_level=1"),
    "O1": ({}, "--xla_backend_optimization_level=1"),
    "no_command_buffers": ({}, "--xla_gpu_enable_command_buffer="),
    "scan_no_autotune": ({"layers": "scan"}, "--xla_gpu_autotune_level=0"),
    "serial_llvm": ({}, "--xla_gpu_force_compilation_parallelism=1"),
    "parallel_llvm": ({}, "--xla_gpu_enable_llvm_module_compilation_parallelism=true"),
}


def measure(work: Work, variant: str) -> dict[str, Result]:
    """{'empty cache' and 'full cache': what finetune_ours measured}."""
    fields, flags = VARIANTS[variant]
    work = Work.parse(work.dumps(execution=fields))
    environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    with tempfile.TemporaryDirectory() as cache:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
        return {start: run_side("ours", work, environment) for start in ("empty cache", "full cache")}


def table(results: dict[str, dict[str, Result]]) -> str:
    """Milestones of all runs side by side, then the longest programs of each."""
    columns = [(f"{variant}, {start}", result) for variant, runs in results.items() for start, result in runs.items()]
    first = columns[0][1]
    numbers = {name: [result.milestones.get(name) for _, result in columns] for name in first.milestones}
    numbers["run ended"] = [result.score_seconds for _, result in columns]
    numbers["training rows/s"] = [result.rows_per_second for _, result in columns]
    rows = [
        [name, *("-" if value is None else f"{value:,.2f}" for value in values)] for name, values in numbers.items()
    ]
    rows.append(["programs compiled", *(sum(1 for program in result.programs if program[3]) for _, result in columns)])
    lines = [
        f"{first.device}, {first.versions}; seconds since the process started",
        "",
        markdown.table(["", *(name for name, _ in columns)], rows),
    ]
    for name, result in columns:
        longest = sorted(result.programs, key=lambda program: -sum(program[1:]))[:6]
        lines += [
            "",
            f"{name}: trace + lower + compile",
            *(
                f"    {program:28} {trace:6.2f} + {lower:6.2f} + {compiling:6.2f}"
                for program, trace, lower, compiling in longest
            ),
        ]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Measures, prints the table, and writes startup.md and startup.json into --out."""
    parser = harness.make_parser("finetune_startup", __doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--task", default="mrpc")
    parser.add_argument(
        "--preset", default="", help="a network of this size with random weights; default: the checkpoint"
    )
    parser.add_argument("--variants", default="default", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--max_rows", type=int, default=0, help="first rows to train on; 0 = all")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_startup"))
    args = parser.parse_args(argv)
    variants = args.variants.split(",")
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}; of {', '.join(VARIANTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.checkpoint
    if args.preset:
        checkpoint = make_random_checkpoint(args.out, args.preset, checkpoint)
    work = Work(args.task, args.data, checkpoint, seeds=1, epochs=1, batch_size=args.batch_size, max_rows=args.max_rows)
    results: dict[str, dict[str, Result]] = {}
    for variant in variants:
        try:
            results[variant] = measure(work, variant)
        except ValueError as error:
            print(f"bench finetune_startup, {variant}: {error}", file=sys.stderr)
    kept: dict[str, Any] = {
        variant: {start: vars(result) for start, result in runs.items()} for variant, runs in results.items()
    }
    (args.out / "startup.json").write_text(json.dumps(kept, indent=1) + "\n")
    if args.preset:
        shutil.rmtree(checkpoint, ignore_errors=True)
    if results:
        text = table(results)
        (args.out / "startup.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
