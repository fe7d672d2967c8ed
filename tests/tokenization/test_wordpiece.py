"""WordPiece against the original: hand-made cases, its recorded outputs, and `tokenizers`."""

import gzip
import json
import pickle
import random
import unicodedata

import numpy as np
import pytest

from bertjax.tokenization import WordPieceTokenizer, load_tokenizer
from bertjax.tokenization import wordpiece as wordpiece_module
from bertjax.tokenization.normalization import BertNormalizer
from tests.fakes import SPECIALS

LETTERS = [chr(c) for c in range(97, 123)]
# Everything spelled in lower-case letters, digits and ASCII symbols is known, letter by letter.
SPELLING = (
    SPECIALS
    + [f"[unused{i}]" for i in range(3)]
    + [form for char in LETTERS + list("0123456789") for form in (char, f"##{char}")]
    + [chr(c) for c in range(33, 127) if not chr(c).isalnum()]
)


def make(words=(), lower=True, **options):
    return WordPieceTokenizer(SPELLING + list(words), lower, **options)


def nasty_texts(count, seed=0):
    """Random strings over the code points that tokenizers trip over, surrogates excluded."""
    rng = random.Random(seed)
    special = (
        "\u0130\u0131\u00df\u0149\u1e9e\u03a3\u03c3\u212a\ufb01\u0301\u0307\u0327\u0345"
        "\u200b\u200d\ufeff\u00ad\x00\ufffd\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029\u3000\u00a0"
        "\u1680\u180e\t\n\r\x7f\u302e\u1b44\u16ff0\U00016ff0\uac00\u4e2d\uf900\U0002f800"
        "\u0915\u0941\u304c\u3099\U0001f4a9\ue000\U000e0001\U0010ffff\u0374\u1fef\u037e "
        "   aBcZ09.,'-#[]_$\u2014\u00bf\u00e9\u00c9"
    )
    for _ in range(count):
        yield "".join(
            rng.choice(special)
            if rng.random() < 0.8
            else chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000)]))
            for _ in range(rng.randrange(1, 30))
        )


def test_greedy_longest_match_from_the_left():
    # The example in the original's docstring: "unaffable" -> un ##aff ##able.
    tokenizer = make(["un", "##aff", "##able", "##affa"])
    assert tokenizer.tokenize("unaffable") == ["un", "##affa", "##b", "##l", "##e"]
    assert make(["un", "##aff", "##able"]).tokenize("UNAFFABLE") == ["un", "##aff", "##able"]


def test_word_without_a_match_is_one_unknown():
    assert make().tokenize("ab\u00f0c d") == ["[UNK]", "d"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("\u00c9t\u00e9 caf\u0065\u0301", ["ete", "cafe"]),
        ("a\u200bb\ufeff c\x00d\ufffde", ["ab", "cde"]),
        ("a\x0bb\x0cc\x1cd\x85e", ["abcde"]),  # deleted, though str.split() splits there
        ("a\tb\nc\rd\u00a0e\u3000f\u2028g", list("abcdefg")),
        ("x\u4e2d\u6587y", ["x", "\u4e2d", "\u6587", "y"]),
        ("can't $5.00^2", ["can", "'", "t", "$", "5", ".", "00", "^", "2"]),
        ("a\u2014b\u00bfc", ["a", "\u2014", "b", "\u00bf", "c"]),
        ("\u039f\u0394\u039f\u03a3 \u03a3", ["\u03bf\u03b4\u03bf\u03c2", "\u03c3"]),  # final sigma
        ("", []),
        (" \t\u200b ", []),
    ],
)
def test_basic_tokenization_follows_the_original(text, words):
    assert BertNormalizer(True).words(text) == words


def test_accents_and_marks_are_stripped_by_default_only_when_lower_casing():
    ka_u, kagi = "\u0915\u0941", "\u304b\u304e"
    for options, expected in [
        ((True, None), ["\u0915", "\u304b\u304d"]),  # what the original does
        ((True, False), [ka_u, kagi]),
        ((False, None), [ka_u, kagi]),
        ((False, True), ["\u0915", "\u304b\u304d"]),
    ]:
        assert BertNormalizer(*options).words(f"{ka_u} {kagi}") == expected


def test_strip_accents_is_saved_and_changes_the_fingerprint(tmp_path):
    tokenizer = make(["\u304b", "##\u304e"], strip_accents=False)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.strip_accents is False
    assert loaded.tokenize("\u304b\u304e") == ["\u304b", "##\u304e"]
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.fingerprint != make(["\u304b", "##\u304e"]).fingerprint


def test_words_over_200_characters_are_unknown():
    tokenizer = make()
    assert len(tokenizer.encode("a" * 200)) == 200
    assert tokenizer.tokenize("a" * 201 + ".") == ["[UNK]", "."]


def test_literal_special_tokens_are_split_like_the_original():
    tokenizer = make(["this", "is", "and", "mask", "sep"])
    text = "This is [MASK] and [SEP]."
    assert tokenizer.tokenize(text) == "this is [ mask ] and [ sep ] .".split()
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_ids)
    kept = tokenizer.tokenize(text, keep_special_tokens=True)
    assert kept == "this is [MASK] and [SEP] .".split()
    ids, offsets = tokenizer.encode_with_offsets(text, keep_special_tokens=True)
    assert ids == tokenizer.encode(text, keep_special_tokens=True)
    assert [text[a:b] for a, b in offsets] == ["This", "is", "[MASK]", "and", "[SEP]", "."]


@pytest.mark.parametrize(
    "text, spans",
    [
        ("\U0001f4a9\U0001f4a9", [(0, 2)]),  # adjacent emoji are one word
        ("a" * 300, [(0, 300)]),
        ("caf\u0065\u0301 x", [(0, 1), (1, 2), (2, 3), (3, 4), (6, 7)]),  # the accent is outside
        ("\u00e9a", [(0, 1), (1, 2)]),
        ("a\u200bb", [(0, 1), (2, 3)]),
        ("\u0130b c", [(0, 1), (1, 2), (3, 4)]),  # lower-casing makes two characters of the first
        (" \u4e2d\u6587", [(1, 2), (2, 3)]),
        ("a.\u2028b", [(0, 1), (1, 2), (3, 4)]),
    ],
)
def test_offsets_are_code_points_of_the_original_text(text, spans):
    assert make().encode_with_offsets(text)[1] == spans


def test_offsets_agree_with_encode_on_nasty_unicode():
    for lower, strip in [(True, None), (True, False), (False, None), (False, True)]:
        tokenizer = make(lower=lower, strip_accents=strip)
        for text in nasty_texts(600):
            ids, offsets = tokenizer.encode_with_offsets(text)
            assert ids == tokenizer.encode(text), ascii(text)
            assert all(0 <= start < end <= len(text) for start, end in offsets), ascii(text)
            assert [s for s, _ in offsets] == sorted(s for s, _ in offsets), ascii(text)


def test_normalised_words_equal_a_character_by_character_reading_of_the_rules():
    """An independent, slow statement of the original's rules, on nasty Unicode."""

    def category(char):
        return unicodedata.category(char)

    def slow(text, lower, strip):
        text = "".join(c for c in text if c in "\t\n\r" or (c not in "\x00\ufffd" and category(c) not in ("Cc", "Cf")))
        text = "".join(" " if c in "\t\n\r" or category(c) == "Zs" else c for c in text)
        text = "".join(
            f" {c} " if unicodedata.name(c, "").startswith("CJK") and category(c) == "Lo" else c for c in text
        )
        words = []
        for token in text.split():
            token = token.lower() if lower else token
            if strip:
                token = "".join(c for c in unicodedata.normalize("NFD", token) if category(c) != "Mn")
            word = ""
            for c in token:
                ascii_symbol = 33 <= ord(c) < 127 and not c.isalnum()
                if ascii_symbol or category(c)[0] == "P":
                    words += [word, c]
                    word = ""
                else:
                    word += c
            words.append(word)
        return " ".join(words).split()

    # Names cover the assigned ideographs; those of later blocks the original does not isolate.
    later = range(0x2CEB0, 0x2EE60), range(0x30000, 0x33480)
    for lower, strip in [(True, None), (True, False), (False, None), (False, True)]:
        normalizer = BertNormalizer(lower, strip)
        for text in nasty_texts(800, seed=1):
            if any(ord(c) in block for c in text for block in later):
                continue
            if any(0x3400 <= ord(c) <= 0x2FA1F and category(c) == "Cn" for c in text):
                continue  # unassigned places inside the original's ranges
            strips = lower if strip is None else strip
            assert normalizer.words(text) == slow(text, lower, strips), ascii(text)


def test_ids_come_from_the_file_and_special_names_are_settings():
    tokenizer = WordPieceTokenizer(
        ["the", "<unk>", "<s>", "</s>", "<pad>", "<mask>"],
        False,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
    )
    assert (
        (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
        == tokenizer.special_ids
        == (4, 1, 2, 3, 5)
    )
    assert tokenizer.encode("the cat") == [0, 1]
    assert tokenizer.tokenize("the <mask>", keep_special_tokens=True) == ["the", "<mask>"]


def test_every_missing_special_token_is_named():
    with pytest.raises(ValueError, match=r"mask_token='\[MASK\]'") as error:
        WordPieceTokenizer(SPECIALS[:-1], True)
    assert "[PAD]" not in str(error.value)
    with pytest.raises(ValueError, match=r"unk_token='\[UNK\]', mask_token='\[MASK\]'"):
        WordPieceTokenizer(["[PAD]", "<unk>", "[CLS]", "[SEP]"], True)


def test_random_replacements_are_never_unused_entries():
    unused = "[unused0] [unused99] [unused_punctuation0] madeupword0001 <s>NOTUSED </s>NOTUSED <unk>NOTUSED".split()
    words = ["word", "##s", "[", "notused"]
    tokenizer = WordPieceTokenizer([*SPECIALS, *unused, *words], do_lower_case=True)
    assert [tokenizer.vocab[i] for i in tokenizer.replacement_ids] == words


def test_continuations_and_replacements():
    tokenizer = make()
    assert tokenizer.is_continuation.shape == (tokenizer.vocab_size,)
    assert [p for p, c in zip(tokenizer.vocab, tokenizer.is_continuation, strict=True) if c] == [
        p for p in tokenizer.vocab if p[:2] == "##"
    ]
    replacements = tokenizer.replacement_ids
    assert replacements.dtype == np.int32
    left_out = set(range(tokenizer.vocab_size)) - set(replacements.tolist())
    assert {tokenizer.id_to_token(i) for i in left_out} == {*SPECIALS, "[unused0]", "[unused1]", "[unused2]"}


def test_batches_and_flat_arrays_hold_what_encode_gives():
    tokenizer = make(["hello"])
    texts = ["hello, world", "", "\u00e9 \u200b", "x" * 300]
    rows = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == rows
    ids, lengths = tokenizer.encode_flat(texts)
    assert ids.dtype == np.int32 and ids.tolist() == sum(rows, [])
    assert lengths.tolist() == [len(row) for row in rows]
    assert tokenizer.encode_flat([])[0].shape == (0,)


def test_decode_glues_continuations():
    tokenizer = make(["un", "##aff", "##able"])
    ids = [tokenizer.cls_id, *tokenizer.encode("unaffable x"), tokenizer.sep_id]
    assert tokenizer.decode(ids) == "[CLS] unaffable x [SEP]"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "unaffable x"
    with pytest.raises(IndexError, match="outside the vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])


def test_caches_are_bounded_and_never_change_a_result(monkeypatch):
    monkeypatch.setattr(wordpiece_module, "_CACHED_CHUNKS", 50)
    monkeypatch.setattr(wordpiece_module, "_CACHED_WORDS", 50)
    tokenizer = make()
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab,. ", k=60)) for _ in range(300)]
    fresh = [make().encode(text) for text in texts[:20]]
    for _ in range(2):
        assert [tokenizer.encode(text) for text in texts][:20] == fresh
        for cache in (tokenizer._chunks, tokenizer._words):
            assert len(cache) <= 50 and len(cache._old) <= 50


def test_pickled_tokenizer_is_the_same():
    tokenizer = make(["hello"], lower=False, strip_accents=True)
    tokenizer.encode("hello there")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode("hello \u00e9") == tokenizer.encode("hello \u00e9")


def test_equals_the_tokenizers_library_on_ordinary_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["the", "of", "king", "##dom", "##doms", "quick", "\u00fc", "##\u00fc", "\u4e2d"]
    for lower in (True, False):
        ours = make(words, lower)
        ours.save(tmp_path)
        theirs = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=lower)
        for text in [
            "The kingdoms of \u00dcber-Queen\u2019s, 3.5%!",
            "caf\u00e9 na\u00efve \u0130x",
            "\u4e2d\u6587 A\u200bB  c\td",
            "caf\u0065\u0301 O\u0308l x\u0301y",
        ]:
            expected = theirs.encode(text, add_special_tokens=False)
            ids, offsets = ours.encode_with_offsets(text)
            assert ids == expected.ids and offsets == expected.offsets, text


@pytest.mark.real_data
@pytest.mark.parametrize("casing", ["uncased", "cased"])
def test_equals_the_original_on_12000_recorded_strings(shared_data, casing):
    tokenizer = load_tokenizer(shared_data / "vocab" / f"bert-base-{casing}-vocab.txt")
    count = 0
    with gzip.open(
        shared_data / "reference_outputs" / "tokenization_original.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        for line in file:
            record = json.loads(line)
            assert tokenizer.tokenize(record["text"]) == record[casing], ascii(record["text"])
            ids, offsets = tokenizer.encode_with_offsets(record["text"])
            assert ids == tokenizer.encode(record["text"])
            assert all(a < b for a, b in offsets)
            count += 1
    assert count == 12_000


@pytest.mark.real_data
def test_equals_the_tokenizers_library_on_wikipedia(shared_data, wikipedia_lines):
    tokenizers = pytest.importorskip("tokenizers")
    for casing in ("uncased", "cased"):
        vocab = shared_data / "vocab" / f"bert-base-{casing}-vocab.txt"
        ours = load_tokenizer(vocab)
        theirs = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=casing == "uncased")
        different = []
        for text in wikipedia_lines[:2000]:
            expected = theirs.encode(text, add_special_tokens=False)
            ids, offsets = ours.encode_with_offsets(text)
            if ids != expected.ids or offsets != expected.offsets:
                different.append(text)
        # What the library does otherwise (private-use and unassigned characters, literal [MASK],
        # words of 101 to 200 characters) does not occur in these lines.
        assert not different, different[:3]


# --- the compiled path of encode_flat -----------------------------------------------------------


def random_texts(count, seed=0):
    """Strings that mix words, every kind of white space and control, and other scripts."""
    rng = random.Random(seed)
    atoms = [
        "the",
        "Unaffable",
        "un##aff",
        "[MASK]",
        "x" * 201,
        "café",
        "naïve,word",
        "Σίσυφος",
        "\u0915\u0941",
        "東京都",
        "한국",
        "\x00",
        "\x0b",
        "\x85",
        "\u2028",
        "\xa0",
        "\u200b",
        "\t",
        "\n",
        "\r\n",
        " ",
        "  ",
        "-",
        "...",
        "don't",
        "$5.00",
        "3rd",
        "_",
        "~",
        "\x7f",
        "\U0001f4a9" * 2,
        "\ufeff",
        "A" * 250 + "é",
        "\ud800",
        "İ",
        "ﬁ",
        "a\u0301b",
    ]
    return [
        "".join(rng.choice(atoms) + rng.choice(["", "", " "]) for _ in range(rng.randrange(12))) for _ in range(count)
    ]


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_encode_flat_equals_encode_of_each_text(do_lower_case):
    letters = [chr(c) for c in range(33, 127)]
    vocab = [
        *SPECIALS,
        *letters,
        *(f"##{c}" for c in letters),
        "the",
        "un",
        "##aff",
        "##able",
        "cafe",
        "東",
        "σισυφος",
        "word",
        "##or",
        "x" * 30,
    ]
    tokenizer = WordPieceTokenizer(vocab, do_lower_case)
    texts = [*random_texts(3000), "", " "]
    ids, lengths = tokenizer.encode_flat(texts)
    expected = [tokenizer.encode(text) for text in texts]
    assert ids.dtype == np.int32 and lengths.tolist() == list(map(len, expected))
    assert ids.tolist() == [i for row in expected for i in row]
    ids, lengths = tokenizer.encode_flat(["東京都 the", "Σίσυφος"])  # mostly not ASCII
    assert ids.tolist() == tokenizer.encode("東京都 the Σίσυφος") and lengths.sum() == len(ids)
    for nothing in ([], [""]):
        ids, lengths = tokenizer.encode_flat(nothing)
        assert len(ids) == 0 and lengths.tolist() == [0] * len(nothing)


def test_encode_flat_of_a_vocabulary_without_letters():
    tokenizer = WordPieceTokenizer([*SPECIALS, "é"], False)
    ids, lengths = tokenizer.encode_flat(["a b, é", "é"])
    assert ids.tolist() == [1, 1, 1, 5, 5] and lengths.tolist() == [4, 1]
