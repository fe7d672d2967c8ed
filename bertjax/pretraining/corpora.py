"""What a pre-training run reads: token stores (or a mixture), or the original's TFRecords.

A `Corpus` gives the batches of a sequence length, those to evaluate on, and the tokenizer. Rows of token stores arrive
unmasked; TFRecords bring masks that were drawn once, when they were written, so config.masking does not apply to them.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from bertjax.config import TFRECORD, Config, phases
from bertjax.data import laws
from bertjax.data.batches import (
    EndlessBatches,
    EvaluationBatches,
    FiniteBatches,
    PretrainingBatches,
    Share,
    check_one_tokenizer,
)
from bertjax.data.bert_records import RecordRows, Records, check_lengths, split_records
from bertjax.data.docstrings import build_docstring_store
from bertjax.data.remote import local_store
from bertjax.data.store import TokenStore
from bertjax.tokenization import Tokenizer, load_tokenizer

SAMPLED_RECORDS = 1000  # evenly spread, whose numbers are checked at the start


class Corpus:
    """Where the rows come from.

    A kind of corpus gives `training(length, rows)`, endless batches of so many rows; `heldout(length, rows)`, finite
    ones, and `others(length, rows)`, those of the further corpora of a mixture, by name; `token_counts(length)`, int64
    [V], how often each token is in the held-out text; `describe()`, its size, and `facts()`, its numbers, in words.

    Attributes:
      tokenizer: of the ids.
      fingerprint: of the content that the rows are made of, wherever it lies.
      masked: the rows bring their masks (mlm_positions, _labels, _weights [B, P]).
      numbers: of each store or set of files, of each row length, what `laws` measures.
      remarks: what is beyond its limit and trained on nevertheless, or cannot be evaluated.
    """

    tokenizer: Tokenizer
    fingerprint: str
    masked = False

    def __init__(self, config: Config, rows: tuple[int, int]):
        self._config = config
        self._slice = dict(process_index=rows[0], process_count=rows[1])
        self._lengths = list(dict.fromkeys(phase.length for phase in phases(config)))
        self.numbers: dict[str, list[dict[str, Any]]] = {}
        self.remarks: list[str] = []

    def others(self, length: int, rows: int) -> dict[str, Any]:
        return {}

    def _refuse(self, problems: list[str]) -> None:
        """ValueError with the problems, or remarks where config.data.corpus_limits says so."""
        if problems and self._config.data.corpus_limits == "refuse":
            raise ValueError(". Also: ".join(problems) + ". --config.data.corpus_limits=warn trains on it as it is")
        self.remarks.extend(problems)


def open_corpus(config: Config, workdir: epath.Path, rows: tuple[int, int]) -> Corpus:
    """The corpus of config.data; may build the embedded demo corpus in `workdir`.

    Args:
      rows: (number of this process, number of processes) among those that make rows.

    Raises:
      ValueError: no corpus there, settings that do not go with it, or a number beyond its limit
        (unless config.data.corpus_limits=warn), with the remedy.
    """
    if config.data.corpus.startswith(TFRECORD):
        return RecordCorpus(config, rows)
    return StoreCorpus(config, workdir, rows)


class StoreCorpus(Corpus):
    """One token store, or a mixture of several."""

    def __init__(self, config: Config, workdir: epath.Path, rows: tuple[int, int]):
        super().__init__(config, rows)
        self.stores, self.weights = _open_stores(config, workdir)
        check_one_tokenizer(self.stores)  # before they are measured
        self.tokenizer = self.stores[0].load_tokenizer()
        self.fingerprint = " ".join(store.manifest["content_hash"] for store in self.stores)
        self._options = dict(nsp=config.data.nsp, short_seq_prob=config.data.short_seq_prob, **self._slice)
        self._heldout = self.stores[0].heldout()
        self._others = {}
        for number, store in enumerate(self.stores[1:], 2):
            name = store.path.name
            if name in self._others or name == self.stores[0].path.name:
                name = f"{name}_{number}"
            if len(heldout := store.heldout()):
                self._others[name] = heldout
        self._heldout.require_documents()
        for store in self.stores:
            self._check(store)
        for name, heldout in {str(self.stores[0].path): self._heldout, **self._others}.items():
            if len(heldout):
                self._look_at(name, heldout)

    def _measure(self, store: TokenStore) -> list[dict[str, Any]]:
        """The numbers of a store at every row length of the run."""
        data = self._config.data
        return [
            laws.measure(store, length, self._config.seed, data.short_seq_prob, data.nsp) for length in self._lengths
        ]

    def _check(self, store: TokenStore) -> None:
        """Refuses what is beyond a limit."""
        if self._config.data.nsp and store.num_documents == 1:
            self.remarks.append(
                f"{store.path} has one document, so its random next sentences are of that document too. More documents "
                "make better ones"
                + " (build_corpus --format=blocks: a blank line ends a document)"
                * bool(store.manifest["files"])
            )
        self.numbers[str(store.path)] = found = self._measure(store)
        for numbers in found:
            self._refuse([f"{store.path}: {problem}" for _, problem in laws.problems(numbers, store.manifest)])

    def _look_at(self, name: str, heldout: TokenStore) -> None:
        """Notes which held-out pairs cannot be evaluated."""
        self.numbers[f"{name}, held out"] = found = self._measure(heldout)
        if self._config.data.nsp and heldout.num_documents == 1 < heldout.manifest["splits"]["train"]["documents"]:
            self.remarks.append(
                f"one document of {name} is held out, so its random next sentences are of that document too. Those of "
                "training are of other documents: the two NSP accuracies do not compare"
            )
        if any((numbers["random_share"] or 0) > laws.Limits.max_random_share for numbers in found):
            self.remarks.append(
                f"the held-out pairs of {name} are nearly all random: their NSP accuracy says nothing"
                + ". Hold out more documents (build_corpus --heldout_fraction)" * bool(heldout.manifest["files"])
            )

    def training(self, length: int, rows: int) -> PretrainingBatches:
        options = dict(weights=self.weights, packed=self._config.data.packed, **self._options)
        return PretrainingBatches(self.stores, length, rows, self._config.seed, **options)

    def heldout(self, length: int, rows: int) -> EvaluationBatches:
        return self._evaluation(self._heldout, length, rows)

    def others(self, length: int, rows: int) -> dict[str, EvaluationBatches]:
        return {name: self._evaluation(store, length, rows) for name, store in self._others.items()}

    def _evaluation(self, store: TokenStore, length: int, rows: int) -> EvaluationBatches:
        options = dict(max_rows=self._config.eval.rows or None, **self._options)
        return EvaluationBatches(store, length, rows, self._config.seed, **options)

    def token_counts(self, length: int) -> np.ndarray:
        counts = np.zeros(self._heldout.vocab_size, np.int64)
        for document in self._heldout.documents():
            for sentence in document:
                counts += np.bincount(sentence, minlength=len(counts))
        return counts

    def describe(self) -> str:
        tokens = sum(store.num_tokens for store in self.stores)
        documents = sum(store.num_documents for store in self.stores)
        size = f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"
        return f"{documents:,} document{'s' * (documents != 1)}, {size} tokens"

    def facts(self) -> list[str]:
        return [
            (f"{store.path}: " if len(self.stores) > 1 else "") + laws.describe(numbers)
            for store in self.stores
            for numbers in self.numbers[str(store.path)]
        ]


class RecordCorpus(Corpus):
    """TFRecords of the original's create_pretraining_data.py, each file set of one length.

    `{length}` in a pattern stands for the sequence length of the phase.
    """

    masked = True

    def __init__(self, config: Config, rows: tuple[int, int]):
        super().__init__(config, rows)
        data = config.data
        if not data.tokenizer:
            raise ValueError(
                f"config.data.corpus={data.corpus}: TFRecords hold ids only. Say which vocabulary "
                "they were made with: --config.data.tokenizer=DIR (or its vocab.txt)"
            )
        if data.heldout and not data.heldout.startswith(TFRECORD):
            raise ValueError(f"config.data.heldout={data.heldout}: write {TFRECORD}PATTERN")
        if data.packed:
            raise ValueError(
                "config.data.packed: TFRecords have one pair a row; build a token "
                "store from the text (bertjax.tools.build_corpus) to pack"
            )
        self.tokenizer = load_tokenizer(data.tokenizer)
        self._opened: dict[str, Records] = {}
        for length in self._lengths:
            self._split(length)  # before any record is checked: wrong files are the simpler error
        for length in self._lengths:
            self._check(length)

    def _check(self, length: int) -> None:
        """Measures the records of a row length, or an even sample; refuses what is beyond a limit."""
        for name, rows in zip(("training", "held-out"), self._split(length), strict=True):
            sample = FiniteBatches(rows, Share(SAMPLED_RECORDS), SAMPLED_RECORDS)
            found = laws.measure_rows(sample, self.tokenizer.unk_id, self.tokenizer.special_ids)
            self.numbers.setdefault(name, []).append({"seq_length": length, **found})
            problems = laws.row_problems(found, self._config.data.nsp)
            place = f"{rows.records.paths[0]} ({name} records of {length} tokens)"
            self._refuse([f"{place}: {problem}" for problem in problems])

    def facts(self) -> list[str]:
        return [
            f"{name} records of {numbers['seq_length']}: {numbers['random_share']:.1%} random "
            f"pairs, {numbers['unknown_rate']:.2%} unknown, {numbers['duplicate_share']:.1%} "
            f"copies in a sample of {numbers['rows']:,}"
            for name, found in self.numbers.items()
            for numbers in found
        ]

    @property
    def fingerprint(self) -> str:
        parts = [part for length in self._lengths for part in self._split(length)]
        return " ".join(dict.fromkeys(rows.records.fingerprint for rows in parts))

    def _open(self, source: str, length: int) -> Records:
        patterns = source.removeprefix(TFRECORD).replace("{length}", str(length))
        if patterns not in self._opened:
            self._opened[patterns] = Records(patterns, self._config.data.cache or None, self.tokenizer)
            self._opened[patterns].check()
        records = self._opened[patterns]
        try:
            check_lengths(records, length, self._config.masking.max_predictions or None)
        except ValueError as error:
            raise ValueError(
                f"{error}. The lengths are those of config.phases={self._config.phases} and "
                f"config.masking.max_predictions={self._config.masking.max_predictions} (0 = as "
                "in the files); {length} in the pattern stands for the length of a phase"
            ) from None
        return records

    def _split(self, length: int) -> tuple[RecordRows, RecordRows]:
        """What is trained on and what is held out of the files of this sequence length, in their order."""
        data = self._config.data
        records = self._open(data.corpus, length)
        if data.heldout:
            heldout = self._open(data.heldout, length)
            return RecordRows(records, np.arange(len(records))), RecordRows(heldout, np.arange(len(heldout)))
        training, held = split_records(len(records), data.heldout_fraction)
        return RecordRows(records, training), RecordRows(records, held)

    def training(self, length: int, rows: int) -> EndlessBatches:
        part, seed = self._split(length)[0], self._config.seed
        return EndlessBatches([RecordRows(part.records, part.numbers, seed)], Share(rows, **self._slice), seed)

    def heldout(self, length: int, rows: int) -> FiniteBatches:
        return FiniteBatches(self._split(length)[1], Share(rows, **self._slice), self._config.eval.rows or None)

    def token_counts(self, length: int) -> np.ndarray:
        """Special tokens are left out; what was masked is counted as what it was."""
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        for batch in FiniteBatches(self._split(length)[1], Share(256)):
            ids, (row, slot) = batch["input_ids"], np.nonzero(batch["mlm_weights"])
            ids[row, batch["mlm_positions"][row, slot]] = batch["mlm_labels"][row, slot]
            counts += np.bincount(ids.ravel(), minlength=len(counts))
        special = set(self.tokenizer.special_ids) - {self.tokenizer.unk_id}  # an [UNK] is text
        counts[list(special)] = 0
        return counts

    def describe(self) -> str:
        sizes = [f"{self._split(length)[0].rows_per_epoch:,} records of {length} tokens" for length in self._lengths]
        if self._config.data.heldout:
            return ", ".join(sizes)
        return (
            f"{', '.join(sizes)} (every n-th record is held out; where dupe_factor > 1, its text is trained on "
            "with other masks: config.data.heldout names files of other text)"
        )


def _open_stores(config: Config, workdir: epath.Path) -> tuple[list[TokenStore], Sequence[float] | None]:
    """The token stores of config.data.corpus and their weights, if any are given."""
    if config.data.corpus == "docstrings":
        return [_demo_store(config, workdir)], None
    stores, weights = [], []
    for path, weight in _mixture(config.data.corpus):
        if path.startswith(TFRECORD):
            raise ValueError(
                "config.data.corpus: TFRecords bring their masks and cannot be mixed with token stores; several "
                f"patterns of TFRecords go after one {TFRECORD}, separated by commas"
            )
        stores.append(TokenStore(local_store(path, config.data.cache)))
        try:
            weights.append(float(weight) if weight else None)
        except ValueError:
            raise ValueError(
                f"config.data.corpus: the weight {weight!r} of {path} is not a number; write DIR=2.5,DIR=1"
            ) from None
    if not stores:
        raise ValueError(f"config.data.corpus={config.data.corpus!r} names no token store")
    given = [weight for weight in weights if weight is not None]
    if given and None in weights:
        raise ValueError("config.data.corpus: give every corpus of the mixture a weight, or none")
    return stores, given or None


def _mixture(corpus: str) -> Iterator[tuple[str, str]]:
    """(path, weight, '' where none is given) of each store in 'DIR=WEIGHT,DIR=WEIGHT'.

    A directory that exists is taken as it is: its name may hold '=' and ','.
    """
    parts = [corpus] if _is_directory(corpus) else map(str.strip, corpus.split(","))
    for part in filter(None, parts):
        if "=" in part and not _is_directory(part):
            path, _, weight = part.rpartition("=")
            yield path, weight
        else:
            yield part, ""


def _is_directory(path: str) -> bool:
    return os.path.isdir(os.path.expanduser(path))


def _demo_store(config: Config, workdir: epath.Path) -> TokenStore:
    """The embedded demo corpus, which is built in the workdir the first time."""
    if "://" in str(workdir):
        raise ValueError(
            f"the embedded demo corpus is built in the workdir, and {workdir} is "
            "not on a local disk; choose another --workdir"
        )
    data = config.data
    store = workdir / "corpus"
    return TokenStore(build_docstring_store(store, data.demo_megabytes, data.demo_vocab_size, data.demo_vocab_model))
