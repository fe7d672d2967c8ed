"""Tagging: columns, schemes, windows in which no word is lost, scores over every word."""

import json

import numpy as np
import pytest

from bertjax.tasks import metrics, ner
from bertjax.tasks.conll import read_conll, read_tagged
from bertjax.tasks.ner import NerTask
from tests.fakes import FakeTokenizer


class Letters(FakeTokenizer):
    """Every letter is a sub-token; '~' is dropped, as control characters are."""

    cls_id, sep_id, pad_id, unk_id = 1, 2, 0, 3

    def encode_batch(self, texts):
        return [[ord(c) for c in text if c != "~"] for text in texts]


def write(folder, name, sentences, docstart=()):
    lines = []
    for i, sentence in enumerate(sentences):
        lines += ["-DOCSTART- -X- O", ""] if i in docstart else []
        lines += [f"{word} NN {tag}" for word, tag in sentence] + [""]
    (folder / name).write_text("\n".join(lines) + "\n")


def perfect(task, split, features):
    """Outputs that answer every word of `split` with its gold tag."""
    outputs = []
    for row in features:
        made = np.zeros((len(row["input_ids"]), len(task.labels)))
        window = row["window"]
        for p, s, w in zip(window.positions, window.sentences, window.words, strict=True):
            made[p, task.labels.index(split.records[s].tags[w])] = 1.0
        outputs.append(made)
    return outputs


@pytest.fixture
def sentences():
    return [
        [("Jim", "B-PER"), ("saw", "O"), ("New", "B-LOC"), ("York", "I-LOC")],
        [("It", "O"), ("rained", "O")],
        [("Ann", "B-PER"), ("left", "O")],
    ]


def test_every_word_of_a_long_sentence_is_tagged(tmp_path):
    rng = np.random.default_rng(0)
    long = [("w" * rng.integers(1, 6), str(rng.choice(["O", "B-X"]))) for _ in range(200)]
    write(tmp_path, "train.conll", [long])
    task = NerTask(tmp_path)
    split = task.read("train")
    features = task.features(split, Letters(), 64, training=True)
    assert max(len(row["input_ids"]) for row in features) == 64
    outputs = perfect(task, split, features)
    tags = task.predict(split, features, outputs)
    assert tags == [[tag for _, tag in long]]
    assert sum(row["tag_weights"].sum() for row in features) == 200
    scores = task.score(split, features, outputs)
    assert scores["f1"] == 1.0 and set(scores.values) == set(task.metric_names)
    with pytest.raises(ValueError, match="some words got no tag"):
        task.predict(split, features[:-1], outputs[:-1])


def test_gold_stands_at_the_first_sub_token_and_context_has_weight_zero(tmp_path, sentences):
    write(tmp_path, "train.conll", sentences, docstart=(0, 2))
    task = NerTask(tmp_path)
    rows = task.features(task.read("train"), Letters(), 64, training=True)
    assert len(rows) == 2  # one a document
    first = rows[0]
    assert "".join(map(chr, first["input_ids"][1:-1])) == "JimsawNewYorkItrained"
    at = np.flatnonzero(first["tag_weights"])
    np.testing.assert_array_equal(at, [1, 4, 7, 10, 14, 16])
    assert [task.labels[i] for i in first["tags"][at]][:4] == ["B-PER", "O", "B-LOC", "I-LOC"]
    alone = NerTask(tmp_path, context="sentence")
    assert len(alone.features(alone.read("train"), Letters(), 64, training=True)) == 3


def test_without_document_marks_each_sentence_stands_alone(tmp_path, sentences):
    write(tmp_path, "train.conll", sentences)
    task = NerTask(tmp_path)
    assert len(task.features(task.read("train"), Letters(), 64, training=True)) == 3


def test_windows_over_a_document_answer_for_each_word_once_with_context_on_both_sides(tmp_path):
    sentences = [[(f"w{i}{j}", "O") for j in range(4)] for i in range(10)]
    write(tmp_path, "train.conll", sentences, docstart=(0,))
    task = NerTask(tmp_path, labels=("O", "B-X"))
    rows = task.features(task.read("train"), Letters(), 42, training=True)
    answered = [p for row in rows for p in zip(row["window"].sentences, row["window"].words, strict=True)]
    assert sorted(answered) == [(s, w) for s in range(10) for w in range(4)]
    middle = rows[1]["window"].positions
    assert middle.min() > 8 and middle.max() < 42 - 8


def test_a_word_without_pieces_is_outside_whatever_the_head_says(tmp_path):
    write(tmp_path, "train.conll", [[("a", "B-X"), ("~", "B-X"), ("b", "B-X")], [("~", "B-X")]])
    task = NerTask(tmp_path, labels=("O", "B-X"))
    split = task.read("train")
    rows = task.features(split, Letters(), 16, training=False)
    np.testing.assert_array_equal(rows[0]["input_ids"], [1, ord("a"), ord("b"), 2])
    outputs = [np.tile([0.0, 1.0], (len(row["input_ids"]), 1)) for row in rows]
    assert task.predict(split, rows, outputs) == [["B-X", "O", "B-X"], ["O"]]
    assert len(task.features(split, Letters(), 16, training=True)) == 1  # nothing to learn from "~"


def test_a_part_of_speech_of_a_word_without_pieces_is_read_at_an_unknown_token(tmp_path):
    write(tmp_path, "train.conll", [[("a", "DET"), ("~", "SYM")]])
    task = NerTask(tmp_path, entities=False)
    [row] = task.features(split := task.read("train"), Letters(), 16, training=True)
    np.testing.assert_array_equal(row["input_ids"], [1, ord("a"), 3, 2])
    assert task.predict(split, [row], perfect(task, split, [row])) == [["DET", "SYM"]]


@pytest.mark.parametrize(
    "lines",
    [
        ["1 EU NNP I-NP I-ORG", "2 rejects VBZ I-VP O", "", "4 German JJ I-NP I-MISC"],
        ["0\tEU\tB-ORG\tx", "0\tsays\tO\tx", "", "1\tNo\tO\tx"],
        ["1-1 EU NNP O", "1-2 is VBZ O"],
        ["7 B-X", "8 O", "", "9 O", "10 O"],
        ["bc/cnn 0 In IN O", "bc/cnn 1 June NN O", "", "bc/cnn 0 we PRP O"],
    ],
)
def test_a_first_column_of_places_beside_a_column_of_words_is_refused(tmp_path, lines):
    (tmp_path / "a.conll").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="a.conll: its first column .*must hold the words: leave"):
        read_conll(tmp_path / "a.conll")


def test_numbers_as_words_are_read_where_nothing_else_is_a_word(tmp_path):
    (tmp_path / "a.conll").write_text("1984 CD O\n7 CD B-X\n\n12 CD O\n")
    with pytest.raises(ValueError, match="first column"):  # CD might be a word
        read_conll(tmp_path / "a.conll")
    (tmp_path / "b.conll").write_text("1984 O\n7 B-X\n\n12 O\n")
    assert [s.words for s in read_conll(tmp_path / "b.conll")] == [("1984", "7"), ("12",)]


def test_words_that_look_like_missing_values_and_blanks_that_are_no_blanks_are_words(tmp_path):
    odd = ["NA", "null", "nan", "None", "\xa0", "\u3000", "\u2028", "-", "#"]
    for separator in "\t ":
        (tmp_path / "a.conll").write_text("".join(f"{word}{separator}O\n" for word in odd))
        assert read_conll(tmp_path / "a.conll")[0].words == tuple(odd)
    (tmp_path / "a.conll").write_text("a\tO\nb\t\n")
    with pytest.raises(ValueError, match="a.conll:2: the last column, the tag, is empty"):
        read_conll(tmp_path / "a.conll")


def test_sentences_may_be_json_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"id": "0", "tokens": ["EU", "null"], "ner_tags": ["B-ORG", "O"]}\n\n{"tokens": ["\xa0"], "ner_tags": ["O"]}\n'
    )
    split = NerTask(tmp_path, {"train": "train.jsonl"}).read("train")
    assert [(s.words, s.tags, s.where) for s in split.records] == [
        (("EU", "null"), ("B-ORG", "O"), f"{path}:1"),
        (("\xa0",), ("O",), f"{path}:3"),
    ]
    path.write_text('{"tokens": ["EU"], "tags": null, "words": null, "ner_tags": ["B-ORG"]}\n')  # null is absent
    assert read_tagged(path)[0].tags == ("B-ORG",)
    path.write_text('{"words": ["EU", "null"], "tags": null}\n')
    assert not NerTask(tmp_path, {"train": "train.jsonl"}, labels=("O",)).read("train").labelled


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.jsonl", '{"tokens": ["a"], "ner_tags": [3]}', r"a.jsonl:1: the tags are \[3\].*names"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O", "O"]}', "a.jsonl:1: 1 words, but 2 tags"),
        ("a.jsonl", '{"text": "a"}', "a.jsonl:1: expected one key of tokens, words"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a"]}', "a.jsonl:2: a sentence wi"),
        ("a.jsonl", '{"tokens": "a b"}', "a.jsonl:1: the words are a b, not a list"),
        ("a.jsonl", '{"tokens": ["\\ud800"]}', "a.jsonl:1: .*half a surrogate pair"),
        ("a.csv", "a,O", r"a.csv: words with tags are a file in columns \(.conll\), or .jsonl"),
    ],
)
def test_other_files_of_words_are_refused_with_their_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tagged(tmp_path / name)


@pytest.mark.parametrize("scheme", metrics.SCHEMES)
def test_conversion_between_schemes_keeps_the_entities(scheme):
    rng = np.random.default_rng(0)
    for _ in range(300):
        source = rng.choice(["O", "B-X", "I-X", "B-Y", "I-Y", "S-X", "E-Y"], 8).tolist()
        converted = ner.convert_tags(source, scheme)
        assert metrics.lenient_entities(converted) == metrics.lenient_entities(source)
        # And it is well formed, by the strict reading of the target.
        assert metrics.strict_entities(converted, scheme) == metrics.lenient_entities(source)


def test_schemes_are_recognised():
    assert ner.detect_scheme([["O", "I-X", "B-X"]]) == "IOB1"
    assert ner.detect_scheme([["B-X", "I-X", "O"]]) == "IOB2"
    assert ner.detect_scheme([["B-X", "E-X", "O"]]) == "BIOES"


def test_files_are_converted_on_request_and_the_notes_say_so(tmp_path):
    write(tmp_path, "train.conll", [[("a", "I-X"), ("b", "I-X"), ("c", "O")]])
    task = NerTask(tmp_path, scheme="BIOES")
    split = task.read("train")
    assert split.notes == ("tags converted from IOB1 to BIOES",)
    assert split.records[0].tags == ("B-X", "E-X", "O") and task.labels == ("O", "B-X", "E-X")


def test_a_file_of_one_tag_teaches_nothing(tmp_path):
    write(tmp_path, "train.conll", [[("a", "O"), ("b", "O")], [("c", "O")]])
    with pytest.raises(ValueError, match=r"train\.conll: every tag is 'O'; there must be two"):
        NerTask(tmp_path)


def test_an_untagged_file_is_predicted_but_neither_trained_on_nor_scored(tmp_path):
    (tmp_path / "test.conll").write_text("Jim\nleft\n\nAnn\n")
    task = NerTask(tmp_path, labels=("O", "B-PER"))
    split = task.read("test")
    features = task.features(split, Letters(), 32, training=False)
    assert "tags" not in features[0]
    outputs = [np.tile([0.0, 1.0], (len(row["input_ids"]), 1)) for row in features]
    [path] = task.write(split, features, outputs, tmp_path)
    assert path.read_text() == "Jim\tB-PER\nleft\tB-PER\n\nAnn\tB-PER\n\n"
    for action in (
        lambda: task.score(split, features, outputs),
        lambda: task.features(split, Letters(), 32, training=True),
    ):
        with pytest.raises(ValueError, match="no labels"):
            action()


def test_a_word_with_white_space_stays_a_cell_of_the_predictions(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps({"tokens": ["New\tYork", "a\nb\r", "c d"]}))
    task = NerTask(tmp_path, {"test": "test.jsonl"}, labels=("O", "B-PER"))
    split = task.read("test")
    features = task.features(split, Letters(), 32, training=False)
    outputs = [np.tile([0.0, 1.0], (len(row["input_ids"]), 1)) for row in features]
    [path] = task.write(split, features, outputs, tmp_path)
    assert [cells.split("\t") for cells in path.read_text().split("\n")[:3]] == [
        ["New York", "B-PER"],
        ["a b ", "B-PER"],
        ["c d", "B-PER"],
    ]


def test_numbers_of_words_are_not_taken_for_the_words(tmp_path):
    path = tmp_path / "dev.conll"  # the layout of GermEval 2014 and CoNLL-U
    path.write_text("1\tEU\tB-ORG\n2\tlehnt\tO\n\n1\tPeter\tB-PER\n")
    with pytest.raises(ValueError, match="dev.conll: its first column numbers the words"):
        read_conll(path)
    path.write_text("1 O\n\n1 O\n")  # a word that is a number
    assert [s.words for s in read_conll(path)] == [("1",), ("1",)]
    path.write_text("# id 1\nEU B-ORG\n")
    with pytest.raises(ValueError, match="dev.conll:2: expected 3 columns, as on line 1, a word.*delete .*comments"):
        read_conll(path)


def test_comments_of_data_sets_are_no_words(tmp_path):
    path = tmp_path / "dev.conll"
    path.write_text("# newdoc\n# sent_id = 1\nEU _ _ B-ORG\n\n# id 5f-3\tdomain=en\n#\thttp://a.de [2009]\n# NN _ O\n")
    assert [(s.words, s.tags, s.where) for s in read_conll(path)] == [
        (("EU",), ("B-ORG",), f"{path}:3"),
        (("#",), ("O",), f"{path}:7"),
    ]


def test_bad_lines_and_unknown_tags_name_file_and_line(tmp_path):
    (tmp_path / "train.conll").write_text("a\tO\nb\n")
    with pytest.raises(ValueError, match=r"train\.conll:2: expected 2 columns.*found 1"):
        NerTask(tmp_path)
    (tmp_path / "train.conll").write_text("a\tO\n\nb\tB-X\nc\tB_X\n")
    with pytest.raises(ValueError, match=r"train\.conll:3: .*not an entity tag: 'B_X'.*:tokens"):
        NerTask(tmp_path)
    (tmp_path / "train.conll").write_text("a\tO\n\nb\tB-X\n")
    task = NerTask(tmp_path, labels=("O",))
    with pytest.raises(ValueError, match=r"train\.conll:3: tag 'B-X' is unknown"):
        task.features(task.read("train"), Letters(), 32, training=True)


@pytest.mark.parity
@pytest.mark.real_data
def test_rows_equal_the_fast_tokenizer_with_its_first_sub_token_labels(shared_data):
    transformers = pytest.importorskip("transformers")
    from bertjax.tokenization import load_tokenizer

    vocab = str(shared_data / "vocab" / "bert-base-cased-vocab.txt")
    oracle = transformers.BertTokenizerFast(vocab=vocab, do_lower_case=False)
    files = {"train": "wnut17train.conll", "dev": "emerging.dev.conll"}
    task = NerTask(shared_data / "ner" / "wnut17", files)
    split = task.read("dev")
    assert len(split.records) == 1009
    tokenizer = load_tokenizer(vocab, do_lower_case=False)
    features = task.features(split, tokenizer, 256, training=True)
    assert len(features) == 1009
    for sentence, row in zip(split.records, features, strict=True):
        expected = oracle(list(sentence.words), is_split_into_words=True)
        words = expected.word_ids()
        firsts = [w is not None and w not in words[:i] for i, w in enumerate(words)]
        assert row["input_ids"].tolist() == expected["input_ids"]
        assert (row["tag_weights"] > 0).tolist() == firsts
        tags = [task.labels[tag] for tag, f in zip(row["tags"], firsts, strict=True) if f]
        assert tags == list(sentence.tags)
