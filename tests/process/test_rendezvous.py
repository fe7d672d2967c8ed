"""Processes that meet at a port: all there and alike, or a line that names what is wrong."""

import socket
import threading
import time

import pytest

from bertjax.process import rendezvous
from bertjax.process.rendezvous import Meeting, PortTaken


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def meet(port, *members):
    """What each of (processes, process_id) got: None, or its error; None for one that waits."""
    found, started = [None] * len(members), []

    def hold(number, processes, process_id):
        try:
            Meeting(f"localhost:{port}", processes, process_id).hold()
            found[number] = "met"
        except (ValueError, OSError) as error:
            found[number] = error

    for number, member in enumerate(members):
        started.append(threading.Thread(target=hold, args=(number, *member), daemon=True))
        started[-1].start()
        time.sleep(0.05)  # in this order
    for thread in started:
        thread.join(10)
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.02)
    monkeypatch.setattr(rendezvous, "BEGUN_S", 0.2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_that_fit_together_meet_whoever_comes_first(port, order):
    assert meet(port, *((3, number) for number in order)) == ["met"] * 3
    with socket.create_server(("", port)):  # the port is free for jax
        pass


def test_one_process_meets_itself(port):
    assert meet(port, (1, 0)) == ["met"]


def test_an_id_that_is_there_twice_is_named_to_all(port):
    for error in meet(port, (3, 0), (3, 1), (3, 1)):
        assert isinstance(error, ValueError) and "--process_id=1 was given twice" in str(error)


def test_another_number_of_processes_is_named_to_all(port):
    for error in meet(port, (2, 0), (3, 1)):
        assert isinstance(error, ValueError)
        assert "--processes=3" in str(error) and "--processes=2" in str(error)


def test_a_port_of_another_program_is_named(port):
    with socket.create_server(("", port)):
        (error,) = meet(port, (2, 0))
    assert isinstance(error, PortTaken) and f"port {port} of this machine is taken" in str(error)


def test_process_0_twice_on_a_machine_is_a_taken_port(port):
    threading.Thread(target=meet, args=(port, (2, 0)), daemon=True).start()
    time.sleep(0.1)
    (error,) = meet(port, (2, 0))
    assert "a second process with --process_id=0" in str(error)
    meet(port, (2, 1))


def test_a_run_that_has_begun_without_this_process_is_named(port):
    with socket.create_server(("", port)) as other:

        def serve():
            while True:
                peer = other.accept()[0]
                peer.sendall(b"\0\0\x12\x04\0\0\0\0\0")  # as HTTP/2 begins
                peer.close()

        threading.Thread(target=serve, daemon=True).start()
        (error,) = meet(port, (2, 1))
    assert isinstance(error, PortTaken) and "is --process_id=1 there already" in str(error)


def test_strangers_at_the_port_are_ignored_and_a_process_that_died_may_come_again(port):
    found = []
    first = threading.Thread(target=lambda: found.extend(meet(port, (3, 0))))
    first.start()
    time.sleep(0.1)
    for text in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"",
        b'{"process_id": 1, "processes": 3, "who": "one that died"}\n',
    ):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(text)
    assert meet(port, (3, 1), (3, 2)) == ["met", "met"]
    first.join(10)
    assert found == ["met"]


def test_what_is_waited_for_is_told(port):
    first, last = Meeting(f"localhost:{port}", 4, 0), Meeting(f"localhost:{port}", 4, 3)
    for meeting in (last, first):
        threading.Thread(target=meeting.hold, daemon=True).start()
        time.sleep(0.1)
    assert first.status == f"processes 1, 2 to come to port {port}"
    assert last.status == f"the other processes; process 0 at localhost:{port} is there"
    assert meet(port, (4, 1), (4, 2)) == ["met", "met"]
    nobody = Meeting("localhost:1", 2, 1)
    threading.Thread(target=nobody.hold, daemon=True).start()
    time.sleep(0.1)
    assert nobody.status == "process 0 at localhost:1 (Connection refused)"
