"""SQuAD: files mean what they say or are refused by name; spans are exact; scores are official.

The scores are compared with evaluate-v1.1.py and evaluate-v2.0.py as written down here from their
definition: lower case, no ASCII punctuation, no articles, words between white space.
"""

import collections
import copy
import json
import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tasks import squad_score
from bertjax.tasks.encoding import passage_tokens
from bertjax.tasks.squad import Question, SquadTask
from bertjax.tasks.task import Split
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

TOKENIZER = WordPieceTokenizer(
    [*SPECIALS, "the", "cafe", "##s", "is", "open", ".", ",", "a", "##a", "i", "\u4e2d", "\u1112", "##\u1161", "-"],
    do_lower_case=True,
)
PIECES = st.sampled_from(
    [
        "the",
        "The",
        "cafe",
        "cafes",
        "caf\u00e9",
        "cafe\u0301",
        "is",
        "open",
        ".",
        ",",
        "a",
        "aa",
        "\u0130",
        "\u4e2d\u6587",
        "\ud558",
        "\u0301",
        "\u200b",
        "\ufe0f",
        "\u2764\ufe0f",
        "\U0001f469\u200d\U0001f680",
        "\xad",
        "\x0b",
        "-",
        "\u0643\u064c",
        "unknown",
        "\ufffd",
        "\u2028",
    ]
)
CONTEXTS = st.lists(st.tuples(PIECES, st.sampled_from([" ", " ", "", "  ", "\n", "\xa0"])), max_size=14).map(
    lambda parts: "".join(a + b for a, b in parts)
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("squad")


# --- spans


@given(
    context=CONTEXTS,
    ends=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    length=st.integers(9, 20),
    stride=st.integers(1, 8),
)
def test_answers_that_end_with_tokens_are_labelled_and_predicted_exactly(context, ends, length, stride):
    ids, offsets = passage_tokens(TOKENIZER, context)
    assert ids.tolist() == TOKENIZER.encode(context)
    if not len(ids):
        return
    assert (offsets[:, 0] < offsets[:, 1]).all() and (np.diff(offsets[:, 0]) >= 0).all()
    covered = np.zeros(len(context), bool)
    for start, end in offsets:
        covered[start:end] = True
    for at in np.flatnonzero(~covered):  # white space, and what stands between white space
        alone = re.split(r"\s", context[:at])[-1] + re.split(r"\s", context[at:])[0]
        assert context[at].isspace() or not TOKENIZER.encode(alone)
    first, last = sorted(end % len(ids) for end in ends)
    start, end = int(offsets[first, 0]), int(offsets[last, 1])
    answer = context[start:end]
    task = SquadTask("x", max_query_length=4, doc_stride=stride, max_answer_length=99)
    question = Question("q", "a", context, ((answer, start),))
    split = Split("dev", [question], True, "")
    if answer.strip() != answer:  # a vertical tab at the edge, which the label leaves out
        return
    rows = task.features(split, TOKENIZER, length, training=True)
    assert task.dropped == 0 and len(rows) > 0
    seen = False
    for row in rows:
        window, gold = row["window"], (row["start_positions"], row["end_positions"])
        if gold == (0, 0):
            inside = window.offsets[0, 0] <= start and end <= window.offsets[-1, 1]
            assert not inside
            continue
        seen = True
        spans = window.offsets[np.array(gold) - window.first]
        assert context[spans[0, 0] : spans[1, 1]] == answer
    best = [window for window in (row["window"] for row in rows)]
    assert sum(int(window.best.sum()) for window in best) == len(ids)
    if last - first + 1 <= length - 4 and stride == 1:
        assert seen
    logits = []
    for row in rows:
        made = np.zeros((len(row["input_ids"]), 2))
        if row["end_positions"]:
            made[row["start_positions"], 0] = made[row["end_positions"], 1] = 9
        logits.append(made)
    found = task.answers(split, rows, logits).spans["q"]
    if any(row["window"].best[row["start_positions"] - row["window"].first] for row in rows if row["end_positions"]):
        assert found == answer


# --- files

QUESTION = {
    "id": "q1",
    "question": "who?",
    "is_impossible": False,
    "answers": [{"text": "EU", "answer_start": 0}, {"text": "", "answer_start": 3}],
}
FILE = {
    "version": "v2.0",
    "data": [
        {"title": "t", "paragraphs": [{"context": "EU is", "qas": [QUESTION]}]},
        {"paragraphs": [{"context": "", "qas": [{**QUESTION, "id": "q2", "answers": []}]}]},
    ],
}
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(),
    st.text(max_size=2),
    st.just([]),
    st.just({}),
    st.just(["EU"]),
    st.just({"text": ["EU"], "answer_start": [0]}),
    st.just({"text": [], "answer_start": []}),
    st.just({"text": ["EU"], "answer_start": []}),
    st.just("[" * 5),
    st.just("q2"),
    st.just("\ud800"),
)


def places(value, path=()):
    """The path of every value in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else (enumerate(value) if isinstance(value, list) else ())
    for key, inner in items:
        yield from places(inner, (*path, key))


PLACES = [path for path in places(FILE) if path]


@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), STRANGE, st.booleans()), max_size=2),
    version=st.sampled_from(["1.1", "2.0"]),
    cut=st.sampled_from([None, None, None, 40, -1]),
    start=st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff", b"[" * 9999]),
)
def test_accepted_files_hold_the_questions_that_they_say(directory, changes, version, cut, start):
    data = copy.deepcopy(FILE)
    for path, value, delete in changes:
        place = data
        try:
            for key in path[:-1]:
                place = place[key]
            if delete:
                del place[path[-1]]
            else:
                place[path[-1]] = copy.deepcopy(value)
        except (KeyError, TypeError, IndexError):
            continue  # an earlier change took it away
    file = directory / f"dev-v{version}.json"
    file.write_bytes(start + json.dumps(data).encode()[:cut])
    try:
        split = SquadTask(directory, version).read("dev")
    except ValueError as error:
        assert str(file) in str(error) and type(error) is ValueError
        return
    expected = [
        (entry, paragraph["context"])
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]
    assert len(split.records) == len(expected)
    for record, (entry, context) in zip(split.records, expected, strict=True):
        assert (record.id, record.question, record.context) == (entry["id"], entry["question"], context)
        answers = entry.get("answers", [])
        if isinstance(answers, dict):
            answers = [
                {"text": text, "answer_start": start}
                for text, start in zip(answers["text"], answers["answer_start"], strict=True)
            ]
        texts = [a["text"] for a in answers if a["text"]]
        assert [text for text, _ in record.answers] == texts * (not entry.get("is_impossible"))
    rows = SquadTask(directory, version, max_query_length=4).features(split, TOKENIZER, 16, training=False)
    assert {row["example"] for row in rows} == set(range(len(expected)))


# --- scores

ANSWERS = st.one_of(
    st.sampled_from(
        [
            "",
            "the",
            "The EU",
            "EU",
            "an EU.",
            "a",
            "U.S.",
            "\u2018EU\u2019",
            "the-EU",
            "theEU",
            "EU EU is",
            "is EU",
            "\xa0EU",
            "\u0130",
            "1,000",
            "ﬁ",
        ]
    ),
    st.text(max_size=3),
)


def words(text: str) -> list[str]:
    kept = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", kept).split()


def official(gold: str, predicted: str, version: str) -> tuple[float, float]:
    """(exact, F1) of one pair."""
    one, two = words(gold), words(predicted)
    exact = float(one == two)
    if version == "2.0" and (not one or not two):
        return exact, exact
    same = sum((collections.Counter(one) & collections.Counter(two)).values())
    if same == 0:
        return exact, 0.0
    precision, recall = same / len(two), same / len(one)
    return exact, 2 * precision * recall / (precision + recall)


@given(
    rows=st.lists(
        st.tuples(st.lists(ANSWERS, max_size=2), ANSWERS, st.sampled_from([-1.5, -1.0, 0.0, 0.0, 0.5, 2.0])),
        min_size=1,
        max_size=5,
    ),
    threshold=st.sampled_from([-1.0, 0.0, 0.7]),
)
def test_scores_are_the_official_ones_and_best_thresholds_the_best(rows, threshold):
    data = [{"id": str(i), "answers": [{"text": text} for text in golds]} for i, (golds, _, _) in enumerate(rows)]
    predictions = {str(i): row[1] for i, row in enumerate(rows)}
    odds = {str(i): row[2] for i, row in enumerate(rows)}

    def at(limit):
        pairs = []
        for golds, predicted, odd in rows:
            kept = [gold for gold in golds if words(gold)] or [""]
            pairs.append(
                [max(scores) for scores in zip(*(official(gold, predicted, "2.0") for gold in kept), strict=True)]
            )
            if odd > limit:
                pairs[-1] = [float(not golds)] * 2
        return [100 * sum(column) / len(rows) for column in zip(*pairs, strict=True)]

    found = squad_score.score_v2(data, predictions, odds, threshold)
    assert [found["exact"], found["f1"]] == pytest.approx(at(threshold), abs=1e-9)
    for number, name in enumerate(("exact", "f1")):
        best = max(at(limit)[number] for limit in (-9, *odds.values()))
        assert found[f"best_{name}"] == pytest.approx(best, abs=1e-9)
        assert at(found[f"best_{name}_thresh"])[number] == pytest.approx(best, abs=1e-9)
    if all(golds for golds, _, _ in rows):
        one = squad_score.score_v1(data, predictions)
        pairs = [
            [max(scores) for scores in zip(*(official(g, p, "1.1") for g in golds), strict=True)]
            for golds, p, _ in rows
        ]
        wanted = [100 * sum(column) / len(rows) for column in zip(*pairs, strict=True)]
        assert [one["exact"], one["f1"]] == pytest.approx(wanted, abs=1e-9)
