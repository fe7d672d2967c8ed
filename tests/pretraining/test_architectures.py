"""Pre-training of networks that are not BERT's: what the settings describe trains, and is exported as what it is."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bertjax.config import default_config, frozen
from bertjax.interop import load_model
from bertjax.model.heads import BertForMaskedLM, BertForPreTraining, shared_init
from bertjax.model.model_types import OWN, TYPES
from bertjax.model.presets import BertConfig, modern
from bertjax.pretraining import job as pretraining
from bertjax.run.run import run

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
MODERN = {name: value for name, value in TYPES["modernbert"].fixed.items()} | {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "local_attention": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
ROBERTA = dict(TYPES["roberta"].fixed)


@pytest.fixture
def config(random_store):
    config = default_config()
    config.data.corpus = str(random_store)
    config.phases = ((3, 32),)
    config.batch_size = 16
    config.optimizer.warmup_steps = 1
    config.eval.rows = 32
    config.log.tensorboard = False
    config.execution.compilation_cache = ""
    return config


@pytest.mark.parametrize(
    "network, nsp, export",
    [
        (MODERN, False, "transformers' ModernBertForMaskedLM (model_type modernbert)"),
        (MODERN | {"model_type": "modernbert"}, True, "bertjax's own layout"),
        (ROBERTA | {"model_type": "camembert"}, False, "transformers' CamembertForMaskedLM (model_type camembert)"),
        (ROBERTA, False, "transformers' RobertaForMaskedLM (model_type roberta)"),
        ({"positions": "rotary"}, True, "bertjax's own layout"),
        ({"norm": "before", "final_norm": True, "feed_forward": "gated"}, False, "bertjax's own layout"),
    ],
)
def test_the_run_says_at_its_start_what_it_exports(config, tmp_path, network, nsp, export):
    config.model.update(SMALL | network)
    config.data.nsp = nsp
    assert export in dict(pretraining.prepare(frozen(config), str(tmp_path)).facts())["export"]


@pytest.mark.parametrize("nsp, segments, warned", [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_pairs_without_segment_embeddings_are_warned_of_at_the_start(config, tmp_path, nsp, segments, warned):
    config.model.update(SMALL | {"type_vocab_size": segments})
    config.data.nsp = nsp
    told = [text for name, text in pretraining.prepare(frozen(config), str(tmp_path)).facts() if name == "warning"]
    assert any("model.type_vocab_size=2" in text for text in told) == warned


@pytest.mark.parametrize("nsp, unit", [(True, "pairs"), (False, "texts")])
def test_without_next_sentences_the_held_out_rows_are_not_called_pairs(config, tmp_path, nsp, unit):
    config.model.update(SMALL)
    config.data.nsp = nsp
    assert dict(pretraining.prepare(frozen(config), str(tmp_path)).facts())["corpus"].endswith(f"held-out {unit}")


@pytest.mark.parametrize("longer", [0, 1])
def test_held_out_rows_beyond_those_of_training_are_warned_of_at_the_start(config, tmp_path, longer):
    config.model.update(SMALL)
    config.eval.seq_length = length = max(phase[1] for phase in config.phases) + longer
    facts = pretraining.prepare(frozen(config), str(tmp_path)).facts()
    assert dict(facts)["corpus"].endswith(f"in rows of {length:,}")
    assert any("eval.seq_length=0" in text for name, text in facts if name == "warning") == bool(longer)


def test_bert_is_exported_without_a_word(config, tmp_path):
    config.model.update(SMALL)
    assert "export" not in dict(pretraining.prepare(frozen(config), str(tmp_path)).facts())


@pytest.mark.parametrize(
    "nsp, model_type, architecture", [(False, "modernbert", "ModernBertForMaskedLM"), (True, OWN, "BertForPreTraining")]
)
def test_the_modern_body_trains_on_packed_rows_and_is_exported_as_it_was_said(
    config, tmp_path, capsys, nsp, model_type, architecture
):
    config.model.update(SMALL | MODERN)
    config.data.update(nsp=nsp, packed=True)
    run(pretraining.prepare(frozen(config), str(tmp_path)))
    assert ("transformers has no class for it" in capsys.readouterr().out) == (model_type == OWN)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == (model_type, [architecture])
    exported, own = load_model(tmp_path / "model"), load_model(tmp_path)
    ids = np.arange(40).reshape(2, 20)
    for one, other in zip(*(jax.tree.leaves(model(ids, np.ones_like(ids))) for model in (exported, own)), strict=True):
        np.testing.assert_array_equal(one, other)
    line = [json.loads(x) for x in open(tmp_path / "metrics.jsonl") if "eval/mlm_loss" in x][-1]
    assert ("eval/nsp_loss" in line) == nsp


def test_a_model_type_that_has_no_such_network_is_refused_at_the_start(config, tmp_path):
    config.model.update(SMALL | {"model_type": "modernbert"})
    with pytest.raises(ValueError, match="model_type='modernbert' has no network with positions='learned'"):
        pretraining.prepare(frozen(config), str(tmp_path))


def small_modern(**changes):
    return modern(4, 64, 96, vocab_size=50, num_attention_heads=2, local_attention=8, **changes)


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForPreTraining])
def test_texts_packed_in_one_row_have_the_logits_of_rows_of_their_own(kind):
    """Rotary positions restart with each text; windows count places in the row, which is the same within a text."""
    model = kind(small_modern())
    params = shared_init(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    lengths = (13, 7, 20)
    ids = rng.integers(5, 50, (1, 40))
    numbers = np.repeat([1, 2, 3], lengths)[None]
    places = np.concatenate([np.arange(n) for n in lengths])[None]

    @jax.jit
    def logits(ids, numbers, places):
        return jax.tree.leaves(model.apply({"params": params}, ids, numbers, None, places))[0]

    packed = logits(ids, numbers, places)
    begin = 0
    for n in lengths:
        alone = np.where(np.arange(40) < n, np.roll(ids, -begin, axis=1), 0)
        own = logits(alone, (np.arange(40) < n)[None].astype(int), np.arange(40)[None])
        np.testing.assert_allclose(packed[:, begin : begin + n], own[:, :n], atol=1e-5)
        begin += n


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 7])
def test_a_scan_over_groups_of_layers_gives_what_the_layers_one_by_one_give(layers):
    config = dataclasses.replace(small_modern(), num_hidden_layers=layers)
    model = BertForMaskedLM(config)
    scanned = model.clone(execution=dataclasses.replace(model.execution, layers="scan"))
    params = shared_init(model, jax.random.key(0))
    ids = np.random.default_rng(0).integers(5, 50, (2, 30))
    args = {"params": params}, ids, np.ones_like(ids)

    def every(model):
        key = jax.random.key(1)
        return jax.jit(lambda p: model.encoder.apply({"params": p["encoder"]}, *args[1:], None, None, key, True))(
            params
        )

    for one, other in zip(every(model), every(scanned), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_description_survives_its_own_layout():
    config = BertConfig(**SMALL | {"positions": "rotary", "feed_forward": "gated", "type_vocab_size": 0})
    assert config.type == "bertjax" and BertConfig.from_dict(config.to_dict()) == config
