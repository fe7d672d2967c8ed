"""Tools under real signals: one line, the shell's exit code, and nothing half-written."""

import os
import pathlib
import pwd
import signal
import subprocess
import sys

import pytest

from bertjax.__main__ import tools
from bertjax.interruption import refusals

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def start(*command, path=(), **options):
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, [*path, *sys.path])), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def stop(process, number):
    """(exit code, stderr) after the signal."""
    process.send_signal(number)
    return process.wait(30), process.communicate()[1]


def one_line(number):
    return 128 + number, f"\ninterrupted by {number.name}\n"


@pytest.fixture
def slow_imports(tmp_path):
    """A directory in which jax and absl are modules that never finish their import."""
    directory = tmp_path / "modules"
    directory.mkdir()
    for name in ("jax", "absl", "argparse"):
        (directory / f"{name}.py").write_text(
            "import time\nprint('importing', flush=True)\n"
            # Not one long sleep: a signal just before it would be seen only after it.
            "try:\n    for _ in range(600):\n        time.sleep(0.1)\n"
            "except BaseException:\n    raise ImportError('as extensions do') from None\n"
        )
    return directory


@pytest.mark.parametrize("name", list(tools()))
def test_every_tool_ends_in_one_line_while_it_is_still_being_imported(name, slow_imports):
    process = start("-m", f"bertjax.tools.{name}", path=[slow_imports])
    assert process.stdout.readline() == "importing\n"
    assert stop(process, signal.SIGINT) == one_line(signal.SIGINT)


@pytest.mark.parametrize("program", ["bertjax", "bertjax.main"])
@pytest.mark.parametrize("imported", ["absl", "jax"])
def test_a_run_ends_without_a_traceback_while_its_packages_are_being_imported(program, imported, slow_imports):
    for name in {"absl", "jax", "argparse"} - {imported}:
        (slow_imports / f"{name}.py").unlink()
    process = start("-m", program, "--config=bertjax:demo", path=[slow_imports])
    assert process.stdout.readline() == "importing\n"
    code, said = stop(process, signal.SIGINT)
    assert (code, said.count("\n")) in ((-signal.SIGINT, 0), (75, 1))  # before and after it reads its command line


def test_a_tool_of_the_bertjax_command_ends_in_one_line(slow_imports):
    (slow_imports / "absl.py").unlink()
    (slow_imports / "argparse.py").unlink()
    process = start("-m", "bertjax", "predict", path=[slow_imports])
    assert process.stdout.readline() == "importing\n"
    code, said = stop(process, signal.SIGTERM)
    assert code == 143 and said.startswith(one_line(signal.SIGTERM)[1])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_vocabulary_that_is_being_trained_leaves_no_file(number, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"word{i} other{i * i}\n" for i in range(1_000_000)))
    process = start("-m", "bertjax.tools.train_vocab", f"--input={text}", f"--output={tmp_path}/vocab")
    while "max_words" not in process.stdout.readline():
        pass
    assert stop(process, number) == one_line(number)
    assert not (tmp_path / "vocab").exists()


def test_a_corpus_that_is_being_built_by_processes_says_how_to_go_on(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one sentence of words .\nanother one .\n\n" * 100_000)
    (tmp_path / "vocab.txt").write_text(
        "\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] one another sentence of words .".split()) + "\n"
    )
    command = [
        "-m",
        "bertjax.tools.build_corpus",
        f"--input={text}",
        "--shard_bytes=20000",
        f"--tokenizer={tmp_path}/vocab.txt",
        "--do_lower_case=true",
        "--workers=2",
        f"--output={tmp_path}/store",
    ]
    process = start(*command, start_new_session=True)
    while "shard 1/" not in process.stdout.readline():
        pass
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    code, said = process.wait(30), process.communicate()[1]
    assert code == 130
    assert said == "\ninterrupted by SIGINT\nthe same command goes on with what is missing\n"
    done = len(list((tmp_path / "store" / "shards").glob("*.json")))
    assert 1 <= done and not (tmp_path / "store" / "manifest.json").exists()


def test_what_was_being_written_vanishes(tmp_path):
    script = (
        "import sys, time\nfrom bertjax.interruption import leave_on_signals\n"
        "from bertjax.formats.files import whole_directory, whole_file\nleave_on_signals()\n"
        "place = sys.argv[1]\n"
        "with whole_file(place + '/file') as f, whole_directory(place + '/dir'):\n"
        "    f.write('half'); f.flush(); print('writing', flush=True)\n"
        "    for _ in range(600): time.sleep(0.1)\n"
    )
    process = start("-c", script, tmp_path)
    process.stdout.readline()
    assert len(list(tmp_path.iterdir())) == 2
    assert stop(process, signal.SIGTERM) == one_line(signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_destructor_that_swallows_the_exception_only_delays_the_end():
    script = (
        "import signal, time\nfrom bertjax.interruption import leave_on_signals\n"
        "class Last:\n    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "leave_on_signals()\nLast()\ntime.sleep(60)\n"
    )
    process = start("-c", script)
    assert (process.wait(30), process.communicate()[1]) == one_line(signal.SIGINT)


def test_signals_that_a_process_was_started_to_ignore_stay_ignored():
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from bertjax.interruption import leave_on_signals\nleave_on_signals()\n"
        "signal.raise_signal(signal.SIGINT)\nprint('still here')"
    )
    process = start("-c", script)
    assert process.communicate()[0] == "still here\n"


def test_a_library_that_is_imported_leaves_signals_alone():
    process = start(
        "-c",
        "import signal, bertjax.tools.train_vocab\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
    )
    assert process.communicate()[0] == "True\n"


def test_a_second_signal_interrupts_what_cleans_up_after_the_first():
    script = (
        "import signal, time\nfrom bertjax.interruption import leave_on_signals\n"
        "leave_on_signals()\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "finally:\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(60)\n"
    )
    process = start("-c", script)
    assert (process.wait(30), process.communicate()[1]) == (143, "\ninterrupted by SIGINT\n")


@pytest.mark.parametrize("platform", ["cuda", "gpux"])
def test_a_platform_that_jax_does_not_find_is_named_with_the_way_out(platform, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    script = "import jax\nfrom bertjax.interruption import refusals\nwith refusals('tool'):\n    jax.numpy.ones(3)"
    process = start("-c", script)
    told = process.communicate()[1].splitlines()
    if platform == "cuda" and not process.returncode:
        pytest.skip("this machine has it")
    assert process.returncode == 1
    assert told[-1].startswith(f"tool: jax finds no device for JAX_PLATFORMS={platform}: unset it")
    assert "Traceback" not in "".join(told)


def test_a_reader_that_has_seen_enough_ends_a_program_in_silence():
    process = start(
        "-c",
        "from bertjax.interruption import refusals\n"
        "with refusals('tool'):\n    print('first')\n    input()\n    print('x' * 10 ** 6)",
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(30) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""


@pytest.mark.parametrize("program, code", [("bertjax --help", 141), ("bertjax.config", 141), ("bertjax.main", 2)])
def test_a_closed_output_is_one_that_nobody_reads(program, code):
    for closed in (">&-", "<&- >&-", ">&- 2>&-"):
        process = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m {program} {closed}"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        told = "" if code == 141 or "2>" in closed else "bertjax: no experiment given"
        assert process.returncode == code
        assert process.stderr.startswith(told) and len(process.stderr.splitlines()) == bool(told)


def test_writes_of_a_checkpoint_that_outlive_their_event_loop_are_not_told_but_other_faults_are():
    script = (
        "import asyncio\nfrom bertjax.interruption import hush_closed_loops\nhush_closed_loops()\n"
        "loop = asyncio.new_event_loop()\nloop.close()\n"
        "class Write:\n    def __del__(self):\n        loop.call_soon_threadsafe(print)\n"
        "class Other:\n    def __del__(self):\n        raise ValueError('another fault')\n"
        "Write()\nOther()\n"
    )
    told = start("-c", script).communicate()[1]
    assert told.count("Traceback") == 1 and "another fault" in told and "loop" not in told


def test_ctrl_c_in_the_start_of_a_run_from_python_is_not_swallowed():
    code = (
        "import bertjax, gc, signal, time\nfrom bertjax import experiment\n"
        "def prepare(config, workdir):\n"
        "    gc.callbacks.append(lambda *_: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))\n"
        "    gc.collect()\n    for _ in range(200):\n        time.sleep(0.1)\n"  # not one sleep: see slow_imports
        "experiment.prepare = prepare\n"
        "try:\n    bertjax.train('demo', 'nowhere')\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    process = start("-c", code)
    assert process.communicate(timeout=60) == ("interrupted\n", "")


@pytest.mark.parametrize("cache", ["of a run", "of a search"])
def test_a_user_without_a_home_directory_is_told_to_set_one(cache, monkeypatch, tmp_path):
    from bertjax.config import Config
    from bertjax.process import runtime
    from bertjax.tools import sweep

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="^tool: this user has no home directory, .*: set HOME to"), refusals("tool"):
        runtime.settings(Config()) if cache == "of a run" else sweep.run(Config(), {}, range(1), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_of_a_directory_or_a_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    os.mkdir("directory")
    os.symlink("nowhere", "link")
    for make, said in (
        (lambda: os.mkdir("file"), "file: File exists; it is a file: choose another place"),
        (lambda: os.mkdir("file/a/b"), "file/a/b: Not a directory; file is a file: choose another place"),
        (lambda: open("directory", "x"), "directory: File exists; it is a directory: choose another place"),
        (lambda: os.mkdir("link"), "link: File exists; it is a link to nothing: choose another place"),
    ):
        with pytest.raises(SystemExit, match=f"^tool: {said}$"), refusals("tool"):
            make()
