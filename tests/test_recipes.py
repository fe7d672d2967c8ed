"""Recipes and ablations: each is accepted, says what it says, and trains at miniature size."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import frozen
from bertjax.config_checks import check_config
from bertjax.data.masking import next_tokens
from bertjax.model.encoder import BertEncoder
from bertjax.model.heads import BertForSequenceClassification, shared_init
from bertjax.model.presets import BertConfig
from bertjax.pretraining import job as pretraining

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
EXPERIMENTS = [("recipes", name) for name in ("budget", "roberta", "lamb_phase1", "lamb_phase2")]
EXPERIMENTS += [
    ("ablations", name) for name in ("base", "no_nsp", "ltr", "size=3/768/12", "masking=80/20/0", "masking=0/0/100")
]


@functools.cache
def module(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def store(random_store):
    return random_store


@pytest.mark.parametrize(("file", "name"), EXPERIMENTS)
def test_the_experiment_is_accepted(file, name):
    config = module(file).get_config(name)
    check_config(config)
    assert config.data.corpus == ""  # of no machine


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), EXPERIMENTS)
def test_the_experiment_trains_at_miniature_size(file, name, store, tmp_path):
    config = module(file).get_config(name)
    config.data.corpus = str(store)
    config.model.update(
        num_hidden_layers=1, hidden_size=24, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64
    )
    config.phases, config.batch_size = ((2, 32),), 16
    config.accumulation = min(2, config.accumulation)
    config.optimizer.warmup_steps, config.checkpoint.keep_every = 1, 0
    config.budget_minutes = 10.0 if config.budget_minutes else 0.0
    config.log.tensorboard, config.log.every_steps = False, 1
    config.execution.compilation_cache = ""
    check_config(config)
    pretraining.run(pretraining.prepare(frozen(config), str(tmp_path)))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2]
    assert all(np.isfinite(r["loss"]) for r in records if "loss" in r)
    assert ("nsp_loss" in records[0]) is config.data.nsp


@pytest.mark.slow
def test_checkpoints_of_a_curve_are_kept_and_opened_by_step(store, tmp_path):
    from bertjax.interop import load_model

    config = module("ablations").get_config("base")
    config.data.corpus = str(store)
    config.model.update(
        num_hidden_layers=1, hidden_size=24, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64
    )
    config.phases, config.batch_size, config.optimizer.warmup_steps = ((5, 32),), 16, 0
    config.checkpoint.update(every_steps=1, keep_every=2, keep_last=1, keep_best=0)
    config.log.tensorboard, config.execution.compilation_cache = False, ""
    pretraining.run(pretraining.prepare(frozen(config), str(tmp_path / "run")))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["2", "4", "5"]
    early, late = (jax.tree.leaves(load_model(tmp_path / f"run{step}").params) for step in ("@2", "@5"))
    newest = jax.tree.leaves(load_model(tmp_path / "run").params)
    assert all(np.array_equal(a, b) for a, b in zip(late, newest, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(early, newest, strict=True))


def test_an_unknown_name_or_a_share_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="'no_nsp'"):
        module("ablations").get_config("no_npc")
    with pytest.raises(ValueError, match="add up to 100"):
        module("ablations").get_config("masking=80/10/20")
    with pytest.raises(ValueError, match="LAYERS/WIDTH/HEADS"):
        module("ablations").get_config("size=3")
    with pytest.raises(ValueError, match="budget and roberta are different recipes"):
        module("recipes").get_config("budget,roberta")
    config = module("ablations").get_config("ltr")
    config.data.nsp = True
    with pytest.raises(ValueError, match="data.nsp=False"):
        check_config(config)


# ------------------------------------------------------------------------------- left to right


CAUSAL = BertConfig(65, 16, 2, 2, 32, is_decoder=True)
IDS = np.random.default_rng(0).integers(5, 65, (2, 12)).astype(np.int32)


def test_a_left_to_right_encoder_does_not_see_what_comes_later():
    mask = np.ones_like(IDS)
    model = BertEncoder(CAUSAL)
    params = shared_init(model, jax.random.key(0))
    apply = jax.jit(model.apply)
    before = apply({"params": params}, IDS, mask)
    changed = IDS.copy()
    changed[:, 7] = (IDS[:, 7] - 5 + 1) % 60 + 5
    after = apply({"params": params}, changed, mask)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (jnp.abs(before - after)[:, 7:].max(-1) > 1e-4).all()


def test_its_classifier_reads_the_last_token():
    mask = np.ones_like(IDS)
    mask[1, 9:] = 0
    model = BertForSequenceClassification(CAUSAL, num_labels=3)
    params = shared_init(model, jax.random.key(0))
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, IDS, mask)
    for row, last, beyond in ((0, 11, None), (1, 8, 9)):
        changed = IDS.copy()
        changed[row, last] = (IDS[row, last] - 4) % 60 + 5
        assert np.abs(apply({"params": params}, changed, mask) - logits)[row].max() > 1e-5
        if beyond:
            changed = IDS.copy()
            changed[row, beyond:] = 7
            np.testing.assert_array_equal(apply({"params": params}, changed, mask)[row], logits[row])


def test_every_position_predicts_the_token_after_it_within_its_text():
    ids = np.array([[2, 10, 11, 3, 2, 12, 3, 0]])
    made = next_tokens(jnp.asarray(ids), jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]]))
    assert made.positions.tolist() == [list(range(7))]
    assert made.weights.tolist() == [[1, 1, 1, 0, 1, 1, 0]]
    assert made.labels.tolist() == [[10, 11, 3, 0, 12, 3, 0]]
    np.testing.assert_array_equal(made.input_ids, ids)
