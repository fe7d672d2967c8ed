"""Has steps compiled by a process of its own (worker.py), and keeps what came out.

In: a configuration, a topology, which stage. Out: `StageInfo` and `Compiled`. The TPU compiler must
be set up before jax starts, and it can be stopped only with its process: in quick mode the worker
ends as soon as memory is assigned, after a tenth of the time; what remains is machine code, and the
cycle estimates that come with it. Results are kept under a hash of the lowered program, the topology
and the versions of jax and compiler.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from bertjax.tools.plan.chips import STEP_MODULE, tpu_environment

PROGRESS_S = 30  # seconds between lines of progress


@dataclasses.dataclass(frozen=True)
class StageInfo:
    """A stage in numbers; bytes are those of one device, padding of layouts aside."""

    name: str
    steps: int | None  # in the whole run; None = not known without the data
    tokens: int  # a step, padding included
    flops: float  # a step: the model's, forward and backward
    rows: int  # a step
    length: int  # tokens of a row
    mesh: Mapping[str, int]
    accumulation: int
    model: str
    execution: str
    remat: str
    parameters: int
    optimizer: int
    batch: int
    device_kind: str

    @property
    def devices(self) -> int:
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["tensor"]

    @property
    def rows_per_device(self) -> int:
        """Rows of a micro-batch on a device."""
        return self.rows // (self.mesh["data"] * self.mesh["fsdp"] * self.accumulation)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step; bytes are those of one device.

    A step that was refused, by the compiler or by arithmetic, has only `wanted` and `limit`.
    """

    hlo: str = ""
    arguments: int = 0
    temporaries: int = 0
    fresh_outputs: int = 0  # results that do not take an argument's place
    code: int = 0
    seconds: float = 0.0  # of the compilation, when it was done
    complete: bool = True  # False = stopped after memory was assigned
    wanted: int = 0
    limit: int = 0
    measured_s: float | None = None  # seconds of a step, local devices only

    @property
    def fits(self) -> bool:
        return not self.wanted

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.fresh_outputs


class Cache:
    """Compiled steps on disk, KEY.json.gz each."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = pathlib.Path(directory).expanduser()

    def path(self, key: str) -> pathlib.Path:
        return self.directory / f"{key}.json.gz"

    def load(self, key: str) -> Compiled | None:
        """The result under `key`, or None if there is none that can be read."""
        try:
            return Compiled(**json.loads(gzip.decompress(self.path(key).read_bytes())))
        except (OSError, ValueError, TypeError, EOFError):
            return None

    def save(self, key: str, compiled: Compiled) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path(key).write_bytes(gzip.compress(json.dumps(dataclasses.asdict(compiled)).encode(), 6))


def compile_stage(
    config: Any,
    topology: str,
    stage: int,
    cache: Cache,
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[StageInfo, Compiled]:
    """The compiled step of one stage, from the cache where it was compiled before.

    Args:
      topology: name of a slice (chips.parse(...).name), or 'local'.
      stage: which one; pre-training has one a phase, fine-tuning has one.
      quick: stop after memory is assigned (TPU only).
      say: receives lines of progress.

    Raises:
      ValueError: the configuration does not work on the topology; names the setting.
      RuntimeError: the compiler failed for another reason than memory.
    """
    request = (config, topology, stage, cache.directory, quick)
    with tempfile.TemporaryDirectory(prefix="bertjax-plan-") as scratch:
        directory = pathlib.Path(scratch)
        (directory / "request").write_bytes(pickle.dumps(request))
        quick = quick and topology != "local"
        environment = {} if topology == "local" else tpu_environment(dump=scratch if quick else None)
        with open(directory / "stderr", "w+") as stderr:
            worker = subprocess.Popen(
                [sys.executable, "-m", "bertjax.tools.plan.worker", str(directory / "request")],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                text=True,
            )
            try:
                return _follow(worker, directory, cache, quick, say)
            finally:
                worker.kill()
                worker.wait()
                worker.stdout.close()


def _follow(
    worker: subprocess.Popen, scratch: pathlib.Path, cache: Cache, quick: bool, say: Callable[[str], None]
) -> tuple[StageInfo, Compiled]:
    """Reads the worker's message and waits until its result is in the cache."""
    began = told = time.monotonic()
    message = json.loads(next((line for line in worker.stdout if line.startswith("{")), "{}"))
    if not message:
        raise RuntimeError(_how_it_ended(worker, scratch / "stderr"))
    if "error" in message:
        raise ValueError(message["error"])
    info, key = StageInfo(**message["stage"]), message.get("key")
    if key is None:
        say(f"{info.name}: not compiled, since by arithmetic it takes more memory than is free")
        return info, Compiled(wanted=message["wanted"], limit=message["limit"])
    if message["cached"]:
        say(f"{info.name}: compiled before, {cache.path(key)}")
        return info, cache.load(key)
    mesh = " x ".join(f"{name} {size}" for name, size in info.mesh.items())
    say(
        f"{info.name}: compiling {info.rows} x {info.length} tokens, {mesh}, accumulation "
        f"{info.accumulation}, {info.execution} ..."
    )
    while worker.poll() is None:
        if quick and (found := assigned_memory(scratch)):
            compiled = dataclasses.replace(found, seconds=time.monotonic() - began)
            cache.save(key, compiled)
            say(f"{info.name}: memory assigned after {compiled.seconds:.0f} s")
            return info, compiled
        time.sleep(0.5)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            say(f"{info.name}: still at work, {told - began:.0f} s")
    compiled = cache.load(key)
    if worker.returncode or compiled is None:
        raise RuntimeError(_how_it_ended(worker, scratch / "stderr"))
    what = "compiled" if compiled.fits else "does not fit"
    say(f"{info.name}: {what}, {compiled.seconds:.0f} s in the compiler")
    return info, compiled


def _how_it_ended(worker: subprocess.Popen, stderr: pathlib.Path, lines: int = 15) -> str:
    """Why a worker left no result: the signal that ended it, and the end of its stderr."""
    status = worker.wait()
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "ended early"
    if status == -signal.SIGKILL:
        how += ", which is what becomes of a process that takes all of this machine's memory"
    last = "\n".join(stderr.read_text(errors="replace").splitlines()[-lines:])
    return f"the compiler's process {how}" + (f":\n{last}" if last else "")


# -------------------------------------------------------------------- what the compiler writes


def assigned_memory(directory: pathlib.Path) -> Compiled | None:
    """Program and memory from the compiler's dump, or None while it is not complete."""
    stem = f"*{STEP_MODULE}*.after_optimizations"
    programs = list(directory.glob(f"{stem}_after_buffer_assignment.txt"))
    assignments = list(directory.glob(f"{stem}-buffer-assignment.txt"))
    if not programs or not assignments:
        return None
    largest = max(programs, key=lambda path: path.stat().st_size)
    if time.time() - largest.stat().st_mtime < 1:  # still being written
        return None
    memory = allocations(max((path.read_text() for path in assignments), key=len))
    return Compiled(largest.read_text(), *memory, complete=False)


def allocations(text: str) -> tuple[int, int, int]:
    """Bytes of (arguments, temporaries, outputs that are no arguments) of a buffer assignment.

    Only HBM counts: other memories are marked by a colour.
    """
    sizes = {"parameter": 0, "preallocated-temp": 0, "maybe-live-out": 0}
    for size, kind in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
        found = next((name for name in sizes if name in kind), None)
        if found and "color" not in kind:
            sizes[found] += int(size)
    return tuple(sizes.values())


def refused(message: str, seconds: float) -> Compiled | None:
    """The compiler's refusal of a program that does not fit, as numbers; None if it is no such."""
    size = r"([\d.]+)([KMGT]?)"
    scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    whole = re.search(rf"Used {size} of {size} hbm", message)
    # Another message tells the temporaries alone; arguments come on top.
    found = whole or re.search(rf"temporaries \({size}\) exceeds available HBM \({size}\)", message)
    if found is None:
        return None
    wanted, limit = (int(float(number) * scale[unit]) for number, unit in (found.group(1, 2), found.group(3, 4)))
    return Compiled(seconds=seconds, wanted=wanted, temporaries=0 if whole else wanted, limit=limit)
