"""The processes that a benchmark compares, as many at a time as there are GPUs.

In: named command lines. Out: the output of each in DIRECTORY/NAME.log, and which of them failed. A
process of its own each, so that no side finds memory, compiled code or threads of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ERROR_LINES = 20  # of a failed job's log that are shown


@dataclasses.dataclass(frozen=True)
class Job:
    """A command under a name, and what it needs in its environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def python(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, by this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def pretraining(experiment: str, workdir: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
    """The command line of a pre-training, {'optimizer.learning_rate': 1e-4} being its settings."""
    return python("bertjax.main", f"--config=bertjax:{experiment}", f"--workdir={workdir}",
                  *(f"--config.{name}={value}" for name, value in settings.items()))


def run_all(jobs: Iterable[Job], gpus: Sequence[str], logs: pathlib.Path) -> list[str]:
    """Runs every job, the first ones first, and returns the names of those that failed.

    Args:
      gpus: CUDA devices, one a job; '' = wherever the job finds itself (the CPU).
      logs: directory of NAME.log.
    """
    waiting, free, failed = list(jobs), list(gpus), []
    running: dict[str, tuple[str, float, subprocess.Popen[bytes]]] = {}
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and free:
                job, gpu = waiting.pop(0), free.pop(0)
                log = stack.enter_context(open(logs / f"{job.name}.log", "wb"))
                environment = os.environ | dict(job.environment)
                if gpu:
                    environment["CUDA_VISIBLE_DEVICES"] = gpu
                    environment.pop("JAX_PLATFORMS", None)
                print(f"{job.name}: started" + (f" on GPU {gpu}" if gpu else ""), flush=True)
                running[job.name] = gpu, time.monotonic(), subprocess.Popen(
                    job.command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            time.sleep(0.2)
            for name, (gpu, started, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                free.append(gpu)
                seconds = time.monotonic() - started
                if process.returncode == 0:
                    print(f"{name}: done after {seconds:.0f} s", flush=True)
                    continue
                failed.append(name)
                lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()
                print(f"{name}: exit code {process.returncode} after {seconds:.0f} s; {name}.log "
                      "ends with\n" + "\n".join(lines[-ERROR_LINES:]), file=sys.stderr, flush=True)
    return failed
