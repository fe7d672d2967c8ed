"""Real processes that are killed and started again end bit-equal to an undisturbed run."""

import io
import json
import signal
import time

import numpy as np
import pytest

from tests.benchmarks import soak_run
from tests.benchmarks.soak import ACCIDENTS, Soak, history, newest_intact, spoil


def assert_bit_equal(calm, rough):
    with np.load(calm / "final.npz") as expected, np.load(rough / "final.npz") as found:
        assert expected.files == found.files
        for name in expected.files:
            assert expected[name].tobytes() == found[name].tobytes(), name


def test_resume_after_sigterm_and_after_sigkill_is_bit_identical(tmp_path):
    soak = Soak(tmp_path, kills=1, seed=0)
    soak.steps = 60
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    assert soak.start(calm, 0).wait() == 0

    child = soak.start(rough, 0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 75  # preemption.EXIT_PREEMPTED
    child = soak.start(rough, 0.05)
    stopped_at = soak.begun_at[-1]
    assert 0 < stopped_at < 60  # saved at the step that SIGTERM met, not at a multiple of 10
    while not (rough / "checkpoints" / str(stopped_at // 10 * 10 + 10)).exists():
        assert child.poll() is None, (rough / "stderr.txt").read_text()
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert soak.start(rough, 0).wait() == 0
    assert soak.begun_at[-1] == stopped_at // 10 * 10 + 10

    assert_bit_equal(calm, rough)
    assert history(calm) == history(rough)
    steps = [json.loads(line)["step"] for line in (rough / "metrics.jsonl").open()]
    assert steps == list(range(1, 61))


def checkpoint(run, name, text="0123456789"):
    state = run / "checkpoints" / name / "state"
    state.mkdir(parents=True)
    (state / "data").write_text(text)
    (state.parent / "manifest.json").write_text(json.dumps({"files": {"state/data": [10, 0]}}))
    return state.parent


def test_where_a_run_must_begin_is_its_newest_intact_checkpoint(tmp_path):
    assert newest_intact(tmp_path) == 0
    checkpoint(tmp_path, "10")
    checkpoint(tmp_path, "tmp.90")
    assert newest_intact(tmp_path) == 10
    checkpoint(tmp_path, "20", text="01234")
    assert newest_intact(tmp_path) == 10
    checkpoint(tmp_path, "old.30")  # its replacement was not complete when the run was killed
    assert newest_intact(tmp_path) == 30
    spoil(checkpoint(tmp_path, "40"), emptied=True)
    assert newest_intact(tmp_path) == 30


def test_a_run_that_begins_earlier_than_it_must_is_found_out(tmp_path, monkeypatch):
    class Child:
        stdout = io.StringIO("training from step 0\n")

        def kill(self):
            pass

    soak = Soak(tmp_path, kills=1, seed=0)
    monkeypatch.setattr(soak, "launch", lambda *arguments: Child())
    checkpoint(tmp_path, "10")
    with pytest.raises(SystemExit, match="began at step 0, but its newest intact .* step 10"):
        soak.start(tmp_path, 0)


@pytest.mark.parametrize(
    "flags, named", [([], "after --"), (["--directory={}/a.txt", "--", "--config=configs/demo.py"], "a.txt")]
)
def test_a_run_that_cannot_be_killed_is_refused(flags, named, tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    with pytest.raises(SystemExit) as refused:
        soak_run.main(["--kills=1", *(flag.format(tmp_path) for flag in flags)])
    assert named in f"{refused.value}{capsys.readouterr().err}"


def test_a_run_that_ended_by_itself_is_not_counted_as_killed(tmp_path, monkeypatch, capsys):
    soak = soak_run.Soak(tmp_path, [], kills=9, minutes=1, records=1, seed=0)
    starts = iter([(True, "killed at step 3"), (True, "killed at step 7"), (False, "ended at step 8")])
    monkeypatch.setattr(soak, "kill_once", lambda run: next(starts))
    monkeypatch.setattr(soak, "finish", lambda run: run.mkdir())  # of the undisturbed run alone
    monkeypatch.setattr(soak_run, "differences", lambda calm, rough: [])
    monkeypatch.setattr(soak_run, "read_records", lambda path: [{"step": 0}])
    soak.run()
    assert "bit-equal after 2 kills" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hundred_accidents_change_nothing(tmp_path):
    soak = Soak(tmp_path, kills=100, seed=0)
    soak.run()
    assert set(soak.counts) == set(ACCIDENTS) and sum(soak.counts.values()) == 100
