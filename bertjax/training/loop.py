"""The training loop around a compiled step: input, dispatch, log, profile, evaluate, save, stop.

In: what `Trainer.fit` was given. Out: the state after the last phase; metrics in the logbook and
states in the checkpoints on the way. The step n+1 is dispatched before the metrics of step n are
fetched, so that the device never waits for the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from bertjax.training import sharding
from bertjax.training.budget import Budget, Steps
from bertjax.training.logbook import Logbook
from bertjax.training.meter import Meter
from bertjax.training.preemption import (
    Preempted,
    StopSignal,
    Watchdog,
    must_stop,
    stop_on_signals,
)

if TYPE_CHECKING:
    from bertjax.training.checkpoint import Checkpoints
    from bertjax.training.trainer import Phase, Trainer, TrainState


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclasses.dataclass(eq=False)
class Loop:
    """One call of `Trainer.fit`, which says what the fields are, and where it stands."""

    trainer: Trainer
    state: TrainState
    phases: Sequence[Phase]
    logbook: Logbook
    checkpoints: Checkpoints | None
    evaluate: Callable[[TrainState], Mapping[str, float]] | None
    log_every: int
    eval_every: int
    checkpoint_every: int
    profile_steps: tuple[int, int]
    profile_directory: str
    clock: Budget | Steps

    def __post_init__(self) -> None:
        self.step = int(self.state.step)  # dispatched so far
        self.place = self.clock.position(self.step)  # in the schedule and among the phases
        self.last_place = self.phases[-1].until_step
        self.saved_step = self.step if self.step else None  # a restored state is on disk already
        self.in_flight: tuple[int, Phase, dict[str, jax.Array]] | None = None
        self.profiling = False
        self.meter = Meter(self.trainer.mesh)
        self.watchdog = Watchdog(self.trainer.watchdog_s)

    def run(self) -> TrainState:
        """Trains to the end of the last phase."""
        try:
            with stop_on_signals() as stop:
                for number, phase in enumerate(self.phases):
                    if self.place < phase.until_step:
                        self._train(number, phase, stop)
            self._settle()
            if self.checkpoints is not None:
                self.checkpoints.wait()
        finally:  # a notebook lives on after an error
            self.watchdog.stop()
        return self.state

    def _train(self, number: int, phase: Phase, stop: StopSignal) -> None:
        self._settle()
        self.clock.begin_phase(number, self.step)
        train_step = self.trainer.train_step(phase.objective)
        self.trainer.wait_for("train", phase.objective)
        batches = phase.batches(self.step - self.clock.phase_start)
        self.meter.start(compiling=True)

        while self.place < phase.until_step:
            self._begin_profile()
            batch = self.clock.mark(self._next(batches, phase), self.place)
            self.state, metrics = train_step(
                self.state, sharding.put_batch(batch, self.trainer.mesh))
            self.step += 1
            self._settle()  # the step before
            self.in_flight = self.step, phase, metrics
            before, self.place = self.place, self.clock.position(self.step)
            self._end_profile()

            stopping = must_stop(stop, self.step)
            evaluated = {} if stopping else self._evaluate(before)
            if stopping or self._due(self.checkpoint_every, before):
                self._save(evaluated)
            if self.checkpoints is not None:
                self.checkpoints.check()
            if stopping:
                stopped = Preempted(self.step, stop.requested or "pre-emption notice")
                if self.checkpoints is not None:
                    self.checkpoints.wait()
                    self.logbook.message(str(stopped))
                self.logbook.close()
                raise stopped

    def _next(self, batches: Iterator[Mapping[str, np.ndarray]], phase: Phase
              ) -> Mapping[str, np.ndarray]:
        with self.meter.waiting_for_data():
            batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the data ended after step {self.step}, but the phase runs to step "
                             f"{phase.until_step}")
        return batch

    def _settle(self) -> None:
        """Waits for the step in flight, and looks at and logs its metrics."""
        if self.in_flight is None:
            return
        (done, phase, metrics), self.in_flight = self.in_flight, None
        skipped_in_row = int(metrics.pop("skipped_in_row"))
        if self.meter.compiling:
            self.clock.compiled()
        self.meter.step_done()
        self.watchdog.beat()
        if done == 1 or done % self.log_every == 0 or self.place >= self.last_place:
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            rates = self.meter.rates(phase.tokens_per_step, phase.flops_per_step)
            # jit sorts the names; the loss belongs first.
            self.logbook.train(done, self.clock.last_step(done),
                               {"loss": values.pop("loss"), **values, **rates})
        if skipped_in_row >= self.trainer.max_skipped_in_row:
            raise NotFiniteError(
                f"{skipped_in_row} steps in a row up to step {done} had a loss or gradient that is "
                "not finite. Parameters are those before them. Lower the learning rate, lengthen "
                "the warm-up, or find the operation with --config.execution.debug_nans=True.")

    def _due(self, every: int, before: int) -> bool:
        """Whether the step that led from place `before` to here passed a multiple of `every`."""
        return self.place >= self.last_place or (
            every > 0 and self.place // every > before // every)

    def _evaluate(self, before: int) -> Mapping[str, float]:
        """The metrics of an evaluation, if one is due."""
        if self.evaluate is None or not self._due(self.eval_every, before):
            return {}
        self._settle()
        with self.meter.paused():
            found = self.evaluate(self.state)
        # A name with a group of its own, as 'squad/f1', keeps it.
        metrics = {name if "/" in name else f"eval/{name}": value for name, value in found.items()}
        self.logbook.evaluation(self.step, metrics)
        self.watchdog.beat()
        return metrics

    def _save(self, metrics: Mapping[str, float]) -> None:
        self._settle()
        if self.checkpoints is None or self.saved_step == self.step:
            return
        with self.meter.paused():
            self.checkpoints.save(
                self.step, self.state, {**metrics, **self.clock.record(self.step)})
            self.logbook.flush()
        self.saved_step = self.step

    def _begin_profile(self) -> None:
        if not self.profiling and self.step + 1 == self.profile_steps[0]:
            self._settle()
            jax.profiler.start_trace(self.profile_directory)
            self.profiling = True

    def _end_profile(self) -> None:
        if self.profiling and self.step == self.profile_steps[1]:
            self._settle()
            jax.profiler.stop_trace()
            self.profiling = False
            self.logbook.message(f"profile of steps {self.profile_steps[0]} to {self.step} written "
                                 f"to {self.profile_directory}")
