"""The few lengths that rows are padded to ("buckets"): each is one compilation.

In: the lengths of the rows that will be padded. Out: the buckets that waste the least.
"""

from collections.abc import Sequence

import numpy as np


class Buckets:
    """The buckets of a data set: at most `count` (0 = by the amount of data), none above `limit`.

    Those for rows are chosen from the rows that are seen first, so that other splits need no
    further compilation if they fit.
    """

    def __init__(self, limit: int, count: int = 0):
        self.limit, self.count = limit, count
        self._for_rows: set[int] = set()

    def for_rows(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """For rows that may be sorted by length, in ascending order."""
        if not self._for_rows:
            self._for_rows = self._choose(lengths, self.count or automatic_count(lengths))
        if max(lengths) > max(self._for_rows):
            self._for_rows.add(self.limit)
        return tuple(sorted(self._for_rows))

    def for_random_batches(self, lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """For batches drawn at random, which take the bucket of their longest row."""
        longest = longest_in_batches(lengths, batch_size)
        return tuple(sorted(self._choose(longest, self.count or automatic_count(lengths))))

    def _choose(self, lengths: Sequence[int], count: int) -> set[int]:
        # A bucket is a multiple of 16 and may exceed a limit that is not.
        return {min(bucket, self.limit) for bucket in choose_buckets(lengths, count)}


def automatic_count(lengths: Sequence[int]) -> int:
    """How many buckets pay for themselves: 1 to 3, by the tokens that one bucket would compute."""
    tokens = len(lengths) * max(lengths)
    return 1 + (tokens > 2e6) + (tokens > 2e7)


def longest_in_batches(lengths: Sequence[int], batch_size: int) -> np.ndarray:
    """The longest row of each batch, batches being drawn at random: what such batches pad to."""
    drawn = np.random.default_rng(0).permutation(np.asarray(lengths))
    return np.maximum.reduceat(drawn, np.arange(0, len(drawn), batch_size))


def choose_buckets(lengths: Sequence[int], count: int = 3, multiple: int = 16) -> tuple[int, ...]:
    """At most `count` padded lengths that waste the fewest padding tokens on rows of `lengths`.

    Every bucket is one compilation, every row is padded to its bucket: the best cut of the length
    histogram, found exactly by dynamic programming. Buckets are multiples of `multiple`.
    """
    if not len(lengths):
        raise ValueError("no rows, so no lengths to choose buckets from")
    ceilings, rows = np.unique(-(-np.asarray(lengths) // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(rows)])
    # best[j]: (padded tokens, buckets) of the rows up to ceiling j, with at most k buckets.
    best = [(int(below[j + 1] * c), (int(c),)) for j, c in enumerate(ceilings)]
    for _ in range(count - 1):
        best = [
            min(
                [best[j]]
                + [(best[i][0] + int((below[j + 1] - below[i + 1]) * c), (*best[i][1], int(c))) for i in range(j)]
            )
            for j, c in enumerate(ceilings)
        ]
    return best[-1][1]
