"""What both sides of the fine-tuning benchmark do: one task, one recipe, several seeds.

A side runs as a process of its own, reads a `Work` as JSON from its first argument and prints one
JSON object, a `Result`, on the last line. Its clock starts when its parent started it.
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
    batch_size: int = 16
    learning_rate: float = 5e-5
    epochs: int = 4
    max_length: int = 128
    warmup: float = 0.1
    weight_decay: float = 0.01
    dtype: str = "auto"  # bfloat16 on GPU, float32 on CPU
    group_by_length: bool = False  # of transformers' sampler
    started: float = 0.0  # time.time() when the parent started the process

    @classmethod
    def parse(cls, text: str) -> Work:
        return cls(**json.loads(text))

    def dumps(self, **changes: Any) -> str:
        return json.dumps(dataclasses.asdict(dataclasses.replace(self, **changes)))


@dataclasses.dataclass
class Result:
    """One side's numbers.

    Attributes:
      metric: the name of what `best` and `last` hold, one entry a seed: the best evaluation of a
        run (one an epoch) and the last.
      ready_seconds: from the start of the process to the first training step (imports, data,
        weights, compilation); score_seconds to the end of the first run; all_seconds to the end.
      compile_seconds: spent in the compiler, added up over threads; 0 where there is none.
      rows_per_second: training only, after the first steps, evaluation left out; median of seeds.
    """

    metric: str
    best: list[float]
    last: list[float]
    ready_seconds: float
    score_seconds: float
    all_seconds: float
    compile_seconds: float
    compilations: int
    rows_per_second: float
    rows: int
    steps: int
    device: str
    versions: str

    def print(self) -> None:
        print(json.dumps(dataclasses.asdict(self)), flush=True)


def mean_and_error(values: list[float]) -> tuple[float, float, float]:
    """Mean, standard deviation of the sample, and standard error of the mean (0 for one value)."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), deviation, deviation / len(values) ** 0.5
