"""Ends a process in which something hangs: a peer, a device, a disk, a data worker.

Once one activity takes too long, which one it was and all stacks go to stderr, and the process ends with EXIT_HUNG, so
that a launcher starts it again.
"""

import faulthandler
import os
import platform
import sys
import threading
from typing import NamedTuple, NoReturn

import jax

EXIT_HUNG = 76
# Seconds that a compilation or a slow file system may always take. Longer than the longest save (checkpoint.py), which
# so fails with its own message first.
PATIENCE_S = 1800.0
PEERS = "a device, or another process of the run"  # what hangs if a step does
SETTING = "--config.watchdog_seconds"


class _Activity(NamedTuple):
    what: str
    suspects: str
    limit_s: float


class Watchdog:
    """Watches from its making until `stop`. `limit_s`: seconds that one activity may take; 0 = no watchdog.

    Time in which the process itself stood still (Ctrl-Z, a paused container, a machine that was moved) does not count:
    it is measured in the watching thread's own turns and not by a clock.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._who = f"process {os.getpid()} on {platform.node()}"
        if jax.process_count() > 1:
            self._who += f" ({jax.process_index()} of {jax.process_count()})"
        self._now: _Activity | None = None
        self._stopped = threading.Event()
        if limit_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def doing(self, what: str, suspects: str, patiently: bool = False) -> None:
        """Notes that the activity before has ended and `what` begins, such as 'step 12'.

        Args:
          suspects: what hangs, if that does not end.
          patiently: it may take PATIENCE_S even if the limit is less.
        """
        limit_s = max(self.limit_s, PATIENCE_S) if patiently else self.limit_s
        self._now = _Activity(what, suspects, limit_s)

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _watch(self) -> None:
        turn_s = min(1.0, self.limit_s / 4)
        seen, silent_s = None, 0.0
        while not self._stopped.wait(turn_s):
            if (now := self._now) is not seen:  # also the same words, said again
                seen, silent_s = now, 0.0
            else:
                silent_s += turn_s
            if now is not None and silent_s > now.limit_s:
                self._end(now, silent_s)

    def _end(self, activity: _Activity, silent_s: float) -> NoReturn:
        """Ends the process without cleaning up, which might hang too."""
        limit = f"{SETTING}={self.limit_s:g}"
        if activity.limit_s > self.limit_s:
            limit = f"{activity.limit_s:g} s, more only by {SETTING}"
        sys.stderr.write(f"\nwatchdog: {activity.what} hangs. Stacks of all threads, the main one last:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        # Last, where a reader of the log looks first.
        sys.stderr.write(
            f"watchdog: {self._who}: {activity.what} has not ended for {silent_s:.0f} s (limit: {limit}). Suspect "
            f"{activity.suspects}. Exit code {EXIT_HUNG}: the same command goes on from the newest checkpoint.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_HUNG)
