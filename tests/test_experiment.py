"""Training from Python: what the functions take, what they give, and how a notebook goes on after them."""

import ast
import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import ml_collections
import numpy as np
import pytest

import bertjax
from bertjax import experiment, given
from bertjax.config import default_config, frozen
from bertjax.interop.huggingface import write_directory
from bertjax.log.logbook import Logbook
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.tasks import job
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import convert, evaluate, predict
from tests.fakes import SPECIALS

ROOT = pathlib.Path(__file__).parents[1]
TINY = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 32,
    "model.max_position_embeddings": 64,
    "phases": ((4, 32),),
    "batch_size": 16,
    "optimizer.warmup_steps": 2,
    "eval.rows": 32,
    "log.tensorboard": False,
    "execution.compilation_cache": "",
}


@pytest.fixture
def settings(random_store):
    return {**TINY, "data.corpus": str(random_store)}


def test_a_run_gives_its_numbers_and_its_model_and_a_second_call_goes_on(settings, tmp_path, capsys):
    before = dict(jax.config.values)
    workdir = tmp_path / "run"
    result = bertjax.train(default_config(), workdir, settings)
    assert (result.workdir, result.step) == (str(workdir), 4)
    assert {"mlm_loss", "mlm_accuracy", "nsp_accuracy"} <= result.metrics.keys()
    assert type(result.model.model).__name__ == "BertForPreTraining" and result.model.config.hidden_size == 16
    assert pathlib.Path(result.report).exists() and "loss of masked words" in result._repr_html_()
    assert "random weights" in capsys.readouterr().out
    text = "w1 [MASK] w2"  # a result stands for its model where a path does
    assert bertjax.fill_mask(result, text) == bertjax.fill_mask(result.model_path, text)
    assert bertjax.predict(result, text, "fill-mask").answers == bertjax.predict(result.model, text).answers
    # The directory is free for other processes, though this one goes on.
    program = "import sys; from bertjax.run.claim import claim; from etils import epath; claim(epath.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(workdir / "checkpoints")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    again = bertjax.train(frozen(default_config()), workdir, settings | {"execution.dtype": "float32"})
    assert "already finished at step 4" in capsys.readouterr().out
    assert again.step == 4 and again == bertjax.Result.of(workdir)
    with pytest.raises(ValueError, match="other settings or data:\n  phases: "):
        bertjax.train(default_config(), workdir, settings | {"phases": ((5, 32),)})
    assert dict(jax.config.values) == before


def test_two_threads_do_not_train_in_one_directory(settings, tmp_path, monkeypatch):
    def prepare(config, workdir):
        with pytest.raises(ValueError, match=f"another thread is training in {tmp_path}; wait for it"):
            bertjax.train(default_config(), tmp_path, settings)
        raise OSError("enough")

    monkeypatch.setattr(experiment, "prepare", prepare)
    for _ in range(2):  # the second time the directory is free again
        with pytest.raises(OSError, match="enough"):
            bertjax.train(default_config(), tmp_path, settings)


def test_it_trains_inside_a_running_event_loop_and_in_a_thread(settings, tmp_path):
    async def cell():
        return bertjax.train(default_config(), tmp_path / "loop", settings)

    results = [asyncio.run(cell())]
    thread = threading.Thread(
        target=lambda: results.append(bertjax.train(default_config(), tmp_path / "thread", settings))
    )
    thread.start()
    thread.join()
    assert [result.step for result in results] == [4, 4]
    assert results[0].metrics == results[1].metrics


@pytest.mark.parametrize("name, raised", [("SIGINT", KeyboardInterrupt), ("SIGTERM", SystemExit)])
def test_a_signal_saves_ends_a_loop_over_runs_and_the_same_call_goes_on(settings, tmp_path, monkeypatch, name, raised):
    record, number = Logbook.train, signal.Signals[name]
    before = signal.getsignal(number)

    def interrupted(self, step, *rest):
        record(self, step, *rest)
        if step == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(Logbook, "train", interrupted)
    with pytest.raises(raised, match=f"stopped by {name}, saved at step 2; start again to go on") as stopped:
        for _ in range(2):
            with contextlib.suppress(Exception):  # as a script that goes on after a run that fails
                bertjax.train(default_config(), tmp_path, settings)
    assert getattr(stopped.value, "code", 75) == 75
    assert signal.getsignal(number) is before
    assert (tmp_path / "checkpoints" / "2").exists()
    assert bertjax.train(default_config(), tmp_path, settings).step == 4


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (
            "demo",
            {"lerning_rate": 1},
            "unknown setting --config.lerning_rate. Did you mean --config.optimizer.learning",
        ),
        ("demo", {"batch_size": "many"}, "batch_size='many' must be int, not str"),
        ("demo", {"batch_size": 0}, "config.batch_size=0 must be at least 1"),
        ("classify", {}, "config.job='finetune': this experiment is one for bertjax.finetune"),
        ("dmeo", {}, "no experiment is called bertjax:dmeo. Did you mean 'demo'?"),
        (5, {}, "config=5 is not an experiment's name, a config file, a ConfigDict or a Config"),
        (ml_collections.ConfigDict({"job": "pretrain", "layers": 2}), {}, "unknown setting --config.layers"),
        (default_config(), {}, "workdir is missing"),
    ],
)
def test_what_cannot_work_is_an_error_of_one_line(config, changes, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        bertjax.train(config, settings=changes)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="^init_from=5 is neither the path or name of a model nor the Result"):
        bertjax.finetune("classify", init_from=5)


def write_run(directory, scores):
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n{"step": 7, "loss": 0.5, "eval/f1": 0.1}\n')
    (directory / "result.json").write_text(json.dumps({"scores": scores}))


def test_the_result_of_a_suite_has_the_scores_of_its_tasks(tmp_path):
    write_run(tmp_path / "<b>" / "mrpc", {"f1": 0.9})
    write_run(tmp_path / "<b>" / "cola", {"matthews": 0.5})
    (tmp_path / "<b>" / "glue.md").write_text("")
    result = bertjax.Result.of(tmp_path / "<b>")
    assert (result.step, result.metrics) == (14, {"cola/matthews": 0.5, "mrpc/f1": 0.9})
    assert "<b>" not in result._repr_html_() and "href" not in result._repr_html_()


def test_the_result_of_a_run_in_a_bucket_is_read_there(bucket):
    write_run(bucket / "run", {})
    result = bertjax.Result.of("gs://bucket/run")
    assert (result.step, result.metrics, result.report) == (7, {"f1": 0.1}, "gs://bucket/run/report.html")
    with pytest.raises(ValueError, match="gs://bucket/other holds no finished run"):
        bertjax.Result.of("gs://bucket/other")


def test_settings_may_be_lists_paths_and_numbers_of_numpy():
    changes = {
        "phases": [[np.int64(8), 64]],
        "init_from": pathlib.Path("m"),
        "optimizer.learning_rate": np.float32(0.5),
    }
    config = experiment.read_config("demo", "pretrain", changes | {"optimizer.warmup_steps": 1})
    assert (config.phases, config.init_from, config.optimizer.learning_rate) == (((8, 64),), "m", 0.5)
    assert type(config.phases[0][0]) is int and config.watchdog_seconds == 0
    assert experiment.read_config(config, "pretrain", {"watchdog_seconds": 60}).watchdog_seconds == 60
    options = {"task.options.text": np.array(["a"]), "task.options.files": {"dev": pathlib.Path("d.csv")}}
    found = experiment.read_config("classify", "finetune", options).task.options
    assert (found["text"], found["files"]["dev"]) == (("a",), "d.csv")
    for value, expected in (({"spam": 3, 0: 1.5}, (("spam", 3), (0, 1.5))), ("balanced", ("balanced",))):
        task = experiment.read_config("classify", "finetune", {"task.class_weights": value}).task
        assert task.class_weights == expected


def test_a_part_of_an_option_that_is_not_there_is_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match="no 'files' to set a part of; give all of it, as --config.task.options.files="
    ):
        experiment.read_config("classify", "finetune", {"task.options.files.dev": "d.csv"})


@pytest.mark.parametrize(
    "config, workdir",
    [
        ("demo", "runs/demo"),
        ("bertjax:large:two_phase", "runs/large-two_phase"),
        (ROOT / "configs" / "demo.py", "runs/demo"),
    ],
)
def test_an_experiment_has_its_own_directory(config, workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a directory "bertjax" in the working directory must not be needed
    monkeypatch.setattr(experiment, "_run", lambda config, workdir: workdir)
    assert bertjax.train(config) == workdir


def test_an_error_brings_the_remedy_of_the_command_line(settings, tmp_path, monkeypatch):
    def full(config, workdir):
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr(experiment, "prepare", full)
    with pytest.raises(OSError, match="No space left") as error:
        bertjax.train(default_config(), tmp_path, settings)
    assert error.value.__notes__ == ["/disk/file: No space left on device; make room, then repeat the command"]

    def refused(config, workdir):
        raise ValueError("phases differ:\n  a   b\nChoose another")

    monkeypatch.setattr(experiment, "prepare", refused)
    with pytest.raises(ValueError, match="phases differ") as error:
        bertjax.train(default_config(), tmp_path, settings)
    assert not hasattr(error.value, "__notes__")  # it says all itself


# ------------------------------------------------------------------------ data as Python objects


def documents(count=40):
    random = np.random.default_rng(0)
    words = [f"word{i}" for i in range(60)]
    return [
        " ".join(f"{' '.join(random.choice(words, 8))}." for _ in range(random.integers(4, 12))).title()
        for _ in range(count)
    ]


def test_texts_become_a_store_in_the_directory_of_the_run(tmp_path, capsys):
    texts = documents()
    changes = TINY | {"phases": ((1, 32),), "optimizer.warmup_steps": 1}
    result = bertjax.train("demo", tmp_path, changes, texts=iter(texts), vocab_size=200)
    assert result.step == 1 and result.model.tokenizer.vocab_size <= 200
    [store] = tmp_path.glob("corpus-*")
    manifest = json.loads((store / "manifest.json").read_text())
    counts = {split: found["documents"] for split, found in manifest["splits"].items()}
    assert sum(counts.values()) == 40 and counts["heldout"] > 0
    assert manifest["splits"]["train"]["sentences"] > 4 * counts["train"]
    # The weights are made while XLA compiles: no number is theirs alone.
    assert re.search(r"tracing [\d.]+, parameters and compiling [\d.]+, first step", capsys.readouterr().out)
    bertjax.train("demo", tmp_path, changes, texts=tuple(texts), vocab_size=200)  # the same corpus
    assert "already finished at step 1" in (told := capsys.readouterr().out) and "Making" not in told
    with pytest.raises(ValueError, match="other settings or data:\n  data.corpus: "):
        bertjax.train("demo", tmp_path, changes, texts=texts[1:], tokenizer=result.model_path)
    assert [*tmp_path.glob("*corpus-*")] == [store]  # of what was refused nothing is left
    with pytest.raises(ValueError, match="^texts: row 0 has no 'text'"):
        bertjax.train("demo", tmp_path / "new", TINY, texts=[5])
    with pytest.raises(ValueError, match="^texts: row 1: '.ud800' without its other half"):
        bertjax.train("demo", tmp_path / "new", TINY, texts=["a b.", "c \ud800."])
    with pytest.raises(ValueError, match="^texts: there is no word in them"):
        bertjax.train("demo", tmp_path / "new", TINY, texts=["", " "])
    with pytest.raises(ValueError, match="^texts: too little to hold some out"):
        bertjax.train("demo", tmp_path / "new", TINY, texts=["One text. Two sentences."])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("sentences", [(), ("Word1 [MASK] word2.",)])
def test_texts_are_not_judged_by_sentences_about_the_corpus_of_the_demo(tmp_path, capsys, sentences):
    changes = (
        TINY | {"phases": ((1, 32),), "optimizer.warmup_steps": 1} | ({"log.fill_mask": sentences} if sentences else {})
    )
    bertjax.train("demo", tmp_path, changes, texts=documents(), vocab_size=200)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "array elements" not in capsys.readouterr().out + card
    assert all(sentence in card for sentence in sentences)


@pytest.mark.parametrize(
    "texts, refusal",
    [
        ([" ".join(["Word " * 75 + "."] * 8) for _ in range(40)], "in no pair of 64 tokens.*a line break ends one"),
        ([f"Word {i}." for i in range(40)], "Give the sentences of a document together"),
        (documents() * 200, "Give each text once"),
    ],
)
def test_a_refusal_of_texts_names_what_the_caller_of_python_has(tmp_path, texts, refusal):
    settings = TINY | {"phases": ((2, 64),), "optimizer.warmup_steps": 1}
    with pytest.raises(ValueError, match=refusal) as error:
        bertjax.train("demo", tmp_path, settings, texts=texts, vocab_size=200)
    assert str(error.value).endswith(". --config.data.corpus_limits=warn trains on it as it is")
    assert not re.search(r"build_corpus|--(?!config)|format=|max_|\.jsonl|memory", str(error.value))
    assert not [*tmp_path.iterdir()]
    bertjax.train("demo", tmp_path, settings | {"data.corpus_limits": "warn"}, texts=texts, vocab_size=200)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("train", {"texts": ["a"], "settings": {"data.corpus": "store"}}, "texts is given, and so is 'data.corpus'"),
        ("train", {"texts": ["a"], "tokenizer": "vocab", "vocab_size": 9}, "vocab_size=9 has no effect: the tokenizer"),
        ("finetune", {"train": [("a", "b")], "settings": {"task.data": "d"}}, "train is given, and so is 'task.data'"),
        ("finetune", {"init_from": "m", "settings": {"init_from": "n"}}, "init_from is given, and so is 'init_from'"),
        ("train", {"texts": [__file__]}, "test_experiment.py' is a file: give what is in it"),
    ],
)
def test_what_would_have_no_effect_beside_an_argument_is_refused(function, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        getattr(bertjax, function)(workdir=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_texts_of_one_sentence_train_masked_words_and_no_next_sentences(tmp_path):
    settings = TINY | {"phases": ((2, 32),), "optimizer.warmup_steps": 1, "data.nsp": False}
    texts = [f"Word {i % 9} is {i}." for i in range(40)]
    result = bertjax.train("demo", tmp_path / "run", settings, texts=texts, vocab_size=200)
    convert.main([f"--from={tmp_path / 'run'}", f"--out={tmp_path / 'converted'}"])
    for model in (result, tmp_path / "run", tmp_path / "converted", bertjax.load_model(tmp_path / "run")):
        with pytest.raises(ValueError, match="^the model was pre-trained without next sentences.*data.nsp=True$"):
            bertjax.predict(model, [("Word 1.", "Word 2.")], "next-sentence")
    (tmp_path / "pairs.txt").write_text("Word 1.\tWord 2.\n")
    with pytest.raises(SystemExit, match="^predict: the model was pre-trained without"):  # no line is to blame
        predict.main([f"--model={tmp_path / 'run'}", "--task=next-sentence", f"--file={tmp_path / 'pairs.txt'}"])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model directory with an encoder and no task head."""
    config = BertConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    params = jax.jit(lambda key: init_params(BertModel(config), key))(jax.random.key(0))
    words = [*SPECIALS, "good", "bad", "film", "a", "the", "very"]
    directory = tmp_path_factory.mktemp("start") / "model"
    write_directory(directory, config, params, "BertModel", WordPieceTokenizer(words, do_lower_case=True))
    return directory


SMALL = {"task.max_length": 16, "task.eval_batch_size": 16, "batch_size": 8, "execution.dtype": "float32"}


def test_records_fine_tune_a_classifier_that_answers_records(start, tmp_path):
    rows = [("a very good film", "pos"), ("the bad film", "neg")] * 40
    settings = SMALL | {"optimizer.learning_rate": 0.01, "task.epochs": 4}
    test = ["good film", "bad film"]
    result = bertjax.finetune("classify", tmp_path / "run", settings, init_from=start, train=rows, test=test)
    assert result.metrics["accuracy"] == 1.0  # on 4 rows of each class that were not trained on
    predicted = map(json.loads, (tmp_path / "run" / "predictions_test.jsonl").read_text().splitlines())
    assert [one["prediction"] for one in predicted] == ["pos", "neg"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rows"] == {"train": 72, "dev": 8}
    answers = bertjax.predict(result.model, test)
    assert list(answers) == ["pos", "neg"] and answers.labels == ("neg", "pos")
    assert answers.probabilities.shape == (2, 2) and answers.probabilities.dtype == np.float32
    assert answers.records[1] == {
        "text": "bad film",
        "labels": dict(zip(answers.labels, answers.probabilities[1].tolist(), strict=True)),
        "label": "neg",
    }
    nothing = bertjax.predict(result.model, [])
    assert nothing.labels == ("neg", "pos") and nothing.probabilities.shape == (0, 2)
    assert "<td" in (page := answers._repr_html_()) and "bad film" in page
    assert f"neg ({answers.probabilities[1][0]:.0%})" in page
    for data in ([{"text": "good film"}, {"text": "bad film"}], {"text": ["good film", "bad film"]}):
        assert bertjax.predict(result.model_path, data) == answers
    with pytest.raises(ValueError, match="row 0 has no column 'text'; found body. columns=NAME, or"):
        bertjax.predict(result.model, {"body": ["good film"]})
    assert bertjax.predict(result.model, {"body": ["good film"]}, columns="body")[0] == "pos"
    for columns in (0, (0,), "0"):  # as of a DataFrame without names
        assert bertjax.predict(result.model, {0: ["good film"], 1: ["bad film"]}, columns=columns)[0] == "pos"
    with pytest.raises(ValueError, match=r"^columns=\('a', 'b'\): the model was fine-tuned on 1 \(text\)"):
        bertjax.predict(result.model, {"a": ["good film"], "b": ["bad film"]}, columns=("a", "b"))


def test_a_model_of_records_is_evaluated_on_files(start, tmp_path, capsys):
    bertjax.finetune("classify", tmp_path / "run", SMALL, init_from=start, train=[("good", "x"), ("bad", "y")] * 9)
    (tmp_path / "dev.csv").write_text("text,label\ngood,x\nbad,y\n")
    capsys.readouterr()
    evaluate.main([f"--model={tmp_path / 'run' / 'model'}", f"--data={tmp_path}"])
    assert "accuracy" in json.loads(capsys.readouterr().out)["scores"]


def told(config, changes, start, workdir, **splits):
    """What a fine-tuning of such rows would be: its options and label names, without training."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "_run", lambda config, workdir: made.append(job.prepare(config, workdir)))
        bertjax.finetune(config, workdir, SMALL | changes, init_from=start, **splits)
    return made[0].tuner.task


@pytest.mark.parametrize(
    "rows, head, labels",
    [
        ([("good", 1), ("bad", 0)], "classification", ("0", "1")),
        ([("good", 1.0), ("bad", 0.0)], "classification", ("0", "1")),
        ([("good", True), ("bad", False)], "classification", ("False", "True")),
        ([("good", 0.5), ("bad", 1.0)], "regression", ()),
        ([("good", ["x", "y"]), ("bad", [])], "multilabel", ("x", "y")),
        ([("good", "bad", "x"), ("bad", "bad", "y")], "classification", ("x", "y")),
        ([{"text": "good", "label": "x"}, {"text": "bad", "label": "y"}], "classification", ("x", "y")),
    ],
)
def test_the_labels_say_what_is_learnt(rows, head, labels, start, tmp_path):
    unlabelled = [row[:-1] if type(row) is tuple else {"text": row["text"]} for row in rows]
    task = told("classify", {}, start, tmp_path, train=rows * 10, test=unlabelled)
    assert (task.head, task.labels) == (head, labels)
    assert len(task.text) == len(rows[0]) - 1


def test_an_array_of_rows_is_a_list_of_them(start, tmp_path):
    rows = np.array([("good", "x"), ("bad", "y")] * 10)
    task = told("classify", {}, start, tmp_path, train=rows, test=rows[:, :1])
    assert task.labels == ("x", "y")


def test_a_column_of_texts_may_have_the_name_of_the_column_of_words(start, tmp_path):
    task = told("classify", {"task.options.text": "tokens"}, start, tmp_path, train=[("good", "x"), ("bad", "y")] * 10)
    assert (task.text, task.labels) == (("tokens",), ("x", "y"))


@pytest.mark.parametrize("counts", [[6] * 150, [500, 500], [40] + [2] * 300, [1] * 50 + [2] * 50, [3, 3]])
def test_a_tenth_is_held_out_of_classes_of_any_size_and_no_class_as_a_whole(counts):
    rows = [{"label": f"c{label}"} for label, count in enumerate(counts) for _ in range(count)]
    train, dev = given.held_out(rows, "label", 0)
    assert sorted(train + dev) == list(range(len(rows)))
    assert max(1, len(rows) // 20 - 1) <= len(dev) <= max(1, len(rows) // 8)
    assert {rows[number]["label"] for number in dev} <= {rows[number]["label"] for number in train}


def test_a_dataframe_and_a_dataset_train_as_the_rows_that_they_hold(start, tmp_path):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = {"text": ["good", "bad"] * 10, "label": [0, 1] * 10}
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    made = [told("classify", {}, start, tmp_path / str(i), train=data) for i, data in enumerate((rows, dataset))]
    made.append(told("classify", {}, start, tmp_path / "pandas", train=pandas.DataFrame(rows)))
    assert [task.labels for task in made] == [("0", "1"), ("x", "y"), ("0", "1")]


def test_words_with_tags_train_a_tagger(start, tmp_path):
    rows = [(["good", "film"], ["B-X", "O"]), (["a"], ["O"])]
    named = {"tokens": [words for words, _ in rows], "ner_tags": [tags for _, tags in rows], "id": [0, 1]}
    other = {"words": named["tokens"], "labels": named["ner_tags"]}
    for number, data in enumerate((rows, named, other)):
        task = told("ner", {}, start, tmp_path / str(number), train=data, dev=data, test=[["good"], ["a", "film"]])
        assert set(task.labels) >= {"O", "B-X"}


def test_columns_of_other_names_are_named_by_options(start, tmp_path):
    rows = {"a": ["good", "bad"] * 5, "b": ["film"] * 10, "class": ["x", "y"] * 5}
    task = told(
        "classify", {"task.options.text": ["a", "b"], "task.options.label": "class"}, start, tmp_path, train=rows
    )
    assert (task.text, task.labels) == (("a", "b"), ("x", "y"))
    task = told("classify", {"task.options.text": "a", "task.options.label": "class"}, start, tmp_path, train=rows)
    assert task.text == ("a",)


@pytest.mark.parametrize(
    "config, splits, message",
    [
        ("classify", {"train": [("good", "x")]}, "train has 1 rows: too few to hold some out; give `dev`"),
        ("classify", {"dev": [("good", "x")]}, "dev without train: give the rows to train on"),
        (
            "classify",
            {"train": [{"body": "a", "label": "x"}] * 9},
            "train: row 0 has no column 'text'; found body, lab",
        ),
        ("classify", {"train": [("good", "x")] * 9}, "train: every label is 'x'; there must be two classes"),
        ("classify", {"train": [("a", "x"), ("b", "y")], "dev": [("a", "z")]}, "dev: row 0: label 'z' is unknown"),
        ("classify", {"train": [("a", 1.0), ("b", 2.0)], "dev": [("a", 2.5)]}, "dev: row 0: label '2.5' is unknown"),
        ("classify", {"train": [("a", ["x"]), ("b", "y")] * 5}, "train: row .: label .* is not one label: set the opt"),
        ("glue:mrpc", {"train": [("a", "b", "1")]}, "task 'mrpc' takes files"),
        ("ner", {"train": [("a b", "O B-X")] * 9}, "train: no row has tags; a row is .words, tags., two lists"),
    ],
)
def test_rows_that_cannot_work_are_refused_and_leave_nothing(config, splits, message, start, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        bertjax.finetune(config, tmp_path / "run", SMALL, init_from=start, **splits)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("row", [("", None), (None, "y")])
def test_a_row_is_named_by_its_place_among_those_that_were_given_though_some_are_held_out(row, start, tmp_path):
    for place in range(6):
        rows = [("a", "x"), ("b", "y")] * 3
        rows[place] = row
        with pytest.raises(ValueError, match=rf"^train: row {place}: (no label|text is None)"):
            bertjax.finetune("classify", tmp_path / "run", SMALL, init_from=start, train=rows)


def test_a_model_is_asked_what_its_head_answers(start):
    pretrained = bertjax.load_model(start, "mlm", reinitialise_head=True)
    [filled] = bertjax.predict(pretrained, "a [MASK] film", top_k=2)
    assert [len(mask) for mask in filled] == [2]
    pairs = [("good", "a very good film"), ("bad", "the bad film")]
    found = bertjax.predict(bertjax.load_model(start, "question-answering", reinitialise_head=True), pairs)
    assert found.task == "qa" and all(answer.text in pairs[i][1] for i, answer in enumerate(found))
    assert "good" in found._repr_html_()
    tagger = bertjax.load_model(start, "token-classification", reinitialise_head=True)
    assert [len(tags) for tags in bertjax.predict(tagger, [["good", "film"], "a very good film"])] == [2, 4]
    with pytest.raises(ValueError, match="the answers of ner have no probabilities of classes"):
        bertjax.predict(tagger, ["a"]).probabilities  # noqa: B018
    with pytest.raises(ValueError, match="does not say what it was fine-tuned for"):
        bertjax.predict(bertjax.load_model(start), ["a"])
    with pytest.raises(ValueError, match="model=5 is neither a model of load_model nor a path"):
        bertjax.predict(5, ["a"])


def test_editors_see_every_name_of_the_package():
    """Names that are imported when they are first used are imported for type checkers too."""
    tree = ast.parse(pathlib.Path(bertjax.__file__).read_text())
    [block] = [
        node for node in tree.body if isinstance(node, ast.If) and any(isinstance(x, ast.ImportFrom) for x in node.body)
    ]
    seen = {f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    assert seen == {f"bertjax.{home}.{name}" for home, names in bertjax._HOMES.items() for name in names}
    assert all(getattr(bertjax, name) is not None for name in bertjax.__all__)


@pytest.mark.slow
def test_python_and_the_command_line_train_the_same_bits(settings, tmp_path):
    from bertjax.command_line import config_directory

    bertjax.train("demo", tmp_path / "python", settings)
    flags = [
        f"--config.{name}={value!r}" if isinstance(value, tuple) else f"--config.{name}={value}"
        for name, value in settings.items()
    ]
    command = [sys.executable, "-m", "bertjax.main", f"--config={config_directory() / 'demo.py'}", *flags]
    subprocess.run(
        [*command, f"--workdir={tmp_path / 'command'}"], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("python", "command"))
    assert one == other
