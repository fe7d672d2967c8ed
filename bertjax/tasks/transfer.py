"""A batch on its way to the device as one array: a copy costs by the call, not by the byte.

In: a batch of task.collate, {field: [B, ...] int32 or float32}. Out: {layout: int32 [B, columns]},
whose only key says what the columns hold, so that jit knows it without looking. `unpack` is the
inverse, inside the compiled step. A step of a small model is shorter than five copies.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

_MARK = "packed"


def pack(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All fields side by side; floats keep their bits.

    Raises ValueError for a field that is neither int32 nor float32.
    """
    layout, columns = [_MARK], []
    for name, values in batch.items():
        if values.dtype not in (np.int32, np.float32):
            raise ValueError(f"field {name!r} is {values.dtype}; only int32 and float32 are packed")
        shape = "x".join(map(str, values.shape[1:]))
        layout.append(f"{name}:{values.dtype.kind}:{shape}")
        columns.append(values.reshape(len(values), -1).view(np.int32))
    return {" ".join(layout): np.concatenate(columns, axis=1)}


def unpack(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The fields of a packed batch; any other batch as it is."""
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
