"""The report's section of examples: what a model fills in, or predicts beside the gold.

In: examples.json of each run, one of
    pre-training  {"text": with [MASK], "predictions": [[token, probability], ...]}
    fine-tuning   the dictionaries of bertjax/tasks/task.py
Out: HTML. Everything that comes from data is escaped.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.log.report.runs import Run

VERDICTS = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("", "")}


def section(runs: Sequence[Run]) -> str:
    """The examples of all runs, '' if there are none."""
    several = len(runs) > 1
    cards = [_card(example, run.name if several else "") for run in runs for example in run.examples]
    if not cards:
        return ""
    note = _note([example for run in runs for example in run.examples])
    return f'<h2>Examples <small>{note}</small></h2><div class="grid">{"".join(cards)}</div>'


def _note(examples: Sequence[Mapping[str, Any]]) -> str:
    """How the examples were chosen (bertjax/tasks/results.py), and what their marks mean."""
    if not any("gold" in example for example in examples):
        return ""
    if all(example["right"] is None for example in examples):
        return "on dev: the largest errors, then some of all"
    note = "on dev: the worst mistakes, then some that are right"
    if any("words" in example for example in examples):
        note += "; a wrong tag is struck out before the gold one"
    return note


def _card(example: Mapping[str, Any], run: str) -> str:
    kind, mark = VERDICTS[example.get("right")]
    mark = f"<em>{mark}</em> " if mark else ""
    parts = [f"<small>{_text(run)}</small>" if run else ""]
    if "words" in example:
        words = " ".join(_word(*word) for word in example["words"])
        parts.append(f'<p class="words">{mark}{words}</p>')
    elif "gold" in example:
        answers = f"predicted <b>{_text(example['predicted'])}</b>"
        if not example["right"] or example["predicted"] != example["gold"]:
            answers += f", gold <b>{_text(example['gold'])}</b>"
        parts += [f'<p class="verdict">{mark}{answers}</p>', *(f"<p>{_text(text)}</p>" for text in example["texts"])]
    else:
        masked = _text(example.get("text", "")).replace("[MASK]", "<mark>[MASK]</mark>")
        parts.append(f"<p>{masked}</p>")
    parts.append(_bars(example.get("predictions", ())))
    return f'<div class="example {kind}">{"".join(parts)}</div>'


def _bars(predictions: Sequence[Sequence[Any]]) -> str:
    """Names with a bar as long as their probability."""
    items = "".join(
        f'<li><span style="width:{100 * float(probability):.1f}%"></span>'
        f"<b>{_text(name)}</b> {100 * float(probability):.1f} %</li>"
        for name, probability in predictions
    )
    return f"<ol>{items}</ol>" if items else ""


def _word(word: str, gold: str, predicted: str) -> str:
    """A word with its tag where there is one; a wrong tag is struck out before the gold one."""
    if gold == predicted:
        tag = "" if gold == "O" else f"<i>{_text(gold)}</i>"
        return f"<span>{_text(word)}{tag}</span>"
    return f"<span>{_text(word)}<i class=miss><s>{_text(predicted)}</s> {_text(gold)}</i></span>"


def _text(value: Any) -> str:
    return html.escape(str(value))
