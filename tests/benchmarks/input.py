"""The input side: builder, rows out of a store, masked epochs; beside the original's program.

    python -m tests.benchmarks.input --text='corpus/*' --vocab=DIR [--original=DIR] [--memory=1]

CPU time of one core throughout. --original=DIR times create_pretraining_data.py there on the same
text in the same run (input_original.py says what DIR holds). --memory=GB builds that much text
(--text repeated, with new words) by two workers and plots their memory. Prints tables; writes
input.json and input.png into --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bertjax import markdown
from tests.benchmarks import harness

LENGTHS = ((128, 20), (512, 77))  # rows and the predictions in them
DUPES = 10
# What a corpus of Wikipedia's size asks for; the ratios are to the original program.
ROWS_WANTED = {128: 10_000, 512: 4_000}
RATIO_WANTED = 10
MEMORY_WANTED_MB = 1024 + 2 * 307  # 1 GB and 0.3 GB a worker


def measure(flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All numbers of the tables."""
    from bertjax.data.store import TokenStore
    from bertjax.tokenization import load_tokenizer
    from bertjax.tools.bench import rows_per_second
    from tests.benchmarks import input_stages as stages

    tokenizer = load_tokenizer(flags.vocab, do_lower_case=flags.do_lower_case)
    tokenizer.save(scratch / "tokenizer")  # with its casing
    vocab = str(scratch / "tokenizer")
    say("compiling: the builder once, on a little text")
    piece = scratch / "piece.txt"
    piece_bytes = stages.write_text(flags.text, piece, int(flags.piece_mb * 1e6))
    small = stages.build_command(str(piece), vocab, scratch / "small")

    report: dict[str, Any] = {"text": flags.text, "piece_mb": piece_bytes / 1e6}
    if flags.original:
        say("the original program")
        (length, predictions), *_ = LENGTHS
        report["original"] = stages.run_original(
            flags.original, piece, f"{vocab}/vocab.txt", length, predictions, DUPES
        )
    say("the builder, whole and by stage")
    report["builder"] = stages.build_command(flags.text, vocab, scratch / "store")
    report["stages"] = stages.build_stages(flags.text, tokenizer)
    store = TokenStore(scratch / "store")
    report["rows"] = {
        f"{length} {kind}": rows_per_second(store, length, kind == "packed")
        for length, _ in LENGTHS
        for kind in ("padded", "packed")
    }
    say(f"{DUPES} masked epochs of {piece_bytes / 1e6:.1f} MB of text")
    report["piece"] = stages.build_command(str(piece), vocab, scratch / "small")
    assert report["piece"]["tokens"] == small["tokens"]
    (length, predictions), *_ = LENGTHS
    report["epochs"] = stages.masked_epochs(TokenStore(scratch / "small"), tokenizer, length, predictions, DUPES)
    if flags.memory:
        say(f"{flags.memory:g} GB of text")
        stages.write_text(flags.text, scratch / "big.txt", int(flags.memory * 1e9), new_words=True)
        report["memory"] = stages.memory_of_build(str(scratch / "big.txt"), vocab, scratch / "big", workers=2)
    return report


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """A Markdown table: what, ours, the original's, ratio."""
    original, epochs = report.get("original"), report["epochs"]
    rows: list[list[str]] = []

    def line(name: str, ours: float, theirs: float | None = None, faster: bool = True, digits: int = 0) -> None:
        beside = ["", ""]
        if theirs:
            beside = [f"{theirs:,.{digits}f}", f"{ours / theirs if faster else theirs / ours:.1f}"]
        rows.append([name, f"{ours:,.{digits}f}", *beside])

    rate = original and original["tokens"] / original["tokenizing_seconds"]
    line("text to ids, the whole command, tokens/s", report["builder"]["tokens_per_cpu_second"], rate)
    for name, value in report["stages"].items():
        line(f"{name}, tokens/s", value)
    made = original and original["instances"] / original["instances_seconds"]
    for name, row in report["rows"].items():
        beside = made if name == "128 padded" else None
        line(f"rows of {name}, {row['fill']:.1%} full, rows/s", row["rows_per_cpu_second"], beside)
    name = f"{DUPES} masked epochs of {report['piece_mb']:.1f} MB, s"
    seconds = original and original["instances_seconds"]
    made_here = epochs["rows_seconds"] + epochs["masks_seconds"]
    line(f"{name} (masks drawn on the CPU)", made_here, seconds, False, 2)
    whole = original and seconds + original["tokenizing_seconds"]
    line(f"{name}, from the text", report["piece"]["cpu_seconds"] + made_here, whole, False, 2)
    return markdown.table(["CPU time of one core", "bertjax", "original", "ratio"], rows)


def memory_text(memory: dict[str, Any]) -> str:
    """One line about a build whose memory was measured."""
    return (
        f"{memory['tokens'] / 1e6:,.0f} M tokens built by {memory['workers']} workers in "
        f"{memory['wall_seconds'] / 60:.1f} min, peak {memory['peak_mb']:,.0f} MB in all processes "
        f"(limit {MEMORY_WANTED_MB:,})"
    )


def checks(report: dict[str, Any]) -> list[str]:
    """'reached' or 'MISSED' for every bar that was measured."""
    found = [
        (
            f"{length} {kind}: at least {ROWS_WANTED[length]:,} rows/s",
            report["rows"][f"{length} {kind}"]["rows_per_cpu_second"] >= ROWS_WANTED[length],
        )
        for length, _ in LENGTHS
        for kind in ("padded", "packed")
    ]
    if original := report.get("original"):
        rate = original["tokens"] / original["tokenizing_seconds"]
        epochs = report["epochs"]
        found += [
            (
                f"builder: at least {RATIO_WANTED} x the original's tokens/s",
                report["builder"]["tokens_per_cpu_second"] >= RATIO_WANTED * rate,
            ),
            (
                f"{DUPES} masked epochs: at most 1/{RATIO_WANTED} of its CPU time",
                RATIO_WANTED * (epochs["rows_seconds"] + epochs["masks_seconds"]) <= original["instances_seconds"],
            ),
        ]
    if memory := report.get("memory"):
        found.append((f"memory: under {MEMORY_WANTED_MB:,} MB", memory["peak_mb"] < MEMORY_WANTED_MB))
    return [f"  {'reached' if good else 'MISSED '}  {name}" for name, good in found]


def draw(report: dict[str, Any], path: Path) -> None:
    """Builder by stage, rows, masked epochs, and memory where it was measured."""
    from matplotlib.figure import Figure

    original = report.get("original")
    panels = 3 + ("memory" in report)
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels)

    def bars(axis: Any, values: dict[str, float], title: str, highlight: str = "") -> None:
        colours = ["tab:gray" if name == highlight else "tab:blue" for name in values]
        places = axis.barh(list(values), list(values.values()), color=colours)
        axis.bar_label(places, [f"{value:,.3g}" for value in values.values()], padding=3)
        axis.margins(x=0.25)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)

    tokens = {
        "whole command": report["builder"]["tokens_per_cpu_second"] / 1e6,
        **{name: value / 1e6 for name, value in report["stages"].items()},
    }
    rows = {name: row["rows_per_cpu_second"] / 1e3 for name, row in report["rows"].items()}
    epochs = {"rows": report["epochs"]["rows_seconds"], "masks (CPU)": report["epochs"]["masks_seconds"]}
    if original:
        tokens["original"] = original["tokens"] / original["tokenizing_seconds"] / 1e6
        rows["original, 128"] = original["instances"] / original["instances_seconds"] / 1e3
        epochs["original"] = original["instances_seconds"]
    bars(axes[0], tokens, "text to ids: million tokens a CPU second", "original")
    axes[0].set_xscale("log")
    bars(axes[1], rows, "thousand rows a CPU second", "original, 128")
    bars(axes[2], epochs, f"{DUPES} masked epochs of {report['piece_mb']:.1f} MB: CPU seconds", "original")
    if memory := report.get("memory"):
        seconds, used = zip(*memory["curve"], strict=True)
        axes[3].plot(seconds, used)
        axes[3].set_ylim(0, MEMORY_WANTED_MB * 1.05)
        axes[3].axhline(MEMORY_WANTED_MB, linestyle="--", color="tab:red")
        axes[3].set_xlabel("seconds")
        axes[3].set_title(
            f"MB while {memory['workers']} workers build {memory['tokens'] / 1e6:,.0f} M tokens", fontsize=10
        )
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = harness.make_parser("input", __doc__)
    add = parser.add_argument
    add("--text", required=True, help="files, as --input of build_corpus")
    add("--vocab", required=True, help="tokenizer directory or vocab.txt")
    add(
        "--do_lower_case",
        type=lambda text: text == "true",
        default=None,
        help="true or false, only if the tokenizer does not say",
    )
    add("--original", metavar="DIR", help="time the original's program, which is there")
    add("--piece_mb", type=float, default=4.0, help="text that both make masked epochs of")
    add("--memory", type=float, default=0, metavar="GB", help="plot the memory of a build")
    add("--out", type=Path, default=Path("bench"))
    flags = parser.parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bertjax-bench-") as scratch:
        report = measure(flags, Path(scratch))
    (flags.out / "input.json").write_text(json.dumps(report, indent=1))
    print(table(report), *([memory_text(report["memory"])] if flags.memory else []), *checks(report), sep="\n")
    draw(report, flags.out / "input.png")
    print(f"{flags.out / 'input.json'}, {flags.out / 'input.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
