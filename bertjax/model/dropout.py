"""Dropout of hidden states with an explicit key: which words are drawn, and how they become a mask.

A mask is a pure function of (key, shape): the same on one device or many, with or without
rematerialisation, scanned or unrolled. Every site has its own key (`site_keys`).

16 random bits an element decide: it is dropped when its word is below k = round(rate * 65536), and
kept values are scaled by the exact inverse of the true keep probability 1 - k / 65536, so that the
expectation is preserved. 16 bits halve the price of threefry (two words from one 32-bit draw); the
counter hash costs a tenth of that and gives the masks that the fused kernels draw.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.kernels import dropout_bits


def site_keys(key: jax.Array, sites: int) -> jax.Array:
    """[sites] keys, the s-th equal to fold_in(key, s): one small kernel instead of one a site."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(sites))


def random_words(key: jax.Array, shape: tuple[int, ...], generator: str = "threefry") -> jax.Array:
    """Uniform integers in [0, 65536) as uint32 [shape], a pure function of the key and the shape.

    Args:
      generator: 'threefry' draws with jax.random (whatever generator the key belongs to), 'hash' uses a counter hash.
    """
    if generator == "hash":
        return dropout_bits.hidden_words(key, shape)
    last = shape[-1]
    drawn = jax.random.bits(key, (*shape[:-1], (last + 1) // 2), jnp.uint32)  # two words each
    return jnp.concatenate([drawn & jnp.uint32(0xFFFF), drawn >> 16], axis=-1)[..., :last]


def dropout(x: jax.Array, rate: float, key: jax.Array | None, generator: str = "threefry") -> jax.Array:
    """Zeroes elements of `x` [...] with probability `rate`; identity when `key` is None.

    The scale is the inverse of the true keep probability, applied in float32 and then rounded to
    x's type: the scale rounded to bfloat16, 1.109 for 1.111, would shrink every value by 0.16 %,
    in training only.

    Raises:
      ValueError: the rate is not in [0, 1).
    """
    if key is None or rate == 0.0:
        return x
    keep = random_words(key, x.shape, generator) >= dropout_bits.threshold(rate)
    scale = np.float32(1.0 / dropout_bits.keep_probability(rate))
    return jnp.where(keep, x.astype(jnp.float32) * scale, 0.0).astype(x.dtype)
