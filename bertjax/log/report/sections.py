"""The report's sections: results, classes, examples, settings, hardware and starts.

In: runs. Out: HTML. Everything that comes from data is escaped.
"""

import datetime
import html
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.log.logbook import human_count, human_time
from bertjax.log.report.charts import PERCENT, TITLES
from bertjax.log.report.runs import Run
from bertjax.log.report.verdicts import verdicts

MISSING = "–"
MOST_IN_ORDER = 24  # classes of a table in the order of the head; of more the worst come first
MOST_DIFFERING = 16  # settings above the results of several runs
FINGERPRINT = re.compile("[0-9a-f]{40,}")
FEWEST_FOR_PAIRS = 4
NO_ENTITY = "no entity"  # tasks/metrics.py
MOST_PAIRS = 10  # of classes that are taken for each other
# Settings that make losses of two runs another quantity.
OTHER_LOSSES = (
    "masking.rate masking.mask_prob masking.random_prob masking.whole_word eval.masking_rate eval.seq_length "
    "phases data.nsp data.corpus model.is_decoder task metric"
).split()


def summary(runs: Sequence[Run]) -> str:
    """The results: tiles for one run, a table with one column per run for several."""
    results = [_results(run.records, run.result.get("best_step")) for run in runs]
    rows = _side_by_side(results)
    if len(runs) == 1:
        tiles = "".join(f"<div><small>{_text(name)}</small>{_text(value)}</div>" for name, (value,) in rows.items())
        return f'{_list(verdicts(runs[0]), "verdicts")}{_in_words(runs[0])}<div class="tiles">{tiles}</div>'
    judged = [f"{run.name}: {'; '.join(said)}" for run in runs if (said := verdicts(run))]
    settings = _side_by_side([run.settings for run in runs])
    differing = {name: values for name, values in settings.items() if len(set(values)) > 1}
    others = [name for name in differing if name in OTHER_LOSSES]
    remarks = [f"losses of these runs do not compare, since they differ in {', '.join(others)}"] if others else []
    told = {name: values for name, values in differing.items() if not any(map(FINGERPRINT.fullmatch, values))}
    first = list(told)[:MOST_DIFFERING]
    if more := len(told) - len(first):
        remarks.append(f"{more} more settings differ, see below")
    return _list(judged, "verdicts") + _list(remarks) + _run_table(runs, {n: told[n] for n in first} | rows, first)


def _results(records: Sequence[Mapping[str, Any]], best_step: int | None) -> dict[str, str]:
    """What a run has come to, in words and numbers: held-out scores at the best step if only its
    parameters are kept, else those of the last evaluation.
    """

    def known(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    found = {"Steps": f"{records[-1]['step']:,}"}
    for name in ("loss", "mlm_loss", "nsp_loss"):
        if values := [record[name] for record in records if name in record]:
            last = "not finite" if values[-1] is None else f"{values[-1]:.3f}"
            found[f"{TITLES[name]}, last logged step"] = last
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
    return _list(list(dict.fromkeys(lines)))


def classes(runs: Sequence[Run]) -> list[str]:
    """Precision, recall and F1 of each class, type of entity or kind of question, and what is taken for what; of
    several runs the F1 of each side by side."""
    tables = [_by_class(run.result.get("details") or {}) for run in runs]
    if len(runs) > 1:
        rows = _side_by_side([{name: f"{100 * row[-2]:.1f}" for name, row in table.items()} for table in tables])
        title = "<h2>Classes <small>F1 on dev, in %</small></h2>"
        return [title + _run_table(runs, rows, kind="card scroll classes tall")] if rows else []
    ((table,), (run,)) = tables, runs
    return [_class_table(table, run.result["details"]), _confused(table, run.result["details"])] if table else []


def _by_class(details: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """(..., F1, rows) by name."""
    for name in ("by_class", "by_type"):
        if isinstance(details.get(name), dict):
            return details[name]
    kinds = {"all questions": "", "with an answer": "HasAns_", "without an answer": "NoAns_"}
    return {
        name: (details[f"{kind}f1"] / 100, details[f"{kind}total"])
        for name, kind in kinds.items()
        if f"{kind}f1" in details
    }


def _class_table(table: Mapping[str, Sequence[float]], details: Mapping[str, Any]) -> str:
    """Scores of each class, beside them the confusion matrix where there is one, and last what is not an entity."""
    matrix, names = details.get("confusion") if len(table) > 1 else None, list(table)
    if many := len(names) > MOST_IN_ORDER:
        names.sort(key=lambda name: table[name][-2])
    scores = len(table[names[0]]) - 1
    kind = "entities" if "by_type" in details else "questions" if scores == 1 else "rows"
    head = ["", *("precision", "recall", "F1")[-scores:], kind]
    lines = [
        [_text(_cut(name)), *(f"{100 * value:.1f}" for value in row[:-1]), f"{row[-1]:,}"]
        for name, row in ((name, table[name]) for name in names)
    ]
    note = "on dev, in %"
    if matrix:
        if len(matrix) > len(names):
            names.append(NO_ENTITY)
            lines.append([NO_ENTITY, *[""] * (scores + 1)])
        head += [f"<span>as {_text(_cut(name))}</span>" for name in names]
        for number, line in enumerate(lines):
            row = matrix[number]
            line += [_heat(count, sum(row), place == number) for place, count in enumerate(row)]
        note += f"; a row a gold class, 'as' what it was predicted as{' (the same words)' * (kind == 'entities')}"
    note += "; the lowest F1 first" * many
    if mode := details.get("mode"):
        note += f"; scored in the mode {_text(mode)}"
    title = "Questions" if kind == "questions" else "Classes"
    return f"<h2>{title} <small>{note}</small></h2>" + _table(head, lines, "card scroll classes tall")


def _confused(table: Mapping[str, Sequence[float]], details: Mapping[str, Any]) -> str:
    """The classes that are most often taken for each other; '' where the matrix is small enough to see it there."""
    pairs = _pairs(details, [*table, NO_ENTITY], details.get("confusion"))
    if len(table) < FEWEST_FOR_PAIRS or not pairs:
        return ""
    lines = []
    for gold, predicted, count in pairs[:MOST_PAIRS]:
        support = table[gold][-1] if gold in table else 0
        share = f"{100 * count / support:.1f}" if support else MISSING
        lines.append([_text(gold), _text(predicted), f"{count:,}", share])
    table_of_pairs = _table(["gold", "predicted", "how often", "% of gold"], lines, "card scroll classes pairs")
    return f"<h2>Most confused <small>what is taken for what</small></h2>{table_of_pairs}"


def _pairs(details: Mapping[str, Any], names: Sequence[str], matrix: Any) -> list[Sequence[Any]]:
    """(gold, predicted, rows) of what is taken for another, the most frequent first."""
    if not matrix:
        return details.get("confused") or []
    cells = [(names[g], names[p], n) for g, row in enumerate(matrix) for p, n in enumerate(row) if n and g != p]
    return sorted(cells, key=lambda cell: -cell[2])


def _heat(count: int, all_of_row: int, right: bool) -> str:
    share = 100 * count / all_of_row if all_of_row else 0
    kind = "right" if right else "wrong"
    return f'<span class="heat {kind}" style="--share:{share:.0f}%">{count:,}</span>' if count else "0"


def details(runs: Sequence[Run]) -> list[str]:
    """Settings, hardware and starts, each only where a run has them; what differs comes first."""
    parts = []
    for title, of_runs in (
        ("Settings", [run.settings for run in runs]),
        ("Hardware", [run.hardware for run in runs]),
        ("Starts", [_starts(run) for run in runs]),
    ):
        rows = _side_by_side(of_runs)
        if rows:
            different = [name for name, values in rows.items() if len(set(values)) > 1]
            ordered = {name: rows[name] for name in dict.fromkeys([*different, *rows])}
            note = f" <small>{len(different)} differ, shown first</small>" if different else ""
            parts.append(
                f"<details{' open' if len(runs) > 1 else ''}><summary>{title}{note}</summary>"
                f"{_run_table(runs, ordered, different)}</details>"
            )
    return parts


def _starts(run: Run) -> dict[str, str]:
    """Where and on what each start of a run went on; nothing for a run of one start."""
    found = {}
    for number, start in enumerate(run.starts if len(run.starts) > 1 else (), 1):
        why = "" if start.get("bit_for_bit") else f"not bit for bit: {'; '.join(map(str, start.get('why', ())))}"
        found[f"{number}. from step {start['step']:,}"] = (
            f"{start.get('time', MISSING)}, {start.get('devices')} x {start.get('device_kind')}, "
            f"jax {start.get('jax')}: {why or 'bit for bit'}"
        )
    return found


def examples(runs: Sequence[Run]) -> str:
    """What the models fill in, or predict beside the gold, from examples.json; '' if there is nothing.

    Of pre-training {"text": with [MASK], "predictions": [[token, probability], ...]}, of fine-tuning the
    dictionaries of bertjax/tasks/task.py.
    """
    cards = [_card(example, run.name if len(runs) > 1 else "") for run in runs for example in run.examples]
    if not cards:
        return ""
    gold, note = [example for run in runs for example in run.examples if "gold" in example], ""
    # How the examples were chosen (bertjax/tasks/shown.py), and what their marks mean.
    if gold and all(example["right"] is None for example in gold):
        note = "on dev: the largest errors, then some of all"
    elif gold:
        note = "on dev: the worst mistakes, then some that are right"
        if any("answers" in example for example in gold):
            note += '; in the passage <i class="right">gold</i> and <i class="miss">predicted</i> answer'
        note += "; a wrong tag is struck out before the gold one" * any("words" in example for example in gold)
    if any("mattered" in example for example in gold):
        unit = "number" if any(example["right"] is None for example in gold) else "log odds"
        note += (
            f'. <i class="for" style="--share:60%">For</i> the prediction or <i class="against" style="--share:60%">'
            f"against</i> it: how the {unit} of it would fall or rise without that word"
        )
    return f'<h2>Examples <small>{note}</small></h2><div class="grid">{"".join(cards)}</div>'


def _card(example: Mapping[str, Any], run: str) -> str:
    kind, mark = {True: ("right", "<em>✓</em> "), False: ("wrong", "<em>✗</em> "), None: ("", "")}[example.get("right")]
    parts = [f"<small>{_text(run)}</small>" if run else ""]
    if "words" in example:
        words = " ".join(_word(*word) for word in example["words"])
        parts.append(f'<p class="words" dir="auto">{mark}{words}</p>')
    elif "gold" in example:
        answers = f"predicted <b>{_text(example['predicted'])}</b>"
        if not example["right"] or example["predicted"] != example["gold"]:
            answers += f", gold <b>{_text(example['gold'])}</b>"
        parts.append(f'<p class="verdict">{mark}{answers}</p>')
        pieces = example.get("mattered") or [[]] * len(example["texts"])
        most = max((abs(change) for ends in pieces for _, change in ends), default=0)
        texts = [_shaded(*both, most) for both in zip(example["texts"], pieces, strict=True)]
        if "answers" in example:
            texts[-1] = _answered(example["texts"][-1], *example["answers"])
        parts += [f'<p dir="auto">{text}</p>' for text in texts]
    else:
        masked = _text(example.get("text", "")).replace("[MASK]", "<mark>[MASK]</mark>")
        parts.append(f'<p dir="auto">{masked}</p>')
    bars = "".join(  # as long as their probability
        f'<li><span style="width:{100 * float(probability):.1f}%"></span>'
        f"<b>{_text(name)}</b> {100 * float(probability):.1f} %</li>"
        for name, probability in example.get("predictions", ())
    )
    return f'<div class="example {kind}">{"".join(parts)}{f"<ol>{bars}</ol>" if bars else ""}</div>'


def _shaded(text: str, pieces: Sequence[tuple[int, float]], most: float) -> str:
    """The text with its pieces shaded by what they change, most of all by `most`."""
    shown, begin = [], 0
    for end, change in pieces:
        piece, begin = _text(text[begin:end]), end
        share = round(100 * abs(change) / most) if most else 0
        kind = "for" if change > 0 else "against"
        shown.append(
            f'<i class="{kind}" style="--share:{share}%" title="{change:+.2f}">{piece}</i>' if share > 4 else piece
        )
    return "".join(shown) + _text(text[begin:])


def _answered(text: str, gold: str, predicted: str) -> str:
    """The passage with the gold answer, and the predicted one where it is another, where they first stand in it."""
    places = {"right": text.find(gold) if gold else -1, "miss": text.find(predicted) if predicted else -1}
    ends = {"right": places["right"] + len(gold), "miss": places["miss"] + len(predicted)}
    shown, at = [], 0
    for kind in sorted(places, key=lambda kind: (places[kind], kind != "right")):
        if places[kind] >= at:
            shown += [_text(text[at : places[kind]]), f'<i class="{kind}">{_text(text[places[kind] : ends[kind]])}</i>']
            at = ends[kind]
    return "".join(shown) + _text(text[at:])


def _word(word: str, gold: str, predicted: str) -> str:
    """A word with its tag where there is one; a wrong tag is struck out before the gold one."""
    tag = "" if gold == "O" else f"<i>{_text(gold)}</i>"
    if gold != predicted:
        tag = f"<i class=miss><s>{_text(predicted)}</s> {_text(gold)}</i>"
    return f"<span>{_text(word)}{tag}</span>"


# ------------------------------------------------------------------------------- pieces of HTML


def _text(value: object) -> str:
    return html.escape(str(value))


def _cut(name: str) -> str:
    """The name, or its beginning."""
    return name if len(name) <= 40 else name[:39] + "…"


def _list(lines: Sequence[object], kind: str = "told") -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """{name: its value in every column}."""
    names = dict.fromkeys(name for values in columns for name in values)
    return {name: [str(values.get(name, MISSING)) for values in columns] for name in names}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str, marked: int = 0) -> str:
    """A table of cells that are HTML already; the first `marked` rows stand out."""
    lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"] if head else []
    for number, (name, *cells) in enumerate(rows):
        changed = ' class="different"' if number < marked else ""
        lines.append(f"<tr{changed}><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="{kind}"><table>{"".join(lines)}</table></div>'


def _run_table(
    runs: Sequence[Run], rows: Mapping[str, Sequence[str]], different: Sequence[str] = (), kind: str = "scroll"
) -> str:
    """One column per run; the rows that differ come first."""
    dots = [f'<i class="dot c{number % 8}"></i>{_text(run.name)}' for number, run in enumerate(runs)]
    cells = [[_text(name), *map(_text, values)] for name, values in rows.items()]
    return _table(["", *dots] if len(runs) > 1 else [], cells, kind, len(different))
