"""Jobs of a benchmark: one a GPU at a time, their logs, and what is said of one that fails."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.benchmarks import harness

SCRIPT = """
import json, os, time
start = time.time(); time.sleep(0.3)
print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SAID"), start,
                  time.time(), os.environ.get("JAX_PLATFORMS")]))
"""


def test_a_gpu_has_one_job_at_a_time_and_no_platform_is_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    names = ["a", "b", "c", "d"]
    failed = harness.run_all(
        [harness.Job(name, [sys.executable, "-c", SCRIPT], {"SAID": name}) for name in names], ["3", "5"], tmp_path
    )
    assert failed == []
    by_gpu = {}
    for name in names:
        gpu, said, start, end, platform = json.loads((tmp_path / f"{name}.log").read_text())
        assert said == name and platform is None
        by_gpu.setdefault(gpu, []).append((start, end))
    assert set(by_gpu) == {"3", "5"}
    for spans in by_gpu.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_a_job_that_fails_is_named_with_the_end_of_its_log(tmp_path, capsys):
    bad = harness.Job("bad", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
    good = harness.Job("good", [sys.executable, "-c", ""])
    assert harness.run_all([bad, good], [""], tmp_path) == ["bad"]
    said = capsys.readouterr()
    assert "bad: exit code 3" in said.err and "the reason" in said.err
    assert "good: done" in said.out


PARENT = """
import pathlib, sys
from tests.benchmarks import harness
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
harness.run_all([harness.Job("long", [sys.executable, "-c", nested])], [""], pathlib.Path(sys.argv[1]))
"""


def test_jobs_and_their_children_end_with_the_process_that_started_them(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path])
    log = tmp_path / "long.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    parent.terminate()
    assert parent.wait(20) == 128 + signal.SIGTERM
    wait_for(lambda: not alive(child))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def test_a_pre_training_is_started_as_a_user_would(tmp_path):
    command = harness.pretraining("recipes:budget", tmp_path, {"optimizer.b2": 0.98})
    assert command[1:] == [
        "-m",
        "bertjax.main",
        "--config=bertjax:recipes:budget",
        f"--workdir={tmp_path}",
        "--config.optimizer.b2=0.98",
    ]


@pytest.mark.parametrize(("driver", "gpus"), [(None, ""), ("/usr/bin/nvidia-smi", "0,1")])
def test_without_a_gpu_the_default_is_the_cpu(monkeypatch, driver, gpus):
    monkeypatch.setattr(harness.shutil, "which", lambda name: driver)
    monkeypatch.setattr(harness.os.path, "exists", lambda path: False)
    assert harness.default_gpus(2) == gpus
