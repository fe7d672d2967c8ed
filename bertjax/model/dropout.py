"""Dropout of hidden states with an explicit key: which words are drawn, and how they become a mask.

A mask is a pure function of (key, shape): the same on one device or many, with or without
rematerialisation, scanned or unrolled. Every site has its own key (`site_keys`).

16 random bits an element decide: an element is kept when its word is below k = round(keep * 65536),
and kept values are scaled by 65536 / k, the exact inverse of the true keep probability, so that the
expectation is preserved. 16 bits halve the price of threefry (two words from one 32-bit draw).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LEVELS = 1 << 16


def keep_threshold(rate: float) -> int:
    """k such that an element is kept when its 16-bit word is below k.

    Raises:
      ValueError: the rate is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate must be in [0, 1), got {rate}")
    return max(1, round((1.0 - rate) * LEVELS))


def site_keys(key: jax.Array, sites: int) -> jax.Array:
    """[sites] keys, the s-th equal to fold_in(key, s): one small kernel instead of one a site."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(sites))


def _threefry_words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """16-bit words from the key's own generator, two from each 32-bit draw."""
    last = shape[-1]
    drawn = jax.random.bits(key, (*shape[:-1], (last + 1) // 2), jnp.uint32)
    halves = [drawn & jnp.uint32(0xFFFF), drawn >> 16]
    return jnp.concatenate(halves, axis=-1)[..., :last]


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit flips every output bit about half the
    time (two rounds of xor-shift and odd multiplication; constants of Wellons' low-bias search)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _hash_words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """16-bit words from a counter hash: about a tenth of threefry's instructions, so that the draw
    disappears inside the fusion that uses it. Not for anything but dropout."""
    words = _key_words(key)
    counter = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        counter += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(
            stride & 0xFFFFFFFF
        )
        stride *= shape[axis]
    mixed = _mix(_mix(counter + words[0]) ^ words[1])
    return mixed >> 16


def _key_words(key: jax.Array) -> jax.Array:
    """Two 32-bit words of a typed or raw key (the first two of a wider one)."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return key.astype(jnp.uint32)[:2]


def random_words(key: jax.Array, shape: tuple[int, ...], generator: str = "auto") -> jax.Array:
    """Uniform integers in [0, 65536) as uint32 [shape], a pure function of the key and the shape.

    Args:
      generator: 'threefry' draws with jax.random (whatever generator the key belongs to); 'hash'
        uses a counter hash; 'auto' is 'threefry'.
    """
    if generator == "hash":
        return _hash_words(key, shape)
    return _threefry_words(key, shape)


def dropout(
    x: jax.Array, rate: float, key: jax.Array | None, generator: str = "auto"
) -> jax.Array:
    """Zeroes elements of `x` [...] with probability `rate`; identity when `key` is None.

    The scale is the inverse of the true keep probability, applied in x's own type.
    """
    if key is None or rate == 0.0:
        return x
    threshold = keep_threshold(rate)
    keep = random_words(key, x.shape, generator) < threshold
    return jnp.where(keep, x * (LEVELS / threshold), 0).astype(x.dtype)
