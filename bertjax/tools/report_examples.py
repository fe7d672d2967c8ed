"""The report's section of examples: what a model fills in, or predicts beside the gold.

In: examples.json of each run, one of
    pre-training  {"text": with [MASK], "predictions": [[token, probability], ...]}
    fine-tuning   the dictionaries of bertjax/tasks/examples.py
Out: HTML. Everything that comes from data is escaped.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

VERDICTS = {True: ("right", "✓ right"), False: ("wrong", "✗ wrong"), None: ("", "")}


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """The examples of all runs, '' if there are none."""
    several = len(runs) > 1
    cards = [_card(example, run["name"] if several else "")
             for run in runs for example in run["examples"]]
    if not cards:
        return ""
    predicted = any("gold" in example for run in runs for example in run["examples"])
    note = ("" if not predicted else " <small>on dev: those that are wrong and that the model was "
            "surest of, then some that are right; of numbers the worst, then some of all</small>")
    return f'<h2>Examples{note}</h2><div class="grid">{"".join(cards)}</div>'


def _card(example: Mapping[str, Any], run: str) -> str:
    kind, verdict = VERDICTS[example.get("right")]
    parts = [f"<small>{_text(run)}</small>" if run else ""]
    if "words" in example:
        words = " ".join(_word(*word) for word in example["words"])
        parts += [f'<p class="verdict">{verdict}</p>' if verdict else "",
                  f'<p class="words">{words}</p>']
    elif "gold" in example:
        answers = (f"gold <b>{_text(example['gold'])}</b>" if example.get("right") else
                   f"predicted <b>{_text(example['predicted'])}</b>, "
                   f"gold <b>{_text(example['gold'])}</b>")
        parts += [f'<p class="verdict">{verdict} <span>{answers}</span></p>',
                  *(f"<p>{_text(text)}</p>" for text in example["texts"])]
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
        for name, probability in predictions)
    return f"<ol>{items}</ol>" if items else ""


def _word(word: str, gold: str, predicted: str) -> str:
    """A word with its tag where there is one; a wrong tag is struck out before the gold one."""
    if gold == predicted:
        tag = "" if gold == "O" else f"<i>{_text(gold)}</i>"
        return f"<span>{_text(word)}{tag}</span>"
    return f"<span>{_text(word)}<i class=miss><s>{_text(predicted)}</s> {_text(gold)}</i></span>"


def _text(value: Any) -> str:
    return html.escape(str(value))
