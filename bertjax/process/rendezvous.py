"""Meets the other processes of a run at the coordinator's port, before jax does.

Returns once all are there and agree, or says what is wrong in a line that names the port, the id or the number, where
jax would abort with a C++ stack. Each process sends its numbers to process 0 as a line of JSON and waits for the
answer; then process 0 leaves the port to jax.
"""

import contextlib
import errno
import json
import os
import platform
import socket
import time
from typing import Any

RETRY_S = 0.5
ANSWER_S = 5.0  # for a connected peer to say who it is
BEGUN_S = 20.0  # how long another program may answer at the port: the run before may be ending


class PortTaken(OSError):
    """The coordinator's port belongs to another program."""


class Meeting:
    """The part of one process in the meeting; the arguments are those of the command line. `status`: what is waited
    for."""

    def __init__(self, coordinator: str, processes: int, process_id: int):
        host, _, port = coordinator.rpartition(":")
        self.coordinator, self.host, self.port = coordinator, host.strip("[]"), int(port)
        self.processes, self.process_id = processes, process_id
        self.who = f"process {os.getpid()} on {platform.node()}"
        self.status = f"process 0 at {coordinator}"

    def hold(self) -> None:
        """Returns when all processes are there; waits for ever.

        Raises:
          ValueError: an id is there twice, or the numbers of processes differ; on all that came.
          PortTaken: another program listens at the port.
        """
        self._receive() if self.process_id == 0 else self._join()

    def _receive(self) -> None:
        met: dict[int, tuple[socket.socket, str]] = {}  # id -> connection, who it is
        self._show_missing(met)
        try:
            both = socket.has_dualstack_ipv6()  # at all addresses of this machine, as jax will
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", self.port), family=family, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(
                f"port {self.port} of this machine is taken, by another program, another run or a "
                "second process with --process_id=0: end that one, or choose another port with "
                f"--coordinator={self.host}:PORT on all processes."
            ) from None
        with listener, contextlib.ExitStack() as stack:
            while len(met) < self.processes - 1:
                peer = stack.enter_context(listener.accept()[0])
                hello = _receive_line(peer, ANSWER_S)
                if not isinstance(hello, dict) or "process_id" not in hello:
                    continue  # no process of ours
                if problem := self._problem(hello, met):
                    for other in (peer, *(other for other, _ in met.values())):
                        _send_line(other, {"error": problem})
                    raise ValueError(problem)
                met[hello["process_id"]] = peer, hello["who"]
                self._show_missing(met)
            for peer, _ in met.values():
                _send_line(peer, {"all": self.processes})
            for peer, _ in met.values():  # the side that closes first keeps the port busy for a while
                _receive_line(peer, ANSWER_S)

    def _show_missing(self, met: dict[int, Any]) -> None:
        missing = [str(number) for number in range(1, self.processes) if number not in met]
        self.status = (
            f"process{'es' * (len(missing) > 1)} {', '.join(missing[:20])}"
            f"{' ...' * (len(missing) > 20)} to come to port {self.port}"
        )

    def _problem(self, hello: dict[str, Any], met: dict[int, Any]) -> str | None:
        number, who = hello["process_id"], hello["who"]
        if hello["processes"] != self.processes:
            return (
                f"process_id={number} ({who}) was started with --processes={hello['processes']}, process_id=0 "
                f"({self.who}) with --processes={self.processes}; start all alike"
            )
        if number != 0 and (number not in met or _is_closed(met[number][0])):
            return None
        return (
            f"--process_id={number} was given twice, to {met[number][1] if number else self.who} and {who}; each "
            f"process of the run at {self.coordinator} needs its own, 0 to {self.processes - 1}"
        )

    def _join(self) -> None:
        hello = {"processes": self.processes, "process_id": self.process_id, "who": self.who}
        other_since = None
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=ANSWER_S) as peer:
                    self.status = f"the other processes; process 0 at {self.coordinator} is there"
                    _send_line(peer, hello)
                    answer = _receive_line(peer)
            except OSError as error:
                self.status = f"process 0 at {self.coordinator} ({error.strerror or error})"
                answer, other_since = b"", None
            if isinstance(answer, dict):
                if "error" in answer:
                    raise ValueError(answer["error"])
                return
            if answer:  # jax's service of a run that has begun, or another program
                other_since = other_since or time.monotonic()
                problem = (
                    f"another program, or a run that has begun without this process, answers at {self.coordinator}: is "
                    f"--process_id={self.process_id} there already, does the run not have "
                    f"--processes={self.processes}, or is the port taken?"
                )
                self.status = f"process 0; {problem}"
                if time.monotonic() - other_since > BEGUN_S:
                    raise PortTaken(problem)
            time.sleep(RETRY_S)


def _send_line(peer: socket.socket, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # gone: the next receive will notice
        peer.sendall(json.dumps(content).encode() + b"\n")


def _receive_line(peer: socket.socket, timeout_s: float | None = None) -> Any:
    """A line of JSON; bytes where what came is none, empty if the other side has closed."""
    peer.settimeout(timeout_s)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 10_000 and (part := peer.recv(4096)):
            line += part
            if not line.startswith(b"{"):
                break
    try:
        return json.loads(line)
    except ValueError:
        return line


def _is_closed(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.setblocking(True)
