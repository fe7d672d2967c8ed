"""Which rows of a global batch a process makes; batches over rows that each come once.

In: the number of a batch. Out: the numbers of its rows. What the rows hold is the business of
batches.py and bert_tfrecord.py.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

import numpy as np

from bertjax.data.rows import Batch


@dataclasses.dataclass(frozen=True)
class Share:
    """The contiguous slice that one of several processes makes of every global batch.

    Raises ValueError where the rows of a batch do not divide over the processes.
    """

    batch_size: int  # B, rows of the global batch
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {self.process_count} "
                "processes; use a multiple of their number"
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index {self.process_index} of {self.process_count} processes")

    @property
    def rows(self) -> int:
        """Rows of the slice."""
        return self.batch_size // self.process_count

    def of(self, number: int) -> np.ndarray:
        """Batch `number`'s rows of this process, counted from batch 0's first: int64 [rows]."""
        first = number * self.batch_size + self.process_index * self.rows
        return np.arange(first, first + self.rows, dtype=np.int64)


class FiniteBatches(abc.ABC):
    """Every row once, in order; the last batch is filled up with rows of weight 0.

    `len()`, `[i]` and iteration. A subclass says what the rows hold (`read`).

    Args:
      share: which part of each batch this process makes.
      available: rows that there are.
      max_batches: takes evenly spread rows, as many as fill so many batches; None takes all.
    """

    def __init__(self, share: Share, available: int, max_batches: int | None = None):
        self._share, self._available = share, available
        self.num_pairs = available if max_batches is None else min(available, max_batches * share.batch_size)

    @abc.abstractmethod
    def read(self, numbers: np.ndarray, rows: int) -> Batch:
        """A batch of `rows` rows that begins with rows `numbers`, int64 [at most rows]."""

    def __len__(self) -> int:
        return -(-self.num_pairs // self._share.batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        places = self._share.of(number)
        places = places[places < self.num_pairs]
        return self.read(places * self._available // self.num_pairs, self._share.rows)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))
