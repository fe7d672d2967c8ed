"""The comparison over small tasks: the split of development sets, and the table."""

import json

import pytest

from bertjax.tasks import job
from bertjax.tasks.sweep import Outcome
from tests.benchmarks import transfer


def test_a_table_is_cut_once_and_keeps_its_header(tmp_path):
    rows = [f"{i}\tq\ts\tentailment\n" for i in range(8)]
    (tmp_path / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + "".join(rows))
    transfer.split_table(tmp_path / "dev.tsv", tmp_path / "out")
    task = job.make_task("qnli", str(tmp_path / "out"))
    ids = [[record.id for record in task.read(split).records] for split in ("train", "dev")]
    assert ids == [["0", "1", "2", "3", "4", "5"], ["6", "7"]]


def test_squad_is_cut_between_articles(tmp_path):
    def article(n):
        answers = [{"text": "Paris", "answer_start": 3}]
        qas = [{"id": f"{n}-{i}", "question": "Where?", "answers": answers} for i in range(2)]
        return {"title": f"t{n}", "paragraphs": [{"context": "In Paris.", "qas": qas}]}

    source = tmp_path / "dev-v1.1.rebuilt.json"
    source.write_text(json.dumps({"version": "1.1", "data": [article(n) for n in range(4)]}))
    transfer.split_squad(source, tmp_path / "out")
    task = job.make_task("squad1.1", str(tmp_path / "out"))
    ids = [[question.id for question in task.read(split).records] for split in ("train", "dev")]
    assert ids == [["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"], ["3-0", "3-1"]]


def test_the_table_gives_mean_and_deviation_over_the_seeds(tmp_path):
    for task, model, values in (
        ("rte", "scratch", (0.5, 0.52)),
        ("rte", "ours", (0.6, 0.64)),
        ("cola", "ours", (0.3,)),
    ):
        path = tmp_path / task / model / "runs.jsonl"
        path.parent.mkdir(parents=True)
        outcomes = [Outcome({"epochs": 4}, seed, value, {}, (), 1, 1.0) for seed, value in enumerate(values)]
        path.write_text("".join(outcome.to_json() for outcome in outcomes))
    models = ("scratch", "ours")
    found = transfer.results(tmp_path, models)
    text = transfer.table(found, models, {"rte": "accuracy"})
    assert "| RTE | accuracy | 51.0 ± 1.4 | 62.0 ± 2.8 |" in text
    assert "| CoLA |  | - | 30.0 |" in text
    assert "| mean |  | 51.0 | 62.0 |" in text  # over the tasks that all models have
    transfer.draw(tmp_path / "x.png", found, models)
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_unknown_tasks_and_missing_models_are_refused(capsys):
    for arguments, message in (
        (["--tasks=mnli", "a=b"], "mnli"),
        (["run"], "no model given"),
        (["prepare"], "--data=SOURCE"),
    ):
        with pytest.raises(SystemExit):
            transfer.main(arguments)
        assert message in capsys.readouterr().err


def test_a_file_that_prepare_lacks_is_named_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="transfer: .*CoLA/train.tsv"):
        transfer.main(["prepare", f"--data={tmp_path}", f"--out={tmp_path / 'out'}"])
    with pytest.raises(ValueError, match=r"no .*squad/dev-v1.1\*.json"):
        transfer._first(tmp_path / "squad", "dev-v1.1*.json")


def test_options_may_stand_between_the_step_and_the_models(tmp_path, capsys):
    transfer.main(["table", f"--out={tmp_path}", "ours=DIR"])
    assert "| task | score | ours |" in capsys.readouterr().out
