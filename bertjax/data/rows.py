"""Rows of one corpus: epochs of pairs -> numbered rows without end.

In: a `TokenStore`. Out: `fill` writes any rows of the endless stream into a batch (`batches.py`
names its arrays). Row r is row r - N_0 - ... of the epoch that it falls into; N, the rows of an
epoch, differs a little from epoch to epoch. Nothing is dropped where an epoch ends.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numba
import numpy as np

from bertjax.data.laws import LIMITS
from bertjax.data.pairs import PairIndex, copy_ids, locate, permute, tables_of
from bertjax.data.store import TokenStore

Batch = dict[str, np.ndarray]


class Special:
    """Ids of [PAD], [CLS] and [SEP]."""

    def __init__(self, pad: int, cls: int, sep: int):
        self.pad, self.cls, self.sep = pad, cls, sep

    @classmethod
    def of(cls, tokenizer: Any) -> Special:
        return cls(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)


def stored_special(stores: Sequence[TokenStore]) -> Special:
    """Special ids of the tokenizer beside the ids; ValueError where the stores' ones differ."""
    prints = {store.manifest["tokenizer"]["fingerprint"] for store in stores}
    if len(prints) > 1:
        raise ValueError(
            "the corpora of a mixture were built with different tokenizers: "
            + ", ".join(f"{s.path} ({s.manifest['tokenizer']['fingerprint'][:12]})" for s in stores)
            + "; build them with the same one"
        )
    ids = stores[0].manifest["tokenizer"]
    return Special(ids["pad_id"], ids["cls_id"], ids["sep_id"])


class Rows(Protocol):
    """The endless rows of one corpus; `PaddedRows` here, `packing.PackedRows`."""

    pairs_per_row: int
    rows_per_epoch: int

    def empty(self, rows: int) -> Batch: ...
    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None: ...


class Epochs:
    """Which epoch, and which place in it, each row of an endless stream has.

    `make(epoch)` gives an object with a length, the rows of that epoch. Lengths are remembered,
    the last two objects are kept (a batch may cross an epoch's end).
    """

    def __init__(self, make: Callable[[int], Any]):
        self._make = make
        self._starts = [0]
        self._kept: dict[int, Any] = {}
        self._lock = threading.RLock()  # batches may be made by several threads

    def __getitem__(self, epoch: int) -> Any:
        with self._lock:
            if epoch not in self._kept:
                while len(self._kept) >= 2:
                    self._kept.pop(min(self._kept))
                self._kept[epoch] = self._make(epoch)
            return self._kept[epoch]

    def locate(self, row: int) -> tuple[int, int]:
        """(epoch, place in it) of a row of the stream."""
        with self._lock:
            while self._starts[-1] <= row:
                self._starts.append(self._starts[-1] + len(self[len(self._starts) - 1]))
        epoch = int(np.searchsorted(self._starts, row, side="right")) - 1
        return epoch, row - self._starts[epoch]

    def split(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """(epoch's object, indices into `rows`, places in the epoch) for each epoch touched."""
        if not len(rows):
            return
        first, last = self.locate(int(rows.min()))[0], self.locate(int(rows.max()))[0]
        for epoch in range(first, last + 1):
            start, end = self._starts[epoch], self._starts[epoch + 1]
            chosen = np.flatnonzero((rows >= start) & (rows < end))
            if len(chosen):
                yield self[epoch], chosen, rows[chosen] - start


def index_epoch(
    store: TokenStore, seq_length: int, seed: int, epoch: int, short_seq_prob: float, nsp: bool
) -> PairIndex:
    """The pairs of an epoch; warns once where their labels teach nothing."""
    index = PairIndex(store, seq_length, seed, epoch, short_seq_prob, nsp)
    if epoch == 0 and nsp and index.random_share > LIMITS["max_random_share"]:
        warnings.warn(
            f"{store.path}: {index.random_share:.0%} of the next-sentence pairs would be "
            "random (label 1; about half should be)",
            stacklevel=2,
        )
    return index


class PaddedRows:
    """One pair a row, padded to seq_length."""

    pairs_per_row = 1

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        seed: int,
        special: Special,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
        shuffle: bool = True,
    ):
        self.seq_length, self.special, self.nsp, self.shuffle = seq_length, special, nsp, shuffle
        self._tables = tables_of(store)
        self._store = store  # keeps the memory maps alive
        self.epochs = Epochs(lambda epoch: index_epoch(store, seq_length, seed, epoch, short_seq_prob, nsp))

    @property
    def rows_per_epoch(self) -> int:
        return len(self.epochs[0])

    def empty(self, rows: int) -> Batch:
        return empty_batch(rows, self.seq_length, 1, self.special.pad)

    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None:
        """Write rows `numbers` of the stream to the rows `into` of the batch."""
        for index, chosen, places in self.epochs.split(numbers):
            _fill(
                self._tables,
                index.drawing,
                index.anchors,
                index.num_pairs,
                places,
                self.shuffle,
                self.special.cls,
                self.special.sep,
                into[chosen],
                batch["input_ids"],
                batch["token_type_ids"],
                batch["attention_mask"],
                batch["nsp_labels"],
                batch["nsp_weights"],
            )


def empty_batch(rows: int, seq_length: int, pairs_per_row: int, pad: int) -> Batch:
    """A batch of padding rows with weight 0."""
    shape = (rows, seq_length)
    return {
        "input_ids": np.full(shape, pad, np.int32),
        "token_type_ids": np.zeros(shape, np.int32),
        "attention_mask": np.zeros(shape, np.int32),
        "nsp_labels": np.zeros((rows, pairs_per_row), np.int32),
        "nsp_weights": np.zeros((rows, pairs_per_row), np.float32),
    }


@numba.njit(cache=True, nogil=True)
def write_pair(tables, pair, cls_id, sep_id, ids, types, mask, position, mark):
    """[CLS] A [SEP] (B [SEP]) into one row from `position` on; returns the position after it."""
    ids[position] = cls_id
    copy_ids(tables, pair.a_address, pair.a_length, ids, position + 1)
    middle = position + 1 + pair.a_length
    ids[middle] = sep_id
    end = middle + 1
    if pair.b_length:
        copy_ids(tables, pair.b_address, pair.b_length, ids, end)
        end += pair.b_length
        ids[end] = sep_id
        end += 1
        types[middle + 1 : end] = 1
    mask[position:end] = mark
    return end


@numba.njit(cache=True, nogil=True)
def _fill(
    tables, drawing, anchors, num_pairs, places, shuffle, cls_id, sep_id, into, ids, types, mask, labels, weights
):
    for i in range(len(places)):
        number = places[i]
        if shuffle:
            number = permute(number, num_pairs, drawing.key)
        pair = locate(tables, drawing, anchors, number)
        row = into[i]
        write_pair(tables, pair, cls_id, sep_id, ids[row], types[row], mask[row], 0, 1)
        labels[row, 0] = pair.is_random
        weights[row, 0] = 1.0 if drawing.nsp else 0.0
