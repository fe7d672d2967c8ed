"""The starts of a run: on what machine each went on, and whether bit for bit.

Out: `starts.jsonl` in the work directory with one JSON object a start, programs that are kept for the next one, and a
line on the console where a resumed run cannot equal the undisturbed one to the last bit.
"""

import datetime
import json
import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib
from etils import epath
from jax.sharding import Mesh

from bertjax.config import differences
from bertjax.formats.files import write_whole
from bertjax.log.logbook import Logbook, read_records
from bertjax.log.report.runs import STARTS_FILE
from bertjax.process import hardware
from bertjax.training.programs import DIRECTORY, Programs

# What an executable is compiled for; a change of one of them may change the order of sums.
MADE_FOR = ("device_kind", "devices", "processes", "jax", "jaxlib", "platform_version", "XLA_FLAGS")


def facts() -> dict[str, Any]:
    """The machine, and what else the order of sums depends on."""
    return {
        **hardware.describe(),
        "jaxlib": jaxlib.__version__,
        "platform_version": jax.devices()[0].client.platform_version,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


class Starts:
    """This start of the run in `workdir`, beside the earlier ones.

    `settings` and `made_of` (of data, vocabulary, weights) are what its numbers depend on beside the machine.
    """

    def __init__(
        self, workdir: epath.Path, settings: Mapping[str, Any] | None = None, made_of: Mapping[str, str] | None = None
    ):
        self.path = epath.Path(workdir) / STARTS_FILE
        self.facts = facts()
        self.record = {"settings": dict(settings or {}), "made_of": dict(made_of or {}), **self.facts}
        self.earlier = read_records(self.path) if self.path.exists() else []
        self.why = _changes(self.earlier[-1], self.record) if self.earlier else []
        self._logbook: Logbook | None = None
        self._lock = threading.Lock()  # programs are compiled in threads

    def keep(self, programs: Programs, mesh: Mesh) -> None:
        """Keeps executables for later starts on GPUs, where XLA times algorithms and may choose others next time."""
        devices = list(mesh.devices.flat)
        if devices[0].platform == "gpu":
            made_for = {name: self.facts[name] for name in MADE_FOR}
            programs.keep_in(self.path.parent / DIRECTORY, devices, made_for, self.differs)

    def begin(self, step: int, logbook: Logbook) -> None:
        """Records the start; says why if what follows may differ in bits from the undisturbed run."""
        with self._lock:
            if step == 0:
                self.earlier, self.why = [], []
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            self.record = {"step": step, "time": now, **self.record}
            self._logbook = logbook
            self._write()
            for reason in self.why:
                self._say(reason)

    def differs(self, reason: str) -> None:
        """Notes why this start may order sums otherwise than the one before it."""
        with self._lock:
            if self._logbook is None:
                self.why.append(reason)
            elif self.record["step"] and reason not in self.why:
                self.why.append(reason)
                self._write()
                self._say(reason)

    def _say(self, reason: str) -> None:
        self._logbook.message(f"goes on from step {self.record['step']:,}, but not bit for bit: {reason}")

    def _write(self) -> None:
        if jax.process_index() == 0:
            record = {**self.record, "bit_for_bit": not self.why, "why": self.why}
            write_whole(self.path, "".join(json.dumps(start) + "\n" for start in (*self.earlier, record)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """'devices: 8 -> 4' for each difference of two starts that may change bits."""

    def flat(start: Mapping[str, Any]) -> dict[str, Any]:
        settings = {f"config.{name}": value for name, value in start.get("settings", {}).items()}
        known = {name: start.get(name) for name in MADE_FOR} | settings | start.get("made_of", {})
        return {name: value for name, value in known.items() if value is not None}

    def variables(start: Mapping[str, Any]) -> dict[str, str]:
        return {name: value for name, value in start.get("environment", {}).items() if name != "XLA_FLAGS"}

    old, new = flat(before), flat(now)
    both = old.keys() & new.keys()  # an older version recorded fewer
    found = differences({name: old[name] for name in both}, {name: new[name] for name in both})
    return found + differences(variables(before), variables(now))
