"""Configurations, their refusals, and the published sizes and costs."""

import pytest

from bertjax.model.presets import PRESETS, BertConfig, Execution, miniature
from bertjax.model.size import flops_per_row, parameter_count


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_attention_heads": 7}, "must divide"),
        ({"hidden_act": "gelu_fast"}, "hidden_act"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"pad_token_id": 30522}, "pad_token_id"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
    ],
)
def test_config_refuses_impossible_values(change, message):
    with pytest.raises(ValueError, match=message):
        BertConfig(**change)


def test_config_survives_a_round_trip_through_its_dictionary():
    config = miniature(4, 256, layer_norm_eps=1e-7, hidden_act="gelu", vocab_size=99)
    assert BertConfig.from_dict(config.to_dict()) == config


def test_unknown_keys_of_a_hugging_face_config_are_ignored_but_another_network_is_refused():
    values = PRESETS["tiny"].to_dict() | {"transformers_version": "5.24.0", "use_cache": True}
    assert BertConfig.from_dict(values) == PRESETS["tiny"]
    with pytest.raises(ValueError, match="position_embedding_type"):
        BertConfig.from_dict(values | {"position_embedding_type": "relative_key"})
    with pytest.raises(ValueError, match="model_type"):
        BertConfig.from_dict(values | {"model_type": "deberta"})


def test_a_file_without_hidden_act_means_the_exact_gelu_as_transformers_reads_it():
    assert BertConfig.from_dict({}).hidden_act == "gelu"
    assert BertConfig().hidden_act == "gelu_new"


def test_execution_refuses_unknown_names():
    for field in ("dtype", "layers", "remat", "qkv"):
        with pytest.raises(ValueError, match=field):
            Execution(**{field: "nonsense"})


def test_published_sizes():
    # transformers 5.24: sum(p.numel()) of BertForPreTraining(BertConfig()), tied decoder once;
    # the paper's "110M" and "340M", and the READMEs of the miniatures (tiny 4.4M, mini 11.3M,
    # small 29.1M, medium 41.7M, encoder, pooler and heads).
    assert parameter_count(PRESETS["base"]) == 110_106_428
    assert parameter_count(PRESETS["base"], heads=("pooler",)) == 109_482_240
    assert parameter_count(PRESETS["large"], heads=("pooler",)) == 335_141_888
    millions = {"tiny": 4.4, "mini": 11.2, "small": 28.8, "medium": 41.4}
    for name, expected in millions.items():
        assert parameter_count(PRESETS[name], heads=("pooler",)) / 1e6 == pytest.approx(expected, abs=0.06)


def test_flops_of_base_and_large_match_the_published_convention():
    # 69.9, 301, 240.6 and 1019.9 GFLOP a row: 6*12LH^2*S + 12LHS^2 ... by hand from the formula.
    assert flops_per_row(PRESETS["base"], 128, 20) / 1e9 == pytest.approx(69.9, abs=0.05)
    assert flops_per_row(PRESETS["base"], 512, 77) / 1e9 == pytest.approx(301, abs=0.5)
    assert flops_per_row(PRESETS["large"], 128, 20) / 1e9 == pytest.approx(240.6, abs=0.05)
    assert flops_per_row(PRESETS["large"], 512, 77) / 1e9 == pytest.approx(1019.9, abs=0.5)
