"""The report's tables: the results of the runs, their settings and hardware.

In: runs. Out: HTML. Everything that comes from data is escaped.
"""

import datetime
import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.log.logbook import human_count, human_time
from bertjax.log.report.charts import PERCENT, TITLES
from bertjax.log.report.runs import Run
from bertjax.log.report.verdicts import verdicts

MISSING = "–"
MOST_CLASSES = 40  # that a table shows


def summary(runs: Sequence[Run]) -> str:
    """The results: tiles for one run, a table with one column a run for several."""
    results = [_results(run.records, run.result.get("best_step")) for run in runs]
    names = dict.fromkeys(name for of_run in results for name in of_run)
    rows = {name: [of_run.get(name, MISSING) for of_run in results] for name in names}
    if len(runs) == 1:
        tiles = "".join(
            f"<div><small>{html.escape(name)}</small>{html.escape(value)}</div>" for name, (value,) in rows.items()
        )
        judged = _list(verdicts(runs[0]), "verdicts")
        return f'{judged}{_in_words(runs[0])}<div class="tiles">{tiles}</div>'
    judged = [f"{run.name}: {'; '.join(said)}" for run in runs if (said := verdicts(run))]
    return _list(judged, "verdicts") + _remarks(runs) + _table(runs, rows, mark_differences=False)


# Settings that make losses of two runs another quantity.
OTHER_LOSSES = (
    "masking.rate",
    "masking.mask_prob",
    "masking.random_prob",
    "masking.whole_word",
    "eval.masking_rate",
    "eval.seq_length",
    "phases",
    "data.nsp",
    "data.corpus",
    "model.is_decoder",
    "task",
    "metric",
)


def _remarks(runs: Sequence[Run]) -> str:
    """Why the losses of these runs are not to be compared, where they are not."""
    differing = [
        f"{name} ({', '.join(run.settings.get(name, MISSING) for run in runs)})"
        for name in OTHER_LOSSES
        if len({run.settings.get(name, MISSING) for run in runs}) > 1
    ]
    return _list(
        [f"losses of these runs do not compare, since they differ in {', '.join(differing)}"] if differing else []
    )


def _list(lines: Sequence[object], kind: str = "told") -> str:
    items = "".join(f"<li>{html.escape(str(line))}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _in_words(run: Run) -> str:
    """What was trained on what, what the terminal said at the end, and when that was."""
    result = run.result
    lines = [*result.get("about", ()), *result.get("results", ()), *result.get("notes", ())]
    if "checkpoint" in result:
        rows = ", ".join(f"{split} {count:,}" for split, count in result.get("rows", {}).items())
        lines.insert(0, f"{result.get('task')} from {result['checkpoint']}; rows: {rows}")
    if flags := result.get("flags"):
        lines.insert(0, f"doubtful: {'; '.join(map(str, flags))}")
    if times := [record["time"] for record in run.records if record.get("time")]:
        day = datetime.datetime.fromtimestamp(times[-1], datetime.UTC)
        lines.append(f"last record {day:%Y-%m-%d %H:%M} UTC")
    return _list(lines)


def classes(runs: Sequence[Run]) -> list[str]:
    """Precision, recall and F1 of each class or type of entity, and who is taken for whom."""
    parts = []
    for run in runs:
        details = run.result.get("details") or {}
        table = details.get("by_class") or details.get("by_type")
        if not isinstance(table, dict) or len(table) > MOST_CLASSES:
            continue
        matrix = details.get("confusion") if len(table) > 1 else None
        head = ["", "precision", "recall", "F1", "rows"] + [f"as {name}" for name in table if matrix]
        body = [
            [
                name,
                *(f"{100 * value:.1f}" for value in numbers[:3]),
                f"{numbers[3]:,}",
                *(f"{count:,}" for count in (matrix[number] if matrix else ())),
            ]
            for number, (name, numbers) in enumerate(table.items())
        ]
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
            for name, *cells in body
        )
        titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
        note = " <small>on dev, in %; a row a gold class, 'as' what it was predicted as</small>"
        name = f" of {html.escape(run.name)}" if len(runs) > 1 else ""
        parts.append(
            f'<h2>Classes{name}{note}</h2><div class="card scroll classes"><table><tr>{titles}</tr>{rows}</table></div>'
        )
    return parts


def calibration(runs: Sequence[Run]) -> list[str]:
    """How often predictions are right, by the probability that the model gave them."""
    parts = []
    for run in runs:
        found = (run.result.get("details") or {}).get("calibration")
        if not isinstance(found, dict):
            continue
        rows = ""
        for number, (count, sure, right) in enumerate(bins := found["bins"]):
            if count:
                rows += (
                    f"<tr><th>{100 * number // len(bins)} to {100 * (number + 1) // len(bins)}"
                    f" %</th><td>{count:,}</td><td>{100 * sure:.1f}</td><td>{100 * right:.1f}"
                    f'</td><td><div class="share"><i style="width:{100 * right:.1f}%"></i>'
                    f'<b style="left:{100 * sure:.1f}%"></b></div></td></tr>'
                )
        note = (
            f" <small>expected calibration error {100 * found['ece']:.1f} %; on dev, in %; "
            "bar: right, mark: mean probability</small>"
        )
        name = f" of {html.escape(run.name)}" if len(runs) > 1 else ""
        parts.append(
            f'<h2>Calibration{name}{note}</h2><div class="card scroll classes"><table>'
            "<tr><th>probability</th><th>rows</th><th>mean</th><th>right</th><th></th></tr>"
            f"{rows}</table></div>"
        )
    return parts


def _results(records: Sequence[Mapping[str, Any]], best_step: int | None) -> dict[str, str]:
    """What a run has come to, in words and numbers: held-out scores at the best step if only its
    parameters are kept, else those of the last evaluation.
    """

    def known(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    found = {"Steps": f"{records[-1]['step']:,}"}
    for name in ("loss", "mlm_loss", "nsp_loss"):
        if values := known(name):
            found[f"{TITLES[name]}, last logged step"] = f"{values[-1]:.3f}"
    evaluated = [record for record in records if any(key.startswith("eval/") for key in record)]
    if best_step is not None:
        found["Best step, which is kept"] = f"{best_step:,}"
        evaluated = [record for record in evaluated if record["step"] == best_step] or evaluated
    for key, value in (evaluated[-1] if evaluated else {}).items():
        if "/" in key and value is not None:
            name = key.removeprefix("eval/")
            shown = f"{100 * value:.1f} %" if name in PERCENT else f"{value:.3f}"
            found[f"{TITLES.get(name, name)}, held-out"] = shown
    if speeds := list(filter(None, known("tokens_per_second"))):
        found["Tokens per second, median"] = human_count(statistics.median(speeds))
    if mfu := list(filter(None, known("mfu"))):
        found["MFU, median"] = f"{100 * statistics.median(mfu):.1f} %"
    if len(times := known("time")) > 1:
        found["Time, first to last record"] = human_time(times[-1] - times[0])
    if skipped := list(filter(None, known("skipped"))):
        found["Skipped steps"] = f"{skipped[-1]:.0f}"
    return found


def details(runs: Sequence[Run]) -> list[str]:
    """Settings and hardware, each only where a run has them; what differs comes first."""
    parts = []
    for title, of_runs in (
        ("Settings", [run.settings for run in runs]),
        ("Hardware", [run.hardware for run in runs]),
        ("Starts", [_starts(run) for run in runs]),
    ):
        names = dict.fromkeys(name for values in of_runs for name in values)
        if not names:
            continue
        rows = {name: [str(values.get(name, MISSING)) for values in of_runs] for name in names}
        different = [name for name, values in rows.items() if len(set(values)) > 1]
        ordered = {name: rows[name] for name in dict.fromkeys([*different, *rows])}
        note = f" <small>{len(different)} differ, shown first</small>" if different else ""
        parts.append(
            f"<details{' open' if len(runs) > 1 else ''}><summary>{title}{note}"
            f"</summary>{_table(runs, ordered)}</details>"
        )
    return parts


def _starts(run: Run) -> dict[str, str]:
    """Where and on what each start of a run went on; nothing for a run of one start."""
    if len(run.starts) < 2:
        return {}
    return {
        f"{number}. from step {start['step']:,}": (
            f"{start.get('time', MISSING)}, {start.get('devices')} x {start.get('device_kind')}, jax "
            f"{start.get('jax')}: "
            + (
                "bit for bit"
                if start.get("bit_for_bit")
                else f"not bit for bit: {'; '.join(map(str, start.get('why', ())))}"
            )
        )
        for number, start in enumerate(run.starts, 1)
    }


def _table(runs: Sequence[Run], rows: Mapping[str, Sequence[str]], mark_differences: bool = True) -> str:
    head = ""
    if len(runs) > 1:
        cells = "".join(f'<th><i class="dot c{i % 8}"></i>{html.escape(run.name)}</th>' for i, run in enumerate(runs))
        head = f"<tr><th></th>{cells}</tr>"
    body = ""
    for name, values in rows.items():
        changed = ' class="different"' if mark_differences and len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        body += f"<tr{changed}><th>{html.escape(name)}</th>{cells}</tr>"
    return f'<div class="scroll"><table>{head}{body}</table></div>'
