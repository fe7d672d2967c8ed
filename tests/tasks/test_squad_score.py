"""The SQuAD scores against the official scripts' numbers, on real prediction files and by hand."""

import hashlib
import json
import math
import re
import string

import numpy as np
import pytest

from bertjax.tasks import squad_score

# exact, F1. The two BERT systems: as published. bidaf-elmo: as the official 2.0 script prints. The
# other two 1.1 systems: our own output, kept so that a change of the rules is seen.
PUBLISHED = {
    "1.1-bert-ensemble": (86.20624408703878, 92.19557978351129),
    "1.1-slqa": (81.94891201513718, 88.38386312172172),
    "1.1-logistic-baseline": (40.14191106906339, 50.98153647324482),
    "2.0-bert-single": (78.74168280973637, 81.77528052374727),
    "2.0-bidaf-elmo": (65.70369746483618, 67.8764892145134),
}


def read(shared_data, name):
    return json.loads((shared_data / "squad" / name).read_text(encoding="utf-8"))


def read_questions(shared_data, name):
    return [q for article in read(shared_data, name)["data"] for p in article["paragraphs"] for q in p["qas"]]


def questions(**golds):
    """One a keyword: id=[answer texts]."""
    return [
        {"id": key, "question": "?", "answers": [{"text": t, "answer_start": 0} for t in texts]}
        for key, texts in golds.items()
    ]


@pytest.mark.real_data
@pytest.mark.parametrize("name", PUBLISHED)
def test_scores_of_published_predictions_equal_the_official_ones_to_the_last_digit(shared_data, name):
    version = name[:3]
    data = read_questions(shared_data, f"dev-v{version}.rebuilt.json")
    predictions = read(shared_data, f"predictions-{name}.json")
    if version == "1.1":
        result = squad_score.score_v1(data, predictions)
    else:
        result = squad_score.score_v2(data, predictions, dict.fromkeys(predictions, 0.0), threshold=1.0)
    assert (result["exact"], result["f1"]) == PUBLISHED[name]
    assert result["total"] == {"1.1": 10570, "2.0": 11873}[version]


def words(answer):
    """The normalisation of Rajpurkar et al. 2016, 6.1, read letter by letter."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    # An article goes where it stands between characters that are not part of a word.
    pieces = re.split(r"(\W+)", kept)
    return "".join(" " if piece in ("a", "an", "the") else piece for piece in pieces).split()


def overlap(gold, predicted):
    left, same = list(gold), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            same += 1
    return 0.0 if not same else 2 * same / (len(gold) + len(predicted))


@pytest.mark.real_data
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("1.1")])
def test_version_1_1_equals_an_independent_reading_of_the_definition(shared_data, name):
    """Exact match and word F1 against the best of the gold answers, averaged over questions."""
    data = read_questions(shared_data, "dev-v1.1.rebuilt.json")
    predictions = read(shared_data, f"predictions-{name}.json")
    exact, f1 = [], []
    for question in data:
        predicted = words(predictions.get(question["id"], ""))
        golds = [words(answer["text"]) for answer in question["answers"]]
        answered = question["id"] in predictions
        exact.append(float(answered and predicted in golds))
        f1.append(max(overlap(gold, predicted) for gold in golds) if answered else 0.0)
    result = squad_score.score_v1(data, predictions)
    assert result["exact"] == pytest.approx(100 * sum(exact) / len(exact), abs=1e-9)
    assert result["f1"] == pytest.approx(100 * sum(f1) / len(f1), abs=1e-9)


@pytest.mark.real_data
def test_best_thresholds_are_the_official_ones_and_their_scores_what_they_give(shared_data):
    data = read_questions(shared_data, "dev-v2.0.rebuilt.json")
    predictions = read(shared_data, "predictions-2.0-bidaf-elmo.json")

    def odds(key, answer):  # made up, deterministic, rounded so that ties occur
        noise = int(hashlib.md5(key.encode()).hexdigest()[:6], 16) / 0xFFFFFF
        return round((0.3 if answer else 0.5) + noise * 0.6 - 0.2, 2)

    null_odds = {key: odds(key, answer) for key, answer in predictions.items()}
    result = squad_score.score_v2(data, predictions, null_odds, threshold=0.4)
    # evaluate-v2.0.py --na-prob-file with the same odds and -t 0.4.
    assert result["exact"] == 57.75288469636992
    assert result["f1"] == 58.903235541090325
    # Its search, which parts questions of equal odds, says 65.71211993598922 and 67.88491168566655
    # at this threshold; what it gives when it is applied is this.
    assert result["best_exact_thresh"] == result["best_f1_thresh"] == 0.7
    applied = squad_score.score_v2(data, predictions, null_odds, threshold=0.7)
    assert result["best_exact"] == applied["exact"] == 65.70369746483618
    assert result["best_f1"] == pytest.approx(applied["f1"], abs=1e-9)
    assert 0 <= 67.88491168566655 - applied["f1"] < 0.02


def test_threshold_search_uses_the_null_odds():
    data = questions(q1=["Rome"], q2=[])
    predictions = {"q1": "Rome", "q2": "Paris"}
    result = squad_score.score_v2(data, predictions, {"q1": -5.0, "q2": -1.0}, threshold=0.0)
    assert result["exact"] == 50.0
    assert (result["best_exact"], result["best_exact_thresh"]) == (100.0, -5.0)
    # Zeros in place of the odds, a known mistake, find nothing.
    zeros = squad_score.score_v2(data, predictions, {"q1": 0.0, "q2": 0.0}, threshold=0.0)
    assert zeros["best_exact_thresh"] == 0.0


def test_the_best_score_is_what_its_threshold_gives_also_where_odds_are_equal():
    """Between questions of equal odds there is no threshold, though the official search stops."""
    data = questions(q1=["Rome"], q2=["Rome"], q3=[], q4=[], q5=["Rome"], q6=[], q7=[], q8=[])
    predictions = {f"q{i}": "Rome" for i in range(1, 9)}
    rng = np.random.default_rng(0)
    for _ in range(50):
        odds = {key: float(rng.integers(-2, 3)) for key in predictions}
        found = squad_score.score_v2(data, predictions, odds, threshold=0.0)
        for name in ("exact", "f1"):
            applied = squad_score.score_v2(data, predictions, odds, threshold=found[f"best_{name}_thresh"])
            assert applied[name] == found[f"best_{name}"]
            assert found[f"best_{name}"] == max(
                squad_score.score_v2(data, predictions, odds, threshold=t)[name] for t in (-3, -2, -1, 0, 1, 2)
            )
        assert len(found["threshold_curve"]) == 1 + len(set(odds.values()))
        for threshold, exact, f1 in found["threshold_curve"]:
            applied = squad_score.score_v2(data, predictions, odds, threshold)
            assert (applied["exact"], applied["f1"]) == (exact, f1)
    tied = dict.fromkeys(predictions, 1.0)
    assert squad_score.score_v2(data, predictions, tied, threshold=0.0)["best_exact"] == 62.5


def test_the_threshold_of_a_model_that_should_never_answer_leaves_every_question_empty():
    data = questions(q1=[], q2=[])
    predictions, odds = {"q1": "Rome", "q2": "Paris"}, {"q1": -5.0, "q2": -1.0}
    found = squad_score.score_v2(data, predictions, odds, threshold=0.0)
    assert (found["exact"], found["best_exact"]) == (0.0, 100.0)
    applied = squad_score.score_v2(data, predictions, odds, threshold=found["best_exact_thresh"])
    assert applied["exact"] == 100.0


def test_normalisation_drops_case_articles_and_punctuation():
    assert squad_score.normalize_answer("The  U.S. Army, a 'unit' ") == "us army unit"
    assert squad_score.f1("the cat sat", "Cat") == pytest.approx(2 / 3)


def test_empty_answers_are_equal_in_version_2_and_worth_nothing_in_1():
    assert squad_score.f1("", "the", "2.0") == 1.0
    assert squad_score.f1("", "the", "1.1") == 0.0
    assert squad_score.f1("", "x", "2.0") == 0.0


def test_missing_predictions_count_zero_in_1_and_are_left_out_and_counted_in_2():
    data = questions(q1=["x"], q2=["y"])
    first = squad_score.score_v1(data, {"q1": "x"})
    second = squad_score.score_v2(data, {"q1": "x"}, {"q1": 0.0}, threshold=0.0)
    assert (first["exact"], first["missing"]) == (50.0, 1)
    assert (second["exact"], second["missing"]) == (100.0, 1)
    with pytest.raises(ValueError, match="none of the predictions"):
        squad_score.score_v2(data, {"other": "x"}, {"other": 0.0}, threshold=0.0)
    with pytest.raises(ValueError, match="without null odds.*q1"):
        squad_score.score_v2(data, {"q1": "x"}, {}, threshold=0.0)


def test_a_threshold_apart_from_all_odds_decides_as_the_official_one():
    odds = [-2.0, -1.999, 0.5, 3.0, math.nextafter(3.0, 4.0)]
    for threshold in [math.nextafter(-2.0, -3), *odds, 0.0]:
        found = squad_score.apart(threshold, odds)
        assert [one > found for one in odds] == [one > threshold for one in odds]
    assert [squad_score.apart(one, odds) for one in (-3.0, 0.0, 0.5)] == [-3.0, 0.0, 0.51]
    assert squad_score.apart(-2.0, odds) == pytest.approx(-1.9995)
    assert squad_score.apart(math.nextafter(-2.0, -3), odds) == pytest.approx(-2.01)
    assert squad_score.apart(odds[-1], odds) == pytest.approx(3.01)
