"""One run of a job in its work directory: started or resumed, trained, evaluated, saved, written out.

The job (pretraining/job.py, tasks/job.py) says what is learnt from what; what every run has is here: which checkpoint
it resumes from, its programs, clock and logbook, the start-up screen, the report.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

from bertjax.config import Config, decides_bits
from bertjax.formats import hub
from bertjax.log.logbook import Logbook
from bertjax.log.report import as_warning, write_report
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.size import parameter_count, parameters_text
from bertjax.process.clock import Budget, Clock, reach
from bertjax.process.distributed import wait_for_all
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.starts import Starts
from bertjax.run.workdir import delete_run
from bertjax.training.trainer import Phase, Trainer, TrainState

Line = tuple[str, str]  # of the start-up screen: name, text


class Job(Protocol):
    """What a run does. Its settings have been checked against each other and the data."""

    config: Config  # of its training loop see Trainer.fit
    workdir: epath.Path
    made_of: Mapping[str, str]  # what is known of data, vocabulary and weights, see workdir.FACTS
    resumed_from: int | None  # step of the newest checkpoint, None = the run starts at step 0 (workdir.step_to_resume)
    trainer: Trainer
    mesh_reason: str  # why config.mesh.auto chose this mesh
    model_config: BertConfig
    execution: Execution
    heads: tuple[str, ...]  # whose parameters the start-up screen counts with those of the encoder
    phases: Sequence[Phase]
    mode: str  # 'min' or 'max', which value of config.checkpoint.metric is better

    def compile_ahead(self) -> None:
        """Starts to compile the programs of what is left of the run, in the order in which they are needed."""

    def start(self, checkpoints: Checkpoints) -> TrainState:
        """The state to go on from: restored if `resumed_from` says so, else fresh."""

    def facts(self) -> list[Line]:
        """Lines of the start-up screen: data, length, optimizer."""

    def record(self, directory: pathlib.Path) -> None:
        """Writes the files that tell which run the directory holds (workdir.py)."""

    def evaluate(self, state: TrainState, place: int) -> Mapping[str, float]:
        """Metrics of a state at a place in the schedule; may raise EarlyStop."""

    def finish(self, state: TrainState, logbook: Logbook, clock: Clock) -> Any:
        """Prints the results and writes them to the directory of the logbook; all processes call it."""


class OutputError(RuntimeError):
    """The results of a finished run could not be written; the same command goes on there."""


@contextlib.contextmanager
def writing_results(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a full disk, or a place that cannot be written, into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the results could not be written to {workdir}: {error}. The trained state is in its "
            "checkpoints: with room on the disk the same command goes on from there"
        ) from error


def check_export(config: Config) -> None:
    """Raises ValueError where config.export.push may not be written; one process asks."""
    if config.export.push and jax.process_index() == 0:
        hub.check_push(config.export.push, config.export.private, "config.export.push")


def push(job: Job, logbook: Logbook) -> OutputError | None:
    """Pushes model and report to config.export.push, if that is set. Returns the error if that failed."""
    export, model = job.config.export, logbook.directory / "model"
    if not export.push or jax.process_index() != 0:
        return None
    if not model.is_dir():  # said before: there is none of this network
        logbook.message(f"nothing was pushed to {export.push}: there is no model directory")
        return None
    report, place = logbook.directory / "report.html", job.workdir / "model"
    try:
        logbook.message(f"pushed to {hub.push(model, export.push, export.private, report, place)}")
    except OSError as error:
        return OutputError(str(error))
    return None


def run(job: Job, **output: Any) -> Any:
    """Trains a prepared job to its end and returns what its `finish` gives. See Trainer.fit for what may be raised.

    `output`: `write` and `show` of the Logbook, where the console is not what is meant.
    """
    config, workdir, trainer, started = job.config, job.workdir, job.trainer, time.monotonic()
    if config.resume == "overwrite" and job.resumed_from is None:
        delete_run(workdir)
    starts = Starts(workdir, decides_bits(config), job.made_of)
    starts.keep(trainer.programs, trainer.mesh)
    job.compile_ahead()
    reach("tracing")
    import orbax.checkpoint  # noqa: F401  here, since it takes a second, beside the compiler

    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint, job.mode)
    state = job.start(checkpoints)
    step = int(state.step)
    clock = clock_of(config, job.phases[-1].until_step, checkpoints.metrics(step) if step else None, started)

    with Logbook(str(workdir), step, config.log, settings=dataclasses.asdict(config), **output) as logbook:
        if jax.process_index() == 0:
            job.record(logbook.directory)
            logbook.flush()
        logbook.message(summary(job, step))
        starts.begin(step, logbook)
        if clock.position(step) >= job.phases[-1].until_step:
            logbook.message(f"The run is already finished at step {step:,}; nothing to train.")
        state = trainer.fit(
            state,
            job.phases,
            config,
            logbook=logbook,
            checkpoints=checkpoints,
            evaluate=lambda state: job.evaluate(state, clock.position(int(state.step))),
            clock=clock,
        )
        result = write_results(job, state, logbook, clock)
        failed = push(job, logbook)
    checkpoints.close()
    wait_for_all("writing model and report")
    if failed:
        raise failed
    return result


def write_results(job: Job, state: TrainState, logbook: Logbook, clock: Clock) -> Any:
    """Writes the results of the job, then the report; returns what the job's `finish` returns."""
    with writing_results(job.workdir):
        result = job.finish(state, logbook, clock)
        if jax.process_index() == 0:
            with as_warning("no report.html"):
                report = write_report([logbook.directory])
                logbook.message(f"report: {job.workdir / report.name}")
            logbook.flush()
    return result


def clock_of(
    config: Config, total: int, saved: Mapping[str, float] | None = None, started: float | None = None
) -> Clock:
    """The clock of a schedule of `total` steps: it counts steps, or minutes if config.budget_minutes is set.

    saved: metrics of the checkpoint that the run resumes from.
    """
    if config.budget_minutes:
        return Budget(config.budget_minutes, total, saved, jax.process_count())
    return Clock(total, saved, started)


def summary(job: Job, step: int) -> str:
    """The start-up screen: what will run, on what, over how much data, from where."""
    config = job.config
    if job.resumed_from is not None:
        origin = f"resumed from the checkpoint of step {step:,}"
        if config.init_from:
            origin += f" (init_from={config.init_from} is read at step 0 only)"
    else:
        origin = f"weights of {config.init_from}" if config.init_from else "random weights"
    devices = job.trainer.mesh.devices
    shape = " x ".join(f"{name} {size}" for name, size in job.trainer.mesh.shape.items())
    lines = [
        ("model", model_text(job.model_config, job.heads)),
        ("devices", f"{devices.size} x {devices.flat[0].device_kind} ({shape}), {job.execution.dtype}"),
        *([("mesh", job.mesh_reason)] if job.mesh_reason else []),
        *job.facts(),
        ("start", origin),
        ("workdir", str(job.workdir)),
    ]
    return "\n".join(f"{name:>9}  {text}" for name, text in lines)


def model_text(config: BertConfig, heads: tuple[str, ...]) -> str:
    """Size of the network; `heads` are those counted among its parameters."""
    return (
        f"L={config.num_hidden_layers} H={config.hidden_size} A={config.num_attention_heads} "
        f"F={config.intermediate_size} V={config.vocab_size:,}: {parameters_text(parameter_count(config, heads))}"
    )
