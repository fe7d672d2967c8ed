"""Rows of one corpus: epochs of pairs -> numbered rows without end, a pair a row or several (packed).

In: a `TokenStore`. Out: `PairRows`, whose `fill` writes any rows of the endless stream into a batch (batches.py names
its arrays). The rows of epoch 0 come first, then those of epoch 1 and so on; an epoch's number of rows differs a little
from the next one's. Nothing is dropped at its end.

Packed rows hold up to K whole pairs, so that little work is spent on padding. `attention_mask` numbers the pairs of a
row 1..K (attention is confined to equal numbers), `position_ids` restart with each pair, `cls_positions` [K] says where
each begins. The shuffled epoch is cut into windows of pairs and each window is packed by best fit, longest pair first;
the rows of a window are then shuffled. Row r of an epoch therefore needs one window only, and stays a function of
(seed, step).
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from bertjax.data.pairs import PairIndex, check_length, combine, copy_ids, locate, permute, tables_of
from bertjax.data.store import TokenStore
from bertjax.formats.compiled import compiled

Batch = dict[str, np.ndarray]

WINDOW = 1 << 14  # pairs packed together; larger fills better and costs more at a random step
_KEPT_WINDOWS = 4


class Rows(Protocol):
    """The endless rows of one corpus."""

    pairs_per_row: int
    rows_per_epoch: int  # of the first epoch

    def empty(self, rows: int) -> Batch:
        """A batch of padding rows with weight 0."""

    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None:
        """Write rows `numbers` of the stream to the rows `into` of the batch."""


def pairs_per_row(seq_length: int, packed: bool = True) -> int:
    """K, the most pairs that a row holds."""
    return min(max(seq_length // 32, 4), 16) if packed else 1


class PairRows:
    """The endless rows of one token store.

    Args:
      packed: several pairs a row.
      shuffle: False keeps the order of the corpus (not of packed rows).
      Others as of `PairIndex`.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        seed: int,
        *,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
        packed: bool = False,
        shuffle: bool = True,
    ):
        check_length(store, seq_length, nsp)  # here too: epochs are made later
        self.store, self.seq_length, self.seed = store, seq_length, seed
        self.short_seq_prob, self.nsp, self.packed, self.shuffle = short_seq_prob, nsp, packed, shuffle
        self._tables = tables_of(store)
        self._starts = [0]  # first row of each epoch that was seen so far, and of the next one
        self._epochs: dict[int, PaddedEpoch | PackedEpoch] = {}
        self._lock = threading.RLock()  # batches may be made by several threads

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict) -> None:
        """Another process makes its own tables, whose pointers are valid there, and its own epochs."""
        self.__init__(**state)

    @property
    def pairs_per_row(self) -> int:
        return pairs_per_row(self.seq_length, self.packed)

    @property
    def rows_per_epoch(self) -> int:
        return len(self.epoch(0))

    def epoch(self, number: int) -> PaddedEpoch | PackedEpoch:
        """The rows of an epoch. The last two are kept, since a batch may cross an epoch's end."""
        with self._lock:
            if number not in self._epochs:
                while len(self._epochs) >= 2:
                    self._epochs.pop(min(self._epochs))
                self._epochs[number] = self._make_epoch(number)
            return self._epochs[number]

    def _make_epoch(self, number: int) -> PaddedEpoch | PackedEpoch:
        index = PairIndex(self.store, self.seq_length, self.seed, number, self.short_seq_prob, self.nsp)
        if self.packed:
            return PackedEpoch(index, self.seq_length, self.pairs_per_row)
        return PaddedEpoch(index, self.shuffle)

    def _epoch_of(self, row: int) -> int:
        with self._lock:
            while self._starts[-1] <= row:
                self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def empty(self, rows: int) -> Batch:
        shape, pairs = (rows, self.seq_length), (rows, self.pairs_per_row)
        batch = {
            "input_ids": np.full(shape, self.store.manifest["tokenizer"]["pad_id"], np.int32),
            "token_type_ids": np.zeros(shape, np.int32),
            "attention_mask": np.zeros(shape, np.int32),
            "nsp_labels": np.zeros(pairs, np.int32),
            "nsp_weights": np.zeros(pairs, np.float32),
        }
        if self.packed:
            batch |= {"position_ids": np.zeros(shape, np.int32), "cls_positions": np.zeros(pairs, np.int32)}
        return batch

    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None:
        if not len(numbers):
            return
        unused, layout = np.empty((0, 0), np.int32), self.store.layout
        special = tuple(np.array(ids, np.int32) for ids in layout[:3])
        for number in range(self._epoch_of(int(numbers.min())), self._epoch_of(int(numbers.max())) + 1):
            begin, end = self._starts[number : number + 2]
            chosen = np.flatnonzero((numbers >= begin) & (numbers < end))
            if not len(chosen):  # rows of a mixture or of one process may pass over a short epoch
                continue
            epoch = self.epoch(number)
            pairs, firsts = epoch.pairs_of(numbers[chosen] - begin)
            _write_rows(
                self._tables,
                epoch.index.drawing,
                epoch.index.anchors,
                pairs,
                firsts,
                into[chosen],
                special,
                layout.second,
                batch["input_ids"],
                batch["token_type_ids"],
                batch["attention_mask"],
                batch["nsp_labels"],
                batch["nsp_weights"],
                batch.get("position_ids", unused),
                batch.get("cls_positions", unused),
            )


class PaddedEpoch:  # a pair a row
    def __init__(self, index: PairIndex, shuffle: bool):
        self.index, self.shuffle = index, shuffle

    def __len__(self) -> int:
        return len(self.index)

    def pairs_of(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the pairs in the rows `places`, where each row begins among them and the end)."""
        if self.shuffle:
            places = _permute_all(places, len(self.index), self.index.drawing.key)
        return places, np.arange(len(places) + 1)


class PackedEpoch:  # several pairs a row
    def __init__(self, index: PairIndex, seq_length: int, pairs_per_row: int):
        self.index, self.seq_length, self.pairs_per_row = index, seq_length, pairs_per_row
        self._lengths = index.lengths()
        counts = np.empty(-(-len(index) // WINDOW), np.int64)
        _count_rows(self._lengths, index.drawing.key, WINDOW, seq_length, pairs_per_row, counts)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._windows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def share_filled(self) -> float:
        """Share of the epoch's positions that hold a token."""
        return int(self._lengths.sum(dtype=np.int64)) / (len(self) * self.seq_length)

    def pairs_of(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `PaddedEpoch.pairs_of`."""
        rows = [self._pairs_of(place) for place in places.tolist()]
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    def _pairs_of(self, place: int) -> np.ndarray:
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        pairs, firsts = self._window(number)
        key = np.uint64(combine(self.index.drawing.key, np.uint64(number + 1)))
        row = permute(place - int(self._starts[number]), len(firsts) - 1, key)
        return pairs[firsts[row] : firsts[row + 1]]

    def _window(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(pair numbers row by row, where each row begins among them and the end)."""
        if (kept := self._windows.get(number)) is not None:
            return kept
        pairs, lengths = _pairs_of_window(self._lengths, self.index.drawing.key, number, WINDOW)
        rows, row_of = pack(lengths, self.seq_length, self.pairs_per_row)
        firsts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
        window = pairs[np.argsort(row_of, kind="stable")], firsts
        # A new dict: other threads may be reading this one.
        self._windows = dict([*self._windows.items()][1 - _KEPT_WINDOWS :]) | {number: window}
        return window


# --- compiled -------------------------------------------------------------------------------------


@compiled
def _permute_all(places, n, key):
    numbers = np.empty(len(places), np.int64)
    for i in range(len(places)):
        numbers[i] = permute(places[i], n, key)
    return numbers


@compiled
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


@compiled
def _pairs_of_window(pair_lengths, key, window, size):
    """(numbers of the window's pairs, their lengths)."""
    n = len(pair_lengths)
    first = window * size
    count = min(size, n - first)
    numbers = np.empty(count, np.int64)
    lengths = np.empty(count, np.int64)
    for i in range(count):
        numbers[i] = permute(first + i, n, key)
        lengths[i] = np.int64(pair_lengths[numbers[i]])
    return numbers, lengths


@compiled
def _count_rows(pair_lengths, key, size, capacity, most, out):
    for window in range(len(out)):
        _, lengths = _pairs_of_window(pair_lengths, key, window, size)
        out[window] = pack(lengths, capacity, most)[0]


@compiled
def _write_pair(tables, pair, special, second, ids, types, mask, position, mark):
    """prefix A (middle B) suffix into one row from `position` on; returns the position after it."""
    prefix, middle, suffix = special
    end = _copy(prefix, ids, position)
    copy_ids(tables, pair.a_address, pair.a_length, ids, end)
    end += pair.a_length
    if pair.b_length:
        end = _copy(middle, ids, end)
        begin = end
        copy_ids(tables, pair.b_address, pair.b_length, ids, end)
        end = _copy(suffix, ids, end + pair.b_length)
        types[begin:end] = second
    else:
        end = _copy(suffix, ids, end)
    mask[position:end] = mark
    return end


@compiled
def _copy(special, ids, position):
    for i in range(len(special)):  # a slice would take numba three seconds to compile
        ids[position + i] = special[i]
    return position + len(special)


@compiled
def _write_rows(
    tables, drawing, anchors, pairs, firsts, into, special, second, ids, types, mask, labels, weights, positions, starts
):
    """Row into[i] of the batch gets the pairs firsts[i] to firsts[i+1]."""
    for i in range(len(into)):
        row, position = into[i], np.int64(0)
        for slot in range(firsts[i + 1] - firsts[i]):
            pair = locate(tables, drawing, anchors, pairs[firsts[i] + slot])
            end = _write_pair(tables, pair, special, second, ids[row], types[row], mask[row], position, slot + 1)
            labels[row, slot] = pair.is_random
            weights[row, slot] = 1.0 if drawing.nsp else 0.0
            if len(starts):
                starts[row, slot] = position
                for j in range(position, end):
                    positions[row, j] = j - position
            position = end
