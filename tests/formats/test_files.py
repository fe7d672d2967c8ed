"""Files and directories that are whole or not there."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from bertjax.formats.files import (
    make_once,
    parse_json,
    read_json,
    scratch_directory,
    whole_directory,
    whole_file,
    write_whole,
)
from bertjax.tasks.glue import GlueTask
from bertjax.tasks.ner import NerTask
from bertjax.tasks.swag import MultipleChoiceTask
from bertjax.tokenization import WordPieceTokenizer, load_tokenizer
from tests.fakes import SPECIALS

KILLED = """
import os, signal, sys
from bertjax.formats.files import whole_file
with whole_file(sys.argv[1]) as file:
    file.write("half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_file_that_was_there(tmp_path):
    write_whole(tmp_path / "out.txt", "old\n")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out.txt"])
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out.txt").read_text() == "old\n"
    write_whole(tmp_path / "out.txt", "new\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_an_error_while_writing_leaves_nothing_and_a_bad_place_shows_at_once(tmp_path):
    with pytest.raises(KeyError), whole_file(tmp_path / "deep" / "out.txt") as file:
        file.write("half")
        raise KeyError
    assert not (tmp_path / "deep").exists()
    with pytest.raises(IsADirectoryError, match="name a file in it"), whole_file(tmp_path):
        pytest.fail("opened")


def test_a_pipe_or_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "fifo", "through a pipe")
    assert os.read(reader, 99) == b"through a pipe" and (tmp_path / "fifo").is_fifo()
    with open(tmp_path / "out.txt", "w+") as file:  # as /dev/stdout is where the shell has redirected it
        write_whole(f"/dev/fd/{file.fileno()}", "to a stream")
        assert file.read() == "to a stream"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "out.txt"]


def test_what_a_symbolic_link_names_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "file").symlink_to("disk/file")
    (tmp_path / "model").symlink_to("disk/model")
    for overwrite in (False, True):  # at first there is nothing at its other end
        write_whole(tmp_path / "file", f"{overwrite}")
        assert (tmp_path / "file").is_symlink() and (tmp_path / "disk" / "file").read_text() == f"{overwrite}"
        with whole_directory(tmp_path / "model", overwrite) as directory:
            (directory / f"{overwrite}").touch()
        assert (tmp_path / "model").is_symlink()
        assert [path.name for path in (tmp_path / "disk" / "model").iterdir()] == [f"{overwrite}"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["True", "disk", "file", "file", "model", "model"]


def test_a_file_that_another_process_is_writing_is_refused_and_left_to_it(tmp_path):
    path = tmp_path / "out.txt"
    with whole_file(path) as first:
        first.write("the first ")
        first.flush()
        with pytest.raises(OSError, match="another process is writing this file"), whole_file(path):
            pytest.fail("opened")
        first.write("alone")
    assert path.read_text() == "the first alone"
    with whole_file(path) as again:
        again.write("again")
    assert path.read_text() == "again"


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path):
    write_whole(tmp_path / "out.json", json.dumps({"text": "a\ud800"}, ensure_ascii=False))
    assert json.loads((tmp_path / "out.json").read_text()) == {"text": "a\ud800"}


def test_the_home_directory_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_whole("~/a/out.txt", "x")
    with whole_directory("~/d") as directory:
        (directory / "y").touch()
    assert (tmp_path / "a" / "out.txt").exists() and (tmp_path / "d" / "y").exists()


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(lambda folder: GlueTask("sst2", folder), id="glue"),
        pytest.param(lambda folder: NerTask(folder, labels=("O", "B-X")), id="ner"),
        pytest.param(lambda folder: MultipleChoiceTask(folder), id="swag"),
    ],
)
def test_predictions_of_a_part_of_the_rows_are_not_left_behind(task, tmp_path):
    records = [SimpleNamespace(id="1"), SimpleNamespace(id="2", words=("a",), tags=None)]
    with pytest.raises((ValueError, AttributeError)):
        task(tmp_path).write(SimpleNamespace(name="test", records=records), [], [], tmp_path / "p")
    assert not any((tmp_path / "p").glob("*"))


def test_a_vocabulary_is_there_only_with_its_casing(tmp_path, monkeypatch):
    tokenizer = WordPieceTokenizer([*SPECIALS, "A"], False)
    replace = os.replace
    for allowed in range(2):
        calls = iter(range(9))

        def stopped(source, target, calls=calls, allowed=allowed):
            if next(calls) >= allowed:
                raise OSError("killed here")
            replace(source, target)

        monkeypatch.setattr(os, "replace", stopped)
        with pytest.raises(OSError, match="killed here"):
            tokenizer.save(tmp_path / str(allowed))
        with pytest.raises(FileNotFoundError):
            load_tokenizer(tmp_path / str(allowed))
    monkeypatch.setattr(os, "replace", replace)
    tokenizer.save(tmp_path / "1")
    assert load_tokenizer(tmp_path / "1").fingerprint == tokenizer.fingerprint


def test_what_others_may_read_is_for_the_umask_to_say(tmp_path):
    before = os.umask(0o022)
    try:
        with whole_directory(tmp_path / "model") as directory:
            safetensors.numpy.save_file({"a": np.zeros(2)}, directory / "weights")
            (directory / "more").mkdir()
            (directory / "more" / "text").write_text("")
    finally:
        os.umask(before)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*")}
    assert modes == {"model": "0o755", "weights": "0o644", "more": "0o755", "text": "0o644"}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_damaged_json_is_refused_with_the_name_of_the_file(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        read_json(tmp_path / "config.json")


def test_json_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": [1, null]}')
    assert read_json(tmp_path / "config.json") == {"a": [1, None]}
    with pytest.raises(ValueError, match="train.jsonl, line 3 is not valid JSON"):
        parse_json("{", "train.jsonl, line 3")


MAKER = """
import os, sys, time
from bertjax.formats import files
from bertjax.formats.files import make_once, whole_directory

target, text = sys.argv[1:]
files.WAITING_LINE_S = 0.2
def make(target):
    print("making", flush=True)
    with whole_directory(target) as directory:
        (directory / "a").write_text(text)
        while text != "now" and not os.path.exists(f"{target}.{text}"):
            time.sleep(0.02)
        if text == "fail":
            raise OSError("the disk is full")
        (directory / "b").write_text(text)
make_once(target, make, "the thing")
print((files.Path(target) / "b").read_text())
"""


def start_maker(target, text):
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, target, text], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def start_two(target, text):
    """One that makes until TARGET.TEXT is there, and one that waits."""
    first = start_maker(target, text)
    assert first.stdout.readline() == "making\n"
    other = start_maker(target, "now")
    line = other.stdout.readline()
    assert line.startswith(f"waiting for process {first.pid} on ")
    assert "which makes the thing" in line
    return first, other


def test_one_process_makes_and_the_other_waits_with_a_line(tmp_path):
    first, other = start_two(tmp_path / "out", "1")
    (tmp_path / "out.1").touch()
    said = other.communicate(timeout=60)[0].splitlines()
    assert said[-1] == "1" and "making" not in said
    assert first.communicate(timeout=60)[0] == "1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.1"]


def test_after_a_maker_was_killed_one_that_waits_makes_it(tmp_path):
    first, other = start_two(tmp_path / "out", "1")
    first.kill()
    assert other.communicate(timeout=60)[0].splitlines()[-2:] == ["making", "now"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_those_that_wait_for_a_maker_that_fails_end_with_its_reason(tmp_path):
    first, other = start_two(tmp_path / "out", "fail")
    (tmp_path / "out.fail").touch()
    assert other.communicate(timeout=60)[1].splitlines()[-1].endswith("could not make the thing: the disk is full")
    assert first.communicate(timeout=60)[1].splitlines()[-1] == "OSError: the disk is full"
    assert [path.name for path in tmp_path.iterdir()] == ["out.fail"]
    assert start_maker(tmp_path / "out", "now").communicate(timeout=60)[0] == "making\nnow\n"


def test_threads_of_a_process_make_it_once_too(tmp_path):
    made = []

    def make(target):
        time.sleep(0.1)
        made.append(target)
        target.write_text("x")

    threads = [threading.Thread(target=make_once, args=(tmp_path / "out", make, "it")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "out"]


def test_without_locks_the_first_rename_wins(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    def make(target):
        (target / "x").mkdir(parents=True)  # as another process does meanwhile
        with whole_directory(target):
            pass

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert make_once(tmp_path / "out", make, "it") == tmp_path / "out"


def test_what_a_killed_process_left_of_a_directory_is_removed_by_the_next(tmp_path):
    program = (
        "import sys, time\nfrom bertjax.formats.files import whole_directory\n"
        "with whole_directory(sys.argv[1], True) as directory:\n"
        "    print(directory, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "m")], text=True, stdout=subprocess.PIPE
    ) as process:
        try:
            left = type(tmp_path)(process.stdout.readline().strip())
            with whole_directory(tmp_path / "m") as directory:
                (directory / "x").write_text("1")
            assert left.is_dir()  # of a process that lives
        finally:
            process.kill()
    (tmp_path / ".m.mine").mkdir()  # of somebody else
    with whole_directory(tmp_path / "m", overwrite=True) as directory:
        (directory / "x").write_text("2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.mine", "m"]


def test_a_directory_that_was_taken_away_by_a_killed_process_comes_back(tmp_path):
    old = tmp_path / ".m.old.abcd0123" / "it"
    old.mkdir(parents=True)
    (old / "x").write_text("1")
    with pytest.raises(FileExistsError), whole_directory(tmp_path / "m"):
        pass
    assert (tmp_path / "m" / "x").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_scratch_directory_goes_with_its_block_or_after_a_kill_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "bertjax-mine").mkdir()
    program = (
        "import time\nfrom bertjax.formats.files import scratch_directory\n"
        "with scratch_directory() as directory:\n"
        "    (directory / 'x').write_text('1')\n    print(directory, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        try:
            left = type(tmp_path)(process.stdout.readline().strip())
            with scratch_directory() as directory:
                (directory / "y").write_text("2")
                assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "bertjax-mine", left, directory])
        finally:
            process.kill()
    assert (left / "x").exists() and not directory.exists()
    with scratch_directory():
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bertjax-mine"]
