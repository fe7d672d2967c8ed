"""The report's charts: the metrics of the runs, as the script of page.html draws them."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.log.report.runs import Run

MAX_POINTS = 2000  # of a curve; more than the pixels of a wide screen adds nothing

# Order and titles of the charts; any other metric follows under its own name.
TITLES = {
    "loss": "Loss",
    "mlm_loss": "MLM loss",
    "nsp_loss": "NSP loss",
    "mlm_accuracy": "MLM accuracy",
    "nsp_accuracy": "NSP accuracy",
    # Scores of tasks.
    "accuracy": "Accuracy",
    "accuracy_f1": "Mean of accuracy and F1",
    "f1": "F1",
    "exact": "Exact match",
    "best_f1": "F1 at the best threshold",
    "best_exact": "Exact match at the best threshold",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "macro_f1": "Macro F1",
    "micro_f1": "Micro F1",
    "precision": "Precision",
    "recall": "Recall",
    "token_accuracy": "Accuracy of words",
    "pearson_spearman": "Mean of both correlations",
    "mse": "Mean squared error",
    "majority": "Share of the most frequent class",
    # The run itself.
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "mfu": "Model FLOPs utilisation",
    "step_time": "Seconds a step",
    "data_wait": "Data wait, seconds a step",
    "skipped": "Skipped steps",
}
EXACT = ("learning_rate", "skipped")  # never smoothed
PERCENT = (
    "mlm_accuracy nsp_accuracy mfu accuracy majority accuracy_f1 f1 exact best_f1 best_exact macro_f1 micro_f1 "
    "precision recall token_accuracy"
).split()

Knots = Sequence[tuple[float, float]]  # (step, value), steps ascending; straight lines between


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{title, percent, series: [{run, kind: 'train' | 'eval', x, y, tokens, time}]}], without
    empty ones; x is the step, and tokens and time stand there if they are known of every run.
    """
    axes = [_axes(run) for run in runs]
    known = [name for name in ("tokens", "time") if all(name in of_run for of_run in axes)]
    seen = {name.removeprefix("eval/") for run in runs for record in run.records for name in record} - {"step", "time"}
    found = []
    for name in [name for name in TITLES if name in seen] + sorted(seen - TITLES.keys()):
        series = []
        for (number, run), (kind, key) in itertools.product(
            enumerate(runs), (("train", name), ("eval", f"eval/{name}"))
        ):
            points = [(record["step"], record[key]) for record in run.records if record.get(key) is not None]
            if points:
                x, y = zip(*thin(points), strict=True)
                along = {axis: np.interp(x, *zip(*axes[number][axis], strict=True)).tolist() for axis in known}
                series.append(
                    {
                        "run": number,
                        "kind": kind,
                        "x": x,
                        "y": [float(f"{value:.6g}") for value in y],
                        **{axis: [round(value, 1) for value in values] for axis, values in along.items()},
                    }
                )
        if name == "skipped" and not any(any(s["y"]) for s in series) or name == "majority":
            continue  # one number says it
        if any(len(s["x"]) > 1 for s in series):  # one number stands among the results
            kinds = {"percent": name in PERCENT, "exact": name in EXACT}
            found.append({"title": TITLES.get(name, name), **kinds, "series": series})
    return found


def _axes(run: Run) -> dict[str, Knots]:
    """What else than the step a chart can go by: tokens of all rows, padding included, and seconds
    since the first record, pauses between the starts of a run included.
    """
    records = sorted(run.records, key=lambda record: record["step"])
    tokens = _phase_tokens(run.settings, records[-1]["step"]) or _rate_tokens(records)
    found = {"tokens": tokens, "time": _times(records)}
    return {name: knots for name, knots in found.items() if len(knots) > 1}


def _phase_tokens(settings: Mapping[str, str], last_step: int) -> Knots:
    """By the phases of a pre-training run; empty if they are not there, or only a scale."""
    try:
        phases, rows = json.loads(settings["phases"]), int(settings["batch_size"])
        if float(settings.get("budget_minutes", 0)) and len({tuple(shape) for _, *shape in phases}) > 1:
            return []
        knots = [(0, 0)]
        default = rows
        for steps, length, *own in phases:
            (rows,) = own or [default]
            knots.append((knots[-1][0] + steps, knots[-1][1] + steps * length * rows))
        if (more := last_step - knots[-1][0]) > 0:
            knots.append((last_step, knots[-1][1] + more * length * rows))
    except (KeyError, ValueError, TypeError):
        return []
    return knots


def _rate_tokens(records: Sequence[Mapping[str, Any]]) -> Knots:
    """By the rates, which are means over the steps since the record before."""
    knots, a_step = [(0, 0.0)], 0.0
    for record in records:
        if record.get("tokens_per_second") and record.get("step_time"):
            a_step = record["tokens_per_second"] * record["step_time"]
            step, tokens = knots[-1]
            knots.append((record["step"], tokens + (record["step"] - step) * a_step))
    if (more := records[-1]["step"] - knots[-1][0]) > 0 and a_step:
        knots.append((records[-1]["step"], knots[-1][1] + more * a_step))
    return knots


def _times(records: Sequence[Mapping[str, Any]]) -> Knots:
    """The times of the records, without the steps back that the clock of a machine may make."""
    times: dict[int, float] = {}
    latest = None
    for record in records:
        if record.get("time") and record["step"] not in times:
            times[record["step"]] = latest = max(record["time"], latest or record["time"])
    first = min(times.values(), default=0.0)
    return [(step, time - first) for step, time in times.items()]


def thin(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """About `limit` points at most: the least and the greatest of each stretch, so that spikes stay."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    kept = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
