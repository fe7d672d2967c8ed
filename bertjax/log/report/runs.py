"""What the report shows of a run: metrics.jsonl, and its settings, hardware and examples if any."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.config import flatten
from bertjax.formats.files import read_json
from bertjax.log.logbook import HARDWARE_FILE, METRICS_FILE, read_records

STARTS_FILE = "starts.jsonl"  # of run/starts.py


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      records: of metrics.jsonl, at least one.
      settings: {'optimizer.learning_rate': '0.0001'} of config.json.
      hardware: of hardware.json.
      examples, map: of examples.json and map.json.
      result: of result.json: of a finished fine-tuning run what tasks/results.py says, of a
        pre-training run the lines of its end.
      starts: of starts.jsonl.
    """

    name: str
    records: list[dict[str, Any]]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hardware: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    examples: Sequence[Mapping[str, Any]] = ()
    map: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    result: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()


def load(directories: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `directories`, under their last names, or under their paths if two are the same.

    Raises:
      ValueError: a directory holds no metrics.jsonl, or no record in it.
    """
    runs = [_load(pathlib.Path(directory)) for directory in directories]
    if len({run.name for run in runs}) == len(runs):
        return runs
    named = zip(runs, directories, strict=True)
    return [dataclasses.replace(run, name=os.fspath(directory)) for run, directory in named]


def _load(directory: pathlib.Path) -> Run:
    path = directory / METRICS_FILE
    if not path.exists():
        raise ValueError(f"{directory} is not the directory of a run: it has no {METRICS_FILE}")
    records = read_records(path)
    if not records:
        raise ValueError(f"{path} has no record yet; the first comes with the first logged step")

    def read(name: str, kind: type) -> Any:
        file = directory / name
        found = read_json(file) if file.exists() else kind()
        if not isinstance(found, kind):
            raise ValueError(f"{file} holds no {kind.__name__}; move it away, and the report is made without it")
        return found

    settings = flatten(read("config.json", dict))
    return Run(
        directory.resolve().name,
        records,
        settings={name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()},
        hardware=read(HARDWARE_FILE, dict),
        examples=read("examples.json", list),
        map=read("map.json", dict),
        result=read("result.json", dict),
        starts=read_records(directory / STARTS_FILE) if (directory / STARTS_FILE).exists() else (),
    )
