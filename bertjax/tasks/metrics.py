"""The scores that tasks report: from gold and predicted values to named numbers.

In: sequences or numpy arrays of labels, values or tags, one entry an example (for tags one list a sentence). Out:
`Scores`, floats in [0, 1] (correlations in [-1, 1]) and the flags that a reader must see beside them. A number that is
undefined is 0.0 with a flag, never NaN, so that means over seeds and the choice of the best checkpoint stay meaningful.

The definitions are those of scikit-learn, scipy and seqeval 1.2.2 (which follows conlleval.pl), none of which is needed
at run time.
"""

import math
import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

CONSTANT = "constant"  # a correlation with constant predictions or gold is undefined: 0.0
NOT_FINITE = "non-finite predictions"  # no correlation or error is defined: 0.0
OVERFLOW = "mse overflows"  # it is above the largest float, which stands for it
CALIBRATION_BINS = 10
MOST_IN_MATRIX = 24  # classes of a confusion matrix; of more only the most confused pairs are kept
MOST_PAIRS = 30
MOST_POINTS = 500  # of gold and predicted numbers that are kept
NO_ENTITY = "no entity"
ONE_CLASS_ONLY = "one class only"  # every prediction is the same class: a failed run, usually


@dataclass(frozen=True)
class Scores:
    """Named numbers of one evaluation; `flags` says what makes them doubtful."""

    values: Mapping[str, float]
    flags: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def of_finite(scores: Scores, outputs: Sequence[np.ndarray]) -> Scores:
    """The scores of `outputs`, each 0.0, flagged and without tables where some of these are no numbers: an argmax takes
    NaN for the first class, which may be the most frequent one."""
    if all(np.isfinite(output).all() for output in outputs):
        return scores
    values = {name: value if name == "majority" else 0.0 for name, value in scores.values.items()}  # of the gold alone
    details = {name: value for name, value in scores.details.items() if isinstance(value, int | float)}
    return Scores(values, tuple(dict.fromkeys((*scores.flags, NOT_FINITE))), details)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [..., C] of logits [..., C]."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def is_better(value: float, best: float | None) -> bool:
    """True if `value` beats `best` (higher is better). NaN and infinities never win."""
    return math.isfinite(value) and (best is None or not math.isfinite(best) or value > best)


def _pair(gold, predicted, dtype=None) -> tuple[np.ndarray, np.ndarray]:
    gold, predicted = np.asarray(gold, dtype), np.asarray(predicted, dtype)
    if gold.shape != predicted.shape:
        raise ValueError(f"{gold.shape} gold values but {predicted.shape} predictions")
    if gold.size == 0:
        raise ValueError("no examples to score")
    return gold, predicted


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else 0.0


def _is_constant(values: np.ndarray) -> bool:
    return bool(np.all(values == values[0]))


def _one_class(predicted: np.ndarray) -> tuple[str, ...]:
    return (ONE_CLASS_ONLY,) if len(predicted) > 1 and _is_constant(predicted) else ()


# --- classes


def precision_recall_f1(hits: int, predicted: int, gold: int) -> tuple[float, float, float]:
    """Precision, recall and F1 from counts; each is 0.0 where its denominator is."""
    return _ratio(hits, predicted), _ratio(hits, gold), _ratio(2 * hits, predicted + gold)


def accuracy(gold, predicted) -> float:
    """Share of equal entries."""
    gold, predicted = _pair(gold, predicted)
    return float(np.mean(gold == predicted))


def binary_f1(gold, predicted, positive: int = 1) -> float:
    """F1 of class `positive`; 0.0 if it is neither predicted nor present."""
    gold, predicted = (values == positive for values in _pair(gold, predicted))
    return precision_recall_f1((gold & predicted).sum(), predicted.sum(), gold.sum())[2]


def _macro_f1(*counts: np.ndarray) -> float:
    """Mean over classes, from the hits, predictions and gold of each."""
    return float(np.mean([precision_recall_f1(*row)[2] for row in zip(*counts, strict=True)]))


def _matthews(hits: np.ndarray, guessed: np.ndarray, present: np.ndarray) -> float:
    """Matthews correlation for any number of classes (Gorodkin 2004); 0.0 for a constant side."""
    hits, guessed, present = (counts.astype(np.float64) for counts in (hits, guessed, present))
    n = present.sum()
    spread = (n * n - guessed @ guessed) * (n * n - present @ present)
    return _ratio(n * hits.sum() - guessed @ present, math.sqrt(spread))


def classification_scores(gold, predicted) -> Scores:
    """Accuracy, Matthews, macro F1 (over the classes that occur) and, of two classes 0 and 1, F1 of class 1.

    `majority` is the accuracy of always answering the most frequent gold class.
    """
    gold, predicted = _pair(gold, predicted)
    if np.any(np.asarray(gold) < 0):
        raise ValueError("this split has no labels (label < 0): predict on it, do not score it")
    classes, both = np.unique([gold, predicted], return_inverse=True)
    first, second = both.reshape(2, -1)
    counts = [np.bincount(side, minlength=len(classes)) for side in (first[first == second], second, first)]
    values = {
        "accuracy": accuracy(gold, predicted),
        "matthews": _matthews(*counts),
        "macro_f1": _macro_f1(*counts),
        "majority": float(counts[2].max() / len(gold)),
    }
    if max(gold.max(), predicted.max()) <= 1:
        values["f1"] = binary_f1(gold, predicted)
    return Scores(values, _one_class(predicted))


def multilabel_scores(gold, predicted) -> Scores:
    """Micro and macro F1 and exact-match accuracy of two bool arrays [N, C]."""
    gold, predicted = _pair(gold, predicted, bool)
    counts = (gold & predicted).sum(0), predicted.sum(0), gold.sum(0)
    values = {
        "micro_f1": precision_recall_f1(*(count.sum() for count in counts))[2],
        "macro_f1": _macro_f1(*counts),
        "accuracy": float(np.mean((gold == predicted).all(1))),
    }
    return Scores(values, _one_class(predicted))


def by_class(gold, predicted, labels: Sequence[str]) -> dict[str, object]:
    """For `details`: (precision, recall, F1, support) of each class, and what is taken for what.

    `gold` and `predicted` are class indices [N], or bool [N, C] where several hold, which are not taken for each other.
    """
    gold, predicted = _pair(gold, predicted)
    taken = {}
    if gold.ndim == 2:
        counts = (gold & predicted).sum(0), predicted.sum(0), gold.sum(0)
    else:
        sides = gold[gold == predicted], predicted, gold
        counts = [np.bincount(side, minlength=len(labels)) for side in sides]
        taken = _confusions(Counter(zip(gold.tolist(), predicted.tolist(), strict=True)), labels)
    table = {
        name: (*precision_recall_f1(*row), row[2])
        for name, *row in zip(labels, *(count.tolist() for count in counts), strict=True)
    }
    return {"by_class": table, **taken}


def _confusions(taken: Mapping[tuple[int, int], int], labels: Sequence[str]) -> dict[str, object]:
    """`confusion`, the matrix, or of many classes `confused`: (gold, predicted, count) of the pairs with the most.

    taken: (place of the gold label, of the predicted one) -> count. No matrix of many classes is made: of 10,000 it
    would take a gigabyte.
    """
    places = range(len(labels))
    if len(labels) <= MOST_IN_MATRIX:
        return {"confusion": [[taken.get((g, p), 0) for p in places] for g in places]}
    wrong = sorted((-count, g, p) for (g, p), count in taken.items() if g != p)[:MOST_PAIRS]
    return {"confused": [(labels[g], labels[p], -count) for count, g, p in wrong]}


def calibration(gold, probabilities) -> dict[str, object]:
    """For `details`: how far the probability of the predicted class is from how often it is right.

    The expected calibration error of Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3: over
    CALIBRATION_BINS bins of equal width, each with its lower edge left out.

    Args:
      gold: class indices [N].
      probabilities: [N, C], rows that add up to 1.

    Returns:
      `calibration`: {"ece": 0 to 1, "bins": [[rows, mean probability, accuracy], ...]} from the lowest bin on; nothing
        if a probability is not finite.
    """
    probabilities = np.asarray(probabilities, np.float64)
    gold, predicted = _pair(gold, probabilities.argmax(1))
    if not np.isfinite(probabilities).all():
        return {}
    sure, right = probabilities.max(1), gold == predicted
    places = np.clip(np.ceil(sure * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    rows, error = [], 0.0
    for number in range(CALIBRATION_BINS):
        inside = places == number
        count = int(inside.sum())
        confidence, share = _ratio(sure[inside].sum(), count), _ratio(right[inside].sum(), count)
        error += count / len(gold) * abs(share - confidence)
        rows.append([count, confidence, share])
    return {"calibration": {"ece": error, "bins": rows}}


# --- numbers


def pearson(gold, predicted) -> float:
    """Linear correlation; 0.0 where either side is constant or holds a non-finite value."""
    gold, predicted = _pair(gold, predicted, np.float64)
    finite = np.isfinite(gold).all() and np.isfinite(predicted).all()
    if not finite or _is_constant(gold) or _is_constant(predicted):
        return 0.0
    gold, predicted = _centred(gold), _centred(predicted)
    norm = math.sqrt((gold @ gold) * (predicted @ predicted))
    return float(np.clip(_ratio(gold @ predicted, norm), -1.0, 1.0))


def _centred(values: np.ndarray) -> np.ndarray:
    """Centred at 0 and scaled to at most 1, so that values near 1e-200 or 1e308 neither under- nor overflow."""
    if np.abs(values).max() > 1e150:  # their sum might
        values = values * 2.0**-600
    values = values - values.mean()
    return values / (np.abs(values).max() or 1.0)


def ranks(values) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]


def regression_scores(gold, predicted) -> Scores:
    """Pearson, Spearman, their mean and the mean squared error; flagged where undefined."""
    gold, predicted = _pair(gold, predicted, np.float64)
    if np.isnan(gold).any():
        raise ValueError("this split has no labels (NaN targets): predict on it, do not score it")
    finite = np.isfinite(gold).all() and np.isfinite(predicted).all()
    with np.errstate(over="ignore"):
        mse = float(np.mean((gold - predicted) ** 2)) if finite else 0.0
    flags = {CONSTANT: _is_constant(gold) or _is_constant(predicted), NOT_FINITE: not finite, OVERFLOW: math.isinf(mse)}
    linear, by_rank = pearson(gold, predicted), pearson(ranks(gold), ranks(predicted)) if finite else 0.0
    values = {"pearson": linear, "spearman": by_rank, "pearson_spearman": (linear + by_rank) / 2}
    values["mse"] = min(mse, sys.float_info.max)
    kept = np.linspace(0, len(gold) - 1, min(len(gold), MOST_POINTS)).astype(int) if finite else []
    details = {"gold_and_predicted": [[float(gold[i]), float(predicted[i])] for i in kept]}
    return Scores(values, tuple(flag for flag, holds in flags.items() if holds), details)


# --- entities -------------------------------------------------------------------------------------

Entity = tuple[str, int, int]  # type, first word, one past the last word


def split_tag(tag: str) -> tuple[str, str]:
    """'B-PER' -> ('B', 'PER'); a bare prefix has the type '_', as in seqeval. BILOU's L and U are E and S."""
    if not tag or tag[0] not in "OBIESLU" or tag[1:2] not in ("", "-"):
        raise ValueError(f"not an entity tag: {tag!r}; expected O or one of B- I- E- S- (L- U-) and a type")
    prefix = {"L": "E", "U": "S"}.get(tag[0], tag[0])
    return prefix, (tag[2:] or "_") if prefix != "O" else "_"


def lenient_entities(tags: Sequence[str]) -> list[Entity]:
    """Entities by conlleval's rules: any tag inside may open an entity (I-X after O does).

    Covers IOB1, IOB2 and BIOES in one rule set, so malformed sequences still yield entities.
    """
    entities, start, previous = [], None, ("O", "_")
    for i, current in enumerate([*map(split_tag, tags), ("O", "_")]):
        (before, before_kind), (prefix, kind) = previous, current
        # B and S open, E and S close, and a change of type does both. E and I after O open as well.
        boundary = before in "ESO" or prefix in "BSO" or before_kind != kind
        if start is not None and boundary:
            entities.append((before_kind, start, i))
            start = None
        if prefix != "O" and boundary:
            start = i
        previous = current
    return entities


SCHEMES = ("IOB1", "IOB2", "BIOES")


def _opens(scheme: str, before: tuple[str, str], current: tuple[str, str]) -> bool:
    """Whether a tag may begin an entity after another one (seqeval 1.2.2, scheme.py)."""
    same = before[1] == current[1]
    if scheme != "IOB1":
        return current[0] in "BS"
    if current[0] == "B":  # only between two entities of one type
        return before[0] in "BI" and same
    return current[0] == "I" and not (before[0] == "I" and same)


def strict_entities(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Only the entities that are well formed in `scheme` (IOB1, IOB2, BIOES).

    Raises ValueError for a prefix that the scheme does not know.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown tagging scheme {scheme!r}; one of {', '.join(SCHEMES)}")
    allowed = "OBIES" if scheme == "BIOES" else "OBI"
    outside = ("O", "_")
    pairs = [*map(split_tag, tags), outside]
    for tag, (prefix, _) in zip(tags, pairs, strict=False):
        if prefix not in allowed:
            raise ValueError(f"tag {tag!r} is not part of {scheme} (prefixes {' '.join(allowed)})")
    entities, i, before = [], 0, outside
    while i < len(pairs):
        if not _opens(scheme, before, pairs[i]):
            before, i = pairs[i], i + 1
            continue
        end, kind = i + 1, pairs[i][1]
        while pairs[end - 1][0] in "BI" and pairs[end][0] in "IE" and pairs[end][1] == kind:
            end += 1
        last, after = pairs[end - 1], pairs[end]
        if scheme == "BIOES":
            closed = last[0] in "ES"
        else:  # IOB1: a B is wrong after an entity of another type that is itself only a B
            closed = scheme == "IOB2" or last[0] + after[0] != "BB" or after[1] == kind
        if closed:
            entities.append((kind, i, end))
        before, i = last, end
    return entities


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: str = "IOB2", strict: bool = False
) -> Scores:
    """Micro-averaged precision, recall and F1 over whole entities, and token accuracy.

    `gold` and `predicted` hold one tag list a sentence, of equal lengths. With strict=False (the default, conlleval's
    and seqeval's) the scheme plays no part. `details` names the mode and has (precision, recall, F1, support) by type,
    and which type is taken for which: of entities with the same first and last word, and after the types those of one
    side alone.
    """
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} gold sentences but {len(predicted)} predicted")
    extract = partial(strict_entities, scheme=scheme) if strict else lenient_entities
    hits, guessed, present = (Counter() for _ in range(3))  # entities by type
    taken: Counter[tuple[str | None, str | None]] = Counter()  # (gold, predicted) type of a stretch of words
    tokens = correct = 0
    for number, (gold_tags, predicted_tags) in enumerate(zip(gold, predicted, strict=True)):
        if len(gold_tags) != len(predicted_tags):
            raise ValueError(f"sentence {number}: {len(gold_tags)} gold tags but {len(predicted_tags)} predicted")
        tokens += len(gold_tags)
        correct += sum(map(operator.eq, gold_tags, predicted_tags))
        right, found = set(extract(gold_tags)), set(extract(predicted_tags))
        for count, entities in ((hits, right & found), (guessed, found), (present, right)):
            count.update(kind for kind, _, _ in entities)
        golds, guesses = ({tuple(place): kind for kind, *place in entities} for entities in (right, found))
        taken.update((golds.get(place), guesses.get(place)) for place in golds | guesses)
    if not tokens:
        raise ValueError("no tags to score")
    precision, recall, f1 = precision_recall_f1(hits.total(), guessed.total(), present.total())
    values = {"precision": precision, "recall": recall, "f1": f1, "token_accuracy": correct / tokens}
    by_type = {
        kind: (*precision_recall_f1(hits[kind], guessed[kind], present[kind]), present[kind])
        for kind in sorted(guessed | present)
    }
    place = {kind: number for number, kind in enumerate([*by_type, None])}
    pairs = {(place[gold], place[guess]): count for (gold, guess), count in taken.items()}
    details = {"mode": f"strict {scheme}" if strict else "default (conlleval)", "by_type": by_type}
    details |= _confusions(pairs, [*by_type, NO_ENTITY])
    flags = (ONE_CLASS_ONLY,) if present and not guessed else ()
    return Scores(values, flags, details)
