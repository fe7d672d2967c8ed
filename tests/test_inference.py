"""Prediction on the tiny random model of tests/interop/golden: order, shapes, refusals, tools."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax import inference
from bertjax.interop import load_model
from bertjax.interop.huggingface import write_directory
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import features, predict

GOLDEN = Path(__file__).resolve().parent / "interop" / "golden"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "mat", "."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    golden = load_model(GOLDEN)
    tokenizer = WordPieceTokenizer(WORDS, do_lower_case=True)
    write_directory(path, golden.config, golden.params, "BertForPreTraining", tokenizer)
    return path


@pytest.fixture(scope="module")
def pretrained(directory):
    return load_model(directory)


def head(directory, task):
    return load_model(directory, task, reinitialise_head=True)


def test_fill_mask_ranks_real_tokens_for_every_mask(pretrained):
    answers = inference.fill_mask(pretrained, "the [MASK] sat on the [MASK] .", top_k=4)
    assert len(answers) == 2 and all(len(a) == 4 for a in answers)
    row = inference.make_row(pretrained, "the [MASK] sat on the [MASK] .", None, True)
    ids = np.array([row.ids])
    logits = np.asarray(pretrained(ids, ids * 0 + 1, ids * 0)[0])[0]
    for filled, position in zip(answers, (2, 6), strict=True):
        e = np.exp(logits[position, : len(WORDS)].astype(np.float64))
        assert filled[0].id == e.argmax() and filled[0].token == WORDS[e.argmax()]
        assert filled[0].probability == pytest.approx(e.max() / e.sum(), rel=1e-4)
    with pytest.raises(ValueError, match="no .MASK. in"):
        inference.fill_mask(pretrained, "the cat")


def test_next_sentence_keeps_the_order_whatever_the_batching(pretrained):
    pairs = [("the cat", "sat ."), ("the cats sat on the mat", "the mat ."), ("cat", "cat")]
    together = inference.next_sentence(pretrained, pairs, batch_size=2)
    alone = [inference.next_sentence(pretrained, [p])[0] for p in pairs]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert all(0 < p < 1 for p in together)


def test_batches_hold_every_row_once_padded_to_its_bucket():
    rng = np.random.default_rng(0)
    rows = [inference.Row([7] * n, [0] * n) for n in rng.integers(3, 100, 50)]
    seen = []
    for indices, inputs in inference.batches_by_length(rows, 8, pad_id=0, longest=100):
        assert inputs["input_ids"].shape[0] == 8
        width = inputs["input_ids"].shape[1]
        assert width % 32 == 0 or width == 100
        lengths = inputs["attention_mask"].sum(1)[: len(indices)]
        assert lengths.tolist() == [len(rows[i].ids) for i in indices]
        assert lengths.min() > width - 32
        seen += indices.tolist()
    assert sorted(seen) == list(range(50))


def test_long_texts_are_cut_at_the_longer_side(pretrained):
    row = inference.make_row(pretrained, "cat " * 30, "the mat .")
    assert len(row.ids) == 16
    assert row.types == [0] * 12 + [1] * 4


@pytest.mark.parametrize("many", [1, 500])
def test_rows_of_many_texts_are_those_of_each(pretrained, monkeypatch, many):
    monkeypatch.setattr(inference, "MANY", many)
    texts = ["the cat", ("cat " * 30, "the mat ."), "", ("the", ""), "mat " * 40,
             ("the cats", "sat " * 30)]  # fmt: skip
    for text, row in zip(texts, inference.make_rows(pretrained, texts), strict=True):
        alone = inference.make_row(pretrained, *((text,) if isinstance(text, str) else text))
        assert row.ids.tolist() == alone.ids and row.types.tolist() == alone.types


def test_tags_and_classes_and_answers(directory):
    tags = inference.tag_words(head(directory, "token-classification"),
                               [["the", "cats", "sat"], ["mat"] * 20])
    assert [len(t) for t in tags] == [3, 20]
    assert tags[1][-1] == "O"
    classes = inference.classify(head(directory, "sequence-classification"),
                                 ["the cat", ("the cat", "sat")])
    assert [sum(c.values()) for c in classes] == pytest.approx([1, 1])
    context = "the cats sat on the mat . " * 4
    answer = inference.answer(head(directory, "question-answering"), "the cat", context, stride=4)
    assert context[answer.start : answer.end] == answer.text != ""


def test_features_are_the_hidden_states(directory):
    loaded = load_model(directory, "features")
    (tokens, states), _ = inference.layer_outputs(loaded, ["the cats sat", "mat"], (-1, 0))
    assert tokens == ["[CLS]", "the", "cat", "##s", "sat", "[SEP]"]
    ids = np.array([[2, 5, 6, 7, 8, 3]])
    hidden, _ = loaded(ids, ids * 0 + 1, all_hidden=True)
    np.testing.assert_allclose(states, np.stack([hidden[-1][0], hidden[0][0]]), atol=1e-5)
    mean = inference.sentence_embeddings(loaded, ["the cats sat"])
    np.testing.assert_allclose(mean[0], states[0].mean(0), atol=1e-6)
    with pytest.raises(ValueError, match="no layers"):
        next(inference.layer_outputs(loaded, ["cat"], (7,)))


def test_wrong_models_are_refused(pretrained):
    with pytest.raises(ValueError, match="BertForTokenClassification, this is a BertForPre"):
        inference.tag_words(pretrained, [["cat"]])


def test_the_tools_write_json_lines_and_npz(directory, tmp_path, capsys):
    arguments = [f"--model={directory}", "--task=fill-mask", "--text=the [MASK] .", "--top_k=2"]
    assert predict.main(arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["masks"][0]) == 2
    source = tmp_path / "in.txt"
    source.write_text("the cat\nthe cats\tsat\n")
    common = [f"--model={directory}", f"--file={source}"]
    assert features.main([*common, f"--out={tmp_path / 'a.jsonl'}", "--layers=-1,-2"]) == 0
    lines = [json.loads(x) for x in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [f["token"] for f in lines[1]["features"]][:4] == ["[CLS]", "the", "cat", "##s"]
    assert len(lines[0]["features"][0]["layers"]) == 2
    assert features.main([*common, f"--out={tmp_path / 'b.npz'}", "--pooling=cls"]) == 0
    assert np.load(tmp_path / "b.npz")["embeddings"].shape == (2, 24)
    assert predict.main([f"--model={directory}", "--task=qa", "--text=no tab"]) == 1
    assert "predict:" in capsys.readouterr().err
    jax.clear_caches()
