"""Attention dropout as a pure function of (key, batch row, head, query, key position).

A fused attention kernel must redraw in its backward pass the mask of its forward pass, and a
resumed or rematerialised step the mask of the first run, whatever the tile sizes and however the
batch is sharded. So no generator with a state is used here but a counter-based hash:

    key, row, head    -> two 32-bit words, the stream of that head        `stream_seeds`
    stream, (i, j)    -> 16 bits: kept iff they are at least rate * 65536  `tile_keep_mask`

`stream_seeds` runs outside the kernels on GLOBAL row and head indices and its result [B, A, 2] is
sharded like any other array, so a kernel on one shard needs no offset. `tile_keep_mask` is plain
jnp on uint32 for the reference path; the GPU kernels have the same in the Triton language
(gpu_programs.attention_keep, gpu_row_programs.hidden_keep).

One hash gives the bits of four elements: (i, j), (i, j^8), (i^8, j), (i^8, j^8). These are the
four that one GPU thread holds of a tensor-core result tile, in either orientation, so the
compiler finds that they share their arithmetic. The mixing function is the two-multiply
avalanche `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018) over a counter, with the
second seed word entering between the two multiplications, so that the streams of two heads are
different functions and not shifted copies of each other. Its last step, which only carries upper
bits into lower ones, is left out: over 1,500 heads neither the four draws of one hash nor those of
any two places of a 64 x 64 block are correlated without it (4.3 standard errors is the largest of
65,536, as with it), and the attention kernel is 2 % faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BITS = 16
"""Bits for each decision: a rate is honoured to 1 / 65536."""

GOLDEN = np.uint32(0x9E3779B9)
ROW_STRIDE = np.uint32((0x9E3779B9 << 15) & 0xFFFFFFFF)
"""Counter of word (i', j') is i' * 2^15 + j': distinct for rows of up to 65,536 tokens."""
MIX_1 = np.uint32(0x7FEB352D)
MIX_2 = np.uint32(0x846CA68B)
MIX_3 = np.uint32(0x2C1B3C6D)


def _avalanche(x: jax.Array) -> jax.Array:
    x = x ^ (x >> np.uint32(16))
    x = x * MIX_1
    x = x ^ (x >> np.uint32(15))
    x = x * MIX_2
    return x ^ (x >> np.uint32(16))


def threshold(rate: float) -> int:
    """The 16-bit value under which an element is dropped: round(rate * 65536).

    Raises ValueError unless 0 <= rate < 1.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate must be in [0, 1), got {rate}")
    return min(round(rate * 2**BITS), 2**BITS - 1)


def word_threshold(rate: float) -> int:
    """`threshold` of a 32-bit word whose upper 16 bits decide."""
    return threshold(rate) << (32 - BITS)


def keep_probability(rate: float) -> float:
    """The probability, to the last bit, with which `tile_keep_mask` keeps an element."""
    return 1.0 - threshold(rate) / 2**BITS


def key_words(key: jax.Array) -> jax.Array:
    """uint32 [2] from all words of a jax PRNG key, typed or raw, without running its generator."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = key.astype(jnp.uint32)
    first = second = jnp.uint32(0)
    for index in range(words.shape[-1]):
        first = _avalanche(first + words[index] + GOLDEN)
        second = _avalanche(second ^ (words[index] * MIX_3 + np.uint32(index + 1)))
    return jnp.stack([first, _avalanche(second + first)])


def stream_seeds(key: jax.Array, num_rows: int, num_heads: int) -> jax.Array:
    """Two words for every (row, head) of the global batch.

    Args:
      key: a jax PRNG key (typed or raw).
      num_rows: rows B of the global batch.
      num_heads: attention heads A.

    Returns:
      uint32 [B, A, 2]. Entry (b, a) depends on the key, b and a alone, not on B or A.
    """
    words = key_words(key)
    row = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, num_heads), 0)
    head = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, num_heads), 1)
    first = _avalanche(words[0] ^ _avalanche(row * GOLDEN + np.uint32(1)))
    first = _avalanche(first + _avalanche(head * MIX_3 + np.uint32(2)))
    second = _avalanche(words[1] ^ _avalanche(first + row * MIX_3))
    second = _avalanche(second + head * GOLDEN)
    return jnp.stack([first, second], axis=-1)


def _split(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Position -> (position with bit 3 cut out, bit 3 as a boolean)."""
    low = index & np.uint32(7)
    high = (index >> np.uint32(4)) << np.uint32(3)
    return high | low, (index & np.uint32(8)) != np.uint32(0)


def _half(start: jax.Array | int) -> jax.Array:
    """What a first position adds to those that `_split` gives. It may be negative, before a row's first token."""
    return (jnp.asarray(start) >> 1).astype(jnp.uint32)


def _element_word(i: jax.Array, j: jax.Array, seed_0: jax.Array, seed_1: jax.Array) -> jax.Array:
    """The hash of a query and a key position from which `_split` has cut bit 3."""
    x = (i * ROW_STRIDE + j * GOLDEN) + seed_0
    x = x ^ (x >> np.uint32(16))
    x = x * MIX_1
    x = x ^ (x >> np.uint32(15)) ^ seed_1
    return x * MIX_2


def tile_keep_mask(
    seeds: jax.Array, query_start: jax.Array | int, key_start: jax.Array | int, shape: tuple[int, int], rate: float
) -> jax.Array:
    """Which elements of a tile of attention probabilities survive dropout.

    Args:
      seeds: of `stream_seeds`, uint32 [..., 2].
      query_start, key_start: position of the tile's first query and key, multiples of 16.
      shape: (queries, keys) of the tile.
      rate: probability of being dropped, a Python float.

    Returns:
      bool [..., queries, keys], True = keep.
    """
    seed_0, seed_1 = seeds[..., 0, None, None], seeds[..., 1, None, None]
    i, i_bit = _split(jax.lax.iota(jnp.uint32, shape[0]))
    j, j_bit = _split(jax.lax.iota(jnp.uint32, shape[1]))
    i = i + _half(query_start)
    j = j + _half(key_start)
    x = _element_word(i[:, None], j[None, :], seed_0, seed_1)
    word = jnp.where(i_bit[:, None], x * MIX_3, x)
    # The upper 16 bits decide. The threshold's lower bits are zero, so the whole word can be
    # compared: no shift for half of the elements.
    word = jnp.where(j_bit[None, :], word << np.uint32(16), word)
    return word >= np.uint32(word_threshold(rate))


def rows_keep_mask(
    seed_0: jax.Array,
    seed_1: jax.Array,
    query_start: jax.Array | int,
    key_start: jax.Array | int,
    shape: tuple[int, int],
    rate: float,
) -> jax.Array:
    """`tile_keep_mask` of one head, in the form that suits a TPU.

    Its vector registers hold 8 rows, so that the words of rows i and i ^ 8 are two registers: one
    hash makes both (a sixth of the forward kernel's instructions). Lanes j and j ^ 8 are not worth
    the exchange.

    Args:
      seed_0, seed_1: the head's two words, scalars.
      shape: (queries, keys); queries a multiple of 16.
      The others: as of `tile_keep_mask`.
    """
    queries, keys = shape
    i = jax.lax.broadcasted_iota(jnp.uint32, (queries // 2, 1), 0) + _half(query_start)
    j, j_bit = _split(jax.lax.broadcasted_iota(jnp.uint32, (1, keys), 1))
    j = j + _half(key_start)
    x = _element_word(i, j, seed_0, seed_1).reshape(queries // 16, 1, 8, keys)
    word = jnp.concatenate([x, x * MIX_3], axis=1).reshape(queries, keys)
    word = jnp.where(j_bit, word << np.uint32(16), word)
    return word >= np.uint32(word_threshold(rate))


def hidden_words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A draw for each element of hidden states [..., H], uint32, uniform in [0, 65536).

    An element is kept iff its draw is at least `threshold(rate)`. A function of the key, the token's place in the
    global batch and the column; four neighbouring columns share one hash.
    """
    words = key_words(key)
    count = int(np.prod(shape[:-1], dtype=np.int64))
    tokens = jax.lax.iota(jnp.uint32, count).reshape(*shape[:-1], 1)
    columns = jax.lax.iota(jnp.uint32, shape[-1])
    word_0, word_1 = words[0], words[1]
    # The token's own stream first: a scalar a row inside a kernel, so it costs next to nothing.
    stream = _avalanche(tokens * GOLDEN + word_0)
    x = stream + (columns >> np.uint32(2)) * GOLDEN
    x = x ^ (x >> np.uint32(16))
    x = x * MIX_1
    x = x ^ (x >> np.uint32(15)) ^ word_1
    x = x * MIX_2
    word = jnp.where((columns & np.uint32(2)) != np.uint32(0), x * MIX_3, x)
    word = jnp.where((columns & np.uint32(1)) != np.uint32(0), word << np.uint32(16), word)
    return word >> np.uint32(32 - BITS)
