"""Compiles one step in a process of its own, and keeps the result.

In: a configuration, a slice (None = this machine), which stage. Out: `StageInfo` and `Compiled`. The TPU compiler can
be stopped only with its process: in quick mode that ends as soon as memory is assigned, after a tenth of the time; what
remains is machine code, and the cycle estimates that come with it. Results are kept under a hash of the lowered
program, the topology and the versions of the compiler.
"""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import time
from typing import Any

import jax

from bertjax.config import Config
from bertjax.formats.files import scratch_directory
from bertjax.process import hardware
from bertjax.process.hardware import VALID, Slice
from bertjax.tools.plan.estimate import Compiled
from bertjax.tools.stages import Stage, StageInfo, stages


class CompilerFailed(RuntimeError):
    """For another reason than memory."""


STEP_MODULE = "jit_train_step"  # what the compiler calls Trainer.train_step
PROGRESS_S = 30  # seconds between lines of progress


def check_libtpu() -> None:
    """ValueError, which says what to install, if libtpu is missing or belongs to another jax."""
    requirements = "\n".join(importlib.metadata.requires("jax") or ())
    wanted = (re.findall(r"(?m)^libtpu\s*==\s*([\d.]+\*?).*extra == .tpu.", requirements) or [""])[0]
    problem = "a TPU topology needs the TPU compiler, which is in the package libtpu"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("libtpu")
        problem = f"libtpu {found} does not belong to jax {importlib.metadata.version('jax')}"
        if found.startswith(wanted.rstrip("*")):
            return
    raise ValueError(
        f"{problem}: pip install --no-deps --target DIR 'libtpu{'==' * bool(wanted)}{wanted}', and add DIR to "
        "PYTHONPATH (a directory of its own keeps it away from runs on this machine), or install bertjax's extra 'tpu'"
    )


def tpu_devices(piece: Slice) -> list[Any]:
    """The devices of a slice, to compile for; ValueError if libtpu knows no such slice."""
    from jax.experimental import topologies

    # On v4 two cores are one device, as on real machines; the default host has 2x2 chips.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if piece.chip.name == "v4" else {}
    if piece.chips < 4:
        options["chips_per_host_bounds"] = (*piece.shape, 1, 1)[:3]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=piece.name, **options).devices
    except Exception as error:  # whatever the plug-in raises
        reason = str(error).splitlines()[0]
        raise ValueError(f"the TPU compiler does not know the topology {piece.name}: {reason}\n{VALID}") from error
    if len(found) != piece.devices:
        raise ValueError(f"topology {piece.name} has {len(found)} devices, not {piece.devices}")
    return list(found)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def load(path: pathlib.Path) -> Compiled | None:
    """What `save` wrote, or None if there is nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, EOFError):
        return Compiled(**json.loads(gzip.decompress(path.read_bytes())))


def save(path: pathlib.Path, compiled: Compiled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(compiled)).encode(), 6))


def compile_stage(
    config: Config, piece: Slice | None, number: int, cache: pathlib.Path, quick: bool
) -> tuple[StageInfo, Compiled]:
    """The compiled step of the stage of this number, from the cache where it was compiled before; see plans.make_plan.

    Raises:
      ValueError: the configuration does not work on the topology; names the setting.
      RuntimeError: the compiler failed for another reason than memory.
    """
    new = multiprocessing.get_context("spawn")
    ours, theirs = new.Pipe(duplex=False)
    with scratch_directory() as scratch:
        if piece:  # the caller's flags are meant for this machine's devices
            dump = f"--xla_dump_to={scratch} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={STEP_MODULE}"
            os.environ["XLA_FLAGS"] = dump if quick else ""
        worker = new.Process(target=_work, args=(theirs, config, piece, number, cache, quick, scratch))
        worker.start()
        theirs.close()
        try:
            found = ours.recv()
        except EOFError:
            worker.join()
            raise RuntimeError(f"the compiler's process {how_it_ended(worker.exitcode)}") from None
        finally:
            worker.kill()  # without waiting for a compilation that is not needed any more
            worker.join()
    if isinstance(found, Exception):
        raise found
    return found


def how_it_ended(status: int) -> str:
    """Why a process with this exit status left no result."""
    if status >= 0:
        return "ended early"
    killed = ", as happens to a process that takes all of this machine's memory"
    return f"was ended by {signal.Signals(-status).name}" + killed * (status == -signal.SIGKILL)


def _work(answer: Any, config: Config, piece: Slice | None, number: int, *how: Any) -> None:
    """Sends (StageInfo, Compiled) of a stage, or the error by which its settings or the compiler fail."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for it ends it
    try:
        stage = stages(config, tpu_devices(piece) if piece else jax.devices())[number]
        found: Any = stage.info, _compiled(stage, piece, *how)
    except (ValueError, CompilerFailed) as error:
        found = error
    answer.send(found)


def _compiled(stage: Stage, piece: Slice | None, cache: pathlib.Path, quick: bool, dump: pathlib.Path) -> Compiled:
    """The step from the cache, or compiled, or refused without compilation."""
    info, trainer = stage.info, stage.trainer
    platform = trainer.mesh.devices.flat[0].platform
    # A process that takes more than there is makes the machine swap, and then Linux ends it.
    if (
        piece is None
        and platform == "cpu"
        and (wanted := stage.expected_bytes) > (limit := hardware.local_device_bytes())
    ):
        say(f"{info.name}: not compiled, since by arithmetic it takes more memory than is free")
        return Compiled(wanted=int(wanted), limit=limit)
    traced = trainer.train_step(stage.objective).trace(trainer.abstract_state(stage.objective), stage.batch)
    lowered = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    # Everything that decides what the compiler makes of a program.
    versions = map(importlib.metadata.version, ["jax", "jaxlib", *(["libtpu"] if platform == "tpu" else [])])
    place = piece.name if piece else "local"
    parts = [lowered.as_text(), place, platform, *versions, repr(trainer.compiler_options)]
    path = cache / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.json.gz"
    found = load(path)
    # What did not fit this machine may fit now: there may be more memory free.
    if found is not None and (found.complete or quick) and not (piece is None and found.limit):
        say(f"{info.name}: compiled before, {path}")
        return found
    say(f"{info.name}: compiling {info.rows} x {info.length} tokens, {info.split}, {info.execution} ...")
    compiling = concurrent.futures.ThreadPoolExecutor().submit(lowered.compile)
    began, told, found = time.monotonic(), 1, None
    parent = multiprocessing.parent_process()
    while found is None and not concurrent.futures.wait([compiling], timeout=0.5).done:
        if parent and not parent.is_alive():
            os._exit(1)  # it was killed: nothing waits for this compilation
        if (seconds := time.monotonic() - began) > told * PROGRESS_S:
            told += 1
            say(f"{info.name}: still at work, {seconds:.0f} s")
        found = assigned_memory(dump) if quick else None
    found = found or _result(stage, compiling, piece)
    what = "does not fit" if not found.fits else "compiled" if found.complete else "memory assigned"
    say(f"{info.name}: {what} after {time.monotonic() - began:.0f} s")
    save(path, found)
    return found


def _result(stage: Stage, compiling: concurrent.futures.Future, piece: Slice | None) -> Compiled:
    """What the compiler says of the step; of local devices also its time."""
    try:
        executable = compiling.result()
    except jax.errors.JaxRuntimeError as error:
        if compiled := refused(str(error)):
            return compiled
        raise CompilerFailed(f"the compiler failed:\n{str(error)[:3000]}") from None
    memory = executable.memory_analysis()
    compiled = Compiled(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )
    if piece:
        return compiled
    limit = hardware.local_device_bytes()
    if limit and compiled.arguments + compiled.temporaries + compiled.fresh_outputs > limit:
        return dataclasses.replace(compiled, limit=limit)
    return dataclasses.replace(compiled, measured_s=stage.measure(executable))


def assigned_memory(directory: pathlib.Path) -> Compiled | None:
    """Program and memory from the compiler's dump, or None while it is not complete."""
    stem = f"*{STEP_MODULE}*.after_optimizations"
    programs = list(directory.glob(f"{stem}_after_buffer_assignment.txt"))
    assignments = list(directory.glob(f"{stem}-buffer-assignment.txt"))
    largest = max(programs, key=lambda path: path.stat().st_size, default=None)
    if not largest or not assignments or time.time() - largest.stat().st_mtime < 1:  # still being written
        return None
    memory = allocations(max((path.read_text() for path in assignments), key=len))
    return Compiled(largest.read_text(), *memory, complete=False)


def allocations(text: str) -> tuple[int, int, int]:
    """Bytes of (arguments, temporaries, outputs that are not arguments) of a buffer assignment, of HBM: other memories
    are marked by a colour."""
    sizes = {"parameter": 0, "preallocated-temp": 0, "maybe-live-out": 0}
    for size, kind in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
        found = next((name for name in sizes if name in kind), None)
        if found and "color" not in kind:
            sizes[found] += int(size)
    return tuple(sizes.values())


def refused(message: str) -> Compiled | None:
    """The compiler's refusal of a program that does not fit, as numbers; None if it is no such."""
    size = r"([\d.]+)([KMGT]?)"
    whole = re.search(rf"Used {size} of {size} hbm", message)
    # Another message tells the temporaries alone; arguments come on top.
    found = whole or re.search(rf"temporaries \({size}\) exceeds available HBM \({size}\)", message)
    if found is None:
        return None
    wanted, limit = (int(float(found[i]) * 2 ** (10 * " KMGT".index(found[i + 1] or " "))) for i in (1, 3))
    return Compiled(wanted=wanted, temporaries=0 if whole else wanted, limit=limit)
