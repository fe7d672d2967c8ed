"""Signals become a flag while steps run, and the end of the process before and after."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bertjax.interruption import EXIT_PREEMPTED
from bertjax.process.preemption import Preempted, must_stop, stop_on_signals, watch_for_notice


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not must_stop(stop)
        os.kill(os.getpid(), number)
        assert must_stop(stop) and stop.requested == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_installed():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body():
        with stop_on_signals() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_a_notice_in_the_metadata_becomes_sigterm():
    answers = [b"FALSE", b"TRUE"]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0))

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with stop_on_signals() as stop:
            watch_for_notice(f"http://127.0.0.1:{server.server_port}/", interval_s=0.05)
            for _ in range(200):
                if stop.requested:
                    break
                time.sleep(0.02)
        server.shutdown()
        thread.join()
    assert stop.requested == "SIGTERM" and not answers


def test_preempted_ends_the_process_with_its_own_code():
    error = Preempted(12, "SIGTERM")
    assert error.code == EXIT_PREEMPTED == 75
    assert str(error) == "stopped by SIGTERM, saved at step 12; start again to go on"


STARTING = """
import gc, hashlib, signal, sys, threading, time
from bertjax.interruption import leave_without_saving
from bertjax.process.preemption import stop_on_signals
leave_without_saving()
threading.Thread(target=lambda: threading.Event().wait()).start()  # as one that still compiles
with stop_on_signals():
    pass  # a run of no step
print("started", flush=True)
if sys.argv[1] == "compiling":  # no Python for minutes
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
gc.callbacks.append(lambda *_: time.sleep(5))  # what is raised in it is lost, as in jax's own
gc.collect()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["compiling", "collecting garbage"])
def test_a_signal_ends_a_run_that_starts_at_once_and_a_launcher_starts_it_again(number, moment):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout.readline() == "started\n"
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(4) == EXIT_PREEMPTED
        assert "nothing to save; start again to go on" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
