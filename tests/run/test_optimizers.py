"""Optimizers of optax from a config: they train, and resume bit for bit, in pre-training and fine-tuning."""

import json
import shutil

import jax
import numpy as np
import pytest

from bertjax.command_line import load_config
from bertjax.config_checks import check_config
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.pretraining import job as pretraining
from bertjax.run.checkpoint import Checkpoints
from bertjax.tasks import job as tasks
from bertjax.tokenization import WordPieceTokenizer
from bertjax.training import sharding
from tests.fakes import SPECIALS

pytestmark = pytest.mark.slow
RATES = {
    "optax.lion": 3e-3,
    "optax.sgd": 1.0,
    "optax.noisy_sgd": 1.0,
    "optax.adafactor": 0.3,
    "optax.contrib.muon": 0.03,
}
OPTIMIZERS = {
    "optax.lion": ["b1=0.95"],
    "optax.sgd": ["momentum=0.9"],
    "optax.noisy_sgd": ["eta=1e-12"],
    "optax.adafactor": ["min_dim_size_to_factor=16", "momentum=0.9"],
    "optax.contrib.muon": ["adam_b1=0.8"],
}
WORDS = [*SPECIALS, "good", "bad", "film", "a", "the", "very"]


def settings_of(name, file, *settings):
    options = [f"--config.optimizer.options.{option}" for option in OPTIMIZERS[name]]
    common = ["--config.execution.compilation_cache=", "--config.log.tensorboard=false", "--config.log.every_steps=1"]
    settings = [f"--config.{setting}" for setting in settings]
    return check_config(load_config(file, [f"--config.optimizer.name={name}", *options, *common, *settings]))


def states(workdir):
    """{step: all arrays of the checkpoint}."""
    checkpoints = Checkpoints(str(workdir / "checkpoints"))
    return {step: checkpoints.restore_numpy(step)[0] for step in checkpoints.steps()}


def losses(workdir):
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def stop_at(workdir, step):
    """What a kill before the next checkpoint would have left."""
    for later in [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]:
        if int(later.name) > step:
            shutil.rmtree(later)
    (workdir / "checkpoints.committed.json").unlink(missing_ok=True)
    shutil.rmtree(workdir / "model")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pretraining_with_it_learns_and_resumes_to_the_same_bits(name, random_store, tmp_path):
    config = settings_of(
        name,
        "configs/base.py",
        f"data.corpus={random_store}",
        "model.num_hidden_layers=1",
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "model.intermediate_size=64",
        "model.max_position_embeddings=32",
        "phases=((8,32),)",
        "batch_size=16",
        "optimizer.warmup_steps=1",
        f"optimizer.learning_rate={RATES[name]}",
        "eval.rows=16",
        "checkpoint.every_steps=4",
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
    )
    pretraining.run(pretraining.prepare(config, str(tmp_path / "run")))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    whole = states(tmp_path / "run")[8]
    stop_at(tmp_path / "run", 4)
    job = pretraining.prepare(config, str(tmp_path / "run"))
    assert job.resumed_from == 4
    pretraining.run(job)
    jax.tree.map(np.testing.assert_array_equal, states(tmp_path / "run")[8], whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fine_tuning_with_it_freezes_decays_and_resumes_to_the_same_bits(name, tmp_path):
    model = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    params = jax.device_get(jax.jit(lambda key: init_params(BertModel(model), key))(jax.random.key(0)))
    write_directory(tmp_path / "start", model, params, "BertModel", WordPieceTokenizer(WORDS, do_lower_case=True))
    for split in ("train", "dev"):
        rows = [f"a {label} film{' very' * (i % 3)}\t{label}" for i in range(16) for label in ("good", "bad")]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    config = settings_of(
        name,
        "configs/classify.py",
        f"init_from={tmp_path / 'start'}",
        f"task.data={tmp_path}",
        "task.options.files={'train': 'train.tsv', 'dev': 'dev.tsv'}",
        "task.max_length=16",
        "task.buckets=1",
        "task.epochs=3",
        "task.warmup=0.0",
        "task.freeze=('embeddings/', 'layer_0/')",
        "task.layer_decay=0.5",
        "batch_size=16",
        "optimizer.learning_rate=1e-2",
        "optimizer.weight_decay=0.1",
        "checkpoint.keep_last=9",
    )
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    tasks.run(tasks.prepare(config, str(tmp_path / "run"), mesh))
    whole = states(tmp_path / "run")
    moved = {
        "/".join(key.key for key in path): bool(np.any(new != old))
        for (path, new), old in zip(
            jax.tree.leaves_with_path(whole[6]["params"]), jax.tree.leaves(whole[2]["params"]), strict=True
        )
    }
    frozen = {path for path in moved if "embeddings/" in path or "layer_0/" in path}
    assert frozen and not any(moved[path] for path in frozen)
    assert all(moved[path] for path in moved.keys() - frozen if path.endswith("kernel"))
    stop_at(tmp_path / "run", 4)
    job = tasks.prepare(config, str(tmp_path / "run"), mesh)
    assert job.resumed_from == 4
    tasks.run(job)
    jax.tree.map(np.testing.assert_array_equal, states(tmp_path / "run")[6], whole[6])
