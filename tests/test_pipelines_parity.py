"""Predictions beside transformers' pipelines on the same model: what a user would compare."""

import pytest

from bertjax import inference
from bertjax.interop import load_model

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat ##s ##ry sat on mat , . ' who where ? é".split()
TEXTS = ["The cats sat.", "on the mat, who?", "cat", "Where's the unknown cat sat on?", ""]
SENTENCES = [["The", "catsry", "sat"], ["unknownword", "on", "the", "mats", "."], ["cats"]]

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def transformers():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return pytest.importorskip("transformers")


def model_of(transformers, directory, kind, labels=(), **config):
    """A random model with sharp opinions, with its tokenizer, in a directory."""
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    transformers.BertTokenizer(str(directory / "vocab.txt")).save_pretrained(directory)
    if labels:
        config |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {name: number for number, name in enumerate(labels)},
        }
    made = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        **config,
    )
    getattr(transformers, kind)(made).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("problem", ("single_label_classification", "multi_label_classification", "regression"))
@pytest.mark.parametrize("pairs", (False, True))
def test_classes_and_values(transformers, tmp_path, problem, pairs):
    labels = ("score",) if problem == "regression" else ("good", "bad", "ugly")
    path = model_of(transformers, tmp_path / "m", "BertForSequenceClassification", labels, problem_type=problem)
    # An empty second text is a segment of its own here, as in the original; transformers drops it.
    texts = list(zip(TEXTS[1:], TEXTS[-2::-1], strict=True)) if pairs else TEXTS
    asked = [{"text": a, "text_pair": b} for a, b in texts] if pairs else TEXTS
    expected = transformers.pipeline("text-classification", path, top_k=None)(asked)
    found = inference.classify(load_model(path), texts)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx({one["label"]: one["score"] for one in theirs}, abs=1e-5)


def test_tags(transformers, tmp_path):
    path = model_of(transformers, tmp_path / "m", "BertForTokenClassification", ("O", "B-X", "I-X", "B-Y", "I-Y"))
    pipeline = transformers.pipeline("token-classification", path, ignore_labels=[])
    found = inference.tag_words(load_model(path), SENTENCES)
    tags = set()
    for words, ours in zip(SENTENCES, found, strict=True):
        text = " ".join(words)
        starts = [text.index(word) for word in words]
        theirs = {one["start"]: one["entity"] for one in pipeline(text)}
        assert ours == [theirs[start] for start in starts]
        tags |= set(ours)
    assert len(tags) > 1


def test_answers(transformers, tmp_path):
    """transformers 5 has no pipeline for questions: the best span of its logits, by brute force."""
    import torch

    path = model_of(transformers, tmp_path / "m", "BertForQuestionAnswering")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    theirs = transformers.BertForQuestionAnswering.from_pretrained(path).eval()
    context = "The cats sat on the mat, where the cat , on the mat . Who sat on the cats' mat ?"
    for question in ("who sat?", "Where's the cat", "mat"):
        encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            output = theirs(**encoded)
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        passage = [i for i, segment in enumerate(encoded["token_type_ids"][0]) if segment][:-1]
        score, first, last = max((starts[i] + ends[j], i, j) for i in passage for j in passage if 0 <= j - i < 5)
        ours = inference.answer(load_model(path), question, context, max_answer_tokens=5)
        assert (ours.start, ours.end) == (offsets[first][0], offsets[last][1])
        assert ours.text == context[ours.start : ours.end]
        assert ours.score == pytest.approx(score, abs=1e-4)
