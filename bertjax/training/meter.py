"""How fast a run is: seconds a step, tokens a second, MFU, and how long it waited for data.

In: the end of each step, and what was not training (evaluation, saving). Out: rates over the steps
since the last time they were asked for; compilation is left out.
"""

import contextlib
import time
from collections.abc import Iterator

from jax.sharding import Mesh

from bertjax.training.hardware import peak_flops


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

    def rates(self, tokens_per_step: int, flops_per_step: float) -> dict[str, float | None]:
        """The rates since the last call; None where no step, or no peak of the device, is known.

        Returns:
          tokens_per_second; mfu, model FLOPs over the peak of all devices, 0 to 1; step_time and
          data_wait, in seconds a step.
        """
        steps, elapsed = self._steps, time.perf_counter() - self._begin - self._pause
        data = self._data
        self.start()
        if not steps:
            return dict.fromkeys(("tokens_per_second", "mfu", "step_time", "data_wait"))
        step_time = elapsed / steps
        mfu = flops_per_step / step_time / self._peak if self._peak and flops_per_step else None
        return {"tokens_per_second": tokens_per_step / step_time, "mfu": mfu,
                "step_time": step_time, "data_wait": data / steps}
