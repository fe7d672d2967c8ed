"""How a run goes between two lines of its log: the means of its metrics, and how fast it is.

In: the metrics and the end of each step, and what was not training (evaluation, saving). Out:
means, and rates (seconds a step, tokens a second, MFU, wait for data) over the steps since the last
time they were asked for; compilation is left out of the rates.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bertjax.process.hardware import peak_flops

_LAST = ("learning_rate",)  # the last step's, as are whole numbers, which count
_ON_DEVICE = 256  # steps whose metrics wait there
_SUM, _COUNT = "log/sum/", "log/count/"


class Means:
    """Metrics of the steps since the last line; they stay on the device until they are asked for,
    so that it is never waited for.

    Args:
      saved: what `saved` gave when the run that goes on was saved.
    """

    def __init__(self, saved: Mapping[str, float] | None = None) -> None:
        saved = saved or {}
        names = [key.removeprefix(_SUM) for key in saved if key.startswith(_SUM)]
        self._steps: list[Mapping[str, Any]] = []
        # name -> sum and number of finite values
        self._sums = {name: (saved[_SUM + name], saved.get(_COUNT + name, 0.0)) for name in names}
        self._last: dict[str, float] = {}

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Scalars of a step that has ended."""
        self._steps.append(metrics)
        if len(self._steps) >= _ON_DEVICE:
            self._add_up()

    def take(self, keep: bool = False) -> dict[str, float]:
        """The mean of each, over the steps where it is finite; of one step, its own value.

        Args:
          keep: the next call gives the same steps again, and those after them.
        """
        self._add_up()
        means = self._last | {name: total / count for name, (total, count) in self._sums.items() if count}
        if not keep:
            self._sums = {}
        return means

    def saved(self) -> dict[str, float]:
        """What a checkpoint keeps, for the next line of a resumed run to be the mean that it would have been."""
        self._add_up()
        sums = {_SUM + name: total for name, (total, _) in self._sums.items()}
        return sums | {_COUNT + name: count for name, (_, count) in self._sums.items()}

    def _add_up(self) -> None:
        steps, self._steps = jax.device_get(self._steps), []
        for step in steps:  # in this order, so that sums do not depend on when they were saved
            for name, value in step.items():
                self._last[name] = number = value.item()
                last = name in _LAST or np.issubdtype(value.dtype, np.integer)
                if not last and math.isfinite(number):
                    total, count = self._sums.get(name, (0.0, 0.0))
                    self._sums[name] = total + number, count + 1


class Meter:
    """Clock of the steps of a run on `mesh`."""

    def __init__(self, mesh: Mesh):
        peak = peak_flops(mesh.devices.flat[0])
        self._peak = peak * mesh.size if peak else None
        self.start(compiling=True)

    def start(self, compiling: bool = False) -> None:
        """A new interval. When compiling, it starts once the first step is done."""
        self._begin, self._steps, self._pause, self._data = time.perf_counter(), 0, 0.0, 0.0
        self.compiling = compiling

    def step_done(self) -> None:
        """A step has ended on the devices."""
        if self.compiling:
            self.start()
        else:
            self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training and does not count."""
        begin = time.perf_counter()
        yield
        self._pause += time.perf_counter() - begin

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """What happens inside is waiting for the next batch."""
        begin = time.perf_counter()
        yield
        self._data += time.perf_counter() - begin

    def rates(self, tokens_per_step: int, flops_per_step: float, keep: bool = False) -> dict[str, float | None]:
        """The rates since the last call; None where no step, or no peak of the device, is known.

        Args:
          keep: the interval goes on.

        Returns:
          tokens_per_second; mfu, model FLOPs over the peak of all devices, 0 to 1; step_time and
          data_wait, in seconds a step.
        """
        steps, data = self._steps, self._data
        elapsed = time.perf_counter() - self._begin - self._pause
        if not keep:
            self.start()
        if not steps:
            return dict.fromkeys(("tokens_per_second", "mfu", "step_time", "data_wait"))
        step_time = elapsed / steps
        mfu = flops_per_step / step_time / self._peak if self._peak and flops_per_step else None
        speed = tokens_per_step / step_time
        return {"tokens_per_second": speed, "mfu": mfu, "step_time": step_time, "data_wait": data / steps}
