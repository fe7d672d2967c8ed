"""What both sides of the fine-tuning benchmark do: one task, one recipe, several seeds.

A side runs as a process of its own, reads a `Work` as JSON from its first argument and prints a
JSON object a line, a `Result`, after every seed: the last one holds all. Its clock starts when its
parent started it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

SKIPPED = 30  # steps of a run that do not count for throughput: allocators and clocks settle


@dataclasses.dataclass(frozen=True)
class Work:
    """One task and its recipe (BERT paper A.3, with Adam's bias correction and decay to 0)."""

    task: str  # a GLUE task, ner, squad1.1, ...
    data: str
    checkpoint: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: int = 5
    first_seed: int = 0  # the seeds before it are done
    batch_size: int = 16
    learning_rate: float = 5e-5
    epochs: int = 4
    max_length: int = 128
    warmup: float = 0.1
    weight_decay: float = 0.01
    dtype: str = "auto"  # bfloat16 on GPU, float32 on CPU
    group_by_length: bool = False  # batches of rows of similar length instead of random ones
    max_rows: int = 0  # of the training split, the first ones; 0 = all
    execution: dict[str, str] = dataclasses.field(default_factory=dict)  # of bertjax: see presets
    started: float = 0.0  # time.time() when the parent started the process

    @classmethod
    def parse(cls, text: str) -> Work:
        return cls(**json.loads(text))

    def dumps(self, **changes: Any) -> str:
        return json.dumps(dataclasses.asdict(dataclasses.replace(self, **changes)))

    def limit(self, task: Any) -> Any:
        """The task with at most `max_rows` training records."""
        read = task.read

        def read_limited(split: str) -> Any:
            records = read(split)
            if split != "train" or not self.max_rows:
                return records
            return dataclasses.replace(records, records=records.records[: self.max_rows])

        task.read = read_limited
        return task


@dataclasses.dataclass
class Result:
    """One side's numbers.

    Attributes:
      metric: the name of what `best` and `last` hold, one entry a seed: the best evaluation of a
        run (one an epoch) and the last.
      ready_seconds: from the start of the process to the first training step (imports, data,
        weights, compilation); score_seconds to the end of the first run; all_seconds to the end.
      compile_seconds: spent in the compiler, added up over threads; 0 where there is none.
      milestones: seconds from the start of the process, in the order of the run.
      programs: (name, seconds of tracing, lowering and compiling) of what was compiled.
      speeds: rows a second of every seed, training only, after the first steps, evaluation left
        out; seeds that were too short for that have none.
    """

    metric: str
    best: list[float]
    last: list[float]
    ready_seconds: float
    score_seconds: float
    all_seconds: float
    compile_seconds: float
    compilations: int
    speeds: list[float]
    rows: int
    steps: int
    device: str
    versions: str
    milestones: dict[str, float] = dataclasses.field(default_factory=dict)
    programs: list[tuple[str, float, float, float]] = dataclasses.field(default_factory=list)

    @property
    def rows_per_second(self) -> float:
        """The median of the seeds; 0 if none was long enough."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    def summary(self) -> str:
        """One line: the scores so far, and the times."""
        scores = ", ".join(f"{100 * value:.2f}" for value in self.best)
        return (
            f"{self.metric} {scores}; first score after {self.score_seconds:.1f} s, all after "
            f"{self.all_seconds:.1f} s, {self.rows_per_second:,.0f} rows/s"
        )

    def print(self) -> None:
        print(json.dumps(dataclasses.asdict(self)), flush=True)

    def followed_by(self, later: Result) -> Result:
        """This one, of a process that was stopped, with the seeds that a later one did."""
        return dataclasses.replace(
            self,
            best=self.best + later.best,
            last=self.last + later.last,
            speeds=self.speeds + later.speeds,
            all_seconds=self.all_seconds + later.all_seconds,
        )


def mean_and_error(values: list[float]) -> tuple[float, float, float]:
    """Mean, standard deviation of the sample, and standard error of the mean (0 for one value)."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), deviation, deviation / len(values) ** 0.5
