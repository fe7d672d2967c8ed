"""The clock of a run: where it stands in its schedule, by its steps (Clock) or by the time it has used (Budget).

With a Budget (Izsak et al. 2021, section 3.3) learning rate, ends of phases, evaluations and checkpoints follow the
time, so the rate reaches its end when the time does. The learning rate of a step, and with it the run's bits, then
depend on the clock; rows, masks and dropout of a step still derive from (seed, step) alone.

Start-up and compilation use up time, but not schedule: warm-up would otherwise be over before the first update. After
each of them the position goes on from where it was, over the time that is left.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import numpy as np

from bertjax import version

_begun: float | None = None  # by `begun`
_milestones: dict[str, float] = {}  # of this start: name -> process_age()
# Key of a batch, int32 [rows]: the place in the learning-rate schedule, where it is not the step.
POSITION = "schedule_position"
SYNC_STEPS = 16  # with several processes: steps between two readings of process 0's clock


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """For a run in a process that did something else before, such as a notebook: its clock starts with the block."""
    global _begun
    before, _begun = _begun, time.monotonic()
    _milestones.clear()
    try:
        yield
    finally:
        _begun = before


def reach(milestone: str) -> None:
    """Notes when this start got there, the first time."""
    _milestones.setdefault(milestone, process_age())


def milestones() -> dict[str, float]:
    """{name: seconds since this start began}, in order."""
    return dict(_milestones)


def first_step_done() -> str | None:
    """How long the first step took to come, and where the seconds went; None for the first steps of later runs."""
    if "first step" in _milestones:
        return None
    reach("first step")
    begins = [0.0, *_milestones.values()]
    stretches = (f"{name} {end - begin:.1f}" for begin, (name, end) in zip(begins, _milestones.items(), strict=False))
    return f"first step done {begins[-1]:.1f} s after the program's start: {', '.join(stretches)}"


def process_age() -> float:
    """Seconds since this program started, or in the block of `begun`.

    A program begins when bertjax is imported, which is the first that `python -m bertjax.main` does. The start of the
    process may lie far before: a shell that ends with `exec python`, as `bash -c 'pip install ... && python ...'`
    does, is the same process.
    """
    return time.monotonic() - (version.IMPORTED if _begun is None else _begun)


class Clock:
    """The clock of a run of `total` steps.

    Args:
      saved: what `saved` gave at the checkpoint that is resumed from.
      started: time.monotonic() when this start of the run began; None = now.

    Attributes:
      phase_start: steps done when the current phase began.
    """

    def __init__(self, total: int, saved: Mapping[str, float] | None = None, started: float | None = None):
        self.total, self.phase_start = total, 0
        self._used = (saved or {}).get("run/seconds", 0.0)
        self._started = time.monotonic() if started is None else started

    def elapsed(self) -> float:
        """Seconds used up, by this process and those before it."""
        return self._used + time.monotonic() - self._started

    def begin_phase(self, phase: int, step: int, planned: int) -> None:
        """Phase `phase`, which was to begin after `planned` steps, is about to compile after `step`."""
        self.phase_start = planned

    def compiled(self) -> None:
        """The first step of a phase has ended: from here on time moves the schedule of a Budget."""

    def position(self, step: int) -> int:
        """Where the run stands in its schedule after `step` steps, 0 to total."""
        return step

    def last_step(self, step: int) -> int:
        """The step at which the run will end, as far as it is known after `step`."""
        return self.total

    def saved(self, step: int) -> dict[str, float]:
        """What a checkpoint must keep for a resumed run to go on in the schedule."""
        return {"run/seconds": self.elapsed()}

    def mark(self, batch: Mapping[str, np.ndarray], place: int) -> Mapping[str, np.ndarray]:
        """The batch with its place in the schedule, if that is not the step."""
        return batch


class Budget(Clock):
    """The clock of a run that ends by the clock.

    Args:
      minutes: of wall clock, from the start of the process; over all processes of a resumed run.
      total: steps of the schedule's scale.
      saved: see Clock.
      processes: of the run; they follow the clock of process 0.
    """

    def __init__(self, minutes: float, total: int, saved: Mapping[str, float] | None = None, processes: int = 1):
        super().__init__(total)
        saved = saved or {}
        self.seconds, self._processes = 60.0 * minutes, processes
        # The time between a checkpoint and the process that resumes it does not count.
        self._used = saved.get("budget/seconds", 0.0)
        self._started = time.monotonic() - process_age()
        self._phase = int(saved.get("budget/phase", -1))
        self.phase_start = int(saved.get("budget/phase_start", 0))
        self._position = saved.get("budget/position", 0.0)  # where the line below begins
        self._phase_position = saved.get("budget/phase_position", 0.0)
        if self._position >= total and self.seconds > self._used + 1:
            # It had ended and is given more time: back to where a run of that time would be, but not to an earlier
            # phase, whose rows it has seen.
            self._position = max(self._phase_position, total * self._used / self.seconds)
        self._anchor: float | None = None  # seconds used up there; None = compiling
        self._now = self.elapsed()

    def begin_phase(self, phase: int, step: int, planned: int = 0) -> None:
        if phase != self._phase:
            self._phase, self.phase_start = phase, step
            self._phase_position = float(self.position(step))
        self._position, self._anchor = self.position(step), None

    def compiled(self) -> None:
        self._anchor = self._now = self._agreed(self.elapsed())

    def position(self, step: int) -> int:
        """Never less than `step`."""
        place = self._position
        if self._anchor is not None:
            if self._processes == 1:
                self._now = self.elapsed()
            elif step % SYNC_STEPS == 0:
                self._now = self._agreed(self.elapsed())
            left = self.seconds - self._anchor
            share = (self._now - self._anchor) / left if left > 0 else 1.0
            place += (self.total - place) * share
        return min(self.total, max(step, int(place)))

    def last_step(self, step: int) -> int:
        """By the speed of the current phase so far."""
        place, done = self.position(step), step - self.phase_start
        moved = place - self._position
        return step + int((self.total - place) * done / moved) if moved > 0 else self.total

    def saved(self, step: int) -> dict[str, float]:
        return {
            "budget/seconds": self.elapsed(),
            "budget/position": float(self.position(step)),
            "budget/phase_position": self._phase_position,
            "budget/phase": float(self._phase),
            "budget/phase_start": float(self.phase_start),
        }

    def mark(self, batch: Mapping[str, np.ndarray], place: int) -> Mapping[str, np.ndarray]:
        rows = len(next(iter(batch.values())))
        return {**batch, POSITION: np.full(rows, place, np.int32)}

    def _agreed(self, seconds: float) -> float:
        """The reading of process 0."""
        if self._processes == 1:
            return seconds
        from jax.experimental import multihost_utils  # late: a benchmark gives a torch program a Budget, without jax

        return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
