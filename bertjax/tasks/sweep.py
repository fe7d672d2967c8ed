"""The paper's search: a grid of batch sizes, learning rates and epochs, times seeds (A.3).

In: a FineTuner (data and compiled steps are shared by all runs). Out: runs.jsonl, one line a finished run, from which
an interrupted search goes on; a table and a picture. A run that predicts one class only is reported as degenerate, and
no NaN is ever chosen as best.
"""

import dataclasses
import itertools
import json
import logging
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bertjax import markdown
from bertjax.config import Config
from bertjax.formats.files import read_json, write_whole
from bertjax.log.logbook import counted
from bertjax.tasks.finetune import FineTuner, NoFiniteScore
from bertjax.tasks.metrics import CONSTANT, ONE_CLASS_ONLY, is_better
from bertjax.training.loop import NotFiniteError

log = logging.getLogger(__name__)

FAILED = "failed: not finite"
PAPER_GRID = {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5, 2e-5), "epochs": (2, 3, 4)}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One finished run of a search."""

    batch_size: int
    learning_rate: float
    epochs: int
    seed: int
    value: float
    scores: dict[str, float]
    flags: tuple[str, ...]
    best_step: int
    seconds: float

    @property
    def degenerate(self) -> bool:
        """True if the run learnt nothing: one class, a constant, or no finite score."""
        return bool({ONE_CLASS_ONLY, CONSTANT, FAILED} & set(self.flags))

    @property
    def setting(self) -> tuple[int, float, int]:
        """What the grid varies, without the seed."""
        return self.batch_size, self.learning_rate, self.epochs


def grid(
    settings: Config,
    batch_size: Sequence[int] = PAPER_GRID["batch_size"],
    learning_rate: Sequence[float] = PAPER_GRID["learning_rate"],
    epochs: Sequence[int] = PAPER_GRID["epochs"],
    seeds: Iterable[int] = range(1),
) -> Iterator[Config]:
    """Runs of a recipe, ordered so that those of one batch size, which share compiled steps, are together."""
    for size, rate, length, seed in itertools.product(batch_size, learning_rate, epochs, tuple(seeds)):
        yield settings.replace(
            {"batch_size": size, "optimizer.learning_rate": rate, "task.epochs": length, "seed": seed}
        )


def sweep(
    tuner: FineTuner,
    runs: Iterable[Config],
    directory: pathlib.Path,
    identity: dict[str, Any],
    keep: Callable[[Any], None] | None = None,
    say: Callable[[str], None] = log.info,
) -> list[Outcome]:
    """Does the runs that `directory` does not have yet.

    Args:
      identity: what must not change between parts of one search (task, checkpoint, settings); kept in sweep.json and
        compared.
      keep: called with the Run whenever it is the best of the search so far.
      say: takes a line about every run that is done.

    Raises ValueError if the directory belongs to another search.
    """
    directory.mkdir(parents=True, exist_ok=True)
    check_identity(directory, identity)
    path = directory / "runs.jsonl"
    outcomes = read_outcomes(path)
    best = None
    for outcome in outcomes:
        best = outcome.value if is_better(outcome.value, best) else best
    done = {(*outcome.setting, outcome.seed) for outcome in outcomes}
    runs = list(runs)
    for number, settings in enumerate(runs, 1):
        key = _searched(settings)
        if key in done:
            continue
        outcome, run = _one(tuner, settings)
        done.add(key)
        outcomes.append(outcome)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        flags = "".join(f"  [{flag}]" for flag in outcome.flags)
        say(f"run {number}/{len(runs)}: {described(outcome)}: {outcome.value:.4f}{flags}, {outcome.seconds:.1f} s")
        if run is not None and is_better(outcome.value, best):
            best = outcome.value
            if keep is not None:
                keep(run)
    return outcomes


def _searched(settings: Config) -> tuple[int, float, int, int]:
    return settings.batch_size, settings.optimizer.learning_rate, settings.task.epochs, settings.seed


def _one(tuner: FineTuner, settings: Config) -> tuple[Outcome, Any]:
    """A run and its outcome; one that diverged counts 0 and is flagged, and the search goes on."""
    common = _searched(settings)
    try:
        run = tuner.run(settings)
    except (NotFiniteError, NoFiniteScore) as error:
        log.warning("run %s failed: %s", common, error)
        return Outcome(*common, 0.0, {}, (FAILED,), 0, 0.0), None
    scores = run.scores
    seconds = round(run.seconds, 3)
    outcome = Outcome(*common, run.value, dict(scores.values), scores.flags, run.best_step, seconds)
    return outcome, run


def check_identity(directory: pathlib.Path, identity: dict[str, Any]) -> None:
    """Writes sweep.json, or compares it with what an earlier part of the search wrote."""
    path = directory / "sweep.json"
    wanted = json.loads(json.dumps(identity))
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n")
        return
    found = read_json(path)
    # Of what an earlier version did not write down nothing is known.
    if differing := sorted(k for k in found if found[k] != wanted.get(k)):
        changes = "; ".join(f"{k}: {found.get(k)!r} -> {wanted.get(k)!r}" for k in differing)
        raise ValueError(f"{directory} holds another search ({changes}); choose another directory")


def read_outcomes(path: pathlib.Path) -> list[Outcome]:
    """The finished runs; a half-written last line (a killed search) is cut off."""
    if not path.exists():
        return []
    outcomes, good = [], 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            outcomes.append(Outcome(**row | {"flags": tuple(row["flags"])}))
            good += len(line)
    with open(path, "r+b") as file:
        file.truncate(good)
    return outcomes


@dataclasses.dataclass(frozen=True)
class Row:
    """All seeds of one setting."""

    setting: tuple[int, float, int]
    values: tuple[float, ...]
    degenerate: int

    @property
    def mean(self) -> float:
        """Over all seeds, degenerate ones included."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None of a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row a setting, best mean first."""
    by_setting: dict[tuple[int, float, int], list[Outcome]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, []).append(outcome)
    found = [
        Row(setting, tuple(o.value for o in group), sum(o.degenerate for o in group))
        for setting, group in by_setting.items()
    ]
    return sorted(found, key=lambda row: -row.mean)


def best_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The single best run on dev, as the paper selects."""
    if not outcomes:
        raise ValueError("the search has no finished run")
    best = outcomes[0]
    for outcome in outcomes[1:]:
        best = outcome if is_better(outcome.value, best.value) else best
    return best


def described(outcome: Outcome) -> str:
    """The settings of a run, as a line of text has them."""
    return (
        f"batch {outcome.batch_size}, learning rate {outcome.learning_rate:g}, "
        f"{counted(outcome.epochs, 'epoch')}, seed {outcome.seed}"
    )


def table(task: str, metric: str, outcomes: Sequence[Outcome]) -> str:
    """A Markdown table: each setting, each run, mean, standard deviation, degenerate runs."""
    best = best_outcome(outcomes)
    head = (
        f"{task}: {metric} on dev, {len(outcomes)} runs, {sum(o.degenerate for o in outcomes)} degenerate; best "
        f"{best.value:.4f} with {described(best)}"
    )
    columns = ("batch", "learning rate", "epochs", "runs", "mean", "std", "degenerate", "every run")
    cells = []
    for row in rows(outcomes):
        size, rate, epochs = row.setting
        each = " ".join(f"{value:.4f}" for value in row.values)
        cells.append(
            (
                size,
                f"{rate:g}",
                epochs,
                len(row.values),
                f"{row.mean:.4f}",
                "-" if row.deviation is None else f"{row.deviation:.4f}",
                row.degenerate,
                each,
            )
        )
    return f"{head}\n\n{markdown.table(columns, cells)}\n"


def picture(task: str, metric: str, outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Draws every run of every setting, its mean, and degenerate runs as crosses (PNG)."""
    from matplotlib.figure import Figure

    found = rows(outcomes)
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(reversed(found)):
        group = [o for o in outcomes if o.setting == row.setting]
        for degenerate, marker, colour in ((False, "o", "tab:blue"), (True, "x", "tab:red")):
            values = [o.value for o in group if o.degenerate is degenerate]
            axes.plot(values, [height] * len(values), marker, color=colour, alpha=0.7)
        axes.plot([row.mean], [height], "|", color="black", markersize=14)
    names = [f"batch {b}, {r:g}, {counted(e, 'epoch')}" for b, r, e in (row.setting for row in found[::-1])]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xlabel(f"{metric} on dev (bar: mean of the seeds; cross: degenerate run)")
    axes.set_title(task)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def write_report(task: str, metric: str, outcomes: Sequence[Outcome], directory: pathlib.Path) -> str:
    """Writes sweep.md and sweep.png and returns the table."""
    text = table(task, metric, outcomes)
    write_whole(directory / "sweep.md", text)
    picture(task, metric, outcomes, directory / "sweep.png")
    return text
