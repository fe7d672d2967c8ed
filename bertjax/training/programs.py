"""Compiled programs: in the background before their first use, and kept with the run.

In: jitted functions and the shapes of their arguments. Out: executables. On a GPU, XLA chooses among algorithms by
timing them, so that compiling the same program again may give other sums. A run that resumes therefore loads the
executables that it kept in its directory (`Programs.keep_in`).
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils, serialize_executable
from jax.sharding import Mesh

from bertjax.formats.files import write_whole
from bertjax.process.distributed import wait_for_all
from bertjax.training import sharding

DIRECTORY = "programs"  # of a run
POLL_S = 0.2


class Programs:
    """Compiles the programs of a run.

    Python lowers one program after the other, in the order of `start`; XLA compiles each as soon as it is lowered,
    outside Python, which can make the weights meanwhile. Only before training: a compiler that tries out kernels must
    not share the device with it. Nothing is compiled in the background in a run of several processes, which must
    compile in the same order.
    """

    def __init__(self) -> None:
        # Their threads are not daemons: the end of Python would abort the process in the middle of a compilation.
        self._lowering = ThreadPoolExecutor(1)
        self._compiling = ThreadPoolExecutor()
        self._started: dict[Hashable, Future[Future[Any]]] = {}
        self._directory: epath.Path | None = None

    def keep_in(
        self,
        directory: epath.Path,
        devices: Sequence[jax.Device],
        made_for: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        """Keeps what `wrap` compiles from now on in `directory`, and takes it from there.

        Each executable is a file NAME-KEY: its SHA-256, and what jax serializes. It can do whatever a program can, so
        the directory must be the run's own.

        Args:
          directory: local or gs://, shared by all processes.
          devices: of the programs, in the order of their mesh.
          made_for: what an executable depends on beside its program: card, jax, their numbers.
          tell: called with a reason when a program that was there before has to be compiled again.
        """
        self._directory, self._devices, self._tell = epath.Path(directory), list(devices), tell
        self._made_for = json.dumps(made_for, sort_keys=True)
        self._before = [path.name for path in self._directory.iterdir()] if self._directory.exists() else []

    def wrap(self, name: str, function: Any) -> Any:
        """A jitted function under a name of its own; its executables are kept if `keep_in` says so.

        Its calls must have the shardings that it was jitted with.
        """
        return Program(name, function, self.executable) if self._directory else function

    def start(self, key: Hashable, function: Any, *arguments: Any) -> None:
        """Compiles a jitted function in the background, unless its key was there before.

        Args:
          arguments: arrays, or their shapes with shardings.
        """

        def lower() -> Future[Any]:
            lowered = function.lower(*arguments)
            if isinstance(function, Program):
                return self._compiling.submit(function.compile, lowered, arguments)
            return self._compiling.submit(lowered.compile)

        if jax.process_count() == 1 and key not in self._started:
            self._started[key] = self._lowering.submit(lower)

    def lowered_first(self) -> None:
        """Returns when the first program is lowered: other Python threads would slow it down."""
        for program in list(self._started.values())[:1]:
            program.result()

    def wait(self, key: Hashable | None = None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Returns when the program `key` is compiled, or all are, if any; raises what went wrong.

        meanwhile: called now and then.
        """
        wanted = self._started.values() if key is None else filter(None, [self._started.get(key)])
        for program in list(wanted):
            result(result(program, meanwhile), meanwhile)

    def executable(self, name: str, lowered: jax.stages.Lowered) -> Any:
        """The executable of a lowered program: the one that is kept, or a new one, kept now.

        All processes call it, in the same order.
        """
        key = hashlib.sha256(f"{self._made_for}\n{lowered.as_text()}".encode()).hexdigest()[:16]
        path = self._directory / f"{name}-{key}"
        kept = self._load(path, lowered)
        if jax.process_count() > 1:  # all load it, or all compile it
            wait_for_all(f"loading {name}")
            kept = kept if multihost_utils.process_allgather(np.bool_(kept is not None)).all() else None
        if kept is not None:
            return kept
        if path.name not in self._before and any(other.startswith(f"{name}-") for other in self._before):
            self._tell(f"the program {name} was compiled again, since it is not the one kept in {self._directory}")
        executable = lowered.compile()
        if jax.process_index() == 0:
            self._save(path, executable)
        # The first exchange inside it has a time-out, which compilers of unequal speed may exceed.
        wait_for_all(f"compiling {name}")
        return executable

    def _load(self, path: epath.Path, lowered: jax.stages.Lowered) -> Any:
        """The executable of a file, or None if it is not there or of no use."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, content = content[:32], content[32:]
        reason = "its content is damaged"
        if hashlib.sha256(content).digest() == digest:
            try:
                return serialize_executable.deserialize_and_load(
                    content, lowered.in_tree, lowered.out_tree, execution_devices=self._devices
                )
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                reason = str(error)
        self._tell(f"{path} could not be loaded ({reason}), so it was compiled again")
        return None

    def _save(self, path: epath.Path, executable: Any) -> None:
        try:
            content, _, _ = serialize_executable.serialize(executable)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(content).digest() + content)
        # NotImplementedError is jax's word for programs with large constants.
        except (ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError) as error:
            self._tell(f"the program {path.name} could not be kept: {error}")


def result(future: Future[Any], meanwhile: Callable[[], None]) -> Any:
    """What a future gives or raises; `meanwhile` is called now and then."""
    while not future.done():
        wait_for_futures([future], POLL_S)
        meanwhile()
    return future.result()


class Program:
    """A jitted function whose executables, one for each shape of its arguments, are kept."""

    def __init__(self, name: str, function: Any, executable: Callable[[str, jax.stages.Lowered], Any]):
        self.name, self.lower, self._executable = name, function.lower, executable
        self._executables: dict[Hashable, Any] = {}

    def compile(self, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        """The executable for arguments of these shapes, which calls find from now on."""
        shapes = _shapes(arguments)
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        self._executables[shapes] = executable = self._executable(f"{self.name}-{digest}", lowered)
        return executable

    def __call__(self, *arguments: Any) -> Any:
        executable = self._executables.get(_shapes(arguments))
        return (executable or self.compile(self.lower(*arguments), arguments))(*arguments)


def _shapes(arguments: tuple[Any, ...]) -> Hashable:
    """Shapes of all arguments but the first: parameters and state never change theirs."""
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arguments[1:]))


def batch_shapes(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What compilation needs to know of a global batch on the mesh; values do not matter."""
    rows = sharding.batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=rows) for name, value in batch.items()}
