"""Options of the fine-tuning loop, each seen at work in real training of a tiny model."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from bertjax.config import CheckpointSettings, finetune_config, frozen
from bertjax.interop import LoadError, load_model
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, init_params
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from bertjax.run.checkpoint import Checkpoints
from bertjax.tasks import finetune
from bertjax.tasks.custom import TableTask
from bertjax.tokenization import WordPieceTokenizer
from bertjax.training import sharding
from tests.fakes import SPECIALS

VOCAB = [*SPECIALS, "good", "bad", "film", "a", "the", "very"]
CONFIG = BertConfig(
    vocab_size=len(VOCAB),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    initializer_range=0.2,
)
SETTINGS = frozen(finetune_config()).replace(
    {"task.max_length": 16, "task.buckets": 1, "task.eval_batch_size": 16, "log.every_steps": 1}
)
pytestmark = pytest.mark.slow


def run_of(rate, rows, epochs, seed=0):
    """The settings of one run."""
    return SETTINGS.replace({"optimizer.learning_rate": rate, "batch_size": rows, "task.epochs": epochs, "seed": seed})


@pytest.fixture
def table(tmp_path):
    """64 rows: one in eight is 'bad', and says so; dev has the same words with even classes."""
    for name, rows, every in (("train.tsv", 64, 8), ("dev.tsv", 16, 2)):
        lines = ["text\tlabel"]
        for i in range(rows):
            label = "bad" if i % every == 0 else "good"
            lines.append(f"a {label} film{' very' * (i % 3)}\t{label}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def tuner(folder, config=CONFIG, **changes):
    task = TableTask(folder, {"train": "train.tsv", "dev": "dev.tsv"})
    return finetune.FineTuner(
        task,
        WordPieceTokenizer(VOCAB, do_lower_case=True),
        config,
        init_params,
        SETTINGS.replace({name if "." in name else f"task.{name}": value for name, value in changes.items()}),
        mesh=sharding.make_mesh(devices=jax.devices()[:1]),
    )


def first_loss(found, run):
    losses = []

    class Book:
        def train(self, step, last_step, metrics):
            losses.append(metrics["loss"])

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    found.run(run, Book())
    return losses[0]


def moved(found, run):
    """Path -> largest change of a parameter, over a run whose last evaluation is the best."""
    start = flatten(jax.device_get(finetune.Training(found, run).start().params))
    end = flatten(jax.device_get(found.run(run).params))
    return {path: float(np.abs(end[path] - start[path]).max()) for path in start}


def test_class_weights_weigh_the_loss_and_balanced_ones_follow_the_counts(table):
    run = run_of(1e-3, 64, 1, 0)  # one batch holds all rows: 8 bad, 56 good
    still = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plain = tuner(table, still)
    rows = plain.data("train", training=True)[1]
    params = finetune.Training(plain, run).start().params
    logits = np.array(plain.predict(params, rows), np.float64)
    gold = np.array([row["labels"] for row in rows])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(64), gold]
    assert first_loss(plain, run) == pytest.approx(losses.mean(), abs=1e-5)
    bad = gold == plain.task.labels.index("bad")
    assert bad.sum() == 8
    expected = (losses[bad].mean() + losses[~bad].mean()) / 2  # each class counts the same
    assert first_loss(tuner(table, still, class_weights=("balanced",)), run) == pytest.approx(expected, abs=1e-5)
    third = (3 * losses[bad].sum() + losses[~bad].sum()) / (3 * 8 + 56)
    assert first_loss(tuner(table, still, class_weights=(("bad", 3),)), run) == pytest.approx(third, abs=1e-5)


def test_class_weights_go_by_name_whatever_the_order_of_the_head(table):
    found = tuner(table, class_weights=(("good", 0), ("bad", 3)))
    found.task.labels = found.task.labels[::-1]  # as of a checkpoint that numbers them otherwise
    assert found.task.labels == ("good", "bad") and found.objective.class_weights == (0, 3)


def test_frozen_parameters_stay_and_the_others_move(table):
    run = run_of(1e-2, 16, 1, 0)
    changes = moved(tuner(table, freeze=("embeddings/", "layer_0/")), run)
    frozen = {p for p in changes if "embeddings/" in p or "layer_0/" in p}
    assert frozen and all(changes[path] == 0 for path in frozen)
    assert changes["classifier/kernel"] > 1e-4
    assert all(changes[p] > 0 for p in changes if "layer_1/" in p and p.endswith("kernel"))


def test_layerwise_decay_slows_what_is_far_from_the_head(table):
    """Without weight decay Adam's first steps have the size of their rate."""
    run = run_of(1e-3, 64, 1, 0)
    settings = {"weight_decay": 0.0, "bias_correction": True, "clip_norm": 0.0, "eps": 1e-12}
    slowed = tuner(table, layer_decay=0.5, **{f"optimizer.{name}": value for name, value in settings.items()})
    changes = moved(slowed, run.replace({"task.warmup": 0.0}))
    head, name = changes["classifier/kernel"], "attention/output/kernel"
    assert head == pytest.approx(1e-3, rel=0.01)
    for layer, power in ((1, 2), (0, 3)):  # head 1, last layer decay^2 (see the optimizer)
        (path,) = (p for p in changes if f"layer_{layer}/{name}" in p)
        assert changes[path] == pytest.approx(head * 0.5**power, rel=0.02), path


def test_early_stopping_ends_a_run_that_does_not_improve(table):
    run = run_of(1e-9, 16, 8, 0)  # too slow to change any prediction
    stopped = tuner(table, early_stopping=2).run(run.replace({"task.early_stopping": 2}))
    assert len(stopped.history) == 3 and stopped.best_step == 4 and stopped.steps == 12
    assert len(tuner(table).run(run).history) == 8


class Killed(Exception):
    pass


@pytest.mark.parametrize("newest", ["intact", "damaged"])
def test_a_run_that_is_killed_goes_on_bit_for_bit(table, tmp_path, newest):
    run = run_of(3e-3, 16, 4, 5)
    undisturbed = tuner(table).run(run)

    class Book:
        def train(self, step, last_step, metrics):
            if step == 10:  # in the third epoch; the last checkpoint is of step 8
                raise Killed

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    def checkpoints():
        return Checkpoints(tmp_path / "c", CheckpointSettings(keep_last=2, metric="eval/accuracy"), "max")

    kept = checkpoints()
    with pytest.raises(Killed):
        tuner(table).run(run, Book(), kept)
    kept.wait()
    kept.close()
    kept = checkpoints()
    assert kept.latest() == 8
    if newest == "damaged":
        kept.amend(8, {"eval/accuracy": 2.0})  # the best of all, if it could be read
        (tmp_path / "c" / "8" / "state" / "_METADATA").write_text("")
    resumed = tuner(table).run(run, None, kept)  # a new process would do the same
    kept.close()
    assert resumed.history == undisturbed.history and resumed.best_step == undisturbed.best_step
    for a, b in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(undisturbed.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_feature_based_tagger_runs_from_the_command_line(tmp_path):
    params = jax.jit(lambda key: init_params(BertModel(CONFIG), key))(jax.random.key(0))
    tokenizer = WordPieceTokenizer(VOCAB, do_lower_case=True)
    write_directory(tmp_path / "start", CONFIG, params, "BertModel", tokenizer)
    for name in ("train", "dev"):
        lines = ["a O", "good B-x", "film I-x", "the O", "very O", "", "bad B-y", "film O", ""] * 8
        (tmp_path / f"{name}.conll").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "bertjax.main",
        "--config=configs/tag.py",
        f"--config.init_from={tmp_path / 'start'}",
        f"--config.task.data={tmp_path}",
        "--config.task.feature_layers=concat_last_4",
        "--config.task.max_length=32",
        "--config.task.epochs=2",
        "--config.execution.compilation_cache=",
        "--config.log.tensorboard=False",
        f"--workdir={tmp_path / 'run'}",
        "--config.batch_size=8",
    ]
    # One device: eight on few cores wait for each other.
    alone = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["settings"]["feature_layers"] == "concat_last_4"
    assert set(result["labels"]) == {"O", "B-x", "I-x", "B-y"}
    written = (tmp_path / "run" / "predictions_dev.conll").read_text().split("\n")
    assert len(written) >= 64 and len(written[0].split("\t")) == 3
    # Hugging Face's layout cannot hold a BiLSTM: said, not silently left out.
    assert "no model directory" in done.stdout + done.stderr and "\nmodel: " not in done.stdout
    with pytest.raises(LoadError, match="has not finished, .* or it was one with a BiLSTM"):
        load_model(tmp_path / "run")
