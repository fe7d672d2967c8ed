"""A run limited by wall clock: where it stands in its schedule is read from the time used up.

With a budget, the `total` steps of the phases are no longer counted but are a scale: `position` is
the step of that scale that the time used so far stands for. Learning rate, ends of phases,
evaluations and checkpoints follow the position, so the rate reaches its end when the time does,
however fast the machine is (the "budget" schedule of Izsak et al. 2021, section 3.3).

What is given up: the learning rate of step s, and with it the run's bits, depend on the clock.
Rows, masks and dropout of a step still derive from (seed, step) alone.

Start-up and compilation use up time, but not schedule: warm-up would otherwise be over before the
first update. After each of them the position goes on from where it was, over the time that is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

_IMPORTED = time.monotonic()
SYNC_STEPS = 16  # steps between two looks at process 0's clock, where there are several processes


def process_age() -> float:
    """Seconds since this process was started (where /proc does not tell: since this import)."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            started = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED


class Budget:
    """The clock of a run.

    Args:
      minutes: of wall clock, from the start of the process; over all processes of a resumed run.
      total: steps of the schedule's scale.
      record: what `record` gave at the checkpoint that is resumed from.
      processes: of the run; they follow the clock of process 0.

    Attributes:
      phase_start: steps done when the current phase began.
    """

    def __init__(self, minutes: float, total: int, record: Mapping[str, float] | None = None,
                 processes: int = 1):
        if minutes <= 0:
            raise ValueError(f"a budget of {minutes} minutes leaves no time to train")
        record = record or {}
        self.seconds, self.total, self._processes = 60.0 * minutes, total, processes
        # The time between a checkpoint and the process that resumes it is nobody's.
        self._used = record.get("budget/seconds", 0.0)
        self._started = time.monotonic() - process_age()
        self._phase = int(record.get("budget/phase", -1))
        self.phase_start = int(record.get("budget/phase_start", 0))
        self._position = record.get("budget/position", 0.0)  # where the line below begins
        self._anchor: float | None = None  # seconds used up there; None = compiling
        self._now = self.elapsed()

    def elapsed(self) -> float:
        """Seconds used up, by this process and those before it."""
        return self._used + time.monotonic() - self._started

    def begin_phase(self, phase: int, step: int) -> None:
        """Phase `phase` is about to compile, after `step` steps of the run."""
        if phase != self._phase:
            self._phase, self.phase_start = phase, step
        self._position, self._anchor = self.position(step), None

    def compiled(self) -> None:
        """The first step of a phase has ended: from here on time moves the schedule."""
        self._anchor = self._now = self._agreed(self.elapsed())

    def position(self, step: int) -> int:
        """Where the run stands after `step` steps, 0 to total; never less than `step`."""
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
        """The step at which the run will end, by the speed of the current phase so far."""
        place, done = self.position(step), step - self.phase_start
        moved = place - self._position
        return step + int((self.total - place) * done / moved) if moved > 0 else self.total

    def record(self, step: int) -> dict[str, float]:
        """What a checkpoint must keep for a resumed run to go on in the schedule."""
        return {"budget/seconds": self.elapsed(), "budget/position": float(self.position(step)),
                "budget/phase": float(self._phase), "budget/phase_start": float(self.phase_start)}

    def _agreed(self, seconds: float) -> float:
        """Process 0's reading."""
        if self._processes == 1:
            return seconds
        import numpy as np
        from jax.experimental import multihost_utils

        return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
