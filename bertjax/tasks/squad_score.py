"""The official SQuAD scores: predictions and gold articles in, exact match and F1 in percent out.

Source: evaluate-v1.1.py and evaluate-v2.0.py of the SQuAD site, re-implemented; every returned number agrees with
theirs to the last digit, but for the best thresholds: the score beside one is what it gives (theirs can be higher where
null odds are equal). A question is an entry of "qas" in a SQuAD file: of it, `id` and `answers` are read.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
CURVE_POINTS = 200  # of the curve that is kept
MARGIN = 0.01  # of a score: more than rounding makes of it
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(gold: str, predicted: str) -> float:
    """1.0 if both are the same after normalisation, else 0.0."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1(gold: str, predicted: str, version: str = "2.0") -> float:
    """F1 of the bags of words. Two empty sides give 1.0 in version 2.0 and 0.0 in 1.1."""
    gold_words = normalize_answer(gold).split()
    predicted_words = normalize_answer(predicted).split()
    if version == "2.0" and not (gold_words and predicted_words):
        return float(gold_words == predicted_words)
    same = sum((Counter(gold_words) & Counter(predicted_words)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted_words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def score_v1(questions: Sequence[Mapping], predictions: Mapping[str, str]) -> dict[str, float]:
    """SQuAD 1.1: the best score over the gold answers; a missing prediction counts 0.

    Returns exact, f1 (percent), total and missing (counts).
    """
    exact_sum = f1_sum = 0.0
    answered = [question for question in questions if question["id"] in predictions]
    for question in answered:
        answer = predictions[question["id"]]
        golds = [gold["text"] for gold in question["answers"]]
        exact_sum += max(exact(gold, answer) for gold in golds)
        f1_sum += max(f1(gold, answer, "1.1") for gold in golds)
    total, missing = len(questions), len(questions) - len(answered)
    return {"exact": 100.0 * exact_sum / total, "f1": 100.0 * f1_sum / total, "total": total, "missing": missing}


def score_v2(
    questions: Sequence[Mapping], predictions: Mapping[str, str], null_odds: Mapping[str, float], threshold: float
) -> dict[str, Any]:
    """SQuAD 2.0, with the best thresholds.

    `predictions` are the best non-empty spans. `null_odds` maps a question id to how likely it has no answer: a
    probability, or the null score minus the span's score. An answer whose odds are above `threshold` is taken as empty.
    A missing prediction leaves the question out, as officially.

    Returns, in percent: exact, f1, HasAns_/NoAns_ of both; best_exact, best_f1 and their *_thresh; threshold_curve,
    some [threshold, exact, f1] of every threshold from "never an answer" on; and the counts total, HasAns_total,
    NoAns_total, missing.
    """
    has_answer: dict[str, bool] = {}
    raw_exact: dict[str, float] = {}
    raw_f1: dict[str, float] = {}
    for question in questions:
        key = question["id"]
        has_answer[key] = bool(question["answers"])
        if key not in predictions:
            continue
        golds = [a["text"] for a in question["answers"] if normalize_answer(a["text"])] or [""]
        raw_exact[key] = max(exact(gold, predictions[key]) for gold in golds)
        raw_f1[key] = max(f1(gold, predictions[key]) for gold in golds)
    if not raw_exact:
        raise ValueError("none of the predictions belongs to a question of this file")
    if lacking := [key for key in raw_exact if key not in null_odds]:
        raise ValueError(f"{len(lacking)} questions without null odds, the first is {lacking[0]!r}")

    def decided(scores: Mapping[str, float]) -> dict[str, float]:
        return {k: float(not has_answer[k]) if null_odds[k] > threshold else value for k, value in scores.items()}

    result: dict[str, Any] = {}
    for name, scores in (("exact", decided(raw_exact)), ("f1", decided(raw_f1))):
        result[name] = 100.0 * sum(scores.values()) / len(scores)
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            part = [value for key, value in scores.items() if has_answer[key] is wanted]
            result[f"{kind}_total"] = len(part)
            if part:
                result[f"{kind}_{name}"] = 100.0 * sum(part) / len(part)
    result["total"] = len(raw_exact)
    result["missing"] = len(has_answer) - len(raw_exact)
    curves = [threshold_curve(scores, null_odds, has_answer) for scores in (raw_exact, raw_f1)]
    for name, curve in zip(("exact", "f1"), curves, strict=True):
        result[f"best_{name}"], result[f"best_{name}_thresh"] = _best_threshold(curve)
    thinned = sorted({round(i * (len(curves[0]) - 1) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)})
    result["threshold_curve"] = [[*curves[0][i], curves[1][i][1]] for i in thinned]
    return result


def threshold_curve(
    scores: Mapping[str, float], null_odds: Mapping[str, float], has_answer: Mapping[str, bool]
) -> list[tuple[float, float]]:
    """(odds up to which an answer is kept, score in percent) from "never an answer" on, by rising odds.

    `scores` are those of the answers. Answers of equal odds are kept all at once, since no threshold tells them apart.
    "Never" is the first number below all odds.
    """
    order = sorted(scores, key=null_odds.__getitem__)
    current = float(sum(not has_answer[key] for key in scores))
    curve = [(math.nextafter(null_odds[order[0]], -math.inf), 100.0 * current / len(scores))]
    for number, key in enumerate(order):
        current += scores[key] - (not has_answer[key])
        if number + 1 == len(order) or null_odds[order[number + 1]] > null_odds[key]:
            curve.append((null_odds[key], 100.0 * current / len(scores)))
    return curve


def _best_threshold(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Best score in percent, and the odds up to which an answer is kept to reach it, the lowest of those."""
    never, *rest = curve
    at, best = max(curve, key=lambda point: point[1])
    if best > never[1]:
        return best, at
    # Officially 0.0, which leaves every question empty if odds are probabilities. Where they are not, it is "never".
    kept_at_zero = [score for odds, score in rest if odds <= 0]
    return best, 0.0 if (kept_at_zero or [best])[-1] == best else never[0]


def apart(threshold: float, odds: Collection[float]) -> float:
    """The nearest threshold that decides these odds as this one does, MARGIN from all of them, or midway between two.

    The best threshold is the odds of a question: rounding decided that one where the model is run again.
    """
    low = max((one for one in odds if one <= threshold), default=-math.inf)
    high = min((one for one in odds if one > threshold), default=math.inf)
    middle = low + (high - low) / 2 if math.isfinite(low) else low
    found = min(max(threshold, min(low + MARGIN, middle)), max(high - MARGIN, middle))
    return found if found < high else threshold
