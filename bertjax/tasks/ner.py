"""Tagging of words, as in CoNLL-2003: sentences to rows, tag logits to entities.

In: sentences of words and tags (conll.py). Out: rows whose gold stands at the first sub-token of each word, one tag a
word whatever the length of the text, and entity scores. Source: BERT paper, section 5.3 and appendix: first sub-token,
maximal document context, no CRF.
"""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bertjax.formats.files import whole_file
from bertjax.tasks import metrics
from bertjax.tasks.batches import Features
from bertjax.tasks.conll import Sentence, check_tags, convert_tags, detect_scheme, in_columns, read_tagged
from bertjax.tasks.encoding import word_rows
from bertjax.tasks.task import Example, Outputs, Rows, Split, Task, file_fingerprint, in_order, label_places, splits_in
from bertjax.tokenization import Tokenizer

OUTSIDE = "O"
MAX_WORDS = 60  # of a sentence that is shown


@dataclass(frozen=True)
class TaggedWindow:
    """Host-side companion of a row: which words it answers for.

    `positions` [n] in the row belong to the words (`sentences` [n], `words` [n]) of the split; `outside` holds
    (sentence, word) of those that the tokenizer makes nothing of.
    """

    positions: np.ndarray
    sentences: np.ndarray
    words: np.ndarray
    outside: tuple[tuple[int, int], ...] = ()


class NerTask(Task):
    """Named entities or any other tag a word, with head 'tagging'."""

    head = "tagging"

    def __init__(
        self,
        source: str | pathlib.Path,
        files: dict[str, str] | None = None,
        labels: Sequence[str] = (),
        scheme: str | None = None,
        strict: bool = False,
        context: str = "document",
        name: str = "ner",
        entities: bool = True,
    ):
        """`source` is a directory with `files` (split -> name; default train/dev/test.conll), or hf:NAME.

        Args:
          labels: tag names by index; () = those of the train split, 'O' first.
          scheme: IOB1, IOB2 or BIOES to convert the files' tags to; None = as they are.
          strict: score only entities that are well formed in the scheme.
          context: what a row may show around a word: its 'document' or its 'sentence'.
          entities: False for tags that are not entities (parts of speech): accuracy is the metric.
        """
        if context not in ("document", "sentence"):
            raise ValueError(f"context={context!r} is neither 'document' nor 'sentence'")
        if scheme is not None and scheme not in metrics.SCHEMES:
            raise ValueError(f"scheme={scheme!r}; one of {', '.join(metrics.SCHEMES)} or None")
        self.source, self.name = pathlib.Path(source), name
        self.splits = splits_in(source, files, {s: f"{s}.conll" for s in ("train", "dev", "test")})
        self.scheme, self.strict, self.context, self.entities = scheme, strict, context, entities
        self.metric = "f1" if entities else "token_accuracy"
        self.labels = tuple(labels) or self._labels_of_train()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Scores by which a checkpoint may be the best one."""
        entities = ("f1", "precision", "recall") if self.entities else ()
        return (*entities, "token_accuracy")

    def _labels_of_train(self) -> tuple[str, ...]:
        found = in_order(tag for sentence in self.labelled_train().records for tag in sentence.tags)
        if len(found) < 2:
            raise ValueError(f"{self.file_of('train')}: every tag is {found[0]!r}; there must be two to tell apart")
        return tuple(sorted(found, key=lambda tag: tag != OUTSIDE))

    # --- reading

    def read(self, split: str) -> Split:
        """Sentences in file order; a file with one column has no tags."""
        path = self.file_of(split)
        records = read_tagged(path, ("tags", "ner_tags" if self.entities else "pos_tags"))
        if not records:
            raise ValueError(f"{path} holds no sentences")
        labelled = records[0].tags is not None
        notes: tuple[str, ...] = ()
        if labelled and self.entities:
            check_tags(records)
            found = detect_scheme([sentence.tags for sentence in records])
            notes = (f"tags are {found}",)
            if self.scheme and found != self.scheme:
                notes = (f"tags converted from {found} to {self.scheme}",)
                records = [Sentence(s.words, convert_tags(s.tags, self.scheme), s.document, s.where) for s in records]
        return Split(split, records, labelled, file_fingerprint(path), notes)

    # --- sentences -> rows

    def features(self, split: Split, tokenizer: Tokenizer, max_length: int, training: bool) -> list[Features]:
        """Windows over documents (or sentences); every word is answered for in exactly one.

        Windows overlap by half, and a word belongs to the window that shows most around it. The other words of a window
        are context: their tag_weights are 0.
        """
        if training:
            split.require_labels("training")
        if max_length <= tokenizer.layout.count(pair=False):
            raise ValueError(f"max_length={max_length} has no room beside [CLS] and [SEP]")
        rows, place, together = [], label_places(self.labels), self.context == "document"
        sentences = range(len(split.records))
        for _, unit in itertools.groupby(sentences, lambda i: split.records[i].document if together else i):
            rows += self._rows(split, list(unit), tokenizer, max_length, place)
        return [row for row in rows if not training or len(row["window"].positions)]

    def _rows(
        self, split: Split, unit: list[int], tokenizer: Tokenizer, max_length: int, place: Callable[[str, str], int]
    ) -> list[Features]:
        places = np.array([(s, w) for s in unit for w in range(len(split.records[s].words))])
        words = [split.records[s].words[w] for s, w in places]
        found = word_rows(tokenizer, words, max_length, all_present=OUTSIDE not in self.labels)
        dropped = np.setdiff1d(np.arange(len(words)), np.concatenate([row.words for row in found]))
        rows = []
        for ids, types, mine, positions in found:
            sentences, numbers = places[mine].T
            outside = () if rows else tuple(map(tuple, places[dropped]))
            window = TaggedWindow(positions, sentences, numbers, outside)
            row = {"input_ids": ids, "token_type_ids": types, "window": window}
            if split.labelled:
                row["tags"], row["tag_weights"] = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32)
                here = ((split.records[s], w) for s, w in places[mine])
                row["tags"][positions] = [place(found.tags[w], f"{found.where}: tag") for found, w in here]
                row["tag_weights"][positions] = 1.0
            rows.append(row)
        return rows

    # --- logits -> tags -> scores and files

    def predict(self, split: Split, rows: Rows, outputs: Outputs) -> list[list[str]]:
        """One tag a word, one list a sentence, from the [t, labels] logits of every row.

        A word without pieces, of characters that the tokenizer drops, is O.
        """
        tags: list[list[str | None]] = [[None] * len(s.words) for s in split.records]
        for row, logits in zip(rows, outputs, strict=True):
            window = row["window"]
            for s, w in window.outside:
                tags[s][w] = OUTSIDE
            best = np.asarray(logits)[window.positions].argmax(-1)
            for s, w, tag in zip(window.sentences, window.words, best, strict=True):
                tags[s][w] = self.labels[tag]
        if any(tag is None for sentence in tags for tag in sentence):
            raise ValueError("some words got no tag: the rows are not those of this split")
        return tags

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> metrics.Scores:
        """Entity precision, recall and F1 (or token accuracy alone) over every word."""
        split.require_labels("scoring")
        predicted = self.predict(split, rows, outputs)
        gold = [sentence.tags for sentence in split.records]
        if self.entities:
            scheme = self.scheme or detect_scheme(gold)
            return metrics.entity_scores(gold, predicted, scheme, self.strict)
        places = {tag: place for place, tag in enumerate(self.labels)}
        pairs = [[places[tag] for tags in side for tag in tags] for side in (gold, predicted)]
        accuracy, constant = metrics.accuracy(*pairs), len(set(pairs[1])) == 1
        flags = (metrics.ONE_CLASS_ONLY,) if constant else ()
        return metrics.Scores({"token_accuracy": accuracy}, flags, metrics.by_class(*pairs, self.labels))

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """predictions_SPLIT.conll: word, gold tag (where there is one) and predicted tag."""
        path = directory / f"predictions_{split.name}.conll"
        predicted = self.predict(split, rows, outputs)
        with whole_file(path) as file:
            for sentence, tags in zip(split.records, predicted, strict=True):
                file.write(in_columns(sentence.words, sentence.tags, tags))
        return [path]

    def examples(self, split: Split, rows: Rows, outputs: Outputs) -> list[Example]:
        made = []
        for sentence, tags in zip(split.records, self.predict(split, rows, outputs), strict=True):
            words = list(zip(sentence.words, sentence.tags, tags, strict=True))[:MAX_WORDS]
            if all(gold == predicted == OUTSIDE for _, gold, predicted in words):
                continue  # nothing to see
            misses = sum(gold != predicted for _, gold, predicted in words)
            example = {"texts": [], "gold": "", "predicted": "", "right": not misses, "score": float(misses)}
            made.append(example | {"words": [list(word) for word in words]})
        return made
