"""Real processes that are killed and started again end bit-equal to an undisturbed run."""

import json
import signal
import time

import numpy as np
import pytest

from bertjax.tools.soak import ACCIDENTS, Soak, history


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


@pytest.mark.slow
def test_a_hundred_accidents_change_nothing(tmp_path):
    soak = Soak(tmp_path, kills=100, seed=0)
    soak.run()
    assert set(soak.counts) == set(ACCIDENTS) and sum(soak.counts.values()) == 100
