"""Prediction with a loaded model: text in, answers out.

A `LoadedModel` (bertjax.load_model) with a tokenizer goes in with texts. Texts become rows, rows of
similar length share a padded batch (`batches_by_length`), and the model is compiled once a bucket.
Each function returns its answers in the order of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax.interop.loading import LoadedModel
from bertjax.model import heads
from bertjax.tasks.task import trim_lengths

BUCKET = 32
"""Rows are padded to a multiple of this many tokens: at most 16 shapes up to 512."""
MANY = 500
"""Texts from which on the tokenizer's compiled code is worth its start."""


class Row(NamedTuple):
    """One input of the model: ids and segment types of equal length, specials included."""

    ids: Sequence[int]
    types: Sequence[int]


class Filling(NamedTuple):
    """A candidate for a [MASK]."""

    token: str
    probability: float
    id: int


class Answer(NamedTuple):
    """An answer span: text of the context, its code points [start, end), and its score (logits)."""

    text: str
    start: int
    end: int
    score: float


def require(loaded: LoadedModel, *kinds: type, purpose: str) -> None:
    """Raises ValueError unless the model is of one of these kinds and has a tokenizer."""
    if not isinstance(loaded.model, kinds):
        raise ValueError(
            f"{purpose} needs a {' or '.join(k.__name__ for k in kinds)}, this is a "
            f"{type(loaded.model).__name__}; load_model(path, task=...) chooses"
        )
    if loaded.tokenizer is None:
        raise ValueError(f"{purpose} needs the tokenizer files beside the model")


def make_row(
    loaded: LoadedModel, first: str, second: str | None = None, keep_special_tokens: bool = False
) -> Row:
    """[CLS] first [SEP] (second [SEP]), the longer of the two cut until it fits the positions.

    Args:
      keep_special_tokens: literal [MASK] and other specials in the text are themselves.
    """
    tokenizer = loaded.tokenizer
    a = tokenizer.encode(first, keep_special_tokens=keep_special_tokens)
    b = [] if second is None else tokenizer.encode(second, keep_special_tokens=keep_special_tokens)
    room = loaded.config.max_position_embeddings - (2 if second is None else 3)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    ids = [tokenizer.cls_id, *a, tokenizer.sep_id]
    types = [0] * len(ids)
    if second is not None:
        ids += [*b, tokenizer.sep_id]
        types += [1] * (len(b) + 1)
    return Row(ids, types)


def make_rows(loaded: LoadedModel, texts: Sequence[str | tuple[str, str]]) -> list[Row]:
    """`make_row` of many texts or pairs, as arrays: the tokenizer sees them all at once."""
    tokenizer = loaded.tokenizer
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    first = _encoded(tokenizer, [a for a, _ in pairs])
    second = _encoded(tokenizer, [b for _, b in pairs if b is not None])
    seconds = iter(second)
    longest, rows = loaded.config.max_position_embeddings, []
    for a, (_, text) in zip(first, pairs, strict=True):
        if text is None:
            n = min(len(a), longest - 2)
            ids, types = np.empty(n + 2, np.int32), np.zeros(n + 2, np.int32)
        else:
            b = next(seconds)
            n, m = trim_lengths(len(a), len(b), longest - 3)
            ids, types = np.empty(n + m + 3, np.int32), np.zeros(n + m + 3, np.int32)
            ids[n + 2 : -1] = b[:m]
            types[n + 2 :] = 1
            ids[n + 1] = tokenizer.sep_id
        ids[0], ids[1 : n + 1], ids[-1] = tokenizer.cls_id, a[:n], tokenizer.sep_id
        rows.append(Row(ids, types))
    return rows


def _encoded(tokenizer: Any, texts: list[str]) -> list[np.ndarray]:
    if len(texts) < MANY:
        return [np.array(ids, np.int32) for ids in tokenizer.encode_batch(texts)]
    flat, lengths = tokenizer.encode_flat(texts)
    ends = np.cumsum(lengths).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def batches_by_length(
    rows: Sequence[Row], batch_size: int, pad_id: int, longest: int, bucket: int = BUCKET
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Padded batches of rows of similar length, longest first (too large a batch fails at once).

    Every batch has `batch_size` rows, the last one of a bucket filled up with empty rows, so that
    the number of compiled shapes is that of the buckets in use.

    Yields:
      (indices of the rows [<= batch_size], inputs int32 [batch_size, T] by name).
    """
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    order = np.argsort(-lengths, kind="stable")
    width = np.minimum(longest, -(-lengths // bucket) * bucket)
    at = 0
    while at < len(order):
        chosen = order[at : at + batch_size]
        chosen = chosen[width[chosen] == width[chosen[0]]]
        at += len(chosen)
        shape = (batch_size, width[chosen[0]])
        inputs = {name: np.zeros(shape, np.int32)
                  for name in ("input_ids", "attention_mask", "token_type_ids")}
        inputs["input_ids"][:] = pad_id
        real = np.zeros(shape, bool)
        real[: len(chosen)] = np.arange(shape[1]) < lengths[chosen, None]
        inputs["attention_mask"][real] = 1
        inputs["input_ids"][real] = np.concatenate([rows[i].ids for i in chosen])
        inputs["token_type_ids"][real] = np.concatenate([rows[i].types for i in chosen])
        yield chosen, inputs


def run(
    loaded: LoadedModel, rows: Sequence[Row], batch_size: int = 32, **options: Any
) -> list[Any]:
    """The model's outputs of each row, as numpy, still padded to the row's bucket.

    The next batch is dispatched before the last one is fetched, so that the device never waits.
    """
    outputs: list[Any] = [None] * len(rows)
    waiting: tuple[np.ndarray, Any] | None = None

    def fetch(indices: np.ndarray, result: Any) -> None:
        leaves, structure = jax.tree.flatten(result)
        leaves = [np.asarray(leaf) for leaf in leaves]
        for i, *row in zip(indices, *leaves, strict=False):
            outputs[i] = row[0] if structure.num_nodes == 1 else structure.unflatten(row)

    for indices, inputs in batches_by_length(
        rows, min(batch_size, max(1, len(rows))), loaded.tokenizer.pad_id,
        loaded.config.max_position_embeddings,
    ):
        result = loaded(**inputs, **options)
        if waiting is not None:
            fetch(*waiting)
        waiting = indices, result
    if waiting is not None:
        fetch(*waiting)
    return outputs


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------- answers


def fill_mask(loaded: LoadedModel, text: str, top_k: int = 5) -> list[list[Filling]]:
    """The likeliest tokens for every [MASK] of a text, each mask on its own.

    Returns:
      For each [MASK], in order, `top_k` Fillings with the likeliest first.

    Raises:
      ValueError: no [MASK] in the text (or it was cut off), or a model without an MLM head.
    """
    require(loaded, heads.BertForPreTraining, heads.BertForMaskedLM, purpose="fill-mask")
    tokenizer = loaded.tokenizer
    row = make_row(loaded, text, keep_special_tokens=True)
    masks = [i for i, token_id in enumerate(row.ids) if token_id == tokenizer.mask_id]
    if not masks:
        raise ValueError(f"no {tokenizer.id_to_token(tokenizer.mask_id)} in {text!r}")
    output = run(loaded, [row])[0]
    logits = output[0] if isinstance(output, tuple) else output
    answers = []
    for position in masks:
        probabilities = _softmax(logits[position, : tokenizer.vocab_size].astype(np.float64))
        best = np.argsort(-probabilities)[:top_k]
        answers.append([Filling(tokenizer.id_to_token(int(i)), float(probabilities[i]), int(i))
                        for i in best])
    return answers


def next_sentence(
    loaded: LoadedModel, pairs: Sequence[tuple[str, str]], batch_size: int = 32
) -> list[float]:
    """Probability that the second text of each pair follows the first (class 0 of the head)."""
    require(loaded, heads.BertForPreTraining, purpose="next-sentence prediction")
    rows = make_rows(loaded, pairs)
    return [float(_softmax(output[1][0])[0]) for output in run(loaded, rows, batch_size)]


def classify(
    loaded: LoadedModel, texts: Sequence[str | tuple[str, str]], batch_size: int = 32
) -> list[dict[str, float]]:
    """Label -> probability for each text or pair; one label means regression and its raw value."""
    require(loaded, heads.BertForSequenceClassification, purpose="classification")
    if not texts:
        return []
    logits = np.stack(run(loaded, make_rows(loaded, texts), batch_size))
    values = logits if logits.shape[1] == 1 else _softmax(logits)
    names = [label_name(loaded, i) for i in range(logits.shape[1])]
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]


def label_name(loaded: LoadedModel, number: int) -> str:
    """The name of a class, or LABEL_n as transformers calls it."""
    return (loaded.labels or {}).get(number, f"LABEL_{number}")


def tag_words(
    loaded: LoadedModel, sentences: Sequence[Sequence[str]], batch_size: int = 32
) -> list[list[str]]:
    """A label for every word, read at its first piece; words beyond the positions get 'O'."""
    require(loaded, heads.BertForTokenClassification, purpose="tagging")
    tokenizer = loaded.tokenizer
    longest = loaded.config.max_position_embeddings
    rows, starts = [], []
    for words in sentences:
        ids, first = [tokenizer.cls_id], []
        for word in words:
            pieces = tokenizer.encode(word) or [tokenizer.unk_id]
            first.append(len(ids) if len(ids) + len(pieces) < longest else None)
            ids += pieces
        ids = [*ids[: longest - 1], tokenizer.sep_id]
        rows.append(Row(ids, [0] * len(ids)))
        starts.append(first)
    return [
        ["O" if at is None else label_name(loaded, int(logits[at].argmax())) for at in first]
        for logits, first in zip(run(loaded, rows, batch_size), starts, strict=True)
    ]


def answer(
    loaded: LoadedModel,
    question: str,
    context: str,
    max_answer_tokens: int = 30,
    stride: int = 128,
    batch_size: int = 32,
) -> Answer:
    """The best span of the context over overlapping windows (original: run_squad.py).

    Args:
      stride: tokens between the starts of two windows.
    """
    require(loaded, heads.BertForQuestionAnswering, purpose="question answering")
    tokenizer = loaded.tokenizer
    asked = tokenizer.encode(question)[:64]
    ids, offsets = tokenizer.encode_with_offsets(context)
    head = [tokenizer.cls_id, *asked, tokenizer.sep_id]
    room = loaded.config.max_position_embeddings - len(head) - 1
    if not ids or room < 1:
        raise ValueError("the context is empty or the question leaves it no room")
    windows = [0]
    while windows[-1] + room < len(ids):
        windows.append(windows[-1] + min(stride, room))
    rows = []
    for begin in windows:
        part = [*ids[begin : begin + room], tokenizer.sep_id]
        rows.append(Row(head + part, [0] * len(head) + [1] * len(part)))

    best: Answer | None = None
    for begin, (start_logits, end_logits) in zip(windows, run(loaded, rows, batch_size),
                                                 strict=True):
        count = min(room, len(ids) - begin)
        inside = slice(len(head), len(head) + count)
        scores = start_logits[inside, None] + end_logits[None, inside]
        lengths = np.arange(count)[None] - np.arange(count)[:, None]
        scores = np.where((lengths >= 0) & (lengths < max_answer_tokens), scores, -np.inf)
        i, j = np.unravel_index(scores.argmax(), scores.shape)
        if best is None or scores[i, j] > best.score:
            start, end = offsets[begin + i][0], offsets[begin + j][1]
            best = Answer(context[start:end], start, end, float(scores[i, j]))
    return best


def layer_outputs(
    loaded: LoadedModel, texts: Sequence[str | tuple[str, str]], layers: Sequence[int] = (-1,),
    batch_size: int = 32,
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Hidden states of chosen layers (original: extract_features.py).

    Args:
      layers: as list indices over the embeddings and L layers: -1 is the last, 0 the embeddings.

    Yields:
      For each text (its tokens, specials included [N], float32 [len(layers), N, H]).
    """
    require(loaded, heads.BertModel, purpose="feature extraction")
    rows = [make_row(loaded, *((t,) if isinstance(t, str) else t)) for t in texts]
    depth = loaded.config.num_hidden_layers + 1
    wrong = [i for i in layers if not -depth <= i < depth]
    if wrong:
        raise ValueError(f"no layers {wrong}: this model has 0 (the embeddings) .. {depth - 1}")
    outputs = run(loaded, rows, batch_size, all_hidden=True)
    for row, (hidden, _) in zip(rows, outputs, strict=True):
        tokens = [loaded.tokenizer.id_to_token(i) for i in row.ids]
        states = np.stack([hidden[i][: len(tokens)] for i in layers]).astype(np.float32)
        yield tokens, states


def sentence_embeddings(
    loaded: LoadedModel, texts: Sequence[str], pooling: str = "mean", normalise: bool = False,
    batch_size: int = 32,
) -> np.ndarray:
    """One vector a text, float32 [N, H]: the mean of its last hidden states or that of [CLS]."""
    if pooling not in ("mean", "cls"):
        raise ValueError(f"pooling={pooling!r} is not one of mean, cls")
    vectors = np.stack([
        states[0].mean(axis=0) if pooling == "mean" else states[0, 0]
        for _, states in layer_outputs(loaded, texts, (-1,), batch_size)
    ])
    if normalise:
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors
