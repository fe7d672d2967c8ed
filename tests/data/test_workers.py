"""Data workers when a whole process group is signalled, and when their parent is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import multiprocessing, signal, sys
import grain
from bertjax.data.batches import prefetch

class Numbers:
    def __getitem__(self, step):
        return {"step": step}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
    batches = prefetch(Numbers(), workers=2, buffer=0)
    next(batches), next(batches)  # one of each worker, so both have begun
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    for _ in range(50):  # more than is ready
        last = next(batches)
    print(last["step"], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_workers_work_on_after_sigterm_to_all_and_end_in_silence_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        workers = list(map(int, parent.stdout.readline().split()))
        assert len(workers) == 2
        for number in (signal.SIGTERM, signal.SIGINT):  # a second SIGINT would raise in the parent
            for pid in [*workers, *([parent.pid] if number == signal.SIGTERM else [])]:
                os.kill(pid, number)
        assert parent.stdout.readline() == "asked to stop\n"
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "51\n"

        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while alive := [pid for pid in workers if os.path.exists(f"/proc/{pid}")]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
        assert "leaked" not in parent.stderr.read()
    finally:
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        parent.communicate()
