"""Has steps compiled by a worker process, and keeps what came out.

In: a configuration, a topology, which stage. Out: `StageInfo` and `Compiled`. The worker
(worker.py) is a process of its own because the TPU compiler must be set up before jax starts, and
because it can be stopped: in quick mode it ends as soon as the compiler has assigned memory, which
is after a tenth of the time; what remains is machine code, and the cycle estimates that come with
it.

Results are kept on disk under a hash of the lowered program, the topology and the versions of jax
and compiler: whatever changes the program is compiled again, the rest is not.
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
    """Compiled steps on disk: KEY.json with the numbers, KEY.hlo.gz with the program."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = pathlib.Path(directory).expanduser()

    def load(self, key: str) -> Compiled | None:
        """The result under `key`, or None if there is none that can be read."""
        try:
            numbers = json.loads((self.directory / f"{key}.json").read_text())
            hlo = gzip.decompress((self.directory / f"{key}.hlo.gz").read_bytes()).decode()
            return Compiled(hlo, **numbers)
        except (OSError, ValueError, TypeError, EOFError):
            return None

    def save(self, key: str, compiled: Compiled) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        numbers = dataclasses.asdict(compiled)
        hlo = numbers.pop("hlo")
        (self.directory / f"{key}.hlo.gz").write_bytes(gzip.compress(hlo.encode(), 6))
        (self.directory / f"{key}.json").write_text(json.dumps(numbers, indent=1))


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
      say: told what goes on.

    Raises:
      ValueError: the configuration does not work on the topology; names the setting.
      RuntimeError: the compiler failed for another reason than memory.
    """
    with tempfile.TemporaryDirectory(prefix="bertjax-plan-") as scratch:
        request = pathlib.Path(scratch) / "request"
        request.write_bytes(
            pickle.dumps(
                {
                    "config": config.copy_and_resolve_references(),
                    "topology": topology,
                    "stage": stage,
                    "cache": str(cache.directory),
                    "quick": quick,
                }
            )
        )
        environment = dict(os.environ)
        if topology != "local":
            environment |= tpu_environment(dump=scratch if quick else None)
        stderr = open(pathlib.Path(scratch) / "stderr", "w+")
        worker = subprocess.Popen(
            [sys.executable, "-m", "bertjax.tools.plan.worker", str(request)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
        )
        try:
            return _follow(worker, pathlib.Path(scratch), cache, quick and topology != "local", say)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
            stderr.close()


def _follow(
    worker: subprocess.Popen, scratch: pathlib.Path, cache: Cache, quick: bool, say: Callable[[str], None]
) -> tuple[StageInfo, Compiled]:
    """Reads the worker's messages until its result is in the cache."""
    messages: dict[str, Any] = {}
    began = time.monotonic()

    def read() -> bool:
        line = worker.stdout.readline()
        if line.startswith("{"):
            messages.update(json.loads(line))
        return bool(line)

    while not messages.keys() & {"key", "error", "wanted"} and read():
        pass
    if "error" in messages:
        raise ValueError(messages["error"])
    if "wanted" in messages:
        info = StageInfo(**messages["stage"])
        say(f"{info.name}: not compiled, since by arithmetic it takes more memory than is free")
        return info, Compiled(wanted=messages["wanted"], limit=messages["limit"])
    if "key" not in messages:
        raise RuntimeError(_how_it_ended(worker, scratch / "stderr"))
    info, key = StageInfo(**messages["stage"]), messages["key"]
    if messages["cached"]:
        say(f"{info.name}: compiled before, {cache.directory / key}.json")
        return info, cache.load(key)

    mesh = " x ".join(f"{name} {size}" for name, size in info.mesh.items())
    say(
        f"{info.name}: compiling {info.rows} x {info.length} tokens, {mesh}, accumulation "
        f"{info.accumulation}, {info.execution} ..."
    )
    told = time.monotonic()
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
    while read():
        pass
    if "failed" in messages:
        raise RuntimeError(f"the compiler failed:\n{messages['failed']}")
    compiled = cache.load(key)
    if compiled is None:
        raise RuntimeError(_how_it_ended(worker, scratch / "stderr"))
    what = "compiled" if compiled.fits else "does not fit"
    say(f"{info.name}: {what}, {compiled.seconds:.0f} s in the compiler")
    return info, compiled


def _how_it_ended(worker: subprocess.Popen, stderr: pathlib.Path, lines: int = 15) -> str:
    """Why a worker left no result: the signal that ended it, and the last it said."""
    status = worker.wait()
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "ended early"
    if status == -signal.SIGKILL:
        how += ", which is what becomes of a process that takes all of this machine's memory"
    last = "\n".join(stderr.read_text(errors="replace").splitlines()[-lines:])
    return f"the compiler's process {how}" + (f":\n{last}" if last else "")


# -------------------------------------------------------------------- what the compiler writes

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)


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
    tables = [path.read_text() for path in assignments]
    arguments, temporaries, outputs = allocations(max(tables, key=len))
    return Compiled(largest.read_text(), arguments, temporaries, outputs, complete=False)


def allocations(text: str) -> tuple[int, int, int]:
    """Bytes of (arguments, temporaries, outputs that are no arguments) of a buffer assignment.

    Only HBM counts: other memories are marked by a colour.
    """
    arguments = temporaries = outputs = 0
    for size, kind in _ALLOCATION.findall(text):
        if "color" in kind:
            continue
        if kind.startswith("parameter"):
            arguments += int(size)
        elif "preallocated-temp" in kind:
            temporaries += int(size)
        elif "maybe-live-out" in kind:
            outputs += int(size)
    return arguments, temporaries, outputs


def refused(message: str, seconds: float) -> Compiled | None:
    """The compiler's refusal of a program that does not fit, as numbers; None if it is no such."""
    size = r"([\d.]+)([KMGT]?)"
    scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    whole = re.search(rf"Used {size} of {size} hbm", message)
    # Another message tells the temporaries alone; arguments come on top.
    part = re.search(rf"temporaries \({size}\) exceeds available HBM \({size}\)", message)
    found = whole or part
    if found is None:
        return None
    wanted = int(float(found[1]) * scale[found[2]])
    return Compiled(
        seconds=seconds, wanted=wanted, temporaries=0 if whole else wanted, limit=int(float(found[3]) * scale[found[4]])
    )
