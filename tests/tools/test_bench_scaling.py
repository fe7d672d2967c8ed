"""What the scaling benchmark does with its timings; what it times is covered by the trainer's."""

import json

import jax.numpy as jnp
import pytest

from bertjax.tools.bench import jax_step, scaling
from bertjax.tools.bench.workloads import Workload

WORK = Workload("tiny", 32, 2)


def run_of(name, devices, step_seconds):
    """A run whose steps take no time, but are reported to take so long."""
    program = jax_step.Compiled(WORK, lambda state, batch: (state + 1, None),
                                lambda: jnp.zeros(()), {}, 0.0)
    run = scaling.Run(name, devices, [program] * (devices if "apart" in name else 1))
    run.time = lambda seconds: run.seconds.append(step_seconds.pop(0))
    return run


def test_perfect_scaling_is_the_median_of_what_devices_do_apart():
    apart, pair = run_of("2 apart", 2, [9.0, 1.0, 2.0, 3.0]), run_of("2", 2, [9.0, 4.0, 4.0, 5.0])
    lines = scaling.measure(WORK, [apart, pair], rounds=3, seconds=0.1)
    assert [line["scaling"] for line in lines] == [1.0, 0.5]
    assert lines[1]["rows_per_second"] == 2 * 2 / 4.0
    assert lines[1]["rounds_ms"] == [4000.0, 4000.0, 5000.0]  # the first round does not count


def test_a_run_keeps_the_state_of_each_of_its_programs():
    run = run_of("2 apart", 2, [])
    run.steps(3)
    run.steps(2)
    assert [float(state) for state in run._states] == [5.0, 5.0]


def test_the_table_and_the_json_have_a_line_for_every_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "make_runs", lambda work, counts, fsdp, xla: [
        run_of("2 apart", 2, [1.0] * 2), run_of("2, fsdp=2", 2, [1.0, 1.25])])
    scaling.main(["tiny-32x2", "--devices", "2", "--rounds=1", f"--out={tmp_path}"])
    assert "80.0%" in capsys.readouterr().out.splitlines()[-1]
    assert [line["devices"] for line in json.loads((tmp_path / "scaling.json").read_text())] == [
        "2 apart", "2, fsdp=2"]


def test_more_devices_than_there_are_is_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--devices", "1", "1024"])
    assert "this machine has 8" in capsys.readouterr().err
