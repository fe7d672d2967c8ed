"""Programs that are compiled in the background, side by side, before their first use.

In: jitted functions and the shapes of their arguments. Out: time; a later call with the same shapes
finds the program that was made here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bertjax.training import sharding


class Ahead:
    """What is being compiled, by a key of the caller's.

    Python lowers one program after the other, in the order of `start`; XLA compiles each as soon as
    it is lowered, outside Python, which can make the weights meanwhile. Only before training: a
    compiler that tries out kernels must not share the device with it. Does nothing in a run of
    several processes, which must compile in the same order.
    """

    def __init__(self) -> None:
        # Their threads are no daemons: the end of Python would abort the process in the middle of
        # a compilation.
        self._lowering = ThreadPoolExecutor(1)
        self._compiling = ThreadPoolExecutor()
        self._programs: dict[Hashable, Future[Future[Any]]] = {}

    def start(self, key: Hashable, function: Any, *arguments: Any) -> None:
        """Puts a jitted function in the queue, unless its key was there before.

        Args:
          arguments: arrays, or their shapes with shardings.
        """
        if jax.process_count() == 1 and key not in self._programs:
            self._programs[key] = self._lowering.submit(
                lambda: self._compiling.submit(function.lower(*arguments).compile))

    def lowered_first(self) -> None:
        """Returns when the first program is lowered, which so had Python to itself."""
        for program in list(self._programs.values())[:1]:
            program.result()

    def wait(self, key: Hashable | None = None) -> None:
        """Returns when the program `key` is compiled, or all are, if any; raises what went wrong.
        """
        wanted = self._programs.values() if key is None else filter(None, [self._programs.get(key)])
        for program in list(wanted):
            program.result().result()


def batch_shapes(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What compilation needs to know of a global batch on the mesh; values do not matter."""
    rows = sharding.batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=rows)
            for name, value in batch.items()}
