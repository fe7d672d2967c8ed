"""Signals become a flag; a hung process ends itself."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bertjax.training.preemption import (
    EXIT_HUNG,
    EXIT_PREEMPTED,
    Preempted,
    Watchdog,
    must_stop,
    stop_on_signals,
    watch_for_notice,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not must_stop(stop, 1)
        os.kill(os.getpid(), number)
        assert must_stop(stop, 1) and stop.requested == signal.Signals(number).name
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


def test_the_watchdog_ends_a_hung_process_with_the_stacks():
    script = ("import time\nfrom bertjax.training.preemption import Watchdog\n"
              "def stuck_in_a_collective():\n    time.sleep(60)\n"
              "Watchdog(0.5)\nstuck_in_a_collective()")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            timeout=50,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert result.returncode == EXIT_HUNG
    assert "no step ended for" in result.stderr and "stuck_in_a_collective" in result.stderr


def test_the_watchdog_is_quiet_while_steps_end_and_after_stop():
    watchdog = Watchdog(0.4)
    for _ in range(6):
        threading.Event().wait(0.1)
        watchdog.beat()
    watchdog.stop()
    threading.Event().wait(0.6)
    Watchdog(0).beat()
