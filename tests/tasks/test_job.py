"""The fine-tuning job from files to a model directory, and the refusals before it starts."""

import contextlib
import json
import re
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from bertjax.config import finetune_config, frozen
from bertjax.interop import LoadError, open_source
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, shared_init
from bertjax.model.presets import BertConfig
from bertjax.process import hardware
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.run import summary
from bertjax.tasks import job
from bertjax.tasks.finetune import NoFiniteScore
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import evaluate, predict, sweep
from bertjax.training import sharding
from tests.fakes import SPECIALS

VOCAB = [*SPECIALS, "good", "bad", "film", "a", "the", "very"]
CONFIG = BertConfig(
    vocab_size=len(VOCAB),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
SETTINGS = frozen(finetune_config()).replace({"task.max_length": 32, "task.buckets": 1, "task.eval_batch_size": 16})


def run_of(rate, rows, epochs, seed=0):
    """The settings of one run."""
    return SETTINGS.replace({"optimizer.learning_rate": rate, "batch_size": rows, "task.epochs": epochs, "seed": seed})


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


@pytest.fixture
def start(tmp_path):
    """A model directory with an encoder and no task head."""
    params = shared_init(BertModel(CONFIG), jax.random.key(0))
    tokenizer = WordPieceTokenizer(VOCAB, do_lower_case=True)
    write_directory(tmp_path / "start", CONFIG, params, "BertModel", tokenizer)
    return tmp_path / "start"


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for name, rows in (("train.tsv", 64), ("dev.tsv", 21), ("test.tsv", 7)):
        lines = ["text" if name == "test.tsv" else "text\tlabel"]
        for _ in range(rows):
            label = str(rng.choice(["good", "bad"]))
            text = f"a {label} " + " ".join(rng.choice(["film", "the", "very"], 3))
            lines.append(text if name == "test.tsv" else f"{text}\t{label}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def table(folder, **options):
    files = {s: f"{s}.tsv" for s in ("train", "dev", "test")}
    return job.make_task("table", folder, {"files": files, **options})


def test_the_start_up_screen_says_what_will_be_learnt_from_what(start, data):
    run = run_of(1e-3, 16, 3)
    prepared = job.prepare_run(job.prepare_tuner(table(data), start, run, mesh=one_device()), data / "run")
    lines = dict(line.strip().split("  ", 1) for line in summary(prepared, 0).splitlines())
    assert lines["model"].startswith("L=1 H=16 A=2 F=32 V=11")
    assert lines["rows"] == "train 64, dev 21"
    good = sum(row.label == "good" for row in prepared.tuner.task.read("train").records)
    assert lines["labels"] == f"bad {100 - 100 * good / 64:.0f} %, good {100 * good / 64:.0f} %"
    assert lines["steps"].startswith("12: 3 epochs of 4 x 16 rows, learning rate 0.001, 1 of warm")
    assert lines["start"] == f"weights of {start}"
    prepared.resumed_from = 8
    resumed = summary(prepared, 8)
    assert "start  resumed from the checkpoint of step 8" in resumed and "are cut" not in resumed
    short = run.replace({"task.max_length": 6})
    prepared = job.prepare_run(job.prepare_tuner(table(data), start, short, mesh=one_device()), data / "short")
    assert "100% of training rows fill task.max_length=6: longer texts are cut" in summary(prepared, 0)


def test_the_shares_of_labels_of_which_rows_may_have_several_are_of_the_rows():
    task = SimpleNamespace(head="multilabel", labels=("rude", "loud"))
    rows = [{"label_set": np.float32(row)} for row in ((1, 1), (1, 0), (1, 0), (0, 0))]
    assert job.label_shares(task, rows) == "rude 75 %, loud 25 % (rows may have several)"
    assert job.label_shares(task, rows[3:]) == "rude 0 %, loud 0 % (rows may have several)"


def test_early_stopping_that_cannot_come_before_the_end_is_told_at_the_start(start, data):
    """The first evaluation is the best so far, and after the last nothing is left to save."""

    def screen(patience, epochs, **more):
        changes = {"task.early_stopping": patience, **{f"task.{name}": value for name, value in more.items()}}
        run = run_of(1e-3, 16, epochs).replace(changes)
        return summary(job.prepare_run(job.prepare_tuner(table(data), start, run, mesh=one_device()), data / "run"), 0)

    note = "task.early_stopping=2 can only shorten a run of 4 evaluations or more, and this one has 3: "
    assert note in screen(2, 3)
    for patience, epochs in ((2, 4), (1, 3), (0, 1)):
        assert "task.early_stopping" not in screen(patience, epochs)
    assert "task.early_stopping" not in screen(2, 3, evaluations_per_epoch=2)


@pytest.mark.parametrize("free, there, refused", [(1e9, 1e9, False), (1e4, 1e9, False), (1e4, 1e4, True)])
def test_a_fine_tuning_step_that_does_not_fit_the_memory_is_told_before_it_is_compiled(
    start, data, monkeypatch, free, there, refused
):
    monkeypatch.setattr(hardware, "host_bytes", lambda: (free, there))
    tuner = job.prepare_tuner(table(data), start, run_of(1e-3, 16, 3), mesh=one_device())
    told = "a step of 16 x 16 tokens takes .* GiB or more, .*: take fewer rows at once, by --config.accumulation=N"
    with pytest.raises(ValueError, match=told) if refused else contextlib.nullcontext():
        notes = [text for name, text in job.prepare_run(tuner, data / "run").facts() if name == "note"]
        assert [bool(re.match(told, text)) for text in notes] == [True] * (free < there)


def test_what_is_frozen_needs_no_memory_for_a_backward_pass(start, data, monkeypatch):
    monkeypatch.setattr(hardware, "host_bytes", lambda: (1e4, 1e4))
    frozen = run_of(1e-3, 16, 3).replace({"task.freeze": ("^encoder/",)})
    job.prepare_run(job.prepare_tuner(table(data), start, frozen, mesh=one_device()), data / "run")


@pytest.mark.slow
def test_a_job_writes_result_predictions_and_a_model_that_scores_the_same(start, data, tmp_path, capsys, caplog):
    task, workdir = table(data), tmp_path / "run"
    run = run_of(5e-3, 16, 3, seed=1).replace(
        {"task.predict": ("dev", "test"), "log.csv": True, "log.tensorboard": False}
    )
    prepared = job.prepare_run(job.prepare_tuner(task, start, run, mesh=one_device()), workdir)
    result = job.run(prepared)
    stored = json.loads((workdir / "result.json").read_text())
    assert stored["value"] == result["value"] and stored["run"]["seed"] == 1
    assert len((workdir / "predictions_test.jsonl").read_text().splitlines()) == 7
    assert stored["data"]["dev"] == task.read("dev").fingerprint
    card = (workdir / "model" / "README.md").read_text()
    for said in (
        f"fine-tuned from the weights of `{start.name}`",
        "Its labels are `bad`, `good`",
        "* train: 64 rows",
        f"Written by bertjax {stored['bertjax']}",
        f"* accuracy {stored['scores']['accuracy']:.4f}",
    ):
        assert said in card
    assert str(tmp_path) not in card
    config = json.loads((workdir / "model" / "config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1}
    assert config["architectures"] == ["BertForSequenceClassification"]
    report = (workdir / "report.html").read_text()
    assert "Accuracy" in report and "predicted <b>" in report
    found = stored["details"]["calibration"]
    assert sum(rows for rows, _, _ in found["bins"]) == stored["rows"]["dev"]
    assert f"expected calibration error {100 * found['ece']:.1f} %" in report
    examples = json.loads((workdir / "examples.json").read_text())
    assert {example["gold"] for example in examples} == {"good", "bad"}
    assert "eval/accuracy" in (workdir / "metrics.csv").read_text()
    assert not (workdir / "tensorboard").exists()

    # Names decide: a task that lists its labels the other way round scores the same.
    again = table(data, labels=("good", "bad"))
    scores = job.evaluate(again, workdir / "model", settings=SETTINGS, mesh=one_device())
    assert again.labels == ("bad", "good")
    assert scores["accuracy"] == pytest.approx(result["scores"]["accuracy"])
    (data / "none.tsv").write_text("text\tlabel\n")
    nothing = job.make_task("table", data, {"files": {"dev": "none.tsv"}, "labels": ("bad", "good")})
    with pytest.raises(ValueError, match="none.tsv has no rows, and it is the 'dev' split"):
        job.evaluate(nothing, workdir / "model", settings=SETTINGS, mesh=one_device())
    files = json.dumps({"files": {"dev": "dev.tsv", "test": "test.tsv"}})  # labels: the model's
    caplog.clear()
    for split, gold in (("dev", True), ("test", False)):
        capsys.readouterr()
        evaluate.main(
            [
                f"--model={workdir / 'model'}",
                "--task=table",
                f"--data={data}",
                f"--options={files}",
                f"--split={split}",
                f"--out={tmp_path / 'out'}",
            ]
        )
        said = json.loads(capsys.readouterr().out)
        assert said["out"] == str(tmp_path / "out")
        told = f"test.tsv: no labels, and so no scores; {data}/test.tsv has no column 'label'; found text"
        assert caplog.messages[-1:] == ([] if gold else [told])
        said = said["scores"]
        assert said == pytest.approx(result["scores"]) if gold else said is None
        name = f"predictions_{split}.jsonl"
        found, written = (
            [json.loads(line) for line in (directory / name).read_text().splitlines()]
            for directory in (tmp_path / "out", workdir)
        )
        assert [row["prediction"] for row in found] == [row["prediction"] for row in written]
    with pytest.raises(SystemExit, match="split 'test' has no labels .*used for scoring; predictions can be written"):
        evaluate.main(
            [f"--model={workdir / 'model'}", "--task=table", f"--data={data}", f"--options={files}", "--split=test"]
        )
    # The model remembers its task, the columns and more; a file may stand for the directory.
    stored = config["finetuned"]
    assert (stored["task"], stored["step"]) == ("table", result["best_step"])
    assert stored["options"]["files"]["dev"] == "dev.tsv" and stored["max_length"] == 32
    for place in (data, data / "dev.tsv"):
        evaluate.main([f"--model={workdir / 'model'}", f"--data={place}"])
        said = json.loads(capsys.readouterr().out)
        assert said["scores"] == pytest.approx(result["scores"])
        assert (said["model"], said["step"], said["task"], said["split"]) == (
            str(workdir / "model"),
            result["best_step"],
            "table",
            "dev",
        )
    predict.main([f"--model={workdir / 'model'}", f"--file={data / 'dev.tsv'}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t")[:3] == ["text", "label", "prediction"] and len(lines) == 22
    right = [line.split("\t")[1] == line.split("\t")[2] for line in lines[1:]]
    assert np.mean(right) == pytest.approx(result["scores"]["accuracy"])
    assert open_source(workdir).directory == workdir / "model"
    # A finished run is not trained again, and another one is not mixed with it.
    repeated = job.run(prepared)
    assert repeated["value"] == result["value"] and repeated["best_step"] == result["best_step"]
    with pytest.raises(ValueError, match="(?s)optimizer.learning_rate: 0.005 -> 0.001.*another --workdir"):
        other = run_of(1e-3, 16, 3, seed=1)
        job.run(job.prepare_run(job.prepare_tuner(task, start, other, mesh=one_device()), workdir))


def test_a_workdir_is_known_by_what_its_files_hold(start, data, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()

    def prepare(options=None, **more):
        settings = SETTINGS.replace({"task.options": options or {}})
        return job.prepare_run(job.prepare_tuner(table(data, **more), start, settings, mesh=one_device()), workdir)

    prepared = prepare({"separator": "|"})
    prepared.record(workdir)
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        checkpoints.save(1, {"x": np.ones(3)})
    prepare({"separator": "|"})
    with pytest.raises(ValueError, match=r"(?s)other settings or data.*options.separator: '\|' -> ','"):
        prepare({"separator": ","})
    with pytest.raises(ValueError, match="metric: 'accuracy' -> 'macro_f1'"):
        prepare({"separator": "|"}, metric="macro_f1")
    for name, field in (("train.tsv", "data.train"), ("dev.tsv", "data.dev")):
        before = (data / name).read_text()
        (data / name).write_text(before.replace("good", "bad", 2).replace("bad", "good", 2) + "\n")
        with pytest.raises(ValueError, match=rf"{field}: other content \([0-9a-f]{{8}} -> [0-9a-f]{{8}}\)"):
            prepare({"separator": "|"})
        (data / name).write_text(before)
    params = shared_init(BertModel(CONFIG), jax.random.key(1))
    tokenizer = WordPieceTokenizer(VOCAB, do_lower_case=True)
    write_directory(start, CONFIG, params, "BertModel", tokenizer, overwrite=True)
    with pytest.raises(ValueError, match="weights: other content "):
        prepare({"separator": "|"})


def test_what_follows_where_the_workdir_holds_a_run_already(start, data, tmp_path):
    def prepare(resume, rate=1e-3):
        settings = run_of(rate, 16, 3).replace({"resume": resume})
        return job.prepare_run(job.prepare_tuner(table(data), start, settings, mesh=one_device()), tmp_path / "run")

    assert prepare("never").resumed_from is None
    with contextlib.closing(Checkpoints(tmp_path / "run" / "checkpoints")) as checkpoints:
        checkpoints.save(4, {"x": np.ones(3)})
    with pytest.raises(ValueError, match="no config.json that says of which run"):
        prepare("auto")
    prepare("overwrite").record(tmp_path / "run")
    assert prepare("auto").resumed_from == 4
    with pytest.raises(LoadError, match="run@4: the model of a fine-tuning run is its best one"):
        open_source(tmp_path / "run@4")
    with pytest.raises(ValueError, match="holds a run at step 4, config.resume='never'"):
        prepare("never")
    with pytest.raises(ValueError, match="(?s)learning_rate: 0.001 -> 0.002.*resume=changed.*resume=overwrite"):
        prepare("auto", 2e-3)
    assert prepare("changed", 2e-3).resumed_from == 4
    assert prepare("overwrite", 2e-3).resumed_from is None
    assert prepare("overwrite").resumed_from == 4  # which this command has begun
    (tmp_path / "run" / "model").mkdir()
    assert prepare("overwrite").resumed_from is None


def test_evaluating_a_checkpoint_without_the_head_is_refused(start, data):
    with pytest.raises(LoadError, match="classifier"):
        job.evaluate(table(data), start, settings=SETTINGS, mesh=one_device())
    files = json.dumps({"files": {"train": "train.tsv", "dev": "dev.tsv"}})
    with pytest.raises(SystemExit, match="(?s)evaluate: .*classifier"):
        evaluate.main([f"--model={start}", "--task=table", f"--data={data}", "--max_length=32", f"--options={files}"])


def test_what_cannot_work_is_refused_before_anything_compiles(start, data, tmp_path):
    def prepare(task, **changes):
        settings = SETTINGS.replace({f"task.{name}": value for name, value in changes.items()})
        return job.prepare_run(job.prepare_tuner(task, start, settings, mesh=one_device()), tmp_path)

    absent = {"files": {"train": "train.tsv", "dev": "dev.tsv", "test": "absent.tsv"}}
    with pytest.raises(ValueError, match=r"absent.tsv does not exist: the 'test' split.*config.task.options.files="):
        prepare(table(data, **absent), predict=("dev", "test"))
    prepare(table(data, **absent))  # a split that nobody asked for may be missing
    (data / "absent.tsv").write_text("text\tlabel\na film\tbroken\n")
    with pytest.raises(ValueError, match="absent.tsv:2: label 'broken' is unknown"):
        prepare(table(data, **absent), predict=("test",))
    (data / "train.conll").write_text("\u200e\tB-X\n\u200f\tO\n", encoding="utf-8")  # marks that have no token
    with pytest.raises(ValueError, match="ner train: no row is left: the tokenizer drops every word of it"):
        prepare(job.make_task("ner", data, {"files": {"train": "train.conll", "dev": "train.conll"}}))
    (data / "absent.tsv").write_text("text\tlabel\n")
    with pytest.raises(ValueError, match="absent.tsv has no rows, and it is the 'test' split"):
        prepare(table(data, **absent), predict=("test",))
    with pytest.raises(ValueError, match="cannot predict split 'valid'; one of train, dev, test"):
        prepare(table(data), predict=("valid",))
    with pytest.raises(ValueError, match="max_length=65 exceeds the 64 positions"):
        prepare(table(data), max_length=65)
    with pytest.raises(ValueError, match="'rouge' cannot say which.*one of accuracy, matthews"):
        prepare(table(data, metric="rouge"))
    with pytest.raises(ValueError, match="no training split"):
        prepare(job.make_task("ax", data))
    unlabelled = job.make_task("table", data, {"files": {"train": "train.tsv", "dev": "test.tsv"}})
    with pytest.raises(ValueError, match="'dev' has no labels.*choosing the best"):
        prepare(unlabelled, predict=())
    (data / "absent.tsv").write_text("text\tlabel\na film\t\n")
    files = {"train": "absent.tsv", "dev": "dev.tsv"}
    with pytest.raises(ValueError, match="'train' has no labels.*training"):
        prepare(job.make_task("table", data, {"files": files, "labels": ["bad", "good"]}), predict=())
    (tmp_path / "pretraining" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "pretraining" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="pretraining holds a pre-training run; choose another"):
        job.prepare_run(job.prepare_tuner(table(data), start, SETTINGS, mesh=one_device()), tmp_path / "pretraining")
    for settings, words in (
        ({"freeze": ("encoder/layer_9",)}, "layer_9"),
        ({"freeze": ("embeddings/,layer_0/",)}, r"several patterns are a list, \"\('embeddings/', 'layer_0/'\)\""),
        ({"freeze": ("^enc", "head|pool|class")}, "leaves no parameter to train"),
        ({"class_weights": (("bda", 2.0),)}, r"class_weights: \['bda'\] are not among the labels \['bad', 'good'\]"),
        ({"class_weights": (("good", 0), ("bad", 0))}, "class_weights are 0 for every label"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(table(data), **settings)
    late = SETTINGS.replace({"profile_steps": (900, 901)})
    with pytest.raises(ValueError, match=r"config.profile_steps=\(900, 901\): the run has \d+ steps"):
        job.prepare_run(job.prepare_tuner(table(data), start, late, mesh=one_device()), tmp_path / "new")
    with pytest.raises(ValueError, match="files='train.tsv' does not say which"):
        job.make_task("table", data, {"files": "train.tsv"})
    with pytest.raises(ValueError, match="unknown task 'boolq'; one of cola"):
        job.make_task("boolq", data)
    with pytest.raises(ValueError, match="'squad1.1' has no option 'colour'. Valid: files, doc"):
        job.make_task("squad1.1", data, {"colour": 1})
    with pytest.raises(ValueError, match="'table' has no option 'lable'. Did you mean 'label'"):
        job.make_task("table", data, {"lable": "y"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.parquet").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"'table': .*train.csv does not exist; .* holds train.parquet; .* files=\{'tra"
    ):
        job.make_task("table", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="the folder .*/nowhere does not exist; name that of the task's files, or"):
        job.make_task("table", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the folder .*/nowhere does not exist; --config.task.data=hf:nyu-mll/glue"):
        job.make_task("mrpc", str(tmp_path / "nowhere")).read("train")


def test_a_head_goes_on_for_the_same_names_and_is_drawn_anew_for_others(data, tmp_path, caplog):
    from bertjax.model.heads import BertForSequenceClassification

    model = BertForSequenceClassification(CONFIG)
    params = shared_init(model, jax.random.key(9))
    tokenizer = WordPieceTokenizer(VOCAB, do_lower_case=True)
    for name, labels in (("same", {0: "good", 1: "bad"}), ("other", {0: "x", 1: "y"})):
        write_directory(tmp_path / name, CONFIG, params, "BertForSequenceClassification", tokenizer, labels)
        task = table(data)
        prepared = job.prepare_run(job.prepare_tuner(task, tmp_path / name, SETTINGS, mesh=one_device()), tmp_path)
        loaded = prepared.tuner.load_params(prepared.tuner.model, jax.random.key(0))
        kept = np.array_equal(loaded["classifier"]["kernel"], params["classifier"]["kernel"])
        assert kept == (name == "same")
        assert ("its head of 2 outputs is for other classes and is left out; one of 2" in caplog.text) == (not kept)
        assert task.labels == (("good", "bad") if kept else ("bad", "good"))


def test_a_config_gives_the_job_it_describes(start, data, tmp_path):
    config = finetune_config()
    config.init_from, config.batch_size, config.seed = str(start), 16, 4
    config.optimizer.learning_rate = 3e-5
    files = {s: f"{s}.tsv" for s in ("train", "dev", "test")}
    config.task.update(
        name="table",
        data=str(data),
        options={"files": files},
        metric="matthews",
        max_length=32,
        epochs=2,
        buckets=1,
        eval_batch_size=16,
        group_by_length=True,
        layer_decay=0.9,
        class_weights=("balanced",),
        head_init="normal",
        predict=("dev,test",),
    )
    prepared = job.prepare(frozen(config), str(tmp_path / "run"), mesh=one_device())
    settings = prepared.tuner.settings
    assert settings == frozen(config) and settings.optimizer.learning_rate == 3e-5
    assert prepared.predict == ("dev", "test") and prepared.tuner.task.metric == "matthews"
    assert prepared.tuner.model.head_init == "normal"
    config.execution.kernels, config.task.data = "triton", "absent"
    with pytest.raises(ValueError, match="kernels=triton needs heads of a power of two"):
        job.prepare(frozen(config), str(tmp_path / "run"))
    config.init_from = ""
    with pytest.raises(ValueError, match="config.init_from is empty"):
        job.prepare(frozen(config), str(tmp_path / "run"))


def test_the_head_is_drawn_from_the_seed_and_the_encoder_from_the_file(start):
    from bertjax.model.heads import BertForSequenceClassification

    pretrained = job.Pretrained(start)
    model = BertForSequenceClassification(CONFIG, num_labels=3)
    first, same, other = (pretrained(model, jax.random.key(seed)) for seed in (0, 0, 1))
    kernel = [np.asarray(p["classifier"]["kernel"]) for p in (first, same, other)]
    np.testing.assert_array_equal(kernel[0], kernel[1])
    assert np.abs(kernel[0] - kernel[2]).max() > 1e-3
    for one, two in zip(jax.tree.leaves(first["encoder"]), jax.tree.leaves(other["encoder"]), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_a_search_over_any_settings_goes_on_and_leaves_the_best_model(start, data, capsys):
    (data / "experiment.py").write_text(
        "from bertjax.config import finetune_config\n"
        "def get_config():\n"
        "    config = finetune_config()\n"
        "    config.task.name, config.task.max_length, config.task.buckets = 'table', 32, 1\n"
        "    config.task.options = {'files': {'train': 'train.tsv', 'dev': 'dev.tsv'}}\n"
        "    config.task.epochs, config.batch_size, config.mesh.data = 1, 16, 8\n"
        "    return config\n"
    )
    command = [
        f"--config={data / 'experiment.py'}",
        f"--config.task.data={data}",
        f"--init_from={start}",
        f"--workdir={data / 'search'}",
        "--compilation_cache=",
        "--search=optimizer.name=adamw,optax.lion",
    ]
    sweep.main([*command, "--search=optimizer.learning_rate=1e-3"])
    said = capsys.readouterr()
    assert said.err.count("run ") == 2 and "run 2/2: optimizer.name optax.lion, learning rate 0.001, seed 0" in said.err
    assert "| optimizer.name | learning rate | runs |" in said.out
    sweep.main([*command, "--search=optimizer.learning_rate=1e-3,2e-3"])
    assert capsys.readouterr().err.count("run ") == 2  # the other two are there
    evaluate.main([f"--model={data / 'search' / 'best'}", f"--data={data}", "--config.task.eval_batch_size=8"])
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == json.loads((data / "search" / "result.json").read_text())["scores"]
    with pytest.raises(SystemExit, match="sweep: .* holds another search .settings.layer_decay: 1.0 -> 0.9"):
        sweep.main([*command, "--config.task.layer_decay=0.9"])
    with pytest.raises(SystemExit) as refused:
        predict.main([f"--model={data / 'search' / 'best'}", "--text=a", "--config.task.evl_batch_size=8"])
    assert "Did you mean --config.task.eval_batch_size" in str(refused.value)


def test_a_search_in_which_every_run_diverges_names_no_best_model(start, data, capsys, monkeypatch):
    monkeypatch.setattr(job.FineTuner, "run", mock.Mock(side_effect=NoFiniteScore))
    sweep.main(
        [
            f"--workdir={data / 'search'}",
            *("--task=table", f"--data={data}", f"--init_from={start}", "--max_length=32"),
            "--options=" + json.dumps({"files": {"train": "train.tsv", "dev": "dev.tsv"}}),
            *("--compilation_cache=", "--epochs=1", "--learning_rate=1e-3", "--batch_size=16"),
        ]
    )
    assert "best model" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "searched, words",
    [
        ("task.metric=accuracy,accurcy", "the run with task.metric accurcy, .*metric 'accurcy' cannot say which"),
        ("task.metric=accuracy,matthews", "--search=task.metric: runs of other scores have no best one"),
        ("init_from={start},nowhere", "the run with init_from nowhere, .*nowhere does not exist"),
        ("task.freeze=(),('nothing',)", "the run with .*'nothing' matches no parameter path"),
        ("task.max_length=32,65", "the run with task.max_length 65, .*exceeds the 64 positions"),
        ("batch_size=8,9", "the run with batch 9, .*multiple of 8"),
    ],
)
def test_a_search_is_refused_before_its_first_run_where_a_later_one_cannot_start(
    start, data, monkeypatch, searched, words
):
    monkeypatch.setattr(job.FineTuner, "data", lambda *_: pytest.fail("data are read first"))
    with pytest.raises(SystemExit, match=f"sweep: {words}"):
        sweep.main(
            [
                f"--workdir={data / 'search'}",
                *("--task=table", f"--data={data}", f"--init_from={start}", "--max_length=32"),
                "--options=" + json.dumps({"files": {"train": "train.tsv", "dev": "dev.tsv"}}),
                *("--compilation_cache=", "--config.mesh.data=8", "--epochs=1", "--learning_rate=1e-3"),
                f"--search={searched.format(start=start)}",
            ]
        )
    assert not (data / "search").exists()
