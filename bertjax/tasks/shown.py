"""What a reader is shown of a task's data and predictions: label shares, examples right and wrong.

Each task makes an `Example` a record (Task.examples), plain and of bounded size, for examples.json
and the report:

    texts       the input, one string a part, long ones cut
    gold, predicted     as text
    right       true, false, or null where there is no such thing (a number)
    score       how sure the model was, or how far off a number is: what the choice goes by
    predictions [name, probability] of the likeliest answers, the best first
    words       tagging: [word, gold tag, predicted tag]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax.tasks.batches import Features
from bertjax.tasks.kinds import KINDS
from bertjax.tasks.task import Split, Task

MAX_LETTERS = 300  # of a text
MAX_WORDS = 60  # of a tagged sentence
RIVALS = 3  # answers with their probability

Example = dict[str, Any]


def label_shares(task: Task, features: Sequence[Features]) -> str:
    """'not_equivalent 32 %, equivalent 68 %' of the training rows; names alone where rows have
    several; the most frequent ones where there are many."""
    kind = KINDS[task.head]
    if not kind.class_weights:
        return ", ".join(task.labels)
    counts = np.bincount(kind.gold_classes(features), minlength=len(task.labels))
    order = range(len(counts)) if len(counts) <= 5 else np.argsort(-counts, kind="stable")[:5]
    shares = [f"{task.labels[i]} {100 * counts[i] / counts.sum():.0f} %" for i in order]
    more = len(counts) - len(shares)
    return ", ".join(shares) + (f" and {more} more" if more else "")


def examples_of(task: Task, split: Split, features: Sequence[Features], outputs: Sequence[np.ndarray]) -> list[Example]:
    """One example a record of a split with gold, in file order."""
    made = task.examples(split, features, outputs)
    for example in made:
        example["texts"] = [cut(text) for text in example["texts"]]
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


def cut(text: str, limit: int = MAX_LETTERS) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def likeliest(names: Sequence[str], shares: np.ndarray, count: int = RIVALS) -> list[list[Any]]:
    """[name, probability] of the most probable, the best first."""
    order = np.argsort(-shares, kind="stable")[:count]
    return [[names[i], round(float(shares[i]), 4)] for i in order]
