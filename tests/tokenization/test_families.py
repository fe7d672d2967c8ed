"""Tokenizers of RoBERTa, XLM-R, CamemBERT and ModernBERT: ids, offsets, pairs and special tokens are those
of transformers' AutoTokenizer from the same files."""

import io

import numpy as np
import pytest
import sentencepiece

from bertjax.data.batches import PretrainingBatches
from bertjax.data.build import build_store
from bertjax.data.masking import MaskingSpec
from bertjax.data.store import TokenStore
from bertjax.tasks.encoding import passage_tokens, passage_windows, segment_row
from bertjax.tokenization import Layout, load_tokenizer
from bertjax.tokenization.hub import HubTokenizer
from tests.families import CORPUS, write_json, write_tokenizer

TEXTS = [
    "Hello world",
    "The fox",
    " it's  a\ttest\n Café ①",
    "",
    "日本 x",
    "e\u0301 \ufb01 ...   ",
    "quick brown-fox, 1234 THE",
    "\u200b a\u00a0b\U0001f4a9",
]
KINDS = ["roberta", "roberta-json", "xlm-roberta", "camembert", "xlm-roberta-json", "modernbert", "odd"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def directory(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_tokenizer(made[kind], kind)
        return made[kind]

    return directory


def assert_same(ours, theirs):
    assert ours.vocab_size == len(theirs)
    assert [ours.vocab[i] for i in range(ours.vocab_size)] == theirs.convert_ids_to_tokens(range(len(theirs)))
    specials = (
        theirs.pad_token_id,
        theirs.unk_token_id,
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
    )
    assert ours.special_ids == specials
    mask = theirs.mask_token
    for text in [*TEXTS, f"Hello {mask} world{mask}!", f"{theirs.cls_token}x {theirs.sep_token}"]:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        found = ours.encode_with_offsets(text, keep_special_tokens=True)
        assert found == (expected["input_ids"], expected["offset_mapping"])
        assert ours.encode(text, keep_special_tokens=True) == expected["input_ids"]
        assert ours.decode(found[0]) == theirs.decode(found[0], clean_up_tokenization_spaces=False)
        cut, _ = segment_row(ours, found[0], None, 6)
        assert cut.tolist() == theirs(text, truncation=True, max_length=6)["input_ids"]
        if mask not in text and theirs.cls_token not in text:
            assert ours.encode(text) == expected["input_ids"] == ours.encode_batch([text])[0]
            assert ours.encode_flat([text, text])[0].tolist() == expected["input_ids"] * 2
    for a in TEXTS:
        for b in filter(None, TEXTS):
            expected = theirs(a, b, return_token_type_ids=True)
            ids, types = ours.layout.join(ours.encode(a), ours.encode(b))
            assert ids.tolist() == expected["input_ids"] and types.tolist() == expected["token_type_ids"]


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_as_in_transformers_before_and_after_saving(directories, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(directories(kind))
    assert isinstance(ours, HubTokenizer)
    assert_same(ours, transformers.AutoTokenizer.from_pretrained(directories(kind)))
    ours.save(tmp_path / "saved", 64)
    assert load_tokenizer(tmp_path / "saved").fingerprint == ours.fingerprint
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.model_max_length == 64
    assert_same(ours, again)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_pairs_is_the_tokenizer_s(directories, kind):
    tokenizer = load_tokenizer(directories(kind))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    expected = {"modernbert": Layout((cls,), (sep,), (sep,), 0), "odd": Layout.bert(cls, sep)}
    assert tokenizer.layout == expected.get(kind, Layout((cls,), (sep, sep), (sep,), 0))
    ids, types = tokenizer.layout.join([7, 8], [])
    assert ids.tolist() == [cls, 7, 8, *tokenizer.layout.middle, sep]
    assert types.sum() == (kind == "odd")


@pytest.mark.parametrize("kind", KINDS)
def test_literal_special_tokens_are_text(directories, kind):
    tokenizer = load_tokenizer(directories(kind))
    for token in tokenizer.special_tokens.values():
        for text in (token, f"a {token} b", f"a{token}b"):
            assert not {*tokenizer.encode(text)} & ({*tokenizer.special_ids} - {tokenizer.unk_id})
            assert tokenizer._ids[token] in tokenizer.encode(text, keep_special_tokens=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nsp", [False, True])
@pytest.mark.parametrize("kind", ["roberta", "camembert", "modernbert"])
def test_rows_of_a_store_follow_the_layout(directories, tmp_path, kind, nsp, packed):
    tokenizer = load_tokenizer(directories(kind))
    documents = [[text.replace("fox", f"fox {n}") for text in CORPUS[:3]] for n in range(20)]
    build_store(None, tokenizer, tmp_path / "s", documents=documents)
    store = TokenStore(tmp_path / "s")
    assert store.layout == tokenizer.layout
    layout, special = tokenizer.layout, {*tokenizer.special_ids} - {tokenizer.unk_id}
    batches = PretrainingBatches(store, 40, 8, seed=0, nsp=nsp, packed=packed)
    batch = batches[0]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_id).all()
    assert not batch["token_type_ids"].any()
    longest = 0
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        for number in range(1, mask.max() + 1):
            ids = row[mask == number].tolist()
            places = [i for i, token_id in enumerate(ids) if token_id in special]
            around = [*layout.prefix, *layout.middle, *layout.suffix] if nsp else [*layout.prefix, *layout.suffix]
            assert [ids[i] for i in places] == around
            assert places[-1] == len(ids) - 1
            longest = max(longest, len(ids))
    assert longest == 40 or not nsp


@pytest.mark.parametrize("kind", KINDS)
def test_whole_words_are_known(directories, kind):
    tokenizer = load_tokenizer(directories(kind))
    spec = MaskingSpec.from_tokenizer(tokenizer, 8, whole_word=True)
    ids = tokenizer.encode(" quick test 123 fox")
    starts = np.flatnonzero(~spec.is_continuation[ids]).tolist()
    words = [tokenizer.decode(part).strip() for part in np.split(ids, starts[1:])]
    assert words == (["quick", "test", "1", "2", "3", "fox"] if kind == "odd" else ["quick", "test", "123", "fox"])
    assert {*spec.special_ids} == {tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id}
    assert not {*tokenizer.special_ids} & {*spec.replacement_ids.tolist()}


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert", "xlm-roberta-json"])
def test_whole_words_are_those_of_transformers(directories, kind):
    """What stands between blanks, with its punctuation: the collator's words for byte-level BPE (but that it parts
    words at characters of several bytes), the library's for Unigram, where the collator takes the mark of a blank for a
    word. (Of BERT's pieces the collator joins punctuation too, unlike the original, which is followed here.)"""
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(directories(kind))
    theirs = transformers.AutoTokenizer.from_pretrained(directories(kind))
    for text in (CORPUS[0], "Hello world, it's a test; euros.", "fox, dog... brown.quick ;'lazy'"):
        encoded = theirs(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        words = np.array(encoded.word_ids()[1:-1]) + 1
        if kind == "roberta":
            offsets, special = np.array([encoded["offset_mapping"]]), np.array([encoded["special_tokens_mask"]])
            collator = transformers.DataCollatorForLanguageModeling
            words = collator._calc_word_ids_and_prob_mask(offsets, special)[0][0, 1:-1]
        continues = tokenizer.is_continuation[encoded["input_ids"][1:-1]]
        continues[:1] = False  # behind the special token a word begins
        assert np.cumsum(~continues).tolist() == words.tolist(), text


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_found_in_windows(directories, kind):
    tokenizer = load_tokenizer(directories(kind))
    passage = " The quick brown fox costs 123 euros over the lazy dog; Café au lait."
    ids, offsets = passage_tokens(tokenizer, passage)
    query = tokenizer.encode("Hello")
    shown = np.zeros(len(ids), int)
    for row, types, window in passage_windows(tokenizer, query, ids, offsets, 24 + len(query), 6):
        layout = tokenizer.layout
        assert row[: window.first].tolist() == [*layout.prefix, *query, *layout.middle]
        assert row[-1] == tokenizer.sep_id and len(row) == len(types)
        count = len(window.offsets)
        assert (
            row[window.first : window.first + count].tolist()
            == ids[: len(ids)].tolist()[(start := offsets.tolist().index(window.offsets[0].tolist())) : start + count]
        )
        shown[start : start + count] += window.best
    assert (shown == 1).all()
    for word in ("fox", "Café"):
        at = passage.index(word)
        chosen = [i for i, (start, end) in enumerate(offsets.tolist()) if start < at + len(word) and end > at]
        assert passage[offsets[chosen[0], 0] : offsets[chosen[-1], 1]].strip() == word


def test_which_family_a_sentencepiece_model_is_of_must_be_known(directories, tmp_path):
    content = (directories("xlm-roberta") / "sentencepiece.bpe.model").read_bytes()
    (tmp_path / "sentencepiece.bpe.model").write_bytes(content)
    with pytest.raises(ValueError, match="sentencepiece.bpe.model: .*no file says which.*XLMRobertaTokenizer or"):
        load_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="MBartTokenizer")
    with pytest.raises(ValueError, match="tokenizer_class='MBartTokenizer' is none that is known"):
        load_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="CamembertTokenizerFast")
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(directories("camembert")).fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    # Where only the model says it; a BERT may have XLM-R's tokenizer.
    write_json(tmp_path / "config.json", tokenizer_class="XLMRobertaTokenizer", model_type="bert")
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(directories("xlm-roberta")).fingerprint


@pytest.mark.parametrize("kind", ["albert", "xlnet", "t5"])
@pytest.mark.parametrize("said", ["config.json", "tokenizer_config.json"])
def test_sentencepiece_models_with_other_rules_are_refused_by_name(tmp_path, kind, said):
    """Their pieces alone would do: ALBERT, for one, lower-cases before the model sees the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_writer=model,
        vocab_size=75,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    assert load_tokenizer(tmp_path).layout
    name = {"albert": "AlbertTokenizer", "xlnet": "XLNetTokenizer", "t5": "T5Tokenizer"}[kind]
    write_json(tmp_path / said, **({"model_type": kind} if said == "config.json" else {"tokenizer_class": name}))
    with pytest.raises(ValueError, match=f"spiece.model: .*({kind}|{name})' is none that is known.*tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("merges.txt", None, "merges.txt is missing"),
        ("merges.txt", b"#version: 0.2\nh e\nx y z\n", "merges.txt, line 3: 'x y z' is not two pieces"),
        ("merges.txt", b"\xff\n", "merges.txt is not UTF-8"),
        ("merges.txt", "#version: 0.2\nh \u4e2d\n".encode(), "merges.txt, line 2: '\u4e2d' is not in vocab.json"),
        ("vocab.json", b"[1]", "vocab.json must map pieces to ids"),
        ("vocab.json", b'{"a": "b"}', "vocab.json must map pieces to ids"),
        ("vocab.json", b"{", "vocab.json is not valid JSON"),
        ("tokenizer_config.json", b'{"tokenizer_class": "CLIPTokenizer"}', "'CLIPTokenizer' does not read vocab.json"),
    ],
)
def test_files_of_byte_level_bpe_that_do_not_fit_are_refused(directories, tmp_path, name, content, message):
    for path in directories("roberta").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_store_of_bert_s_layout_does_not_name_it(directories, tmp_path):
    manifest = build_store(None, load_tokenizer(directories("odd")), tmp_path / "s", documents=[CORPUS[:3]] * 4)
    assert "layout" not in manifest["tokenizer"]


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_added_words_are_found_as_transformers_finds_them(directories, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    old = load_tokenizer(directories(kind))
    larger = old.extended(["brownfox", "sars-cov"])
    assert larger.vocab_size == old.vocab_size + 2
    larger.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (" the brownfox sars-cov.", "brownfox brownfoxes", "abrownfox"):
        found = larger.encode(text)
        assert found == theirs.encode(text, add_special_tokens=False)
        expected = {"abrownfox": 0}.get(text, 1)
        assert found.count(old.vocab_size) == expected
    assert not larger.is_continuation[[old.vocab_size, old.vocab_size + 1]].any()
    assert larger.encode(" The fox") == old.encode(" The fox")
    assert load_tokenizer(tmp_path).fingerprint == larger.fingerprint
