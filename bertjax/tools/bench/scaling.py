"""Weak scaling: the same rows a device on 1, 2, ... devices of this machine.

    python -m bertjax.tools.bench scaling base-128x256 large-512x32 --devices 1 2 4

Each point is a process that sees that many devices and trains with data parallelism, a workload's
rows on each; with --fsdp parameters and optimizer state are split over them. Prints rows a second,
the share of perfect scaling and the time spent in collectives; writes scaling.json into --out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any
from unittest import mock

from bertjax.tools.arguments import make_parser
from bertjax.tools.bench.step import run_jax
from bertjax.tools.bench.workloads import Workload

VISIBLE = "CUDA_VISIBLE_DEVICES"


def on_devices(works: list[Workload], count: int, options: list[str]) -> dict[str, Any]:
    """Results by name of the workload with `count` times its rows on the first `count` devices."""
    larger = [dataclasses.replace(w, batch_size=count * w.batch_size) for w in works]
    with mock.patch.dict(os.environ, {VISIBLE: ",".join(map(str, range(count)))}):
        results = run_jax(larger, options)["results"]
    return {w.name: results[large.name] for w, large in zip(works, larger, strict=True)}


def main(argv: list[str]) -> None:
    parser = make_parser("bench scaling", __doc__)
    parser.add_argument("workloads", nargs="*", type=Workload.parse,
                        default=[Workload.parse("base-128x256"), Workload.parse("large-512x32")],
                        help="MODEL-LENGTHxROWS, rows a device")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fsdp", action="store_true", help="split the training state too")
    parser.add_argument("--xla", help="JSON: XLA options instead of the step's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    args = parser.parse_args(argv)

    options = [f"--steps={args.steps}", *([f"--xla={args.xla}"] if args.xla else [])]
    report = {count: on_devices(args.workloads, count,
                                [*options, f"--fsdp={count if args.fsdp else 1}"])
              for count in args.devices}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scaling.json").write_text(json.dumps(report, indent=1))
    print(f"{'workload':16s} {'devices':>7s} {'step ms':>8s} {'rows/s':>9s} {'scaling':>8s} "
          f"{'collectives ms':>14s}")
    for work in args.workloads:
        alone = report[args.devices[0]][work.name]["step_seconds"]
        for count in args.devices:
            result = report[count][work.name]
            seconds = result["step_seconds"]
            collectives = result.get("profile_ms", {}).get("collectives", 0.0) / count
            print(f"{work.name:16s} {count:7d} {1e3 * seconds:8.2f} "
                  f"{count * work.batch_size / seconds:9.0f} {alone / seconds:8.1%} "
                  f"{collectives:14.2f}")
