"""The training loop around a compiled step: input, dispatch, log, profile, evaluate, save, stop.

In: what `Trainer.fit` was given. Out: the state after the last phase; metrics in the logbook, states in the
checkpoints. Step n+1 is dispatched before the metrics of step n are fetched: the device never waits for the log.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from bertjax.config import Config
from bertjax.formats.checkpoint import CheckpointError
from bertjax.log.logbook import Logbook, human_time, progress_line
from bertjax.log.meter import Means, Meter
from bertjax.process.clock import Clock, first_step_done, reach
from bertjax.process.distributed import lost_peer
from bertjax.process.preemption import Preempted, StopSignal, must_stop, stop_on_signals
from bertjax.process.watchdog import PEERS, Watchdog
from bertjax.training import sharding
from bertjax.training.programs import result

if TYPE_CHECKING:
    from bertjax.training.trainer import Phase, Trainer, TrainState


# Metric of a checkpoint that a signal made before its evaluation was done; the next start does it first.
OWES_EVALUATION = "run/owes_evaluation"
SIGN_OF_LIFE_S = 30.0  # the longest silence between two lines while steps or batches of an evaluation are done


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class DataError(ValueError):
    """The rows of a step could not be read; the message names file and remedy."""


class EarlyStop(Exception):  # noqa: N818  not an error: it ends the loop in good order
    """Raised by an evaluation to end the training."""


class _StopRequested(Exception):
    """Ends a wait, or an evaluation, early: it may take longer than a machine that is pre-empted has left."""


class Loop:
    """One call of `Trainer.fit`, whose docstring describes the arguments, and how far it has come."""

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        phases: Sequence[Phase],
        config: Config,
        logbook: Logbook,
        checkpoints: Any,
        evaluate: Callable[[TrainState], Mapping[str, float]] | None,
        clock: Clock,
    ):
        self.trainer, self.state, self.phases, self.config = trainer, state, phases, config
        self.logbook, self.checkpoints, self.evaluate, self.clock = logbook, checkpoints, evaluate, clock
        self.step = int(state.step)  # dispatched so far
        self.place = clock.position(self.step)  # in the schedule and among the phases
        self.last_place = phases[-1].until_step
        self.log_interval = config.log.interval(self.last_place)
        self.saved_step = self.step if self.step else None  # a restored state is on disk already
        self.in_flight: tuple[int, Phase, dict[str, jax.Array]] | None = None
        self.profiling = False
        saved: Mapping[str, float] = {}
        if checkpoints is not None and self.step:
            with contextlib.suppress(OSError, ValueError, KeyError):  # a state from elsewhere
                saved = checkpoints.metrics(self.step)
        self.owes_evaluation = bool(saved.get(OWES_EVALUATION)) and evaluate is not None
        self.meter, self.means = Meter(trainer.mesh), Means(saved)
        self.told_at = self.evaluation_began = time.monotonic()
        self.watchdog = Watchdog(config.watchdog_seconds)
        self.stop = StopSignal()

    def run(self) -> TrainState:
        """Trains to the end of the last phase, or until an evaluation raises EarlyStop."""
        try:
            self.trainer.between_batches = self._between_evaluated_batches
            self.trainer.while_compiling = self._while_waiting
            with stop_on_signals() as self.stop:
                try:
                    if self.owes_evaluation:
                        self._evaluate_late()
                    for number, phase in enumerate(self.phases):
                        if self.place < phase.until_step:
                            self._train(number, phase)
                except EarlyStop as end:
                    self.logbook.message(str(end))
                self._settle()
                self._wait_until_saved()
                if must_stop(self.stop):
                    self._leave()
        except Exception as error:
            # The save that has begun is finished first, except without the other processes, where it would hang.
            if not isinstance(error, CheckpointError) and not lost_peer(error):
                try:
                    self._wait_until_saved()
                except CheckpointError as another:  # the first error is the one to tell
                    self.logbook.message(str(another))
            raise
        finally:  # a notebook goes on after an error
            self.watchdog.stop()
            self.trainer.between_batches = lambda done, total: None
            self.trainer.while_compiling = lambda: None
        return self.state

    def _train(self, number: int, phase: Phase) -> None:
        self._settle()
        planned = self.phases[number - 1].until_step if number else 0
        self.clock.begin_phase(number, self.step, planned)
        train_step = self.trainer.train_step(phase.objective)
        which = f" of phase {number + 1}" if len(self.phases) > 1 else ""
        self.logbook.message(f"compiling the training step{which} ...")
        if self.step == self.clock.phase_start:
            self.means = Means()  # rows of other lengths have other losses
        self.meter.start(compiling=True)
        batches = phase.batches(self.step - self.clock.phase_start)
        try:
            self._before_compiling()
            batches = itertools.chain([self._next(batches, phase, first=True)], batches)  # beside the compiler
            self.watchdog.doing("compiling the step", "the compiler", patiently=True)
            self.trainer.wait_for("train", phase.objective)
            self._before_compiling()
        except _StopRequested:
            if self.step:
                self._save({})
            self._leave()
        reach("parameters and compiling")  # in one, since they go on at once

        while self.place < phase.until_step:
            self._begin_profile()
            batch = self.clock.mark(self._next(batches, phase), self.place)
            self._watch_step(self.step + 1)
            self.state, metrics = train_step(self.state, sharding.put_batch(batch, self.trainer.mesh))
            self.step += 1
            self._settle()  # the step before
            self.in_flight = self.step, phase, metrics
            before, self.place = self.place, self.clock.position(self.step)
            self._end_profile()

            stopping, evaluated = must_stop(self.stop), {}
            if self.evaluate is not None and self._due(self.config.eval.every_steps, before):
                try:
                    evaluated = {OWES_EVALUATION: 1.0} if stopping else self._evaluate()
                except _StopRequested:
                    stopping, evaluated = True, {OWES_EVALUATION: 1.0}
            if stopping or self._due(self.config.checkpoint.every_steps, before):
                self._save(evaluated)
            if self.checkpoints is not None:
                self.checkpoints.check()
            if stopping:
                self._leave()

    def _leave(self) -> NoReturn:
        """Ends a run that was asked to stop, once its state is saved."""
        self._wait_until_saved()
        step = self.step if self.checkpoints is None else self.saved_step or 0  # an early stop is not saved
        stopped = Preempted(step, self.stop.requested or "pre-emption notice")
        if self.checkpoints is not None:
            self.logbook.message(str(stopped))
        self.logbook.close()
        raise stopped

    def _next(
        self, batches: Iterator[Mapping[str, np.ndarray]], phase: Phase, first: bool = False
    ) -> Mapping[str, np.ndarray]:
        """Raises _StopRequested if the run is to stop while the `first` batch is made."""
        self.watchdog.doing(
            f"the batch of step {self.step + 1}",
            "the disk of config.data.corpus, or a data worker",
            patiently=self.meter.compiling,  # the first makes the index of pairs
        )
        with self.meter.waiting_for_data():
            try:
                if first:  # in a thread: until workers have started, or pairs are indexed, takes long
                    batch = result(ThreadPoolExecutor(1).submit(next, batches, None), self._while_waiting)
                else:
                    batch = next(batches, None)
            except (ValueError, OSError) as error:
                raise DataError(f"the rows of step {self.step + 1} could not be read: {error}") from error
            except RuntimeError as error:  # of Grain
                raise DataError(
                    f"a data worker has ended before step {self.step + 1} ({error}). If memory ran out, set fewer "
                    "config.data.workers; the same command goes on from the newest checkpoint"
                ) from error
        if batch is None:
            raise DataError(f"the data ended after step {self.step}, but the phase runs to step {phase.until_step}")
        return batch

    def _settle(self) -> None:
        """Waits for the step in flight, and looks at and logs its metrics."""
        if self.in_flight is None:
            return
        (done, phase, metrics), self.in_flight = self.in_flight, None
        self._watch_step(done)
        skipped_in_row = int(metrics.pop("skipped_in_row"))
        if begins := self.meter.compiling:
            self.clock.compiled()
        self.meter.step_done()
        self.watchdog.doing(f"logging step {done}", "the disk of --workdir")
        self.means.add(metrics)
        due = done == 1 or done % self.log_interval == 0 or self.place >= self.last_place
        if due or time.monotonic() - self.told_at > SIGN_OF_LIFE_S:
            values = self.means.take(keep=not due)
            rates = self.meter.rates(phase.tokens_per_step, phase.flops_per_step, keep=not due)
            # jit sorts the names; the loss belongs first.
            line = {"loss": values.pop("loss"), **values, **rates}
            if due:
                self.logbook.train(done, self.clock.last_step(done), line)
            else:  # not recorded: the recorded steps must not depend on the clock
                self.logbook.message(progress_line(done, self.clock.last_step(done), line))
            self.told_at = time.monotonic()
        if begins and (line := first_step_done()):
            self.logbook.message(line)
        if skipped_in_row >= self.config.optimizer.max_skipped_in_row:
            raise NotFiniteError(
                f"{skipped_in_row} steps in a row up to step {done} had a loss or gradient that is "
                "not finite. Parameters are those before them. Lower the learning rate, lengthen "
                "the warm-up, or find the operation with --config.execution.debug_nans=True."
            )

    def _watch_step(self, step: int) -> None:
        self.watchdog.doing(f"step {step}", PEERS, patiently=self.meter.compiling)

    def _due(self, every: int, before: int) -> bool:
        """Whether the step that led from place `before` to here passed a multiple of `every`."""
        return self.place >= self.last_place or (every > 0 and self.place // every > before // every)

    def _evaluate_late(self) -> None:
        """Does the evaluation that a signal prevented at the step of the checkpoint, so that the run equals the
        undisturbed one."""
        try:
            self.checkpoints.amend(self.step, {OWES_EVALUATION: 0.0, **self._evaluate()})
        except _StopRequested:
            self._leave()

    def _evaluate(self) -> Mapping[str, float]:
        """The metrics of an evaluation."""
        self._settle()
        with self.meter.paused():
            found = self.evaluate(self.state)
        # A name with a group of its own, as 'squad/f1', keeps it.
        metrics = {name if "/" in name else f"eval/{name}": value for name, value in found.items()}
        self.logbook.evaluation(self.step, metrics)
        return metrics

    def _between_evaluated_batches(self, done: int, total: int) -> None:
        self.watchdog.doing(
            f"the evaluation at step {self.step}, after {done} batches,",
            f"{PEERS}, or the disk of the held-out data",
            patiently=done == 0,
        )
        now = time.monotonic()
        if done == 0:
            self.evaluation_began = now
        elif now - self.told_at > SIGN_OF_LIFE_S:
            line, rest = f"evaluating at step {self.step:,}: batch {done:,}", total - done
            if total:
                line += f"/{total:,}  ETA {human_time((now - self.evaluation_began) / done * rest)}"
            self.logbook.message(line)
            self.told_at = now
        if must_stop(self.stop):
            raise _StopRequested

    def _before_compiling(self) -> None:
        if must_stop(self.stop):  # also of several processes, whose first step compiles
            raise _StopRequested

    def _while_waiting(self) -> None:
        if self.stop.requested:  # of one process; several compile in the order of their steps
            raise _StopRequested

    def _save(self, metrics: Mapping[str, float]) -> None:
        self._settle()
        if self.checkpoints is None or self.saved_step == self.step:
            return
        self._watch_saving(f"saving step {self.step}, or the checkpoint before it")
        with self.meter.paused():
            self.checkpoints.save(
                self.step, self.state, {**metrics, **self.clock.saved(self.step), **self.means.saved()}
            )
            self.logbook.flush()
        self.saved_step = self.step

    def _watch_saving(self, what: str) -> None:
        self.watchdog.doing(what, f"{PEERS}, or the storage of {self.checkpoints.directory}", patiently=True)

    def _wait_until_saved(self) -> None:
        if self.checkpoints is not None:
            self._watch_saving(f"writing the checkpoint of step {self.saved_step}")
            self.checkpoints.wait()

    def _begin_profile(self) -> None:
        if self.step + 1 == self.config.profile_steps[0]:
            self._settle()
            jax.profiler.start_trace(str(self.logbook.directory / "profile"))
            self.profiling = True

    def _end_profile(self) -> None:
        if self.profiling and self.step == self.config.profile_steps[1]:
            self._settle()
            jax.profiler.stop_trace()
            self.profiling = False
            self.logbook.message(
                f"profile of steps {self.config.profile_steps[0]} to {self.step} written to "
                f"{self.logbook.directory / 'profile'}"
            )
