"""What the scaling benchmark does with its timings; what it times is covered by the trainer's."""

import json

import jax.numpy as jnp
import pytest

from tests.benchmarks import jax_step, scaling
from tests.benchmarks.workloads import Workload

WORK = Workload("tiny", 32, 2)


def run_of(name, devices, step_seconds):
    """A run whose steps are reported to take so long."""
    program = jax_step.Compiled(WORK, lambda state, batch: (state + 1, None), lambda: jnp.zeros(()), {}, 0.0)
    run = scaling.Run(name, devices, program)
    run.time = lambda seconds: run.seconds.append(step_seconds.pop(0))
    return run


def test_perfect_scaling_is_the_median_of_the_slowest_device_by_itself():
    runs = [
        run_of("1", 1, [9.0, 1.0, 2.0, 3.0]),
        run_of("1", 1, [0.0, 1.0, 1.0, 1.0]),
        run_of("2", 2, [9.0, 4.0, 4.0, 5.0]),
    ]
    lines = scaling.measure(WORK, runs, rounds=3, seconds=0.1)
    assert [line["scaling"] for line in lines] == [1.0, 2.0, 0.5]
    assert lines[2]["rows_per_second"] == 2 * 2 / 4.0
    assert lines[2]["rounds_ms"] == [4000.0, 4000.0, 5000.0]  # the first round does not count


def test_a_run_goes_on_from_the_state_that_it_reached():
    run = run_of("1", 1, [])
    run.steps(3)
    run.steps(2)
    assert float(run._state) == 5.0


def test_the_table_shows_one_line_of_one_device_and_the_json_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        scaling,
        "make_runs",
        lambda work, counts, fsdp, xla: [
            run_of("1", 1, [1.0, 0.8]),
            run_of("1", 1, [1.0, 1.0]),
            run_of("2, fsdp=2", 2, [1.0, 1.25]),
        ],
    )
    scaling.main(["tiny-32x2", "--devices", "2", "--rounds=1", f"--out={tmp_path}"])
    table = capsys.readouterr().out.splitlines()
    assert table[-2].startswith("| tiny-32x2 | 1 | 1000.00 |") and "| 80.0% |" in table[-1]
    assert [line["devices"] for line in json.loads((tmp_path / "scaling.json").read_text())] == ["1", "1", "2, fsdp=2"]


def test_more_devices_than_there_are_is_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--devices", "1", "1024"])
    assert "this machine has 8" in capsys.readouterr().err
