"""The search: grid, resumption, degenerate runs, table and picture. No model is trained here."""

import json
import subprocess
import sys
import types

import pytest
from etils import epath

from bertjax.config import finetune_config, frozen
from bertjax.formats.checkpoint import CheckpointError
from bertjax.process.preemption import Preempted
from bertjax.run.workdir import step_to_resume
from bertjax.tasks import metrics, sweep
from bertjax.tasks.finetune import NoFiniteScore
from bertjax.tools import sweep as tool

BASE = frozen(finetune_config())


def run_of(rate, rows, epochs, seed=0):
    """The settings of one run."""
    return BASE.replace({"optimizer.learning_rate": rate, "batch_size": rows, "task.epochs": epochs, "seed": seed})


class Tuner:
    """Scores by a formula; notes what it was asked to run."""

    def __init__(self, fail_at=None):
        self.ran, self.fail_at = [], fail_at

    def run(self, settings):
        if len(self.ran) == self.fail_at:
            raise KeyboardInterrupt
        self.ran.append(settings)
        if settings.seed == 1 and settings.optimizer.learning_rate == 5e-5:
            raise NoFiniteScore("all NaN")
        value = 0.9 - settings.optimizer.learning_rate * 1000 + settings.seed * 0.01
        flags = (metrics.ONE_CLASS_ONLY,) if settings.seed == 2 else ()
        scores = metrics.Scores({"accuracy": value}, flags)
        return types.SimpleNamespace(settings=settings, value=value, scores=scores, best_step=7, seconds=1.0)


def runs():
    search = {"batch_size": [16], "optimizer.learning_rate": [5e-5, 2e-5], "task.epochs": [2, 3]}
    return sweep.grid(BASE, search, range(3))


def test_the_grid_is_the_papers_times_the_seeds_grouped_by_batch_size():
    found = [settings for _, settings in sweep.grid(BASE, seeds=range(5))]
    assert len(found) == 2 * 3 * 3 * 5
    assert [r.batch_size for r in found] == [16] * 45 + [32] * 45
    assert found[0] == run_of(5e-5, 16, 2, 0)


def test_an_interrupted_search_goes_on_and_repeats_no_run(tmp_path):
    first = Tuner(fail_at=4)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(first.run, runs(), tmp_path, {"task": "toy"})
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"batch_size": 16, "learn')  # killed while writing
    second, kept, said = Tuner(), [], []
    outcomes = sweep.sweep(second.run, runs(), tmp_path, {"task": "toy"}, keep=kept.append, say=said.append)
    assert len(said) == len(second.ran)
    assert said[-1] == ("run 12/12: batch 16, learning rate 2e-05, 3 epochs, seed 2: 0.9000  [one class only], 1.0 s")
    assert first.ran + second.ran == [settings for _, settings in runs()]
    assert len(outcomes) == 12 == len(sweep.read_outcomes(tmp_path / "runs.jsonl"))
    assert outcomes == sweep.read_outcomes(tmp_path / "runs.jsonl")
    row = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[0])
    assert list(row)[:5] == ["batch_size", "learning_rate", "epochs", "seed", "value"]
    assert kept[-1].settings == run_of(2e-5, 16, 2, 2)
    values = [run.value for run in kept]
    assert values == sorted(values)
    with pytest.raises(ValueError, match="another search.*'toy' -> 'other'"):
        sweep.sweep(Tuner().run, runs(), tmp_path, {"task": "other"})


def test_a_search_killed_while_it_keeps_its_best_model_keeps_it_the_next_time(tmp_path):
    best, kept = 0.9, []

    def killed(run):
        if run.value >= best:
            raise KeyboardInterrupt
        kept.append(run.value)

    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(Tuner().run, runs(), tmp_path, {}, keep=killed)
    outcomes = sweep.sweep(Tuner().run, runs(), tmp_path, {}, keep=lambda run: kept.append(run.value))
    assert len(outcomes) == 12
    assert kept[-1] == sweep.best_outcome(outcomes).value == best


@pytest.mark.parametrize("line", ["{}", "x", "3", '{"seed": 1}', "[]", "\x00\x00", ""])
def test_a_damaged_line_of_the_finished_runs_is_named(tmp_path, line):
    sweep.sweep(Tuner().run, runs(), tmp_path, {})
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"runs.jsonl:2: the line is damaged .*; delete it, and its run is done again"):
        sweep.sweep(Tuner().run, runs(), tmp_path, {})
    (tmp_path / "runs.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert len(sweep.sweep((again := Tuner()).run, runs(), tmp_path, {})) == 12 and len(again.ran) == 1


def test_two_processes_do_not_search_in_one_directory(tmp_path):
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, 2); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "search.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process is training .*search.lock; wait for it"):
            sweep.sweep(Tuner().run, runs(), tmp_path / "search", {})
        other.stdin.close()
    assert len(sweep.sweep(Tuner().run, runs(), tmp_path / "search", {})) == 12


def test_a_search_and_a_run_do_not_write_into_each_other_s_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(BASE.to_json())
    with pytest.raises(ValueError, match="run holds a run or a model, whose results would be replaced"):
        sweep.sweep(Tuner().run, runs(), tmp_path / "run", {})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # and no lock
    sweep.sweep(Tuner().run, runs(), tmp_path / "search", {})
    for resume in ("auto", "overwrite"):
        with pytest.raises(ValueError, match="search holds a search, whose results would be replaced"):
            step_to_resume(BASE.replace({"resume": resume}), epath.Path(tmp_path / "search"))


def test_failed_and_one_class_runs_are_counted_and_averaged_honestly(tmp_path):
    outcomes = sweep.sweep(Tuner().run, runs(), tmp_path, {})
    rows = {tuple(row[0].setting.values()): row for row in sweep.rows(outcomes)}
    row = rows[16, 5e-5, 2]
    assert [o.value for o in row] == pytest.approx([0.85, 0.0, 0.87]) and sum(o.degenerate for o in row) == 2
    assert sweep.best_outcome(outcomes).setting["learning_rate"] == 2e-5
    text = sweep.write_report("toy", "accuracy", outcomes, tmp_path)
    assert "12 runs, 6 degenerate" in text
    assert "| 16 | 5e-05 | 2 | 3 | 0.5733 | 0.4966 | 2 | 0.8500 0.0000 0.8700 |" in text
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "sweep.md").read_text() == text


def test_one_seed_has_no_deviation_and_no_run_is_an_error():
    setting = {"batch_size": 16, "learning_rate": 2e-5, "epochs": 3}
    outcome = sweep.Outcome(setting, 0, 0.5, {}, (), 1, 1.0)
    assert "| 16 | 2e-05 | 3 | 1 | 0.5000 | - | 0 | 0.5000 |" in sweep.table("rte", "f1", [outcome])
    assert sweep.described({**setting, "epochs": 1}, 0) == "batch 16, learning rate 2e-05, 1 epoch, seed 0"
    with pytest.raises(ValueError, match="no finished run"):
        sweep.best_outcome([])


@pytest.mark.parametrize("flag", [sweep.FAILED, metrics.NOT_FINITE])
def test_a_run_that_failed_is_not_the_best_of_others_below_zero(flag):
    failed = sweep.Outcome({"batch_size": 16}, 0, 0.0, {}, (flag,), 0, 0.0)
    negative = sweep.Outcome({"batch_size": 32}, 0, -0.5, {}, (), 1, 1.0)
    for outcomes in ([failed, negative], [negative, failed]):
        assert sweep.best_outcome(outcomes) is negative
        assert sweep.rows(outcomes) == [[negative], [failed]]
    assert "1 degenerate; no best one: none gave a finite score" in sweep.table("cola", "matthews", [failed])


def options(*arguments):
    return tool.searched(tool.parser().parse_args(["--workdir=w", *arguments]))


def test_any_setting_can_be_searched_and_what_is_set_is_not():
    assert options() == {name: list(values) for name, values in sweep.PAPER_GRID.items()}
    assert options("--batch_size=8", "--config.task.epochs=1") == {
        "batch_size": [8],
        "optimizer.learning_rate": [5e-5, 3e-5, 2e-5],
    }
    found = options(
        "--search=optimizer.name=adamw,optax.lion",
        "--search=config.optimizer.learning_rate=1,2e-5",
        "--search=task.options.label=a,b",
        "--search=optimizer.bias_correction=true,False",
        "--search=task.freeze=(),('embeddings/',)",
    )
    assert found == {
        "optimizer.name": ["adamw", "optax.lion"],
        "optimizer.learning_rate": [1.0, 2e-5],
        "task.options.label": ["a", "b"],
        "optimizer.bias_correction": [True, False],
        "task.freeze": [(), ("embeddings/",)],
    }
    grid = list(sweep.grid(BASE, {"optimizer.learning_rate": [1e-5, 2e-5], "optimizer.options.b1": [0.8, 0.9]}))
    assert [setting for setting, _ in grid] == [
        {"optimizer.options.b1": b1, "learning_rate": rate} for b1 in (0.8, 0.9) for rate in (1e-5, 2e-5)
    ]
    assert [settings.optimizer.options for _, settings in grid] == [{"b1": 0.8}] * 2 + [{"b1": 0.9}] * 2
    assert sweep.described(grid[0][0], 1) == "optimizer.options.b1 0.8, learning rate 1e-05, seed 1"


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--search=optimizer.lerning_rate=1", "Did you mean --config.optimizer.learning_rate"),
        ("--search=optimizer.learning_rate", "write NAME=VALUE,VALUE"),
        ("--search=task.epochs=2,x", "--search=task.epochs=2,x: .*config.task.epochs=x"),
        ("--epochs=x", "--epochs=x: .*config.task.epochs=x"),
        ("--search=seed=1,2", "give --seeds=N"),
        ("--search=batch_size=4 --search=batch_size=8", "batch_size is given twice"),
    ],
)
def test_a_search_that_cannot_be_is_refused(argument, words):
    with pytest.raises(ValueError, match=words):
        options(*argument.split())


def test_a_search_is_not_pushed_and_says_how_its_best_model_is(capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--task=mrpc", "--data=d", "--init_from=m", "--workdir=w", "--config.export.push=me/best"])
    assert left.value.code == 2
    assert "python -m bertjax.tools.convert --from=w/best --push=me/best" in capsys.readouterr().err


def test_a_search_that_is_stopped_says_so_and_how_it_goes_on(monkeypatch, capsys):
    def run(*_):
        raise Preempted(3, "SIGINT")

    monkeypatch.setattr(tool, "run", run)
    with pytest.raises(Preempted):
        tool.main(["--task=mrpc", "--data=d", "--init_from=m", "--workdir=w"])
    said = "stopped by SIGINT; the same command goes on with the runs that are missing\n"
    assert capsys.readouterr().err == said
