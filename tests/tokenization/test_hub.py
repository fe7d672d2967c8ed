"""tokenizer.json as `tokenizers` runs it, added tokens as transformers matches them, refusals."""

import json
import pickle

import numpy as np
import pytest

from bertjax.data.build import build_store
from bertjax.data.masking import MaskingSpec
from bertjax.data.store import TokenStore
from bertjax.tokenization import WordPieceTokenizer, load_tokenizer
from bertjax.tokenization.hub import HubTokenizer
from tests.fakes import SPECIALS

tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    "the",
    "cat",
    "sat",
    "##s",
    "[",
    "]",
    "e",
    "##1",
    "covid",
    "-",
    "19",
    "1",
    "mask",
    "hello",
    "world",
    "wor",
    "##ld",
    "caf",
    "##e",
    "\u4e2d",
    "a",
    "##b",
    "##c",
    "##d",
]
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}


def token(content, number, **flags):
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
        **flags,
    }


def description(words=WORDS, prefix="##", limit=100, **parts):
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *words])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(name, i, special=True) for i, name in enumerate(SPECIALS)],
        "normalizer": BERT,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": prefix,
            "max_input_chars_per_word": limit,
            "vocab": vocab,
        },
        **parts,
    }


def write(directory, content, config=None, name="tokenizer.json"):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps(content))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def assert_equals_the_library(directory, texts):
    """ids, offsets, batches of `directory` are those of `tokenizers` from its tokenizer.json."""
    ours = load_tokenizer(directory)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_with_offsets(text) == (expected.ids, expected.offsets)
        assert ours.encode(text) == expected.ids
        assert ours.encode_flat([text, text])[0].tolist() == expected.ids * 2
    return ours


def test_plain_bert_is_read_as_bert_s_own_tokenizer(tmp_path):
    ours = assert_equals_the_library(write(tmp_path, description()), ["The cats sat.", "caf\u00e9"])
    assert isinstance(ours, WordPieceTokenizer)
    assert ours.special_ids == (0, 1, 2, 3, 4) and ours.do_lower_case


def test_another_prefix_is_obeyed(tmp_path):
    parts = description(["h", "@@ello", "wor", "@@ld"], "@@")
    ours = assert_equals_the_library(write(tmp_path, parts), ["Hello world", "hhello w"])
    assert ours.tokenize("Hello world") == ["h", "@@ello", "wor", "@@ld"]
    assert ours.is_continuation.tolist() == [False] * 6 + [True, False, True]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": None},
        {"normalizer": {**BERT, "clean_text": False}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, BERT]}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "cat"}, "content": "the"},
                    {"type": "Lowercase"},
                ],
            }
        },
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "BertPreTokenizer"}, {"type": "Digits", "individual_digits": True}],
            }
        },
        {"normalizer": {**BERT, "lowercase": False, "strip_accents": True}},
        {"normalizer": {**BERT, "strip_accents": False, "handle_chinese_chars": False}},
        {
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "[PAD]",
            },
        },
    ],
    ids=str,
)
def test_other_rules_are_obeyed(tmp_path, parts):
    texts = ["The cats sat 19 e11", "CAF\u00c9 \u4e2d\u4e2dA", "a\u200bb \ufb01 the-cat", "", " "]
    assert_equals_the_library(write(tmp_path, description(**parts)), texts)


@pytest.mark.parametrize("limit, text", [(3, "abc abcd"), (100, "a" + "b" * 99), (300, "a" * 301)])
def test_the_longest_word_is_obeyed(tmp_path, limit, text):
    assert_equals_the_library(write(tmp_path, description(limit=limit)), [text])
    # The same in tokenizer_config.json, also beside a vocab.txt.
    directory = write(tmp_path / "config", description(), {"max_input_chars_per_word": 3})
    assert load_tokenizer(directory).tokenize("abc abcd") == ["a", "##b", "##c", "[UNK]"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    tokenizer = load_tokenizer(directory, do_lower_case=True)
    assert tokenizer.encode_flat(["abc abcd \u4e2dabcd"])[0].tolist() == tokenizer.encode("abc abcd \u4e2dabcd")
    assert tokenizer.tokenize("abcd") == ["[UNK]"]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


def test_the_limit_that_the_library_always_writes_means_the_original_s(tmp_path):
    """A known difference: `tokenizers` makes words of 101 to 200 characters [UNK]."""
    ours = load_tokenizer(write(tmp_path, description()))
    assert ours.tokenize("a" + "b" * 150) == ["a"] + ["##b"] * 150
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path, do_lower_case=True).fingerprint == ours.fingerprint


def test_known_differences_of_bert_vocabularies_are_the_original_s(tmp_path):
    """Literal special tokens, private-use characters and a final sigma, as the original."""
    words = ["[", "mask", "]", "a", "##\ue000", "##b", "\u03bf", "##\u03c2", "##\u03c3"]
    ours = load_tokenizer(write(tmp_path, description(words)))
    assert ours.tokenize("[MASK]") == ["[", "mask", "]"]
    assert ours.tokenize("a\ue000b") == ["a", "##\ue000", "##b"]
    assert ours.tokenize("\u039f\u03a3") == ["\u03bf", "##\u03c2"]
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [
        theirs.encode(text, add_special_tokens=False).tokens for text in ("[MASK]", "a\ue000b", "\u039f\u03a3")
    ] == [["[MASK]"], ["a", "##b"], ["\u03bf", "##\u03c3"]]


def test_bpe_and_unigram_are_run_by_the_library(tmp_path):
    for name, model, extra in [
        ("bpe", tokenizers.models.BPE(unk_token="[UNK]"), tokenizers.trainers.BpeTrainer),
        ("unigram", tokenizers.models.Unigram(), tokenizers.trainers.UnigramTrainer),
        ("level", tokenizers.models.WordLevel(unk_token="[UNK]"), tokenizers.trainers.WordLevelTrainer),
    ]:
        theirs = tokenizers.Tokenizer(model)
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        options = {"unk_token": "[UNK]"} if name == "unigram" else {}
        theirs.train_from_iterator(
            ["the cat sat on the mat"] * 9,
            extra(vocab_size=60, special_tokens=SPECIALS, show_progress=False, **options),
        )
        (tmp_path / name).mkdir()
        theirs.save(str(tmp_path / name / "tokenizer.json"))
        ours = assert_equals_the_library(tmp_path / name, ["the cat sat xy", "mat  the"])
        assert isinstance(ours, HubTokenizer)
        assert ours.vocab[0] == "[PAD]" and ours.unk_id == 1
        assert not ours.is_continuation[ours.encode("the")[0]]


ADDED = [
    ("[E1]", {"special": True}),
    ("COVID-19", {"normalized": True}),
    ("left", {"lstrip": True}),
    ("right", {"rstrip": True}),
    ("one", {"single_word": True}),
    ("on", {}),
    ("The", {}),
    ("\u00c9t", {"normalized": True}),
]


def added_description(**parts):
    size = len(SPECIALS) + len(WORDS)
    content = description(**parts)
    content["added_tokens"] += [token(name, size + i, **flags) for i, (name, flags) in enumerate(ADDED)]
    return content


ADDED_TEXTS = [
    "[E1] the cat sat COVID-19",
    "covid-19[E1][e1]",
    "a left left",
    "right  a right.",
    "one onec cone one.",
    "cat that",
    "The the",
    "x \u00e9t \u00c9t et",
    "[E1] ",
    "left",
]


def test_added_tokens_are_matched_first(tmp_path):
    ours = assert_equals_the_library(write(tmp_path, added_description()), ADDED_TEXTS)
    assert ours.tokenize("[E1] the [MASK] sat COVID-19", keep_special_tokens=True) == [
        "[E1]",
        "the",
        "[MASK]",
        "sat",
        "COVID-19",
    ]
    # Without the five, as everywhere: a literal [MASK] in a corpus is text.
    assert ours.tokenize("[E1] [MASK]") == ["[E1]", "[", "mask", "]"]
    assert not set(ours.replacement_ids.tolist()) & {*ours.special_ids, ours.token_to_id("[E1]")}
    assert ours.token_to_id("COVID-19") in ours.replacement_ids
    assert ours.is_continuation.sum() == sum(piece.startswith("##") for piece in ours.vocab)
    assert MaskingSpec.from_tokenizer(ours, 8, whole_word=True).slots == 8


@pytest.mark.parametrize(
    "where", ["added_tokens_decoder", "added_tokens.json", "additional_special_tokens", "extra_special_tokens"]
)
def test_added_tokens_of_every_file_are_matched_first(tmp_path, where):
    write(tmp_path, [*SPECIALS, *WORDS], {"do_lower_case": True})
    (tmp_path / "tokenizer.json").unlink()
    size = len(SPECIALS) + len(WORDS)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    config = {"do_lower_case": True}
    if where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps({"[E1]": size}))
    elif where == "added_tokens_decoder":
        config[where] = {
            "4": {"content": "[MASK]", "special": True},
            str(size): {"content": "[E1]", "lstrip": False, "special": True},
        }
    else:
        config[where] = ["[E1]"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("[E1]the cats") == ["[E1]", "the", "cat", "##s"]
    assert tokenizer.token_to_id("[E1]") == size == tokenizer.vocab_size - 1
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("[E1]the cats") == tokenizer.encode("[E1]the cats")


@pytest.mark.parity
@pytest.mark.parametrize(
    "content",
    [
        description(["h", "@@ello", "wor", "@@ld"], "@@"),
        added_description(),
        description(limit=3),
        description(normalizer=None),
    ],
    ids=["prefix", "added", "limit", "cased"],
)
def test_transformers_reads_what_we_save_of_other_rules_also_beside_a_model(tmp_path, content):
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(write(tmp_path / "a", content))
    ours.save(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    for text in ["Hello world", "the cats abc abcd", *ADDED_TEXTS]:
        ids = ours.encode(text, keep_special_tokens=True)
        assert theirs.encode(text) == [ours.cls_id, *ids, ours.sep_id]


@pytest.mark.parity
def test_transformers_gives_the_same_ids_before_and_after_conversion(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=True)
    theirs.add_tokens(["[E1]", "COVID-19", transformers.AddedToken("left", lstrip=True)])
    theirs.add_special_tokens({"additional_special_tokens": ["<x>"]})
    theirs.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "vocab.txt").exists()
    ours = load_tokenizer(tmp_path / "theirs")
    ours.save(tmp_path / "ours", 128)
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert back.model_max_length == 128
    for text in [*ADDED_TEXTS, "[E1] the [MASK] sat <x>COVID-19"]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, keep_special_tokens=True) == expected
        assert back.encode(text, add_special_tokens=False) == expected


def test_a_tokenizer_of_the_library_survives_pickling_and_saving(tmp_path):
    ours = load_tokenizer(write(tmp_path, added_description(), {"model_max_length": 77}))
    ours.save(tmp_path / "saved", 512)
    for copy in (pickle.loads(pickle.dumps(ours)), load_tokenizer(tmp_path / "saved")):
        assert copy.fingerprint == ours.fingerprint and copy.model_max_length == 77
        assert copy.encode_batch(ADDED_TEXTS) == ours.encode_batch(ADDED_TEXTS)
    other = added_description()
    other["added_tokens"][-1]["single_word"] = True
    assert load_tokenizer(write(tmp_path / "b", other)).fingerprint != ours.fingerprint
    assert ours.encode("\ud800the") == ours.encode("\ufffdthe")  # half a surrogate pair
    assert ours.decode(ours.encode("[E1] the cats")) == "[E1] the cats"
    assert ours.decode([2, *ours.encode("cats"), 3], skip_special_tokens=True) == "cats"
    with pytest.raises(IndexError, match="outside the vocabulary"):
        ours.decode([99])


def test_a_store_of_such_a_tokenizer_holds_its_ids(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "a", added_description()))
    documents = [["[E1] the cat sat", "the cats COVID-19 sat", "the world"] for _ in range(12)]
    manifest = build_store(None, tokenizer, tmp_path / "store", documents=documents)
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    store = TokenStore(tmp_path / "store", "train")
    again = store.load_tokenizer()
    assert again.fingerprint == tokenizer.fingerprint
    ids = next(iter(store.documents()))[0].tolist()
    assert again.decode(ids) == "[E1] the cat sat"
    assert ids == tokenizer.encode(documents[0][0])


def test_pieces_that_do_not_tell_words_refuse_whole_word_masking_only(tmp_path):
    content = description()
    content["model"] = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": content["model"]["vocab"]}
    tokenizer = load_tokenizer(write(tmp_path, content))
    assert tokenizer.is_continuation is None
    assert MaskingSpec.from_tokenizer(tokenizer, 8).is_continuation is None
    with pytest.raises(ValueError, match="whole_word masking needs is_continuation"):
        MaskingSpec.from_tokenizer(tokenizer, 8, whole_word=True)


def template(single, pair):
    def parts(names):
        return [
            {"SpecialToken": {"id": name, "type_id": segment}}
            if name in SPECIALS
            else {"Sequence": {"id": name, "type_id": segment}}
            for name, segment in names
        ]

    return {
        "type": "TemplateProcessing",
        "single": parts(single),
        "pair": parts(pair),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(SPECIALS)},
    }


ONE = [("[CLS]", 0), ("A", 0), ("[SEP]", 0)]
TWO = [*ONE, ("B", 1), ("[SEP]", 1)]


@pytest.mark.parametrize(
    "processor",
    [
        template(ONE, TWO),
        {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Sequence", "processors": [template(ONE, TWO)]},
    ],
)
def test_bert_s_template_is_accepted(tmp_path, processor):
    tokenizer = load_tokenizer(write(tmp_path, description(post_processor=processor)))
    assert isinstance(tokenizer, WordPieceTokenizer)


@pytest.mark.parametrize(
    "processor",
    [
        template([("A", 0), ("[SEP]", 0)], TWO),
        template(ONE, [*ONE, ("B", 2), ("[SEP]", 2)]),
        template([("[CLS]", 1), ("A", 0), ("[SEP]", 0)], TWO),
        template(ONE, [*ONE, ("A", 0), ("B", 1), ("[SEP]", 1)]),
        template(ONE, [("A", 0), ("B", 1)]),
        template([*ONE, ("[SEP]", 0)], TWO),
        template([("[SEP]", 0), ("A", 0), ("[CLS]", 0)], TWO),
        {"type": "Other"},
        {"type": "BertProcessing", "sep": ["[SEP]", 9], "cls": ["[CLS]", 2]},
        {"type": "TemplateProcessing"},
    ],
)
def test_a_template_that_no_layout_describes_is_refused(tmp_path, processor):
    with pytest.raises(ValueError, match="tokenizer.json: post_processor"):
        load_tokenizer(write(tmp_path, description(post_processor=processor)))


def changed(**model):
    content = description()
    return {**content, "model": {**content["model"], **model}}


@pytest.mark.parametrize(
    "content, message",
    [
        ({**description(), "extra": 1}, "unknown keys extra"),
        ({"a": 1}, 'it has no "model"'),
        ({"model": 5}, 'it has no "model"'),
        (changed(type="BPE", dropout=0.1, merges=[]), "model.dropout=0.1"),
        (changed(vocab={"a": "b"}), "the id of 'a' is 'b'"),
        (changed(vocab=5), "must map pieces"),
        (changed(vocab={"a": 7}), "no piece has the id 5"),
        (changed(vocab=[["a"]]), "pairs"),
        (changed(unk_token=["a"]), "model.unk_token is"),
        (changed(unk_token="<u>"), "lacks the special tokens unk_token='<u>'"),
        (changed(max_input_chars_per_word="9"), "max_input_chars_per_word='9'"),
        (changed(max_input_chars_per_word=0), "max_input_chars_per_word=0"),
        (description(normalizer={**BERT, "handle_chinese_chars": None}), "tokenizer.json: "),
        (changed(type="Strange"), "tokenizer.json: "),
        (changed(continuing_subword_prefix=5), "json: "),
        (description(normalizer={"type": "Other"}), "tokenizer.json: "),
        (description(normalizer={**BERT, "lowercase": "yes"}), "tokenizer.json: "),
        (description(normalizer=[]), "normalizer must be an object"),
        (
            description(
                pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}
            ),
            "tokenizer.json: ",
        ),
        (description(added_tokens={}), "added_tokens must be a list"),
        (description(added_tokens=[5]), "an added token must be an object"),
        (description(added_tokens=[token("x", 99)]), "no piece has the id"),
        (description(added_tokens=[token("the", 7)]), "'the' has the id 7, which is 5"),
        (description(added_tokens=[token("x", 5)]), "'x' has the id 5, which is that of 'the'"),
        (description(added_tokens=[token("", 29)]), "must be a token"),
        (description(added_tokens=[token("x", 29), token("x", 29, rstrip=True)]), "rstrip of the"),
        (description(added_tokens=[token("x", 29, lstrip=1)]), "lstrip of the added token 'x'"),
        (description(truncation={"direction": "Left"}), "truncation.direction=Left"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_the_file(tmp_path, content, message):
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(write(tmp_path, content))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder must map ids to tokens"),
        ({"added_tokens_decoder": {"29": 5}}, "an added token must be an object"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "the id of the added token 'y' is 'x'"),
        ({"added_tokens_decoder": {"4": {"content": "<m>"}}}, "which is that of '.MASK.'"),
        ({"additional_special_tokens": 5}, "additional_special_tokens must be a list"),
        ({"mask_token": 5}, "mask_token is 5"),
        ({"mask_token": {"content": ["a"]}}, "mask_token is"),
        ({"never_split": ["COVID-19"]}, "never_split="),
        ({"never_split": 5}, "never_split must be"),
        ({"do_subword_tokenize": False}, "another tokenization"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "auto_map"),
        ({"model_max_length": "long"}, "model_max_length is 'long'"),
        ({"model_max_length": 0}, "model_max_length is 0"),
        ({"unk_token": "[CLS]"}, "unk_token='.CLS.', but .*tokenizer.json has '.UNK.'"),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused_with_the_file(tmp_path, config, message):
    with pytest.raises(ValueError, match=f"tokenizer_config.json: .*{message}"):
        load_tokenizer(write(tmp_path, description(), config))


def test_usual_settings_are_harmless_and_strange_ones_are_said(tmp_path, caplog):
    usual = {
        "never_split": None,
        "name_or_path": "x",
        "padding_side": "right",
        "model_max_length": 1e30,
        "special_tokens_map_file": None,
        "do_basic_tokenize": True,
        "tokenizer_class": "BertTokenizer",
        "clean_up_tokenization_spaces": True,
    }
    assert load_tokenizer(write(tmp_path, description(), usual)).model_max_length is None
    assert not caplog.text
    load_tokenizer(write(tmp_path, description(), {"split_on_emoji": True}))
    assert "tokenizer_config.json" in caplog.text and "split_on_emoji" in caplog.text


def test_tokenizer_config_goes_before_tokenizer_json_as_in_transformers_and_it_is_said(tmp_path, caplog):
    write(tmp_path, description(["the", "The"]), {"do_lower_case": False})
    assert load_tokenizer(tmp_path).tokenize("The the") == ["The", "the"]
    assert "do_lower_case=False of" in caplog.text
    assert "lowercase=True of tokenizer.json" in caplog.text
    caplog.clear()
    write(
        tmp_path,
        description(["the"], normalizer={**BERT, "strip_accents": False}),
        {"do_lower_case": True, "strip_accents": None},
    )
    assert load_tokenizer(tmp_path).strip_accents is None and "strip_accents=None" in caplog.text
    caplog.clear()  # a vocab.txt has no rules of its own to go before
    WordPieceTokenizer([*SPECIALS, "the"], True, None, False).save(tmp_path / "saved")
    assert not load_tokenizer(tmp_path / "saved").tokenize_chinese_chars and not caplog.text


def test_a_list_of_pieces_under_the_name_of_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("\n".join(SPECIALS))
    with pytest.raises(ValueError, match="tokenizer.json is not valid JSON.*vocab.txt"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_another_class_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    for name in ("EsmTokenizer", "BertweetTokenizer", 5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(ValueError, match="tokenizer_class=.* does not read vocab.txt as BERT"):
            load_tokenizer(tmp_path)


def test_two_vocabularies_that_disagree_are_refused(tmp_path):
    write(tmp_path, description())
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]))
    assert load_tokenizer(tmp_path).encode("the") == [5]
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "cat", "the", *WORDS[2:]]))
    with pytest.raises(ValueError, match="vocab.txt and tokenizer.json disagree: 'cat' is on"):
        load_tokenizer(tmp_path)


def test_an_argument_must_agree_with_the_file_s_own_rules(tmp_path):
    parts = {"normalizer": {"type": "Lowercase"}}
    write(tmp_path / "a", description(**parts))
    assert load_tokenizer(tmp_path / "a", do_lower_case=True).do_lower_case
    with pytest.raises(ValueError, match="do_lower_case=False contradicts"):
        load_tokenizer(tmp_path / "a", do_lower_case=False)
    write(tmp_path / "a", description(**parts), {"do_lower_case": False})
    with pytest.raises(ValueError, match="tokenizer_config.json: do_lower_case=False contradicts"):
        load_tokenizer(tmp_path / "a")


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" * 10_000


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("content", [DEEP, f'{{"a": {DEEP}}}', f'{{"a": {LONG}}}', "[1]", "{", "5"])
def test_hostile_json_is_refused_with_the_file(tmp_path, name, content):
    write(tmp_path, description())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (json.dumps(description(), indent=1), "a tokenizer.json: name it tokenizer.json"),
        (json.dumps({"[PAD]": 0, "a": 1}, indent=1), "JSON, not a list of pieces"),
        ("<unk>\t0\n<s>\t0\n</s>\t0\n\u2581the\t-3.2\na\t-4\n", "give the .model file beside it"),
        ("#version: 0.2\nt h\n", "merges.txt"),
        ("version https://git-lfs.github.com/spec/v1\n", "LFS"),
        ("<!DOCTYPE html>\n<html>", "a web page"),
        (b"PK\x03\x04\x00", "a zip archive"),
        ("[PAD]\na".encode("utf-16"), "UTF-16"),
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "spiece.model"),
    ],
)
def test_another_file_under_the_name_of_vocab_txt_is_named(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"vocab.txt is .*{message}"):
        load_tokenizer(tmp_path)


def test_the_longest_input_is_kept_or_is_the_model_s(tmp_path):
    write(tmp_path, description(), {"model_max_length": 128})
    for length, expected in ((512, 128), (64, 64), (None, 128)):
        load_tokenizer(tmp_path).save(tmp_path / "saved", length)
        assert load_tokenizer(tmp_path / "saved").model_max_length == expected
    tokenizer = WordPieceTokenizer([*SPECIALS, "a"], True)
    tokenizer.save(tmp_path / "new", 512)
    assert json.loads((tmp_path / "new/tokenizer_config.json").read_text())["model_max_length"] == 512
    tokenizer.model_max_length = 99
    for copy in (pickle.loads(pickle.dumps(tokenizer)), tokenizer.extended(["b"])):
        assert copy.model_max_length == 99
    assert np.array_equal(tokenizer.extended(["##b"]).is_continuation, [False] * 6 + [True])
