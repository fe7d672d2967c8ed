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
import sys
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
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"config.log.wandb={project} needs the package of Weights & Biases: pip install wandb"
            ) from error
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
    """metrics.csv: one row a record, one column a name; empty where a record lacks the name."""

    def __init__(self, path: pathlib.Path, start_step: int, say: Callable[[str], None] = print):
        self._path, self._say = path, say
        self._columns: list[str] = ["step"]
        self._rewrite(self._read(start_step) if path.exists() else [])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:  # rare: the first training record, the first evaluation
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            file.write(self._text([{"step": step, **values}]))

    def close(self) -> None:
        """Nothing is buffered."""

    def _read(self, last_step: int = sys.maxsize) -> list[dict[str, str]]:
        """The rows up to `last_step`, and the columns; a damaged file is set aside, and said."""
        content = self._path.read_bytes()
        *lines, _ = content.decode("utf-8", errors="replace").split("\n")  # the last: unfinished
        header, *rows = [_fields(line) for line in lines] or [["step"]]
        if readable := header[:1] == ["step"] and len(set(header)) == len(header):
            self._columns = header
        kept = [
            dict(zip(header, row, strict=True))
            for row in rows
            if readable and len(row) == len(header) and row[0].isascii() and row[0].isdigit()
        ]
        if not readable or len(kept) < len(rows):
            aside = self._path.with_name(f"{self._path.name}.damaged")
            write_whole(aside, content)
            self._say(
                f"{self._path.name}: {len(rows) - len(kept)} of {len(rows)} rows could not "
                f"be read; the file as it was is {aside.name}"
            )
        return [row for row in kept if int(row["step"]) <= last_step]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_whole(self._path, self._text(rows, header=True))

    def _text(self, rows: Sequence[Mapping[str, Any]], header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _fields(line: str) -> list[str]:
    """Of a row of CSV without line breaks; none where it is damaged."""
    try:
        return [] if set(line) & {"\0", "\ufffd"} else next(csv.reader([line.rstrip("\r")]), [])
    except csv.Error:
        return []


Sink = TensorBoardSink | WandbSink | CsvSink
