"""Jobs of a benchmark: one a GPU at a time, their logs, and what is said of one that fails."""

import json
import sys

from bertjax.tools.bench import jobs

SCRIPT = """
import json, os, time
start = time.time(); time.sleep(0.3)
print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SAID"), start,
                  time.time(), os.environ.get("JAX_PLATFORMS")]))
"""


def test_a_gpu_has_one_job_at_a_time_and_no_platform_is_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    names = ["a", "b", "c", "d"]
    failed = jobs.run_all([jobs.Job(name, [sys.executable, "-c", SCRIPT], {"SAID": name})
                           for name in names], ["3", "5"], tmp_path)
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
    bad = jobs.Job("bad", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
    good = jobs.Job("good", [sys.executable, "-c", ""])
    assert jobs.run_all([bad, good], [""], tmp_path) == ["bad"]
    said = capsys.readouterr()
    assert "bad: exit code 3" in said.err and "the reason" in said.err
    assert "good: done" in said.out


def test_a_pre_training_is_started_as_a_user_would(tmp_path):
    command = jobs.pretraining("recipes:budget", tmp_path, {"optimizer.b2": 0.98})
    assert command[1:] == ["-m", "bertjax.main", "--config=bertjax:recipes:budget",
                           f"--workdir={tmp_path}", "--config.optimizer.b2=0.98"]
