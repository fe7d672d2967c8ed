import json

import numpy as np
import pytest

from bertjax.config import finetune_config, frozen
from bertjax.log.report import as_warning, sections
from bertjax.log.report.runs import Run
from bertjax.tasks import shown
from bertjax.tasks.custom import TableTask
from bertjax.tasks.ner import NerTask
from bertjax.tasks.squad import Question, SquadTask
from bertjax.tasks.swag import MultipleChoiceTask
from bertjax.tasks.task import Split
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

VOCAB = [*SPECIALS, "who", "is", "there", "anna", "bob", "."]
TOKENIZER = WordPieceTokenizer(VOCAB, do_lower_case=True)


def table_task(tmp_path, rows, **options):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TableTask(tmp_path, files={"train": "train.jsonl", "dev": "dev.jsonl"}, **options)


def test_a_label_beside_the_gold_one_with_its_probability(tmp_path):
    rows = [{"text": "anna", "label": "name"}, {"text": "is", "label": "word"}]
    task = table_task(tmp_path, rows)
    split = task.read("dev")
    logits = [np.array([1.0, 3.0]), np.array([-1.0, 1.0])]
    wrong, right = shown.examples_of(task, split, [], logits)
    assert (wrong["gold"], wrong["predicted"], wrong["right"]) == ("name", "word", False)
    assert (right["gold"], right["predicted"], right["right"]) == ("word", "word", True)
    assert wrong["texts"] == ["anna"]
    assert wrong["score"] == pytest.approx(1 / (1 + np.exp(-2)))
    assert wrong["predictions"][0] == ["word", pytest.approx(0.8808)]


def test_numbers_show_how_far_off_they_are(tmp_path):
    rows = [{"text": "anna", "label": 2.0}, {"text": "is", "label": 4.5}]
    task = table_task(tmp_path, rows, head="regression")
    made = shown.examples_of(task, task.read("dev"), [], [np.array([2.5]), np.array([1.0])])
    assert [(e["gold"], e["predicted"], e["score"]) for e in made] == [("2.00", "2.50", 0.5), ("4.50", "1.00", 3.5)]
    assert [e["gold"] for e in shown.choose(made)] == ["4.50", "2.00"]  # the worst first


def test_words_carry_gold_and_predicted_tags(tmp_path):
    text = "anna\tB-PER\nis\tO\nthere\tO\n\nwho\tO\nis\tO\n\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.conll").write_text(text)
    task = NerTask(tmp_path, files={"train": "train.conll", "dev": "dev.conll"})
    split = task.read("dev")
    features = task.features(split, TOKENIZER, 16, False)
    labels = list(task.labels)
    logits = [np.eye(len(labels))[np.full(len(row["input_ids"]), labels.index("O"))] for row in features]
    (only,) = shown.examples_of(task, split, features, logits)  # the other has nothing to see
    assert only["words"] == [["anna", "B-PER", "O"], ["is", "O", "O"], ["there", "O", "O"]]
    assert only["right"] is False


def test_answers_are_right_by_the_official_normalisation(tmp_path):
    questions = [Question("q", "who is there", "Anna is there .", (("anna", 0),), "here")]
    split = Split("dev", questions, True, "")
    task = SquadTask(tmp_path, "1.1")
    (row,) = features = task.features(split, TOKENIZER, 128, False)
    logits = np.zeros((len(row["input_ids"]), 2))
    first = row["window"].first
    logits[first] = 9.0
    (example,) = shown.examples_of(task, split, features, [logits])
    assert (example["predicted"], example["gold"], example["right"]) == ("Anna", "anna", True)
    assert example["predictions"][0][0] == "Anna" and example["score"] > 0.9


@pytest.mark.parametrize("before", ["", "who is bob . " * 100])
def test_an_example_of_question_answering_shows_the_passage_around_the_answer(tmp_path, before):
    passage = before + "anna is <b> there ."
    split = Split("dev", [Question("q", "who is there", passage, (("anna", len(before)),), "q")], True, "")
    task = SquadTask(tmp_path, "1.1")
    features = task.features(split, TOKENIZER, 128, False)
    logits = [np.zeros((len(row["input_ids"]), 2)) for row in features]
    made = shown.examples_of(task, split, features, logits)
    page = sections.examples([Run("run", [], examples=made)])
    assert '<p dir="auto">who is there</p>' in page and '<i class="right">anna</i> is &lt;b&gt; there .' in page
    assert len(made[0]["texts"][1]) <= 300
    assert ('<p dir="auto">…' in page) == bool(before)  # what stands far before is cut


@pytest.mark.parametrize(
    "gold, predicted, shown",
    [
        ("<b>", "c", 'a <i class="right">&lt;b&gt;</i> <i class="miss">c</i> d'),
        ("c", "<b>", 'a <i class="miss">&lt;b&gt;</i> <i class="right">c</i> d'),
        ("<b>", "<b>", 'a <i class="right">&lt;b&gt;</i> c d'),
        ("<b>", "<b> c", 'a <i class="right">&lt;b&gt;</i> c d'),
        ("", "d", 'a &lt;b&gt; c <i class="miss">d</i>'),
        ("absent", "", "a &lt;b&gt; c d"),
    ],
)
def test_gold_and_predicted_answers_are_marked_in_the_passage(gold, predicted, shown):
    example = {"texts": ["?", "a <b> c d"], "gold": "", "predicted": "", "right": False, "answers": [gold, predicted]}
    assert f'<p dir="auto">{shown}</p>' in sections.examples([Run("run", [], examples=[example])])


def test_an_answer_that_the_null_threshold_rules_out_is_shown_as_none(tmp_path):
    questions = [Question("q", "who is there", "anna is there .", (), "here")]
    split = Split("dev", questions, True, "")
    for version, threshold, predicted, right in (
        ("2.0", 1.0, "no answer", True),
        ("2.0", 3.0, "anna", False),
        ("1.1", 1.0, "anna", False),
    ):
        task = SquadTask(tmp_path, version, null_threshold=threshold)
        (row,) = features = task.features(split, TOKENIZER, 128, False)
        logits = np.zeros((len(row["input_ids"]), 2))
        logits[0], logits[row["window"].first] = 10.0, 9.0  # null odds: 20 - 18
        (example,) = shown.examples_of(task, split, features, [logits])
        assert (example["predicted"], example["right"]) == (predicted, right)
        assert example["gold"] == "no answer"


def test_a_choice_is_bounded_and_has_the_surest_mistakes_and_right_ones_from_all_over():
    def one(i, right):
        return {"texts": [str(i)], "gold": "", "predicted": "", "right": right, "score": i / 100}

    made = [one(i, right=i % 2 == 0) for i in range(100)]
    chosen = shown.choose(made, 3)
    assert [e["texts"][0] for e in chosen] == ["99", "97", "95", "0", "48", "98"]
    assert [e["right"] for e in chosen] == [False] * 3 + [True] * 3
    assert len(shown.choose(made[:1], 3)) == 1


def test_a_question_shows_all_its_choices(tmp_path):
    (tmp_path / "dev.tsv").write_text("o\tAnna is\tthere.\tBob.\twho.\tis.\t3\n")
    task = MultipleChoiceTask(tmp_path, files={"dev": "dev.tsv"})
    (made,) = shown.examples_of(task, task.read("dev"), [], [np.log([0.4, 0.3, 0.2, 0.1])])
    assert (made["gold"], made["predicted"], made["right"]) == ("is.", "there.", False)
    assert made["texts"] == ["Anna is"]
    assert made["predictions"] == [["there.", 0.4], ["Bob.", 0.3], ["who.", 0.2], ["is.", 0.1]]


def test_long_texts_are_cut(tmp_path):
    rows = [{"text": "anna " * 400, "label": "a"}, {"text": "bob", "label": "b"}]
    task = table_task(tmp_path, rows)
    example, _ = shown.examples_of(task, task.read("dev"), [], [np.array([1.0, 0.0])] * 2)
    assert len(example["texts"][0]) <= 300 and example["texts"][0][-1] == "…"


def test_the_report_escapes_what_comes_from_data():
    bad = "<script>alert(1)</script>"
    page = sections.examples(
        [
            Run(
                "run",
                [],
                examples=[
                    {
                        "texts": [bad],
                        "gold": bad,
                        "predicted": bad,
                        "right": False,
                        "score": 1.0,
                        "predictions": [[bad, 0.5]],
                    },
                    {
                        "texts": [],
                        "gold": "",
                        "predicted": "",
                        "right": False,
                        "score": 1.0,
                        "words": [[bad, bad, "O"]],
                    },
                    {"text": f"{bad} [MASK]", "predictions": [[bad, 1.0]]},
                ],
            )
        ]
    )
    assert "<script" not in page and page.count("&lt;script") == 8
    assert "<mark>[MASK]</mark>" in page


@pytest.mark.parametrize("head", ["classification", "regression"])
def test_examples_of_a_model_that_gives_no_numbers_are_still_json(tmp_path, head):
    (tmp_path / "dev.csv").write_text("text,label\na,1\nb,0\n")
    labels = () if head == "regression" else ("0", "1")
    task = TableTask(tmp_path, {"dev": "dev.csv"}, head=head, labels=labels)
    split = task.read("dev")
    outputs = [np.full(max(1, len(labels)), np.nan)] * 2
    made = shown.choose(shown.examples_of(task, split, [], outputs))
    assert len(made) == 2 and json.dumps(made, allow_nan=False)
    [path] = task.write(split, [], outputs, tmp_path)
    assert "NaN" not in path.read_text()


class LinearTuner:
    """Logits are the bias plus the weights of the words of a row."""

    def __init__(self, task, outputs):
        rng = np.random.default_rng(0)
        self.task, self.tokenizer, self.settings = task, TOKENIZER, frozen(finetune_config())
        self.weights = rng.normal(size=(len(VOCAB), outputs))
        self.weights[: len(VOCAB) - 6] = 0  # of special tokens

    def predict(self, params, rows, vectors=None):
        return [self.weights[row["input_ids"]].sum(0) for row in rows]

    def of(self, text):
        return self.weights[TOKENIZER.encode(text)].sum(0)


def log_odds(logits, place):
    shares = np.exp(logits) / np.exp(logits).sum()
    return np.log(shares[place] / (1 - shares[place]))


def test_a_word_matters_by_how_far_the_log_odds_of_the_prediction_fall_without_it(tmp_path):
    rows = [{"a": "who is  there", "b": "anna .", "label": label} for label in "xyz"]
    tuner = LinearTuner(table_task(tmp_path, rows, text=("a", "b")), 3)
    split = tuner.task.read("dev")
    whole = tuner.of("who is there anna .")
    best = whole.argmax()
    # Of two records, one after the other.
    (first, second), again = shown.mattered(tuner, None, split, [0, 2], [whole, None, whole])
    assert again == [first, second]
    assert [end for end, _ in first] == [3, 6, 13] and [end for end, _ in second] == [4, 6]  # "who" " is" "  there"
    without = ["is there anna .", "who there anna .", "who is anna .", "who is there .", "who is there anna"]
    expected = [log_odds(whole, best) - log_odds(tuner.of(text), best) for text in without]
    assert [change for _, change in first + second] == pytest.approx(expected, abs=1e-4)


def test_a_word_of_a_regression_matters_by_its_share_of_the_number(tmp_path):
    tuner = LinearTuner(table_task(tmp_path, [{"text": "anna is", "label": 1.0}], head="regression"), 1)
    (((one, other),),) = shown.mattered(tuner, None, tuner.task.read("dev"), [0], [tuner.of("anna is")])
    assert one[1] == pytest.approx(tuner.of("anna")[0], abs=1e-4)
    assert other[1] == pytest.approx(tuner.of("is")[0], abs=1e-4)


def test_a_word_of_a_set_of_labels_matters_for_every_decision(tmp_path):
    rows = [{"text": "anna is", "label": ["x"]}, {"text": "bob", "label": ["y"]}]
    tuner = LinearTuner(table_task(tmp_path, rows, head="multilabel"), 2)
    whole = tuner.of("anna is")
    (((one, _),),) = shown.mattered(tuner, None, tuner.task.read("dev"), [0], [whole])
    assert one[1] == pytest.approx(np.sign(whole) @ (whole - tuner.of("is")), abs=1e-4)


def test_long_texts_have_pieces_of_several_words_and_scripts_without_blanks_of_single_letters():
    (ends,) = shown.piece_ends(["word " * 100])
    assert len(ends) == 20 and ends[0] == len("word " * 5) - 1 and ends[-1] == 499
    assert shown.piece_ends(["今日は ok", ""]) == [[1, 2, 3, 6], []]


def test_the_map_is_the_first_two_principal_components():
    vectors = np.random.default_rng(0).normal(size=(30, 8)) * np.arange(1, 9)
    examples = [{"texts": ["a", "b"], "gold": "x", "predicted": "y", "right": False}] * 60
    found = shown.map_of(dict(zip(range(0, 60, 2), vectors, strict=True)), examples)
    variances, axes = np.linalg.eigh(np.cov(vectors.T))  # ascending
    expected = (vectors - vectors.mean(0)) @ axes[:, [-1, -2]]
    points = np.array([point[:2] for point in found["points"]])
    signs = np.sign((points * expected).sum(0))
    np.testing.assert_allclose(points, expected * signs, rtol=1e-3, atol=1e-3)
    assert found["share"] == pytest.approx(variances[-2:].sum() / variances.sum())
    assert found["points"][0][2:] == ["x", "y", False, "a | b"]
    assert shown.map_of({0: np.full(8, np.nan), 1: np.zeros(8), 2: np.zeros(8)}, examples) == {}
    assert shown.on_map(3).keys() == {0, 1, 2} and len(shown.on_map(10**6)) == 400


def test_what_cannot_be_shown_is_a_line_and_ends_no_run(caplog):
    with as_warning("the report shows no examples"):
        raise RuntimeError("RESOURCE_EXHAUSTED\nand a long story")
    assert caplog.messages == ["the report shows no examples: RuntimeError: RESOURCE_EXHAUSTED"]
