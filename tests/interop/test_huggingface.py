"""Round trips, refusals and atomic writing of Hugging Face's layout."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from bertjax.formats.arrays import read_safetensors
from bertjax.interop import LoadError, load_model, load_pretrained_params
from bertjax.interop.card import model_card
from bertjax.interop.huggingface import read_state_dict, write_directory
from bertjax.model.heads import BertForPreTraining, BertForSequenceClassification, shared_init
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from tests.fakes import SPECIALS

GOLDEN = Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="module")
def golden():
    return load_model(GOLDEN)


def directory_with(tmp_path, change, config=None):
    """A copy of the golden directory whose state dict went through `change`."""
    state = change(dict(read_safetensors(GOLDEN / "model.safetensors")))
    save_file({k: np.ascontiguousarray(v) for k, v in state.items()}, tmp_path / "model.safetensors")
    values = json.loads((GOLDEN / "config.json").read_text()) | (config or {})
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_round_trip_is_bit_equal(golden, tmp_path):
    write_directory(tmp_path / "a", golden.config, golden.params, "BertForPreTraining")
    again = load_model(tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, golden.params, again.params)
    assert again.config == golden.config
    before, after = read_state_dict(GOLDEN), read_state_dict(tmp_path / "a")
    assert set(before) == set(after)
    assert all((before[k] == after[k]).all() for k in before)


def test_every_parameter_has_its_own_foreign_name(golden):
    state = read_state_dict(GOLDEN)
    assert len(flatten(golden.params)) == len(state)


def test_nan_in_the_export_raises_and_leaves_nothing_behind(golden, tmp_path):
    params = jax.tree.map(np.array, golden.params)
    params["encoder"]["layer_1"]["output"]["kernel"][0, 0] = np.nan
    with pytest.raises(ValueError, match="encoder/layer_1/output/kernel: 1 of 960"):
        write_directory(tmp_path / "a", golden.config, params, "BertForPreTraining")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_loaded(tmp_path, value):
    name = "bert.encoder.layer.1.output.dense.weight"

    def broken(state):
        state[name] = np.array(state[name])
        state[name][0, :2] = value
        return state

    with pytest.raises(LoadError, match=f"1 weights hold .* NaN or infinite.*: {name}"):
        load_model(directory_with(tmp_path, broken))


def test_numbers_beyond_float32_are_not_loaded_as_infinite(tmp_path):
    def huge(state):
        return state | {"bert.pooler.dense.bias": np.full(24, 1e300)}

    with pytest.raises(LoadError, match="infinite in float32"):
        load_model(directory_with(tmp_path, huge))


def test_existing_directories_are_kept_unless_told_otherwise(golden, tmp_path):
    target = tmp_path / "a"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        write_directory(target, golden.config, golden.params, "BertForPreTraining")
    assert (target / "mine.txt").read_text() == "keep"
    write_directory(target, golden.config, golden.params, "BertForPreTraining", overwrite=True)
    assert not (target / "mine.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_old_names_buffers_and_a_missing_prefix(golden, tmp_path):
    def age(state):
        state = {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
            for k, v in state.items()
        }
        return state | {"bert.embeddings.position_ids": np.arange(16)[None]}

    old = load_model(directory_with(tmp_path, age))
    jax.tree.map(np.testing.assert_array_equal, golden.params, old.params)

    bare = tmp_path / "bare"
    bare.mkdir()
    directory_with(
        bare, lambda s: {k[5:]: v for k, v in s.items() if k.startswith("bert.")}, {"architectures": ["BertModel"]}
    )
    encoder = load_model(bare).params["encoder"]
    jax.tree.map(np.testing.assert_array_equal, golden.params["encoder"], encoder)


@pytest.mark.parametrize("wrapped", ["_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}", "layers"])
def test_what_torch_wrappers_put_into_names_is_no_part_of_them(golden, tmp_path, wrapped):
    """As torch.compile, DistributedDataParallel and FSDP with recomputation name what they hold."""

    def changed(name):
        layer = r"(bert\.encoder\.layer\.\d+\.)"
        inner = re.sub(layer, r"\1_fsdp_wrapped_module._checkpoint_wrapped_module.", name)
        return inner if wrapped == "layers" else wrapped.format(name)

    directory_with(tmp_path, lambda state: {changed(name): value for name, value in state.items()})
    jax.tree.map(np.testing.assert_array_equal, golden.params, load_model(tmp_path).params)


def test_a_directory_of_before_2019_and_one_of_data_parallel_are_read(golden, tmp_path):
    """bert_config.json without architectures beside the weights: SciBERT, BioBERT, ClinicalBERT."""
    directory_with(tmp_path, lambda state: {f"module.{k}": v for k, v in state.items()})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    old = {k: v for k, v in values.items() if k not in ("architectures", "model_type")}
    (tmp_path / "bert_config.json").write_text(json.dumps(old))
    loaded = load_model(tmp_path)
    assert isinstance(loaded.model, BertForPreTraining)
    jax.tree.map(np.testing.assert_array_equal, golden.params, loaded.params)


def test_weights_without_architectures_are_what_they_hold(tmp_path):
    def only_mlm(state):
        return {k: v for k, v in state.items() if "seq_relationship" not in k and "pooler" not in k}

    directory_with(tmp_path, only_mlm, {"architectures": None})
    assert type(load_model(tmp_path).model).__name__ == "BertForMaskedLM"
    directory_with(tmp_path, lambda state: {k: v for k, v in state.items() if "cls" not in k}, {"architectures": []})
    assert type(load_model(tmp_path).model).__name__ == "BertModel"


def test_another_prefix_is_refused_with_missing_and_unexpected_names(tmp_path):
    path = directory_with(tmp_path, lambda s: {f"model.{k}": v for k, v in s.items()})
    with pytest.raises(LoadError) as error:
        load_model(path)
    message = str(error.value)
    assert "missing in the file" in message and "unexpected in the file" in message
    assert "bert.embeddings.word_embeddings.weight (37, 24)" in message
    assert "model.bert.embeddings.word_embeddings.weight (37, 24)" in message
    with pytest.raises(LoadError):  # the switch for heads never excuses the encoder
        load_model(path, task="sequence-classification", reinitialise_head=True)


def test_one_missing_layer_is_refused(tmp_path):
    path = directory_with(tmp_path, lambda s: {k: v for k, v in s.items() if ".layer.1." not in k})
    with pytest.raises(LoadError, match="16 missing in the file"):
        load_model(path)


def test_a_file_with_more_layers_than_its_config_is_refused(tmp_path):
    path = directory_with(tmp_path, lambda s: s, {"num_hidden_layers": 1})
    with pytest.raises(LoadError, match="16 unexpected in the file"):
        load_model(path)


def test_head_of_another_size_is_refused_and_restarted_only_on_request(golden, tmp_path):
    config = golden.config
    model = BertForSequenceClassification(config, num_labels=16)
    params = load_pretrained_params(GOLDEN, model, jax.random.key(0), reinitialise_head=True)
    write_directory(
        tmp_path / "a", config, params, "BertForSequenceClassification", labels={i: f"class {i}" for i in range(16)}
    )
    loaded = load_model(tmp_path / "a")
    assert loaded.model.num_labels == 16 and loaded.labels[3] == "class 3"

    two = BertForSequenceClassification(config, num_labels=2)
    with pytest.raises(LoadError) as error:
        load_pretrained_params(tmp_path / "a", two, jax.random.key(1))
    assert "(16, 24), the model needs (2, 24)" in str(error.value)
    assert "reinitialise_head=True" in str(error.value)
    fresh = load_pretrained_params(tmp_path / "a", two, jax.random.key(1), reinitialise_head=True)
    assert fresh["classifier"]["kernel"].shape == (24, 2)
    jax.tree.map(np.testing.assert_array_equal, params["encoder"], fresh["encoder"])
    jax.tree.map(np.testing.assert_array_equal, params["pooler"], fresh["pooler"])


def test_a_head_that_the_file_lacks_is_refused_and_restarted_only_on_request():
    config = load_model(GOLDEN).config
    model = BertForSequenceClassification(config)
    with pytest.raises(LoadError, match=r"classifier.weight \(2, 24\)"):
        load_pretrained_params(GOLDEN, model, jax.random.key(0))


def test_networks_that_differ_without_a_shape_are_refused(golden):
    for change in (
        {"num_attention_heads": 4},
        {"hidden_act": "gelu_new"},
        {"layer_norm_eps": 1e-5},
        {"vocab_size": 40},
    ):
        config = BertConfig.from_dict(golden.config.to_dict() | change)
        with pytest.raises(LoadError, match=next(iter(change))):
            load_pretrained_params(GOLDEN, BertForPreTraining(config), jax.random.key(0))


def test_an_untied_decoder_is_refused_and_a_tied_copy_is_dropped(golden, tmp_path):
    words = "bert.embeddings.word_embeddings.weight"
    copy = "cls.predictions.decoder.weight"
    path = directory_with(tmp_path, lambda s: s | {copy: s[words]})
    jax.tree.map(np.testing.assert_array_equal, golden.params, load_model(path).params)
    path = directory_with(tmp_path, lambda s: s | {copy: s[words] + 1})
    with pytest.raises(LoadError, match="differs"):
        load_model(path)


def test_a_directory_without_a_model_says_what_was_looked_for(tmp_path):
    with pytest.raises(LoadError, match="model.safetensors.*bert_model.ckpt.index"):
        load_model(tmp_path)
    shutil.copy(GOLDEN / "model.safetensors", tmp_path)
    with pytest.raises(LoadError, match="no config.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="task='translation'"):
        load_model(GOLDEN, task="translation")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", "", "config.json: this is not valid JSON"),
        ("config.json", "[]", "config.json: not a JSON object"),
        ("config.json", '{"id2label": {"a": "x"}}', "config.json: id2label must map the numbers"),
        ("config.json", '{"id2label": ["x"]}', "config.json: id2label must map the numbers"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.safetensors", "", "not a readable safetensors file.*copy it again"),
        ("vocab.txt", "\n".join([*SPECIALS, *map(str, range(33))]), "tokenizer has 38 entries, the model 37 rows"),
    ],
)
def test_a_damaged_directory_is_refused_with_the_reason(tmp_path, name, content, message):
    directory_with(tmp_path, lambda state: state)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=message):
        load_model(tmp_path)


def test_an_index_without_shards_is_refused(tmp_path):
    shutil.copy(GOLDEN / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(LoadError, match="is not an index of shards"):
        load_model(tmp_path)


def test_places_that_are_no_directory_on_this_disk_say_what_to_give():
    with pytest.raises(LoadError, match="gs://bucket/model is not on a local disk"):
        load_model("gs://bucket/model")
    with pytest.raises(LoadError, match="is a file; give the directory"):
        load_model(GOLDEN / "config.json")


def test_vocabulary_larger_than_the_table_is_not_written(golden, tmp_path):
    class Tokenizer:
        vocab_size = 38

    with pytest.raises(ValueError, match="38 tokens, the model 37 rows"):
        write_directory(tmp_path / "a", golden.config, golden.params, "BertForPreTraining", Tokenizer())


def test_model_card_says_what_it_is_and_how_to_load_it():
    card = model_card(
        "demo",
        "BertForPreTraining",
        "A small BERT.",
        "docstrings",
        {"steps": 100, "`optimizer.b2`": 0.98},
        {"Results": "* loss 2.5"},
        True,
    )
    head, title = card.split("---\n")[1:3]
    assert "pipeline_tag: fill-mask\n" in head and "library_name: transformers\n" in head
    assert title.startswith("\n# demo\n\nA small BERT.\n")
    for text in (
        "## Data\n\ndocstrings\n",
        "| steps | 100 |",
        "| `optimizer.b2` | 0.98 |",
        "## Results\n\n* loss 2.5\n",
        'pipeline("fill-mask", model="DIRECTORY")',
        'bertjax.load_model("DIRECTORY")',
    ):
        assert text in card
    assert 'fill("The capital of France is [MASK].")' in card
    asked = 'Die "Hauptstadt" von Frankreich ist <mask>.'  # of the run, in its language
    own = model_card("demo", "BertForPreTraining", "A small BERT.", fill_mask=True, sentence=asked)
    assert r'fill("Die \"Hauptstadt\" von Frankreich ist <mask>.")' in own and "capital" not in own
    tagger = model_card("t", "BertForTokenClassification", "Tags.")
    assert "fill" not in tagger and "BertForTokenClassification.from_pretrained" in tagger


def test_a_left_to_right_classifier_is_not_written_as_one_that_reads_cls(golden, tmp_path):
    """transformers would give every text the same answer: [CLS] sees nothing there."""
    config = dataclasses.replace(golden.config, is_decoder=True)
    model = BertForSequenceClassification(config)
    params = jax.device_get(shared_init(model, jax.random.key(0)))
    write_directory(tmp_path / "m", config, params, "BertForSequenceClassification")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "bertjax"
    loaded, ids = load_model(tmp_path / "m"), np.array([[2, 5, 6, 3]])
    expected = model.apply({"params": params}, ids, np.ones_like(ids))
    np.testing.assert_array_equal(loaded(ids, np.ones_like(ids)), expected)
    write_directory(tmp_path / "mlm", config, golden.params, "BertForMaskedLM")
    assert json.loads((tmp_path / "mlm" / "config.json").read_text())["model_type"] == "bert"
