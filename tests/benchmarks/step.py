"""Compares bertjax's training step with transformers + torch.compile on the same card.

    python -m tests.benchmarks.step                         the four standard workloads
    python -m tests.benchmarks.step large-512x32 --no_peer  one of them, bertjax only

Prints a table (rows a second, tokens a second, share of the peak, memory, ratio) and the profile of
bertjax's kernels; writes bench.json and bench.png into --out.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax import markdown
from tests.benchmarks import harness
from tests.benchmarks.workloads import DEFAULT, Workload


def run_jax(workloads: list[Workload], extra: list[str]) -> dict[str, Any]:
    """bertjax's numbers for all workloads, measured in one process."""
    return harness.measure("tests.benchmarks.jax_step", *(w.name for w in workloads), *extra)


def run_peers(
    workloads: list[Workload], steps: int, together: int, extra: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The peer's numbers: `together` processes compile side by side, then are timed in turn."""
    results: dict[str, dict[str, Any]] = {}
    for start in range(0, len(workloads), together):
        group = workloads[start : start + together]
        processes = [
            subprocess.Popen(
                harness.python("tests.benchmarks.peer", work.name, "--wait", f"--steps={steps}", *extra),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for work in group
        ]
        for process in processes:  # nothing is timed before the last one has finished compiling
            for line in process.stdout:
                if line.strip() == "ready":
                    break
        for work, process in zip(group, processes, strict=True):
            try:
                output, _ = process.communicate("go\n")
                results[work.name] = harness.last_json(output)
            except (BrokenPipeError, ValueError) as error:
                print(f"peer {work.name}: {error}", file=sys.stderr)
    return results


def table(workloads: Sequence[Workload], ours: Mapping[str, Any], peers: Mapping[str, Any]) -> str:
    """A line for each workload and side; the share of the peak is MFU, that of a plain product stands beside it."""
    nominal, measured = ours["nominal_flops"], ours["measured_flops"]
    lines = []
    for work in workloads:
        peer = peers.get(work.name)
        for side, result in (("bertjax", ours["results"][work.name]), ("transformers", peer)):
            if result is None:
                continue
            seconds, joules = result["step_seconds"], result.get("step_joules")
            tokens = work.batch_size * work.seq_length
            lines.append(
                (
                    work.name,
                    side,
                    f"{1e3 * seconds:.2f}",
                    f"{work.batch_size / seconds:,.0f}",
                    f"{peer['step_seconds'] / seconds:.2f}" if peer else "-",
                    f"{work.flops / seconds / nominal:.1%}" if nominal else "-",
                    f"{work.flops / seconds / measured:.1%}",
                    f"{result['peak_bytes'] / 1e9:.1f}",
                    f"{1e6 * joules / tokens:,.0f}" if joules else "-",
                )
            )
    head = ("step", "", "ms", "rows/s", "ratio", "MFU", "of a plain product", "GB", "joules per million tokens")
    nominal = f", nominal {nominal / 1e12:.0f}" if nominal else ""
    return (
        f"{ours['device']}, {ours['versions']}; bf16 product measured at {measured / 1e12:.0f} TFLOP/s{nominal}\n\n"
        f"{markdown.table(head, lines)}"
    )


def draw(path: pathlib.Path, workloads: list[Workload], ours: dict[str, Any], peers: dict[str, Any]) -> None:
    """Rows a second side by side, and bertjax's step by kind of kernel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [work.name for work in workloads]
    sides = {"transformers + torch.compile": peers, "bertjax": ours["results"]}
    for (label, results), shift in zip(sides.items(), (-0.2, 0.2), strict=True):
        measured = [(place + shift, work) for place, work in enumerate(workloads) if work.name in results]
        heights = [
            peers[work.name]["step_seconds"] / results[work.name]["step_seconds"] if work.name in peers else 0.0
            for _, work in measured
        ]
        left.bar([place for place, _ in measured], heights, 0.38, label=label)
        for (place, work), height in zip(measured, heights, strict=True):
            rate = work.batch_size / results[work.name]["step_seconds"]
            left.text(place, height, f"{rate:,.0f}", ha="center", va="bottom", fontsize=8)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("speed relative to the peer (labels: rows a second)")
    left.legend(loc="lower right")
    bottom = [0.0] * len(names)
    profiles = [ours["results"][n].get("profile_ms", {}) for n in names]
    for kind in dict.fromkeys(kind for profile in profiles for kind in profile):
        heights = [profile.get(kind, 0.0) for profile in profiles]
        right.bar(names, heights, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    right.set_ylabel("bertjax, ms a step on the GPU")
    right.legend(fontsize=8)
    figure.suptitle(f"{ours['device']}: pre-training step, bf16, dropout 0.1, MLM + NSP")
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = harness.make_parser("step", __doc__)
    parser.add_argument(
        "workloads",
        nargs="*",
        type=Workload.parse,
        default=[Workload.parse(name) for name in DEFAULT],
        help="MODEL-LENGTHxROWS, e.g. base-128x256",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--no_peer", action="store_true", help="do not run transformers")
    parser.add_argument(
        "--peers_together", type=int, default=2, help="peer processes that compile (and hold memory) at once"
    )
    parser.add_argument("--execution", help="JSON: fields of Execution instead of the fast ones")
    parser.add_argument("--xla", help="JSON: XLA options")
    args = parser.parse_args(argv)

    extra = [f"--steps={args.steps}"]
    extra += [f"--execution={args.execution}"] if args.execution else []
    extra += [f"--xla={args.xla}"] if args.xla else []
    ours = run_jax(args.workloads, extra)
    peers = {} if args.no_peer else run_peers(args.workloads, args.steps, args.peers_together)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"bertjax": ours, "peer": peers}
    (args.out / "bench.json").write_text(json.dumps(report, indent=1))
    for work in args.workloads:
        result = ours["results"][work.name]
        print(f"\n{work.name}: milliseconds a step by kind of kernel")
        for kind, milliseconds in result.get("profile_ms", {}).items():
            print(f"{milliseconds:8.2f}  {kind}")
        if "idle_ms" in result:
            print(f"{result['idle_ms']:8.2f}  idle between {result['launches']:.0f} launches")
        print("\n".join(result.get("kernels", [])[:12]))
    print()
    print(table(args.workloads, ours, peers))
    draw(args.out / "bench.png", args.workloads, ours, peers)


if __name__ == "__main__":
    main(sys.argv[1:])
