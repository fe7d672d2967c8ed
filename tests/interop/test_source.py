"""The one door to a model: what its files say is obeyed, or refused by name, at every entrance."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from bertjax import inference
from bertjax.config import finetune_config, frozen
from bertjax.formats.arrays import read_safetensors
from bertjax.interop import LoadError, check_pretrained, load_model, open_source
from bertjax.interop.huggingface import read_state_dict, write_directory
from bertjax.interop.loading import fit
from bertjax.model import heads
from bertjax.model.presets import BertConfig
from bertjax.tasks import job
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import convert, evaluate, features, predict
from tests.fakes import SPECIALS

GOLDEN = Path(__file__).resolve().parent / "golden"
WORDS = [*SPECIALS, "the", "cat", "##s", "sat", "on", "mat", "."]
LABELS = {0: "contradiction", 1: "entailment", 2: "neutral"}


def state():
    return dict(read_safetensors(GOLDEN / "model.safetensors"))


def directory(path, arrays=None, config=None, words=WORDS, without=()):
    """The golden model under `path`, with other arrays, keys of its config.json or words."""
    path.mkdir(exist_ok=True)
    arrays = state() if arrays is None else arrays
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path / "model.safetensors")
    values = json.loads((GOLDEN / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in without}))
    if words:
        (path / "vocab.txt").write_text("\n".join(words) + "\n")
        (path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    return path


def classifier(path, labels=3, **config):
    rng = np.random.default_rng(0)
    return directory(
        path,
        state()
        | {
            "classifier.weight": rng.normal(size=(labels, 24)).astype(np.float32),
            "classifier.bias": np.zeros(labels, np.float32),
        },
        {"architectures": ["BertForSequenceClassification"], **config},
    )


# --- vocabulary


def test_a_vocabulary_larger_than_the_model_is_refused_at_every_door_before_data_are_read(tmp_path):
    model = directory(tmp_path / "model", words=[*WORDS, *(f"w{i}" for i in range(78))])
    message = "the tokenizer has 90 entries, the model 37 rows"
    nowhere = tmp_path / "nowhere"
    for door in (
        lambda: load_model(model),
        lambda: open_source(model),
        lambda: check_pretrained(model, heads.BertForPreTraining(BertConfig())),
        lambda: job.Pretrained(model),
        lambda: inference.fill_mask(model, "the [MASK]"),
    ):
        with pytest.raises(LoadError, match=message):
            door()
    for tool, arguments in (
        (evaluate, ["--task=cola", f"--data={nowhere}"]),
        (features, [f"--file={model / 'vocab.txt'}", f"--out={tmp_path / 'x.npz'}"]),
        (predict, ["--task=fill-mask", "--text=the [MASK]"]),
    ):
        with pytest.raises(SystemExit, match=message):
            tool.main([f"--model={model}", *arguments])
    with pytest.raises(SystemExit, match=message):
        convert.main([f"--from={model}", f"--out={nowhere}"])


@pytest.mark.parametrize("words, told", [(33, True), (34, False)])
def test_a_vocabulary_that_was_cut_off_is_told_once(tmp_path, caplog, words, told):
    model = directory(tmp_path / "model", words=[*WORDS, *(f"w{i}" for i in range(words - len(WORDS)))])
    for _ in range(2):
        open_source(model)
    assert sum(f"has only {words} entries for the model's 37 rows" in text for text in caplog.messages) == told


def test_fine_tuning_refuses_a_vocabulary_before_it_reads_the_data(tmp_path):
    model = directory(tmp_path / "model", words=[*WORDS, *(f"w{i}" for i in range(78))])
    config = finetune_config()
    config.init_from, config.task.name, config.task.data = str(model), "cola", str(tmp_path / "no")
    with pytest.raises(LoadError, match="has 90 entries, the model 37 rows"):
        job.prepare(frozen(config), str(tmp_path / "run"))


# --- labels


def test_a_head_without_names_is_not_scored_in_an_order_that_nobody_stated(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        f"{text}\t{label}"
        for text, label in zip(
            ("the cat", "sat on", "mat . the", "cats", "the mat sat"),
            ("neutral", "entailment", "contradiction", "entailment", "neutral"),
            strict=True,
        )
    ]
    (data / "dev.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    options = json.dumps({"files": {"train": "dev.tsv", "dev": "dev.tsv"}})

    def scores(model, *arguments):
        evaluate.main(
            [
                f"--model={model}",
                "--task=table",
                f"--data={data}",
                "--max_length=16",
                f"--options={options}",
                *arguments,
            ]
        )

    for nameless in (
        classifier(tmp_path / "none"),
        classifier(tmp_path / "placeholders", id2label={str(i): f"LABEL_{i}" for i in range(3)}),
    ):
        with pytest.raises(SystemExit, match="does not name the classes of its head.*--labels="):
            scores(nameless)
    with pytest.raises(SystemExit, match="2 labels are named, but the head of .* has 3"):
        scores(tmp_path / "none", "--labels=neutral,entailment")
    with pytest.raises(SystemExit, match="without a train split .* labels=.* in the order of the model's head"):
        scores(tmp_path / "none", f"--data={data / 'dev.tsv'}", "--options={}")
    named = classifier(tmp_path / "named", id2label=LABELS)
    with pytest.raises(SystemExit, match="labels=.'neutral'.* contradict those that"):
        scores(named, "--labels=neutral,entailment,contradiction")


def test_the_order_that_is_asked_for_is_the_heads(tmp_path, capsys):
    (tmp_path / "dev.tsv").write_text("text\tlabel\nthe cat\ta\nsat on\tb\nmat .\ta\n")
    options = json.dumps({"files": {"dev": "dev.tsv"}})
    model, accuracy = classifier(tmp_path / "m", labels=2), {}
    predicted = [max(one, key=one.get) for one in inference.classify(model, ["the cat", "sat on", "mat ."])]
    for order in ("a,b", "b,a"):
        evaluate.main(
            [
                f"--model={model}",
                "--task=table",
                f"--data={tmp_path}",
                "--max_length=16",
                f"--options={options}",
                f"--labels={order}",
            ]
        )
        accuracy[order] = json.loads(capsys.readouterr().out)["scores"]["accuracy"]
        names = dict(zip(("LABEL_0", "LABEL_1"), order.split(","), strict=True))
        right = [names[p] == gold for p, gold in zip(predicted, "aba", strict=True)]
        assert accuracy[order] == pytest.approx(np.mean(right))
    assert sum(accuracy.values()) == pytest.approx(1)


def test_numbers_are_their_own_order_and_a_nameless_head_is_not_trained_on(tmp_path):
    from bertjax.tasks.task import adopt_labels

    assert adopt_labels(("0", "1"), (), "m") == ("0", "1")
    with pytest.raises(ValueError, match="does not name the classes"):
        adopt_labels(("1", "0"), (), "m")
    (tmp_path / "t.tsv").write_text("text\tlabel\nthe cat\tx\nsat on\ty\n")
    task = job.make_task("table", tmp_path, {"files": {"train": "t.tsv", "dev": "t.tsv"}})
    start = job.Pretrained(classifier(tmp_path / "m", labels=2))
    job.prepare_tuner(task, start, frozen(finetune_config()).replace({"task.max_length": 16}))
    assert not start.keep_head


@pytest.mark.parametrize("stored, order", [(0, ("1", "0")), (3, ("1", "0")), (2, ("0", "1"))])
def test_labels_keep_the_order_that_is_given_beside_a_checkpoint_without_their_head(stored, order, tmp_path):
    (tmp_path / "t.tsv").write_text("text\tlabel\nthe cat\t0\nsat on\t1\n")
    options = {"files": {"train": "t.tsv", "dev": "t.tsv"}, "labels": (1, 0)}
    task = job.make_task("table", tmp_path, options)
    start = job.Pretrained(classifier(tmp_path / "m", labels=stored) if stored else directory(tmp_path / "m"))
    job.prepare_tuner(task, start, frozen(finetune_config()).replace({"task.max_length": 16}))
    assert task.labels == order  # numbers are those of the outputs of a head without names


@pytest.mark.parametrize(
    "names, message",
    [
        ({"id2label": {0: "a", 1: "a", 2: "b"}}, "id2label names several classes a; give each"),
        ({"id2label": {1: "a", 2: "b", 3: "c"}}, r"numbered \[1, 2, 3\], not from 0 to 2"),
        (
            {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 2, "c": 1}},
            "label2id contradicts id2label about b, c",
        ),
        ({"label2id": {"a": 0, "b": 1, "c": 1}}, "label2id gives two labels the same number"),
        ({"id2label": {0: "a", 1: "b"}}, "names 2 classes, the head has 3"),
    ],
)
def test_names_that_do_not_fit_the_head_are_refused(tmp_path, names, message):
    model = classifier(tmp_path / "m", **names)
    for door in (lambda: load_model(model), lambda: inference.classify(model, ["the cat"])):
        with pytest.raises(LoadError, match=message):
            door()
    load_model(model, "features")  # the encoder has nothing to do with them


def test_a_task_with_a_label_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="its labels name a twice"):
        job.make_task("table", tmp_path, {"files": {"dev": "x.tsv"}, "labels": ["a", "b", "a"]})


def test_classes_that_are_called_label_0_are_named_where_a_task_was_learnt(tmp_path):
    names = {str(i): f"LABEL_{i}" for i in range(3)}
    assert open_source(classifier(tmp_path / "theirs", id2label=names)).labels == ()
    ours = classifier(tmp_path / "ours", id2label=names, finetuned={"task": "table", "options": {}})
    assert open_source(ours).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_names_are_read_from_label2id_where_it_stands_alone(tmp_path):
    model = classifier(tmp_path / "m", label2id={"b": 1, "c": 2, "a": 0})
    assert load_model(model).labels == {0: "a", 1: "b", 2: "c"}
    model = classifier(tmp_path / "n", label2id={"b": "1", "c": "2", "a": "0"})
    assert load_model(model).labels == {0: "a", 1: "b", 2: "c"}


# --- ids beyond their tables


def test_ids_beyond_their_tables_are_refused_by_name():
    model, ids = load_model(GOLDEN), np.array([[2, 5, 3]])
    for name, value, wrong in (
        ("input_ids", 39, {"input_ids": ids + 34}),
        ("input_ids", -1, {"input_ids": ids - 3}),
        ("token_type_ids", 2, {"token_type_ids": ids}),
        ("position_ids", 16, {"position_ids": ids + 14}),
        ("masked_positions", 3, {"masked_positions": [[3]]}),
        ("cls_positions", 9, {"cls_positions": [[9]]}),
    ):
        with pytest.raises(ValueError, match=f"{name} has {value}, which is not from 0 to"):
            model(**{"input_ids": ids, "attention_mask": ids * 0 + 1} | wrong)
    with pytest.raises(ValueError, match="token_type_ids has 2"):
        model(ids, ids * 0 + 1, ids)
    with pytest.raises(ValueError, match="position_ids has 16, which is not from 0 to 15"):
        model.model.apply({"params": model.params}, ids, ids * 0 + 1, None, ids * 0 + 16)
    with pytest.raises(ValueError, match="input_ids must be integers, not float64"):
        model(ids * 1.0, ids * 0 + 1)
    jax.eval_shape(lambda ids: model(ids, ids, ids), ids)  # within jit nothing can be compared


def test_pairs_are_refused_by_a_model_of_one_segment(tmp_path):
    key = "bert.embeddings.token_type_embeddings.weight"
    one = state() | {"classifier.weight": np.ones((2, 24), np.float32), "classifier.bias": np.zeros(2, np.float32)}
    model = directory(
        tmp_path / "m",
        one | {key: one[key][:1]},
        {"type_vocab_size": 1, "architectures": ["BertForSequenceClassification"]},
    )
    loaded = load_model(model)
    assert len(inference.classify(loaded, ["the cat"])) == 1
    with pytest.raises(ValueError, match="one segment .type_vocab_size=1., so it cannot read pair"):
        inference.classify(loaded, [("the cat", "sat")])
    (tmp_path / "t.tsv").write_text("text\tother\tlabel\nthe cat\tsat\tx\nsat on\tmat\ty\n")
    task = job.make_task("table", tmp_path, {"files": {"train": "t.tsv", "dev": "t.tsv"}, "text": ["text", "other"]})
    with pytest.raises(ValueError, match="one segment"):
        job.prepare_tuner(task, model, frozen(finetune_config()).replace({"task.max_length": 16}))


# --- keys of config.json


@pytest.mark.parametrize(
    "key, value",
    [
        ("embedding_size", 16),
        ("rotary", True),
        ("attention_head_size", 4),
        ("norm_type", "rms"),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"bits": 8}),
        ("is_encoder_decoder", True),
        ("auto_map", {"AutoModel": "x.Y"}),
        ("position_embedding_type", "relative_key"),
        ("tie_word_embeddings", "no"),
        ("is_decoder", "false"),
        ("layer_norm_eps", "small"),
        ("layer_norm_eps", float("inf")),
        ("initializer_range", 2**70),
        ("layer_norm_eps", [1]),
        ("classifier_dropout", 1.5),
        ("hidden_act", "quick_gelu"),
        ("num_hidden_layers", 10**30),
        ("pad_token_id", "x"),
    ],
)
def test_a_key_that_would_change_the_network_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(LoadError, match=f"config.json: .*{key}"):
        open_source(directory(tmp_path / "m", config={key: value}))


def test_an_encoder_with_an_untied_decoder_or_none_loads_and_its_mlm_head_does_not(tmp_path):
    table, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    golden = load_model(GOLDEN, task="features").params
    for arrays in (state() | {decoder: state()[table] + 1}, state()):
        untied = directory(tmp_path / "m", arrays, {"tie_word_embeddings": False})
        jax.tree.map(np.testing.assert_array_equal, load_model(untied, task="features").params, golden)
        with pytest.raises(LoadError, match="decoder of its own .tie_word_embeddings=false"):
            load_model(untied, task="mlm")
        with pytest.raises(LoadError, match="decoder of its own"):
            check_pretrained(untied, heads.BertForPreTraining(load_model(GOLDEN).config))
    encoder = {name: array for name, array in state().items() if name != table}
    with pytest.raises(LoadError, match="missing in the file"):  # the decoder is no table of words
        directory(tmp_path / "m", encoder | {decoder: state()[table]}, {"tie_word_embeddings": False})
        load_model(tmp_path / "m", task="features")
    untied = classifier(tmp_path / "c", tie_word_embeddings=False)
    assert inference.classify(load_model(untied), ["the cat"])


def test_keys_that_change_nothing_are_read_over(tmp_path):
    harmless = {
        "torch_dtype": "float16",
        "pooler_type": "first_token_transform",
        "use_cache": True,
        "_name_or_path": "x",
        "gradient_checkpointing": True,
        "bos_token_id": 1,
        "sbert_ce_default_activation_function": "torch.nn.Identity",
        "new_feature": False,
        "layer_norm_eps": "1e-12",
        "pruned_heads": {},
        "quantization_config": None,
    }
    model = load_model(directory(tmp_path / "m", config=harmless))
    assert model.config == load_model(GOLDEN).config
    exact = directory(tmp_path / "e", config={"hidden_act": "gelu_python"})
    assert load_model(exact).config.hidden_act == "gelu"
    tanh = directory(tmp_path / "t", config={"hidden_act": "gelu_fast"})
    assert load_model(tanh).config.hidden_act == "gelu_new"


@pytest.mark.parity
def test_every_key_that_transformers_writes_is_known():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=37, id2label=LABELS)
    may_be_empty = (
        "add_cross_attention is_decoder is_encoder_decoder tie_encoder_decoder pruned_heads "
        "cross_attention_hidden_size classifier_dropout pad_token_id quantization_config auto_map "
        "position_embedding_type"
    ).split()
    for values in (config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
        BertConfig.from_dict({key: value if key in may_be_empty else value or "set" for key, value in values.items()})


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    model = directory(tmp_path / "m", config={"tokenizer_class": "XLMRobertaTokenizer"})
    with pytest.raises(ValueError, match="tokenizer_class='XLMRobertaTokenizer' does not read vocab.txt"):
        load_model(model)


# --- weights


def test_sizes_that_the_file_cannot_have_are_refused_before_anything_is_made(tmp_path):
    model = directory(tmp_path / "m", config={"num_hidden_layers": 10**9})
    for door in (
        lambda: load_model(model),
        lambda: inference.fill_mask(model, "[MASK]"),
        lambda: check_pretrained(model, heads.BertModel(open_source(model).config)),
    ):
        with pytest.raises(LoadError, match="num_hidden_layers=1000000000, the file holds 46 arr"):
            door()


def test_weights_that_are_integers_are_refused(tmp_path):
    name = "bert.encoder.layer.0.output.dense.weight"
    for dtype in (np.int32, np.int8, np.bool_):
        arrays = state()
        arrays[name] = arrays[name].astype(dtype)
        with pytest.raises(LoadError, match=f"numbers, but 1 arrays are not: {name}"):
            load_model(directory(tmp_path / "m", arrays))


@pytest.mark.parametrize("extra", ["intent_classifier.weight", "crf.transitions", "loss.weight"])
def test_an_encoder_with_heads_of_another_program_is_usable(tmp_path, extra):
    golden = load_model(GOLDEN)
    model = directory(tmp_path / "m", state() | {extra: np.ones((3, 3), np.float32)})
    for task in ("features", "pretraining", "mlm"):
        found = load_model(model, task).params["encoder"]
        jax.tree.map(np.testing.assert_array_equal, golden.params["encoder"], found)
    tagger = load_model(model, "token-classification", reinitialise_head=True)
    jax.tree.map(np.testing.assert_array_equal, golden.params["encoder"], tagger.params["encoder"])


def test_parts_that_may_belong_to_the_answer_are_refused_with_a_message_that_fits(tmp_path):
    model = classifier(tmp_path / "m")
    arrays = dict(read_safetensors(model / "model.safetensors"))
    model = directory(
        model,
        arrays | {"crf.transitions": np.ones((3, 3), np.float32)},
        {"architectures": ["BertForTokenClassification"]},
    )
    with pytest.raises(LoadError, match=r"(?s)crf.transitions \(3, 3\).*task='features'"):
        load_model(model)
    model = directory(model, state() | {"bert.adapter.weight": np.ones((3, 3), np.float32)})
    with pytest.raises(LoadError, match="(?s)1 unexpected .*bert.adapter.*compare config.json"):
        load_model(model, "features", reinitialise_head=True)


@pytest.mark.parametrize("prefix", ["model.", "backbone.", "student.module."])
def test_a_prefix_is_named_as_the_difference(tmp_path, prefix):
    model = directory(tmp_path / "m", {f"{prefix}{k}": v for k, v in state().items()})
    with pytest.raises(LoadError, match=f"The names differ by '{prefix}' in front"):
        load_model(model)


def test_names_of_nvidia_are_read(tmp_path):
    old = {
        k.replace("intermediate.dense.", "intermediate.dense_act.").replace("pooler.dense.", "pooler.dense_act."): v
        for k, v in state().items()
    }
    assert set(old) != set(state())
    found = load_model(directory(tmp_path / "m", old)).params
    jax.tree.map(np.testing.assert_array_equal, load_model(GOLDEN).params, found)


def test_weights_of_flax_alone_are_refused_with_the_way_to_convert_them(tmp_path):
    model = directory(tmp_path / "m")
    (model / "model.safetensors").rename(model / "flax_model.msgpack")
    with pytest.raises(LoadError, match="flax_model.msgpack alone.*from_flax=True"):
        load_model(model)


@pytest.mark.parametrize(
    "file, message",
    [
        ("adapter_config.json", "holds an adapter of peft, .*merge_and_unload"),
        ("checkpoint-5/model.safetensors", "its folder checkpoint-5 does, which can be named"),
        ("model.onnx", "found model.onnx, which is not read under this name"),
        ("export.json", "is an export to StableHLO: name the model that this was made of"),
    ],
)
def test_a_directory_without_a_model_is_refused_by_what_it_holds(tmp_path, file, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    if file == "export.json":
        (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "module, leaf, message",
    [
        ("query.lora_A.default", "weight", "adapters beside the weights"),
        ("query.base_layer", "weight", "adapters beside the weights"),
        ("query", "qweight", "are quantised"),
    ],
)
def test_what_others_put_into_an_encoder_is_named(tmp_path, module, leaf, message):
    more = {f"bert.encoder.layer.0.attention.self.{module}.{leaf}": np.ones((3, 3), np.float32)}
    with pytest.raises(LoadError, match=f"(?s)1 unexpected .*{message}"):
        load_model(directory(tmp_path / "m", state() | more))


# --- rows that pad the vocabulary


@pytest.fixture(scope="module")
def padded():
    """(a model of 37 words in 64 rows, the same without padding, their parameters)."""
    golden = load_model(GOLDEN)
    config = golden.config.__class__(**{**golden.config.__dict__, "vocab_size": 64, "words": 37})
    model = heads.BertForPreTraining(config)
    params, fresh = fit(open_source(GOLDEN), model, jax.random.key(0))
    assert not fresh
    return model, golden, params


def test_rows_beyond_the_vocabulary_have_no_share_in_the_softmax(padded):
    from bertjax.training.losses import classification_sums

    model, golden, params = padded
    rng = np.random.default_rng(0)
    params["encoder"]["embeddings"]["word_embeddings"][37:] = 9.0  # whatever they hold
    params["mlm"]["bias"][37:] = 9.0
    ids = rng.integers(0, 37, (2, 8))
    wide, _ = jax.jit(lambda p: model.apply({"params": p}, ids, ids * 0 + 1))(params)
    narrow, _ = golden(ids, ids * 0 + 1)
    weights = np.ones(ids.shape, np.float32)
    for ours, theirs in zip(
        classification_sums(wide, ids, weights), classification_sums(narrow, ids, weights), strict=True
    ):
        assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert wide.shape[-1] == 64 and np.asarray(wide).argmax(-1).max() < 37


def test_an_export_has_as_many_rows_as_words(padded, tmp_path):
    model, golden, params = padded
    write_directory(tmp_path / "m", model.config, params, "BertForPreTraining")
    again = load_model(tmp_path / "m")
    assert again.config == golden.config
    jax.tree.map(np.testing.assert_array_equal, golden.params, again.params)
    assert "words" not in json.loads((tmp_path / "m" / "config.json").read_text())
    before = read_state_dict(GOLDEN)
    assert all(np.array_equal(v, before[k]) for k, v in read_state_dict(tmp_path / "m").items())


def test_only_a_padded_model_goes_on_from_an_export_with_fewer_words(padded):
    model, golden, _ = padded
    check_pretrained(GOLDEN, model)
    params, _ = fit(open_source(GOLDEN), model, jax.random.key(0))
    table = params["encoder"]["embeddings"]["word_embeddings"]
    assert table.shape == (64, 24) and not table[37:].any()
    with pytest.raises(LoadError, match="vocab_size: checkpoint 37, model 64"):
        check_pretrained(GOLDEN, heads.BertForPreTraining(BertConfig(**{**golden.config.__dict__, "vocab_size": 64})))


def test_padding_changes_no_weight_that_is_drawn(padded):
    model, golden, _ = padded
    plain = heads.BertForPreTraining(golden.config)
    wide, narrow = (jax.jit(heads.init_params, static_argnums=0)(m, jax.random.key(3)) for m in (model, plain))
    cut = heads.with_rows({"encoder/embeddings/word_embeddings": wide["encoder"]["embeddings"]["word_embeddings"]}, 37)
    np.testing.assert_array_equal(*cut.values(), narrow["encoder"]["embeddings"]["word_embeddings"])
    assert not np.asarray(wide["encoder"]["embeddings"]["word_embeddings"])[37:].any()


def test_a_tokenizer_is_kept_for_the_copy(tmp_path):
    golden = load_model(GOLDEN)
    write_directory(
        tmp_path / "m",
        golden.config,
        golden.params,
        "BertForPreTraining",
        WordPieceTokenizer(WORDS, do_lower_case=True),
    )
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    assert open_source(tmp_path / "copy").require_tokenizer().vocab == tuple(WORDS)
    with pytest.raises(LoadError, match="holds no tokenizer"):
        open_source(GOLDEN).require_tokenizer()


# --- heads that an answer needs


HEADS = {
    "nsp": {"cls.seq_relationship.weight": (2, 24), "cls.seq_relationship.bias": (2,)},
    "classifier": {"classifier.weight": (3, 24), "classifier.bias": (3,)},
    "choice": {"classifier.weight": (1, 24), "classifier.bias": (1,)},
    "qa": {"qa_outputs.weight": (2, 24), "qa_outputs.bias": (2,)},
}


@pytest.mark.parametrize(
    "architecture, parts, asked, settings",
    [
        ("BertModel", (), None, {}),
        ("BertForMaskedLM", ("mlm",), "fill-mask", {}),
        ("BertLMHeadModel", ("mlm",), None, {"is_decoder": True}),
        ("BertForPreTraining", ("mlm", "nsp"), "next-sentence", {}),
        ("BertForNextSentencePrediction", ("nsp",), "next-sentence", {}),
        ("BertForSequenceClassification", ("classifier",), "classify", {}),
        ("BertForTokenClassification", ("classifier",), "ner", {}),
        ("BertForMultipleChoice", ("choice",), None, {}),
        ("BertForQuestionAnswering", ("qa",), "qa", {}),
    ],
)
def test_every_class_of_transformers_predicts_and_converts_with_its_own_heads_alone(
    tmp_path, capsys, architecture, parts, asked, settings
):
    rng = np.random.default_rng(0)
    arrays = {k: v for k, v in state().items() if k.startswith("bert.")}
    arrays |= {k: v for k, v in state().items() if "mlm" in parts and "predictions" in k}
    for part in parts:
        arrays |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in HEADS.get(part, {}).items()}
    model = directory(tmp_path / "m", arrays, {"architectures": [architecture]} | settings)
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    before, after = read_state_dict(model), read_state_dict(tmp_path / "out")
    assert {k: v.tolist() for k, v in after.items() if k in before} == {
        k: v.tolist() for k, v in before.items() if k in after
    } and set(after) <= set(before)
    capsys.readouterr()
    if asked is None:
        return
    text = {
        "fill-mask": "the [MASK]",
        "next-sentence": "the cat\tsat",
        "classify": "the cat",
        "ner": "the cat",
        "qa": "the cat\tsat on the mat",
    }[asked]
    predict.main([f"--model={tmp_path / 'out'}", f"--task={asked}", f"--text={text}"])
    assert json.loads(capsys.readouterr().out)
    other = "classify" if asked == "qa" else "qa"
    with pytest.raises(SystemExit, match=r"(?s)missing.*The encoder fits; the heads .* are: "):
        predict.main([f"--model={model}", f"--task={other}", "--text=the cat\tsat"])


def test_an_encoder_without_a_pooler_is_refused_with_what_needs_none_and_that_takes_it(tmp_path):
    arrays = {k: v for k, v in state().items() if k.startswith("bert.") and "pooler" not in k}
    model = directory(tmp_path / "m", arrays, {"architectures": ["BertModel"]})
    with pytest.raises(SystemExit, match="features, and convert --pooling=mean.$"):
        convert.main([f"--from={model}", f"--out={tmp_path / 'out'}"])
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}", "--pooling=mean"])
    assert set(read_state_dict(tmp_path / "out")) == set(arrays)  # and no pooler drawn at random


def test_classifier_dropout_is_obeyed_and_kept(tmp_path):
    model = classifier(
        tmp_path / "m", classifier_dropout=0.4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}"])
    again = load_model(tmp_path / "out")
    assert again.config.classifier_dropout == 0.4
    row = np.array([[2, 5, 6, 3]])
    apply = jax.jit(
        lambda model, key: model.apply({"params": again.params}, row, row * 0 + 1, dropout_key=key), static_argnums=0
    )
    plain = again.model.clone(config=again.config.__class__(**{**again.config.__dict__, "classifier_dropout": 0.0}))
    keys = [jax.random.key(i) for i in range(2)]
    assert not np.array_equal(apply(again.model, keys[0]), apply(again.model, keys[1]))
    assert np.array_equal(apply(plain, keys[0]), apply(plain, keys[1]))


def test_the_directory_of_a_checkpoint_is_answered_with_the_name_that_is_read(tmp_path):
    (tmp_path / "run/checkpoints/40").mkdir(parents=True)
    with pytest.raises(LoadError, match=f"named by its step, {tmp_path}/run@40$"):
        open_source(tmp_path / "run/checkpoints/40")
