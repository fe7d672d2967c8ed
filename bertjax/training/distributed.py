"""Joins the processes of one run: TPU pods, SLURM, or a coordinator named on the command line.

Call `initialize` before anything else touches jax. In: flags and the environment. Out: nothing but
jax.process_index() and jax.process_count(); each process sees all devices of the run.
"""

import contextlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from bertjax.training.preemption import EXIT_PREEMPTED

log = logging.getLogger(__name__)

EXIT_NO_PEERS = 77  # not all processes came in time


class Cluster(NamedTuple):
    """How the processes find each other; None = jax asks the environment."""

    source: str
    coordinator: str | None = None  # host:port of process 0
    processes: int | None = None
    process_id: int | None = None


def detect(coordinator: str = "", processes: int = 0, process_id: int = -1,
           environment: Mapping[str, str] = os.environ,
           tpu_devices: bool | None = None) -> Cluster | None:
    """Where this process belongs, or None for a run of one process.

    Explicit arguments count first, then SLURM (a job step of several tasks), then a TPU VM.

    Args:
      coordinator, processes, process_id: host:port of process 0, their number, and which one this
        is; give all three or none.
      tpu_devices: whether this machine has TPU chips; None = look.

    Raises:
      ValueError: some of the three are missing or do not fit together.
    """
    if coordinator or processes or process_id >= 0:
        if not coordinator or processes < 1 or process_id < 0:
            raise ValueError(
                f"coordinator={coordinator!r}, processes={processes} and process_id={process_id} "
                "belong together: give all three, for example 10.0.0.1:9876, 4 and 0 to 3")
        if ":" not in coordinator:
            raise ValueError(f"coordinator={coordinator!r} needs a port: {coordinator}:9876")
        if process_id >= processes:
            raise ValueError(f"process_id={process_id} must be below processes={processes}")
        return Cluster("flags", coordinator, processes, process_id)
    # SLURM_STEP_NUM_TASKS exists under srun only, not in a shell of salloc or sbatch.
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Cluster("SLURM", None, int(environment["SLURM_STEP_NUM_TASKS"]),
                       int(environment["SLURM_PROCID"]))
    if tpu_devices is None:
        tpu_devices = any(pathlib.Path("/dev").glob("accel[0-9]*")) or (
            pathlib.Path("/dev/vfio").is_dir() and "TPU_ACCELERATOR_TYPE" in environment)
    if tpu_devices and environment.get("JAX_PLATFORMS", "tpu").startswith("tpu"):
        return Cluster("TPU metadata")
    return None


def initialize(coordinator: str = "", processes: int = 0, process_id: int = -1,
               timeout_s: int = 300, heartbeat_s: int = 100) -> Cluster | None:
    """Waits until all processes of the run are there. Does nothing for a run of one process.

    A process that dies later stops the others: after `heartbeat_s` without a sign of life jax ends
    them, and a restart goes on from the last checkpoint.

    Args:
      coordinator, processes, process_id: see `detect`.
      timeout_s: how long to wait for the others.

    If they do not come, the process ends with EXIT_NO_PEERS and a message on stderr.
    """
    cluster = detect(coordinator, processes, process_id)
    if cluster is None:
        return None
    # Lets one process's SIGTERM stop all at the same step, see preemption.must_stop.
    jax.config.update("jax_enable_preemption_service", True)

    def give_up() -> None:
        who = f"process {cluster.process_id} of {cluster.processes}" if cluster.processes else (
            "this process")
        sys.stderr.write(
            f"\n{who} waited {timeout_s} s and did not find the others (found by {cluster.source}, "
            f"coordinator {cluster.coordinator or 'from the environment'}). Is every process "
            "started, with the same coordinator and number of processes and a process_id of "
            f"its own, and can this machine reach that port? Exit code {EXIT_NO_PEERS}.\n")
        sys.stderr.flush()
        os._exit(EXIT_NO_PEERS)

    # jax itself aborts on its time-out with a C++ stack, so ours comes first.
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        cluster.coordinator, cluster.processes, cluster.process_id,
        initialization_timeout=timeout_s + 60, heartbeat_timeout_seconds=heartbeat_s)
    timer.cancel()
    log.info("process %d of %d (found by %s), %d of %d devices here", jax.process_index(),
             jax.process_count(), cluster.source, jax.local_device_count(), jax.device_count())
    return cluster


@contextlib.contextmanager
def not_waiting_after_errors(grace_s: float = 10) -> Iterator[None]:
    """Lets no process of several outlive, by more than `grace_s`, an error that ends the block.

    jax has a process that ends wait for the others, for minutes, and these wait for it in their
    next exchange. Once it is gone, they are stopped (see `initialize`). If all met the same error,
    as with settings that are refused, the grace lets all end with their own exit code.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if jax.distributed.is_initialized() and code not in (0, EXIT_PREEMPTED):
            timer = threading.Timer(grace_s, _end, (code,))
            timer.daemon = True
            timer.start()
        raise


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
