"""Leaving in good order: signals become a flag that the training loop reads between steps.

Exit codes, for launchers: EXIT_PREEMPTED = saved and left on SIGTERM or SIGINT, start again to go
on; EXIT_HUNG = no step ended within the watchdog's limit, stacks are on stderr, start again.
"""

import contextlib
import faulthandler
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

PREEMPTED_URL = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
EXIT_HUNG = 76


class Preempted(SystemExit):
    """Raised after the state was saved on a signal. Ends the process with EXIT_PREEMPTED."""

    def __init__(self, step: int, reason: str):
        super().__init__(EXIT_PREEMPTED)
        self.step, self.reason = step, reason

    def __str__(self) -> str:
        return f"stopped by {self.reason}, saved at step {self.step}; start again to go on"


class StopSignal:
    """`requested` is the name of the signal that came, or None."""

    def __init__(self) -> None:
        self.requested: str | None = None

    def request(self, reason: str) -> None:
        """Asks the loop to save and stop after the step that runs."""
        self.requested = self.requested or reason


@contextlib.contextmanager
def stop_on_signals(signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
                    ) -> Iterator[StopSignal]:
    """Turns the first SIGTERM or SIGINT into a flag; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, the flag just stays unset. With
    several processes SIGTERM is left to jax's pre-emption service (see `must_stop`).
    """
    stop = StopSignal()
    if jax.process_count() > 1:
        signals = ()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.request(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_compute_engine() -> bool:
    """Whether this is a virtual machine of Google Compute Engine (TPU VMs are)."""
    with contextlib.suppress(OSError):
        return "Google Compute Engine" in pathlib.Path(
            "/sys/class/dmi/id/product_name").read_text()
    return False


def watch_for_notice(url: str = PREEMPTED_URL, interval_s: float = 5) -> None:
    """Sends this process SIGTERM once the machine's metadata says that it will be taken away.

    A spot machine is announced about 30 s ahead, but nothing signals a process that was started
    over ssh. Polls from a daemon thread; a metadata server that does not answer is asked again.
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


def must_stop(stop: StopSignal, step: int) -> bool:
    """Whether to save and stop after `step`; all processes get the same answer.

    With several processes, jax's pre-emption service carries one process's SIGTERM to all and
    agrees on a step that none has passed.
    """
    if jax.process_count() == 1:
        return stop.requested is not None
    return multihost_utils.reached_preemption_sync_point(step)


class Watchdog:
    """Ends a process whose step hangs (a dead peer, a stuck device, a stuck file system).

    `beat()` after every step. If none comes for `limit_s` seconds, all stacks are written to
    stderr and the process exits with EXIT_HUNG, without cleaning up: what hangs would hang that.

    Args:
      limit_s: seconds; 0 = no watchdog. Must exceed compilation and the longest evaluation, or
        `beat()` must be called within them.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._last = time.monotonic()
        self._stopped = threading.Event()
        if limit_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Says that something was finished just now."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """No longer watches."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.limit_s / 4)):
            silent = time.monotonic() - self._last
            if silent > self.limit_s:
                sys.stderr.write(f"\nwatchdog: no step ended for {silent:.0f} s (limit "
                                 f"{self.limit_s:g} s). Stacks of all threads:\n")
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.write(f"watchdog: exit code {EXIT_HUNG}; start again to go on from the "
                                 "last checkpoint\n")
                sys.stderr.flush()
                os._exit(EXIT_HUNG)
