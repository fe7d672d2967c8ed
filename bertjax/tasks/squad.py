"""SQuAD 1.1 and 2.0: passages and questions to windows, span logits to answers and files.

In: the official JSON (or a data set by name), a tokenizer with offsets. Out: overlapping windows [CLS] question [SEP]
passage part [SEP], then predictions.json, nbest_predictions.json and (2.0) null_odds.json, and the official scores.
Windows, max-context, candidate search and null score follow run_squad.py of google-research/bert. Unlike there, an
answer is the stretch of the original passage between the character offsets of its tokens, so it needs no re-alignment.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax.data.named import is_name, read_rows
from bertjax.data.opening import read_text
from bertjax.formats.files import parse_json, write_json
from bertjax.tasks import squad_score
from bertjax.tasks.batches import Features
from bertjax.tasks.encoding import Window, passage_tokens, passage_windows
from bertjax.tasks.metrics import ONE_CLASS_ONLY, Scores, softmax
from bertjax.tasks.task import Example, Outputs, Rows, Split, Task, cut, file_fingerprint, splits_in
from bertjax.tokenization import Tokenizer

MAX_DROPPED = 0.01  # share of training questions whose answer is not where the file says


@dataclass(frozen=True)
class Question:
    """A question about a passage. `answers` holds (text, first character); () = unanswerable."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    where: str = ""


def _question(entry: Mapping[str, Any], context: str, where: str) -> Question:
    """An entry of "qas". Raises TypeError where text is not text or a place no whole number.

    An answer without text is none, as in the official scores.
    """
    impossible, answers = entry.get("is_impossible") or False, entry.get("answers") or ()
    if isinstance(answers, Mapping):  # as `datasets` holds them
        texts, starts = answers["text"], answers["answer_start"]
        if not (isinstance(texts, list) and isinstance(starts, list)):
            raise TypeError(f"text and answer_start of question {entry['id']!r} are not two lists")
        if len(texts) != len(starts):
            raise TypeError(f"question {entry['id']!r} has {len(texts)} answer texts, but {len(starts)} starts")
        pairs = tuple(zip(texts, starts, strict=True))
    else:
        pairs = tuple((answer["text"], answer["answer_start"]) for answer in answers)
    pairs = () if impossible else tuple(pair for pair in pairs if pair[0] != "")
    texts = [("question", entry["question"]), ("context", context), *(("answer text", text) for text, _ in pairs)]
    for name, value, kind in (
        ("is_impossible", impossible, bool),
        *((name, text, str) for name, text in texts),
        *(("answer_start", start, int) for _, start in pairs),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"the {name} of question {entry['id']!r} is {value!r:.60}")
    return Question(entry["id"], entry["question"], context, pairs, where)


def _articles(path: pathlib.Path) -> list[Any]:
    """The articles of a file. Raises ValueError where it is none of SQuAD's."""
    try:
        articles = parse_json(read_text(path), str(path))["data"]
        if not isinstance(articles, list):
            raise TypeError(f"data is {str(articles):.60}, not a list")
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a SQuAD file (no data): {error}") from None
    return articles


@dataclass(frozen=True)
class Answers:
    """By question id: the best non-empty span, its rivals, and the odds of having no answer.

    `null_odds` is the lowest [CLS] score over the windows minus the best span's score; it is finite also where there is
    no span.
    """

    spans: dict[str, str]
    n_best: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]


def spans(
    window: Window, logits: np.ndarray, max_tokens: int, n_best: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, first characters and end characters of the spans of one window that may be the answer.

    Starts and ends come from the n_best highest logits [t, 2] of the whole row, as in the original (None: from all);
    spans must lie in the passage, start where this window has the most context, and have at most max_tokens tokens.
    """
    n = len(window.offsets)
    if n_best is None:  # of a long window not all pairs, but those that are near enough
        starts = np.flatnonzero(window.best)[:, None]
        first, last = (a.ravel() for a in np.broadcast_arrays(starts, starts + np.arange(min(max_tokens, n))))
    else:
        best = np.argsort(-logits, axis=0, kind="stable")[:n_best] - window.first
        starts, ends = (best[(best[:, k] >= 0) & (best[:, k] < n), k] for k in (0, 1))
        starts = starts[window.best[starts]]
        first, last = (a.ravel() for a in np.meshgrid(starts, ends, indexing="ij"))
    fits = (last >= first) & (last - first < max_tokens) & (last < n)
    first, last = first[fits], last[fits]
    scores = logits[window.first + first, 0] + logits[window.first + last, 1]
    return scores, window.offsets[first, 0], window.offsets[last, 1]


class SquadTask(Task):
    """Extractive question answering with head 'spans' (start and end logits by token)."""

    head = "spans"
    num_labels = 2

    def __init__(
        self,
        source: str | pathlib.Path,
        version: str = "1.1",
        files: dict[str, str] | None = None,
        doc_stride: int = 128,
        max_query_length: int = 64,
        max_answer_length: int = 30,
        n_best: int = 20,
        null_threshold: float = 0.0,
    ):
        """`source` is a directory with `files` (split -> name), tfds:squad/v1.1 or hf:rajpurkar/squad.

        doc_stride is the step between windows in tokens; with version 2.0 a question is answered only if its null odds
        do not exceed null_threshold, which `score` tunes on a split.
        """
        if version not in ("1.1", "2.0"):
            raise ValueError(f"SQuAD version {version!r} is not 1.1 or 2.0")
        if doc_stride < 1:
            raise ValueError(f"doc_stride={doc_stride} must be at least 1, or no window advances")
        self.source, self.version = str(source), version
        self.name = f"squad{version}"
        self.splits = splits_in(source, files, {split: f"{split}-v{version}.json" for split in ("train", "dev")})
        self.published = "" if files else {"1.1": "hf:rajpurkar/squad", "2.0": "hf:rajpurkar/squad_v2"}[version]
        self.doc_stride, self.max_query_length = doc_stride, max_query_length
        self.max_answer_length, self.n_best = max_answer_length, n_best
        self.null_threshold = null_threshold
        for name in ("max_query_length", "n_best", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self.metric_names = ("exact", "f1") if version == "1.1" else ("exact", "f1", "best_exact", "best_f1")
        self.metric = self.metric_names[-1]

    # --- reading

    def read(self, split: str) -> Split:
        """Questions in file order. A split is labelled if its questions carry 'answers', or are said to have none.

        Raises ValueError for a file of another layout, and for a question without a label among others that have one.
        """
        path = self.file_of(split)
        if is_name(path):
            rows, fingerprint = read_rows(str(path))
            if missing := [name for name in ("context", "question", "id") if rows and name not in rows[0]]:
                raise ValueError(f"{path}: the column {missing[0]!r} is missing; there is {', '.join(rows[0])}")
            articles = [{"paragraphs": [{"context": row["context"], "qas": [row]} for row in rows]}]
        else:
            articles, fingerprint = _articles(path), file_fingerprint(path)
        questions: dict[str, Question] = {}
        labelled: list[bool] = []
        for number, article in enumerate(articles):
            where = str(path)
            try:
                where += "" if is_name(path) else f", article {number} ({article.get('title', 'untitled')})"
                for paragraph in article["paragraphs"]:
                    for entry in paragraph["qas"]:
                        question = _question(entry, paragraph["context"], where)
                        if question.id in questions:
                            raise ValueError(f"{where}: question id {question.id!r} occurs twice")
                        questions[question.id] = question
                        told = entry.get("answers") is not None or entry.get("is_impossible")
                        labelled.append(bool(question.answers or (told and self.version == "2.0")))
            except KeyError as error:
                raise ValueError(f"{where}: the key {error} is missing") from None
            except (TypeError, AttributeError) as error:
                raise ValueError(f"{where} is not laid out as SQuAD: {error}") from None
        if not questions:
            raise ValueError(f"{path} holds no questions")
        if any(labelled) and not all(labelled):
            first = list(questions)[labelled.index(False)]
            remedy = {
                "1.1": "has no answer, which SQuAD 1.1 does not know; use version 2.0",
                "2.0": "has neither 'answers' nor is_impossible, unlike others; without an answer: 'answers': []",
            }
            raise ValueError(f"{questions[first].where}: question {first!r} {remedy[self.version]}")
        return Split(split, list(questions.values()), all(labelled), fingerprint)

    # --- questions -> windows

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """The windows of every question; with training=True also the first answer's span.

        Raises ValueError before any work if a question could leave no room for the passage, and when more than 1 % of
        the training answers are not where the file says, or of characters that the tokenizer drops (each is left out).
        """
        specials = tokenizer.layout.count(pair=True)
        if max_length <= self.max_query_length + specials:
            raise ValueError(
                f"max_length={max_length} leaves no room for the passage beside a question of "
                f"max_query_length={self.max_query_length} tokens and {specials} special ones; raise the "
                "first or lower the second"
            )
        if training:
            split.require_labels("training")
        rows: list[Features] = []
        dropped: list[Question] = []
        passage = ("", *passage_tokens(tokenizer, ""))
        queries = tokenizer.encode_batch([question.question for question in split.records])
        for number, (question, query) in enumerate(zip(split.records, queries, strict=True)):
            if passage[0] != question.context:  # consecutive questions share their passage
                passage = (question.context, *passage_tokens(tokenizer, question.context))
            if training and question.answers and not _answer_tokens(question, passage[2]):
                dropped.append(question)
                continue
            query = query[: self.max_query_length]
            for ids, types, window in passage_windows(tokenizer, query, *passage[1:], max_length, self.doc_stride):
                row = {"input_ids": ids, "token_type_ids": types, "window": window, "example": number}
                if training:
                    row |= _gold(question, window, passage[2])
                rows.append(row)
        self.dropped = len(dropped)
        if dropped and len(dropped) > MAX_DROPPED * len(split.records):
            first = dropped[0]
            raise ValueError(
                f"{len(dropped)} of {len(split.records)} training answers are not at their "
                f"answer_start (at most {MAX_DROPPED:.0%} may be dropped); the first is question "
                f"{first.id!r} in {first.where}: {first.answers[0][0]!r} at {first.answers[0][1]}"
            )
        return rows

    # --- span logits -> answers

    def answers(self, split: Split, rows: Rows, outputs: Outputs) -> Answers:
        """Best spans, n-best lists and null odds from the [t, 2] logits of every window."""
        windows: list[list[tuple[Window, np.ndarray]]] = [[] for _ in split.records]
        for row, logits in zip(rows, outputs, strict=True):
            windows[row["example"]].append((row["window"], np.asarray(logits, np.float64)))
        found = Answers({}, {}, {})
        for question, parts in zip(split.records, windows, strict=True):
            candidates, null, lowest = self._search(question, parts)
            key, best = question.id, candidates[0] if candidates else ("", lowest)
            found.spans[key] = best[0]
            # Without any span: at least as null as the worst span imaginable would make it.
            found.null_odds[key] = null - best[1]
            if self.version == "2.0" or not candidates:
                candidates = sorted([*candidates, ("", null)], key=lambda rival: -rival[1])
            shares = softmax(np.array([score for _, score in candidates]))
            found.n_best[key] = [
                {"text": text, "probability": float(share), "score": float(score)}
                for (text, score), share in zip(candidates, shares, strict=True)
            ]
        return found

    def _search(
        self, question: Question, parts: Sequence[tuple[Window, np.ndarray]]
    ) -> tuple[list[tuple[str, float]], float, float]:
        """(text, score) candidates best first, the null score, and the lowest span score."""
        if not parts:
            return [], 0.0, 0.0
        null = min(float(logits[0].sum()) for _, logits in parts)
        lowest = min(float(logits[:, 0].min() + logits[:, 1].min()) for _, logits in parts)
        found = (spans(*part, self.max_answer_length, self.n_best) for part in parts)
        candidates = [candidate for arrays in found for candidate in zip(*map(np.ndarray.tolist, arrays), strict=True)]
        texts: dict[str, float] = {}
        for score, first, last in sorted(candidates, key=lambda candidate: -candidate[0]):
            if len(texts) == self.n_best:
                break
            texts.setdefault(question.context[first:last], score)
        return list(texts.items()), null, lowest

    # --- scores and files

    def decided(self, found: Answers) -> dict[str, str]:
        """The final answer of each question; with version 2.0 it may be empty (null_threshold)."""
        limit = self.null_threshold if self.version == "2.0" else math.inf
        return {key: "" if found.null_odds[key] > limit else text for key, text in found.spans.items()}

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> Scores:
        """Official EM and F1 as shares of 1; version 2.0 at the best threshold for F1 too.

        `details` holds the official numbers in percent; and where these are of the development split, the
        null_threshold to predict a test split with: best_f1_thresh, but apart from the odds of all questions.
        """
        split.require_labels("scoring")
        found = self.answers(split, rows, outputs)
        gold = [{"id": q.id, "answers": [{"text": text} for text, _ in q.answers]} for q in split.records]
        if self.version == "1.1":
            official = squad_score.score_v1(gold, found.spans)
            values = {"exact": official["exact"] / 100, "f1": official["f1"] / 100}
        else:
            official = squad_score.score_v2(gold, found.spans, found.null_odds, self.null_threshold)
            values = {name: official[name] / 100 for name in ("exact", "f1", "best_exact", "best_f1")}
            official["null_threshold"] = squad_score.apart(official["best_f1_thresh"], found.null_odds.values())
        final = self.decided(found)
        flags = (ONE_CLASS_ONLY,) if len(final) > 1 and not any(final.values()) else ()
        return Scores(values, flags, official)

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """predictions, nbest_predictions and (2.0) null_odds, each as _SPLIT.json."""
        found = self.answers(split, rows, outputs)
        contents: dict[str, Any] = {"predictions": self.decided(found), "nbest_predictions": found.n_best}
        if self.version == "2.0":
            contents["null_odds"] = found.null_odds
        paths = []
        for name, content in contents.items():
            paths.append(directory / f"{name}_{split.name}.json")
            write_json(paths[-1], content, ensure_ascii=False)
        return paths

    def examples(self, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
        found = self.answers(split, rows, outputs)
        decided = self.decided(found)
        made = []
        for question in split.records:
            predicted, rivals = decided[question.id], found.n_best[question.id]
            golds = list(dict.fromkeys(text for text, _ in question.answers)) or [""]
            sought = golds[0] or predicted  # the passage is shown around it
            begin = max(0, question.context.find(sought) - (300 - len(sought)) // 2 if sought else 0)
            made.append(
                {
                    "texts": [question.question, "…" * (begin > 0) + question.context[begin:].lstrip()],
                    "gold": " / ".join(_shown(text) for text in golds[:3]),
                    "predicted": _shown(predicted),
                    "right": any(squad_score.exact(gold, predicted) for gold in golds),
                    "score": max((rival["probability"] for rival in rivals if rival["text"] == predicted), default=0.0),
                    "answers": [golds[0], predicted],
                    "predictions": [[_shown(rival["text"]), rival["probability"]] for rival in rivals[:3]],
                }
            )
        return made


def _shown(answer: str) -> str:
    return cut(answer or "no answer", 80)


def _answer_tokens(question: Question, offsets: np.ndarray) -> tuple[int, int] | None:
    """The first answer's first and last token among those at `offsets` [n, 2].

    None if it does not stand at its answer_start, any white space matching any other, or if the tokenizer drops all of
    its characters.
    """
    text, start = question.answers[0]
    there = question.context[start : start + len(text)] if start >= 0 else ""
    given, found = (["" if c.isspace() else c for c in part] for part in (text, there))
    stripped = text.strip()
    if not stripped or given != found:
        return None
    start += text.index(stripped)
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], start + len(stripped), side="left")) - 1
    return (first, last) if first <= last else None


def _gold(question: Question, window: Window, offsets: np.ndarray) -> Features:
    """The first answer's tokens in the row; 0, 0 if the window lacks part of it."""
    positions = (0, 0)
    tokens = _answer_tokens(question, offsets) if question.answers else None
    if tokens is not None and len(window.offsets):
        (begin, _), (_, end) = offsets[tokens[0]], offsets[tokens[1]]
        if window.offsets[0, 0] <= begin and end <= window.offsets[-1, 1]:
            inside = _answer_tokens(question, window.offsets)
            positions = tuple(window.first + token for token in inside)
    return {"start_positions": positions[0], "end_positions": positions[1]}
