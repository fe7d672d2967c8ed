"""Rows of a task to padded batches, and batches to one array for the way to the device.

The lengths that rows are padded to ("buckets") are few, since each is one compilation.

A row (`Features`) is a dict of plain numpy values:

    input_ids, token_type_ids   int32 [t]; multiple choice: [C][t]
    labels                      int: class or right choice
    targets                     float: regression
    label_set                   float32 [C]: multi-label, 0 or 1
    tags, tag_weights           int32 [t], float32 [t]: tagging; weight 1 where a word is predicted
    start_positions, end_positions   int: spans, in tokens of the row; 0, 0 = no answer here
    example                     int: which record of the split the row belongs to
    window                      what the task needs again to read the outputs

Rows of a split without gold (a test set) lack the gold fields.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Features = dict[str, Any]

INPUTS = ("input_ids", "token_type_ids")
_BY_TOKEN = (*INPUTS, "tags", "tag_weights")
_HOST_FIELDS = ("example", "window")  # stay on the host


def row_length(features: Features) -> int:
    """Tokens of a row; of its longest choice where there are several."""
    ids = features["input_ids"]
    return max(map(len, ids)) if isinstance(ids, list) else len(ids)


def has_pair(features: Features) -> bool:
    """Whether a row has a second segment."""
    types = features["token_type_ids"]
    return any(map(np.any, types)) if isinstance(types, list) else bool(np.any(types))


# --- buckets


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

    The best cut of the length histogram, found exactly by dynamic programming. Buckets are multiples of `multiple`.
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


class Buckets:
    """The buckets of a data set: at most `count` (0 = by the amount of data), none above `limit`.

    Those for rows are chosen from the rows that are seen first, so that other splits need no further compilation if
    they fit.
    """

    def __init__(self, limit: int, count: int = 0):
        self.limit, self.count = limit, count
        self._for_rows: set[int] = set()

    def for_rows(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """For rows that may be sorted by length, in ascending order."""
        self._for_rows = self._for_rows or self._choose(lengths, lengths)
        if max(lengths) > max(self._for_rows):
            self._for_rows.add(self.limit)
        return tuple(sorted(self._for_rows))

    def for_random_batches(self, lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """For batches drawn at random, which take the bucket of their longest row."""
        return tuple(sorted(self._choose(longest_in_batches(lengths, batch_size), lengths)))

    def _choose(self, padded: Sequence[int], rows: Sequence[int]) -> set[int]:
        # A bucket is a multiple of 16 and may exceed a limit that is not.
        return {min(bucket, self.limit) for bucket in choose_buckets(padded, self.count or automatic_count(rows))}


# --- batches


def collate(features: Sequence[Features], length: int, batch_size: int, pad_id: int) -> dict[str, np.ndarray]:
    """Pads rows to [batch_size, length]; missing rows repeat the first with weight 0.

    Adds attention_mask (1 = token) and weights [B] float32 (0 = not a row of the data).
    """
    rows = [*features, *[features[0]] * (batch_size - len(features))]
    batch: dict[str, np.ndarray] = {}
    for name, first in rows[0].items():
        if name in _HOST_FIELDS:
            continue
        if name not in _BY_TOKEN:
            values = np.asarray([row[name] for row in rows])
            batch[name] = values.astype(np.int32 if values.dtype.kind in "iu" else np.float32)
            continue
        choices = isinstance(first, list)
        shape = (batch_size, len(first), length) if choices else (batch_size, length)
        kind = np.float32 if name == "tag_weights" else np.int32
        batch[name] = np.full(shape, pad_id if name == "input_ids" else 0, kind)
        mask = np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            for j, values in enumerate(row[name]) if choices else [(..., row[name])]:
                batch[name][i, j, : len(values)] = values
                mask[i, j, : len(values)] = 1
        if name == "input_ids":
            batch["attention_mask"] = mask
    batch["weights"] = (np.arange(batch_size) < len(features)).astype(np.float32)
    return batch


def process_slice(batch: dict[str, np.ndarray], process_index: int, process_count: int) -> dict[str, np.ndarray]:
    """The contiguous rows of one process."""
    size = len(batch["weights"]) // process_count
    return {k: v[process_index * size : (process_index + 1) * size] for k, v in batch.items()}


def _bucket_of(features: Sequence[Features], buckets: Sequence[int]) -> np.ndarray:
    lengths = np.array([row_length(f) for f in features])
    if lengths.size and lengths.max() > max(buckets):
        raise ValueError(f"a row of {lengths.max()} tokens is longer than the buckets {buckets}")
    return np.searchsorted(np.asarray(sorted(buckets)), lengths)


class TrainingBatches:
    """Training batches by step: a pure function of (seed, step), every row once an epoch.

    Rows are shuffled anew each epoch and a batch is the next ones, padded to the bucket of its longest row. With
    `group`, that many batches' worth of rows at a time are ordered by bucket before they are cut into batches, and the
    batches are shuffled: a batch rarely pads beyond its bucket then, but is no random draw any more. The last, short
    batch of an epoch is filled with rows of weight 0. `batches[step]` gives the rows of this process.
    """

    def __init__(
        self,
        features: Sequence[Features],
        batch_size: int,
        seed: int,
        buckets: Sequence[int],
        pad_id: int,
        group: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if not features:
            raise ValueError("no training rows")
        if batch_size % process_count:
            raise ValueError(f"batch_size={batch_size} is not divisible by {process_count} hosts")
        if any(set(row) <= {*INPUTS, *_HOST_FIELDS} for row in features):
            raise ValueError("training rows have no labels; a test split cannot be trained on")
        self.features, self.batch_size, self.seed = features, batch_size, seed
        self.buckets, self.pad_id, self.group = tuple(sorted(buckets)), pad_id, group
        self.process_index, self.process_count = process_index, process_count
        self._bucket = _bucket_of(features, self.buckets)
        self._plan: tuple[int, list[np.ndarray]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.features) // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Indices of the features in the global batch of `step`."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._plan[0] != epoch:
            self._plan = (epoch, self._epoch(epoch))
        return self._plan[1][at]

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.features))
        if len(self.buckets) == 1 or not self.group:
            return np.split(order, range(self.batch_size, len(order), self.batch_size))
        size = self.group * self.batch_size
        groups = np.split(order, range(size, len(order), size))
        order = np.concatenate([g[np.argsort(self._bucket[g], kind="stable")] for g in groups])
        batches = np.split(order, range(self.batch_size, len(order), self.batch_size))
        return [batches[i] for i in rng.permutation(len(batches))]

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows = self.rows(step)
        length = self.buckets[self._bucket[rows].max()]
        batch = collate([self.features[i] for i in rows], length, self.batch_size, self.pad_id)
        return process_slice(batch, self.process_index, self.process_count)


def evaluation_batches(
    features: Sequence[Features], batch_size: int, buckets: Sequence[int], pad_id: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Every row exactly once, by bucket, as (feature indices, batch [B, bucket]) pairs.

    The last batch of a bucket is filled with weight-0 rows, so a bucket has one shape.
    """
    buckets = sorted(buckets)
    bucket = _bucket_of(features, buckets)
    for number, length in enumerate(buckets):
        members = np.flatnonzero(bucket == number)
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size]
            yield rows, collate([features[i] for i in rows], length, batch_size, pad_id)


# --- one array for the device: a copy costs by the call, and a step of a small model is shorter than five

_MARK = "packed"


def as_one_array(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All fields of a batch side by side, {layout: int32 [B, columns]}; floats keep their bits.

    The only key says what the columns hold, so that jit knows it. Raises ValueError for a field that is neither int32
    nor float32.
    """
    layout, columns = [_MARK], []
    for name, values in batch.items():
        if values.dtype not in (np.int32, np.float32):
            raise ValueError(f"field {name!r} is {values.dtype}; only int32 and float32 are packed")
        shape = "x".join(map(str, values.shape[1:]))
        layout.append(f"{name}:{values.dtype.kind}:{shape}")
        columns.append(values.reshape(len(values), -1).view(np.int32))
    return {" ".join(layout): np.concatenate(columns, axis=1)}


def fields_of(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The inverse of `as_one_array`, inside the compiled step; any other batch as it is."""
    key = next(iter(batch))
    if not key.startswith(f"{_MARK} "):
        return dict(batch)
    array, start, fields = batch[key], 0, {}
    for entry in key.split(" ")[1:]:
        name, kind, text = entry.split(":")
        shape = tuple(int(size) for size in text.split("x") if size)
        end = start + math.prod(shape)
        values = array[:, start:end].reshape(array.shape[0], *shape)
        fields[name] = jax.lax.bitcast_convert_type(values, jnp.float32) if kind == "f" else values
        start = end
    return fields
