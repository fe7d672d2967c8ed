"""Asks a model what it was made for: the answers of tools/predict.py and of `bertjax.predict`.

In: a model and texts, of which inference.py makes answers. Out: one record an input, with the names and values that
the files of answers have.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax import inference
from bertjax.data import objects
from bertjax.interop import loading
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.loading import load_model, open_source
from bertjax.log import notebook
from bertjax.model import heads
from bertjax.tasks.inputs import COLUMNS
from bertjax.tasks.make import ASKED, remembered, task_name

Columns = str | int | Sequence[str | int] | None
Given = str | Sequence[str]  # a text; a pair, or a question and its context; words
_SHOWN_ROWS = 20


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The answers of a model, in the order of the inputs; `predictions[i]` is the answer to the i-th.

    An answer is a label, a tuple of labels (multilabel), a number or a dict of numbers (regression), a list of tags, an
    Answer, a list of Fillings for each [MASK], or a probability (next-sentence).

    Attributes:
      task: what was asked: fill-mask, next-sentence, classify, ner or qa.
      records: a dict for each input, as bertjax.tools.predict writes it: `pandas.DataFrame(predictions.records)`.
      answers: in the same order.
      labels: of a classifier: the names of the columns of `probabilities`.
    """

    task: str
    records: tuple[dict[str, Any], ...]
    answers: list[Any]
    labels: tuple[str, ...] = ()

    @property
    def probabilities(self) -> np.ndarray:
        """Of a classifier: float32 [N, C]; of a regression the number, [N, 1]."""
        if self.task != "classify":
            raise ValueError(f"the answers of {self.task} have no probabilities of classes")
        values = [list(record["labels"].values()) for record in self.records]
        return np.array(values, np.float32).reshape(len(values), len(self.labels))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.answers)

    def __getitem__(self, place: int | slice) -> Any:
        return self.answers[place]

    def _repr_html_(self) -> str:
        rows = [(_asked_text(record), _shown(record, self[i])) for i, record in enumerate(self.records[:_SHOWN_ROWS])]
        more = f"<p>and {len(self) - len(rows):,} more</p>" if len(rows) < len(self) else ""
        return notebook.table([("input", self.task), *rows], "left") + more


def predict(
    model: inference.Model,
    data: Any,
    task: str | None = None,
    *,
    columns: Columns = None,
    top_k: int = 5,
    batch_size: int = 32,
) -> Predictions:
    """The answers of a model to the question that it was fine-tuned for, or that its head can answer.

    Args:
      model: from load_model, its path, or the Result of a run.
      data: a text or a list of them; pairs of texts as tuples; lists of words for tags; a pandas DataFrame or Series, a
        Dataset or a dict of columns.
      task: fill-mask, next-sentence, classify, ner or qa, where a model can answer several.
      columns: those of the texts in a table; None takes those that the model was fine-tuned on.
      top_k: candidates for each [MASK].
      batch_size: rows at once.

    Raises ValueError for a model that cannot answer, and for data that it cannot take.
    """
    if isinstance(model, str | os.PathLike):
        path = os.fspath(model)
        model = load_model(path, QUESTIONS[asked(task, path)][1])
    if not isinstance(model, LoadedModel):
        raise ValueError(f"model={model!r:.80} is neither a model of load_model nor a path")
    name = asked(task, model)
    data = [data] if isinstance(data, str) else data
    inputs = list(_inputs(data, name, columns, model))
    answers, records = QUESTIONS[name][0](model, inputs, top_k, batch_size)
    classes = range(model.model.num_labels) if name == "classify" else ()
    return Predictions(name, tuple(records), answers, tuple(inference.label_name(model, i) for i in classes))


def _inputs(data: Any, task: str, columns: Columns, model: LoadedModel) -> Iterator[Given]:
    """The inputs of a Python object."""
    memory = remembered(model.settings, "the model")
    known, named = (memory.columns(named)[0] if task == "classify" else None for named in (False, True))
    given = [columns] if isinstance(columns, str | int) else columns  # a DataFrame without names has 0, 1, ...
    wanted = tuple(map(str, given or known or COLUMNS.get(task, ("tokens",))))
    tables = isinstance(data, dict) or hasattr(data, "column_names") or hasattr(data, "iterrows")
    if not tables:
        data = list(data) if hasattr(data, "__iter__") else data
        tables = isinstance(data, list) and bool(data) and isinstance(data[0], dict)
    if tables and known and len(wanted) != len(known):
        raise ValueError(f"columns={columns!r}: the model was fine-tuned on {len(known)} ({', '.join(known)})")
    for number, row in enumerate(objects.rows(data, () if tables else ("input",))):
        if not tables:
            text = _checked(row["input"], number)
            if known and len(known) != (1 if isinstance(text, str) else len(text)):
                raise ValueError(f"row {number} is {text!r:.80}; the model was fine-tuned on {' and '.join(known)}")
            yield text
            continue
        if not given and named and set(named) <= set(row):
            wanted = named
        if missing := [name for name in wanted if name not in row]:
            raise ValueError(
                f"row {number} has no column {missing[0]!r}; found {', '.join(row)}. columns=NAME, or (NAME, NAME) for "
                "a pair, says which hold the texts"
            )
        yield _checked(row[wanted[0]] if len(wanted) == 1 else tuple(row[name] for name in wanted), number)


def _checked(given: Any, number: int) -> Given:
    if not isinstance(given, str | list | tuple) or not all(isinstance(part, str) for part in given):
        raise ValueError(f"row {number} is {given!r:.80}, which is not text")
    return given


def asked(name: str | None, model: LoadedModel | str) -> str:
    """The one of QUESTIONS that is meant by a name, or that the model was fine-tuned for, or that its head answers."""
    if name is None:
        source = model if isinstance(model, LoadedModel) else open_source(model)
        name = remembered(source.settings, str(model)).task
        if name is None:
            network = type(source.model) if isinstance(source, LoadedModel) else loading.declared(source)
            name = _ANSWERED.get(network)
        if name is None:
            known = ", ".join(QUESTIONS)
            raise ValueError(f"{model} does not say what it was fine-tuned for: give --task, one of {known}")
    found = task_name(name, (*QUESTIONS, *ASKED, "swag"))
    if found == "swag":
        raise ValueError("multiple choice is answered by bertjax.tools.evaluate --out=DIR")
    return ASKED.get(found, found)


def _pair(given: Given, purpose: str) -> tuple[str, str]:
    if isinstance(given, str) or len(given) != 2:
        raise ValueError(f"{purpose} needs two texts separated by a tab, got {given!r}")
    return tuple(given)


# What QUESTIONS names gives (answers, records) of inputs.
Answered = tuple[list[Any], list[dict[str, Any]]]


def _fill(loaded: LoadedModel, inputs: Sequence[Given], top_k: int, batch_size: int) -> Answered:
    texts = [given if isinstance(given, str) else given[0] for given in inputs]
    filled = inference.fill_mask(loaded, texts, top_k, batch_size)
    return filled, [
        {"text": text, "masks": [[f._asdict() for f in mask] for mask in masks]}
        for text, masks in zip(texts, filled, strict=True)
    ]


def _next(loaded: LoadedModel, inputs: Sequence[Given], top_k: int, batch_size: int) -> Answered:
    pairs = [_pair(given, "next-sentence") for given in inputs]
    scores = inference.next_sentence(loaded, pairs, batch_size)
    return scores, [{"first": a, "second": b, "is_next": p} for (a, b), p in zip(pairs, scores, strict=True)]


def _classify(loaded: LoadedModel, inputs: Sequence[Given], top_k: int, batch_size: int) -> Answered:
    texts = [
        given if isinstance(given, str) else given[0] if len(given) == 1 else _pair(given, "classify")
        for given in inputs
    ]
    labels = inference.classify(loaded, texts, batch_size)
    records: list[dict[str, Any]] = [{"text": text, "labels": p} for text, p in zip(texts, labels, strict=True)]
    kind = inference.problem_type(loaded)
    if kind == "regression":
        return [next(iter(values.values())) if len(values) == 1 else values for values in labels], records
    if kind == "multi_label_classification":
        several = [[name for name in p if p[name] >= 0.5] for p in labels]
        records = [{**record, "chosen": names} for record, names in zip(records, several, strict=True)]
        return list(map(tuple, several)), records
    best = [max(p, key=p.get) for p in labels]
    return best, [{**record, "label": label} for record, label in zip(records, best, strict=True)]


def _tag(loaded: LoadedModel, inputs: Sequence[Given], top_k: int, batch_size: int) -> Answered:
    words = [given.split() if isinstance(given, str) else list(given) for given in inputs]
    tags = inference.tag_words(loaded, words, batch_size)
    return tags, [{"words": w, "tags": t} for w, t in zip(words, tags, strict=True)]


def _answer(loaded: LoadedModel, inputs: Sequence[Given], top_k: int, batch_size: int) -> Answered:
    pairs = [_pair(given, "qa") for given in inputs]
    # A context of nothing, or of characters that the tokenizer drops, has no answer in it.
    full = [bool(loaded.tokenizer.encode(context)) for _, context in pairs]
    asked = [pair for pair, there in zip(pairs, full, strict=True) if there]
    found = iter(inference.answer(loaded, *zip(*asked, strict=True), batch_size=batch_size) if asked else ())
    answers, records = [], []
    for pair, there in zip(pairs, full, strict=True):
        answers.append(next(found) if there else inference.Answer("", 0, 0, -np.inf))
        score = answers[-1].score if np.isfinite(answers[-1].score) else None
        note = {} if there else {"note": "the context is empty"}
        records.append({"question": pair[0], **answers[-1]._asdict(), "score": score, **note})
    return answers, records


# question -> (answers, the task of load_model, which asks for the heads of these answers alone)
QUESTIONS: dict[str, tuple[Callable[..., Answered], str]] = {
    "fill-mask": (_fill, "mlm"),
    "next-sentence": (_next, "next-sentence"),
    "classify": (_classify, "sequence-classification"),
    "ner": (_tag, "token-classification"),
    "qa": (_answer, "question-answering"),
}
_ANSWERED = {loading.TASKS[head]: name for name, (_, head) in QUESTIONS.items()}
_ANSWERED |= {heads.BertForPreTraining: "fill-mask", heads.BertForMultipleChoice: "swag"}


def _asked_text(record: dict[str, Any]) -> str:
    given = record.get("words") or record.get("question") or record.get("first") or record.get("text", "")
    return given if isinstance(given, str) else " ".join(given)


def _shown(record: dict[str, Any], answer: Any) -> str:
    if "label" in record:
        return f"{answer} ({record['labels'][answer]:.0%})"
    if isinstance(answer, inference.Answer):
        return answer.text or "(no answer)"
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, str):
        return answer
    if isinstance(answer, dict):
        return ", ".join(f"{name} {value:.4f}" for name, value in answer.items())
    parts = (", ".join(f"{f.token} {f.probability:.0%}" for f in x) if isinstance(x, list) else x for x in answer)
    return " | ".join(parts) if answer and isinstance(answer[0], list) else " ".join(parts)
