"""The converter: comparison, vocabulary extension, StableHLO, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from bertjax.interop import load_model
from bertjax.interop.huggingface import write_directory
from bertjax.interop.stablehlo import export_model
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools.convert import convert, extend_vocabulary, main
from tests.fakes import SPECIALS

GOLDEN = Path(__file__).resolve().parent / "golden"
WORDS = [*SPECIALS, "the", "cat", "##s", "sat", "mo", "##use", "a", "c", "##at", "."]
VOCABULARY = WORDS + [f"filler{i}" for i in range(37 - len(WORDS))]


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """The golden model with a vocabulary of its size."""
    path = tmp_path_factory.mktemp("model") / "m"
    golden = load_model(GOLDEN)
    write_directory(
        path, golden.config, golden.params, "BertForPreTraining", WordPieceTokenizer(VOCABULARY, do_lower_case=True)
    )
    return path


def test_tf1_to_hugging_face_is_exact(tmp_path):
    lines = []
    source = GOLDEN.parent / "golden_tf1"
    assert convert(source, "hf", tmp_path / "out", say=lines.append) == 0.0
    assert any("compare" in line for line in lines) and any("read" in line for line in lines)
    expected = load_model(GOLDEN).params
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "out").params, expected)
    assert "BertForPreTraining" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("stored, expected", [(None, None), (1e30, None), (8, 8), (4096, None)])
def test_the_longest_input_of_the_source_is_kept_or_is_the_number_of_positions(
    with_tokenizer, tmp_path, stored, expected
):
    source = tmp_path / "source"
    shutil.copytree(with_tokenizer, source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    positions = settings.pop("model_max_length")
    assert positions == load_model(GOLDEN).config.max_position_embeddings
    if stored is not None:
        settings["model_max_length"] = stored
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(source, "hf", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["model_max_length"] == (expected or positions)


def test_added_tokens_stay_in_a_conversion(with_tokenizer, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(with_tokenizer, source)
    pieces = (source / "vocab.txt").read_text().splitlines()
    (source / "vocab.txt").write_text("\n".join(pieces[:-1]) + "\n")
    (source / "added_tokens.json").write_text(json.dumps({"[E1]": len(pieces) - 1}))
    convert(source, "hf", tmp_path / "out")
    for directory in (source, tmp_path / "out"):
        tokenizer = load_model(directory).tokenizer
        assert tokenizer.encode("the [e1]cat [E1]s") == [5, *tokenizer.encode("[e1]"), 6, 36, 1]
    larger, added = extend_vocabulary(load_model(source), ["mouse", "the"])
    assert added == 1 and larger.tokenizer.encode("the mouse [E1]") == [5, 37, 36]
    with pytest.raises(ValueError, match="'##ats' continues a word"):
        extend_vocabulary(load_model(source), ["##ats"])


def test_new_words_are_means_of_their_old_pieces_and_old_ids_stay(with_tokenizer):
    old = load_model(with_tokenizer)
    new, added = extend_vocabulary(old, ["mouse", "cats", "the", "", "mouse", "##ats"])
    assert added == 3 and new.config.vocab_size == 40
    before = old.params["encoder"]["embeddings"]["word_embeddings"]
    after = new.params["encoder"]["embeddings"]["word_embeddings"]
    np.testing.assert_array_equal(after[:37], before)
    assert old.tokenizer.tokenize("mouse cats") == ["mo", "##use", "cat", "##s"]
    np.testing.assert_allclose(after[37], (before[9] + before[10]) / 2, rtol=1e-6)
    np.testing.assert_allclose(after[38], (before[6] + before[7]) / 2, rtol=1e-6)
    np.testing.assert_allclose(after[39], (before[13] + before[7]) / 2, rtol=1e-6)
    bias = old.params["mlm"]["bias"]
    np.testing.assert_allclose(new.params["mlm"]["bias"][37], (bias[9] + bias[10]) / 2, rtol=1e-6)
    assert new.tokenizer.encode("the mouse sat") == [5, 37, 8]
    assert new.tokenizer.encode("the cat sat") == old.tokenizer.encode("the cat sat")


def test_new_words_are_such_as_the_tokenizer_looks_for(with_tokenizer):
    old = load_model(with_tokenizer)
    new, added = extend_vocabulary(old, ["Mouse", "CAFÉ", "mouse", "Cat", "##ATS"])
    assert added == 3  # of an uncased model, which knows "cat"
    assert new.tokenizer.tokenize("Café MOUSE") == ["cafe", "mouse"]
    assert new.tokenizer.id_to_token(39) == "##ats"
    for word in ("two words", "TNF-alpha", "[FOO]", "\u200b"):
        with pytest.raises(ValueError, match="1 of the words to add are several words"):
            extend_vocabulary(old, ["mouse", word])


def test_an_encoder_alone_does_not_remember_the_task_of_its_head(with_tokenizer, tmp_path):
    model = load_model(with_tokenizer, "sequence-classification", reinitialise_head=True)
    memory = {"finetuned": {"task": "sst2"}, "problem_type": "single_label_classification"}
    write_directory(tmp_path / "m", model.config, model.params, type(model.model).__name__, settings=memory)
    for task, kept in (None, memory), ("features", {}):
        convert(tmp_path / "m", "hf", tmp_path / str(task), task=task)
        assert json.loads((tmp_path / str(task) / "config.json").read_text()).items() >= kept.items()
    assert not memory.keys() & json.loads((tmp_path / "features" / "config.json").read_text()).keys()


def test_the_command_extends_writes_and_compares(with_tokenizer, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("mouse\n\nthe\nmouse\n")
    arguments = [
        f"--from={with_tokenizer}",
        "--to=hf",
        f"--out={tmp_path / 'out'}",
        f"--add_vocab={tmp_path / 'words.txt'}",
    ]
    main(arguments)
    printed = capsys.readouterr().out
    assert "1 of 3 words added, 38 rows" in printed
    assert float(printed.split("outputs ")[1]) < 1e-5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 38
    assert load_model(tmp_path / "out").tokenizer.encode("mouse") == [37]
    with pytest.raises(SystemExit, match="not empty; choose another --out, or replace it by --overwrite"):
        main(arguments)
    assert not capsys.readouterr().out  # before the model is read


def test_overwriting_replaces_a_model_and_neither_a_run_nor_other_files(with_tokenizer, tmp_path):
    for place, file, what in (("run", "checkpoints/9", "a run"), ("home", "letter.txt", "no model")):
        (tmp_path / place / file).parent.mkdir(parents=True)
        (tmp_path / place / file).write_text("mine")
        with pytest.raises(SystemExit, match=f"holds {what}, and --overwrite would delete all of it"):
            main([f"--from={with_tokenizer}", f"--out={tmp_path / place}", "--overwrite"])
        assert (tmp_path / place / file).read_text() == "mine"
        with pytest.raises(SystemExit, match="is not empty; choose another --out$"):
            main([f"--from={with_tokenizer}", f"--out={tmp_path / place}"])
    with pytest.raises(SystemExit, match="letter.txt holds no model"):
        main([f"--from={with_tokenizer}", f"--out={tmp_path / 'home/letter.txt'}", "--overwrite"])
    for to in ("hf", "stablehlo", "hf"):
        main([f"--from={with_tokenizer}", f"--out={tmp_path / 'model'}", f"--to={to}", "--overwrite"])
    main([f"--from={with_tokenizer}", f"--out={tmp_path / 'model/exported'}"])
    with pytest.raises(SystemExit, match="model holds the folder exported, and --overwrite would delete all of it"):
        main([f"--from={with_tokenizer}", f"--out={tmp_path / 'model'}", "--overwrite"])


def test_a_file_without_words_to_add_is_refused_as_such(with_tokenizer, tmp_path):
    (tmp_path / "words.txt").write_text("\n \n")
    with pytest.raises(SystemExit, match=r"words\.txt holds no word"):
        main([f"--from={with_tokenizer}", f"--out={tmp_path / 'out'}", f"--add_vocab={tmp_path / 'words.txt'}"])


@pytest.mark.parametrize("to", ["hf", "stablehlo"])
def test_a_tilde_that_the_shell_has_left_is_the_home_directory(to, with_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    main([f"--from={with_tokenizer}", f"--to={to}", "--out=~/new/model"])
    assert f"wrote   {tmp_path / 'new/model'}: " in capsys.readouterr().out
    assert (tmp_path / "new/model/config.json").exists() == (to == "hf")


def test_a_path_without_a_model_is_an_error_message_and_not_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, "."):
        with pytest.raises(SystemExit, match="convert: .*holds no model"):
            main([f"--from={path}", f"--out={tmp_path / 'out'}"])
    with pytest.raises(SystemExit, match="bert-base-uncased does not exist: .*hf download"):
        main(["--from=bert-base-uncased", f"--out={tmp_path / 'out'}"])


def test_stablehlo_gives_the_live_models_outputs_at_any_shape_without_bertjax(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export writes its files with flatbuffers")
    assert convert(GOLDEN, "stablehlo", tmp_path / "out") < 1e-5
    # The loader of the module's docstring, verbatim in what it does.
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    weights = {
        name: np.frombuffer(raw[start:][slice(*e["data_offsets"])], "<f4").reshape(e["shape"])
        for name, e in json.loads(raw[8:start]).items()
        if name != "__metadata__"
    }
    function = jax.export.deserialize((tmp_path / "out" / "model.stablehlo").read_bytes())
    assert set(function.platforms) == {"cpu", "cuda", "tpu"}
    live = load_model(GOLDEN)
    for shape in ((1, 3), (5, 16)):
        ids = np.random.default_rng(0).integers(0, 37, shape).astype(np.int32)
        ours = live(ids, ids * 0 + 1, ids % 2)
        theirs = function.call(weights, ids, ids * 0 + 1, ids % 2)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_an_export_names_its_classes_and_refuses_rows_beyond_its_positions(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export writes its files with flatbuffers")
    model = load_model(GOLDEN, "sequence-classification", reinitialise_head=True)
    export_model(dataclasses.replace(model, labels={0: "no", 1: "yes"}), tmp_path / "out")
    told = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (told["max_length"], told["labels"]) == (16, ["no", "yes"])
    function = jax.export.deserialize((tmp_path / "out" / "model.stablehlo").read_bytes())
    weights = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    ids = np.zeros((1, 17), np.int32)
    with pytest.raises(Exception, match="refining shapes"):
        function.call(weights, ids, ids, ids)


def test_an_unknown_target_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="--to=onnx is not one of hf, stablehlo"):
        convert(tmp_path / "absent", "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
