"""sentencepiece models behind the tokenizer interface."""

import pickle

import pytest
import sentencepiece

from bertjax.tokenization import load_tokenizer
from bertjax.tokenization.sentencepiece import SentencePieceTokenizer
from bertjax.tokenization.train_vocab import wordpiece_pieces

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards box with big jugs".split()
SENTENCES = [" ".join(WORDS[i:] + WORDS[:i]) + "." for i in range(len(WORDS))] * 4


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    def run(name, **options):
        prefix = tmp_path_factory.mktemp("spm") / name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_prefix=str(prefix),
            vocab_size=70,
            model_type="unigram",
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        return prefix.with_suffix(".model")

    return run


@pytest.fixture(scope="module")
def model(train):
    return train(
        "bert",
        pad_id=0,
        pad_piece="[PAD]",
        unk_id=1,
        unk_piece="[UNK]",
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"],
    )


def test_special_tokens_are_found_by_name(model):
    tokenizer = load_tokenizer(model)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert [tokenizer.id_to_token(i) for i in tokenizer.special_ids] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert not set(tokenizer.replacement_ids.tolist()) & set(tokenizer.special_ids)
    assert len(tokenizer.replacement_ids) == tokenizer.vocab_size - 5


def test_every_missing_special_token_is_named_with_the_remedy(train):
    plain = train("plain")  # has <unk> <s> </s>
    with pytest.raises(ValueError, match="pad_token.*mask_token.*control_symbols"):
        load_tokenizer(plain)
    content = train("named", control_symbols=["<p>", "<m>"]).read_bytes()
    named = SentencePieceTokenizer(content, "named.model", {"pad_token": "<p>", "mask_token": "<m>"})
    assert named.id_to_token(named.cls_id) == "<s>"
    assert named.id_to_token(named.mask_id) == "<m>"


def test_ids_are_the_library_s_own(model):
    tokenizer = load_tokenizer(model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for text in SENTENCES[:5]:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(SENTENCES[:5]) == [reference.encode(t) for t in SENTENCES[:5]]
    ids, lengths = tokenizer.encode_flat(SENTENCES[:3])
    assert ids.tolist() == sum(reference.encode(SENTENCES[:3]), [])
    assert lengths.sum() == len(ids)


def test_continuations_do_not_start_with_the_word_mark(model):
    tokenizer = load_tokenizer(model)
    for piece, continues in zip(tokenizer.vocab, tokenizer.is_continuation, strict=True):
        assert continues == (not piece.startswith(("\u2581", "["))), piece


def test_literal_special_tokens_in_text_are_text_unless_asked_for(model):
    tokenizer = load_tokenizer(model)
    text = "the [MASK] fox [SEP]"
    assert not {tokenizer.mask_id, tokenizer.sep_id} & set(tokenizer.encode(text))
    kept = tokenizer.encode(text, keep_special_tokens=True)
    assert kept.count(tokenizer.mask_id) == 1 and kept[-1] == tokenizer.sep_id
    ids, offsets = tokenizer.encode_with_offsets(text, keep_special_tokens=True)
    start, end = offsets[ids.index(tokenizer.mask_id)]
    assert ids == kept and text[start:end] == "[MASK]"
    assert tokenizer.decode(kept) == text


def test_offsets_are_code_points_without_the_space_before(model):
    tokenizer = load_tokenizer(model)
    text = "the  \U0001f4a9 fox dogs"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert "".join(text[a:b] for a, b in offsets) == text.replace(" ", "")
    emoji = next((a, b) for a, b in offsets if "\U0001f4a9" in text[a:b])
    assert emoji == (5, 6)


def test_saved_and_pickled_tokenizers_are_the_same(model, tmp_path):
    tokenizer = load_tokenizer(model)
    tokenizer.save(tmp_path)
    for copy in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.fingerprint == tokenizer.fingerprint
        assert copy.encode(SENTENCES[0]) == tokenizer.encode(SENTENCES[0])


def test_casing_is_the_model_s_and_a_contradiction_is_refused(model, train):
    assert load_tokenizer(model, do_lower_case=False).do_lower_case is False
    with pytest.raises(ValueError, match="do_lower_case=True contradicts do_lower_case=False"):
        load_tokenizer(model, do_lower_case=True)
    folded = train("folded", normalization_rule_name="nmt_nfkc_cf", pad_id=3, control_symbols=["[MASK]"])
    assert load_tokenizer(folded).do_lower_case is True


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "x.model")


def test_pieces_convert_to_those_of_wordpiece():
    pieces = ["<unk>", "<s>", "</s>", "\u2581the", "er", "\u2581d"]
    assert wordpiece_pieces(pieces) == ["the", "##er", "d"]
    assert wordpiece_pieces(["\u2581", "a\u2581b", "<0x0A>", "<", ">"]) == ["##<", "##>"]
