"""Tagging: columns, schemes, windows in which no word is lost, scores over every word."""

import numpy as np
import pytest

from bertjax.tasks import metrics, ner
from bertjax.tasks.ner import NerTask, read_conll


class Letters:
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
    answered = [p for row in rows for p in zip(row["window"].sentences, row["window"].words,
                                               strict=True)]  # fmt: skip
    assert sorted(answered) == [(s, w) for s in range(10) for w in range(4)]
    middle = rows[1]["window"].positions
    assert middle.min() > 8 and middle.max() < 42 - 8


def test_a_word_that_the_tokenizer_drops_still_gets_a_tag(tmp_path):
    write(tmp_path, "train.conll", [[("a", "O"), ("~", "B-X"), ("b", "O")]])
    task = NerTask(tmp_path)
    split = task.read("train")
    [row] = task.features(split, Letters(), 16, training=True)
    np.testing.assert_array_equal(row["input_ids"], [1, ord("a"), 3, ord("b"), 2])
    assert task.predict(split, [row], perfect(task, split, [row])) == [["O", "B-X", "O"]]


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


def test_an_untagged_file_is_predicted_but_neither_trained_on_nor_scored(tmp_path):
    (tmp_path / "test.conll").write_text("Jim\nleft\n\nAnn\n")
    task = NerTask(tmp_path, labels=("O", "B-PER"))
    split = task.read("test")
    features = task.features(split, Letters(), 32, training=False)
    assert "tags" not in features[0]
    outputs = [np.tile([0.0, 1.0], (len(row["input_ids"]), 1)) for row in features]
    [path] = task.write(split, features, outputs, tmp_path)
    assert path.read_text() == "Jim\tB-PER\nleft\tB-PER\n\nAnn\tB-PER\n\n"
    for action in (lambda: task.score(split, features, outputs),
                   lambda: task.features(split, Letters(), 32, training=True)):  # fmt: skip
        with pytest.raises(ValueError, match="no labels"):
            action()


def test_numbers_of_words_are_not_taken_for_the_words(tmp_path):
    path = tmp_path / "dev.conll"  # the layout of GermEval 2014 and CoNLL-U
    path.write_text("1\tEU\tB-ORG\n2\tlehnt\tO\n\n1\tPeter\tB-PER\n")
    with pytest.raises(ValueError, match="dev.conll: its first column numbers the words"):
        read_conll(path)
    path.write_text("1 O\n\n1 O\n")  # a word that is a number
    assert [s.words for s in read_conll(path)] == [("1",), ("1",)]
    path.write_text("# id 1\nEU B-ORG\n")
    with pytest.raises(ValueError, match="dev.conll:2: expected 3 columns, as on line 1, a word"):
        read_conll(path)


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
