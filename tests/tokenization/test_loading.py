"""Loading from disk: casing beside the vocabulary, layouts of others, and what is refused."""

import json
import logging

import pytest

from bertjax.tokenization import WordPieceTokenizer, check_casing_matches_name, load_tokenizer
from tests.fakes import SPECIALS

CASED = [*SPECIALS, "It", "is", "May", "1st"]
UNCASED = [*SPECIALS, "it", "is", "may", "1st"]


def write_vocab(directory, vocab, config=None):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_stored_casing_is_used_when_none_is_given(tmp_path):
    write_vocab(tmp_path, CASED, {"do_lower_case": False})
    for path in (tmp_path, tmp_path / "vocab.txt"):
        assert load_tokenizer(path).tokenize("It is May 1st") == ["It", "is", "May", "1st"]


@pytest.mark.parametrize("stored", [True, False])
def test_an_argument_that_contradicts_the_stored_casing_is_refused(tmp_path, stored):
    write_vocab(tmp_path, CASED, {"do_lower_case": stored})
    message = f"do_lower_case={not stored} contradicts do_lower_case={stored} stored in .*config"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path, do_lower_case=not stored)
    assert load_tokenizer(tmp_path, do_lower_case=stored).do_lower_case is stored


@pytest.mark.parametrize(
    "name, lower",
    [
        ("cased_L-12_H-768_A-12", False),
        ("uncased_L-12_H-768_A-12", True),
        ("wwm_cased_L-24_H-1024_A-16", False),
        ("multi_cased_L-12_H-768_A-12", False),
        ("multilingual_L-12_H-768_A-12", True),
        ("chinese_L-12_H-768_A-12", True),
        ("uncased_L-2_H-128_A-2", True),
    ],
)
def test_google_directories_tell_their_casing_and_refuse_the_other(tmp_path, name, lower):
    directory = write_vocab(tmp_path / name, UNCASED)
    (directory / "bert_config.json").write_text("{}")
    assert load_tokenizer(directory).do_lower_case is lower
    assert load_tokenizer(directory, do_lower_case=lower).do_lower_case is lower
    with pytest.raises(ValueError, match=f"do_lower_case={not lower} contradicts.*{name}"):
        load_tokenizer(directory, do_lower_case=not lower)
    with pytest.raises(ValueError, match=f"do_lower_case={not lower} contradicts.*{name}"):
        load_tokenizer(directory / "vocab.txt", do_lower_case=not lower)
    with pytest.raises(ValueError, match=name):
        check_casing_matches_name(directory / "bert_model.ckpt", not lower)
    check_casing_matches_name(directory / "bert_model.ckpt", lower)
    write_vocab(directory, UNCASED, {"do_lower_case": not lower})
    with pytest.raises(ValueError, match=name):
        load_tokenizer(directory)


def test_a_name_gives_the_casing_unless_it_is_stored(tmp_path):
    directory = write_vocab(tmp_path / "bert-base-cased", UNCASED)
    assert load_tokenizer(directory).do_lower_case is False
    with pytest.raises(ValueError, match="tokenizer_config.json"):
        load_tokenizer(directory, do_lower_case=True)
    write_vocab(directory, UNCASED, {"do_lower_case": True})
    assert load_tokenizer(directory).do_lower_case is True


@pytest.mark.parametrize("vocab, lower", [(CASED, False), (UNCASED, True)])
def test_without_any_record_the_pieces_tell_the_casing_and_it_is_said(tmp_path, caplog, vocab, lower):
    write_vocab(tmp_path / "x", vocab)
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(tmp_path / "x").do_lower_case is lower
    assert f"do_lower_case={lower}" in caplog.text
    assert load_tokenizer(tmp_path / "x", do_lower_case=not lower).do_lower_case is not lower


def test_every_option_survives_saving(tmp_path):
    vocab = ["a", "<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    tokenizer = WordPieceTokenizer(
        vocab,
        False,
        True,
        False,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
    )
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.special_ids == (1, 2, 3, 4, 5)


def test_hugging_face_names_written_as_objects_are_read(tmp_path):
    write_vocab(tmp_path, CASED, {"do_lower_case": False, "mask_token": {"content": "[MASK]", "lstrip": False}})
    assert load_tokenizer(tmp_path).mask_id == 4


@pytest.mark.parametrize(
    "content, message",
    [
        ("a\nb\na\n", "line 3 repeats 'a' of line 1"),
        ("a\n\nb\n", "line 2 is empty"),
        ("a\nb\n\n", "line 3 is empty"),
        ("", "line 1 is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / "vocab.txt", do_lower_case=True)


def test_only_line_feeds_separate_pieces(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*SPECIALS, "a\u2028b", "\u0085x"]).encode())
    assert load_tokenizer(tmp_path, do_lower_case=False).vocab == (*SPECIALS, "a\u2028b", "x")


def test_pieces_of_white_space_keep_their_lines(tmp_path):
    write_vocab(tmp_path, [*UNCASED, "\u2028", "\u3000", "end"], {"do_lower_case": True})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab[-3:] == ("\u2028", "\u3000", "end")
    assert tokenizer.encode("it\u2028\u3000is") == [5, 6]


def test_special_names_of_old_directories_are_found(tmp_path):
    names = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": {"content": "<mask>"},
    }
    write_vocab(tmp_path, ["a", "<mask>", "</s>", "<s>", "<unk>", "<pad>"], {"do_lower_case": True})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert load_tokenizer(tmp_path).special_ids == (5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    "setting", [{"word_tokenizer_type": "mecab"}, {"subword_tokenizer_type": "character"}, {"do_basic_tokenize": False}]
)
def test_other_tokenizations_are_refused(tmp_path, setting):
    write_vocab(tmp_path, UNCASED, {"do_lower_case": True, **setting})
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* another tokenization"):
        load_tokenizer(tmp_path)


def test_home_and_a_byte_order_mark_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_vocab(tmp_path / "v", CASED)
    (tmp_path / "v" / "tokenizer_config.json").write_text('\ufeff{"do_lower_case": false}')
    assert load_tokenizer("~/v").tokenize("It") == ["It"]


def test_missing_special_tokens_are_listed_at_load(tmp_path):
    write_vocab(tmp_path, ["[PAD]", "<unk>", "[CLS]", "[SEP]", "a"])
    with pytest.raises(ValueError, match=r"unk_token='\[UNK\]', mask_token='\[MASK\]'"):
        load_tokenizer(tmp_path, do_lower_case=True)


def test_an_object_that_is_no_path_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"object.* is no path of a tokenizer; .* save_pretrained\(DIR\)"):
        load_tokenizer(object())  # as a tokenizer of transformers in memory


def test_a_place_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a directory nor a file"):
        load_tokenizer(tmp_path / "nothing")


def test_stored_values_of_a_wrong_type_are_refused(tmp_path):
    write_vocab(tmp_path, CASED, {"do_lower_case": "False"})
    with pytest.raises(ValueError, match="must be true or false"):
        load_tokenizer(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("lower, strip", [(True, None), (True, False), (False, None), (False, True)])
def test_transformers_reads_what_we_save_and_we_read_what_it_saves(tmp_path, lower, strip):
    transformers = pytest.importorskip("transformers")
    letters = [chr(c) for c in range(65, 123) if chr(c).isalpha()]
    vocab = [*SPECIALS, *letters, *(f"##{c}" for c in letters), "\u00e9", "##\u00e9", "\u4e2d", "."]
    ours = WordPieceTokenizer(vocab, lower, strip)
    ours.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    texts = ["Hello W\u00f6rld.", "caf\u00e9 \u00c9t\u00e9 \u4e2d.", "na\u0069\u0308ve ABC.abc"]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_tokenizer(tmp_path / "theirs")
    assert back.vocab == ours.vocab
    assert [back.encode(text) for text in texts] == [ours.encode(text) for text in texts]
    # Older exports keep the options only in tokenizer.json.
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path / "theirs")
    assert (bare.do_lower_case, bare.encode(texts[1])) == (lower, ours.encode(texts[1]))
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path / "theirs", do_lower_case=not lower)


@pytest.mark.real_data
def test_original_vocabularies_load_with_their_casing(shared_data):
    for casing, size in (("uncased", 30522), ("cased", 28996)):
        tokenizer = load_tokenizer(shared_data / "vocab" / f"bert-base-{casing}-vocab.txt")
        assert tokenizer.vocab_size == size
        assert tokenizer.do_lower_case is (casing == "uncased")
        assert tokenizer.special_ids == (0, 100, 101, 102, 103)
