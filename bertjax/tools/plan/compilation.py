"""Compiles one step in a process of its own, and keeps the result.

In: a configuration, a slice (None = this machine), which stage. Out: `StageInfo` and `Compiled`. The TPU compiler must
be set up before jax starts, and it can be stopped only with its process: in quick mode the process ends as soon as
memory is assigned, after a tenth of the time; what remains is machine code, and the cycle estimates that come with it.
Results are kept under a hash of the lowered program, the topology and the versions of the compiler.
"""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
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
from collections.abc import Callable
from typing import Any

import jax

from bertjax.config import Config
from bertjax.model.kernels import compiler_options
from bertjax.process import hardware
from bertjax.tools.plan.estimate import VALID, Slice
from bertjax.tools.plan.stages import Compiled, Stage, StageInfo, stages

# ------------------------------------------------------------------------ devices to compile for


def local_device_bytes() -> int | None:
    """Memory of a device of this machine, if known: of CPU devices, their share of what is free."""
    return free_bytes() // jax.device_count() if jax.default_backend() == "cpu" else hardware.device_bytes()


def free_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int:
    """Memory that a process can take before the machine swaps; without these files, all of it."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable: +(\d+) kB", pathlib.Path(meminfo).read_text()):
            free = 1024 * int(found[1])
    with contextlib.suppress(OSError, ValueError):  # it says 'max' where there is no limit
        free = min(free, int(pathlib.Path(limit).read_text()))
    return free


def check_libtpu() -> None:
    """ValueError, which says what to install, if libtpu is missing or belongs to another jax."""
    requirements = "\n".join(importlib.metadata.requires("jax") or ())
    release = re.search(r"^libtpu\s*==\s*([\d.]+\*?).*extra == .tpu.", requirements, re.MULTILINE)
    wanted = release[1] if release else ""
    install = (
        f"pip install --no-deps --target DIR 'libtpu{'==' * bool(wanted)}{wanted}', and add DIR to PYTHONPATH (a "
        "directory of its own keeps it away from runs on this machine), or install bertjax's extra 'tpu'"
    )
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"a TPU topology needs the TPU compiler, which is in the package libtpu: {install}") from None
    if not version.startswith(wanted.rstrip("*")):
        raise ValueError(f"libtpu {version} does not belong to jax {importlib.metadata.version('jax')}: {install}")


def tpu_devices(piece: Slice) -> list[Any]:
    """The devices of a slice, to compile for; ValueError if libtpu knows no such slice."""
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if piece.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # two cores as one device, as on real machines
    if piece.chips < 4:  # the default host has 2x2 chips
        options["chips_per_host_bounds"] = (*piece.shape, 1, 1)[:3]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=piece.name, **options).devices
    except Exception as error:  # whatever the plug-in raises
        raise ValueError(
            f"the TPU compiler does not know the topology {piece.name}: {str(error).splitlines()[0]}\n{VALID}"
        ) from error
    if len(found) != piece.devices:
        raise ValueError(f"topology {piece.name} has {len(found)} devices, not {piece.devices}")
    return list(found)


# -------------------------------------------------------------------- the process that compiles

STEP_MODULE = "jit_train_step"  # what the compiler calls Trainer.train_step
PROGRESS_S = 30  # seconds between lines of progress


def load(path: pathlib.Path) -> Compiled | None:
    """What `save` wrote, or None if there is nothing that can be read."""
    try:
        return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, ValueError, TypeError, EOFError):
        return None


def save(path: pathlib.Path, compiled: Compiled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(compiled)).encode(), 6))


def compile_stage(
    config: Config, piece: Slice | None, number: int, cache: pathlib.Path, quick: bool, say: Callable[[str], None]
) -> tuple[StageInfo, Compiled]:
    """The compiled step of one stage, from the cache where it was compiled before.

    Args:
      piece: None = the devices of this machine.
      number: of the stage; pre-training has one per phase, fine-tuning has one.
      cache: directory of compiled steps.
      quick: stop after memory is assigned (TPU only).
      say: receives lines of progress.

    Raises:
      ValueError: the configuration does not work on the topology; names the setting.
      RuntimeError: the compiler failed for another reason than memory.
    """
    environment = {}
    with tempfile.TemporaryDirectory(prefix="bertjax-plan-") as scratch:
        if piece:  # compile for TPU without having one
            dump = f"--xla_dump_to={scratch} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={STEP_MODULE}"
            environment = {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": dump if quick else "",  # the caller's are meant for this machine's devices
                "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here holds a chip
                "TPU_ACCELERATOR_TYPE": "v5litepod-1",
                "TPU_WORKER_HOSTNAMES": "localhost",
            }
        directory = pathlib.Path(scratch)
        (directory / "request").write_bytes(pickle.dumps((config, piece, number, cache, quick)))
        program = "import sys; from bertjax.tools.plan import compilation; compilation.work(sys.argv[1])"
        with open(directory / "stderr", "w") as stderr:
            worker = subprocess.Popen(
                [sys.executable, "-c", program, scratch],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                text=True,
            )
        try:
            for line in worker.stdout:
                if line.startswith(PROGRESS):
                    say(line.removeprefix(PROGRESS).rstrip())
            if worker.wait():
                raise RuntimeError(_how_it_ended(worker, directory / "stderr"))
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
        found = pickle.loads((directory / "result").read_bytes())
    if isinstance(found, str):
        raise ValueError(found)
    return found


PROGRESS = "plan: "  # begins a worker's lines of progress on its standard output


def _say(text: str) -> None:
    print(PROGRESS + text, flush=True)


def _how_it_ended(worker: subprocess.Popen, stderr: pathlib.Path, lines: int = 15) -> str:
    """Why a worker left no result: the signal that ended it, and the end of its stderr."""
    status = worker.wait()
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "ended early"
    if status == -signal.SIGKILL:
        how += ", which is what becomes of a process that takes all of this machine's memory"
    last = "\n".join(stderr.read_text(errors="replace").splitlines()[-lines:])
    return f"the compiler's process {how}" + (f":\n{last}" if last else "")


# ------------------------------------------------------------------------------ in that process


def work(scratch: str) -> None:
    """Does the request in `scratch`; leaves (StageInfo, Compiled) there, or why the settings cannot work."""
    directory = pathlib.Path(scratch)
    config, piece, number, cache, quick = pickle.loads((directory / "request").read_bytes())
    try:
        stage = stages(config, tpu_devices(piece) if piece else jax.devices())[number]
    except ValueError as error:
        found = str(error)
    else:
        found = stage.info, _compiled(stage, piece, cache, quick, directory)
    (directory / "result").write_bytes(pickle.dumps(found))
    os._exit(0)  # without waiting for a compilation that is not needed any more


def _compiled(stage: Stage, piece: Slice | None, cache: pathlib.Path, quick: bool, directory: pathlib.Path) -> Compiled:
    """The step from the cache, or compiled, or refused without compilation."""
    began, info, platform = time.monotonic(), stage.info, stage.trainer.mesh.devices.flat[0].platform
    # A process that takes more than there is makes the machine swap, and then Linux ends it.
    if piece is None and platform == "cpu" and (wanted := stage.expected_bytes) > (limit := local_device_bytes()):
        _say(f"{info.name}: not compiled, since by arithmetic it takes more memory than is free")
        return Compiled(wanted=int(wanted), limit=limit)
    step = stage.trainer.train_step(stage.objective)
    traced = step.trace(stage.trainer.abstract_state(stage.objective), stage.batch)
    lowered = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    path = cache / f"{_key(lowered.as_text(), piece.name if piece else 'local', platform)}.json.gz"
    found = load(path)
    # What did not fit this machine may fit now: there may be more memory free.
    if found is not None and (found.complete or quick) and not (piece is None and found.limit):
        _say(f"{info.name}: compiled before, {path}")
        return found
    _say(
        f"{info.name}: compiling {info.rows} x {info.length} tokens, {info.mesh_text}, accumulation "
        f"{info.accumulation}, {info.execution} ..."
    )
    compiling = concurrent.futures.ThreadPoolExecutor().submit(lowered.compile)
    started = told = time.monotonic()
    while not concurrent.futures.wait([compiling], timeout=0.5).done:
        if piece and quick and (found := assigned_memory(directory)):
            found = dataclasses.replace(found, seconds=time.monotonic() - began)
            _say(f"{info.name}: memory assigned after {found.seconds:.0f} s")
            break
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            _say(f"{info.name}: still at work, {told - began:.0f} s")
    else:
        found = _result(stage, compiling, started, piece)
        what = "compiled" if found.fits else "does not fit"
        _say(f"{info.name}: {what}, {found.seconds:.0f} s in the compiler")
    save(path, found)
    return found


def _result(stage: Stage, compiling: concurrent.futures.Future, started: float, piece: Slice | None) -> Compiled:
    """What the compiler says of the step; of local devices also its time."""
    seconds = time.monotonic() - started
    try:
        executable = compiling.result()
    except jax.errors.JaxRuntimeError as error:
        if compiled := refused(str(error), seconds):
            return compiled
        sys.exit(f"the compiler failed:\n{str(error)[:3000]}")
    memory = executable.memory_analysis()
    compiled = Compiled(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        seconds,
    )
    if piece:
        return compiled
    limit = local_device_bytes()
    if limit and compiled.total > limit:
        return dataclasses.replace(compiled, limit=limit)
    return dataclasses.replace(compiled, measured_s=stage.measure(executable))


def _key(program: str, topology: str, platform: str) -> str:
    """Hash of everything that decides what the compiler makes of a program."""
    packages = ["jax", "jaxlib", *(["libtpu"] if platform == "tpu" else [])]
    versions = map(importlib.metadata.version, packages)
    parts = [program, topology, platform, *versions, repr(compiler_options(platform))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


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
