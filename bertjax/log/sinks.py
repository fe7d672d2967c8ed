"""Places that a run's numbers go to beside metrics.jsonl: TensorBoard, Weights & Biases, CSV.

In: a step and its finite numbers by name, from the logbook of process 0. Each is chosen by a
setting of config.log, and takes up again where an interrupted run was saved. `scalars` records
finite numbers of a step; `close` writes out what is buffered.
"""

import csv
import io
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bertjax.formats.files import write_whole

WANDB_FILE = "wandb.id"


class TensorBoardSink:
    """TensorBoard event files, without TensorFlow. Groups without a name of their own: 'train/'."""

    def __init__(self, directory: pathlib.Path, start_step: int):
        # Late, so that a run's programs compile meanwhile.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(directory))
        # Tells TensorBoard to drop what an interrupted run wrote from this step on.
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=start_step + 1, session_log=began))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        tags = {name if "/" in name else f"train/{name}": value for name, value in values.items()}
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=x) for tag, x in tags.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run at Weights & Biases, continued under the same id when the workdir is resumed.

    Whether it goes over the network is wandb's own affair: WANDB_MODE=offline, WANDB_API_KEY.

    Args:
      directory: where wandb keeps its files, and `wandb.id` the run's id.
      start_step: 0 = a new run, with a new id.
      settings: recorded as the run's configuration.
    """

    def __init__(
        self, directory: pathlib.Path, start_step: int, project: str, name: str, settings: Mapping[str, Any] | None
    ):
        import wandb  # an extra, which config_checks.py looks for

        path = directory / WANDB_FILE
        saved = path.read_text(errors="replace") if start_step and path.exists() else ""
        if not re.fullmatch(r"[0-9A-Za-z_-]+\n?", saved):
            saved = secrets.token_hex(8) + "\n"
            write_whole(path, saved)
        place = {"project": project, "name": name, "id": saved.strip(), "dir": str(directory)}
        self._run = wandb.init(**place, resume="allow", config=dict(settings or {}))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class CsvSink:
    """metrics.csv: one row a record, one column a name; empty where a record lacks the name.

    Args:
      records: gives those of metrics.jsonl, of which the file is made at the start and where a name is new.
    """

    def __init__(self, path: pathlib.Path, records: Callable[[], Sequence[Mapping[str, Any]]]):
        self._path, self._records = path, records
        self._rewrite()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if not values.keys() <= {*self._columns}:  # rare: the first training record, the first evaluation
            self._rewrite()
            return
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow({"step": step, **values})

    def close(self) -> None:
        """Nothing is buffered."""

    def _rewrite(self) -> None:
        rows = [{k: x for k, x in record.items() if isinstance(x, int | float)} for record in self._records()]
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row if name != "time")]))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: x if name == "step" else float(x) for name, x in row.items()} for row in rows)
        write_whole(self._path, text.getvalue())


Sink = TensorBoardSink | WandbSink | CsvSink
