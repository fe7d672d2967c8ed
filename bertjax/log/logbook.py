"""What a run says of itself: metrics.jsonl, TensorBoard events, one progress line on the console.

In: step and {name: number}. Out, in DIR: `metrics.jsonl` with one JSON object a logged step
(docs/pretraining.md names them), `hardware.json`, and whatever config.log asks for (sinks.py). Process 0
writes; on the others every call does nothing, so callers need not ask who they are.
"""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from bertjax.config import LogSettings
from bertjax.formats.files import scratch_directory, write_json, write_whole
from bertjax.interruption import drop_unwritable_output
from bertjax.log.sinks import WANDB_FILE, CsvSink, Sink, TensorBoardSink, WandbSink
from bertjax.process.hardware import describe

METRICS_FILE = "metrics.jsonl"
HARDWARE_FILE = "hardware.json"
CSV_FILE = "metrics.csv"
Show = Callable[[int, int | None, Mapping[str, float | None], str], None]


class Logbook:
    """Records of one run.

    Attributes:
      directory: where process 0 writes the files of the run: the run's own, or, of gs:// and other
        URLs, a local stand-in until `close`, whose files are copied there at each `flush`.

    Args:
      directory: of the run; None = nothing is recorded or printed.
      start_step: step of the checkpoint that is resumed from, 0 = fresh. Records beyond it, left
        by the part of the run that is repeated, are removed, so no step appears twice.
      log: where else the numbers go.
      settings: of the run, recorded at Weights & Biases.
      write: prints a line; None = standard output.
      show: shows the numbers of a step, (step, last step or None, {name: number}, the line of it), in place of `write`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        start_step: int = 0,
        log: LogSettings = LogSettings(),  # noqa: B008  frozen
        *,
        settings: Mapping[str, Any] | None = None,
        write: Callable[[str], None] | None = None,
        show: Show | None = None,
    ):
        self._active = directory is not None and jax.process_index() == 0
        self._remote = epath.Path(directory) if "://" in str(directory) else None
        self.directory = self._remote or pathlib.Path(directory or "").expanduser()
        if not self._active:
            return
        self._write = write or _print
        self._show = show or (lambda step, last_step, metrics, line: self._write(line))
        self._last: tuple[int, float] | None = None  # recorded step, and when
        self._paused, self._timed_steps = 0.0, 0
        self._copied: dict[pathlib.Path, int] = {}  # file -> its time when it was copied
        self._scratch = contextlib.ExitStack()
        if self._remote:
            self.directory = self._scratch.enter_context(scratch_directory()) / self._remote.name
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / METRICS_FILE
        for name in (METRICS_FILE, WANDB_FILE) if self._remote else ():
            if (self._remote / name).exists():
                (self.directory / name).write_text((self._remote / name).read_text())
        truncate_records(path, start_step, self._write)
        if start_step and not (path.exists() and path.stat().st_size):
            self._write(f"{path.name} is lost: curves and report begin at step {start_step:,}")
        write_json(self.directory / HARDWARE_FILE, describe())
        self._file = open(path, "a", encoding="utf-8")
        self._complained = False
        self._sinks: list[Sink] = []
        if log.tensorboard:
            self._sinks.append(TensorBoardSink(self.directory / "tensorboard", start_step))
        if log.csv:
            self._sinks.append(CsvSink(self.directory / CSV_FILE, lambda: read_records(path)))
        if log.wandb:
            name = os.path.basename(os.fspath(directory).rstrip("/"))
            self._sinks.append(WandbSink(self.directory, start_step, log.wandb, name, settings))

    def train(self, step: int, last_step: int, metrics: Mapping[str, float | None]) -> None:
        """Records the metrics of a training step, which are means over the steps since the last
        record, and prints the progress line.
        """
        if self._active:
            self._record(step, metrics)
            line = progress_line(step, last_step, metrics, self._pause(step, metrics.get("step_time")))
            self._show(step, last_step, metrics, line)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records and prints metrics that carry their group in the name ('eval/loss')."""
        if self._active and metrics:
            self._record(step, metrics)
            shown = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
            self._show(step, None, metrics, f"evaluation at step {step:,}: {shown}")

    def message(self, text: str) -> None:
        """Prints a line; it is not recorded."""
        if self._active:
            self._write(text)

    def flush(self) -> None:
        """Makes everything so far visible to readers of the directory."""
        if not self._active or self._file.closed:
            return
        self._file.flush()
        if self._remote:
            for path in self.directory.rglob("*"):
                if path.is_file() and self._copied.get(path) != path.stat().st_mtime_ns:
                    self._copied[path] = path.stat().st_mtime_ns
                    target = self._remote / str(path.relative_to(self.directory))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())

    def close(self) -> None:
        """Writes everything out; may be called twice."""
        if not self._active or self._file.closed:
            return
        with self._going_on("the last metrics"):
            for sink in self._sinks:
                sink.close()
            self.flush()
        with contextlib.suppress(OSError):  # closed it is, all the same
            self._file.close()
        self._scratch.close()

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pause(self, step: int, step_time: float | None) -> float:
        """Seconds per step that evaluating and saving took beside the steps, on average so far."""
        now = time.monotonic()
        if self._last and step_time:  # without it they were compilation
            steps = step - self._last[0]
            self._paused += max(0.0, now - self._last[1] - steps * step_time)
            self._timed_steps += steps
        self._last = step, now
        return self._paused / self._timed_steps if self._timed_steps else 0.0

    def _record(self, step: int, metrics: Mapping[str, float | None]) -> None:
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        # JSON has no NaN: what is not finite, or not known, becomes null.
        known = {name: value if isinstance(value, int) else float(value) for name, value in finite.items()}
        line = {"step": step, **{name: known.get(name) for name in metrics}, "time": time.time()}
        with self._going_on(f"metrics of step {step:,}"):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            for sink in self._sinks:
                sink.scalars(step, {name: float(value) for name, value in finite.items()})

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """A full disk or a bucket that refuses does not end the run: checkpoints may lie elsewhere, and must be saved.
        The message is printed once."""
        try:
            yield
        except OSError as error:
            if not self._complained:
                self._write(
                    f"{what} could not be written to {self.directory}: {error}. The run "
                    "goes on, and tries again at the next record"
                )
            self._complained = True


def _print(line: str) -> None:
    """Prints a line; the run goes on if nobody reads it any more (a connection that was cut)."""
    try:
        print(line, flush=True)
    except OSError:
        drop_unwritable_output()


def truncate_records(path: pathlib.Path, last_step: int, say: Callable[[str], None]) -> None:
    """Removes records beyond `last_step` and broken lines, all at once.

    A kill leaves the old file or the new one, never a part. Broken lines go to a file beside it and
    are said, but for a last one that was not finished.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    unfinished = lines.pop()
    kept = [line for line in lines if _step_of(line) <= last_step]
    damaged = [line for line in lines if _step_of(line) == sys.maxsize]
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        write_whole(aside, "".join(f"{line}\n" for line in damaged))
        lost = counted(len(damaged), "line")
        say(f"{path.name}: {lost} of {len(lines):,} could not be read and went to {aside.name}")
    if len(kept) < len(lines) or unfinished:
        write_whole(path, "".join(f"{line}\n" for line in kept))


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl or starts.jsonl, without broken lines and one that is still being written."""
    records = map(_record, path.read_bytes().decode("utf-8", "replace").splitlines())
    return [record for record in records if record]


def progress_line(step: int, last_step: int, metrics: Mapping[str, float | None], pause: float = 0.0) -> str:
    """'step 1,200/10,000  loss 7.123 (mlm 6.45, nsp 0.673)  lr 1.2e-05  410k tok/s  ETA 2 h'.

    Args:
      pause: seconds a step that are spent on something else, such as evaluation.
    """
    heads = ("mlm", "nsp")
    losses = [f"{name} {_number(loss)}" for name in heads if (loss := metrics.get(f"{name}_loss")) is not None]
    accuracies = [f"{name} {100 * x:.1f}" for name in heads if (x := metrics.get(f"{name}_accuracy")) is not None]
    inner = f" ({', '.join(losses)})" if losses else ""
    parts = [f"step {step:,}/{last_step:,}", f"loss {_number(metrics.get('loss'))}{inner}"]
    if accuracies:
        parts.append(f"acc % {', '.join(accuracies)}")
    if (rate := metrics.get("learning_rate")) is not None:
        parts.append(f"lr {rate:.2e}")
    if speed := metrics.get("tokens_per_second"):
        parts.append(f"{human_count(speed)} tok/s")
    if mfu := metrics.get("mfu"):
        parts.append(f"MFU {100 * mfu:.1f} %")
    if step_time := metrics.get("step_time"):
        if (waited := metrics.get("data_wait") or 0) > 0.05 * step_time:
            parts.append(f"DATA WAIT {100 * waited / step_time:.0f} %")
        if step < last_step:
            parts.append(f"ETA {human_time((step_time + pause) * (last_step - step))}")
    if skipped := metrics.get("skipped"):
        parts.append(f"skipped {int(skipped)}")
    return "  ".join(parts)


def human_time(seconds: float) -> str:
    """'45 s', '12 min', '3 h 20 min', '2 d 5 h'."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def counted(number: int, noun: str) -> str:
    """'1 epoch', '3,000 epochs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human_count(number: float) -> str:
    """'950', '12.3k', '4.10M', with three digits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _record(line: str) -> dict[str, Any]:
    """The record of a line, {} if it is broken."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else {}


def _step_of(line: str) -> int:
    """The step of a record; of a broken line, a step that is beyond all others."""
    return int(_record(line).get("step", sys.maxsize))
