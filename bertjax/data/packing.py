"""Several pairs in one row: no work spent on padding, next-sentence prediction kept.

In: the pairs of an epoch (`pairs.PairIndex`). Out: rows of T tokens that hold up to K whole pairs
each, every pair of the epoch once. `attention_mask` numbers the pairs of a row 1..K (attention is
confined to equal numbers), `position_ids` restart with each pair, `cls_positions` [K] says where
each begins, `nsp_labels` and `nsp_weights` [K] are per pair.

The shuffled epoch is cut into windows of pairs and each window is packed by best fit, longest pair
first; the rows of a window are then shuffled. Row r of an epoch therefore needs one window only,
and stays a function of (seed, step).
"""

from __future__ import annotations

import collections

import numba
import numpy as np

from bertjax.data.pairs import PairIndex, combine, locate, permute, tables_of
from bertjax.data.rows import Batch, Epochs, Special, empty_batch, index_epoch, write_pair
from bertjax.data.store import TokenStore

WINDOW = 1 << 14  # pairs packed together; larger fills better and costs more at a random step


@numba.njit(cache=True, nogil=True)
def pack(lengths, capacity, most):
    """Best fit, longest first, of pairs into rows.

    Args: lengths int [n], each <= capacity; at most `most` pairs a row.
    Returns: (rows, row of each pair int32 [n]).
    """
    n = len(lengths)
    order = np.empty(n, np.int64)  # counting sort, longest first, stable
    place = np.zeros(capacity + 2, np.int64)
    for i in range(n):
        place[capacity - lengths[i] + 1] += 1
    place = np.cumsum(place)
    for i in range(n):
        slot = capacity - lengths[i]
        order[place[slot]] = i
        place[slot] += 1
    row_of = np.empty(n, np.int32)
    held = np.zeros(n, np.int32)  # pairs in each row
    head = np.full(capacity + 1, -1, np.int64)  # open rows by the space left in them
    following = np.empty(n, np.int64)
    rows = 0
    for i in order:
        length = lengths[i]
        space = length
        while space <= capacity and head[space] < 0:
            space += 1
        if space <= capacity:
            row = head[space]
            head[space] = following[row]
        else:
            row, space = rows, capacity
            rows += 1
        row_of[i] = row
        held[row] += 1
        space -= length
        if held[row] < most and space > 0:
            following[row] = head[space]
            head[space] = row
    return rows, row_of


@numba.njit(cache=True, nogil=True)
def _window_lengths(pair_lengths, key, window, size, specials):
    """(numbers of the window's pairs, their lengths with special tokens)."""
    n = len(pair_lengths)
    first = window * size
    count = min(size, n - first)
    numbers = np.empty(count, np.int64)
    lengths = np.empty(count, np.int64)
    for i in range(count):
        numbers[i] = permute(first + i, n, key)
        lengths[i] = np.int64(pair_lengths[numbers[i]]) + specials
    return numbers, lengths


@numba.njit(cache=True, nogil=True)
def _count_rows(pair_lengths, key, size, specials, capacity, most, out):
    for window in range(len(out)):
        _, lengths = _window_lengths(pair_lengths, key, window, size, specials)
        out[window] = pack(lengths, capacity, most)[0]


@numba.njit(cache=True, nogil=True)
def _fill_row(
    tables, drawing, anchors, numbers, cls_id, sep_id, ids, types, mask, positions, cls_positions, labels, weights
):
    position = np.int64(0)
    for slot in range(len(numbers)):
        pair = locate(tables, drawing, anchors, numbers[slot])
        end = write_pair(tables, pair, cls_id, sep_id, ids, types, mask, position, slot + 1)
        for i in range(position, end):
            positions[i] = i - position
        cls_positions[slot] = position
        labels[slot] = pair.is_random
        weights[slot] = 1.0 if drawing.nsp else 0.0
        position = end


class PackedEpoch:
    """The packed rows of one epoch: `len()` and, for row r, the numbers of its pairs."""

    def __init__(self, index: PairIndex, seq_length: int, pairs_per_row: int):
        self.index, self.seq_length, self.pairs_per_row = index, seq_length, pairs_per_row
        self._lengths = index.lengths()
        self._specials = 3 if index.nsp else 2
        counts = np.empty(-(-len(index) // WINDOW), np.int64)
        _count_rows(self._lengths, index.drawing.key, WINDOW, self._specials, seq_length, pairs_per_row, counts)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._windows: collections.OrderedDict[int, tuple[np.ndarray, np.ndarray]] = collections.OrderedDict()
        self.tokens = int(self._lengths.sum(dtype=np.int64)) + len(index) * self._specials

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fill(self) -> float:
        """Share of the epoch's positions that hold a token."""
        return self.tokens / (len(self) * self.seq_length)

    def pairs_of(self, row: int) -> np.ndarray:
        """Numbers (in the order of the corpus) of the pairs in a row, int64 [1..K]."""
        window = int(np.searchsorted(self._starts, row, side="right")) - 1
        numbers, firsts = self._window(window)
        rows = len(firsts) - 1
        place = permute(
            row - int(self._starts[window]), rows, np.uint64(combine(self.index.drawing.key, np.uint64(window + 1)))
        )
        return numbers[firsts[place] : firsts[place + 1]]

    def _window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """(pair numbers row by row, where each row begins among them)."""
        if (kept := self._windows.get(window)) is not None:
            return kept
        numbers, lengths = _window_lengths(self._lengths, self.index.drawing.key, window, WINDOW, self._specials)
        rows, row_of = pack(lengths, self.seq_length, self.pairs_per_row)
        order = np.argsort(row_of, kind="stable")
        firsts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
        while len(self._windows) >= 4:
            try:
                self._windows.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        self._windows[window] = (numbers[order], firsts)
        return self._windows.get(window, (numbers[order], firsts))


class PackedRows:
    """The endless packed rows of one corpus, for `PretrainingBatches`."""

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        seed: int,
        special: Special,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
        pairs_per_row: int | None = None,
    ):
        if pairs_per_row is None:
            pairs_per_row = self.default_pairs(seq_length)
        if pairs_per_row < 1:
            raise ValueError(f"pairs_per_row {pairs_per_row}: must be at least 1")
        self.seq_length, self.special, self.pairs_per_row = seq_length, special, pairs_per_row
        self._store, self._tables = store, tables_of(store)
        self.epochs = Epochs(
            lambda epoch: PackedEpoch(
                index_epoch(store, seq_length, seed, epoch, short_seq_prob, nsp), seq_length, pairs_per_row
            )
        )

    @staticmethod
    def default_pairs(seq_length: int) -> int:
        """K where none is set."""
        return min(max(seq_length // 32, 4), 16)

    @property
    def rows_per_epoch(self) -> int:
        return len(self.epochs[0])

    def empty(self, rows: int) -> Batch:
        batch = empty_batch(rows, self.seq_length, self.pairs_per_row, self.special.pad)
        batch["position_ids"] = np.zeros((rows, self.seq_length), np.int32)
        batch["cls_positions"] = np.zeros((rows, self.pairs_per_row), np.int32)
        return batch

    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None:
        """Write rows `numbers` of the stream to the rows `into` of the batch."""
        names = (
            "input_ids",
            "token_type_ids",
            "attention_mask",
            "position_ids",
            "cls_positions",
            "nsp_labels",
            "nsp_weights",
        )
        for epoch, chosen, places in self.epochs.split(numbers):
            index = epoch.index
            for row, place in zip(into[chosen].tolist(), places.tolist(), strict=True):
                _fill_row(
                    self._tables,
                    index.drawing,
                    index.anchors,
                    epoch.pairs_of(place),
                    self.special.cls,
                    self.special.sep,
                    *(batch[n][row] for n in names),
                )
