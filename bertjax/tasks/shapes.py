"""The shapes of batches (few, since each is compiled on its own), and which examples share a row.

In: how many tokens each example has. Out: shapes and rows of examples, which batches.py makes arrays of. (data/rows.py
packs the pairs of a corpus, by compiled code and into rows of one length.)
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.config.task import TaskSettings

# --- buckets


def automatic_count(lengths: Sequence[int]) -> int:
    """How many buckets pay for themselves: 1 to 3, by the tokens that one bucket would compute."""
    tokens = len(lengths) * max(lengths)
    return 1 + (tokens > 2e6) + (tokens > 2e7)


def longest_in_batches(lengths: Sequence[int], batch_size: int) -> np.ndarray:
    """The longest row of each batch, batches being drawn at random: what such batches pad to."""
    drawn = np.random.default_rng(0).permutation(np.asarray(lengths))
    return np.maximum.reduceat(drawn, np.arange(0, len(drawn), batch_size))


def choose_buckets(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` padded lengths, multiples of 16, that waste the fewest padding tokens on rows of `lengths`.

    The best cut of the length histogram, found exactly by dynamic programming.
    """
    if not len(lengths):
        raise ValueError("no rows, so no lengths to choose buckets from")
    ceilings, rows = np.unique(-(-np.asarray(lengths) // 16) * 16, return_counts=True)
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


# --- packed rows


class Shape(NamedTuple):
    """Of a batch: rows, their tokens, and how many examples a row may hold; 1 is a padded row."""

    rows: int
    length: int
    slots: int = 1


SHORTEST = 64  # packed rows of fewer tokens would leave more of them unused, and are not faster
# Extra time of a token for each token of its row, relative to a short row: measured on a CPU (attention is T x T).
PER_LENGTH = 1e-3
SAMPLED = 200  # batches that say how many packed rows a training batch needs


def filled(lengths: Sequence[int], shape_of: Callable[[int], Shape]) -> Iterator[tuple[Shape, list[list[int]]]]:
    """Examples into rows, and rows into batches: (shape, the examples of each row).

    The longest example that is left opens a row, and the longest that still fit follow (first-fit decreasing). So the
    batches come by descending length: too large a one fails at once.

    Args:
      shape_of: the shape of a batch whose longest example has so many tokens.

    Raises ValueError for an example that is longer than its rows.
    """
    waiting: dict[int, list[int]] = {}
    for i in reversed(range(len(lengths))):
        waiting.setdefault(int(lengths[i]), []).append(i)
    left = sum(1 << length for length in waiting)  # bit n: an example of n tokens waits
    while left:
        shape, rows = shape_of(longest := left.bit_length() - 1), []
        if longest > shape.length:
            raise ValueError(f"an example of {longest} tokens is longer than the rows of its batch, {shape.length}")
        while left and len(rows) < shape.rows:
            row, space = [], shape.length
            while len(row) < shape.slots and (fitting := left & ((2 << space) - 1)):
                length = fitting.bit_length() - 1
                row.append(waiting[length].pop())
                space -= length
                if not waiting[length]:
                    left ^= 1 << length
            rows.append(row)
        yield shape, rows


def packed_lengths(longest: int, limit: int) -> tuple[int, ...]:
    """Candidate lengths of packed rows, for the longest example and the positions (`limit`) of the model.

    One of them is a multiple of the tiles of attention on GPUs.
    """
    shortest = max(SHORTEST, -(-int(longest) // 16) * 16)
    return tuple(sorted({min(length, limit) for length in (shortest, -(-shortest // 64) * 64, 2 * shortest)}))


def packed_shape(lengths: Sequence[int], batch_size: int, limit: int, multiple: int = 1) -> Shape:
    """The one shape in which batches of packed rows hold examples of these lengths in the least time.

    A batch has no more tokens than `batch_size` padded rows; its rows are a multiple of `multiple`.
    """
    made, candidates = [], packed_lengths(max(lengths), limit)
    for length in candidates:
        shape = Shape(1, length, slots(length))
        rows = sum(1 for _ in filled(lengths, lambda _, shape=shape: shape))
        most = max(1, batch_size * candidates[0] // length // multiple) * multiple
        batches = -(-rows // most)
        of_batch = -(-rows // batches // multiple) * multiple
        made.append((batches * of_batch * length * (1 + PER_LENGTH * length), shape._replace(rows=of_batch)))
    return min(made)[1]


def training_shapes(lengths: Sequence[int], batch_size: int, limit: int, multiple: int = 1) -> tuple[Shape, ...]:
    """The shape of packed batches of `batch_size` random examples that takes the least time on average, and the one,
    with a row for each example, that batches which do not fit it take. Their rows are multiples of `multiple`."""
    rng, made = np.random.default_rng(0), []
    drawn = rng.choice(np.asarray(lengths), (SAMPLED, batch_size))
    for length in packed_lengths(max(lengths), limit):
        whole = Shape(batch_size, length, slots(length))
        needed = np.array([len(fitted(batch, (whole,))[1]) for batch in drawn.tolist()])
        for rows in np.unique(-(-needed // multiple) * multiple).tolist():
            mean = np.where(needed <= rows, rows, batch_size).mean()
            made.append((mean * length * (1 + PER_LENGTH * length), (whole._replace(rows=rows), whole)))
    return tuple(dict.fromkeys(min(made)[1]))


def fitted(lengths: Sequence[int], shapes: Sequence[Shape]) -> tuple[Shape, list[list[int]]]:
    """The smallest of the shapes that holds all these examples in one batch, and the examples of each row.

    `shapes` ascend: padded ones in length, packed ones of one length in rows.
    """
    if shapes[0].slots == 1:
        longest = max(lengths)
        return next(shape for shape in shapes if shape.length >= longest), [[i] for i in range(len(lengths))]
    ((_, rows),) = filled(lengths, lambda _: shapes[-1])
    return next(shape for shape in shapes if shape.rows >= len(rows)), rows


def slots(length: int) -> int:
    """K of packed rows."""
    return max(2, length // 8)  # texts of fewer than 8 tokens are few


# --- both


class Shapes:
    """The shapes of the batches of a task, whose rows are at most `recipe.max_length` tokens long.

    They are chosen from the rows that are seen first, so that other splits need no further compilation if they fit.

    Args:
      packs: whether the network reads rows of several examples; `recipe.pack` of 'all' is refused where it does not.
      positions: how long its rows may be.
      multiple: what the rows of a batch are divisible by.
    """

    def __init__(self, recipe: TaskSettings, packs: bool, positions: int, multiple: int):
        if recipe.pack == "all" and not packs:
            raise ValueError(
                "task.pack=all: multiple choice, a BiLSTM and feature_layers need a row for each example; set "
                "--config.task.pack=evaluation, which packs where it can"
            )
        self.recipe, self.packs, self.positions, self.multiple = recipe, packs, positions, multiple
        self._buckets: set[int] = set()
        self._packed: Shape | None = None

    def of_evaluation(self, lengths: Sequence[int]) -> Callable[[int], Shape]:
        """What the shape is of a batch of these rows whose longest has so many tokens.

        Without packed rows several buckets, none above max_length.
        """
        rows = -(-self.recipe.eval_batch_size // self.multiple) * self.multiple
        if self.recipe.pack == "none" or not self.packs:
            buckets = self.buckets(lengths)
            return lambda length: Shape(rows, buckets[bisect.bisect_left(buckets, length)])
        if self._packed is None or self._packed.length < max(lengths):
            self._packed = packed_shape(lengths, rows, self.positions, self.multiple)
        return lambda length: self._packed

    def of_training(self, lengths: Sequence[int], batch_size: int, accumulation: int) -> tuple[Shape, ...]:
        """The shapes of batches of these rows: each batch takes the first that holds it."""
        if self.recipe.pack == "all":
            return training_shapes(lengths, batch_size, self.positions, self.multiple * accumulation)
        buckets = self.buckets(lengths)  # chosen first from the rows that are trained on
        if not self.recipe.group_by_length:
            buckets = sorted(self._choose(longest_in_batches(lengths, batch_size), lengths))
        return tuple(Shape(batch_size, bucket) for bucket in buckets)

    def buckets(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """For rows that may be sorted by length, in ascending order."""
        self._buckets = self._buckets or self._choose(lengths, lengths)
        if max(lengths) > max(self._buckets):
            self._buckets.add(self.recipe.max_length)
        return tuple(sorted(self._buckets))

    def _choose(self, padded: Sequence[int], rows: Sequence[int]) -> set[int]:
        # A bucket is a multiple of 16 and may exceed a limit that is not.
        found = choose_buckets(padded, self.recipe.buckets or automatic_count(rows))
        return {min(bucket, self.recipe.max_length) for bucket in found}
