"""Metrics against scikit-learn, scipy and seqeval, on random and on degenerate inputs."""

import json
import math
import sys
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest

from bertjax.tasks import metrics

TAGS = {
    "IOB1": ["O", "I-X", "B-X", "I-Y", "B-Y"],
    "IOB2": ["O", "I-X", "B-X", "I-Y", "B-Y"],
    "BIOES": ["O", "I-X", "B-X", "E-X", "S-X", "I-Y", "B-Y", "E-Y", "S-Y"],
    "BILOU": ["O", "I-X", "B-X", "L-X", "U-X", "I-Y", "B-Y", "L-Y", "U-Y"],
}


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_numbers_equal_scikit_learn(classes):
    sk = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(classes)
    for _ in range(50):
        gold, predicted = rng.integers(0, classes, (2, rng.integers(2, 40)))
        scores = metrics.classification_scores(gold, predicted)
        assert scores["accuracy"] == pytest.approx(sk.accuracy_score(gold, predicted), abs=1e-12)
        assert scores["matthews"] == pytest.approx(sk.matthews_corrcoef(gold, predicted), abs=1e-12)
        macro = sk.f1_score(gold, predicted, average="macro", zero_division=0)
        assert scores["macro_f1"] == pytest.approx(macro, abs=1e-12)
        if classes == 2:
            expected = sk.f1_score(gold, predicted, zero_division=0)
            assert scores["f1"] == pytest.approx(expected, abs=1e-12)


def test_constant_predictions_on_the_mrpc_class_balance_give_the_known_numbers_and_a_flag():
    # 408 development pairs, 279 of them paraphrases: 279/408 and 2*279/(408+279).
    gold = np.array([1] * 279 + [0] * 129)
    ones = metrics.classification_scores(gold, np.ones(408, int))
    zeros = metrics.classification_scores(gold, np.zeros(408, int))
    assert ones["accuracy"] == pytest.approx(0.683824, abs=5e-7)
    assert ones["f1"] == pytest.approx(0.812227, abs=5e-7)
    assert zeros["accuracy"] == pytest.approx(0.316176, abs=5e-7)
    assert zeros["f1"] == 0.0
    assert ones["matthews"] == zeros["matthews"] == 0.0
    assert ones.flags == zeros.flags == (metrics.ONE_CLASS_ONLY,)
    predicted = gold.copy()
    assert metrics.classification_scores(gold, predicted).flags == ()


@pytest.mark.parametrize("levels", [3, 1000])
def test_correlations_equal_scipy_with_and_without_ties(levels):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(levels)
    for scale in (1.0, 1e-200, 1e150):
        gold = rng.integers(0, levels, 60) * scale
        predicted = (gold / scale + rng.integers(0, levels, 60)) * scale
        scores = metrics.regression_scores(gold, predicted)
        expected = stats.pearsonr(gold / scale, predicted / scale)[0]
        assert scores["pearson"] == pytest.approx(expected, abs=1e-12)
        assert scores["spearman"] == pytest.approx(stats.spearmanr(gold, predicted)[0], abs=1e-12)
    np.testing.assert_array_equal(metrics.ranks([3, 1, 3, 2]), stats.rankdata([3, 1, 3, 2]))


def test_correlation_with_constant_or_broken_predictions_is_zero_with_a_flag():
    constant = metrics.regression_scores([1.0, 2.0, 3.0], [0.1, 0.1, 0.1])
    assert constant["pearson"] == constant["spearman"] == 0.0
    assert constant.flags == (metrics.CONSTANT,)
    broken = metrics.regression_scores([1.0, 2.0, 3.0], [1.0, math.nan, 3.0])
    assert broken["pearson"] == broken["spearman"] == 0.0
    assert broken.flags == ("non-finite predictions",)


def test_nan_is_never_better_and_anything_finite_beats_it():
    assert not metrics.is_better(math.nan, None)
    assert not metrics.is_better(math.nan, 0.1)
    assert not metrics.is_better(math.inf, 0.1)
    assert metrics.is_better(-1.0, math.nan)
    assert metrics.is_better(0.0, None)
    assert not metrics.is_better(0.5, 0.5)


def test_scoring_a_split_without_labels_is_refused():
    with pytest.raises(ValueError, match="no labels"):
        metrics.classification_scores([-1] * 5, [0, 1, 0, 1, 1])
    with pytest.raises(ValueError, match="no labels"):
        metrics.regression_scores([math.nan] * 3, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="no examples"):
        metrics.accuracy([], [])
    with pytest.raises(ValueError, match="5,"):
        metrics.accuracy([1] * 5, [1] * 4)


def test_multilabel_f1_equals_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.1, 0.5, 1.0):
        gold, predicted = rng.random((20, 5)) < 0.3, rng.random((20, 5)) < rate
        scores = metrics.multilabel_scores(gold, predicted)
        for average in ("micro", "macro"):
            expected = sk.f1_score(gold, predicted, average=average, zero_division=0)
            assert scores[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)
        assert scores["accuracy"] == pytest.approx(sk.accuracy_score(gold, predicted))
        assert scores.flags == ((metrics.ONE_CLASS_ONLY,) if rate in (0.0, 1.0) else ())


@pytest.mark.parity
@pytest.mark.parametrize("scheme", TAGS)
@pytest.mark.parametrize("strict", [False, True])
def test_entity_scores_equal_seqeval_on_random_tags(scheme, strict):
    oracle = pytest.importorskip("seqeval.metrics.sequence_labeling")
    from seqeval import scheme as schemes
    from seqeval.metrics.v1 import precision_recall_fscore_support as strict_oracle

    rng = np.random.default_rng(7)
    for _ in range(150):
        lengths = rng.integers(1, 9, rng.integers(1, 6))
        gold = [list(rng.choice(TAGS[scheme], n)) for n in lengths]
        keep = rng.random() * 0.9
        predicted = [[t if rng.random() < keep else str(rng.choice(TAGS[scheme])) for t in s] for s in gold]
        scores = metrics.entity_scores(gold, predicted, scheme.replace("BILOU", "BIOES"), strict)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if strict:
                rules = getattr(schemes, scheme.replace("BIOES", "IOBES"))
                expected = strict_oracle(gold, predicted, average="micro", scheme=rules)
            else:  # which knows no L and U without a scheme
                gold, predicted = (
                    [[t.replace("L-", "E-").replace("U-", "S-") for t in s] for s in side] for side in (gold, predicted)
                )
                expected = oracle.precision_recall_fscore_support(gold, predicted, average="micro")
        assert (scores["precision"], scores["recall"], scores["f1"]) == pytest.approx(expected[:3], abs=1e-12)
        assert scores["token_accuracy"] == oracle.accuracy_score(gold, predicted)


def test_an_entity_cut_short_counts_as_wrong_though_most_tokens_are_right():
    gold = [["B-LOC", "I-LOC", "I-LOC", "O", "B-PER"]]
    scores = metrics.entity_scores(gold, [["B-LOC", "I-LOC", "O", "O", "B-PER"]])
    assert scores["precision"] == scores["recall"] == scores["f1"] == 0.5
    assert scores["token_accuracy"] == pytest.approx(0.8)
    assert scores.details["by_type"] == {"LOC": (0.0, 0.0, 0.0, 1), "PER": (1.0, 1.0, 1.0, 1)}


def test_entity_that_opens_with_i_counts_in_default_mode_only_and_the_mode_is_named():
    gold, predicted = [["B-X", "I-X", "O"]], [["I-X", "I-X", "O"]]
    lenient = metrics.entity_scores(gold, predicted)
    strict = metrics.entity_scores(gold, predicted, "IOB2", strict=True)
    assert lenient["f1"] == 1.0 and lenient.details["mode"] == "default (conlleval)"
    assert strict["f1"] == 0.0 and strict.details["mode"] == "strict IOB2"


def test_tags_outside_the_scheme_are_refused():
    with pytest.raises(ValueError, match="not part of IOB2"):
        metrics.entity_scores([["S-X"]], [["O"]], "IOB2", strict=True)
    with pytest.raises(ValueError, match="not an entity tag"):
        metrics.entity_scores([["PER"]], [["O"]])
    with pytest.raises(ValueError, match="2 gold tags but 1"):
        metrics.entity_scores([["O", "O"]], [["O"]])


def test_tagging_nothing_at_all_is_flagged():
    assert metrics.entity_scores([["B-X"]], [["O"]]).flags == (metrics.ONE_CLASS_ONLY,)
    assert metrics.entity_scores([["O"]], [["O"]]).flags == ()


@pytest.mark.parametrize(
    "predicted, flag",
    [
        ([1.0, math.nan, 2.0], "non-finite predictions"),
        ([math.inf, 1.0, 2.0], "non-finite predict"),
        ([1e200, -1e200, 3e200], "mse overflows"),
        ([1.7e308, -1.7e308, 1e308], "mse overflows"),
    ],
)
def test_no_number_of_a_regression_is_ever_nan_or_infinite_and_a_flag_says_why(predicted, flag):
    scores = metrics.regression_scores([1.0, 2.0, 3.0], predicted)
    assert all(math.isfinite(value) for value in scores.values.values())
    assert any(found.startswith(flag) for found in scores.flags)
    if "mse" in flag:
        assert scores["mse"] == sys.float_info.max
        smaller = np.array(predicted) / 1e200
        assert scores["pearson"] == pytest.approx(metrics.pearson([1.0, 2.0, 3.0], smaller))


def test_numbers_that_are_as_they_should_be_are_not_flagged():
    scores = metrics.regression_scores([1.0, 2.0, 3.0], [1e150, 2e150, 3e150])
    assert scores.flags == () and scores["pearson"] == pytest.approx(1) and scores["mse"] < 1e302


def test_scores_by_class_and_confusions_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    gold, predicted = np.random.default_rng(0).integers(0, 3, (2, 50))
    found = metrics.by_class(gold, predicted, ("a", "b", "c", "never"))
    columns = sklearn.precision_recall_fscore_support(gold, predicted, labels=range(4), zero_division=0)
    assert list(found["by_class"]) == ["a", "b", "c", "never"]
    np.testing.assert_allclose(list(found["by_class"].values()), np.transpose(columns))
    assert found["confusion"] == sklearn.confusion_matrix(gold, predicted, labels=range(4)).tolist()
    several = metrics.by_class(np.eye(3, dtype=bool)[gold], np.eye(3, dtype=bool)[predicted], "abc")
    assert several["by_class"] == {k: v for k, v in found["by_class"].items() if k != "never"}


def test_of_many_classes_the_most_confused_pairs_are_kept():
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 60, 3000)
    predicted = np.where(rng.random(3000) < 0.5, gold, gold // 7 * 5 % 60)
    names = [f"class {number}" for number in range(60)]
    found = metrics.by_class(gold, predicted, names)
    assert "confusion" not in found and len(found["by_class"]) == 60
    counts = Counter((g, p) for g, p in zip(gold.tolist(), predicted.tolist(), strict=True) if g != p)
    assert len(found["confused"]) == 30 < len(counts)
    for g, p, count in found["confused"]:
        assert counts[names.index(g), names.index(p)] == count
    assert sorted((c for *_, c in found["confused"]), reverse=True) == [c for _, c in counts.most_common(30)]


def test_scores_of_very_many_classes_take_no_more_memory_than_their_rows():
    rng = np.random.default_rng(2)
    gold, predicted = rng.integers(0, 20_000, (2, 500))
    names = [str(number) for number in range(20_000)]
    tracemalloc.start()
    try:
        found = metrics.by_class(gold, predicted, names)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found["by_class"]) == 20_000 and len(found["confused"]) == 30
    assert peak < 50e6  # a matrix of them has 3.2 GB


def test_types_of_entities_are_taken_for_each_other_where_the_words_are_the_same():
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"], ["B-ORG", "O"]]
    predicted = [["B-PER", "I-PER", "O", "B-ORG", "B-PER", "O"], ["B-ORG", "I-ORG"]]
    details = metrics.entity_scores(gold, predicted).details
    assert list(details["by_type"]) == ["LOC", "ORG", "PER"]
    # LOC: one taken for ORG, one not found. ORG: found with other bounds, on either side. PER: one right, one made up.
    assert details["confusion"] == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 0]]


def test_calibration_equals_a_computation_row_by_row():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(500, 3)) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gold = rng.integers(0, 3, 500)
    found = metrics.calibration(gold, probabilities)["calibration"]
    expected = 0.0
    for number in range(10):  # Guo et al. 2017, equations 1 to 3
        low, high = number / 10, (number + 1) / 10
        inside = [
            (max(row), int(max(range(3), key=lambda c: row[c]) == label))
            for row, label in zip(probabilities.tolist(), gold.tolist(), strict=True)
            if low < max(row) <= high
        ]
        assert found["bins"][number][0] == len(inside)
        if inside:
            sure = math.fsum(p for p, _ in inside) / len(inside)
            right = sum(hit for _, hit in inside) / len(inside)
            assert found["bins"][number][1:] == pytest.approx([sure, right])
            expected += len(inside) / 500 * abs(sure - right)
    assert found["ece"] == pytest.approx(expected) and expected > 0.05


def test_calibration_of_a_sure_and_right_model_is_zero_and_an_edge_belongs_to_the_lower_bin():
    sure = metrics.calibration([0, 1], [[1.0, 0.0], [0.0, 1.0]])["calibration"]
    assert sure["ece"] == 0 and sure["bins"][9] == [2, 1.0, 1.0]
    half = metrics.calibration([0, 1], [[0.5, 0.5], [0.5, 0.5]])["calibration"]
    assert half["ece"] == 0 and half["bins"][4] == [2, 0.5, 0.5]


def test_calibration_of_probabilities_that_are_not_finite_is_left_out():
    assert metrics.calibration([0], [[math.nan, 0.5]]) == {}


def test_scores_of_a_classification_carry_its_calibration_and_those_of_numbers_do_not(tmp_path):
    from bertjax.tasks.custom import TableTask
    from bertjax.tasks.kinds import KINDS
    from bertjax.tasks.task import label_places

    def details(name, labels, outputs, **options):
        (tmp_path / name).mkdir()
        for split in ("train", "dev"):
            (tmp_path / name / f"{split}.jsonl").write_text(
                "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels)
            )
        task = TableTask(tmp_path / name, files={s: f"{s}.jsonl" for s in ("train", "dev")}, **options)
        split = task.read("dev")
        gold, place = KINDS[task.head].gold, label_places(task.labels)
        rows = [gold(record.label, lambda name: place(name, "label"), task.num_labels) for record in split.records]
        return task.score(split, rows, [np.array(row) for row in outputs]).details

    found = details("classes", ["x", "y"], [[2.0, 0.0], [2.0, 0.0]])["calibration"]
    sure = 1 / (1 + math.exp(-2))
    assert found["ece"] == pytest.approx(sure - 0.5)
    assert found["bins"][8] == [2, pytest.approx(sure), 0.5]
    # Of sets every label is a decision: x at 0.88 is there once in two, and y is not there at 0.5, but is at 0.12.
    sets = details("sets", [["x"], ["y"]], [[2.0, 0.0], [2.0, -2.0]], head="multilabel")["calibration"]
    assert [(number, *bin) for number, bin in enumerate(sets["bins"]) if bin[0]] == [
        (4, 1, 0.5, 1.0),
        (8, 3, pytest.approx(sure), pytest.approx(1 / 3)),
    ]
    numbers = details("numbers", [1.0, 2.0], [[2.0], [1.0]], head="regression")
    assert numbers == {"gold_and_predicted": [[1.0, 2.0], [2.0, 1.0]]}
