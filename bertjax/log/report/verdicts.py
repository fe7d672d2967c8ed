"""What the numbers of a run say, in a few words above the tables.

In: a run. Out: sentences, each only where the numbers for it are there and support it.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.log.report.runs import Run

CERTAIN = 3.0  # standard errors from which on a difference counts
LEVEL = 0.01  # of the loss: a change that is surely less is called none
FEWEST = 8  # records of a quarter that is compared

# The flags of tasks/metrics.py; what a constant answer is depends on the head.
ONE_CLASS_ONLY, CONSTANT = "one class only", "constant"


def verdicts(run: Run) -> list[str]:
    """Sentences about the objectives, a fine-tuned head, and the course of the run."""
    numbers, result = run.result.get("numbers") or {}, run.result
    said = _words(numbers), _pairs(numbers), _constant(result), _majority(result), _best_step(result), _course(run)
    return [*filter(None, said)]


def _words(numbers: Mapping[str, float]) -> str:
    if not {"mlm_loss", "unigram_entropy"} <= numbers.keys():
        return ""
    gain = numbers["unigram_entropy"] - numbers["mlm_loss"]
    if abs(gain) < 0.005:
        return "Held-out tokens: predicted as well as from their frequencies alone"
    kind = "better" if gain > 0 else "worse"
    return f"Held-out tokens: predicted {kind} than from their frequencies alone, by {abs(gain):.2f} nats a token"


def _pairs(numbers: Mapping[str, float]) -> str:
    if not {"nsp_accuracy", "nsp_error", "nsp_chance"} <= numbers.keys():
        return ""
    accuracy, chance = numbers["nsp_accuracy"], numbers["nsp_chance"]
    return _against("NSP", accuracy, chance, numbers["nsp_error"], "the best constant guess")


def _against(name: str, value: float, guess: float, error: float, what: str) -> str:
    """'NSP: 71.0 %, 5.8 standard errors above the best constant guess (65.2 %)'."""
    shown = f"{name}: {100 * value:.1f} %, "
    if not error:
        return f"{shown}{what} gives {100 * guess:.1f} %"
    distance = (value - guess) / error
    if abs(distance) < CERTAIN:
        return f"{shown}which cannot be told from {what} ({100 * guess:.1f} %; {distance:+.1f} standard errors)"
    kind = "above" if distance > 0 else "below"
    return f"{shown}{abs(distance):.1f} standard errors {kind} {what} ({100 * guess:.1f} %)"


def _constant(result: Mapping[str, Any]) -> str:
    flags, details = result.get("flags") or (), result.get("details") or {}
    if CONSTANT in flags:
        return "Predictions or gold values are all the same: no correlation is defined"
    if ONE_CLASS_ONLY not in flags:
        return ""
    if "by_type" in details:
        return "No entity is predicted"
    if "exact" in details:
        return "No question is answered"
    if "by_class" in details and not {"confusion", "confused"} & details.keys():
        return "Every row gets the same labels"
    return "One class only: the head predicts nothing else"


def _majority(result: Mapping[str, Any]) -> str:
    scores, rows = result.get("scores") or {}, (result.get("rows") or {}).get("dev")
    if not rows or not {"accuracy", "majority"} <= scores.keys():
        return ""
    value = scores["accuracy"]
    error = math.sqrt(value * (1 - value) / rows)
    return _against("Accuracy", value, scores["majority"], error, "always the most frequent class")


def _best_step(result: Mapping[str, Any]) -> str:
    """The score of the last evaluation beside those before it."""
    values = [value for _, value in result.get("history") or () if isinstance(value, float | int)]
    if len(values) < 2:
        return ""
    metric, best = result.get("metric", "score"), result.get("best_step")
    if values[-1] > max(values[:-1]):
        return f"The {metric} on dev was best at the last evaluation"
    return f"The {metric} on dev did not improve after step {best:,}" if best else ""


def _course(run: Run) -> str:
    """Whether the masked-token loss in training still fell: its last quarter of records beside the
    quarter before it, both of the last phase, whose rows are of one length.
    """
    trained = [record for record in run.records if "loss" in record]
    if trained and trained[-1]["loss"] is None:
        return f"The training loss is not finite: {trained[-1].get('skipped') or 0:,.0f} steps were skipped"
    first = _last_phase(run.settings.get("phases", ""))
    losses = [r["mlm_loss"] for r in run.records if r["step"] > first and r.get("mlm_loss") is not None]
    count = len(losses) // 4
    if count < FEWEST:
        return ""
    before, last = losses[-2 * count : -count], losses[-count:]
    old, new = statistics.fmean(before), statistics.fmean(last)
    error = math.sqrt((statistics.variance(before) + statistics.variance(last)) / count)
    shown = f"mean {new:.3f} in the last quarter of the records, {old:.3f} in the quarter before"
    if abs(old - new) + CERTAIN * error < LEVEL * old:
        return f"The training loss has levelled off ({shown})"
    if abs(old - new) < CERTAIN * error:
        return ""
    return f"The training loss was still {'falling' if old > new else 'rising'} ({shown})"


def _last_phase(phases: str) -> int:
    """The step that the last phase begins after, 0 if that is not known."""
    try:
        found: Sequence[Sequence[int]] = json.loads(phases)
        return sum(phase[0] for phase in found[:-1])
    except (ValueError, TypeError, IndexError):
        return 0
