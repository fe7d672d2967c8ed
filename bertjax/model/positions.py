"""Where a token stands: a row of a learned table, or a turn of its queries and keys.

In: position ids [B, T], or none where a row is one text. Out: what the embeddings add, or the cosines and sines
that attention turns its queries and keys by (Su et al. 2021, as transformers lays them out).
"""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.kernels.rotary import Turn
from bertjax.model.lookup import small_table_lookup
from bertjax.model.presets import BertConfig


def learned(config: BertConfig, table: jax.Array, input_ids: jax.Array, position_ids: jax.Array | None) -> jax.Array:
    """Rows of a table of positions: [T, E] where all rows of the batch have the same, else [B, T, E]."""
    if config.positions == "offset":
        # As transformers counts RoBERTa's: tokens from pad_token_id + 1 on, while padding has its own row.
        if position_ids is None:
            words = (input_ids != config.pad_token_id).astype(jnp.int32)
            position_ids = jnp.cumsum(words, axis=-1) * words - 1
        position_ids = position_ids + config.pad_token_id + 1
    if position_ids is None:
        return table[: input_ids.shape[1]]
    return small_table_lookup(table, position_ids)


EXTENSIONS = ("repeat", "interpolate")


def extended(table: np.ndarray, config: BertConfig, positions: int, how: str) -> np.ndarray:
    """A table of `config` for more positions: its rows over again (Beltagy et al. 2020, section 5), or those between
    which the new ones lie. The row of padding, where there is one, stays."""
    first = config.position_rows - config.max_position_embeddings
    rows = np.asarray(table[first:], np.float32)
    if how == "repeat":
        longer = rows[np.arange(positions) % len(rows)]
    else:
        places = np.linspace(0, len(rows) - 1, positions)
        below = np.minimum(places.astype(int), max(len(rows) - 2, 0))
        share = (places - below)[:, None].astype(np.float32)
        longer = rows[below] * (1 - share) + rows[np.minimum(below + 1, len(rows) - 1)] * share
    return np.concatenate([np.asarray(table[:first], np.float32), longer])


def base(config: BertConfig, window: int | None) -> float | None:
    """The base of rotary positions of a layer with this window; None = it turns nothing."""
    if config.positions != "rotary":
        return None
    return config.global_rope_theta if window is None else config.local_rope_theta


def turns(config: BertConfig, length: int, position_ids: jax.Array | None) -> dict[float, Turn]:
    """The cosines and sines of each base that the layers use; {} without rotary positions."""
    bases = {base(config, config.window(layer)) for layer in range(config.num_hidden_layers)} - {None}
    ids = jnp.arange(length)[None] if position_ids is None else position_ids
    return {one: _turn(ids, one, config.head_size) for one in sorted(bases)}


def _turn(position_ids: jax.Array, base: float, head_size: int) -> Turn:
    # Each step in float32, as transformers does it: at thousands of tokens the last bit of a frequency shows.
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = np.float32(1) / np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)
