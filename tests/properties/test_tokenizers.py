"""tokenizer.json and tokenizer_config.json: ids and offsets are those of `tokenizers` from the same
file, or the file is refused.

The texts leave out what the original does otherwise on purpose: literal special tokens, private-use
and unassigned characters, a final sigma, words of over 100 characters.
"""

import copy
import io
import json
import random
import unicodedata

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tokenization import load_tokenizer
from tests.fakes import SPECIALS

tokenizers = pytest.importorskip("tokenizers")

ATOMS = [
    "a",
    "b",
    "ab",
    "Ab",
    "the",
    "caf",
    "\u00e9",
    "e\u0301",
    "\u0130",
    "\u00df",
    "\u4e2d",
    "\u3042",
    "\u304c",
    "\ud55c",
    "\u0915\u0941",
    "\U0001f4a9",
    "\ufb01",
    "19",
    "1",
    "-",
    ".",
    "[",
    "]",
    "#",
    "@",
    "$",
    "\u2014",
    "\x00",
    "\x07",
    "\u200b",
    "\xad",
    "\ufffd",
    "\t",
    "\n",
    " ",
    " ",
    " ",
    "  ",
    "\xa0",
    "\u3000",
    "\u2028",
    "E1",
    "[E1]",
    "covid-19",
]
WORDS = [atom for atom in ATOMS if not atom.isspace()]
TEXTS = st.lists(st.sampled_from(ATOMS), max_size=12).map("".join)
FLAGS = ["single_word", "lstrip", "rstrip", "normalized", "special"]
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
ONE = [
    {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
    {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
]
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": ONE,
    "pair": [*ONE, {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
    "special_tokens": {
        "[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
        "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]},
    },
}

booleans = st.booleans()
bert_normalizers = st.fixed_dictionaries(
    {
        "type": st.just("BertNormalizer"),
        "clean_text": st.sampled_from([True, True, True, False]),
        "handle_chinese_chars": booleans,
        "strip_accents": st.sampled_from([None, True, False]),
        "lowercase": booleans,
    }
)
simple_normalizers = st.one_of(
    bert_normalizers,
    st.sampled_from(
        [
            {"type": "NFC"},
            {"type": "NFKC"},
            {"type": "NFD"},
            {"type": "Lowercase"},
            {"type": "StripAccents"},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Prepend", "prepend": "a"},
            {"type": "Other"},
            {"type": "Replace", "pattern": {"String": "a"}, "content": "b "},
        ]
    ),
)
normalizers = st.one_of(
    st.just(BERT),
    bert_normalizers,
    st.none(),
    simple_normalizers,
    st.lists(simple_normalizers, max_size=3).map(lambda steps: {"type": "Sequence", "normalizers": steps}),
)
simple_splits = st.sampled_from(
    [
        {"type": "BertPreTokenizer"},
        {"type": "Whitespace"},
        {"type": "WhitespaceSplit"},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    ]
)
splits = st.one_of(
    st.just({"type": "BertPreTokenizer"}),
    st.none(),
    simple_splits,
    st.lists(simple_splits, max_size=2).map(lambda steps: {"type": "Sequence", "pretokenizers": steps}),
)
added_tokens = st.lists(
    st.tuples(
        st.sampled_from(["[E1]", "covid-19", "COVID-19", "a", "the", "Ab", "\u00e9", " b", "\u4e2d", "[MASK]"]),
        st.lists(st.sampled_from(FLAGS), unique=True),
        st.integers(0, 3),
    ),
    max_size=4,
)
values = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        5,
        2.5,
        10**30,
        "",
        "a",
        "##",
        "[UNK]",
        [],
        {},
        ["a"],
        {"a": 1},
        [["a", 0.5]],
        {"type": "BPE"},
    ]
)


@st.composite
def descriptions(draw):
    prefix = draw(st.sampled_from(["##", "##", "##", "@@", ""]))
    choice = draw(st.randoms(use_true_random=True))  # one draw: many make an example slow
    pieces = [
        choice.choice(["", "", prefix, prefix, "\u2581"]) + choice.choice([atom, atom.lower()])
        for atom in choice.choices(WORDS, k=60)
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*SPECIALS, *pieces]))}
    added = [(name, ["special"], 0) for name in SPECIALS] if draw(booleans) else []
    entries = []
    for name, flags, shift in [*added, *draw(added_tokens)]:
        number = vocab.get(name, len(vocab) + sum(e["content"] not in vocab for e in entries))
        entries.append({"id": number + (shift == 3), "content": name, **{flag: flag in flags for flag in FLAGS}})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "normalizer": draw(normalizers),
        "pre_tokenizer": draw(splits),
        "post_processor": draw(st.sampled_from([None, None, TEMPLATE])),
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": prefix,
            "max_input_chars_per_word": draw(st.sampled_from([100, 100, 2, 5, 250])),
            "vocab": vocab,
        },
    }


ROBERTA = {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2], "trim_offsets": True}
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@st.composite
def other_descriptions(draw):
    """Byte-level and other BPE, Unigram and WordLevel, with the layouts of RoBERTa and ModernBERT."""
    content = draw(descriptions())
    choice = draw(st.randoms(use_true_random=True))
    kind = draw(st.sampled_from(["BPE", "BPE", "Unigram", "WordLevel"]))
    marks = ["", "\u2581", "\u0120"]
    singles = [*BYTES, "\u2581", *dict.fromkeys("".join(WORDS))]
    merges = []
    for _ in range(40):  # any two pieces that are there already
        known = [*singles, *("".join(pair) for pair in merges)]
        merges.append([choice.choice(known), choice.choice(known)])
    pieces = [choice.choice(marks) + choice.choice(WORDS) for _ in range(40)]
    words = [*singles, *("".join(pair) for pair in merges)] if kind == "BPE" else [*singles[::2], *pieces]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*SPECIALS, *words]))}
    for entry in content["added_tokens"]:
        if entry["content"] in vocab:
            entry["id"] = vocab[entry["content"]]
    new = [entry for entry in content["added_tokens"] if entry["content"] not in vocab]
    for number, entry in enumerate({entry["content"]: entry for entry in new}.values(), len(vocab)):
        entry["id"] = number
    if kind == "Unigram":
        scores = [[piece, -1.0 - choice.random() * 9] for piece in vocab]
        model = {"unk_id": 1, "vocab": scores, "byte_fallback": False}
    elif kind == "BPE":
        unknown = draw(st.sampled_from([None, "[UNK]"]))
        model = {"unk_token": unknown, "vocab": vocab, "merges": merges, "fuse_unk": draw(booleans)}
        model["ignore_merges"] = draw(booleans)
    else:
        model = {"unk_token": "[UNK]", "vocab": vocab}
    roberta = ROBERTA | {"add_prefix_space": draw(booleans)}
    modern = copy.deepcopy(TEMPLATE)
    for part in modern["pair"]:
        next(iter(part.values()))["type_id"] = 0
    return content | {
        "model": {"type": kind, **model},
        "post_processor": draw(st.sampled_from([None, TEMPLATE, roberta, modern])),
    }


def places(value, path=()):
    """All (path) of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@st.composite
def damages(draw):
    """A description in which one value is another, or gone."""
    content = copy.deepcopy(draw(descriptions()))
    paths = [path for path in places(content) if path and path[:2] != ("model", "vocab")]
    path = draw(st.sampled_from([*paths, ("model", "vocab"), ("model", "vocab", "[SEP]")]))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if draw(booleans) and isinstance(inner, dict):
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw(values)
    return content


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"


def check(path, content, texts):
    path.write_text(json.dumps(content))
    try:
        ours = load_tokenizer(path)
    except ValueError as error:
        assert str(path.parent) in str(error)
        return
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    assert {piece: i for i, piece in enumerate(ours.vocab)} == theirs.get_vocab()
    for text in texts:
        try:
            expected = theirs.encode(text, add_special_tokens=False)
        except Exception:
            with pytest.raises(ValueError):
                ours.encode(text)
            continue
        assert ours.encode_with_offsets(text) == (expected.ids, expected.offsets)
        assert ours.encode(text) == expected.ids
        assert ours.encode_batch([text, text]) == [expected.ids] * 2
    if content["post_processor"] is not None:
        one, two = theirs.encode("a"), theirs.encode("a", "b")
        for found, expected in (
            (ours.layout.join(ours.encode("a")), one),
            (ours.layout.join(ours.encode("a"), ours.encode("b")), two),
        ):
            assert [row.tolist() for row in found] == [expected.ids, expected.type_ids]


@given(content=descriptions(), texts=st.lists(TEXTS, max_size=4))
def test_wordpiece_files_are_read_as_by_the_library(path, content, texts):
    check(path, content, texts)


LOCAL = [  # words are read one by one, which a cache uses
    (
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        [{"type": "NFC"}, {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "NFD"}],
    ),
    (
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
            ],
        },
        [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "NFKD"}],
    ),
]
ANY_TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*ATOMS, "\xb4", "\u0301", "'s", "\u0600", "\u1160", "\u03a3"]),
        st.just(" "),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=14,
).map("".join)


@given(
    content=other_descriptions(),
    which=st.sampled_from(LOCAL),
    chosen=st.lists(st.integers(0, 3), max_size=3),
    texts=st.lists(ANY_TEXTS, max_size=6),
)
def test_words_read_one_by_one_are_those_of_the_text(path, content, which, chosen, texts):
    content["added_tokens"] = []
    content["pre_tokenizer"], steps = which
    content["normalizer"] = {"type": "Sequence", "normalizers": [steps[i] for i in chosen]}
    check(path, content, texts)


@given(content=other_descriptions(), texts=st.lists(TEXTS, max_size=4))
def test_files_of_other_models_are_read_as_by_the_library(path, content, texts):
    check(path, content, texts)


@given(content=damages(), texts=st.lists(TEXTS, max_size=2))
def test_damaged_tokenizer_files_are_refused_or_read_as_by_the_library(path, content, texts):
    check(path, content, texts)


@pytest.mark.parity
@given(seed=st.integers(0, 5), lower=booleans, chinese=booleans, texts=st.lists(TEXTS, max_size=4))
def test_vocabularies_are_read_as_by_the_slow_tokenizer_of_transformers(path, seed, lower, chinese, texts):
    """It composes every text first (NFC), which the original does not."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    directory = path.parent / f"slow{seed}-{lower}-{chinese}"
    if not directory.exists():
        choice = random.Random(seed)
        pieces = [
            choice.choice(["", "##"]) + choice.choice([atom, atom.lower()]) for atom in choice.choices(WORDS, k=60)
        ]
        directory.mkdir()
        (directory / "vocab.txt").write_text(
            "\n".join(dict.fromkeys(piece for piece in [*SPECIALS, *pieces] if piece.strip())), encoding="utf-8"
        )
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"do_lower_case": lower, "tokenize_chinese_chars": chinese})
        )
        SLOW[directory] = (
            load_tokenizer(directory),
            legacy.BertTokenizerLegacy(
                str(directory / "vocab.txt"), do_lower_case=lower, tokenize_chinese_chars=chinese
            ),
        )
    ours, theirs = SLOW[directory]
    for text in texts:
        text = unicodedata.normalize("NFC", text)
        assert ours.tokenize(text) == theirs.tokenize(text)


SLOW: dict = {}
KEYS = [
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "never_split",
    "mask_token",
    "unk_token",
    "model_max_length",
    "max_input_chars_per_word",
    "auto_map",
    "tokenizer_class",
    "bos_token",
    "truncation_side",
    "do_basic_tokenize",
    "word_tokenizer_type",
    "added_tokens",
]
entries = st.one_of(
    values,
    st.fixed_dictionaries(
        {"content": st.sampled_from(["[E1]", "[MASK]", "a", ""])},
        optional={"lstrip": values, "id": values, "special": booleans},
    ),
)


@given(
    config=st.dictionaries(
        st.sampled_from(KEYS),
        st.one_of(
            values,
            entries,
            st.lists(entries, max_size=2),
            st.dictionaries(st.sampled_from(["4", "5", "6", "7", "x"]), entries, max_size=2),
        ),
        max_size=3,
    ),
    words=st.booleans(),
)
def test_settings_of_any_kind_are_obeyed_or_refused(path, config, words):
    directory = path.parent / "settings"
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join([*SPECIALS, "a", "##b"] if words else SPECIALS))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        tokenizer = load_tokenizer(directory)
    except ValueError as error:
        assert str(directory) in str(error)
        return
    assert tokenizer.special_ids == (0, 1, 2, 3, 4) or {"mask_token", "unk_token"} & set(config)
    tokenizer.save(path.parent / "again")
    for name in ("vocab.txt", "tokenizer.json"):
        if name != tokenizer.VOCABULARY_FILE:
            (path.parent / "again" / name).unlink(missing_ok=True)
    again = load_tokenizer(path.parent / "again")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("ab [E1] a") == tokenizer.encode("ab [E1] a")


@pytest.fixture(scope="module")
def model():
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat"] * 50),
        model_writer=content,
        vocab_size=30,
        pad_id=0,
        pad_piece="[PAD]",
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=SPECIALS[2:],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return content.getvalue()


@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3), st.integers(0, 9)), max_size=3),
    text=TEXTS,
)
def test_damaged_sentencepiece_models_are_refused_or_read_as_by_the_library(path, model, edits, text):
    for place, new, removed in edits:
        at = int(place * len(model))
        model = model[:at] + new + model[at + removed :]
    file = path.with_name("spiece.model")
    file.write_bytes(model)
    try:
        ours = load_tokenizer(file)
    except ValueError as error:
        assert str(file) in str(error)
        return
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.vocab_size == theirs.get_piece_size()
    if "\x00" not in text:
        assert ours.encode(text) == ours.encode_with_offsets(text)[0] == theirs.encode(text)
