"""Weights & Biases (a stand-in module) and CSV behind the logbook. TensorBoard: test_logbook.py."""

import csv
import sys
import types

import pytest

from bertjax.config import LogSettings, default_config
from bertjax.config_checks import check_config
from bertjax.log.logbook import Logbook


@pytest.fixture
def wandb(monkeypatch):
    """A module that plays wandb offline: keeps what it is told."""
    module = types.ModuleType("wandb")
    module.runs = []

    class Run:
        def __init__(self, **settings):
            self.settings, self.logged, self.finished = settings, [], False
            module.runs.append(self)

        def log(self, values, step):
            assert not self.finished
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    module.init = lambda **settings: Run(**settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def book(directory, start_step=0, settings=None, **log):
    log = LogSettings(tensorboard=False, **log)
    return Logbook(directory, start_step, log, settings=settings, write=lambda line: None)


def test_wandb_gets_finite_numbers_by_step_and_the_settings(wandb, tmp_path):
    with book(tmp_path / "base", wandb="bert", settings={"batch_size": 8}) as log:
        log.train(1, 10, {"loss": 2.0, "grad_norm": float("inf"), "mfu": None})
        log.evaluation(1, {"eval/loss": 1.5})
    (run,) = wandb.runs
    assert run.logged == [(1, {"loss": 2.0}), (1, {"eval/loss": 1.5})] and run.finished
    assert run.settings["project"] == "bert" and run.settings["name"] == "base"
    assert run.settings["config"] == {"batch_size": 8}


def test_a_resumed_run_is_the_same_run_at_wandb_and_a_new_one_is_not(wandb, tmp_path):
    for start in (0, 5, 0):
        book(tmp_path, start, wandb="bert").close()
    first, resumed, overwritten = [run.settings["id"] for run in wandb.runs]
    assert first == resumed != overwritten
    assert all(run.settings["resume"] == "allow" for run in wandb.runs)


def test_wandb_is_not_imported_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it would raise
    book(tmp_path).close()
    assert not (tmp_path / "wandb.id").exists()


def test_missing_wandb_is_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = default_config()
    config.log.wandb = "bert"
    with pytest.raises(ValueError, match="pip install wandb"):
        check_config(config)


def rows(directory):
    with open(directory / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_record_and_a_column_a_name(tmp_path):
    with book(tmp_path, csv=True) as log:
        log.train(1, 10, {"loss": 2.5, "skipped": None})
        log.evaluation(1, {"eval/loss": 1.5})
        log.train(2, 10, {"loss": float("nan"), "learning_rate": 1e-4})
    assert rows(tmp_path) == [
        {"step": "1", "loss": "2.5", "eval/loss": "", "learning_rate": ""},
        {"step": "1", "loss": "", "eval/loss": "1.5", "learning_rate": ""},
        {"step": "2", "loss": "", "eval/loss": "", "learning_rate": "0.0001"},
    ]


def test_csv_of_a_resumed_run_has_no_step_twice(tmp_path):
    with book(tmp_path, csv=True) as log:
        for step in range(1, 6):
            log.train(step, 10, {"loss": float(step)})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("6,")  # the kill came in the middle of a line
    with book(tmp_path, 3, csv=True) as log:
        log.train(4, 10, {"loss": 4.0})
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
        ("4", "4.0"),
    ]
    book(tmp_path, 0, csv=True).close()  # a new run in the old place
    assert rows(tmp_path) == []


def test_csv_that_is_damaged_or_was_not_asked_for_before_has_all_records_of_the_run(tmp_path):
    with book(tmp_path) as log:
        log.train(1, 10, {"loss": 2.5})
        log.evaluation(1, {"eval/loss": 1.5})
    (tmp_path / "metrics.csv").write_bytes(b"\0" * 100 + b"\n1,2.5\n")
    with book(tmp_path, 1, csv=True) as log:
        log.train(2, 10, {"loss": 2.0})
    assert [tuple(row.values()) for row in rows(tmp_path)] == [("1", "2.5", ""), ("1", "", "1.5"), ("2", "2.0", "")]


def test_a_damaged_id_of_wandb_is_a_new_run(tmp_path, wandb):
    (tmp_path / "wandb.id").write_bytes(b"\0\0\0")
    book(tmp_path, 5, wandb="project").close()
    assert len(wandb.runs[0].settings["id"]) == 16
