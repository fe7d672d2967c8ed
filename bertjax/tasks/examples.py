"""What a reader is shown of a task's data and predictions: label shares, examples right and wrong.

In: the records of a split with gold and the model's outputs. Out: plain dictionaries for
examples.json, of bounded number and size, which the report shows:

    texts       the input, one string a part, long ones cut
    gold, predicted     as text
    right       true, false, or null where there is no such thing (a number)
    score       how sure the model was, or how far off a number is: what the choice goes by
    predictions [name, probability] of the likeliest answers, the best first
    words       tagging: [word, gold tag, predicted tag]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertjax.tasks import squad_score
from bertjax.tasks.objective import class_counts
from bertjax.tasks.task import Features, Split

MAX_LETTERS = 300  # of a text
MAX_WORDS = 60  # of a tagged sentence
RIVALS = 3  # answers with their probability
OUTSIDE = "O"

Example = dict[str, Any]


def label_shares(task: Any, features: Sequence[Features]) -> str:
    """'not_equivalent 32 %, equivalent 68 %' of the training rows; names alone where rows have
    several; the most frequent ones where there are many."""
    if task.head not in ("classification", "tagging"):
        return ", ".join(task.labels)
    counts = np.bincount(class_counts(features, task.head), minlength=len(task.labels))
    order = range(len(counts)) if len(counts) <= 5 else np.argsort(-counts, kind="stable")[:5]
    shares = [f"{task.labels[i]} {100 * counts[i] / counts.sum():.0f} %" for i in order]
    more = len(counts) - len(shares)
    return ", ".join(shares) + (f" and {more} more" if more else "")


def examples_of(task: Any, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> list[Example]:
    """One example a record of a split with gold, in file order."""
    made = _MAKERS[task.head](task, split, features, outputs)
    for example in made:
        example["texts"] = [_cut(text) for text in example["texts"]]
        # JSON has no NaN, and the end of a run whose weights became NaN is no place to fail.
        example["score"] = float(np.nan_to_num(example["score"]))
        for likely in example.get("predictions", ()):
            likely[1] = float(np.nan_to_num(likely[1]))
    return made


def choose(examples: Sequence[Example], count: int = 6) -> list[Example]:
    """At most `count` wrong ones, those that the model was surest of, then as many right ones.

    Right ones are spread evenly over the file. Of numbers, the worst and a sample of all.
    """
    numbers = [e for e in examples if e["right"] is None]
    wrong = sorted([e for e in examples if not e["right"]], key=lambda e: -e["score"])[:count]
    right = [e for e in examples if e["right"]] or [e for e in numbers if e not in wrong]
    places = np.linspace(0, len(right) - 1, min(count, len(right))).round().astype(int)
    return [*wrong, *(right[place] for place in places)]


def _cut(text: str, limit: int = MAX_LETTERS) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _around(passage: str, answer: str) -> str:
    """The part of a passage that an answer stands in."""
    begin = max(0, passage.find(answer) - (MAX_LETTERS - len(answer)) // 2 if answer else 0)
    return "…" * (begin > 0) + passage[begin:].lstrip()


def _texts(record: Any) -> list[str]:
    return [text for text in (record.text_a, record.text_b) if text is not None]


def _of_labels(task: Any, split: Split, features: Any, outputs: Any) -> list[Example]:
    made = []
    for record, choice, logits in zip(split.records, task.predict(outputs), outputs, strict=True):
        shares = task.probabilities(np.asarray(logits, np.float64))
        predicted, gold = task.readable(choice), record.label
        if task.head == "multilabel":
            right, sure = set(predicted) == set(gold), float(np.abs(shares - 0.5).min()) * 2
            predicted, gold = (", ".join(names) or "none" for names in (predicted, gold))
        else:
            right, sure = predicted == gold, float(shares.max())
        made.append(
            {
                "texts": _texts(record),
                "gold": gold,
                "predicted": predicted,
                "right": right,
                "score": sure,
                "predictions": _likeliest(task.labels, shares),
            }
        )
    return made


def _of_values(task: Any, split: Split, features: Any, outputs: Any) -> list[Example]:
    return [
        {
            "texts": _texts(record),
            "gold": f"{record.label:.2f}",
            "predicted": f"{value:.2f}",
            "right": None,
            "score": abs(float(value) - record.label),
        }
        for record, value in zip(split.records, task.predict(outputs), strict=True)
    ]


def _of_tags(task: Any, split: Split, features: Any, outputs: Any) -> list[Example]:
    made = []
    for sentence, tags in zip(split.records, task.predict(split, features, outputs), strict=True):
        words = list(zip(sentence.words, sentence.tags, tags, strict=True))[:MAX_WORDS]
        if all(gold == predicted == OUTSIDE for _, gold, predicted in words):
            continue  # nothing to see
        misses = sum(gold != predicted for _, gold, predicted in words)
        made.append(
            {
                "texts": [],
                "gold": "",
                "predicted": "",
                "right": not misses,
                "score": float(misses),
                "words": [list(word) for word in words],
            }
        )
    return made


def _of_spans(task: Any, split: Split, features: Any, outputs: Any) -> list[Example]:
    found = task.answers(split, features, outputs)
    decided = task.decided(found)
    made = []
    for question in split.records:
        predicted, rivals = decided[question.id], found.n_best[question.id]
        golds = list(dict.fromkeys(text for text, _ in question.answers)) or [""]
        made.append(
            {
                "texts": [question.question, _around(question.context, golds[0] or predicted)],
                "gold": " / ".join(_cut(text or "no answer", 80) for text in golds[:3]),
                "predicted": _cut(predicted or "no answer", 80),
                "right": any(squad_score.exact(gold, predicted) for gold in golds),
                "score": max((rival["probability"] for rival in rivals if rival["text"] == predicted), default=0.0),
                "predictions": [
                    [_cut(rival["text"] or "no answer", 80), rival["probability"]] for rival in rivals[:RIVALS]
                ],
            }
        )
    return made


def _of_choices(task: Any, split: Split, features: Any, outputs: Any) -> list[Example]:
    made = []
    for record, logits in zip(split.records, outputs, strict=True):
        logits = np.asarray(logits, np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = int(shares.argmax())
        made.append(
            {
                "texts": [f"{record.context} {record.start}".strip()],
                "gold": _cut(record.endings[record.label], 160),
                "predicted": _cut(record.endings[best], 160),
                "right": best == record.label,
                "score": float(shares.max()),
                "predictions": _likeliest([_cut(e, 160) for e in record.endings], shares, len(shares)),
            }
        )
    return made


def _likeliest(names: Sequence[str], shares: np.ndarray, count: int = RIVALS) -> list[list[Any]]:
    order = np.argsort(-shares, kind="stable")[:count]
    return [[names[i], round(float(shares[i]), 4)] for i in order]


_MAKERS: dict[str, Callable[..., list[Example]]] = {
    "classification": _of_labels,
    "multilabel": _of_labels,
    "regression": _of_values,
    "tagging": _of_tags,
    "spans": _of_spans,
    "multiple_choice": _of_choices,
}
