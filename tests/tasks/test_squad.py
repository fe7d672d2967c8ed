"""SQuAD windows, answer spans, null odds and files."""

import json
import math
import tracemalloc

import numpy as np
import pytest

from bertjax.tasks import encoding, squad
from bertjax.tasks.squad import Question, SquadTask
from bertjax.tasks.task import Split
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS, FakeTokenizer


class Words(FakeTokenizer):
    """Splits at white space; ids count the characters of a word."""

    cls_id, sep_id, pad_id = 101, 102, 0

    def encode_batch(self, texts):
        return [[len(word) for word in text.split()] for text in texts]

    def encode_with_offsets(self, text):
        ids, offsets, at = [], [], 0
        for word in text.split():
            at = text.index(word, at)
            ids.append(len(word))
            offsets.append((at, at + len(word)))
            at += len(word)
        return ids, offsets


def split_of(*questions, labelled=True):
    return Split("dev", list(questions), labelled, "")


def logits(row, **at):
    """[t, 2] zeros but for start=(position, value) and end=(position, value), and null."""
    made = np.zeros((len(row["input_ids"]), 2))
    for name, (position, value) in at.items():
        made[position, 0 if name == "start" else 1] = value
    return made


def test_windows_that_could_not_advance_are_refused_before_any_work():
    with pytest.raises(ValueError, match="doc_stride=0 must be at least 1"):
        SquadTask("nowhere", doc_stride=0)
    with pytest.raises(ValueError, match="stride=0"):
        encoding.window_starts(10, 5, 0)
    task = SquadTask("nowhere")
    with pytest.raises(ValueError, match="max_length=67 leaves no room"):
        task.features(split_of(), Words(), 67, training=False)
    assert task.features(split_of(), Words(), 68, training=False) == []


@pytest.mark.parametrize(
    ("tokens", "room", "stride"), [(50, 10, 4), (50, 10, 99), (3, 10, 4), (5, 1, 1), (0, 10, 4), (20, 10, 10)]
)
def test_windows_cover_every_token_without_gaps(tokens, room, stride):
    starts = encoding.window_starts(tokens, room, stride)
    covered = {t for s in starts for t in range(s, min(s + room, tokens))}
    assert covered == set(range(tokens))
    assert len(starts) <= tokens + 1


def test_a_token_belongs_to_the_window_that_shows_most_around_it():
    # By hand: three windows of 5 over 9 tokens, step 2. Tokens 3 and 5 are ties, first window wins.
    owner = encoding.most_context([0, 2, 4], 5, 9)
    np.testing.assert_array_equal(owner, [0, 0, 0, 0, 1, 1, 2, 2, 2])


def test_a_long_document_needs_memory_for_its_tokens_alone():
    """Not for each of its windows: 200,000 tokens in 3,174 of them were 5 GB."""
    tracemalloc.start()
    try:
        owner = encoding.most_context(encoding.window_starts(200_000, 126, 63), 126, 200_000)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert (np.diff(owner) >= 0).all() and owner[-1] == 3173


def test_rows_hold_the_question_then_a_part_of_the_passage():
    question = Question("q", "who is it", "aa b ccc dddd eeeee f", ())
    task = SquadTask("nowhere", doc_stride=2, max_query_length=2)
    rows = task.features(split_of(question), Words(), 8, training=False)
    np.testing.assert_array_equal(rows[0]["input_ids"], [101, 3, 2, 102, 2, 1, 3, 102])
    np.testing.assert_array_equal(rows[0]["token_type_ids"], [0, 0, 0, 0, 1, 1, 1, 1])
    assert [list(row["input_ids"][4:-1]) for row in rows] == [[2, 1, 3], [3, 4, 5], [5, 1]]
    assert "start_positions" not in rows[0]


def test_the_first_answer_is_located_by_its_characters():
    question = Question("q", "x", "aa bbb cc dd ee", (("bbb cc", 3), ("dd", 10)))
    task = SquadTask("nowhere", doc_stride=3, max_query_length=1)
    rows = task.features(split_of(question), Words(), 7, training=True)
    spans = [(row["start_positions"], row["end_positions"]) for row in rows]
    assert spans == [(4, 5), (0, 0)]  # the second window lacks it
    part_of_word = Question("q", "x", "1895-1943 cc", (("1943", 5),))
    [row] = task.features(split_of(part_of_word), Words(), 7, training=True)
    assert (row["start_positions"], row["end_positions"]) == (3, 3)


def test_an_answer_with_a_no_break_space_is_kept_and_a_wrong_one_dropped_and_counted():
    nbsp = "price\u00a05 euros today"
    kept = Question("a", "x", nbsp, (("price\u00a05", 0),))
    as_blank = Question("b", "x", nbsp, (("price 5", 0),))
    wrong = Question("c", "x", "Rome is old", (("Paris", 0),), where="f.json, article 0")
    task = SquadTask("nowhere", max_query_length=1)
    rows = task.features(split_of(kept, as_blank), Words(), 16, training=True)
    assert [(r["start_positions"], r["end_positions"]) for r in rows] == [(3, 4), (3, 4)]
    assert task.dropped == 0
    many = [kept] * 199
    rows = task.features(split_of(wrong, *many), Words(), 16, training=True)
    assert task.dropped == 1 and len(rows) == 199 and rows[0]["example"] == 1
    with pytest.raises(ValueError, match="2 of 101 training answers.*'c' in f.json"):
        task.features(split_of(wrong, wrong, *many[:99]), Words(), 16, training=True)


FOLDED = WordPieceTokenizer([*SPECIALS, "the", "cafe", "##s", "is", "open", ".", "was"], do_lower_case=True)
_KITAB = "\u0643\u0650\u062a\u064e\u0627\u0628\u064c"  # Arabic with vowel signs, the last one final


@pytest.mark.parametrize(
    "context, answer",
    [
        ("The cafe\u0301 is open.", "cafe\u0301"),  # a combining accent
        ("The cafe\u0301 is open.", "The cafe\u0301"),
        ("It was cafe\u0301. Open", "cafe\u0301."),
        ("I \u2764\ufe0f the cafe", "\u2764\ufe0f"),  # an emoji's variation selector
        ("The \U0001f469\u200d\U0001f680 is open", "\U0001f469\u200d\U0001f680"),
        (f"The {_KITAB} is open", _KITAB),
        (f"The {_KITAB}", _KITAB),
        ("The \u0939\u0948\u0902 is", "\u0939\u0948\u0902"),  # Hindi, signs at the end
        ("The cafe\u00ad\u200b is", "cafe\u00ad\u200b"),  # soft hyphen, space of no width
        ("The \u200fcafe\u200f is", "\u200fcafe\u200f"),  # marks of direction around a word
        ("The is\u0301 \u0301 \u0301open is", "\u0301open"),
        ("\u0301cafe is", "\u0301cafe"),
        ("The \ud55c\uae00 is", "\ud55c\uae00"),
        ("The cafe\u0301s is", "cafe\u0301"),
    ],
)
def test_an_answer_with_characters_that_the_tokenizer_drops_is_labelled_and_predicted_whole(context, answer):
    task = SquadTask("nowhere", max_query_length=4)
    split = split_of(Question("q", "the", context, ((answer, context.index(answer)),)))
    [row] = task.features(split, FOLDED, 64, training=True)
    start, end = row["start_positions"], row["end_positions"]
    offsets = row["window"].offsets
    first = row["window"].first
    assert task.dropped == 0
    assert context[offsets[start - first, 0] : offsets[end - first, 1]] == answer
    found = task.answers(split, [row], [logits(row, start=(start, 9), end=(end, 9))])
    assert found.spans == {"q": answer}


HANGUL = WordPieceTokenizer([*SPECIALS, "the", "\u1112", "##\u1161"], do_lower_case=True)


@pytest.mark.parametrize(
    "context, answer, found",
    [
        ("the \ud558\u0301 the", "\ud558\u0301", "\ud558\u0301"),
        ("the \ud558\u0301 the", "\ud558", "\ud558\u0301"),  # the same tokens, so the same answer
        ("the \ud558 the", "\ud558", "\ud558"),
        ("\u200b\ud558 the", "\ud558", "\u200b\ud558"),
        ("the \u1112\u1161\u0301 the", "\u1112", "\u1112"),  # decomposed: each has a token of its own
        ("the \u1112\u1161\u0301 the", "\u1112\u1161", "\u1112\u1161\u0301"),
    ],
)
@pytest.mark.parametrize("length", [64, 7])  # 7: windows end between the tokens of a letter
def test_an_answer_that_ends_inside_a_letter_is_labelled_and_predicted_with_the_whole_letter(
    context, answer, found, length
):
    task = SquadTask("nowhere", max_query_length=3, doc_stride=1)
    split = split_of(Question("q", "the", context, ((answer, context.index(answer)),)))
    rows = task.features(split, HANGUL, length, training=True)
    held = [row for row in rows if row["end_positions"]]
    assert held
    for row in held:
        gold = row["start_positions"], row["end_positions"]
        begin, end = row["window"].offsets[np.array(gold) - row["window"].first][[0, 1], [0, 1]]
        assert context[begin:end] == found
    made = [logits(row, start=(row["start_positions"], 9), end=(row["end_positions"], 9)) for row in rows]
    assert task.answers(split, rows, made).spans == {"q": found}


def test_an_answer_of_nothing_but_dropped_characters_is_left_out_and_counted():
    task = SquadTask("nowhere", max_query_length=4)
    good = Question("g", "the", "The cafe", (("cafe", 4),))
    lost = Question("l", "the", "The \u200b cafe", (("\u200b", 4),))
    rows = task.features(split_of(*[good] * 99, lost), FOLDED, 64, training=True)
    assert len(rows) == 99 and task.dropped == 1
    with pytest.raises(ValueError, match="1 of 1 training answers are not at their answer_start"):
        task.features(split_of(lost), FOLDED, 64, training=True)


def test_answers_are_the_original_characters_between_the_offsets():
    question = Question("q", "x", "Caf\u00e9  au\u00a0lait \u2013 hot", (("x", 0),))
    task = SquadTask("nowhere", max_query_length=1)
    [row] = task.features(split_of(question), Words(), 16, training=False)
    found = task.answers(split_of(question), [row], [logits(row, start=(3, 5), end=(5, 5))])
    assert found.spans == {"q": "Caf\u00e9  au\u00a0lait"}
    best = found.n_best["q"][0]
    assert best["text"] == "Caf\u00e9  au\u00a0lait" and best["score"] == 10.0
    assert sum(entry["probability"] for entry in found.n_best["q"]) == pytest.approx(1.0)


def test_spans_obey_order_length_and_context():
    question = Question("q", "x", "a b c d e f", ())
    task = SquadTask("nowhere", max_query_length=1, max_answer_length=2, doc_stride=3)
    rows = task.features(split_of(question), Words(), 8, training=False)
    assert len(rows) == 2
    outputs = [logits(row) for row in rows]
    outputs[0][[3, 6], [0, 1]] = 5, 9  # a ... d: 4 tokens, too long
    outputs[0][[4, 3], [0, 1]] = 8, 8  # b ... a: backwards
    outputs[1][3, 0] = 20  # d starts in the second window, but the first shows as much around it
    found = task.answers(split_of(question), rows, outputs)
    texts = [entry["text"] for entry in found.n_best["q"]]
    assert texts and all(len(text.split()) <= 2 for text in texts)
    assert max(entry["score"] for entry in found.n_best["q"]) < 20


def test_all_spans_of_a_long_window_take_memory_for_those_that_are_short_enough():
    count, first, longest = 4096, 10, 30
    window = encoding.Window(first, np.stack([np.arange(count) * 5, np.arange(count) * 5 + 4], 1), np.ones(count, bool))
    outputs = np.random.default_rng(0).normal(size=(count + first + 1, 2)).astype(np.float32)
    tracemalloc.start()
    scores, starts, ends = squad.spans(window, outputs, longest, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(scores) == count * longest - longest * (longest - 1) // 2
    assert (ends > starts).all() and (ends - starts < 5 * longest).all()
    assert peak < 64 << 20  # all pairs took 400 MiB and more


def test_null_odds_are_the_lowest_null_score_minus_the_best_span():
    question = Question("q", "x", "a b c d e f", ())
    task = SquadTask("nowhere", "2.0", max_query_length=1, doc_stride=3)
    rows = task.features(split_of(question), Words(), 8, training=False)
    outputs = [logits(row, start=(3, 2.0), end=(3, 1.5)) for row in rows]
    outputs[0][0], outputs[1][0] = (4.0, 3.0), (1.0, 1.0)
    found = task.answers(split_of(question), rows, outputs)
    assert found.null_odds == {"q": 2.0 - 3.5}
    for task.null_threshold, text in ((-2.0, ""), (-1.5, "a")):
        assert task.decided(found) == {"q": text}


def test_a_question_whose_window_gives_no_span_gets_an_empty_answer_and_finite_odds(tmp_path):
    question = Question("q", "x", "a b c", ())
    task = SquadTask("nowhere", "2.0", max_query_length=1)
    [row] = task.features(split_of(question), Words(), 8, training=False)
    blind = squad.Window(row["window"].first, row["window"].offsets, np.zeros(3, bool))
    row = row | {"window": blind}
    outputs = [np.random.default_rng(0).normal(size=(len(row["input_ids"]), 2))]
    paths = task.write(split_of(question), [row], outputs, tmp_path)
    names = ["predictions_dev.json", "nbest_predictions_dev.json", "null_odds_dev.json"]
    assert [p.name for p in paths] == names
    predictions, n_best, odds = (json.loads(p.read_text()) for p in paths)
    assert predictions == {"q": ""} and [e["text"] for e in n_best["q"]] == [""]
    assert math.isfinite(odds["q"]) and odds["q"] >= 0


@pytest.mark.parametrize("version, written", [("1.1", "Rome"), ("2.0", "")])
def test_only_with_version_2_the_threshold_empties_an_answer_that_is_written(tmp_path, version, written):
    split = split_of(Question("q", "x", "Rome is old", ()))
    task = SquadTask("nowhere", version, max_query_length=1, null_threshold=1.0)
    [row] = task.features(split, Words(), 8, training=False)
    output = logits(row, start=(3, 5.0), end=(3, 5.0))
    output[0] = 6.0, 6.0  # null odds 2
    path, *_ = task.write(split, [row], [output], tmp_path)
    assert json.loads(path.read_text()) == {"q": written}


def test_the_threshold_found_on_dev_decides_the_answers():
    answerable = Question("q1", "x", "Rome is old", (("Rome", 0),))
    unanswerable = Question("q2", "x", "Rome is old", ())
    task = SquadTask("nowhere", "2.0", max_query_length=1)
    split = split_of(answerable, unanswerable)
    rows = task.features(split, Words(), 8, training=False)
    outputs = [logits(row, start=(3, 5.0), end=(3, 5.0)) for row in rows]
    outputs[0][0], outputs[1][0] = (2.5, 2.5), (4.5, 4.5)  # odds -5 and -1
    scores = task.score(split, rows, outputs)
    assert set(scores.values) == set(task.metric_names)
    assert scores["exact"] == 0.5 and scores["best_exact"] == 1.0
    assert task.metric == "best_f1"
    assert scores.details["best_f1_thresh"] == -5.0
    task.null_threshold = scores.details["null_threshold"]
    assert task.score(split, rows, outputs)["exact"] == 1.0
    outputs[0][0] += 1e-3  # as another shape of batch rounds
    assert task.score(split, rows, outputs)["exact"] == 1.0


def test_tfds_rows_become_the_same_questions(monkeypatch):
    answers = {"text": ["Rome", "in Rome"], "answer_start": [3, 0]}
    rows = [
        {"id": "1", "question": "x", "context": "in Rome", "answers": answers},
        {
            "id": "2",
            "question": "y",
            "context": "in Rome",
            "is_impossible": True,
            "answers": {"text": [], "answer_start": []},
        },
    ]
    asked = []
    monkeypatch.setattr(squad, "read_rows", lambda *args: asked.append(args) or (rows, "fingerprint"))
    split = SquadTask("tfds:squad/v2.0", "2.0").read("dev")
    assert asked == [("tfds:squad/v2.0:validation",)]
    assert [q.answers for q in split.records] == [(("Rome", 3), ("in Rome", 0)), ()]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "dev-v1.1.json"
    path.write_text('{"version": "1.1"}')
    with pytest.raises(ValueError, match=r"dev-v1\.1\.json is not a SQuAD file"):
        SquadTask(tmp_path).read("dev")
    entry = {"id": "1", "question": "x", "answers": []}
    paragraph = {"context": "c", "qas": [entry, entry]}
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [paragraph]}]}))
    with pytest.raises(ValueError, match=r"article 0 \(T\): question id '1' occurs twice"):
        SquadTask(tmp_path).read("dev")
    del entry["answers"]
    paragraph["qas"] = [entry]
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [paragraph]}]}))
    split = SquadTask(tmp_path).read("dev")
    assert not split.labelled
    with pytest.raises(ValueError, match="no labels.*training"):
        SquadTask(tmp_path).features(split, Words(), 80, training=True)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.real_data
@pytest.mark.parametrize(("version", "max_length", "stride"), [("2.0", 384, 128), ("1.1", 128, 32)])
def test_windows_and_spans_equal_the_fast_tokenizer_pipeline(shared_data, version, max_length, stride):
    transformers = pytest.importorskip("transformers")
    from bertjax.tokenization import load_tokenizer

    vocab = str(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    oracle = transformers.BertTokenizerFast(vocab=vocab)
    files = {"dev": f"dev-v{version}.rebuilt.json"}
    task = SquadTask(shared_data / "squad", version, files, doc_stride=stride)
    split = task.read("dev")
    split = Split("dev", split.records[::8], True, "")
    rows = iter(task.features(split, load_tokenizer(vocab, do_lower_case=True), max_length, True))
    compared = 0
    for question in split.records:
        query = oracle(question.question, add_special_tokens=False)["input_ids"]
        room = max_length - 3 - len(query)
        expected = oracle(
            question.question,
            question.context,
            truncation="only_second",
            max_length=max_length,
            stride=max(0, room - stride),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        assert room >= max_length - 3 - task.max_query_length  # else ours would trim the question
        for number, ids in enumerate(expected["input_ids"]):
            row = next(rows)
            offsets = expected["offset_mapping"][number]
            first = row["window"].first
            assert row["input_ids"].tolist() == ids
            assert row["token_type_ids"].tolist() == expected["token_type_ids"][number]
            for (start, end), (begin, until) in zip(row["window"].offsets, offsets[first:-1], strict=True):
                # Ours also hold the characters beside them that the tokenizer drops.
                assert start <= begin and until <= end
                assert not oracle.tokenize(question.context[start:begin] + question.context[until:end])
            span = (row["start_positions"], row["end_positions"])
            assert span == _span_of_run_qa(question, offsets, first, len(ids) - 2)
            compared += 1
    assert next(rows, None) is None and compared > 1300


def _span_of_run_qa(question, offsets, first, last):
    """Token span by walking from both ends, as transformers' question-answering example does."""
    if not question.answers:
        return 0, 0
    text, begin = question.answers[0]
    end = begin + len(text)
    if not (offsets[first][0] <= begin and offsets[last][1] >= end):
        return 0, 0
    while first <= last and offsets[first][0] <= begin:
        first += 1
    while offsets[last][1] >= end:
        last -= 1
    return first - 1, last + 1


def squad_file(folder, *questions, version="1.1"):
    articles = [{"title": "t", "paragraphs": [{"context": "the good film", "qas": questions}]}]
    (folder / f"train-v{version}.json").write_text(json.dumps({"data": articles}))
    return SquadTask(folder, version)


ANSWERED = {"id": "1", "question": "what?", "answers": [{"text": "good", "answer_start": 4}]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"answers": [{"text": "good", "answer_start": "4"}]}, "the answer_start of question '1' is '4'"),
        ({"answers": [{"text": None, "answer_start": 4}]}, "the answer text of question '1' is None"),
        ({"question": 7}, "the question of question '1' is 7"),
        ({"is_impossible": "false"}, "the is_impossible of question '1' is 'false'"),
        ({"answers": "good"}, "article 0 .t. is not laid out as SQuAD"),
        ({"answers": {"text": ["good"], "answer_start": []}}, "question '1' has 1 answer texts, but 0 starts"),
        ({"answers": {"text": "good", "answer_start": [4, 5, 6, 7]}}, "of question '1' are not two lists"),
    ],
)
def test_what_is_not_laid_out_as_squad_names_the_place(tmp_path, changed, words):
    with pytest.raises(ValueError, match=f"train-v1.1.json.*{words}"):
        squad_file(tmp_path, ANSWERED | changed).read("train")


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train-v1.1.json holds no questions"):
        squad_file(tmp_path).read("train")


def test_a_question_without_an_answer_belongs_to_version_two(tmp_path):
    empty = {"id": "2", "question": "why?", "answers": []}
    with pytest.raises(ValueError, match="question '2' has no answer.*version 2.0"):
        squad_file(tmp_path, ANSWERED, empty).read("train")
    assert not squad_file(tmp_path, empty).read("train").labelled  # a test file
    assert squad_file(tmp_path, ANSWERED, empty, version="2.0").read("train").labelled


@pytest.mark.parametrize("left_out", [{}, {"answers": None}])
def test_a_question_said_to_be_impossible_needs_no_list_of_answers(tmp_path, left_out):
    other = {"id": "2", "question": "why?"} | left_out
    found = squad_file(tmp_path, ANSWERED, other | {"is_impossible": True}, version="2.0").read("train")
    assert found.labelled and found.records[1].answers == ()
    with pytest.raises(ValueError, match="question '2' has neither 'answers' nor is_impossible"):
        squad_file(tmp_path, ANSWERED, other, version="2.0").read("train")
    assert not squad_file(tmp_path, other, version="2.0").read("train").labelled  # a test file


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{"text": "", "answer_start": 0}], ()),
        ([{"text": "", "answer_start": 0}, {"text": "good", "answer_start": 4}], (("good", 4),)),
        ({"text": ["good", "film"], "answer_start": [4, 9]}, (("good", 4), ("film", 9))),
        ({"text": [], "answer_start": []}, ()),
    ],
)
def test_answers_may_be_laid_out_in_columns_and_empty_ones_are_none(tmp_path, answers, expected):
    task = squad_file(tmp_path, ANSWERED | {"answers": answers, "is_impossible": None}, version="2.0")
    assert task.read("train").records[0].answers == expected
