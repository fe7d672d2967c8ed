"""Words with tags: columns and JSON lines mean what a plain reading says, or are refused by name.

The plain reading: a line of cells between tabs, or else blanks; the first is the word and the last
the tag, as in the scripts of CoNLL-2003 and of transformers.
"""

import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tasks import metrics
from bertjax.tasks.conll import convert_tags, read_tagged
from bertjax.tasks.inputs import Inputs, Output, read_inputs
from bertjax.tasks.make import Remembered
from bertjax.tasks.ner import NerTask
from tests.fakes import FakeTokenizer

WORDS = st.one_of(
    st.sampled_from(
        [
            "EU",
            "rejects",
            "NA",
            "nan",
            "null",
            "1",
            "2",
            "1984",
            "-",
            "#",
            "\xa0",
            "\u200b",
            "\u2028",
            "\x85",
            "\ufeff",
            "\u0301",
            "é",
            "-DOCSTART-",
            '"',
            "'",
            "\x0b",
            "\x1c",
            "O",
            "B-X",
            "\U0001f600",
            "~",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\t \n\r\0"), min_size=1, max_size=3),
)
TAGS = st.sampled_from(["O", "O", "B-X", "I-X", "B-Y", "I-Y", "E-X", "S-X", "B", "I-", "X", "b-x", "NN", ""])
GOOD = st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])
LINES = st.lists(
    st.one_of(
        st.tuples(WORDS, TAGS),
        st.tuples(WORDS, GOOD),
        st.tuples(WORDS, GOOD),
        st.just(()),
        st.just(("-DOCSTART- -X- O",)),
        st.tuples(WORDS),
        st.tuples(WORDS, WORDS, GOOD),
    ),
    max_size=10,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tagged")


def reference(text: str) -> list[list[tuple[str, str]]]:
    """Sentences of (word, last cell)."""
    sentences = [[]]
    lines = text.split("\n") if "\n" in text else text.split("\r")
    for line in (line.rstrip("\r") for line in lines):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            sentences.append([])
            continue
        cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        sentences[-1].append((cells[0], cells[-1]))
    return [sentence for sentence in sentences if sentence]


class Letters(FakeTokenizer):
    """A token a character; some are dropped, as accents and controls are."""

    cls_id, sep_id, unk_id, pad_id = 1, 2, 3, 0

    def encode_batch(self, words):
        return [[10 + ord(c) % 1000 for c in word if c not in "~\u200b\u0301\ufeff"] for word in words]


@given(
    lines=LINES,
    separator=st.sampled_from(["\t", " ", "  "]),
    end=st.sampled_from(["\n", "\n", "\r\n", "\r"]),
    start=st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b"\0"]),
)
def test_accepted_columns_are_the_words_and_tags_of_a_plain_reading(directory, lines, separator, end, start):
    path = directory / "a.conll"
    text = end.join(separator.join(cells) for cells in lines)
    path.write_bytes(start + text.encode())
    try:
        sentences = read_tagged(path)
    except ValueError as error:
        assert str(path) in str(error) and type(error) is ValueError
        return
    expected = reference((start + text.encode()).decode("utf-8-sig"))
    assert [list(s.words) for s in sentences] == [[word for word, _ in s] for s in expected]
    for sentence, pairs in zip(sentences, expected, strict=True):
        if sentence.tags is not None:
            assert list(sentence.tags) == [tag.strip() for _, tag in pairs]
    inputs = read_inputs(str(path), "ner", Remembered())
    assert inputs.texts == [s.words for s in sentences]


@given(
    rows=st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {"tokens": st.lists(WORDS, max_size=4)},
                optional={"tags": st.lists(TAGS, max_size=4), "id": st.integers()},
            ),
            st.dictionaries(
                st.sampled_from(["tokens", "words", "tags", "ner_tags"]),
                st.one_of(
                    st.lists(WORDS, max_size=2),
                    st.none(),
                    st.integers(),
                    st.text(max_size=2),
                    st.lists(st.integers(), max_size=2),
                ),
                max_size=3,
            ),
            st.lists(st.integers(), max_size=1),
        ),
        max_size=4,
    )
)
def test_accepted_json_lines_are_the_words_and_tags_of_the_json_module(directory, rows):
    path = directory / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        sentences = read_tagged(path)
    except ValueError as error:
        assert f"{path}:" in str(error)
        return
    expected = [row for row in rows if row.get("tokens") or row.get("words")]
    assert [list(s.words) for s in sentences] == [row.get("tokens") or row.get("words") for row in expected]
    # A column of nulls is as good as absent.
    tags = [next((row[name] for name in ("tags", "ner_tags") if row.get(name) is not None), None) for row in expected]
    assert [s.tags for s in sentences] == [None if given is None else tuple(given) for given in tags]


@given(
    sentences=st.lists(st.lists(st.tuples(WORDS, GOOD, GOOD), min_size=1, max_size=5), min_size=1, max_size=4),
    length=st.integers(4, 12),
    context=st.sampled_from(["document", "sentence"]),
)
def test_every_word_is_answered_once_and_scored_as_by_seqeval(directory, sentences, length, context):
    seqeval = pytest.importorskip("seqeval.metrics")
    path = directory / "train.conll"
    path.write_text("\n\n".join("\n".join(f"{w}\t{g}" for w, g, _ in s) for s in sentences) + "\n")
    labels = ("O", "B-X", "I-X", "B-Y", "I-Y")
    try:
        task = NerTask(directory, {"dev": "train.conll"}, labels=labels, context=context)
        split = task.read("dev")
    except ValueError as error:
        assert str(path) in str(error)
        return
    rows = task.features(split, Letters(), length, training=False)
    if [len(record.words) for record in split.records] != list(map(len, sentences)):
        return  # a word was read as the mark between documents
    told = [[p if Letters().encode_batch([w])[0] else "O" for w, _, p in s] for s in sentences]
    outputs = []
    for row in rows:
        logits = np.zeros((len(row["input_ids"]), len(labels)))
        window = row["window"]
        for at, s, w in zip(window.positions, window.sentences, window.words, strict=True):
            logits[at, labels.index(sentences[s][w][2])] = 1
        outputs.append(logits)
    assert task.predict(split, rows, outputs) == told
    gold = [[g for _, g, _ in s] for s in sentences]
    scores = task.score(split, rows, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("precision", "recall", "f1"):
            theirs = getattr(seqeval, f"{name}_score")(gold, told, zero_division=0)
            assert scores[name] == pytest.approx(theirs, abs=1e-12)


@given(
    tags=st.lists(st.sampled_from(["O", "B-X", "I-X", "E-X", "S-X", "B-Y", "I-Y", "E-Y"]), min_size=1, max_size=8),
    scheme=st.sampled_from(metrics.SCHEMES),
)
def test_converted_tags_have_the_same_entities(tags, scheme):
    entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities(tags)
    ours = metrics.lenient_entities(tags)
    assert [(kind, first, end - 1) for kind, first, end in ours] == entities
    assert metrics.strict_entities(convert_tags(tags, scheme), scheme) == ours


@given(words=st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=3))
def test_written_tags_are_read_again(directory, words):
    path = directory / "out.conll"
    inputs = Inputs([tuple(s) for s in words], [*range(1, len(words) + 1)])
    with open(path, "w", encoding="utf-8", newline="") as file:
        output = Output(file, str(path), "ner", inputs)
        for sentence in words:
            output.write({"words": sentence, "tags": ["O"] * len(sentence)})
    if any(word.startswith(("-DOCSTART-", "\ufeff")) for s in words for word in s):
        return  # marks between documents, and at the start of a file
    try:
        again = read_tagged(path)
    except ValueError as error:
        assert "its first column" in str(error)
        return
    assert [list(s.words) for s in again] == words
