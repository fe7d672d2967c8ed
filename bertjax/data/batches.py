"""Training and evaluation batches: a pure function of (seed, step), whatever reads them.

In: the rows of one or more corpora (rows.py, bert_records.py). Out: dicts of numpy arrays, the rows of this process:

    input_ids, token_type_ids, attention_mask   int32 [B, T]
    nsp_labels                                  int32 [B, K]    0 = is next, 1 = random
    nsp_weights                                 float32 [B, K]  0 for rows or slots without a pair
    position_ids int32 [B, T], cls_positions int32 [B, K]       packed rows only

Batch s is rows s*B to (s+1)*B of an endless stream, counted from its row first_row, so a resume needs the step only.
Process p of n computes its contiguous slice of the B rows and touches nothing else. Masks are drawn on the device
(masking.py).
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Self

import numpy as np

from bertjax.data.pairs import combine, permute
from bertjax.data.rows import Batch, PairRows, Rows
from bertjax.data.store import TokenStore
from bertjax.interruption import leave_signals_to_parent

MIXTURE_BLOCK = 10_000  # rows in which a mixture has its exact proportions
AnyStore = TokenStore | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Share:
    """The contiguous slice that one of several processes makes of every global batch."""

    batch_size: int  # B, rows of the global batch
    process_index: int = 0
    process_count: int = 1
    first_row: int = 0  # of the stream, where batch 0 begins

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {self.process_count} processes; use a multiple of "
                "their number"
            )

    @property
    def rows(self) -> int:
        return self.batch_size // self.process_count

    def of(self, number: int) -> np.ndarray:
        """The rows of the stream that this process has in batch `number`: int64 [rows]."""
        first = self.first_row + number * self.batch_size + self.process_index * self.rows
        return np.arange(first, first + self.rows, dtype=np.int64)


class EndlessBatches:
    """Random-access training batches: `batches[step]` is this process's part of global batch `step`.

    Args:
      corpora: the rows of each corpus; several are a mixture, with `weights` as shares of the rows.
      seed: of the order in which the corpora of a mixture take turns.
    """

    def __init__(self, corpora: Sequence[Rows], share: Share, seed: int, weights: Sequence[float] = (1.0,)):
        self.corpora, self.batch_size, self.seed = corpora, share.batch_size, seed
        self._share = share
        self._counts = mixture_counts(weights, len(corpora))

    def __getitem__(self, step: int) -> Batch:
        corpus_of, numbers = self._assign(self._share.of(step))
        batch = self.empty()
        for corpus, rows in enumerate(self.corpora):
            into = np.flatnonzero(corpus_of == corpus)
            if len(into):
                rows.fill(numbers[into], into, batch)
        return batch

    def empty(self) -> Batch:
        """A batch of padding: names, shapes and types are those of every batch."""
        return self.corpora[0].empty(self._share.rows)

    def going_on(self, batch_size: int, first_row: int) -> Self:
        """Batches of another size from a row of the stream on; both read the same indices of the corpora."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other._share = dataclasses.replace(self._share, batch_size=batch_size, first_row=first_row)
        return other

    def _assign(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus, row of its stream) of each row of the run."""
        if len(self.corpora) == 1:
            return np.zeros(len(rows), np.int64), rows
        # Each block of rows holds every corpus exactly in proportion, in an order of its own.
        blocks, places = np.divmod(rows, MIXTURE_BLOCK)
        key = np.uint64(self.seed % 2**64)
        order = np.array(
            [
                permute(place, MIXTURE_BLOCK, np.uint64(combine(key, np.uint64(block))))
                for block, place in zip(blocks.tolist(), places.tolist(), strict=True)
            ]
        )
        starts = np.cumsum(self._counts) - self._counts
        corpora = np.searchsorted(starts, order, side="right") - 1
        return corpora, blocks * self._counts[corpora] + order - starts[corpora]

    @property
    def pairs_per_row(self) -> int:
        return self.corpora[0].pairs_per_row

    def epochs(self, steps: int) -> float:
        """How often `steps` batches go through the corpus (of a mixture, through each: mean)."""
        shares = self._counts / self._counts.sum()
        each = steps * self.batch_size * shares / [rows.rows_per_epoch for rows in self.corpora]
        return float(np.dot(shares, each))


def mixture_counts(weights: Sequence[float], corpora: int) -> np.ndarray:
    """Rows of each corpus in a block of MIXTURE_BLOCK rows, int64 [corpora]; largest remainder."""
    share = np.asarray(weights, float)
    if share.shape != (corpora,) or not (share > 0).all() or not np.isfinite(share).all():
        raise ValueError(f"weights {list(weights)}: give one positive number for each of the {corpora} corpora")
    exact = share / share.sum() * MIXTURE_BLOCK
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: MIXTURE_BLOCK - counts.sum()]] += 1
    if (counts == 0).any():
        raise ValueError(f"weights {list(weights)}: a share under 1/{MIXTURE_BLOCK} is too small")
    return counts


class PretrainingBatches(EndlessBatches):
    """`EndlessBatches` of token stores.

    Args:
      stores: a `TokenStore` or its path, or several: a mixture.
      seq_length: T; at least 5 (3 without NSP).
      batch_size, process_index, process_count: as of `Share`.
      seed: of pairs and order. Masks have their own.
      weights: of a mixture; default by the number of tokens.
      drawing: `packed`, `short_seq_prob` and `nsp` of `PairRows`; without NSP nsp_weights are 0.
    """

    def __init__(
        self,
        stores: AnyStore | Sequence[AnyStore],
        seq_length: int,
        batch_size: int,
        seed: int = 0,
        *,
        weights: Sequence[float] | None = None,
        process_index: int = 0,
        process_count: int = 1,
        **drawing: Any,
    ):
        share = Share(batch_size, process_index, process_count)
        if isinstance(stores, (TokenStore, str, os.PathLike)):
            stores = [stores]
        stores = [s if isinstance(s, TokenStore) else TokenStore(s) for s in stores]
        check_one_tokenizer(stores)
        seeds = [int(combine(np.uint64(seed % 2**64), np.uint64(number))) for number in range(len(stores))]
        rows = [PairRows(store, seq_length, own, **drawing) for store, own in zip(stores, seeds, strict=True)]
        weights = [store.num_tokens for store in stores] if weights is None else weights
        super().__init__(rows, share, seed, weights)


def check_one_tokenizer(stores: Sequence[TokenStore]) -> None:
    """Raises ValueError if the stores of a mixture were built with different tokenizers."""
    fingerprints = [store.manifest["tokenizer"]["fingerprint"] for store in stores]
    if len(set(fingerprints)) > 1:
        named = ", ".join(f"{store.path} ({of[:12]})" for store, of in zip(stores, fingerprints, strict=True))
        raise ValueError(f"the corpora of a mixture were built with different tokenizers: {named}; build them with one")


class FiniteBatches:
    """Every row of the first epoch once, in order: `len()`, `[i]`, iteration. Rows of weight 0 fill up the last batch.

    Args:
      rows: of the corpus, not shuffled.
      max_rows: takes so many rows, evenly spread; None takes all.
    """

    nsp = True  # whether the batches have NSP labels

    def __init__(self, rows: Rows, share: Share, max_rows: int | None = None):
        self._rows, self._share, self._available = rows, share, rows.rows_per_epoch
        self.num_pairs = min(self._available, self._available if max_rows is None else max_rows)

    def empty(self) -> Batch:
        """As `EndlessBatches.empty`."""
        return self._rows.empty(self._share.rows)

    def __len__(self) -> int:
        return -(-self.num_pairs // self._share.batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        places = self._share.of(number)
        places = places[places < self.num_pairs]
        batch = self.empty()
        self._rows.fill(places * self._available // self.num_pairs, np.arange(len(places)), batch)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))


class EvaluationBatches(FiniteBatches):
    """Every pair of a split once. Arguments as of `PretrainingBatches` and `FiniteBatches`; a path stands for the
    held-out split of its store.

    The pairs depend on `seed` only, so that evaluations compare.
    """

    def __init__(
        self,
        store: AnyStore,
        seq_length: int,
        batch_size: int,
        seed: int = 0,
        *,
        process_index: int = 0,
        process_count: int = 1,
        max_rows: int | None = None,
        **drawing: Any,
    ):
        share = Share(batch_size, process_index, process_count)
        store = store if isinstance(store, TokenStore) else TokenStore(store, "heldout")
        rows = PairRows(store, seq_length, seed, shuffle=False, **drawing)
        self.nsp = rows.nsp
        super().__init__(rows, share, max_rows)


def prefetch(batches: EndlessBatches, start_step: int = 0, *, buffer: int = 4, workers: int = 0) -> Iterator[Batch]:
    """Batches from `start_step` on without end, made ahead by Grain.

    Args:
      buffer: how many are kept ready.
      workers: processes instead of a thread of this one; 0 is enough for padded and packed rows, which are compiled
        code without the interpreter lock.
    """
    import grain  # late: only a run that trains needs it, and it takes a while to import
    from absl import flags

    steps = grain.MapDataset.range(start_step, 1 << 62).map(batches.__getitem__)
    dataset = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer))
    if workers:
        flags.FLAGS.mark_as_parsed()  # Grain reads its own from it
        # A run that is stopped while a thread compiles leaves at once, and the tracker of processes removes what the
        # workers shared. It is started here, without its warnings that it had to.
        options = sys.warnoptions[:]
        sys.warnoptions.append("ignore:resource_tracker")
        resource_tracker.ensure_running()
        sys.warnoptions[:] = options
        dataset = dataset.mp_prefetch(
            grain.multiprocessing.MultiprocessingOptions(workers, per_worker_buffer_size=max(buffer, 1)),
            worker_init_fn=lambda index, count: leave_signals_to_parent(),
        )
    return iter(dataset)
