"""launch/host.sh, run for real in a temporary home: installation, and a detached job's life."""

import os
import pathlib
import signal
import subprocess
import time

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]


class Host:
    def __init__(self, home: pathlib.Path):
        self.home, self.root = home, home / "bertjax"
        (self.root / "code" / "launch").mkdir(parents=True)
        (self.root / "code" / "launch" / "host.sh").write_text((REPO / "launch" / "host.sh").read_text())
        self.programs = home / "bin"
        self.programs.mkdir()
        self.program("uv", f'echo "$*" >>{home}/uv.calls')

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.programs / name).chmod(0o755)

    def __call__(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "bertjax/code/launch/host.sh", *words],
            cwd=self.home,
            text=True,
            capture_output=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            env={
                "HOME": str(self.home),
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "BERTJAX_BACKOFF": "0",
                **environment,
            },
        )

    def state(self, run: str = "1") -> str:
        line = self("status", run).stdout.split(maxsplit=2)
        assert line[0] == "bertjax-host"
        return line[2].strip()

    def wait(self, state: str, run: str = "1") -> None:
        for _ in range(200):
            if self.state(run) == state:
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.state(run)}, not {state}: {self.log}")

    @property
    def log(self) -> str:
        return (self.root / "run" / "log").read_text()


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    if (host.root / "run" / "pid").exists():  # whatever a failed test has left running
        try:
            os.killpg(int((host.root / "run" / "pid").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def ready(host):
    assert host("setup", "tpu").returncode == 0
    return host


def test_setup_installs_the_copied_tree_with_the_extra(host):
    assert host.state() == "bare"
    assert host("setup", "tpu").returncode == 0
    venv, code = host.root / "venv", host.root / "code"
    assert (host.home / "uv.calls").read_text().splitlines() == [
        f"venv --quiet --allow-existing --python 3.12 {venv}",
        f"pip install --quiet --python {venv}/bin/python -e {code}[tpu]",
    ]
    assert host.state() == "idle"


def test_setup_is_tried_three_times_and_then_fails(host):
    host.program("uv", f"echo call >>{host.home}/uv.calls; false")
    done = host("setup", "tpu")
    assert (done.returncode, host.state()) == (1, "bare")
    assert len((host.home / "uv.calls").read_text().split()) == 3
    assert "failed three times: uv venv" in done.stderr


def test_a_setup_that_fails_after_an_older_one_leaves_the_host_bare(ready):
    ready.program("uv", "false")
    ready("setup", "tpu")
    assert ready.state() == "bare"
    assert "not set up" in ready("start", "1", "--", "true").stderr


@pytest.mark.parametrize("code", [0, 2, 75, 134])
def test_the_exit_code_of_a_job_is_kept(ready, code):
    assert ready("start", "1", "--", "bash", "-c", f"echo output; exit {code}").returncode == 0
    ready.wait(f"exited {code}")
    assert "output\n" in ready.log and "output\n" in ready("log", "40").stdout


def test_a_job_runs_in_the_copied_tree_with_its_own_python_first(ready):
    (ready.root / "venv" / "bin").mkdir(parents=True)
    ready("start", "1", "--", "bash", "-c", 'echo "$PWD ${PATH%%:*}"')
    ready.wait("exited 0")
    expected = f"{ready.root}/code {ready.root}/venv/bin\n"
    assert expected in ready.log
    assert ready("exec", "--", "bash", "-c", 'echo "$PWD ${PATH%%:*}"').stdout == expected


def test_a_job_outlives_the_connection_that_started_it(ready):
    ready("start", "1", "--", "sleep", "20")
    assert ready.state() == "running"
    pid = int((ready.root / "run" / "pid").read_text())
    assert os.getsid(pid) == pid  # a session of its own: no hang-up reaches it


def test_the_same_run_is_not_started_twice(ready):
    for _ in range(2):
        assert ready("start", "1", "--", "sleep", "20").returncode == 0
    assert ready.log.count("===") == 1


def test_another_run_is_refused_while_one_is_going(ready):
    ready("start", "1", "--", "sleep", "20")
    done = ready("start", "2", "--", "true")
    assert done.returncode == 1 and "launch/tpu.sh stop" in done.stderr
    states = [ready.state(run) for run in ("1", "2", "any")]
    assert states == ["running", "other", "running"]


def test_the_end_of_another_run_does_not_count(ready):
    ready("start", "1", "--", "false")
    ready.wait("exited 1")
    assert ready.state("2") == "idle"


def test_a_run_can_be_started_again_after_its_end(ready):
    for starts in (1, 2):
        ready("start", "1", "--", "false")
        ready.wait("exited 1")
        assert ready.log.count("ended with code 1 on ") == starts


def test_stop_lets_the_job_save(ready):
    ready("start", "1", "--", "bash", "-c", "trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.05; done")
    while "up\n" not in ready.log:
        time.sleep(0.02)
    assert ready("stop").returncode == 0
    assert ready.state() == "exited 75"
    saved, end = ready.log.splitlines()[-2:]
    assert saved == "saved" and "ended with code 75" in end


def test_stop_kills_what_does_not_stop(ready):
    ready("start", "1", "--", "bash", "-c", "trap 'echo no' TERM; echo up; while :; do sleep 0.05; done")
    while "up\n" not in ready.log:
        time.sleep(0.02)
    done = ready("stop", BERTJAX_STOP_SECONDS="1")
    assert (done.returncode, ready.state()) == (1, "exited 137")
    assert "was killed" in done.stderr


def test_stop_without_a_job_is_no_failure(ready):
    assert ready("stop").returncode == 0


def test_a_job_that_went_with_its_host_is_lost(ready):
    ready("start", "1", "--", "sleep", "20")
    os.killpg(int((ready.root / "run" / "pid").read_text()), signal.SIGKILL)
    ready.wait("lost")


def test_a_process_of_another_program_with_the_old_number_is_not_taken_for_the_job(ready):
    (ready.root / "run").mkdir()
    (ready.root / "run" / "id").write_text("1\n")
    (ready.root / "run" / "pid").write_text(f"{os.getpid()}\n")
    assert ready.state() == "lost"
    assert ready("stop").returncode == 0  # and this test goes on living


def test_only_a_host_that_failed_complains(ready):
    assert ready("complaint", "5").stdout == ""
    ready("start", "1", "--", "true")
    ready.wait("exited 0")
    assert ready("complaint", "5").stdout == ""
    ready("start", "1", "--", "bash", "-c", "echo out of memory; exit 137")
    ready.wait("exited 137")
    head, *lines = ready("complaint", "5").stdout.splitlines()
    assert head.endswith(": exited 137") and "out of memory" in lines


def test_a_failure_that_nobody_foresaw_names_host_line_and_command(ready):
    (ready.root / "run").write_text("a file where a directory belongs")
    done = ready("start", "1", "--", "true")
    assert done.returncode != 0
    assert "host.sh line" in done.stderr and "mkdir -p" in done.stderr


def test_the_log_of_nothing_is_a_message(ready):
    assert "nothing has run here yet" in ready("log", "40").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no command: one of setup, start"),
        (("begin",), "unknown command 'begin'"),
        (("start",), "start needs an ID, -- and a command"),
        (("start", "1", "true"), "start needs"),
        (("status",), "status takes one argument"),
        (("log", "many"), "log needs a number of lines"),
        (("exec", "true"), "exec needs -- and a command"),
        (("setup",), "setup takes one argument"),
    ],
)
def test_wrong_usage_is_one_line_and_changes_nothing(host, words, message):
    done = host(*words)
    assert done.returncode == 2 and message in done.stderr and "--help" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (host.root / "run").exists()
