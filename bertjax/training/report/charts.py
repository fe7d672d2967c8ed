"""The report's charts: the metrics of the runs, as the script of page.py draws them."""

from collections.abc import Sequence
from typing import Any

from bertjax.training.report.runs import Run

MAX_POINTS = 2000  # of a curve; more than the pixels of a wide screen adds nothing

# Order and titles of the charts; any other metric follows under its own name.
TITLES = {
    "loss": "Loss", "mlm_loss": "MLM loss", "nsp_loss": "NSP loss", "mlm_accuracy": "MLM accuracy",
    "nsp_accuracy": "NSP accuracy",
    # Scores of tasks.
    "accuracy": "Accuracy", "accuracy_f1": "Mean of accuracy and F1", "f1": "F1",
    "exact": "Exact match", "best_f1": "F1 at the best threshold",
    "best_exact": "Exact match at the best threshold", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation", "spearman": "Spearman correlation", "macro_f1": "Macro F1",
    "majority": "Share of the most frequent class",
    # The run itself.
    "learning_rate": "Learning rate", "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second", "mfu": "Model FLOPs utilisation",
    "step_time": "Seconds a step", "data_wait": "Data wait, seconds a step",
    "skipped": "Skipped steps",
}
EXACT = ("learning_rate", "skipped")  # never smoothed
PERCENT = ("mlm_accuracy", "nsp_accuracy", "mfu", "accuracy", "majority", "accuracy_f1",
           "f1", "exact", "best_f1", "best_exact", "macro_f1", "precision", "recall",
           "token_accuracy")


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{title, percent, series: [{run, kind: 'train' | 'eval', x, y}]}], without empty ones."""
    seen = {name.removeprefix("eval/") for run in runs for record in run.records
            for name in record} - {"step", "time"}
    order = [name for name in TITLES if name in seen] + sorted(seen - TITLES.keys())
    found = []
    for name in order:
        series = []
        for number, run in enumerate(runs):
            for kind, key in (("train", name), ("eval", f"eval/{name}")):
                points = [(record["step"], record[key]) for record in run.records
                          if record.get(key) is not None]
                if points:
                    x, y = zip(*thin(points), strict=True)
                    series.append({"run": number, "kind": kind, "x": x,
                                   "y": [float(f"{value:.6g}") for value in y]})
        if name == "skipped" and not any(any(s["y"]) for s in series) or name == "majority":
            continue  # one number says it
        if any(len(s["x"]) > 1 for s in series):  # one number stands among the results
            found.append({"title": TITLES.get(name, name), "percent": name in PERCENT,
                           "exact": name in EXACT, "series": series})
    return found


def thin(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most about `limit` points, of each stretch the least and the greatest: spikes stay."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    kept = []
    for begin in range(0, len(points), size):
        stretch = points[begin: begin + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
