"""What a reader is shown of a fine-tuned model: examples, the words that mattered in them, a map of the rows.

In: a FineTuner, its weights, a split with gold. Out: examples.json and map.json, from which the report is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.tasks.task import Example, Outputs, Rows, Split, Task, cut
from bertjax.tasks.text_task import TextTask

if TYPE_CHECKING:
    from bertjax.tasks.finetune import FineTuner

MOST_PIECES = 24  # of an example, each of which is left out once
MOST_ON_MAP = 400
# A letter of a script without blanks between its words is a piece of its own.
_WORD = re.compile(r"\s*(?:[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+)")


def on_map(rows: int) -> dict[int, np.ndarray]:
    """The rows that the map shows, spread evenly over the file, without their vectors yet."""
    return dict.fromkeys(np.linspace(0, rows - 1, min(rows, MOST_ON_MAP)).astype(int).tolist(), np.empty(0))


def shown(
    tuner: FineTuner, params: Any, split: Split, rows: Rows, outputs: Outputs, vectors: Mapping[int, np.ndarray]
) -> dict[str, Any]:
    """{file: content} of examples.json and, where `vectors` holds those of the rows of `on_map`, map.json."""
    task, made = tuner.task, examples_of(tuner.task, split, rows, outputs)
    chosen = choose(made)
    if isinstance(task, TextTask):
        wrong = [number for number, example in enumerate(made) if not example["right"] and example in chosen]
        for number, changes in zip(wrong, mattered(tuner, params, split, wrong, outputs), strict=True):
            made[number]["mattered"] = changes
    files: dict[str, Any] = {"examples.json": chosen}
    if found := map_of(vectors, made):
        files["map.json"] = found
    return files


def examples_of(task: Task, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
    """One example a record of a split with gold, in file order."""
    made = task.examples(split, rows, outputs)
    for example in made:
        example["texts"] = [cut(text) for text in example["texts"]]
        # JSON has no NaN, and the end of a run whose weights became NaN is not a place to fail.
        example["score"] = float(np.nan_to_num(example["score"]))
        for likely in example.get("predictions", ()):
            likely[1] = float(np.nan_to_num(likely[1]))
    return made


def choose(examples: Sequence[Example], count: int = 6) -> list[Example]:
    """At most `count` wrong ones, those that the model was surest of, then as many right ones.

    Right ones are spread evenly over the file. Of numbers, the worst and a sample of all.
    """
    wrong = sorted([e for e in examples if not e["right"]], key=lambda e: -e["score"])[:count]
    right = [e for e in examples if e["right"]] or [e for e in examples if e["right"] is None and e not in wrong]
    places = np.linspace(0, len(right) - 1, min(count, len(right))).round().astype(int)
    return [*wrong, *(right[place] for place in places)]


def mattered(
    tuner: FineTuner, params: Any, split: Split, numbers: Sequence[int], outputs: Outputs
) -> list[list[list[list[float]]]]:
    """How much each piece of the texts of some records speaks for what is predicted, by leaving it out.

    A piece is a word, or a few where there are many; only what an example shows of a text is parted.

    Args:
      numbers, outputs: of the records, and what the model gives for every record.

    Returns:
      of each record, of each text [[end, change], ...]: the character that the piece ends before, and by how much the
      log odds of the prediction (of a regression the number) fall without it.
    """
    task, ends, shorter = tuner.task, [], []
    for record in (split.records[number] for number in numbers):
        texts = {name: text for name in ("text_a", "text_b") if (text := getattr(record, name)) is not None}
        ends.append(piece_ends([cut(text).removesuffix("…") for text in texts.values()]))
        for (name, text), stops in zip(texts.items(), ends[-1], strict=True):
            for begin, end in zip([0, *stops], stops, strict=False):
                shorter.append(dataclasses.replace(record, label=None, **{name: text[:begin] + text[end:]}))
    length = tuner.settings.task.max_length
    rows = task.features(Split(split.name, shorter, False, ""), tuner.tokenizer, length, False) if shorter else []
    without, found = iter(tuner.predict(params, rows)), []
    for number, stops_of in zip(numbers, ends, strict=True):
        logits = [outputs[number], *itertools.islice(without, sum(map(len, stops_of)))]
        logits = np.asarray(logits, np.float64).reshape(len(logits), -1)
        whole, *rest = task.kind_of_head.lean(logits, logits[0])
        changes = iter(np.nan_to_num(whole - np.array(rest)).round(4).tolist())
        found.append([[[end, next(changes)] for end in stops] for stops in stops_of])
    return found


def piece_ends(texts: Sequence[str]) -> list[list[int]]:
    """Where the pieces of each text end: words, in at most about MOST_PIECES equal groups over all texts."""
    words = [[match.end() for match in _WORD.finditer(text)] for text in texts]
    size = -(-sum(map(len, words)) // MOST_PIECES) or 1
    return [sorted({*stops[size - 1 :: size], *stops[-1:]}) for stops in words]


def map_of(vectors: Mapping[int, np.ndarray], examples: Sequence[Example]) -> dict[str, Any]:
    """The first two principal components of the vectors, {} if there are none.

    Returns:
      `share`: of the variance that both have; `points`: [x, y, gold, predicted, right, text] of each row.
    """
    if len(vectors) < 3:
        return {}
    stacked = np.array(list(vectors.values()), np.float64)
    centred = stacked - stacked.mean(0)
    if not np.isfinite(centred).all() or not centred.any():
        return {}
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * np.sign(axes[:2].sum(1, keepdims=True) + 1e-30)  # else either sign
    points = []
    for place, (x, y) in zip(vectors, (centred @ axes.T).tolist(), strict=True):
        seen = examples[place]
        text = cut(" | ".join(seen["texts"]), 100)
        points.append([float(f"{x:.4g}"), float(f"{y:.4g}"), *(seen[k] for k in ("gold", "predicted", "right")), text])
    return {"share": float((sizes[:2] ** 2).sum() / (sizes**2).sum()), "points": points}
