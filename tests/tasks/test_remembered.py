"""What a fine-tuned model says of its task in config.json, and the names of tasks."""

import types

import ml_collections
import pytest

from bertjax import interop
from bertjax.command_line import load_config
from bertjax.config import finetune_config, frozen
from bertjax.experiment import read_config
from bertjax.given import write_splits
from bertjax.tasks import job
from bertjax.tasks.make import TASKS, remembered, task_name, to_remember
from bertjax.tools import evaluate


def test_task_and_options_go_through_a_config_and_come_back(tmp_path):
    for name, options, columns in (
        ("squad2.0", {"doc_stride": 64, "files": {"dev": "d.json"}}, None),
        ("xnli", {"language": ("de", "fr")}, ("sentence1", "sentence2")),
        ("rte", {}, ("sentence1", "sentence2")),
        ("table", {"labels": ["a", "b"], "files": {}}, ("text",)),
        ("table", {"text": ("q", "a"), "labels": ["x", "y"], "files": {}}, ("q", "a")),
        ("tag", {"labels": ["NN"], "context": "sentence"}, None),
        ("swag", {}, None),
    ):
        result = {"value": 0.5, "best_step": 7, "details": {"null_threshold": -1.5}}
        task = job.make_task(name, str(tmp_path), options)
        found = remembered({"finetuned": to_remember(task, result, 64)}, "m")
        assert (found.task, found.step, found.max_length) == (name, 7, 64)
        assert found.null_threshold == (-1.5 if name == "squad2.0" else None)
        assert found.columns()[0] == columns
        again = job.make_task(found.task, str(tmp_path), found.options)
        assert vars(again).keys() == vars(task).keys() and again.name == task.name


def test_options_of_a_config_file_are_remembered_as_they_are(tmp_path):
    options = ml_collections.ConfigDict({"files": {"dev": "d.csv"}, "labels": ("a", "b")})
    task = job.make_task("table", str(tmp_path), dict(options))
    found = remembered({"finetuned": to_remember(task, {"value": 1, "best_step": 2}, 8)}, "m")
    assert found.options == {"files": {"dev": "d.csv"}, "labels": ["a", "b"]}


def test_names_with_commas_are_a_list_of_them(tmp_path):
    """As evaluate's --labels=good,bad, and not a class for each letter."""
    (tmp_path / "train.csv").write_text("t,good\nu,bad\n")
    task = job.make_task("table", str(tmp_path), {"labels": "good, bad", "headerless": "text,label"})
    assert task.labels == ("good", "bad") and [one.label for one in task.read("train").records] == ["good", "bad"]
    assert job.make_task("ner", str(tmp_path), {"labels": "O,B-X"}).labels == ("O", "B-X")
    assert job.make_task("table", str(tmp_path), {"labels": (1, 2)}).labels == ("1", "2")
    assert job.make_task("table", str(tmp_path), {"labels": "", "headerless": "text,label"}).labels == ("bad", "good")


@pytest.mark.parametrize("text", [0, (0,)])
def test_a_column_may_be_called_by_its_number(text, tmp_path):
    (tmp_path / "train.csv").write_text("0,1\nt,good\nu,bad\n")  # as of a DataFrame without names
    settings = [f"--config.task.options.text={text}", "--config.task.options.label=1"]
    task = job.make_task("table", str(tmp_path), load_config("bertjax:classify", settings).task.options)
    assert [(one.text_a, one.label) for one in task.read("train").records] == [("t", "good"), ("u", "bad")]
    pandas = pytest.importorskip("pandas")
    config = read_config("classify", "finetune", {"task.options.text": text, "task.options.label": 1})
    frame = pandas.DataFrame([("t", "good"), ("u", "bad")] * 5)
    write_splits({"train": frame, "dev": frame}, config, tmp_path)
    task = job.make_task("table", str(tmp_path), {"text": text, "label": 1, "files": {"train": "train.jsonl"}})
    assert [(one.text_a, one.label) for one in task.read("train").records][:2] == [("t", "good"), ("u", "bad")]


@pytest.mark.parametrize(
    "name, options, kind",
    [
        ("ner", {"strict": "no"}, "strict='no' must be bool"),
        ("squad2.0", {"doc_stride": True}, "doc_stride=True must be int"),
        ("squad2.0", {"doc_stride": 64.0}, "doc_stride=64.0 must be int"),
        ("squad2.0", {"null_threshold": "x"}, "null_threshold='x' must be float"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(name, options, kind, tmp_path):
    """Any text is true, and would turn strict scoring on."""
    with pytest.raises(ValueError, match=f"task '{name}': an option is of a wrong kind: {kind}"):
        job.make_task(name, str(tmp_path), {**options, **({"labels": "O,B-X"} if name == "ner" else {})})
    assert job.make_task("squad2.0", str(tmp_path), {"null_threshold": -1}).null_threshold == -1


def test_a_config_that_says_nothing_is_no_memory():
    for settings in ({}, {"finetuned": None}, {"finetuned": {"task": "xnli_de", "value": 1}}):
        assert remembered(settings, "m").task is None


@pytest.mark.parametrize(
    "given, meant",
    [
        ("table", "table"),
        ("classify", "table"),
        ("sequence-classification", "table"),
        ("text_classification", "table"),
        ("token-classification", "ner"),
        ("NER", "ner"),
        ("pos", "tag"),
        ("SST-2", "sst2"),
        ("sts-b", "stsb"),
        ("MNLI", "mnli"),
        ("CoLA", "cola"),
        ("SQuAD v2.0", "squad2.0"),
        ("squad1.1", "squad1.1"),
        ("multiple-choice", "swag"),
    ],
)
def test_a_task_is_known_by_its_usual_names(given, meant, tmp_path):
    assert task_name(given, TASKS) == meant
    options = {"labels": ["a", "b"], "files": {}} if meant in ("table", "ner", "tag") else {}
    assert job.make_task(given, str(tmp_path), options).kind == meant


def test_names_of_no_task_or_of_two_are_answered_with_the_right_ones():
    with pytest.raises(ValueError, match="'qa': squad1.1, or squad2.0 where questions may have no"):
        task_name("qa", TASKS)
    with pytest.raises(ValueError, match="unknown task 'regression'; one of cola, sst2"):
        task_name("regression", TASKS)


def test_a_task_without_its_options_says_which_file_is_missing_not_what_python_misses(tmp_path):
    with pytest.raises(ValueError, match="train.csv does not exist; its files are .* option files={'train'"):
        job.make_task("table", str(tmp_path))
    (tmp_path / "t.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match="t.csv is a file: name the directory that it is in, and"):
        job.make_task("table", str(tmp_path / "t.csv"))
    with pytest.raises(ValueError, match="text=5.5 must name one column or two"):
        job.make_task("table", str(tmp_path), {"text": 5.5, "files": {}})


def test_a_threshold_that_options_name_counts_before_the_stored_one(monkeypatch, tmp_path):
    seen = []

    def tuner(task, *_):
        seen.append(task.null_threshold)
        raise KeyboardInterrupt

    settings = {"finetuned": {"task": "squad2.0", "null_threshold": -3}}
    source = types.SimpleNamespace(settings=settings, labels=(), config=None, require_tokenizer=lambda: None)
    monkeypatch.setattr(job, "Pretrained", lambda _: types.SimpleNamespace(source=source))
    monkeypatch.setattr(job, "FineTuner", tuner)
    for options in ({}, {"null_threshold": 2.0}):
        with pytest.raises(KeyboardInterrupt):
            job.evaluate(job.make_task("squad2.0", str(tmp_path), options), "m", frozen(finetune_config()))
    assert seen == [-3.0, 2.0]


@pytest.mark.parametrize(
    "problem, head",
    [
        ("multi_label_classification", "multilabel"),
        ("single_label_classification", "classification"),
        ("regression", "regression"),
        (None, "classification"),
    ],
)
def test_a_model_of_another_program_is_scored_as_its_config_says(monkeypatch, tmp_path, problem, head):
    heads, data = [], tmp_path / "a.csv"
    data.write_text("text,label\nx,1\n")
    source = types.SimpleNamespace(settings={"problem_type": problem}, labels=("1", "2"), kind="tf1")
    monkeypatch.setattr(interop, "open_source", lambda _: source)
    monkeypatch.setattr(job, "evaluate", lambda task, *_, **__: heads.append(task.head))
    evaluate.main(["--model=m", "--task=table", f"--data={data}"])
    evaluate.main(["--model=m", "--task=table", f"--data={data}", '--options={"head": "multilabel"}'])
    assert heads == [head, "multilabel"]
