"""configs/modern.py: what it says, and a miniature of it from the demo corpus to transformers."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from bertjax.config import frozen, phases, total_steps
from bertjax.config_checks import check_config
from bertjax.interop import load_model
from bertjax.model.presets import BertConfig
from bertjax.model.size import parameter_count
from bertjax.pretraining import job as pretraining
from bertjax.run.run import run

FILE = pathlib.Path(__file__).parents[2] / "configs" / "modern.py"


def get_config(variants=""):
    spec = importlib.util.spec_from_file_location("modern", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variants)


@pytest.mark.parametrize(
    "variants, parameters, tokens, decay",
    [("", 149e6, 2.0e12, 50e9), ("nsp,large", 395e6, 2.0e12, 50e9), ("small,v5e_16,muon", 34.6e6, 20e9, 0.5e9)],
)
def test_sizes_and_tokens_are_the_published_ones(variants, parameters, tokens, decay):
    config = frozen(get_config(variants))
    check_config(config)
    model = BertConfig.of(config.model, 50_368)
    assert parameter_count(model, ("mlm",)) == pytest.approx(parameters, rel=0.01)
    *short, long = phases(config)
    assert [phase.length for phase in short] == [1024] * len(short) and long.length == 8192
    assert sum(phase.steps * phase.rows * phase.length for phase in [*short, long]) == pytest.approx(tokens, rel=0.01)
    decayed = config.optimizer.decay_share * total_steps(config) * long.rows * long.length
    assert decayed == pytest.approx(decay)
    assert config.data.nsp == ("nsp" in variants) == (config.model.type_vocab_size == 2)


def test_the_budget_is_minutes_of_one_gpu():
    config = frozen(get_config("base,budget"))
    check_config(config)
    assert (config.budget_minutes, config.accumulation, config.optimizer.learning_rate) == (20, 1, 4e-4)
    assert [(phase.length, phase.rows) for phase in phases(config)] == [(128, 128), (512, 128)]
    assert not config.data.nsp and config.model.type_vocab_size == 0  # which transformers loads


def test_a_miniature_trains_through_its_phases_and_transformers_gives_its_logits(random_store, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = get_config()
    config.data.corpus = str(random_store)
    config.model.update(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        local_attention=16,
        max_position_embeddings=64,
    )
    config.phases, config.batch_size, config.accumulation = ((2, 32, 8), (2, 32, 16), (2, 64, 8)), 8, 1
    config.optimizer.update(warmup_steps=1, decay_share=0.3)
    config.eval.update(seq_length=32, rows=32)
    config.log.update(tensorboard=False, every_steps=1)
    config.execution.compilation_cache = ""
    run(pretraining.prepare(frozen(config), str(tmp_path)))

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 6 and np.isfinite(losses).all()
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["model_type"] == "modernbert"
    assert "\n# Encoder pre-trained in " in (tmp_path / "model" / "README.md").read_text()  # it is no BERT

    ours = load_model(tmp_path / "model")
    ids = np.random.default_rng(0).integers(5, written["vocab_size"], (2, 48))
    mask = (np.arange(48) < np.array([[48], [31]])).astype(np.int64)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
    found = np.asarray(ours(ids, mask))
    for row, length in enumerate(mask.sum(1)):
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-4)
