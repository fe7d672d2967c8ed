"""Prediction with a model: text in, answers out.

A model (`bertjax.load_model`, or the path of one) goes in with texts, which forward.py takes through it. Each function
takes one input or a list of them, and returns one answer or the list of answers in the same order. A path is read again
at every call: load a model that is asked often.
"""

import functools
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, overload

import numpy as np

from bertjax.forward import Row, make_rows, run
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.loading import load_model
from bertjax.model import heads
from bertjax.tasks.encoding import passage_tokens, passage_windows, word_rows
from bertjax.tasks.make import remembered
from bertjax.tasks.metrics import softmax
from bertjax.tasks.squad import spans

# A text with more [MASK]s than this is read again for the others, so that the logits of a batch,
# float32 [batch_size, P, V] on device and host, do not grow with the fullest text.
MASKS_A_ROW = 8


class Filling(NamedTuple):
    """A candidate for a [MASK]."""

    token: str
    probability: float
    id: int


class Answer(NamedTuple):
    """An answer span: text of the context, its code points [start, end), and its score (logits).

    "There is no answer" is the empty text at 0, with the score of [CLS].
    """

    text: str
    start: int
    end: int
    score: float


Model = LoadedModel | str | os.PathLike[str]


def opened(model: Model, task: str, *kinds: type, purpose: str) -> LoadedModel:
    """The model, or that of a path with the head of `task`.

    Raises:
      ValueError: it is not of one of these kinds, or has no tokenizer.
    """
    loaded = load_model(model, task) if isinstance(model, str | os.PathLike) else model
    if not isinstance(loaded, LoadedModel):
        raise ValueError(f"{purpose} needs a model of load_model or its path, not {model!r:.80}")
    if type(loaded.model) not in kinds:  # multiple choice is a classifier, of several rows
        raise ValueError(
            f"{purpose} needs a {' or '.join(k.__name__ for k in kinds)}, this is a "
            f"{type(loaded.model).__name__}; load_model(path, task=...) chooses"
        )
    if loaded.tokenizer is None:
        raise ValueError(f"{purpose} needs the tokenizer files beside the model")
    return loaded


def listed(values: Any, purpose: str, example: str) -> list[Any]:
    """The inputs as a list; a single string, whose elements are characters, and a table, whose elements are the names
    of its columns, are refused."""
    table = isinstance(values, Mapping) or hasattr(values, "iterrows")
    if isinstance(values, str) or table or not isinstance(values, Iterable):
        of_table = "; of a table give the column, or take bertjax.predict" * table
        raise ValueError(f"{purpose} takes a list such as {example}, not {values!r:.80}{of_table}")
    return list(values)


def _strings(values: Any, purpose: str, example: str, each: str) -> list[str]:
    values = listed(values, purpose, example)
    if strange := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"a {each} is a string, not {strange[0]!r:.80}")
    return values


@overload
def fill_mask(model: Model, text: str, top_k: int = 5, batch_size: int = 32) -> list[list[Filling]]: ...
@overload
def fill_mask(model: Model, text: Iterable[str], top_k: int = 5, batch_size: int = 32) -> list[list[list[Filling]]]: ...
def fill_mask(
    model: Model, text: str | Iterable[str], top_k: int = 5, batch_size: int = 32
) -> list[list[Filling]] | list[list[list[Filling]]]:
    """The likeliest tokens for every [MASK] of a text or of each of several, each mask on its own.

    The tokenizer's own mask (`<mask>`) may be written too.

    Returns:
      For each [MASK], in order, `top_k` Fillings with the likeliest first; of several texts a list
      of that for each.

    Raises:
      ValueError: no [MASK] in a text, a text beyond the positions, top_k below 1, a model without an MLM head, or one
        that reads left to right.
    """
    loaded = opened(model, "mlm", heads.BertForPreTraining, heads.BertForMaskedLM, purpose="fill-mask")
    if loaded.config.is_decoder:
        raise ValueError("a left-to-right model predicts the next token, and fills no [MASK]")
    if isinstance(text, str):
        return fill_mask(loaded, [text], top_k, batch_size)[0]
    if not isinstance(top_k, numbers.Integral) or top_k < 1:
        raise ValueError(f"top_k={top_k!r} must be a whole number, at least 1")
    texts = _strings(text, "fill-mask", "[text], or one text", "text")
    tokenizer, longest = loaded.tokenizer, loaded.config.max_position_embeddings
    mask = tokenizer.id_to_token(tokenizer.mask_id)
    rows, owners = [], []
    for number, one in enumerate(texts):
        ids = tokenizer.encode(one.replace("[MASK]", mask), keep_special_tokens=True)
        if tokenizer.mask_id not in ids:
            raise ValueError(f"no {mask} in {one!r:.200}: write it where a word is to be filled in")
        ids, types = tokenizer.layout.join(ids)
        if len(ids) > longest:
            raise ValueError(
                f"the text has {len(ids)} tokens with [CLS] and [SEP], the model "
                f"reads {longest}: shorten it around the mask. It begins {one!r:.60}"
            )
        masks = np.flatnonzero(ids == tokenizer.mask_id)
        for start in range(0, len(masks), MASKS_A_ROW):
            rows.append(Row(ids, types, masks[start : start + MASKS_A_ROW]))
            owners.append(number)

    def fillings(row: Row, output: Any) -> list[list[Filling]]:
        logits = output[0] if isinstance(output, tuple) else output
        return [_likeliest(loaded, logits[i], top_k) for i in range(len(row.positions))]

    filled: list[list[list[Filling]]] = [[] for _ in texts]
    for number, some in zip(owners, run(loaded, rows, batch_size, fillings), strict=True):
        filled[number] += some
    return filled


def _likeliest(loaded: LoadedModel, logits: np.ndarray, top_k: int) -> list[Filling]:
    """Of one position's logits [V]; the lower id first where two are equal."""
    tokenizer = loaded.tokenizer
    probabilities = softmax(logits[: tokenizer.vocab_size].astype(np.float64))
    top_k = min(top_k, len(probabilities))
    best = np.sort(np.argpartition(-probabilities, top_k - 1)[:top_k])  # a whole sort is slow
    best = best[np.argsort(-probabilities[best], kind="stable")]
    return [Filling(tokenizer.readable(i), float(probabilities[i]), i) for i in best.tolist()]


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(text, str) for text in given)


@overload
def next_sentence(model: Model, pairs: tuple[str, str], batch_size: int = 32) -> float: ...
@overload
def next_sentence(model: Model, pairs: Iterable[Iterable[str]], batch_size: int = 32) -> list[float]: ...
def next_sentence(
    model: Model, pairs: tuple[str, str] | Iterable[Iterable[str]], batch_size: int = 32
) -> float | list[float]:
    """Probability that the second text of a pair, or of each pair, follows the first (class 0 of the head).

    Raises ValueError for a model without an NSP head, and for one whose config.json says that it is not trained.
    """
    kinds = heads.BertForPreTraining, heads.BertForNextSentencePrediction
    loaded = opened(model, "next-sentence", *kinds, purpose="next-sentence prediction")
    if "nsp" in (loaded.settings.get("untrained_heads") or ()):
        raise ValueError(
            "the model was pre-trained without next sentences (data.nsp=False; untrained_heads in its config.json), so "
            "its answers would mean nothing: fine-tune it on pairs of texts, or pre-train with --config.data.nsp=True"
        )
    if _is_pair(pairs):
        return next_sentence(loaded, [pairs], batch_size)[0]
    takes = "next-sentence prediction", "[(first, second)], or one pair"
    rows = make_rows(loaded, [tuple(listed(pair, *takes)) for pair in listed(pairs, *takes)])
    return run(loaded.next_sentence, rows, batch_size, lambda row, logits: float(softmax(logits)[0]))


@overload
def classify(model: Model, texts: str | tuple[str, str], batch_size: int = 32) -> dict[str, float]: ...
@overload
def classify(model: Model, texts: Iterable[str | tuple[str, str]], batch_size: int = 32) -> list[dict[str, float]]: ...
def classify(
    model: Model, texts: str | Iterable[str | tuple[str, str]], batch_size: int = 32
) -> dict[str, float] | list[dict[str, float]]:
    """{label: probability} of a text or pair, or of each of a list. A tuple of two strings is a pair.

    The probabilities of a text add up to 1. Where config.json has problem_type multi_label_classification, each label
    has a probability of its own; for a regression (one label, or problem_type regression) the value is the number
    itself. A text longer than the rows of the fine-tuning, or than the model's positions, is cut.
    """
    loaded = opened(model, "sequence-classification", heads.BertForSequenceClassification, purpose="classification")
    if isinstance(texts, str) or _is_pair(texts):
        return classify(loaded, [texts], batch_size)[0]
    texts = listed(texts, "classification", "[text] or [(first, second)], or one of them")
    if not texts:
        return []
    values = np.stack(run(loaded, make_rows(loaded, texts, _window(loaded)), batch_size))
    kind = problem_type(loaded)
    if kind == "multi_label_classification":
        values = 0.5 * (1 + np.tanh(0.5 * values))  # the sigmoid
    elif kind != "regression":
        values = softmax(values)
    names = [label_name(loaded, i) for i in range(values.shape[1])]
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]


def problem_type(loaded: LoadedModel) -> str:
    """What a classifier's outputs are, in the words of transformers' config.json: regression,
    multi_label_classification or single_label_classification. A single class means a regression."""
    stored = loaded.settings.get("problem_type") or "single_label_classification"
    alone = stored == "single_label_classification" and loaded.model.num_labels == 1
    return "regression" if alone else stored


def label_name(loaded: LoadedModel, number: int) -> str:
    """The name of a class, or LABEL_n as transformers calls it."""
    return (loaded.labels or {}).get(number, f"LABEL_{number}")


@overload
def tag_words(model: Model, sentences: str, batch_size: int = 32) -> list[str]: ...
@overload
def tag_words(model: Model, sentences: Iterable[str | Iterable[str]], batch_size: int = 32) -> list[list[str]]: ...
def tag_words(
    model: Model, sentences: str | Iterable[str | Iterable[str]], batch_size: int = 32
) -> list[str] | list[list[str]]:
    """A label for every word, read at its first piece.

    A sentence is a list of words, or a text whose words are separated by blanks; so a list of texts is a list of
    sentences.

    A sentence longer than the rows of the fine-tuning, or than the model's positions, is read in windows that overlap
    by half; a word gets its label from the window with the most context around it. A word of which the tokenizer drops
    all characters is O, or is read as an unknown token if the model has no label O.
    """
    loaded = opened(model, "token-classification", heads.BertForTokenClassification, purpose="tagging")
    if isinstance(sentences, str):
        return tag_words(loaded, [sentences], batch_size)[0]
    takes = "tagging", "[[word, word]], or one text"
    sentences = [
        words.split() if isinstance(words, str) else _strings(words, *takes, "word")
        for words in listed(sentences, *takes)
    ]
    outside = "O" if "O" in (loaded.labels or {}).values() else ""
    rows, owners = [], []  # owners: the sentence of each row
    for number, words in enumerate(sentences):
        made = word_rows(loaded.tokenizer, words, _window(loaded), not outside)
        rows += made
        owners += [number] * len(made)
    tags = [[outside] * len(words) for words in sentences]
    outputs = run(loaded, [Row(row.ids, row.types) for row in rows], batch_size)
    for logits, row, number in zip(outputs, rows, owners, strict=True):
        for word, best in zip(row.words, logits[row.positions].argmax(-1), strict=True):
            tags[number][word] = label_name(loaded, int(best))
    return tags


def _window(loaded: LoadedModel) -> int:
    """Tokens of a row at most: as many as fine-tuning had, for answers like its own."""
    longest = loaded.config.max_position_embeddings
    length = remembered(loaded.settings, "the model").max_length or longest
    if length > longest:
        raise ValueError(f"max_length={length} exceeds the {longest} positions of the model")
    return length


@overload
def answer(
    model: Model,
    question: str,
    context: str,
    max_answer_tokens: int | None = None,
    stride: int | None = None,
    batch_size: int = 32,
    null_threshold: float | None = None,
) -> Answer: ...
@overload
def answer(
    model: Model,
    question: Iterable[str],
    context: Iterable[str],
    max_answer_tokens: int | None = None,
    stride: int | None = None,
    batch_size: int = 32,
    null_threshold: float | None = None,
) -> list[Answer]: ...
def answer(
    model: Model,
    question: str | Iterable[str],
    context: str | Iterable[str],
    max_answer_tokens: int | None = None,
    stride: int | None = None,
    batch_size: int = 32,
    null_threshold: float | None = None,
) -> Answer | list[Answer]:
    """The best span of the context over overlapping windows (original: run_squad.py), as long as fine-tuning had them.

    A span starts where its window shows more of the context than any other window. A model that was fine-tuned here
    chooses among as many starts and ends of a window as its task did (n_best), another one among all.

    Args:
      question, context: one of each, or several questions and the context of each.
      max_answer_tokens: None takes the max_answer_length of the fine-tuning, else 30.
      stride: tokens between the starts of two windows. None takes the doc_stride of the fine-tuning, else 128.
      batch_size: windows, of whichever question.
      null_threshold: there is no answer where the score of [CLS] exceeds the best span's by more than this (SQuAD 2.0).
        None takes what fine-tuning found and stored in config.json; a model without it always answers.
    """
    loaded = opened(model, "question-answering", heads.BertForQuestionAnswering, purpose="question answering")
    if isinstance(question, str) and isinstance(context, str):
        return answer(loaded, [question], [context], max_answer_tokens, stride, batch_size, null_threshold)[0]
    finetuned = remembered(loaded.settings, "the model")
    if null_threshold is None:
        null_threshold = np.inf if finetuned.null_threshold is None else finetuned.null_threshold
    asked = {"doc_stride": 128, "max_query_length": 64, "max_answer_length": 30} | finetuned.options
    n_best = asked.get("n_best", 20) if finetuned.task else None
    stride = asked["doc_stride"] if stride is None else stride
    max_answer_tokens = asked["max_answer_length"] if max_answer_tokens is None else max_answer_tokens
    if max_answer_tokens < 1:
        raise ValueError(f"max_answer_tokens={max_answer_tokens} must be at least 1")
    takes = "question answering", "[question] and [context], or one text each"
    questions, contexts = _strings(question, *takes, "question"), _strings(context, *takes, "context")
    if len(questions) != len(contexts):
        raise ValueError(
            f"{len(questions)} questions and {len(contexts)} contexts: give one context for each question, and repeat "
            "a context that several questions share"
        )
    rows, windows = [], []  # windows: of each row, (number of the question, Window)
    longest = _window(loaded)
    tokens = functools.lru_cache(1)(passage_tokens)  # neighbours often share their context
    queries = loaded.tokenizer.encode_batch(questions)
    for number, (query, passage) in enumerate(zip(queries, contexts, strict=True)):
        query, (ids, offsets) = query[: asked["max_query_length"]], tokens(loaded.tokenizer, passage)
        if not len(ids) or len(query) + loaded.tokenizer.layout.count(pair=True) >= longest:
            raise ValueError(f"the context is empty, or has no room beside the question {questions[number]!r:.60}")
        for *row, window in passage_windows(loaded.tokenizer, query, ids, offsets, longest, stride):
            rows.append(Row(*row))
            windows.append((number, window))

    best, null = [Answer("", 0, 0, -np.inf)] * len(questions), [np.inf] * len(questions)
    outputs = run(loaded, rows, batch_size)
    for row, (number, window), logits in zip(rows, windows, outputs, strict=True):
        logits = np.stack(logits, -1)[: len(row.ids)]
        null[number] = min(null[number], float(logits[0].sum()))
        scores, starts, ends = spans(window, logits, max_answer_tokens, n_best)
        if len(scores) and (score := float(scores.max())) > best[number].score:
            start, end = int(starts[scores.argmax()]), int(ends[scores.argmax()])
            best[number] = Answer(contexts[number][start:end], start, end, score)
    return [
        Answer("", 0, 0, none) if none - span.score > null_threshold else span
        for span, none in zip(best, null, strict=True)
    ]
