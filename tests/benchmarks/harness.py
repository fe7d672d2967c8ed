"""The processes that a benchmark compares, as many at a time as there are GPUs.

In: named command lines. Out: the output of each in DIRECTORY/NAME.log, and which of them failed; or
of a single one the numbers that it prints as JSON. A process of its own each, so that no side finds
memory, compiled code or threads of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertjax.tools import arguments
from bertjax.tools.arguments import Parser

ROOT = pathlib.Path(__file__).parents[2]
ERROR_LINES = 20  # of a failed job's log that are shown


@dataclasses.dataclass(frozen=True)
class Job:
    """A command under a name, and what it needs in its environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def make_parser(name: str, doc: str | None) -> Parser:
    """The parser of `python -m tests.benchmarks.NAME`, whose help is the docstring of its module."""
    return arguments.make_parser(name, doc, "tests.benchmarks")


def default_gpus(count: int) -> str:
    """'0,1' for --gpus on a machine that has NVIDIA's driver, '' (the CPU) elsewhere."""
    found = shutil.which("nvidia-smi") or os.path.exists("/dev/nvidiactl")
    return ",".join(map(str, range(count))) if found else ""


def python(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, by this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def pretraining(experiment: str, workdir: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
    """The command line of a pre-training, {'optimizer.learning_rate': 1e-4} being its settings."""
    return python(
        "bertjax.main",
        f"--config=bertjax:{experiment}",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    )


def measure(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object on the last line that `python -m module` prints; the rest of it is dropped.

    Raises:
      ValueError: it failed (what it says of that is on stderr), or printed no such line.
    """
    done = subprocess.run(python(module, *arguments), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"{module} ended with code {done.returncode}")
    return last_json(done.stdout)


def last_json(printed: str) -> dict[str, Any]:
    """The last JSON object, one a line, in the output of a measurement; ValueError without one."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"the measurement printed no result; output ends with:\n{printed[-2000:]}")
    return json.loads(lines[-1])


def joules() -> float | None:
    """Energy that the first GPU of this process has taken since its driver was loaded; None where NVML cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(int(first))) / 1e3
    except (ValueError, pynvml.NVMLError):
        return None


def spent(before: float | None) -> float | None:
    """Joules since `before`, a value of `joules`."""
    now = joules()
    return None if before is None or now is None else now - before


def run_all(jobs: Iterable[Job], gpus: Sequence[str], logs: pathlib.Path) -> list[str]:
    """Runs every job, the first ones first, and returns the names of those that failed.

    When it is interrupted or gets SIGTERM, the jobs end with it.

    Args:
      gpus: CUDA devices, one a job; '' = wherever the job finds itself (the CPU).
      logs: directory of NAME.log.
    """
    waiting, free, failed = list(jobs), list(gpus), []
    running: list[_Running] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.pop(0), free.pop(0), logs))
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free.append(job.gpu)
                if not _succeeded(job):
                    failed.append(job.name)
    finally:
        for job in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    return failed


@dataclasses.dataclass(frozen=True)
class _Running:
    name: str
    gpu: str
    started: float
    process: subprocess.Popen[bytes]
    log: pathlib.Path


def _start(job: Job, gpu: str, logs: pathlib.Path) -> _Running:
    environment = os.environ | dict(job.environment)
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
        environment.pop("JAX_PLATFORMS", None)
    path = logs / f"{job.name}.log"
    with open(path, "wb") as log:
        # A session of its own, so that its children can be ended with it.
        process = subprocess.Popen(
            job.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    print(f"{job.name}: started" + (f" on GPU {gpu}" if gpu else ""), flush=True)
    return _Running(job.name, gpu, time.monotonic(), process, path)


def _succeeded(job: _Running) -> bool:
    """Says how a job ended; of a failed one with the end of its log."""
    code, seconds = job.process.returncode, time.monotonic() - job.started
    if code == 0:
        print(f"{job.name}: done after {seconds:.0f} s", flush=True)
        return True
    lines = job.log.read_text(errors="replace").splitlines()[-ERROR_LINES:]
    print(
        f"{job.name}: exit code {code} after {seconds:.0f} s; {job.log.name} ends with\n" + "\n".join(lines),
        file=sys.stderr,
        flush=True,
    )
    return False
