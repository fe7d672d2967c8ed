"""Processes that are not of one run are refused, and say in what they differ."""

import os
import socket
import subprocess
import sys

import pytest

from bertjax.process.agreement import require_same
from bertjax.version import source_digest

PROGRAM = """
import os, sys
from bertjax.process import distributed
from bertjax.run import claim
coordinator, process_id, what = sys.argv[1:]
distributed.initialize(coordinator, 2, int(process_id), timeout_s=60, heartbeat_s=10)
from bertjax.config import default_config, frozen
from bertjax.process.agreement import require_same_command
from bertjax.formats.checkpoint import resolve_directory
from bertjax.run.checkpoint import Checkpoints

config, workdir = default_config(), "run"
config.execution.compilation_cache = f"cache of {process_id}"
if process_id == "1" and what == "settings":
    config.optimizer.learning_rate, config.phases = 3e-4, ((900, 128), (100, 512))
if process_id == "1" and what == "directory":
    os.mkdir("other"); os.chdir("other")
    claim.SHARED_WITHIN_S = 1
try:
    require_same_command(frozen(config), workdir)
    checkpoints = Checkpoints(workdir + "/checkpoints")
    if process_id == "1" and what == "late":  # as a network file system may be
        checkpoints.steps = lambda: []
    print("step", checkpoints.latest())
except ValueError as error:
    print(error)
"""


def run(directory, what):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, coordinator, str(number), what],
            text=True,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, said) in zip(started, done, strict=True):
        assert process.returncode == 0, said[-3000:]
    return [out for out, _ in done]


@pytest.mark.slow
def test_another_setting_is_refused_by_name_on_all_processes(tmp_path):
    first, second = run(tmp_path, "settings")
    assert "processes 1 of 2 were started with other settings than this one" in first
    assert "process 1 was started with other settings than process 0:" in second
    assert "--config.optimizer.learning_rate: 0.0003 here, 0.0001 there" in second
    assert "--config.phases: ((900, 128), (100, 512)) here, ((1000000, 512),) there" in second
    assert "compilation_cache" not in second  # each machine has its own
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_workdir_that_the_processes_do_not_share_is_refused(tmp_path):
    for said in run(tmp_path, "directory"):
        assert "run/checkpoints is not the same directory for all processes" in said
        assert "not seen by 1" in said and "NFS or gs://" in said


@pytest.mark.slow
def test_all_processes_go_on_from_the_step_that_process_0_sees(tmp_path):
    saver = (
        "from bertjax.run.checkpoint import Checkpoints; import numpy; c = Checkpoints("
        "'run/checkpoints'); c.save(7, {'x': numpy.ones(3)}); c.close()"
    )
    subprocess.run(
        [sys.executable, "-c", saver],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert [out.splitlines()[-1] for out in run(tmp_path, "late")] == ["step 7", "step 7"]


def test_the_digest_of_the_code_changes_with_any_file(tmp_path, monkeypatch):
    from bertjax import version

    (tmp_path / "sub").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "sub" / "a.py").write_text("1")
    monkeypatch.setattr(version, "_PACKAGE", tmp_path)
    digest = source_digest.__wrapped__
    before = digest()
    assert before == digest() and len(before) == 16
    (tmp_path / "sub" / "a.py").write_text("2")
    changed = digest()
    (tmp_path / "sub" / "a.py").rename(tmp_path / "sub" / "b.py")
    assert len({before, changed, digest()}) == 3


def test_one_process_agrees_with_itself():
    require_same({"anything": object()})
