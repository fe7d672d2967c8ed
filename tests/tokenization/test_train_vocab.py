"""Vocabulary training: layout, determinism, bounds, the command line, and quality on real text."""

import math
import random
import subprocess
import sys
from collections import Counter

import pytest
import sentencepiece

from bertjax.tokenization import load_tokenizer
from bertjax.tokenization.normalization import BertNormalizer
from bertjax.tokenization.train_subwords import train_subwords
from bertjax.tokenization.train_vocab import WordCounts, _characters, train_wordpiece
from bertjax.tokenization.word_counts import strip_marks
from bertjax.tools import train_vocab as tool

SPECIALS = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def prose(words=20_000, kinds=900, seed=0):
    """Lines of made-up words, common ones much more often than rare ones (Zipf)."""
    rng = random.Random(seed)
    syllables = ["ka", "ro", "mi", "ten", "sul", "ing", "er", "un", "a", "do", "pre", "ly"]
    lexicon = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(kinds)]
    weights = [1 / (i + 1) for i in range(kinds)]
    drawn = rng.choices(lexicon, weights, k=words)
    return [" ".join(drawn[i : i + 12]).capitalize() + "." for i in range(0, words, 12)]


def test_layout_is_bert_s():
    tokenizer = train_wordpiece(prose(), vocab_size=400, num_unused=120)
    vocab = tokenizer.vocab
    assert len(vocab) == 400 and vocab[0] == "[PAD]"
    assert list(vocab[1:100]) == [f"[unused{i}]" for i in range(99)]
    assert list(vocab[100:104]) == SPECIALS
    assert list(vocab[104:125]) == [f"[unused{i}]" for i in range(99, 120)]
    letters = sorted(set("".join(prose()).lower()) - {" "})
    assert list(vocab[125 : 125 + len(letters)]) == letters
    assert {f"##{c}" for c in letters if c != "."} <= set(vocab)


def test_every_word_of_the_training_text_is_known_and_common_ones_are_one_piece():
    lines = prose()
    tokenizer = train_wordpiece(lines, vocab_size=400, num_unused=0)
    assert all(tokenizer.unk_id not in row for row in tokenizer.encode_batch(lines))
    common = Counter(" ".join(lines).lower().replace(".", "").split()).most_common(20)
    assert all(len(tokenizer.encode(word)) == 1 for word, _ in common)


def test_same_sentences_give_the_same_bytes(tmp_path):
    for name in "ab":
        train_wordpiece(prose(), vocab_size=300).save(tmp_path / name)
    assert (tmp_path / "a/vocab.txt").read_bytes() == (tmp_path / "b/vocab.txt").read_bytes()
    # Where sentences are cut does not matter either.
    joined = train_wordpiece([" ".join(prose())], vocab_size=300)
    assert joined.vocab == load_tokenizer(tmp_path / "a").vocab


def test_training_normalises_as_the_tokenizer_will():
    kagi = "\u304b\u304e"
    assert kagi in train_wordpiece([kagi] * 9, 40, True, strip_accents=False).vocab
    assert kagi not in train_wordpiece([kagi] * 9, 40, True).vocab
    assert "\u304b\u304d" in train_wordpiece([kagi] * 9, 40, True).vocab
    assert "May" in train_wordpiece(["May"] * 9, 40, do_lower_case=False).vocab
    assert "may" in train_wordpiece(["May"] * 9, 40).vocab


def test_a_small_corpus_gives_what_it_can_and_says_how_much(caplog):
    tokenizer = train_wordpiece(["one two three"] * 3, vocab_size=1000)
    assert tokenizer.vocab_size < 1000
    assert f"vocab_size={tokenizer.vocab_size}" in caplog.text
    assert tokenizer.tokenize("one two three") == ["one", "two", "three"]


def test_a_size_below_the_entries_that_must_be_is_refused():
    with pytest.raises(ValueError, match="vocab_size=5 is too small: 5 special"):  # before the text is read
        train_wordpiece((1 / 0 for _ in range(1)), vocab_size=5)
    with pytest.raises(ValueError, match="vocab_size=20 is too small"):
        train_wordpiece(prose(), vocab_size=20)
    with pytest.raises(ValueError, match="no words"):
        train_wordpiece(["", " \u200b "], vocab_size=100)


def test_rare_characters_get_no_entry():
    words = [("abc", 10), ("ab\u00f0", 1), ("\u00f0z", 1), ("q", 1)]
    alphabet, entries = _characters(words, min_count=2, limit=100, vocab_size=300)
    assert alphabet == set("abc\u00f0")
    assert entries == ["a", "b", "c", "\u00f0", "##b", "##c", "##\u00f0"]
    assert _characters(words, 1, 2, 300)[0] == set("ab")


def test_word_counts_equal_a_plain_count_and_stay_bounded():
    lines = prose(5000)
    normalizer = BertNormalizer(True)
    expected = Counter(word for line in lines for word in normalizer.words(line))
    counts = WordCounts(normalizer)
    for line in lines:
        counts.add(line)
    assert dict(counts.ranked()) == expected
    assert [c for _, c in counts.ranked()] == sorted(expected.values(), reverse=True)

    bounded = WordCounts(normalizer, max_words=100)
    for line in lines:
        bounded.add(line)
        bounded._count_buffer()
        assert len(bounded._words) <= 100 and len(bounded._chunks) <= 100
    kept = bounded.ranked()
    assert kept[0] == max(expected.items(), key=lambda item: item[1])  # common words keep all
    assert sum(c for _, c in kept) + bounded.forgotten == sum(expected.values())


def test_counts_beyond_32_bits_keep_their_order(monkeypatch):
    ranked = [("the", 9_000_000_000), ("then", 5_000_000_000), ("zoo", 3)]
    monkeypatch.setattr(WordCounts, "ranked", lambda self: ranked)
    tokenizer = train_wordpiece(["x"], vocab_size=17, num_unused=0)
    # Room for 5 specials, 10 character forms and two more pieces: the two common words.
    assert tokenizer.vocab[-2:] == ("the", "then")


# --- marks, scripts, small corpora --------------------------------------------------------------

HINDI = ["यह है", "वे हैं", "मैं हूँ"] * 50
GERMAN = ["die Zahlen sind hoch", "wir zählen sie hier", "nun fallen fällen"] * 50
KATAKANA = ["ボタン ホタン"] * 50


@pytest.mark.parametrize(
    "lines, kept, confused",
    [
        (HINDI, "हैं", "हूँ = है = हैं"),
        (GERMAN, "zählen", "zahlen = zählen"),
        (KATAKANA, "ボタン", "ホタン = ボタン"),
        (["cafe\u0301 cafe"] * 50, "cafe\u0301", "cafe = café"),
        (["ที่ นี้"] * 50, "ที่", "marks that their script needs"),
    ],
)
def test_marks_that_tell_words_apart_are_kept_by_the_tool_and_missed_aloud(lines, kept, confused, caplog):
    tokenizer = train_wordpiece(lines, 80, strip_accents="auto")
    assert tokenizer.strip_accents is False and kept in tokenizer.vocab
    assert "strip_accents=false" in caplog.text and confused in caplog.text
    caplog.clear()
    stripping = train_wordpiece(lines, 80)  # as the original
    assert stripping.strip_accents is None and kept not in stripping.vocab
    assert "strip_accents=false keeps the marks" in caplog.text and confused in caplog.text


@pytest.mark.parametrize(
    "lines",
    [
        ["the café naïve"] * 50,
        ["naïve"] * 2 + ["naive"] * 98,
        ["한국어 말"] * 50,
        ["\u2764\ufe0f love"] * 50,
        ["plain text"] * 50,
    ],
)
def test_accents_of_one_spelling_are_dropped_as_by_the_original(lines, caplog):
    tokenizer = train_wordpiece(lines, 120, strip_accents="auto")
    assert tokenizer.strip_accents is None and tokenizer.do_lower_case
    assert "marks" not in caplog.text
    assert tokenizer.vocab == train_wordpiece(lines, 120).vocab
    assert train_wordpiece(lines, 120, False, strip_accents="auto").strip_accents is None


def test_words_without_their_marks_are_those_of_the_stripping_normaliser():
    lines = [*HINDI[:3], *GERMAN[:3], *KATAKANA[:1], "ΟΔΟΣ \u0130x \u1fefa é,è", "한국"]
    keeping, stripping = BertNormalizer(True, False), BertNormalizer(True)
    kept = Counter(word for line in lines for word in keeping.words(line))
    expected = Counter(word for line in lines for word in stripping.words(line))
    assert dict(strip_marks(kept.items(), stripping)[0]) == expected


THAI = "สวัสดีชาวโลกที่รักทุกคน"
JAPANESE = "わたしはねこがすきですといいました"


@pytest.mark.parametrize("clause", [THAI, JAPANESE, THAI * 20])
def test_scripts_without_spaces_get_a_hint_and_no_clauses_as_entries(clause, caplog):
    tokenizer = train_wordpiece([clause] * 60, 200, strip_accents="auto")
    assert "without spaces between words" in caplog.text and "--model=unigram" in caplog.text
    assert max(len(piece.removeprefix("##")) for piece in tokenizer.vocab if "[" not in piece) <= 8
    assert tokenizer.unk_id not in tokenizer.encode(clause[:150])
    caplog.clear()
    segmented = " ".join(clause[i : i + 3] for i in range(0, 18, 3))
    train_wordpiece([segmented] * 60, 200, strip_accents="auto")
    train_wordpiece(["中文没有空格" * 5] * 60, 200)  # stand alone anyway
    assert "without spaces" not in caplog.text
    train_wordpiece(["中文没有空格" * 5] * 60, 200, tokenize_chinese_chars=False)
    assert "without spaces" in caplog.text


def test_many_characters_get_entries_where_a_text_needs_them():
    text = "".join(chr(0x4E00 + i) for i in range(1500))
    tokenizer = train_wordpiece([text] * 20, 6000)
    assert tokenizer.unk_id not in tokenizer.encode(text)
    assert train_wordpiece([text] * 20, 6000, max_chars=100).encode(text).count(tokenizer.unk_id) == 1400
    assert train_wordpiece([text] * 20, 3600).vocab_size <= 3600  # at most a third of it


@pytest.mark.parametrize("lines", [1, 3, 60])
def test_tool_makes_a_usable_vocabulary_of_a_few_lines(tmp_path, capsys, lines):
    line = "The quick brown fox jumps over the lazy dog."
    (tmp_path / "a.txt").write_text(f"{line}\n" * lines)
    tool.main([f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'v'}"])
    out = capsys.readouterr().out
    assert "nan" not in out and "unknown rate 0.0000%" in out
    assert ("that were trained on" in out) == (lines < 60)
    tokenizer = load_tokenizer(tmp_path / "v")
    assert tokenizer.unk_id not in tokenizer.encode(line) and len(tokenizer.encode(line)) > 9


def test_a_text_of_which_nothing_can_be_learnt_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="2 words are too few.*min_char_count=2"):
        train_wordpiece(["ab cd"], 100, min_char_count=2)
    (tmp_path / "a.txt").write_text("ab cd\n")
    with pytest.raises(SystemExit) as stopped:
        tool.main([f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'v'}", "--min_char_count=5"])
    assert "too few to train a vocabulary" in str(stopped.value) + capsys.readouterr().err
    assert not (tmp_path / "v" / "vocab.txt").exists()


# --- the command line -------------------------------------------------------------------------


def write(directory, parts=2):
    for i in range(parts):
        (directory / f"part{i}.txt").write_text("\n".join(prose(6000, seed=i)) + "\n")
    return str(directory / "part*.txt")


def test_tool_trains_saves_and_compares(tmp_path, capsys):
    pattern = write(tmp_path)
    tool.main([f"--input={pattern}", f"--output={tmp_path / 'one'}", "--vocab_size=300"])
    tool.main(
        [
            f"--input={pattern}",
            f"--output={tmp_path / 'two'}",
            "--vocab_size=200",
            "--do_lower_case=false",
            f"--compare={tmp_path / 'one'}",
        ]
    )
    out = capsys.readouterr().out
    assert "do_lower_case = True" in out and "do_lower_case = False" in out
    last = out.splitlines()[-2:]
    assert all("unknown rate" in line and "tokens a word" in line for line in last)
    assert load_tokenizer(tmp_path / "one").do_lower_case is True
    assert load_tokenizer(tmp_path / "two").do_lower_case is False


@pytest.mark.parametrize(
    "text, told",
    [
        ("ein Haus am See", "1.0000 tokens a word"),
        ("那个酒店的房间很好，早餐也不错，还会再来", "1.0000 tokens a character"),
    ],
)
def test_tokens_are_counted_a_character_where_no_spaces_set_words_apart(tmp_path, capsys, text, told):
    (tmp_path / "in.txt").write_text(f"{text}\n" * 60)
    tool.main([f"--input={tmp_path}/in.txt", f"--output={tmp_path}/vocab", "--vocab_size=80"])
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("weights", ["model.safetensors", "checkpoints/9"])
def test_the_vocabulary_of_a_model_is_not_replaced(tmp_path, weights):
    (tmp_path / "m" / weights).parent.mkdir(parents=True)
    (tmp_path / "m" / weights).touch()
    with pytest.raises(SystemExit, match="holds a model, which would lose its vocabulary"):
        tool.main([f"--input={write(tmp_path)}", f"--output={tmp_path / 'm'}"])
    assert not (tmp_path / "m" / "vocab.txt").exists()


@pytest.mark.parametrize(
    "made, change, told",
    [
        ("wordpiece", "--vocab_size=200", "v/vocab.txt is a vocabulary of another vocab_size, and would be lost"),
        ("wordpiece", "--model=bpe", "v/vocab.txt is a vocabulary of another model, "),
        ("unigram", "--model=wordpiece", "v/tokenizer.json is a vocabulary of another model, "),
        ("wordpiece", "text", "another input"),
        ("wordpiece", "record", "v/vocab.txt is a vocabulary, and would be lost; choose another --output, or replace"),
    ],
)
def test_another_vocabulary_is_replaced_only_where_that_is_asked_for(tmp_path, made, change, told):
    arguments = [f"--input={write(tmp_path)}", f"--output={tmp_path / 'v'}", "--vocab_size=300", f"--model={made}"]
    tool.main(arguments)
    before = {path: path.read_bytes() for path in (tmp_path / "v").iterdir()}
    if change == "text":
        (tmp_path / "part0.txt").write_text("other text\n" * 100)
    elif change == "record":  # an older version, or another program, has made it
        (tmp_path / "v" / "train_vocab.json").unlink()
    else:
        arguments.append(change)
    with pytest.raises(SystemExit, match=f"{told}.*--overwrite"):
        tool.main(arguments)
    assert before.items() >= {path: path.read_bytes() for path in (tmp_path / "v").iterdir()}.items()
    tool.main([*arguments, "--overwrite"])
    assert load_tokenizer(tmp_path / "v").vocab_size <= 300
    tool.main(arguments)  # which is now the one that has made it


@pytest.mark.parametrize("heldout", [False, True])
def test_the_same_command_keeps_its_vocabulary_and_measures_it_again(tmp_path, capsys, heldout):
    pattern = write(tmp_path)
    arguments = [f"--input={pattern}", f"--output={tmp_path / 'v'}", "--vocab_size=300"]
    arguments += [f"--heldout={pattern}"] * heldout
    tool.main(arguments)
    first = capsys.readouterr().out.splitlines()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "v").iterdir()}
    tool.main([*arguments, f"--compare={tmp_path / 'v'}"])
    again = capsys.readouterr().out.splitlines()
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "v").iterdir()}
    assert "which this command has made before" in again[-4] and again[-3:-1] == first[-2:] and again[-1] == again[-2]


def test_the_fit_of_a_text_without_tokens_is_not_a_number():
    tokenizer = train_wordpiece(prose(2000), 200)
    for texts in ([], [""], ["\0"]):  # no text, no words, a word of which nothing is left
        assert all(map(math.isnan, tool.fit(tokenizer, texts)[:2]))
    assert tool.fit(tokenizer, ["\u3042 \u3042", "\u3042"]) == (1.0, 1.0, "word")


@pytest.mark.parametrize(
    "argument, value",
    [
        ("--do_lower_case=false", False),
        ("--no-do_lower_case", False),
        ("--nodo_lower_case", False),
        ("--do_lower_case=true", True),
        ("--do_lower_case", True),
        ("--do_lower_case=False", False),
    ],
)
def test_boolean_flags_can_be_switched_off(argument, value):
    flags = tool.parser().parse_args(["--input=a", "--output=b", argument])
    assert flags.do_lower_case is value


def test_a_boolean_that_is_neither_is_refused(capsys):
    with pytest.raises(SystemExit):
        tool.main(["--input=a", "--output=b", "--do_lower_case=maybe"])
    assert "'maybe' is neither true nor false" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra, message",
    [
        (["other.txt"], "quote wildcards"),
        (["--vocab_sise=9"], "no such flag: --vocab_sise=9. Did you mean --vocab_size\\?"),
        (["--colour=9"], "no such flag: --colour=9; --help lists the flags"),
        (["--compare=/nowhere/vocab.txt"], "/nowhere/vocab.txt does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path, extra, message):
    with pytest.raises(SystemExit, match=message):
        tool.main([f"--input={write(tmp_path)}", f"--output={tmp_path / 'x'}", *extra])
    assert not (tmp_path / "x").exists()


def test_a_pattern_without_a_match_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="nothing\\*.txt"):
        tool.main([f"--input={tmp_path}/nothing*.txt", f"--output={tmp_path / 'x'}"])


def test_the_remedy_of_a_line_that_is_too_long_is_a_flag(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 100_000)
    arguments = [f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'x'}"]
    with pytest.raises(SystemExit, match="longer than 1 MiB.*raise --max_line_mb"):
        tool.main([*arguments, "--max_line_mb=1"])
    tool.main([*arguments, "--max_line_mb=2"])


def test_the_remedy_of_a_vocabulary_that_is_too_small_is_a_flag(tmp_path):
    (tmp_path / "in.txt").write_text("".join(map(chr, range(0x4E00, 0x4F00))))
    told = "vocab_size=60 is too small: .* Raise it, lower --num_unused or --max_chars, or raise --min_char_count$"
    with pytest.raises(SystemExit, match=told):
        tool.main([f"--input={tmp_path}/in.txt", f"--output={tmp_path / 'x'}", "--vocab_size=60"])


# --- real text --------------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parity
@pytest.mark.parametrize("lower", [True, False])
def test_transformers_and_tokenizers_give_the_ids_of_a_trained_vocabulary_on_10000_lines(
    wikipedia_lines, tmp_path, lower
):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    ours = train_wordpiece(wikipedia_lines[10_000:], 8000, lower)
    ours.save(tmp_path)
    lines = wikipedia_lines[:10_000]
    expected = ours.encode_batch(lines)
    hub = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert hub(lines, add_special_tokens=False)["input_ids"] == expected
    library = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=lower)
    encoded = library.encode_batch(lines, add_special_tokens=False)
    assert [line.ids for line in encoded] == expected
    assert sum(map(len, expected)) > 500_000


@pytest.mark.real_data
@pytest.mark.slow
def test_no_more_tokens_a_word_than_the_original_on_heldout_wikipedia(shared_data, wikipedia_lines, tmp_path):
    import tarfile

    with tarfile.open(shared_data / "corpus" / "wikipedia-featured.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    lines = (
        line
        for file in files
        for line in file.read_text(encoding="utf-8").split("\n")
        if not line.startswith(("<doc ", "</doc>"))
    )
    ours = train_wordpiece(lines)
    original = load_tokenizer(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    assert ours.vocab_size == original.vocab_size == 30522
    unknown, tokens, _ = tool.fit(ours, wikipedia_lines)
    original_unknown, original_tokens, _ = tool.fit(original, wikipedia_lines)
    print(
        f"\nours {tokens:.4f} tokens a word, {unknown:.4%} unknown; "
        f"original {original_tokens:.4f}, {original_unknown:.4%}"
    )
    assert tokens <= original_tokens
    assert unknown < 1e-4


@pytest.mark.real_data
@pytest.mark.slow
def test_a_gigabyte_of_text_within_two_gigabytes_of_memory(wikipedia_lines, tmp_path):
    """1 GB in which one word in ten is new, so that the dictionaries must forget."""
    rng = random.Random(0)
    size = 0
    with open(tmp_path / "big.txt", "w", encoding="utf-8") as file:
        while size < 1_000_000_000:
            words = rng.choice(wikipedia_lines).split()
            words[::10] = [f"{word}{rng.getrandbits(40):x}" for word in words[::10]]
            size += file.write(" ".join(words) + "\n")
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from bertjax.tools.train_vocab import main\n"
        "main(sys.argv[1:])\n"
        # ru_maxrss begins with what the process that starts this one had
        "print('peak', *(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            f"--input={tmp_path / 'big.txt'}",
            f"--output={tmp_path / 'vocab'}",
            "--vocab_size=8000",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert load_tokenizer(tmp_path / "vocab").vocab_size == 8000
    assert int(done.stdout.split()[-1]) < 2_000_000  # KiB


# --- other kinds --------------------------------------------------------------------------------

KIND = pytest.mark.parametrize("kind", ["bpe", "unigram"])


@pytest.mark.parity
@KIND
@pytest.mark.parametrize("lower", [False, True])
def test_transformers_gives_the_ids_of_other_kinds(tmp_path, capsys, kind, lower):
    transformers = pytest.importorskip("transformers")
    flags = [f"--model={kind}", "--vocab_size=400", f"--do_lower_case={lower}"]
    tool.main([f"--input={write(tmp_path)}", f"--output={tmp_path / 'v'}", *flags])
    assert f"entries in {tmp_path / 'v'}/tokenizer.json" in capsys.readouterr().out
    ours = load_tokenizer(tmp_path / "v")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "v")
    assert ours.do_lower_case == lower and ours.vocab_size == len(theirs) <= 400
    assert ours.special_ids == (1, 3, 0, 2, ours.vocab_size - 1)
    for text in [*prose(20, seed=9), "Na\u00efve  Caf\u00e9,\tit's \ufb01ne: \u4e2d\u6587 \U0001f4a9", ""]:
        assert ours.layout.join(ours.encode(text))[0].tolist() == theirs(text)["input_ids"]
        assert (
            ours.layout.join(ours.encode("a"), ours.encode(text or "b"))[0].tolist()
            == (theirs("a", text or "b")["input_ids"])
        )


@KIND
def test_other_kinds_are_a_function_of_the_sentences(kind):
    made = [train_subwords(prose(3000), kind, 330) for _ in range(2)]
    assert made[0].fingerprint == made[1].fingerprint != train_subwords(prose(3000), kind, 310).fingerprint
    text = prose(3000)[0]
    ids = made[0].encode(text)
    assert made[0].decode(ids).strip() == " ".join(text.split()) and made[0].unk_id not in ids
    assert len(ids) < len(text) / 2


def test_no_text_is_unknown_to_bytes():
    tokenizer = train_subwords(prose(3000), "bpe", 330)
    for text in ("\u4e2d\u6587", "\U0001f4a9\x00\u200b", "\u0130 na\u00efve"):
        ids = tokenizer.encode(text)
        assert tokenizer.unk_id not in ids and tokenizer.decode(ids).strip() == text


@KIND
def test_what_other_kinds_cannot_be_made_of_is_refused_or_said(tmp_path, kind, caplog):
    with pytest.raises(ValueError, match="vocab_size=5 is too small"):
        train_subwords(prose(100), kind, 5)
    with pytest.raises(ValueError, match="no words to train a vocabulary on"):
        train_subwords(["", " "], kind, 500)
    if kind == "unigram":
        with pytest.raises(ValueError, match=r"7 entries.*smaller than required_chars.*Raise --vocab_size"):
            train_subwords(prose(100), kind, 11)
    small = train_subwords(["ab ab cd"], kind, 5000)
    assert small.vocab_size < 5000 and "only" in caplog.text
    with pytest.raises(SystemExit, match=f"--num_unused has no effect on --model={kind}"):
        tool.main([f"--input={write(tmp_path)}", f"--output={tmp_path / 'x'}", f"--model={kind}", "--num_unused=3"])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_special_tokens_that_stand_in_the_text_are_not_learnt(kind):
    lines = [f"{line} <s>struck</s> out<mask> <s> <pad>" for line in prose(3000)]
    tokenizer = train_subwords(lines, kind, 330)
    assert len(set(tokenizer.vocab)) == 330
    assert tokenizer.special_ids == (1, 3, 0, 2, 329)
    ids = tokenizer.encode("a <s>struck</s> <mask>")
    assert not {*ids} & {0, 1, 2, 329} and tokenizer.decode(ids).strip() == "a <s>struck</s> <mask>"


def test_byte_level_merges_fit_a_text_as_well_as_the_library_s():
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    lines = prose(6000)
    ours = train_subwords(lines, "bpe", 400)
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=395, initial_alphabet=alphabet, show_progress=False)
    )
    held = prose(500, seed=3)
    expected = sum(len(encoding.ids) for encoding in theirs.encode_batch(held))
    assert len(ours.encode_flat(held)[0]) <= 1.01 * expected


def test_unigram_is_learnt_from_a_bounded_text(monkeypatch):
    """The trainer writes words out as often as they are counted: ten times the text is no more to it."""
    train, spelled = sentencepiece.SentencePieceTrainer.train, []

    def counted(**options):
        rows = [line.split("\t") for line in open(options["input"], encoding="utf-8")]
        spelled.append(sum(len(word) * int(count) for word, count in rows))
        train(**options)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", counted)
    monkeypatch.setattr("bertjax.tokenization.train_subwords._SPELLED", 10_000)
    few, many = (train_subwords(prose() * times, "unigram", 200) for times in (2, 20))
    assert few.vocab == many.vocab and max(spelled) < 11_000


@KIND
def test_text_without_spaces_is_learnt_from_however_long_its_clauses_are(kind):
    words = "การ น้ำ ไทย ดี มาก คน".split()
    draw = random.Random(3)
    clauses = ["".join(draw.choices(words, k=90)) for _ in range(60)]
    headings = ["short line", "another one"] * 30  # seen more than once, as nearly no clause is
    tokenizer = train_subwords([*clauses, *headings], kind, 330)
    ids = tokenizer.encode("".join(words * 20))
    assert tokenizer.unk_id not in ids and len(ids) <= 21 * len(words)
    address = train_subwords([*headings, "https://" + "x1y2" * 40], kind, 330)
    assert not any("x1" in piece for piece in address.vocab)
