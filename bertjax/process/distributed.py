"""Joins the processes of one run: TPU pods, SLURM, or a coordinator named on the command line.

Call `initialize` before anything else touches jax; each process then sees all devices of the run. Inside
`not_waiting_after_errors` all processes end soon after one has, and say why.
"""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from bertjax.interruption import EXIT_PREEMPTED, leave
from bertjax.process.rendezvous import Meeting, PortTaken

EXIT_NO_PEERS = 77  # not all processes came in time, or one was lost later
WAIT_S = 300  # for the others at the start
FOLLOW_S = 0.5  # between two checks whether another process has ended
GRACE_S = 10  # that process 0, where the coordination service runs, stays for the others to read why it ends
WAITING_LINE_S = 30.0  # between two lines of a process that waits for others
_ENDED = "bertjax/ended"  # key of the coordination service: who ended first, and why
# What jax raises when another process is gone: a status, and what it is about.
_LOST = re.compile(
    r"(UNAVAILABLE|UNKNOWN|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION)\b.*"
    r"(gloo|nccl|connection|socket|heartbeat|coordination|barrier|task)",
    re.I | re.S,
)


class Cluster(NamedTuple):
    """How the processes find each other; None = jax asks the environment."""

    source: str
    coordinator: str | None = None  # host:port of process 0
    processes: int | None = None
    process_id: int | None = None


def detect(
    coordinator: str = "",
    processes: int = 0,
    process_id: int = -1,
    environment: Mapping[str, str] = os.environ,
    tpu_devices: bool | None = None,
) -> Cluster | None:
    """Where this process belongs, or None for a run of one process.

    Explicit arguments count first, then SLURM (a job step of several tasks), then a TPU VM.

    Args:
      coordinator, processes, process_id: HOST:PORT of process 0, their number, and which one this is; all or none.
      tpu_devices: whether this machine has TPU chips; None = look.

    Raises:
      ValueError: some of the three are missing or do not fit together.
    """
    if coordinator or processes or process_id >= 0:
        if not coordinator or processes < 1 or process_id < 0:
            raise ValueError(
                f"coordinator={coordinator!r}, processes={processes} and process_id={process_id} "
                "belong together: give all three, for example 10.0.0.1:9876, 4 and 0 to 3"
            )
        if not re.search(r":[0-9]{1,5}$", coordinator):
            raise ValueError(f"coordinator={coordinator!r} needs a port: {coordinator.partition(':')[0]}:9876")
        if process_id >= processes:
            raise ValueError(f"process_id={process_id} must be below processes={processes}")
        return Cluster("flags", coordinator, processes, process_id)
    # SLURM_STEP_NUM_TASKS exists under srun only, not in a shell of salloc or sbatch.
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Cluster("SLURM", None, int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_PROCID"]))
    if tpu_devices is None:
        tpu_devices = any(pathlib.Path("/dev").glob("accel[0-9]*")) or (
            pathlib.Path("/dev/vfio").is_dir() and "TPU_ACCELERATOR_TYPE" in environment
        )
    if tpu_devices and environment.get("JAX_PLATFORMS", "tpu").startswith("tpu"):
        return Cluster("TPU metadata")
    return None


def initialize(
    coordinator: str = "", processes: int = 0, process_id: int = -1, timeout_s: int = WAIT_S, heartbeat_s: int = 100
) -> None:
    """Waits until all processes of the run are there. Does nothing for a run of one process.

    jax ends all processes once one of them gives no sign of life for `heartbeat_s`.

    Args:
      coordinator, processes, process_id: see `detect`.
      timeout_s: how long to wait for the others. If they do not come, or the coordinator's port is taken, the process
        ends with EXIT_NO_PEERS and a message on stderr.

    Raises:
      ValueError: they do not fit together: an id is there twice, the numbers of processes differ.
    """
    cluster = detect(coordinator, processes, process_id)
    if cluster is None:
        return
    # Lets one process's SIGTERM stop all at the same step, see preemption.must_stop.
    jax.config.update("jax_enable_preemption_service", True)
    who = f"process {cluster.process_id} of {cluster.processes}" if cluster.processes else "this process"
    status = f"the other processes, found by {cluster.source}"
    meeting = Meeting(*cluster[1:]) if cluster.source == "flags" else None

    def waiting_for() -> str:
        return meeting.status if meeting else status

    def give_up() -> None:
        _end_with(
            f"{who} waited {timeout_s} s (--wait_seconds) for {waiting_for()}. Is every process started, with the same "
            "coordinator and number of processes and a process_id of its own, and can this machine reach that port?"
        )

    with _telling(lambda: f"{who} waits for {waiting_for()}", 1.0, timeout_s, give_up):
        if meeting:
            try:
                meeting.hold()
            except PortTaken as error:
                _end_with(str(error))
            meeting, status = None, "jax to join all processes, which are there"
        # jax itself aborts on its time-out with a C++ stack, so ours comes first.
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process_id,
            initialization_timeout=timeout_s + 60,
            heartbeat_timeout_seconds=heartbeat_s,
        )


def wait_for_all(what: str) -> None:
    """Returns once all processes of the run have called it, however long it takes; says now and then that it waits.

    Exchanges between devices have a time-out, so it stands before those that a process may reach late.

    Args:
      what: what the others may be doing: 'preparing the data'.
    """
    client = _client()
    if client is None:
        return
    with _telling(lambda: f"waiting for another process of the run: {what}", WAITING_LINE_S):
        client.wait_at_barrier(f"bertjax/{next(_BARRIERS)}", 7 * 24 * 3600 * 1000)


def shutdown() -> None:
    """Leaves the run together with its other processes: jax would abort those that end after process 0."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


@contextlib.contextmanager
def not_waiting_after_errors() -> Iterator[None]:
    """Ends all processes of a run soon after an error has ended the block in one of them.

    Without it they would wait for each other in their next exchange, for minutes, and jax would end them with a C++
    stack. The first to end writes its reason to the coordination service; the others end with that reason, and with
    code 1 if another start would end in the same way. If all met the same error, as with settings that are refused,
    each ends with its own code.
    """
    client = _client()
    if client is None:
        yield
        return
    _say_why_aborted()
    leaving = threading.Event()

    def follow() -> None:
        while not leaving.wait(FOLLOW_S):
            ended = _ended(client)
            # The same error may be met here.
            if ended and ended["process"] != jax.process_index() and not leaving.wait(1):
                _end_as(ended)

    follower = threading.Thread(target=follow, name="follow the others", daemon=True)
    follower.start()
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
        if code in (0, EXIT_PREEMPTED):
            raise
        leaving.set()
        if lost := lost_peer(error):
            time.sleep(1)  # a process that ended by an error writes its reason first
            if ended := _ended(client):
                _end_as(ended)
            _end_with(
                f"process {jax.process_index()} of {jax.process_count()} has lost another one "
                f"({str(lost).strip().splitlines()[0][:300]}). The same command goes on from the newest checkpoint."
            )
        reason: BaseException | str = error
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted; the same command goes on from the newest checkpoint"
            sys.stderr.write(f"bertjax: {reason}\n")
        elif isinstance(error, SystemExit):
            reason = error.__cause__ or error.__context__ or error
            if isinstance(code, str):  # what the interpreter would print
                print(code, file=sys.stderr)
                code = 1
        ended = {"process": jax.process_index(), "code": code, "reason": str(reason)}
        with contextlib.suppress(Exception):  # another was first
            client.key_value_set(_ENDED, json.dumps(ended))
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exc()
        if jax.process_index() == 0:
            time.sleep(GRACE_S)
        leave(code, at_once=True)
    finally:  # neither may be there at the end of the interpreter
        leaving.set()
        follower.join()
        _libc_signal(signal.SIGABRT, None)


def lost_peer(error: BaseException | None) -> BaseException | None:
    """The error (or a cause of it) that says that another process of the run is gone."""
    while error is not None and jax.distributed.is_initialized():
        if isinstance(error, Exception) and _LOST.match(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


_BARRIERS = itertools.count()  # their names, the same on all processes


def _client() -> Any:
    """jax's client of the coordination service; None in a run of one process."""
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed  # the only way to it

    return distributed.global_state.client


def _ended(client: Any) -> dict[str, Any] | None:
    """Who ended first, and why."""
    try:
        return json.loads(client.key_value_try_get(_ENDED))
    except Exception:  # nobody yet, or the service is gone
        return None


def _end_as(ended: dict[str, Any]) -> None:
    code = 1 if ended["code"] in (1, 2) else EXIT_NO_PEERS
    sys.stdout.flush()
    sys.stderr.write(f"bertjax: process {ended['process']} of {jax.process_count()} has ended: {ended['reason']}\n")
    leave(code, at_once=True)


def _end_with(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"\nbertjax: {message} Exit code {EXIT_NO_PEERS}.\n")
    leave(EXIT_NO_PEERS, at_once=True)


def _say_why_aborted() -> None:
    """Prints our line last, and ends with EXIT_NO_PEERS, when jax aborts the process because another one is gone."""

    def aborted(number: int) -> None:
        os.write(
            2,
            f"bertjax: process {os.getpid()} was aborted by jax (above), as it is when another process of the run is "
            f"gone. The same command goes on from the newest checkpoint. Exit code {EXIT_NO_PEERS}.\n".encode(),
        )
        os._exit(EXIT_NO_PEERS)

    # A handler of the module signal would run in the main thread, which has no turn any more.
    _libc_signal(signal.SIGABRT, aborted)


def _libc_signal(number: int, handler: Callable[[int], None] | None) -> None:
    global _HANDLER
    old, _HANDLER = _HANDLER, ctypes.CFUNCTYPE(None, ctypes.c_int)(*filter(None, [handler]))
    ctypes.CDLL(None).signal(number, _HANDLER)
    del old  # not before: C may have called it


_HANDLER: Any = None  # kept alive, since C calls it


@contextlib.contextmanager
def _telling(
    text: Callable[[], str], delay_s: float, timeout_s: float | None = None, give_up: Callable[[], None] | None = None
) -> Iterator[None]:
    """Prints on stderr what the block waits for, after `delay_s` and from time to time; then gives up."""
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        next_s = delay_s
        while not done.wait(max(0.0, next_s - (time.monotonic() - begin))):
            waited_s = time.monotonic() - begin
            if give_up and waited_s >= timeout_s:
                give_up()
            sys.stderr.write(f"{text()} ({waited_s:.0f} s{f' of {timeout_s:g} s' if timeout_s else ''})\n")
            sys.stderr.flush()
            next_s += WAITING_LINE_S
            if give_up:
                next_s = min(next_s, timeout_s)

    threading.Thread(target=tell, name="tell what is waited for", daemon=True).start()
    try:
        yield
    finally:
        done.set()
