"""The report's plots of a fine-tuned model on dev, as the script of page.html draws them.

In: runs. Out: [{title, note, x, y, percent: [x, y], series, ...}], where a series is {color, shape: 'line' | 'dots' |
'crosses', x, y, text, size, dashed}: `color` a number of the palette, `text` what is said of each point, `size` its
radius. More of a plot: `diagonal`, `unit` (both axes from 0 to 1), `bare` (no axes), `legend` (names of colours).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bertjax.log.report.runs import Run

Plot = dict[str, Any]
MOST_COLOURS = 8


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Those for which a run has the numbers."""
    made = [_calibration(runs), _thresholds(runs), _gold_and_predicted(runs)]
    made += map(_map, runs) if len(runs) == 1 else ()
    return [plot for plot in made if plot["series"]]


def _details(runs: Sequence[Run], name: str) -> list[tuple[int, Run, Any]]:
    """(number, run, what result.json has of it under `name`) of the runs that have it."""
    found = ((number, run, (run.result.get("details") or {}).get(name)) for number, run in enumerate(runs))
    return [(number, run, value) for number, run, value in found if value]


def _of(run: Run, runs: Sequence[Run], said: str) -> str:
    return f"{run.name}: {said}" if len(runs) > 1 else said


def _calibration(runs: Sequence[Run]) -> Plot:
    """How often predictions are right, by the probability that the model gave them."""
    series, errors = [], []
    for number, run, found in _details(runs, "calibration"):
        bins = [(count, sure, right) for count, sure, right in found["bins"] if count]
        most = max(count for count, _, _ in bins)
        series.append(
            {
                "color": number,
                "shape": "line",
                "x": [sure for _, sure, _ in bins],
                "y": [right for _, _, right in bins],
                "size": [round(2 + 6 * (count / most) ** 0.5, 1) for count, _, _ in bins],
                "text": [f"{count:,} at {100 * sure:.1f} %: {100 * right:.1f} % right" for count, sure, right in bins],
            }
        )
        errors.append(_of(run, runs, f"{100 * found['ece']:.1f} %"))
    return {
        "title": "Calibration",
        "note": f"expected calibration error {'; '.join(errors)}. Below the diagonal the model is surer than it "
        "is right; the larger a dot, the more predictions",
        "x": "probability of the prediction",
        "y": "share that is right",
        "percent": [True, True],
        "diagonal": True,
        "unit": True,
        "series": series,
    }


def _thresholds(runs: Sequence[Run]) -> Plot:
    """SQuAD 2.0: the scores at every threshold for "no answer"."""
    series: list[dict[str, Any]] = []
    notes = []
    for number, run, curve in _details(runs, "threshold_curve"):
        details = run.result["details"]
        for place, (name, title) in enumerate((("exact", "exact match"), ("f1", "F1")), 1):
            line = {"color": number, "shape": "line", "dashed": name == "exact"}
            x, y = [row[0] for row in curve], [row[place] / 100 for row in curve]
            text = [f"{title} {100 * value:.1f} % at {at:.2f}" for at, value in zip(x, y, strict=True)]
            best, at = details[f"best_{name}"], details[f"best_{name}_thresh"]
            said = f"best {title} {best:.1f} % at {at:.2f}"
            series.append({**line, "x": x, "y": y, "text": text, "size": [0] * len(x)})
            series.append({"color": number, "shape": "dots", "x": [at], "y": [best / 100], "text": [said], "size": [5]})
            notes.append(_of(run, runs, said))
    return {
        "title": "Threshold of no answer",
        "note": "; ".join(notes) + ". Solid: F1, dashed: exact match, dots: the best",
        "x": "highest null odds at which a question is answered",
        "y": "score",
        "percent": [False, True],
        "series": series,
    }


def _gold_and_predicted(runs: Sequence[Run]) -> Plot:
    series = []
    for number, _, points in _details(runs, "gold_and_predicted"):
        gold, predicted = zip(*points, strict=True)
        text = [f"gold {g:.4g}, predicted {p:.4g}" for g, p in points]
        series.append({"color": number, "shape": "dots", "x": gold, "y": predicted, "text": text})
    return {
        "title": "Gold and predicted numbers",
        "note": "on the diagonal they are the same",
        "x": "gold",
        "y": "predicted",
        "percent": [False, False],
        "diagonal": True,
        "series": series,
    }


def _is_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _map(run: Run) -> Plot:
    """The vectors that the head reads, in two dimensions; a colour for each gold class, or from low to high numbers."""
    points: Sequence[Any] = run.map.get("points", ())
    # A head may have other golds than classes and numbers, of which nothing is right or wrong.
    numbers = bool(points) and all(right is None and _is_number(gold) for _, _, gold, _, right, _ in points)
    if numbers:
        golds = sorted(float(gold) for _, _, gold, *_ in points)
        limits = [golds[len(golds) * k // 4] for k in (1, 2, 3)]
        names = [f"below {limits[0]:g}", f"to {limits[1]:g}", f"to {limits[2]:g}", "above"]
        group = {point[2]: sum(float(point[2]) >= limit for limit in limits) for point in points}
    else:
        frequent = Counter(gold for _, _, gold, *_ in points).most_common()
        names = [gold for gold, _ in frequent]
        if len(names) > MOST_COLOURS:
            names[MOST_COLOURS - 1 :] = [f"{len(names) - MOST_COLOURS + 1} others"]
        group = {gold: min(number, MOST_COLOURS - 1) for number, (gold, _) in enumerate(frequent)}
    series = []
    for number in range(len(names)):
        for shape, wrong in (("dots", False), ("crosses", True)):
            mine = [point for point in points if group[point[2]] == number and (point[4] is False) == wrong]
            if mine:
                x, y, gold, predicted, _, text = zip(*mine, strict=True)
                said = [
                    f"{t} [{g}]" if g == p else f"{t} [gold {g}, predicted {p}]"
                    for t, g, p in zip(text, gold, predicted, strict=True)
                ]
                series.append({"color": number, "shape": shape, "x": x, "y": y, "text": said})
    share = f"{100 * run.map.get('share', 0):.0f} %"
    return {
        "title": "Map",
        "note": f"{len(points)} rows by the vectors that the head reads: their first two principal components, {share} "
        "of the variance. Colour: gold" + ("" if numbers else "; crosses: predicted wrongly"),
        "x": "",
        "y": "",
        "percent": [False, False],
        "bare": True,
        "series": series,
        "legend": names,
    }
