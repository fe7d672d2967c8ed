"""Prediction on the tiny random model of tests/interop/golden: order, shapes, refusals, tools."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax import embeddings, forward, inference, prediction
from bertjax.interop import load_model
from bertjax.interop.huggingface import write_directory
from bertjax.tasks import encoding
from bertjax.tokenization import WordPieceTokenizer
from bertjax.tools import features, predict
from tests.fakes import SPECIALS

GOLDEN = Path(__file__).resolve().parent / "interop" / "golden"
WORDS = [*SPECIALS, "the", "cat", "##s", "sat", "on", "mat", "."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    golden = load_model(GOLDEN)
    tokenizer = WordPieceTokenizer(WORDS, do_lower_case=True)
    write_directory(path, golden.config, golden.params, "BertForPreTraining", tokenizer)
    return path


@pytest.fixture(scope="module")
def pretrained(directory):
    return load_model(directory)


@pytest.fixture(scope="module")
def reader(directory):
    return head(directory, "question-answering")


def head(directory, task):
    return load_model(directory, task, reinitialise_head=True)


def test_fill_mask_ranks_real_tokens_for_every_mask(pretrained):
    answers = inference.fill_mask(pretrained, "the [MASK] sat on the [MASK] .", top_k=4)
    assert len(answers) == 2 and all(len(a) == 4 for a in answers)
    words = ["[CLS]", "the", "[MASK]", "sat", "on", "the", "[MASK]", ".", "[SEP]"]
    ids = np.array([[WORDS.index(word) for word in words]])
    logits = np.asarray(pretrained(ids, ids * 0 + 1, ids * 0)[0])[0]
    for filled, position in zip(answers, (2, 6), strict=True):
        e = np.exp(logits[position, : len(WORDS)].astype(np.float64))
        assert filled[0].id == e.argmax() and filled[0].token == WORDS[e.argmax()]
        assert filled[0].probability == pytest.approx(e.max() / e.sum(), rel=1e-4)
    with pytest.raises(ValueError, match="no .MASK. in"):
        inference.fill_mask(pretrained, "the cat")


def test_a_left_to_right_model_fills_no_masks(pretrained):
    model = type(pretrained.model)(dataclasses.replace(pretrained.config, is_decoder=True))
    causal = dataclasses.replace(pretrained, model=model)
    with pytest.raises(ValueError, match="left-to-right model predicts the next token"):
        inference.fill_mask(causal, "the [MASK] sat")


def test_many_texts_are_filled_as_each_alone(pretrained):
    texts = ["the [MASK] sat .", "[MASK] " * 13, "the cats sat on [MASK] mat [MASK] .", "[MASK]"]
    together = inference.fill_mask(pretrained, (text for text in texts), 3, batch_size=2)
    assert [len(masks) for masks in together] == [1, 13, 2, 1]
    for text, masks in zip(texts, together, strict=True):
        alone = inference.fill_mask(pretrained, text, 3)
        assert [[f.id for f in mask] for mask in masks] == [[f.id for f in mask] for mask in alone]
        np.testing.assert_allclose(
            [[f.probability for f in mask] for mask in masks],
            [[f.probability for f in mask] for mask in alone],
            atol=1e-6,
        )


def test_only_the_masks_are_asked_for_their_logits(pretrained):
    shapes = []

    class Watched(type(pretrained)):
        def __call__(self, **inputs):
            shapes.append(inputs["masked_positions"].shape)
            rows, asked = shapes[-1]
            return np.zeros((rows, asked, 37), np.float32), np.zeros((rows, 1, 2), np.float32)

    watched = Watched(pretrained.model, pretrained.params, pretrained.tokenizer)
    inference.fill_mask(watched, ["[MASK] [MASK] [MASK] sat", "the [MASK]"])
    inference.fill_mask(watched, "[MASK] " * 13)
    assert shapes == [(2, 4), (2, 8)]


def test_next_sentence_keeps_the_order_whatever_the_batching(pretrained):
    pairs = [("the cat", "sat ."), ("the cats sat on the mat", "the mat ."), ("cat", "cat")]
    together = inference.next_sentence(pretrained, pairs, batch_size=2)
    alone = [inference.next_sentence(pretrained, [p])[0] for p in pairs]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert all(0 < p < 1 for p in together)


def test_batches_hold_every_row_once_padded_to_its_bucket():
    rng = np.random.default_rng(0)
    rows = [forward.Row([7] * n, [0] * n, [1]) for n in rng.integers(3, 100, 50)]  # those that want positions
    seen = []
    for _, members, inputs in forward.batches_by_length(rows, 8, pad_id=0, longest=100):
        indices = np.concatenate(members)
        assert inputs["input_ids"].shape[0] == 8
        width = inputs["input_ids"].shape[1]
        assert width % 32 == 0 or width == 100
        lengths = inputs["attention_mask"].sum(1)[: len(indices)]
        assert lengths.tolist() == [len(rows[i].ids) for i in indices]
        assert lengths.max() > width - 32
        assert not seen or lengths.max() <= len(rows[seen[-1]].ids)  # of similar length
        seen += indices.tolist()
        assert len(indices) == 8 or len(seen) == 50  # none but the last has empty rows
    assert sorted(seen) == list(range(50))


def test_a_batch_of_long_rows_has_fewer_where_tokens_are_limited_and_a_width_one_shape():
    lengths = [480, 470, 300, 100, 60, *[20] * 50]
    rows = [forward.Row([7] * n, [0] * n, [1]) for n in lengths]
    batches = list(forward.batches_by_length(rows, 32, pad_id=0, longest=512, tokens=1024))
    assert [inputs["input_ids"].shape for _, _, inputs in batches] == [(2, 480), (3, 320), *[(32, 32)] * 2]
    assert [len(members) for _, members, _ in batches] == [2, 3, 32, 18]
    assert np.concatenate([members for _, members, _ in batches]).ravel().tolist() == list(range(55))
    alone = forward.batches_by_length(rows[:1], 1, pad_id=0, longest=512, tokens=64)
    assert [inputs["input_ids"].shape for _, _, inputs in alone] == [(1, 480)]  # one row fits always


def test_more_texts_than_a_batch_share_rows_the_short_ones_in_the_gaps_of_the_long():
    lengths = [480, 300, *[20] * 50]
    rows = [forward.Row([7] * n, [0] * n) for n in lengths]
    batches = list(forward.batches_by_length(rows, 32, pad_id=0, longest=512, tokens=1024))
    assert [shape[:2] for shape, _, _ in batches] == [(2, 480), (16, 64)]
    assert [list(map(len, members)) for _, members, _ in batches] == [[1, 10], [3] * 13 + [2]]
    assert sorted(i for _, members, _ in batches for row in members for i in row) == list(range(52))
    _, members, inputs = batches[0]
    np.testing.assert_array_equal(inputs["attention_mask"][1], np.repeat([*range(1, 11)], [300, *[20] * 9]))


SHORT = ["the cat", "sat", ("the cats", "sat ."), "on the mat .", "cat", "the mat"]


@pytest.mark.parametrize(
    "task, answers",
    [
        ("sequence-classification", lambda m, n: [list(x.values()) for x in inference.classify(m, SHORT, n)]),
        ("token-classification", lambda m, n: forward.run(m, forward.make_rows(m, SHORT), n)),
        ("question-answering", lambda m, n: [inference.answer(m, ["cat"] * 5, ["the mat ."] * 5, batch_size=n)]),
        ("features", lambda m, n: embeddings.sentence_embeddings(m, SHORT, batch_size=n)),
        ("features", lambda m, n: [states for _, states in embeddings.layer_outputs(m, SHORT, (0, -1), n)]),
        ("mlm", lambda m, n: forward.run(m, forward.make_rows(m, SHORT), n)),
    ],
)
def test_texts_that_share_a_row_have_the_answers_of_rows_of_their_own(directory, task, answers):
    model = head(directory, task)
    lengths = [len(row.ids) for row in forward.make_rows(model, SHORT)]
    for one, other, n in zip(answers(model, 3), answers(model, 10), lengths, strict=False):
        if task == "question-answering":
            assert [a[:3] for a in one] == [a[:3] for a in other]
        else:
            cut = slice(n) if task in ("token-classification", "mlm") else slice(None)  # padding says nothing
            np.testing.assert_allclose(one[cut], other[cut], atol=1e-5)


@pytest.mark.parametrize("many", [1, 500])
def test_rows_of_many_texts_are_those_of_each(pretrained, monkeypatch, many):
    monkeypatch.setattr(encoding, "MANY", many)
    texts = ["the cat", ("cat " * 30, "the mat ."), "", ("the", ""), "mat " * 40, ("the cats", "sat " * 30)]
    tokenizer = pretrained.tokenizer
    for text, row in zip(texts, forward.make_rows(pretrained, texts), strict=True):
        a, *b = [tokenizer.encode(t) for t in ([text] if isinstance(text, str) else text)]
        while len(a) + sum(map(len, b)) > 16 - 2 - len(b):
            max([a, *b][::-1], key=len).pop()  # one token of the longer, of equals the second
        ids, types = [tokenizer.cls_id, *a, tokenizer.sep_id], [0] * (len(a) + 2)
        for second in b:
            ids, types = [*ids, *second, tokenizer.sep_id], types + [1] * (len(second) + 1)
        assert row.ids.tolist() == ids and row.types.tolist() == types


def test_tags_and_classes_and_answers(directory):
    tags = inference.tag_words(head(directory, "token-classification"), [["the", "cats", "sat"], ["mat"] * 20, []])
    assert [len(t) for t in tags] == [3, 20, 0]
    classifier = head(directory, "sequence-classification")
    classes = inference.classify(classifier, ["the cat", ("the cat", "sat")])
    assert inference.classify(classifier, ("the cat", "sat")) == pytest.approx(classes[1])  # one pair, not two texts
    assert [sum(c.values()) for c in classes] == pytest.approx([1, 1])
    context = "the cats sat on the mat . " * 4
    answer = inference.answer(head(directory, "question-answering"), "the cat", context, stride=4)
    assert context[answer.start : answer.end] == answer.text != ""


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1"), ("O", "B-X")])
def test_a_long_sentence_is_tagged_as_the_task_tags_it(directory, tmp_path, labels):
    """Also its words of characters that the tokenizer drops: O, or read at an unknown token."""
    from bertjax.tasks.ner import NerTask

    tagger = dataclasses.replace(head(directory, "token-classification"), labels=dict(enumerate(labels)))
    rng = np.random.default_rng(0)
    words = [str(word) for word in rng.choice(["the", "cats", "sat", "mat", "\u200b"], 100)]
    (tmp_path / "test.conll").write_text("\n".join(words) + "\n", encoding="utf-8")
    task = NerTask(tmp_path, labels=labels, files={"test": "test.conll"})
    split = task.read("test")
    rows = task.features(split, tagger.tokenizer, 16, training=False)
    outputs = [np.asarray(tagger(ids[None], np.ones_like(ids[None])))[0] for ids in (row["input_ids"] for row in rows)]
    [tags] = inference.tag_words(tagger, [words])
    assert [tags] == task.predict(split, rows, outputs) and len(set(tags)) == 2
    if "O" in labels:
        assert {tag for tag, word in zip(tags, words, strict=True) if word == "\u200b"} == {"O"}
        assert inference.tag_words(tagger, [["\u200b"], []]) == [["O"], []]


def test_labels_that_may_hold_together_have_probabilities_of_their_own(directory):
    model = head(directory, "sequence-classification")
    ids = np.array([[2, 5, 6, 3]])
    logits = np.asarray(model(ids, np.ones_like(ids)), np.float64)[0]
    several = dataclasses.replace(model, settings={"problem_type": "multi_label_classification"})
    found = inference.classify(several, ["the cat"])[0]
    np.testing.assert_allclose(list(found.values()), 1 / (1 + np.exp(-logits)), atol=1e-6)
    numbers = dataclasses.replace(model, settings={"problem_type": "regression"})
    found = inference.classify(numbers, ["the cat"])[0]
    np.testing.assert_allclose(list(found.values()), logits, atol=1e-6)


def test_no_answer_where_cls_wins_by_the_stored_threshold(directory):
    reader = head(directory, "question-answering")
    context = "the cats sat on the mat . " * 4
    span = inference.answer(reader, "the cat", context)
    always = inference.answer(reader, "the cat", context, null_threshold=-np.inf)
    assert always[:3] == ("", 0, 0)
    odds = always.score - span.score
    for threshold, expected in ((odds + 0.01, span), (odds - 0.01, always)):
        stored = dataclasses.replace(reader, settings={"finetuned": {"null_threshold": threshold}})
        assert inference.answer(stored, "the cat", context) == expected


def test_a_fine_tuned_classifier_reads_as_much_of_a_text_as_its_task(directory, tmp_path):
    from bertjax.tasks.custom import TableTask

    labels = "neg", "pos"
    settings = {"finetuned": {"task": "table", "max_length": 9}}
    model = dataclasses.replace(
        head(directory, "sequence-classification"), labels=dict(enumerate(labels)), settings=settings
    )
    texts = ["the cats sat on", "the cats sat on the mat . the mat sat on cats", "mat " * 30]
    (tmp_path / "test.csv").write_text("text\n" + "\n".join(texts) + "\n")
    task = TableTask(tmp_path, {"test": "test.csv"}, labels=labels)
    rows = task.features(task.read("test"), model.tokenizer, 9, training=False)
    outputs = [np.asarray(model(ids[None], np.ones_like(ids[None])))[0] for ids in (row["input_ids"] for row in rows)]
    expected = task.kind_of_head.probabilities(np.array(outputs))
    found = inference.classify(model, texts)
    np.testing.assert_allclose([list(one.values()) for one in found], expected, atol=1e-6)
    whole = inference.classify(dataclasses.replace(model, settings={}), texts)
    assert [a == pytest.approx(b) for a, b in zip(whole, found, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    "data, message",
    [
        ([("the", "cat"), None], "row 1 is None, which is not text"),
        ([1], "row 0 is 1, which is not text"),
        ({"q": ["the"], "a": [float("nan")]}, r"row 0 is \('the', None\), which is not text"),
        (("the cat", "the mat"), "row 0 is 'the cat'; the model was fine-tuned on q and a"),
        ([("the", "cat", "sat")], "row 0 is .*; the model was fine-tuned on q and a"),
    ],
)
def test_inputs_that_the_model_was_not_made_for_are_refused_by_row(directory, data, message):
    settings = {"finetuned": {"task": "table", "options": {"text": ["q", "a"]}}}
    model = dataclasses.replace(head(directory, "sequence-classification"), settings=settings)
    with pytest.raises(ValueError, match=message):
        prediction.predict(model, data)


def test_predict_cuts_rows_at_the_length_that_it_is_given(directory, tmp_path, capsys):
    model = head(directory, "sequence-classification")
    write_directory(tmp_path / "m", model.config, model.params, "BertForSequenceClassification", model.tokenizer)
    asked = [f"--model={tmp_path / 'm'}", "--task=classify", "--text=the cats sat on the mat ."]
    for flag in ("--max_length=5", "--config.task.max_length=5"):
        predict.main([*asked, flag])
        found = json.loads(capsys.readouterr().out)["labels"]
        assert found == pytest.approx(inference.classify(model, "the cats"))  # [CLS] the cat ##s [SEP]
    with pytest.raises(SystemExit, match="^predict: --max_length=17 exceeds the 16 positions of the model"):
        predict.main([*asked, "--max_length=17"])


def test_rows_of_a_benchmark_have_its_columns_of_files_or_of_data_sets(directory):
    model = dataclasses.replace(head(directory, "sequence-classification"), settings={"finetuned": {"task": "mnli"}})
    for names in (("sentence1", "sentence2"), ("premise", "hypothesis")):
        found = prediction.predict(model, dict(zip(names, (["the cat"], ["the mat"]), strict=True)))
        assert found.records[0]["text"] == ("the cat", "the mat")


def test_several_numbers_are_all_in_the_answer(directory):
    model = dataclasses.replace(head(directory, "sequence-classification"), settings={"problem_type": "regression"})
    found = prediction.predict(model, ["the cat"])
    assert found[0] == inference.classify(model, "the cat") and len(found[0]) == 2
    assert all(f"{name} {value:.4f}" in found._repr_html_() for name, value in found[0].items())


def test_predictions_are_sliced_as_a_list(directory):
    found = prediction.predict(head(directory, "sequence-classification"), np.array(["the cat", "mat", "sat on"]))
    assert found[1:] == list(found)[1:] and found[-1] == list(found)[-1]
    assert [type(record["text"]) for record in found.records] == [str] * 3


def test_a_fine_tuned_reader_answers_as_its_task(reader, tmp_path):
    """By its options, and with no answer where no span is among the likeliest starts and ends."""
    from bertjax.tasks.squad import SquadTask

    options = {"doc_stride": 3, "max_query_length": 3, "max_answer_length": 2, "n_best": 2}
    model = dataclasses.replace(
        reader, settings={"finetuned": {"task": "squad1.1", "options": options, "max_length": 14}}
    )
    rng = np.random.default_rng(2)
    contexts = [" ".join(rng.choice(WORDS[5:7] + WORDS[8:], rng.integers(3, 30))) for _ in range(30)]
    asked = [{"id": str(i), "question": "the cat sat on the mat"} for i in range(len(contexts))]
    paragraphs = [{"context": context, "qas": [one]} for context, one in zip(contexts, asked, strict=True)]
    (tmp_path / "test.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    task = SquadTask(tmp_path, "1.1", {"test": "test.json"}, **options)
    split = task.read("test")
    rows = task.features(split, model.tokenizer, 14, training=False)
    outputs = []
    for row in rows:
        ids, types = row["input_ids"][None], row["token_type_ids"][None]
        outputs.append(np.stack([np.asarray(x)[0] for x in model(ids, np.ones_like(ids), types)], -1))
    expected = list(task.answers(split, rows, outputs).spans.values())
    found = inference.answer(model, [one["question"] for one in asked], contexts)
    assert [one.text for one in found] == expected and "" in expected and len(set(expected)) > 3
    assert all(one.text == context[one.start : one.end] for one, context in zip(found, contexts, strict=True))
    records = prediction.predict(model, [(one["question"], c) for one, c in zip(asked, contexts, strict=True)]).records
    assert [record["score"] is None for record in records] == [text == "" for text in expected]


def spans_of(reader, question, context, longest, stride):
    """{(start, end): score}, the best score of [CLS]: one window at a time, pair by pair."""
    ids, offsets = reader.tokenizer.encode_with_offsets(context)
    first = [2, *reader.tokenizer.encode(question), 3]
    room = 16 - len(first) - 1
    begins = range(0, max(1, len(ids) - room + stride), stride)
    shown = {b: range(b, min(b + room, len(ids))) for b in begins}

    def worth(b, i):
        return min(i - b, shown[b][-1] - i) + 0.01 * len(shown[b]) if i in shown[b] else -1

    found, none = {}, []
    for b, tokens in shown.items():
        row = [*first, *ids[b : b + room], 3]
        inputs = {
            "input_ids": row,
            "attention_mask": [1] * len(row),
            "token_type_ids": [0] * len(first) + [1] * (len(row) - len(first)),
        }
        starts, ends = (
            np.asarray(logits)[0]
            for logits in reader(
                **{name: np.array([values + [0] * (16 - len(row))], np.int32) for name, values in inputs.items()}
            )
        )
        none.append(starts[0] + ends[0])
        for i in tokens:
            if b == max(begins, key=lambda b, i=i: worth(b, i)):
                for j in tokens[i - b : i - b + longest]:
                    score = starts[len(first) + i - b] + ends[len(first) + j - b]
                    found[offsets[i][0], offsets[j][1]] = score
    return found, min(none)


def test_many_questions_are_answered_as_each_alone(reader):
    rng = np.random.default_rng(1)
    asked = [
        (
            " ".join(rng.choice(WORDS[5:7], rng.integers(1, 5))),
            " ".join(rng.choice(["the", "cats", "sat", "on", "mat", "."], n)),
        )
        for n in (3, 60, 1, 25, 9)
    ]
    asked.append((asked[0][0], asked[4][1]))  # shares the context of its neighbour
    for longest in (1, 3):
        options = {"max_answer_tokens": longest, "stride": 4}
        expected = [spans_of(reader, *one, longest, stride=4) for one in asked]
        # By how much [CLS] exceeds the best span: half of the questions have no answer then.
        odds = float(np.median([none - max(spans.values()) for spans, none in expected]))
        for threshold, answered in ((None, len(asked)), (odds, 3), (-np.inf, 0)):
            options["null_threshold"] = threshold
            together = inference.answer(reader, *zip(*asked, strict=True), batch_size=4, **options)
            assert sum(one.text != "" for one in together) == answered
            for (question, context), (spans, none), found in zip(asked, expected, together, strict=True):
                best = max(spans, key=spans.get)
                score = spans[best]
                if threshold is not None and none - score > threshold:
                    best, score = (0, 0), none
                alone = inference.answer(reader, question, context, batch_size=1, **options)
                for one in (found, alone):
                    assert one[:3] == (context[slice(*best)], *best)
                    assert one.score == pytest.approx(float(score), abs=1e-6)


def test_one_input_is_answered_as_a_list_of_it_and_a_path_as_its_model(pretrained, directory, tmp_path):
    classifier, tagger, reader = (
        head(directory, f"{kind}") for kind in ("sequence-classification", "token-classification", "question-answering")
    )
    paths = {}
    for model in (classifier, tagger, reader):
        paths[id(model)] = path = tmp_path / type(model.model).__name__
        write_directory(path, model.config, model.params, path.name, model.tokenizer)
    for function, model, one in (
        (inference.fill_mask, pretrained, "the [MASK]"),
        (inference.classify, classifier, "the cat"),
        (inference.tag_words, tagger, "the cats sat"),
        (inference.next_sentence, pretrained, ("the cat", "sat")),
        (embeddings.sentence_embeddings, pretrained, "the cat"),
        (embeddings.sentence_embeddings, tagger, "the cat"),
    ):
        [listed] = function(model, [one])
        assert np.array_equal(function(model, one), listed)
        path = paths.get(id(model), directory)
        for place in (path, str(path)):
            assert str(function(place, one))[:20] == str(listed)[:20]
        with pytest.raises(ValueError, match="needs a model of load_model or its path, not 5"):
            function(5, one)
    assert inference.tag_words(tagger, "the  cats sat") == inference.tag_words(tagger, [["the", "cats", "sat"]])[0]
    assert (
        inference.answer(paths[id(reader)], "the cat", "sat on the mat")
        == inference.answer(reader, ["the cat"], ["sat on the mat"])[0]
    )


def test_a_loaded_model_is_shown_in_one_line(pretrained, directory):
    assert repr(pretrained) == ("<BertForPreTraining: 2 layers x 24, 11,663 parameters, 12 uncased words>")
    labelled = dataclasses.replace(head(directory, "token-classification"), labels={0: "O"})
    assert repr(labelled).endswith("12 uncased words, labels O>")


def test_what_is_no_list_of_inputs_is_refused(pretrained, reader, directory):
    classifier, tagger = (head(directory, f"{kind}-classification") for kind in ("sequence", "token"))
    for function, model, value in (
        (inference.classify, classifier, 5),
        (embeddings.sentence_embeddings, pretrained, 5),
        (inference.tag_words, tagger, 5),
        (inference.tag_words, tagger, [5]),
        (inference.next_sentence, pretrained, ["the cat", "sat"]),
    ):
        with pytest.raises(ValueError, match="takes a list such as"):
            function(model, value)
    for table in ({"text": ["the cat"]}, pytest.importorskip("pandas").DataFrame({"text": ["the cat"]})):
        for function, model in ((inference.classify, classifier), (embeddings.sentence_embeddings, pretrained)):
            with pytest.raises(ValueError, match="(?s)takes a list .* of a table give the column"):
                function(model, table)
    with pytest.raises(ValueError, match="takes a list such as .text., or one text, not 5"):
        inference.fill_mask(pretrained, 5)
    with pytest.raises(ValueError, match="a text is a string, not None"):
        inference.fill_mask(pretrained, ["the [MASK]", None])
    with pytest.raises(ValueError, match="takes a list such as .question. and .context., or"):
        inference.answer(reader, ["the cat"], "the cats sat")
    with pytest.raises(ValueError, match="2 questions and 1 contexts"):
        inference.answer(reader, ["the cat", "sat"], ["the cats sat"])
    with pytest.raises(ValueError, match="the context is empty, or has no room beside the question 'sat'"):
        inference.answer(reader, ["the cat", "sat"], ["the cats sat", ""])
    with pytest.raises(ValueError, match="the text has 33 tokens with .*the model reads 16"):
        inference.fill_mask(pretrained, "cat " * 30 + "[MASK]")


@pytest.mark.parametrize("value", [None, float("nan"), 5, b"cat", ("the", "cat", "sat"), ("cat", 5), (None, "cat"), ()])
def test_what_is_neither_a_text_nor_a_pair_is_named(pretrained, directory, value):
    with pytest.raises(ValueError, match="a text or a pair of two texts, not"):
        inference.classify(head(directory, "sequence-classification"), ["the cat", value])
    with pytest.raises(ValueError, match="a text or a pair of two texts, not|takes a list such"):
        inference.next_sentence(pretrained, [("the", "cat"), value])
    if not isinstance(value, tuple):
        with pytest.raises(ValueError, match="a word is a string, not"):
            inference.tag_words(head(directory, "token-classification"), [["the", value]])


def test_inputs_may_come_from_any_iterable(pretrained, directory):
    texts = ["the cat", "sat on the mat"]
    classifier = head(directory, "sequence-classification")
    assert inference.classify(classifier, (t for t in texts)) == inference.classify(classifier, np.array(texts))
    pairs = [texts, texts[::-1]]
    assert inference.next_sentence(pretrained, zip(*pairs, strict=True)) == (
        inference.next_sentence(pretrained, [("the cat", "sat on the mat"), ("sat on the mat", "the cat")])
    )


def test_no_inputs_no_answers(pretrained, directory):
    assert inference.next_sentence(pretrained, []) == []
    assert inference.classify(head(directory, "sequence-classification"), []) == []
    assert inference.tag_words(head(directory, "token-classification"), []) == []
    assert inference.fill_mask(pretrained, []) == []
    assert inference.answer(head(directory, "question-answering"), [], []) == []
    assert embeddings.sentence_embeddings(load_model(directory, "features"), []).shape == (0, 24)


def test_numbers_that_cannot_work_are_refused_at_once(pretrained, directory):
    reader = head(directory, "question-answering")
    for wrong in ({"stride": 0}, {"max_answer_tokens": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0 must be at least 1"):
            inference.answer(reader, "the cat", "the cats sat on the mat . " * 4, **wrong)
    for wrong in (0, 2.0):
        with pytest.raises(ValueError, match=f"top_k={wrong} must be a whole number"):
            inference.fill_mask(pretrained, "the [MASK]", top_k=wrong)


def test_features_are_the_hidden_states(directory):
    loaded = load_model(directory, "features")
    (tokens, states), _ = embeddings.layer_outputs(loaded, ["the cats sat", "mat"], (-1, 0))
    assert tokens == ["[CLS]", "the", "cat", "##s", "sat", "[SEP]"]
    ids = np.array([[2, 5, 6, 7, 8, 3]])
    hidden, _ = loaded(ids, ids * 0 + 1, all_hidden=True)
    np.testing.assert_allclose(states, np.stack([hidden[-1][0], hidden[0][0]]), atol=1e-5)
    mean = embeddings.sentence_embeddings(loaded, ["the cats sat"])
    np.testing.assert_allclose(mean[0], states[0].mean(0), atol=1e-6)
    with pytest.raises(ValueError, match="no layers"):
        next(embeddings.layer_outputs(loaded, ["cat"], (7,)))
    with pytest.raises(ValueError, match=r"layers=\[\] names none"):
        next(embeddings.layer_outputs(loaded, ["cat"], []))


def test_wrong_models_are_refused(pretrained):
    with pytest.raises(ValueError, match="BertForTokenClassification, this is a BertForPre"):
        inference.tag_words(pretrained, [["cat"]])


def test_multiple_choice_is_no_classifier(directory):
    model = head(directory, "multiple-choice")
    with pytest.raises(ValueError, match="needs a BertForSequenceClassification, this is a BertForMultipleChoice"):
        inference.classify(model, "the cat")
    with pytest.raises(ValueError, match="multiple choice is answered by bertjax.tools.evaluate"):
        prediction.predict(model, ["the cat"])


HEADS = "sequence-classification", "token-classification", "multiple-choice"


@pytest.mark.parametrize("made, asked", [*itertools.permutations(HEADS, 2)])
def test_a_head_is_not_read_as_one_of_another_kind(directory, tmp_path, made, asked):
    model = head(directory, made)
    write_directory(tmp_path / "m", model.config, model.params, type(model.model).__name__, model.tokenizer)
    assert type(load_model(tmp_path / "m", made).model) is type(model.model)
    with pytest.raises(
        ValueError, match=f"a {type(model.model).__name__} cannot be used .* its own task is {made}$|missing"
    ):
        load_model(tmp_path / "m", asked)


def test_the_tools_write_json_lines_and_npz(directory, tmp_path, capsys):
    arguments = [f"--model={directory}", "--task=fill-mask", "--text=the [MASK] .", "--top_k=2"]
    predict.main(arguments)
    assert len(json.loads(capsys.readouterr().out)["masks"][0]) == 2
    source = tmp_path / "in.txt"
    source.write_text("the cat\nthe cats\tsat\n")
    common = [f"--model={directory}", f"--file={source}"]
    features.main([*common, f"--out={tmp_path / 'a.jsonl'}", "--layers=-1,-2"])
    lines = [json.loads(x) for x in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [f["token"] for f in lines[1]["features"]][:4] == ["[CLS]", "the", "cat", "##s"]
    assert len(lines[0]["features"][0]["layers"]) == 2
    features.main([*common, f"--out={tmp_path / 'b.npz'}", "--pooling=cls"])
    assert np.load(tmp_path / "b.npz")["embeddings"].shape == (2, 24)
    with pytest.raises(SystemExit, match="--layers=-2 has no effect with --pooling, which takes the last layer"):
        features.main([*common, f"--out={tmp_path / 'b.npz'}", "--pooling=cls", "--layers=-2"])
    with pytest.raises(SystemExit, match="^predict: .*does not fit the model"):
        predict.main([f"--model={directory}", "--task=qa", "--text=a\tb"])
    jax.clear_caches()


@pytest.mark.parametrize("task", ["classify", "ner"])
def test_every_line_of_a_file_has_an_answer_also_a_blank_one(directory, tmp_path, task):
    model = head(directory, {"classify": "sequence-classification", "ner": "token-classification"}[task])
    write_directory(
        tmp_path / "m", model.config, model.params, type(model.model).__name__, model.tokenizer, {0: "x", 1: "y"}
    )
    (tmp_path / "in.txt").write_text("the cat\n\nsat\n\n\n")
    out = tmp_path / "deep" / "out.jsonl"
    predict.main([f"--model={tmp_path / 'm'}", f"--task={task}", f"--file={tmp_path / 'in.txt'}", f"--out={out}"])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer.get("text") or " ".join(answer.get("words", "")) for answer in answers] == ["the cat", "", "sat"]


@pytest.mark.parametrize(
    "problem, chosen",
    [
        (None, {"label": "b"}),
        ("single_label_classification", {"label": "b"}),
        ("multi_label_classification", {"chosen": ["b", "c"]}),
        ("regression", {}),
    ],
)
def test_what_is_chosen_depends_on_the_kind_of_labels(problem, chosen, directory, monkeypatch, capsys):
    model = dataclasses.replace(head(directory, "sequence-classification"), settings={"problem_type": problem})
    monkeypatch.setattr(predict, "load_model", lambda *_: model)
    labels = {"a": 0.1, "b": 0.8, "c": 0.7}
    monkeypatch.setattr(inference, "classify", lambda loaded, texts, _: [labels for _ in texts])
    predict.main(["--model=m", "--task=classify", "--text=the cat"])
    assert json.loads(capsys.readouterr().out) == {"text": "the cat", "labels": labels, **chosen}


def test_lines_of_questions_and_of_masks_are_answered_in_order(reader, pretrained, monkeypatch, capsys):
    models = {"r": reader, "p": pretrained}
    monkeypatch.setattr(predict, "load_model", lambda path, *_: models[path])
    asked = [("the", "cats sat on the mat " * 5), ("cat", "sat"), ("mat", "the cat . " * 3)]
    predict.main(["--model=r", "--task=qa", "--batch_size=1", *("--text=" + "\t".join(one) for one in asked)])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for (question, context), found in zip(asked, answers, strict=True):
        one = inference.answer(reader, question, context, batch_size=1)
        assert found == {"question": question, **one._asdict(), "score": pytest.approx(one.score, abs=1e-6)}
    texts = ["[MASK] sat", "the cats sat on the [MASK] [MASK]", "the [MASK]"]
    predict.main(["--model=p", "--task=fill-mask", "--batch_size=2", *("--text=" + text for text in texts)])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["text"] for a in answers] == texts
    assert [len(a["masks"]) for a in answers] == [1, 2, 1]


def test_a_chunk_is_written_before_the_next_is_begun(monkeypatch, tmp_path):
    begun = []  # of each chunk (its lines, the lines that were written before it)

    def answer(loaded, lines, *options):
        if lines:  # else it is the model that is asked
            begun.append((len(lines), (tmp_path / "out.partial").read_text().count("\n")))
        return lines, [{"text": line} for line in lines]

    monkeypatch.setitem(predict.QUESTIONS, "classify", (answer, None))
    monkeypatch.setattr(predict, "CHUNK", 4)
    monkeypatch.setattr(predict, "load_model", lambda *_: None)
    predict.main(
        [
            "--model=m",
            "--task=classify",
            "--batch_size=2",
            f"--out={tmp_path / 'out'}",
            *(f"--text={i}" for i in range(31)),
        ]
    )
    assert begun == [(4, 0), (8, 4), (8, 12), (8, 20), (3, 28)]
    found = [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()]
    assert found == [str(i) for i in range(31)]


def test_a_refusal_of_a_file_says_in_which_lines(pretrained, monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "load_model", lambda *_: pretrained)
    path = tmp_path / "in.txt"
    path.write_text("the [MASK]\n" * 8 + "the cat\n[MASK]\n[MASK]\n")
    command = ["--model=p", "--task=fill-mask", f"--file={path}"]
    with pytest.raises(SystemExit, match=r"in.txt, one of the lines 7 to 11: no .* in 'the cat'"):
        predict.main([*command, "--batch_size=3"])
    path.write_text("the cat")
    with pytest.raises(SystemExit, match="in.txt, line 1: no"):
        predict.main(command)
    with pytest.raises(SystemExit, match="--layers=last: give numbers separated by commas"):
        features.main(["--model=p", f"--file={path}", "--layers=last", "--out=x.npz"])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_chunks_hold_every_line_once_in_order(count):
    lines = [str(i) for i in range(count)]
    assert [line for chunk in predict.chunks(lines, 8) for line in chunk] == lines


@pytest.mark.parametrize("tool", [predict, features])
def test_a_place_that_cannot_be_written_shows_before_the_work(tool, directory, tmp_path, monkeypatch):
    def load_model(*_, **__):
        pytest.fail("the model was loaded")

    monkeypatch.setattr(tool, "load_model", load_model)
    (tmp_path / "in.txt").write_text("the cat\n")
    (tmp_path / "out.jsonl").mkdir()
    arguments = [f"--model={directory}", f"--file={tmp_path / 'in.txt'}"]
    arguments += ["--task=fill-mask"] if tool is predict else []
    for out, message in (("out.jsonl", "out.jsonl is a directory"), ("in.txt/out.jsonl", "in.txt")):
        with pytest.raises(SystemExit, match=message):
            tool.main([*arguments, f"--out={tmp_path / out}"])
