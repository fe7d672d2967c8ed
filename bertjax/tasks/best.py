"""The best evaluation of a fine-tuning run so far, and when to stop looking for a better one.

The history of all evaluations is kept beside the checkpoints, which do not all stay, so that a resumed run ends as the
undisturbed one.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.formats.checkpoint import CheckpointError
from bertjax.formats.files import write_whole
from bertjax.run.checkpoint import Checkpoints
from bertjax.tasks.metrics import NOT_FINITE, Scores, is_better
from bertjax.training.loop import EarlyStop


@jax.jit
def copy(tree: Any) -> Any:
    """A copy of the tree in memory of its own."""
    return jax.tree.map(jnp.copy, tree)


class Best:
    """The best evaluation so far, with its own copy of the parameters."""

    def __init__(self, patience: int, checkpoints: Checkpoints | None):
        self.patience = patience
        place = checkpoints.directory if checkpoints else None
        self._kept = place.parent / f"{place.name}.evaluations.json" if place else None
        self.params: Any = None
        self.scores: Scores | None = None
        self.value: float | None = None
        self.step = 0
        self.history: list[tuple[int, float]] = []

    def keep(self, step: int, scores: Scores, value: float, params: Any) -> None:
        self.step, self.scores, self.value = step, scores, value
        self.params = copy(params)  # the trainer donates its own

    def load_history(self, until: int) -> None:
        """The evaluations of the part of the run that is not repeated, up to step `until`."""
        if self._kept is None or not self._kept.exists():
            return
        try:
            found = json.loads(self._kept.read_text())
            self.history = [(int(step), float(value)) for step, value in found if step <= until]
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self._kept} cannot be read ({error}), so early stopping would begin to count "
                "again: put a copy of the file back, or delete it to accept that"
            ) from None

    def update(self, step: int, scores: Scores, value: float, params: Any) -> Mapping[str, float]:
        """Notes an evaluation and returns its numbers; raises EarlyStop when patience ends.

        Where predictions were no numbers its own are NaN: the 0.0 of its scores would beat a correlation below it,
        here and among the checkpoints.
        """
        numbers = scores.values
        if NOT_FINITE in scores.flags:
            value, numbers = math.nan, dict.fromkeys(numbers, math.nan)
        # An evaluation that was stopped at its very end is repeated by the next start.
        self.history = [one for one in self.history if one[0] < step] + [(step, value)]
        if self._kept is not None and jax.process_index() == 0:
            write_whole(self._kept, json.dumps(self.history))
        if is_better(value, self.value):
            self.keep(step, scores, value, params)
        misses = sum(step > self.step for step, _ in self.history)
        if self.patience and misses >= self.patience:
            raise EarlyStop(f"no better score for {misses} evaluations, at step {step}")
        return numbers
