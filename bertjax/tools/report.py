"""report.html of one run, or of several side by side: one file that opens offline.

    python -m bertjax.tools.report RUN [RUN ...] [--output=report.html]

In, from each run's directory: metrics.jsonl, and where present config.json (or finetune.json),
hardware.json and examples.json (see report_examples.py). Out: HTML with its data, style and script
inside; no library, nothing is loaded.
"""

import argparse
import html
import json
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.files import write_whole
from bertjax.tools.report_examples import section
from bertjax.tools.report_page import PAGE
from bertjax.training.logbook import human_count, human_time, read_records

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
PERCENT = ("mlm_accuracy", "nsp_accuracy", "mfu", "accuracy", "majority")


def write_report(directories: Sequence[str | os.PathLike[str]],
                 output: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Writes the report of the runs in `directories`; returns its path.

    Args:
      output: default: report.html in the first directory.

    Raises:
      ValueError: a directory holds no metrics.jsonl, or no record in it.
    """
    runs = [_load(pathlib.Path(directory)) for directory in directories]
    names = [run["name"] for run in runs]
    if len(set(names)) < len(names):  # runs of the same last name: tell them apart by the path
        for run, directory in zip(runs, directories, strict=True):
            run["name"] = os.fspath(directory)
    page = PAGE.replace("{{title}}", html.escape(" vs ".join(run["name"] for run in runs)))
    page = page.replace("{{summary}}", _summary(runs)).replace("{{tables}}", _tables(runs))
    data = {"runs": [run["name"] for run in runs], "charts": _charts(runs)}
    # '<' escaped: the data must not be able to end the script element it stands in.
    page = page.replace("{{data}}", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
    path = pathlib.Path(output or pathlib.Path(directories[0]) / "report.html")
    write_whole(path, page)
    return path


def _load(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{directory} is not the directory of a run: it has no metrics.jsonl")
    records = read_records(path)
    if not records:
        raise ValueError(f"{path} has no record yet; the first comes with the first logged step")

    def read(name: str, default: Any) -> Any:
        file = directory / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else default

    return {"name": directory.resolve().name, "records": records,
            # A fine-tuning run has its settings in finetune.json.
            "config": _flat(read("config.json", {}) or read("finetune.json", {})),
            "hardware": read("hardware.json", {}),
            "examples": read("examples.json", [])}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


# ------------------------------------------------------------------------------------------ charts


def _charts(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{title, percent, series: [{run, kind: 'train' | 'eval', x, y}]}], without empty ones."""
    seen = {name.removeprefix("eval/") for run in runs for record in run["records"]
            for name in record} - {"step", "time"}
    order = [name for name in TITLES if name in seen] + sorted(seen - TITLES.keys())
    charts = []
    for name in order:
        series = []
        for number, run in enumerate(runs):
            for kind, key in (("train", name), ("eval", f"eval/{name}")):
                points = [(record["step"], record[key]) for record in run["records"]
                          if record.get(key) is not None]
                if points:
                    x, y = zip(*thin(points), strict=True)
                    series.append({"run": number, "kind": kind, "x": x,
                                   "y": [float(f"{value:.6g}") for value in y]})
        if name == "skipped" and not any(any(s["y"]) for s in series) or name == "majority":
            continue  # one number says it
        if any(len(s["x"]) > 1 or s["kind"] == "eval" for s in series):
            charts.append({"title": TITLES.get(name, name), "percent": name in PERCENT,
                           "exact": name in EXACT, "series": series})
    return charts


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


# ------------------------------------------------------------------------------------------ tables


def _summary(runs: Sequence[Mapping[str, Any]]) -> str:
    """The results: tiles for one run, a table with one column a run for several."""
    rows: dict[str, list[str]] = {}

    def add(name: str, column: int, value: str) -> None:
        rows.setdefault(name, ["–"] * len(runs))[column] = value

    for column, run in enumerate(runs):
        records = run["records"]
        add("Steps", column, f"{records[-1]['step']:,}")
        for name in ("loss", "mlm_loss", "nsp_loss"):
            values = [r[name] for r in records if r.get(name) is not None]
            if values:
                add(f"{TITLES[name]}, last logged step", column, f"{values[-1]:.3f}")
        evaluated = [record for record in records if any(key.startswith("eval/") for key in record)]
        for key, value in (evaluated[-1] if evaluated else {}).items():
            if "/" in key and value is not None:
                name = key.removeprefix("eval/")
                shown = f"{100 * value:.1f} %" if name in PERCENT else f"{value:.3f}"
                add(f"{TITLES.get(name, name)}, held-out", column, shown)
        speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
        if speeds:
            add("Tokens per second, median", column, human_count(statistics.median(speeds)))
        mfu = [r["mfu"] for r in records if r.get("mfu")]
        if mfu:
            add("MFU, median", column, f"{100 * statistics.median(mfu):.1f} %")
        times = [r["time"] for r in records if r.get("time")]
        if len(times) > 1:
            add("Time, first to last record", column, human_time(times[-1] - times[0]))
        skipped = [r["skipped"] for r in records if r.get("skipped")]
        if skipped:
            add("Skipped steps", column, f"{skipped[-1]:.0f}")
    if len(runs) == 1:
        tiles = "".join(f"<div><small>{html.escape(name)}</small>{html.escape(value)}</div>"
                        for name, (value,) in rows.items())
        return f'<div class="tiles">{tiles}</div>'
    return _table(runs, rows, mark_differences=False)


def _tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Examples, settings and hardware, each only where a run has them."""
    parts = [section(runs)]
    for title, key in (("Settings", "config"), ("Hardware", "hardware")):
        names = dict.fromkeys(name for run in runs for name in run[key])
        if names:
            rows = {name: [str(run[key].get(name, "–")) for run in runs] for name in names}
            different = [name for name, values in rows.items() if len(set(values)) > 1]
            ordered = {name: rows[name] for name in
                       [*different, *(name for name in rows if name not in different)]}
            note = (f" <small>{len(different)} differ, shown first</small>"
                    if len(runs) > 1 and different else "")
            parts.append(f"<details{' open' if len(runs) > 1 else ''}><summary>{title}{note}"
                         f"</summary>{_table(runs, ordered)}</details>")
    return "\n".join(filter(None, parts))


def _table(runs: Sequence[Mapping[str, Any]], rows: Mapping[str, Sequence[str]],
           mark_differences: bool = True) -> str:
    head = ""
    if len(runs) > 1:
        cells = "".join(f'<th><i class="dot c{i % 8}"></i>{html.escape(run["name"])}</th>'
                        for i, run in enumerate(runs))
        head = f"<tr><th></th>{cells}</tr>"
    body = ""
    for name, values in rows.items():
        changed = ' class="different"' if mark_differences and len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        body += f"<tr{changed}><th>{html.escape(name)}</th>{cells}</tr>"
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--output", help="default: report.html in the first directory")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.runs, arguments.output))
    except ValueError as error:
        raise SystemExit(f"report: {error}") from error


if __name__ == "__main__":
    main()
