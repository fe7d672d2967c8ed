"""Rows of a task to padded or packed batches, and batches to one array for the way to the device.

Their shapes are those of shapes.py. Packed rows hold several examples, in the fields that packed rows of pre-training
have too (data/rows.py): `attention_mask` numbers the examples 1..K, `position_ids` [R, T] restart with each,
`cls_positions` [R, K] say where each begins. What is one value an example is [R, K] then, and `weights` [R, K] are 0
where no example is.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.tasks.shapes import Shape, filled, fitted

Features = dict[str, Any]

INPUTS = ("input_ids", "token_type_ids")
PACKED = ("position_ids", "cls_positions")  # additional inputs of packed rows
_BY_TOKEN = (*INPUTS, "tags", "tag_weights")
_PLACES = ("start_positions", "end_positions")  # in the row
_HOST_FIELDS = ("example", "window")  # stay on the host


def row_length(features: Features) -> int:
    """Tokens of a row; of its longest choice where there are several."""
    ids = features["input_ids"]
    return max(map(len, ids)) if isinstance(ids, list) else len(ids)


def has_pair(features: Features) -> bool:
    """Whether a row has a second segment."""
    types = features["token_type_ids"]
    return any(map(np.any, types)) if isinstance(types, list) else bool(np.any(types))


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
    if "tag_weights" in batch:
        batch["tag_weights"][len(features) :] = 0
    return batch


# --- packed rows


def collate_packed(
    features: Sequence[Features], rows: Sequence[Sequence[int]], shape: Shape, pad_id: int
) -> dict[str, np.ndarray]:
    """A packed batch whose first rows hold the examples `rows` of `features`."""
    members = [features[i] for row in rows for i in row]
    lengths = np.array([len(member["input_ids"]) for member in members])
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    slot = np.concatenate([np.arange(len(row)) for row in rows])
    before = np.cumsum(lengths) - lengths  # tokens of all examples before each one
    start = before - np.repeat([before[at] for at in np.flatnonzero(slot == 0)], [len(row) for row in rows])
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    place = np.repeat(row_of, lengths), np.repeat(start, lengths) + within
    tokens, examples = (shape.rows, shape.length), (shape.rows, shape.slots)

    def spread(where: tuple[np.ndarray, ...], size: tuple[int, ...], values: np.ndarray, fill: int = 0) -> np.ndarray:
        kind = np.int32 if values.dtype.kind in "iub" else np.float32
        array = np.full((*size, *values.shape[1:]), fill, kind)
        array[where] = values
        return array

    batch: dict[str, np.ndarray] = {}
    for name in members[0]:
        if name in _BY_TOKEN:
            values = np.concatenate([member[name] for member in members])
            batch[name] = spread(place, tokens, values, pad_id if name == "input_ids" else 0)
        elif name not in _HOST_FIELDS:
            values = np.asarray([member[name] for member in members])
            batch[name] = spread((row_of, slot), examples, values + start if name in _PLACES else values)
    batch["attention_mask"] = spread(place, tokens, np.repeat(slot + 1, lengths))
    batch["position_ids"] = spread(place, tokens, within)
    batch["cls_positions"] = spread((row_of, slot), examples, start)
    batch["weights"] = spread((row_of, slot), examples, np.ones(len(members), np.float32))
    return batch


def of_examples(
    values: np.ndarray, shape: Shape, rows: Sequence[Sequence[int]], lengths: Sequence[int], by_token: bool
) -> Iterator[tuple[int, np.ndarray]]:
    """(example, its part) of the outputs of a batch: [R, T, ...] by token, else [R, ...], or [R, K, ...] if packed."""
    for value, row in zip(values, rows, strict=False):
        start = 0
        for slot, example in enumerate(row):
            end = start + lengths[example]
            yield example, value[start:end] if by_token else value[slot] if shape.slots > 1 else value
            start = end


def process_slice(batch: dict[str, np.ndarray], process_index: int, process_count: int) -> dict[str, np.ndarray]:
    """The contiguous rows of one process."""
    size = len(batch["weights"]) // process_count
    return {k: v[process_index * size : (process_index + 1) * size] for k, v in batch.items()}


class TrainingBatches:
    """Training batches by step: a pure function of (seed, step), every row once an epoch.

    Rows are shuffled again in each epoch and a batch is the next ones, in the first of `shapes` that holds them. With
    `group`, that many batches' worth of rows at a time are ordered by bucket before they are cut into batches, and the
    batches are shuffled: a batch rarely pads beyond its bucket then, but is not a random draw any more. The last, short
    batch of an epoch is filled with rows of weight 0. `batches[step]` gives the rows of this process.
    """

    def __init__(
        self,
        features: Sequence[Features],
        batch_size: int,
        seed: int,
        shapes: Sequence[Shape],
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
        self.shapes, self.pad_id, self.group = tuple(shapes), pad_id, group
        self.process_index, self.process_count = process_index, process_count
        self._lengths = np.array([row_length(f) for f in features])
        if self._lengths.max() > (most := self.shapes[-1].length):
            raise ValueError(f"a row of {self._lengths.max()} tokens is longer than those of the batches, {most}")
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
        if len(self.shapes) == 1 or not self.group:
            return np.split(order, range(self.batch_size, len(order), self.batch_size))
        size = self.group * self.batch_size
        bucket = np.searchsorted([shape.length for shape in self.shapes], self._lengths)
        groups = np.split(order, range(size, len(order), size))
        order = np.concatenate([g[np.argsort(bucket[g], kind="stable")] for g in groups])
        batches = np.split(order, range(self.batch_size, len(order), self.batch_size))
        return [batches[i] for i in rng.permutation(len(batches))]

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        examples = self.rows(step)
        shape, rows = fitted(self._lengths[examples].tolist(), self.shapes)
        batch = batch_of([self.features[i] for i in examples], rows, shape, self.pad_id)
        return process_slice(batch, self.process_index, self.process_count)


def batch_of(
    features: Sequence[Features], rows: Sequence[Sequence[int]], shape: Shape, pad_id: int
) -> dict[str, np.ndarray]:
    """The padded or packed batch of a shape whose first rows hold these examples."""
    if shape.slots > 1:
        return collate_packed(features, rows, shape, pad_id)
    return collate([features[row[0]] for row in rows], shape.length, shape.rows, pad_id)


def evaluation_batches(
    features: Sequence[Features], shape_of: Callable[[int], Shape], pad_id: int
) -> Iterator[tuple[Shape, list[list[int]], dict[str, np.ndarray]]]:
    """Every example exactly once: shape, the examples of each row, batch. See `filled`.

    The last batch is filled up with rows of weight 0.
    """
    for shape, rows in filled([row_length(f) for f in features], shape_of):
        yield shape, rows, batch_of(features, rows, shape, pad_id)


# --- one array for the device: each copy has a fixed cost, and five of them take longer than a step of a small model

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
