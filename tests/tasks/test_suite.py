"""The GLUE suite: which tasks it finds, their workdirs, the table."""

import types

import pytest

from bertjax.config import finetune_config, frozen
from bertjax.tasks import job, suite
from bertjax.training.loop import NotFiniteError


def config_for(folder):
    config = finetune_config()
    config.task.name, config.task.data = "all", str(folder)
    return frozen(config)


def test_the_folders_decide_and_the_table_has_the_benchmarks_scores(tmp_path, monkeypatch, capsys):
    for name in ("CoLA", "MRPC", "AX"):
        (tmp_path / name).mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text("")
    (tmp_path / "MRPC" / "msr_paraphrase_train.txt").write_text("")
    (tmp_path / "RTE").mkdir()  # without training data
    asked = []

    def prepare(config, workdir, mesh=None):
        asked.append((config.task.name, workdir))
        return types.SimpleNamespace(name=config.task.name)

    scores = {"cola": {"matthews": 0.5, "accuracy": 0.8}, "mrpc": {"f1": 0.9, "accuracy": 0.86}}
    monkeypatch.setattr(job, "prepare", prepare)
    monkeypatch.setattr(job, "run", lambda prepared: {"scores": scores[prepared.name]})
    workdir = tmp_path / "run"
    workdir.mkdir()
    found = suite.run(suite.prepare(config_for(tmp_path), str(workdir)))
    assert asked == [("cola", str(workdir / "cola")), ("mrpc", str(workdir / "mrpc"))]
    assert found == scores
    expected = "| cola, matthews | mrpc, f1/accuracy | mean |\n|---|---|---|\n| 50.0 | 90.0/86.0 | 69.0 |\n"
    assert (workdir / "glue.md").read_text() == expected
    assert expected in capsys.readouterr().out


def test_a_task_that_diverges_is_told_after_the_others_and_the_table_has_these(tmp_path, monkeypatch, capsys):
    def train(prepared):
        if prepared == "cola":
            raise NotFiniteError("the loss is not finite")
        return {"scores": {"f1": 0.9, "accuracy": 0.86}}

    monkeypatch.setattr(job, "run", train)
    with pytest.raises(NotFiniteError, match="cola: the loss is not finite"):
        suite.run(suite.Suite({"cola": "cola", "mrpc": "mrpc"}, "glue", tmp_path))
    assert "| mrpc, f1/accuracy | mean |" in (tmp_path / "glue.md").read_text()
    capsys.readouterr()
    with pytest.raises(NotFiniteError):
        suite.run(suite.Suite({"cola": "cola"}, "glue", tmp_path))
    assert "percent" not in capsys.readouterr().out


@pytest.mark.parametrize("asked", (("dev", "test"), ("dev,test",), ("dev",)))
def test_a_submission_of_the_suite_has_both_files_of_mnli(asked, tmp_path, monkeypatch):
    for name in ("MNLI", "RTE"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text("")
    predicted, read = {}, []

    def prepare(config, workdir, mesh=None):
        predicted[config.task.name] = config.task.predict
        return types.SimpleNamespace(tuner=types.SimpleNamespace(read=read.append))

    monkeypatch.setattr(job, "prepare", prepare)
    suite.prepare(config_for(tmp_path).replace({"task.predict": asked}), "run")
    both = (*asked, "test_mismatched") if len(",".join(asked)) > 3 else asked
    assert predicted == {"mnli": both, "rte": asked}
    assert read == ["dev_mismatched"]


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no training data of a GLUE task; expected.*CoLA"):
        suite.prepare(config_for(tmp_path), "run")
    with pytest.raises(ValueError, match="needs the folder that holds CoLA/"):
        suite.prepare(config_for("tfds:glue"), "run")
