"""What `quality` found: held-out curves of its runs, of unfinished ones too; table and picture.

In: OUT/NAME of each run, with curve.jsonl (the peer's) or the metrics.jsonl of a bertjax run.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from typing import TYPE_CHECKING

from bertjax import markdown

if TYPE_CHECKING:
    from tests.benchmarks.quality import Settings

Curve = list[dict[str, float]]  # seconds since the process started, step, held-out metrics

SHORTER = 0.7  # the bar: bertjax reaches the peer's final loss in this share of its time
LABELS = {
    "peer": "transformers + torch.compile",
    "bertjax": "bertjax",
    "padded": "bertjax, one pair a row",
    "shorter": f"bertjax in {SHORTER:.0%} of the time",
    "recipe": "bertjax, masking 25 %, no dropout",
    "modern": "bertjax, modern encoder",
    "muon": "bertjax, modern encoder, Muon",
}
COLOURS = "tab:orange tab:blue tab:purple tab:green tab:red tab:cyan tab:brown tab:pink tab:olive tab:gray".split()
STARTED_FILE = "started"  # time.time() at which a bertjax run was started


def label(name: str) -> str:
    """Of a run that may have settings of its own: 'recipe+masking.rate=0.4'."""
    first, *changes = name.split("+")
    return ", ".join([LABELS[first], *(change.rsplit(".", 1)[-1].replace("=", " ") for change in changes)])


def write_curve(directory: pathlib.Path, curve: Curve) -> None:
    """curve.jsonl, one point a line."""
    text = "".join(json.dumps(point) + "\n" for point in curve)
    (directory / "curve.jsonl").write_text(text)


def read_curve(directory: pathlib.Path) -> Curve:
    """The points that a run has so far."""
    if (directory / "curve.jsonl").exists():
        return _records(directory / "curve.jsonl")
    if not (directory / STARTED_FILE).exists():
        return []
    started = float((directory / STARTED_FILE).read_text())
    return [
        {
            "seconds": record["time"] - started,
            "step": record["step"],
            "mlm_loss": record["eval/mlm_loss"],
            "mlm_accuracy": record["eval/mlm_accuracy"],
            "nsp_accuracy": record.get("eval/nsp_accuracy", math.nan),  # a run without next sentences has none
        }
        for record in _records(directory / "metrics.jsonl")
        if "eval/mlm_loss" in record
    ]


def _records(path: pathlib.Path) -> list[dict[str, float]]:
    """The whole lines of a file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def time_to(curve: Curve, loss: float) -> float | None:
    """Seconds at which the curve first reaches `loss`, between two points by a line; or None."""
    for before, after in zip(curve, curve[1:], strict=False):
        if after["mlm_loss"] <= loss:
            fall = before["mlm_loss"] - after["mlm_loss"]
            share = (before["mlm_loss"] - loss) / fall if fall > 0 else 0.0
            return before["seconds"] + max(0.0, share) * (after["seconds"] - before["seconds"])
    return None


def steps_per_second(curve: Curve) -> float:
    """Median over the stretches between evaluations, these included: the speed of the phase that
    takes most of the time."""
    speeds = [
        (after["step"] - before["step"]) / (after["seconds"] - before["seconds"])
        for before, after in zip(curve, curve[1:], strict=False)
    ]
    return statistics.median(speeds) if speeds else 0.0


def table(settings: Settings, out: pathlib.Path) -> str:
    """A Markdown table: each run's end, and when it reached the peer's final loss."""
    curves = {name: read_curve(out / name) for name in settings.runs}
    scores_file = out / "scores.json"
    scores = json.loads(scores_file.read_text()) if scores_file.exists() else {}
    longest = str(settings.phases[-1][0])
    head = (
        f"{settings.model}, {settings.batch_size} rows a step, "
        + ", then ".join(f"{length} tokens for {share:.0%}" for length, share in settings.phases)
        + f" of the time; {settings.heldout_rows:,} held-out rows"
    )
    columns = (
        "run",
        "seconds",
        "steps",
        "rows/s",
        f"MLM loss, {settings.length}",
        "accuracy",
        "NSP accuracy",
        f"MLM loss, {longest}",
        f"from position {settings.length} on",
        "reaches the peer's end after",
    )
    rows, goal = [], curves["peer"][-1] if curves.get("peer") else None
    for name, curve in curves.items():
        if not curve:
            continue
        end = curve[-1]
        of_long = scores.get(name, {}).get(longest, {})
        long = [f"{of_long[key]:.3f}" if key in of_long else "-" for key in ("mlm_loss", "mlm_loss_beyond")]
        reached = time_to(curve, goal["mlm_loss"]) if goal and name != "peer" else None
        rows.append(
            (
                label(name),
                f"{end['seconds']:.0f}",
                f"{end['step']:,}",
                f"{steps_per_second(curve) * settings.batch_size:,.0f}",
                f"{end['mlm_loss']:.3f}",
                f"{end['mlm_accuracy']:.1%}",
                "-" if math.isnan(end["nsp_accuracy"]) else f"{end['nsp_accuracy']:.1%}",
                *long,
                f"{reached:.0f} s ({reached / goal['seconds']:.0%})" if reached else "-",
            )
        )
    return f"{head}\n\n{markdown.table(columns, rows)}\n"


def draw(settings: Settings, out: pathlib.Path) -> None:
    """quality.png: held-out MLM loss over wall clock, and NSP accuracy below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    curves = {name: curve for name in settings.runs if (curve := read_curve(out / name))}
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(settings.runs)}
    for name, curve in curves.items():
        minutes = [point["seconds"] / 60 for point in curve]
        ends = f"{label(name)}: {curve[-1]['mlm_loss']:.3f} after {curve[-1]['step']:,} steps"
        upper.plot(minutes, [point["mlm_loss"] for point in curve], "o-", markersize=3, color=colours[name], label=ends)
        lower.plot(minutes, [100 * point["nsp_accuracy"] for point in curve], "o-", markersize=2, color=colours[name])
    if "peer" in curves:
        goal = curves["peer"][-1]
        upper.axhline(goal["mlm_loss"], color=colours["peer"], linewidth=0.8, linestyle=":")
        for name in ("bertjax", "padded"):
            seconds = time_to(curves.get(name, []), goal["mlm_loss"])
            if seconds:
                upper.annotate(
                    f"the peer's final loss after {seconds / 60:.1f} min ({seconds / goal['seconds']:.0%} of its time)",
                    (seconds / 60, goal["mlm_loss"]),
                    xytext=(-10, -34),
                    ha="right",
                    textcoords="offset points",
                    fontsize=8,
                    color=colours[name],
                    arrowprops={"arrowstyle": "->", "color": colours[name]},
                )
                break
    upper.set_ylabel(f"held-out MLM loss, rows of {settings.length} tokens")
    upper.set_title(f"BERT-{settings.model} from scratch on one GPU each, start-up included")
    if curves:
        upper.legend(fontsize=9)
    lower.set_ylabel("NSP accuracy, %")
    lower.set_xlabel("minutes of wall clock since the process was started")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    figure.savefig(out / "quality.png", dpi=120)
