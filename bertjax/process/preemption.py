"""Leaving in good order: signals become a flag that the training loop reads between steps."""

import contextlib
import itertools
import os
import pathlib
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from bertjax.interruption import EXIT_PREEMPTED

PREEMPTED_URL = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"


class Preempted(SystemExit):
    """Raised after the state was saved on a signal. Ends the process with EXIT_PREEMPTED."""

    def __init__(self, step: int, reason: str):
        super().__init__(EXIT_PREEMPTED)
        self.step, self.reason = step, reason

    def __str__(self) -> str:
        saved = f", saved at step {self.step}" if self.step else " before the first step"
        return f"stopped by {self.reason}{saved}; start again to go on"


class StopSignal:
    """`requested`: the name of the signal that came, after which the loop saves and stops; or None."""

    requested: str | None = None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Turns the first SIGTERM or SIGINT into a flag; a second SIGINT interrupts at once.

    The flag stays unset outside the main thread, where Python allows no handlers, and with several processes, whose
    SIGTERM jax's pre-emption service takes (see `must_stop`); there SIGINT becomes SIGTERM.
    """
    stop, several, first = StopSignal(), jax.process_count() > 1, ""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if first and number == signal.SIGINT:
            raise KeyboardInterrupt
        first = first or signal.Signals(number).name
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stop.requested = first

    numbers = (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_compute_engine() -> bool:
    """Whether this is a virtual machine of Google Compute Engine (TPU VMs are)."""
    with contextlib.suppress(OSError):
        return "Google Compute Engine" in pathlib.Path("/sys/class/dmi/id/product_name").read_text()
    return False


def watch_for_notice(url: str = PREEMPTED_URL, interval_s: float = 5) -> None:
    """Sends this process SIGTERM once the metadata of a spot machine says, about 30 s ahead, that it is pre-empted.

    Nothing else signals a process that was started over ssh. A metadata server that does not answer is asked again.
    """

    def poll() -> None:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as reply:
                if reply.read().strip() == b"TRUE":
                    sys.stderr.write("this machine will be pre-empted: saving and stopping\n")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            time.sleep(interval_s)

    threading.Thread(target=poll, name="preemption notice", daemon=True).start()


_CALLS = itertools.count(1)  # of this process; from 1, as jax counts: 0 is before the first


def must_stop(stop: StopSignal) -> bool:
    """Whether to save and stop now; all processes get the same answer.

    With several processes, jax's pre-emption service carries one process's SIGTERM to all and agrees on a call that
    none has passed; so all must call it equally often.
    """
    if jax.process_count() == 1:
        return stop.requested is not None
    return multihost_utils.reached_preemption_sync_point(next(_CALLS))
