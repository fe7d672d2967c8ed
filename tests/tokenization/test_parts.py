"""Texts that are cut into parts and looked up have the ids that `tokenizers` gives to the whole text."""

import json
import random

import numpy as np
import pytest

from bertjax.tokenization import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers  # noqa: E402

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
NAMES = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
SPLIT, BYTES = pre_tokenizers.WhitespaceSplit, pre_tokenizers.ByteLevel
MODERN = pre_tokenizers.Split(
    tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"
)


def metaspace(scheme: str) -> pre_tokenizers.Metaspace:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


# name -> (model, normalizer, pre-tokenizer, whether texts are cut)
KINDS = {
    "GPT-2": ("bpe", None, BYTES(add_prefix_space=False), True),
    "with a prefix": ("bpe", normalizers.NFC(), BYTES(add_prefix_space=True), True),
    "lower case": ("bpe", normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]), BYTES(), True),
    "compatible bytes": ("bpe", normalizers.NFKC(), BYTES(), False),
    "own pattern": ("bpe", None, pre_tokenizers.Sequence([MODERN, BYTES(use_regex=False)]), False),
    "XLM-R": ("unigram", normalizers.NFKC(), pre_tokenizers.Sequence([SPLIT(), metaspace("always")]), True),
    "marks alone": ("unigram", normalizers.NFKC(), metaspace("always"), True),
    "first": ("unigram", None, metaspace("first"), True),
    "never": ("unigram", normalizers.NFC(), metaspace("never"), True),
}
COMMON = [*"aebtdsmvrlx", *"AT09'.,-([|", " ", " ", " ", " the", "'s", "'ll", " don't", " 12", "<s>", "|||", "; "]
# Blanks of other kinds, marks, what combines, becomes ASCII, or has a blank within once it is normalized.
ODD = [
    *"\t\n\u00a0\u2003\u0120\u2581\u0301\u0338\u037e\u1fef\u212a\u00a8\u203e\u200b\u0600\u4e2d\U0001f600e\u0301\x01\x1f"
]


def drawn(count: int, seed: int) -> list[str]:
    random_of = random.Random(seed)
    texts = ["", " ", "  ", "a", " a", "a ", "a  b", " a b", "'s it's 's", "a\u2581b \u2581c", "x \u203e y", "\u212a k"]
    for _ in range(count):
        letters = COMMON if random_of.random() < 0.5 else COMMON + ODD
        texts.append("".join(random_of.choices(letters, k=random_of.randint(1, 30))))
    return texts


def trained(kind: str, directory) -> None:
    model, normalizer, splits, _ = KINDS[kind]
    library = Tokenizer(models.BPE() if model == "bpe" else models.Unigram())
    library.normalizer, library.pre_tokenizer = normalizer, splits
    made = {"vocab_size": 400, "show_progress": False}
    if model == "bpe":
        trainer = trainers.BpeTrainer(initial_alphabet=BYTES.alphabet(), special_tokens=SPECIALS, **made)
    else:
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **made)
    library.train_from_iterator([" ".join(drawn(300, 1))], trainer)
    if model == "unigram":
        learnt = [tuple(entry) for entry in json.loads(library.to_str())["model"]["vocab"] if entry[0] not in SPECIALS]
        library.model = models.Unigram([*((piece, 0.0) for piece in SPECIALS), *learnt], SPECIALS.index("<unk>"))
        library.add_special_tokens(SPECIALS)
    library.add_tokens([tokenizers.AddedToken(token, normalized=True) for token in ("|||", "   ")])
    directory.mkdir()
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(NAMES))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text(tmp_path, kind):
    trained(kind, tmp_path / "tokenizer")
    ours = load_tokenizer(tmp_path / "tokenizer")
    library = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    texts = [text.replace("<s>", "<t>") for text in drawn(3000, 2)]
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    for _ in range(2):  # new parts, and known ones
        ids, lengths = ours.encode_flat(texts)
        rows = np.split(ids, np.cumsum(lengths)[:-1])
        assert [row.tolist() for row in rows] == expected
    assert ours.encode_batch(texts) == expected
    assert (len(ours._cache) > 0) == KINDS[kind][3]


def test_what_does_not_fit_into_the_cache_is_found_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("bertjax.tokenization.hub._CACHED_WORDS", 5)
    trained("GPT-2", tmp_path / "tokenizer")
    ours = load_tokenizer(tmp_path / "tokenizer")
    texts = drawn(200, 3) + ["a" * 60 + " the"]
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    assert len(ours._cache) <= 5
