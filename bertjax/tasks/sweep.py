"""A search: every combination of lists of settings, times seeds; by default the grid of the paper (A.3).

In: a base Config and what is searched. Out: runs.jsonl, one line a finished run, from which an interrupted search goes
on; a table and a picture. A run that predicts one class only is reported as degenerate, and no NaN is ever chosen as
best.
"""

import dataclasses
import itertools
import json
import logging
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from bertjax import markdown
from bertjax.config import Config, differences, flatten
from bertjax.formats.files import read_json, write_json, write_whole
from bertjax.log.logbook import counted
from bertjax.run.claim import claim, withdrawn_after_errors
from bertjax.run.workdir import RECORD, SEARCH
from bertjax.tasks.finetune import PER_RUN, NoFiniteScore, Trained
from bertjax.tasks.metrics import CONSTANT, NOT_FINITE, ONE_CLASS_ONLY, is_better
from bertjax.training.loop import NotFiniteError

log = logging.getLogger(__name__)

FAILED = "failed: not finite"
PAPER_GRID = {"batch_size": (16, 32), "optimizer.learning_rate": (5e-5, 3e-5, 2e-5), "task.epochs": (2, 3, 4)}
# What runs.jsonl calls the paper's, and tables.
SHORT = {"optimizer.learning_rate": "learning_rate", "task.epochs": "epochs"}
WORDS = {"batch_size": "batch", "learning_rate": "learning rate"}
Setting = Mapping[str, Any]  # name (SHORT where it has one) -> value


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One finished run of a search."""

    setting: Setting  # what is searched, without the seed
    seed: int
    value: float
    scores: dict[str, float]
    flags: tuple[str, ...]
    best_step: int
    seconds: float

    @property
    def failed(self) -> bool:
        """True if the run gave no number, for which its value of 0.0 stands."""
        return bool({NOT_FINITE, FAILED} & set(self.flags))

    @property
    def degenerate(self) -> bool:
        """True if the run learnt nothing: one class, a constant, or no number."""
        return self.failed or bool({ONE_CLASS_ONLY, CONSTANT} & set(self.flags))

    def to_json(self) -> str:
        """Its line of runs.jsonl."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields.pop("setting"), **fields}) + "\n"

    @classmethod
    def of_json(cls, line: str | bytes) -> "Outcome":
        """The inverse of to_json."""
        row = json.loads(line)
        own = {field.name: row.pop(field.name) for field in dataclasses.fields(cls) if field.name != "setting"}
        return cls(row, **own | {"flags": tuple(own["flags"])})


def grid(
    settings: Config, search: Mapping[str, Sequence[Any]] = PAPER_GRID, seeds: Iterable[int] = range(1)
) -> Iterator[tuple[Setting, Config]]:
    """(what is searched, settings) of every run, those that share compiled steps one after the other."""
    names = sorted(search, key=lambda name: 0 if name not in PER_RUN else 1 if name == "batch_size" else 2)
    for *values, seed in itertools.product(*(search[name] for name in names), tuple(seeds)):
        searched = dict(zip(names, values, strict=True))
        named = {SHORT.get(name, name): value for name, value in searched.items()}
        yield named, settings.replace({**searched, "seed": seed})


def sweep(
    train: Callable[[Config], Trained],
    runs: Iterable[tuple[Setting, Config]],
    directory: pathlib.Path,
    identity: dict[str, Any],
    keep: Callable[[Trained], None] | None = None,
    say: Callable[[str], None] = log.info,
) -> list[Outcome]:
    """Does the runs (see grid) that `directory` does not have yet.

    Args:
      identity: what must not change between parts of one search (task, checkpoint, settings);
        kept in sweep.json and compared.
      keep: called with what was trained whenever it is the best of the search so far.
      say: takes a line about every run that is done.

    Raises ValueError if the directory belongs to another search, CheckpointError if another process is at it.
    """
    with withdrawn_after_errors():
        claim(epath.Path(directory.absolute()))
        check_identity(directory, identity)
    path = directory / "runs.jsonl"
    outcomes = read_outcomes(path)
    best = max((outcome.value for outcome in outcomes if not outcome.failed), default=None)
    done = {_key(outcome.setting, outcome.seed) for outcome in outcomes}
    runs = list(runs)
    for number, (setting, settings) in enumerate(runs, 1):
        key = _key(setting, settings.seed)
        if key in done:
            continue
        outcome, trained = _one(train, setting, settings)
        done.add(key)
        outcomes.append(outcome)
        if trained is not None and is_better(outcome.value, best):
            best = outcome.value
            if keep is not None:  # before the run counts as done: a search that is killed here repeats it
                keep(trained)
        with open(path, "a", encoding="utf-8") as file:
            file.write(outcome.to_json())
        flags = "".join(f"  [{flag}]" for flag in outcome.flags)
        told = f"{described(setting, settings.seed)}: {outcome.value:.4f}{flags}, {outcome.seconds:.1f} s"
        say(f"run {number}/{len(runs)}: {told}")
    return outcomes


def _key(setting: Setting, seed: int | None = None) -> str:
    return json.dumps([dict(setting), seed], sort_keys=True)


def _one(train: Callable[[Config], Trained], setting: Setting, settings: Config) -> tuple[Outcome, Trained | None]:
    """A run and its outcome; one that diverged counts 0 and is flagged, and the search goes on."""
    try:
        run = train(settings)
    except (NotFiniteError, NoFiniteScore) as error:
        log.warning("run %s failed: %s", described(setting, settings.seed), error)
        return Outcome(setting, settings.seed, 0.0, {}, (FAILED,), 0, 0.0), None
    scores, seconds = run.scores, round(run.seconds, 3)
    return Outcome(setting, settings.seed, run.value, dict(scores.values), scores.flags, run.best_step, seconds), run


def check_identity(directory: pathlib.Path, identity: dict[str, Any]) -> None:
    """Writes sweep.json, or compares it with what an earlier part of the search wrote."""
    path = directory / SEARCH
    if not path.exists():
        if (directory / RECORD).exists():
            raise ValueError(f"{directory} holds a run or a model, whose results would be replaced; choose another one")
        write_json(path, identity)
    elif differing := differences(flatten(read_json(path)), flatten(json.loads(json.dumps(identity)))):
        raise ValueError(f"{directory} holds another search ({'; '.join(differing)}); choose another directory")


def read_outcomes(path: pathlib.Path) -> list[Outcome]:
    """The finished runs; a half-written last line (a killed search) is cut off."""
    if not path.exists():
        return []
    outcomes, good = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                outcomes.append(Outcome.of_json(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}:{number}: the line is damaged ({error!r:.80}); delete it, and its run is done again"
                ) from None
            good += len(line)
    with open(path, "r+b") as file:
        file.truncate(good)
    return outcomes


def rows(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """All seeds of each setting, degenerate ones included; the best mean first, and what always failed last."""
    by_setting: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_setting.setdefault(_key(outcome.setting), []).append(outcome)
    return sorted(by_setting.values(), key=lambda row: (all(outcome.failed for outcome in row), -_mean(row)))


def _mean(row: Sequence[Outcome]) -> float:
    return statistics.fmean(outcome.value for outcome in row)


def best_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The single best run on dev, as the paper selects; a failed one only if all failed."""
    if not outcomes:
        raise ValueError("the search has no finished run")
    return max(outcomes, key=lambda one: (not one.failed, one.value))


def described(setting: Setting, seed: int | None = None) -> str:
    """The settings of a run as a line of text."""
    words = [
        counted(value, "epoch") if name == "epochs" else f"{WORDS.get(name, name)} {_cell(value)}"
        for name, value in setting.items()
    ]
    return ", ".join(words if seed is None else [*words, f"seed {seed}"])


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(task: str, metric: str, outcomes: Sequence[Outcome]) -> str:
    """A Markdown table: each setting, each run, mean, standard deviation, degenerate runs."""
    best = best_outcome(outcomes)
    chosen = f"best {best.value:.4f} with {described(best.setting, best.seed)}"
    head = f"{task}: {metric} on dev, {len(outcomes)} runs, {sum(o.degenerate for o in outcomes)} degenerate; " + (
        "no best one: none gave a finite score" if best.failed else chosen
    )
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.setting))
    columns = [*(WORDS.get(name, name) for name in names), "runs", "mean", "std", "degenerate", "every run"]
    cells = []
    for row in rows(outcomes):
        values = [outcome.value for outcome in row]
        cells.append(
            (
                *(_cell(row[0].setting.get(name, "")) for name in names),
                len(row),
                f"{_mean(row):.4f}",
                f"{statistics.stdev(values):.4f}" if len(row) > 1 else "-",
                sum(outcome.degenerate for outcome in row),
                " ".join(f"{value:.4f}" for value in values),
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
        for degenerate, marker, colour in ((False, "o", "tab:blue"), (True, "x", "tab:red")):
            values = [o.value for o in row if o.degenerate is degenerate]
            axes.plot(values, [height] * len(values), marker, color=colour, alpha=0.7)
        axes.plot([_mean(row)], [height], "|", color="black", markersize=14)
    axes.set_yticks(range(len(found)), [described(row[0].setting) for row in found[::-1]])
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
