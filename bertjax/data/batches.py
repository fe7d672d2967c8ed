"""Training and evaluation batches: a pure function of (seed, step), whatever reads them.

In: one or more `TokenStore`s. Out: dicts of numpy arrays, the rows of this process:

    input_ids, token_type_ids, attention_mask   int32 [B, T]
    nsp_labels                                  int32 [B, K]    0 = is next, 1 = random
    nsp_weights                                 float32 [B, K]  0 for rows or slots without a pair
    position_ids int32 [B, T], cls_positions int32 [B, K]       packed rows only

Batch s is rows s*B to (s+1)*B of an endless stream (`rows.py`), so a resume needs the step only.
Process p of n computes its contiguous slice of the B rows and touches nothing else.
Tokens are unmasked; masks are drawn on the device (`masking.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.global_batch import FiniteBatches, Share
from bertjax.data.laws import single_document
from bertjax.data.packing import PackedRows
from bertjax.data.pairs import check_length, combine, permute
from bertjax.data.rows import Batch, PaddedRows, Rows, Special, stored_special
from bertjax.data.store import TokenStore
from bertjax.interruption import leave_signals_to_parent

MIXTURE_BLOCK = 10_000  # rows in which a mixture has its exact proportions


class PretrainingBatches:
    """Endless random-access batches: `batches[step]` is this process's part of global batch `step`.

    Args:
      stores: a `TokenStore` or its path, or several: a mixture.
      seq_length: T; at least 5 (3 without NSP).
      batch_size: B, rows of the global batch, divisible by process_count.
      seed: of pairs and order. Masks have their own.
      weights: of a mixture, share of rows from each store; default by the number of tokens.
      packed: several pairs a row (`packing.py`), at most `pairs_per_row` (default T // 32, 4..16).
      process_index, process_count: which contiguous slice of the rows to make.
      short_seq_prob: share of documents whose pairs are shorter than T (0.1 in the original).
      nsp: False gives single segments instead of pairs, with nsp_weights 0.
      tokenizer: whose special ids to use; default the one stored beside the ids.

    Raises:
      ValueError: before anything is read where seq_length is too short, where the batch does not
        divide, or stores of different tokenizers are mixed.
    """

    def __init__(
        self,
        stores: TokenStore | str | os.PathLike[str] | Sequence[TokenStore | str | os.PathLike[str]],
        seq_length: int,
        batch_size: int,
        seed: int = 0,
        *,
        weights: Sequence[float] | None = None,
        packed: bool = False,
        pairs_per_row: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
        tokenizer: Any = None,
    ):
        check_length(seq_length, nsp)
        self._share = Share(batch_size, process_index, process_count)
        if isinstance(stores, (TokenStore, str, os.PathLike)):
            stores = [stores]
        self.stores = [s if isinstance(s, TokenStore) else TokenStore(s) for s in stores]
        for store in self.stores if nsp else ():
            if problem := single_document(store):
                warnings.warn(f"{store.path}: {problem}", stacklevel=2)
        self._options = dict(
            weights=weights,
            packed=packed,
            pairs_per_row=pairs_per_row,
            process_index=process_index,
            process_count=process_count,
            short_seq_prob=short_seq_prob,
            nsp=nsp,
            tokenizer=tokenizer,
        )
        self.seq_length, self.batch_size, self.seed = seq_length, batch_size, seed
        special = Special.of(tokenizer) if tokenizer is not None else stored_special(self.stores)

        def rows_of(store: TokenStore, seed: int) -> Rows:
            if packed:
                return PackedRows(store, seq_length, seed, special, short_seq_prob, nsp, pairs_per_row)
            return PaddedRows(store, seq_length, seed, special, short_seq_prob, nsp)

        self._rows = [
            rows_of(store, int(combine(np.uint64(seed % 2**64), np.uint64(i)))) for i, store in enumerate(self.stores)
        ]
        if weights is None:
            weights = [store.num_tokens for store in self.stores]
        self._counts = mixture_counts(weights, len(self.stores))

    def __reduce__(self) -> tuple:
        return _remake, (self.stores, self.seq_length, self.batch_size, self.seed, self._options)

    def __getitem__(self, step: int) -> Batch:
        corpora, numbers = self._assign(self._share.of(step))
        batch = self._rows[0].empty(self._share.rows)
        for corpus, rows in enumerate(self._rows):
            into = np.flatnonzero(corpora == corpus)
            if len(into):
                rows.fill(numbers[into], into, batch)
        return batch

    def _assign(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus, row of its stream) of each row of the run."""
        if len(self._rows) == 1:
            return np.zeros(len(rows), np.int64), rows
        # Each block of rows holds every corpus exactly in proportion, in an order of its own.
        block = rows // MIXTURE_BLOCK
        order = np.array(
            [
                permute(
                    row % MIXTURE_BLOCK,
                    MIXTURE_BLOCK,
                    np.uint64(combine(np.uint64(self.seed % 2**64), np.uint64(row // MIXTURE_BLOCK))),
                )
                for row in rows.tolist()
            ]
        )
        starts = np.cumsum(self._counts) - self._counts
        corpora = np.searchsorted(starts, order, side="right") - 1
        return corpora, block * self._counts[corpora] + order - starts[corpora]

    @property
    def pairs_per_row(self) -> int:
        return self._rows[0].pairs_per_row

    @property
    def examples_per_epoch(self) -> int:
        """Rows that the first epoch of the corpus has; of a mixture, of all its corpora."""
        return sum(rows.rows_per_epoch for rows in self._rows)

    def epochs(self, steps: int) -> float:
        """How often `steps` batches go through the corpus (of a mixture, through each: mean)."""
        share = self._counts / self._counts.sum()
        each = [steps * self.batch_size * s / rows.rows_per_epoch for s, rows in zip(share, self._rows, strict=True)]
        return float(np.dot(share, each))


def _remake(stores, seq_length, batch_size, seed, options) -> PretrainingBatches:
    return PretrainingBatches(stores, seq_length, batch_size, seed, **options)


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


class EvaluationBatches(FiniteBatches):
    """Every pair of a split once. Arguments as of `PretrainingBatches` and `FiniteBatches`; a path
    stands for the held-out split of its store.

    The pairs depend on `seed` only, so that evaluations compare.

    Attributes:
      nsp: whether the batches have NSP labels. A split of one document has none: its "random" pairs
        would be of the same document, which is another task than the one that is trained.
    """

    def __init__(
        self,
        store: TokenStore | str | os.PathLike[str],
        seq_length: int,
        batch_size: int,
        seed: int = 0,
        *,
        process_index: int = 0,
        process_count: int = 1,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
        tokenizer: Any = None,
        max_batches: int | None = None,
    ):
        check_length(seq_length, nsp)
        share = Share(batch_size, process_index, process_count)
        self.store = store if isinstance(store, TokenStore) else TokenStore(store, "heldout")
        self.nsp = nsp and self.store.num_documents > 1
        special = Special.of(tokenizer) if tokenizer is not None else stored_special([self.store])
        self._rows = PaddedRows(self.store, seq_length, seed, special, short_seq_prob, nsp, shuffle=False)
        super().__init__(share, self._rows.rows_per_epoch, max_batches)

    def read(self, numbers: np.ndarray, rows: int) -> Batch:
        batch = self._rows.empty(rows)
        self._rows.fill(numbers, np.arange(len(numbers)), batch)
        if not self.nsp:
            batch["nsp_weights"][:] = 0
        return batch


def prefetch(
    batches: Any,
    start_step: int = 0,
    stop_step: int | None = None,
    *,
    threads: int = 1,
    buffer: int = 4,
    workers: int = 0,
) -> Iterator[Batch]:
    """Batches from `start_step` on, made ahead by Grain.

    Args:
      batches: an object with `[step]`.
      stop_step: first step not made; None goes on without end.
      threads, buffer: threads that make batches and how many are kept ready.
      workers: processes instead of threads of this one; 0 is enough for padded and packed rows,
        which are compiled code without the interpreter lock.
    """
    import grain  # late: only a run that trains needs it, and it takes a while to import

    length = (1 << 62) - start_step if stop_step is None else stop_step - start_step
    dataset = grain.MapDataset.source(_Steps(batches, start_step, length)).to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    )
    if workers:
        dataset = dataset.mp_prefetch(
            grain.multiprocessing.MultiprocessingOptions(workers, per_worker_buffer_size=buffer),
            worker_init_fn=lambda index, count: leave_signals_to_parent(),
        )
    return iter(dataset)


class _Steps:
    """The steps from `start` on as a Grain source."""

    def __init__(self, batches: Any, start: int, length: int):
        self._batches, self._start, self._length = batches, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batches[self._start + index]
