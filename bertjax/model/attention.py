"""Multi-head attention: the exact reference path and the table of fused kernels.

Queries, keys and values [B, T, A, D] and the attention mask [B, T] go in, the context [B, T, A, D]
comes out. Position i sees position j when mask[i] == mask[j]: 1..K number the pairs of a row and 0
is padding, so that padding sees only padding (no row is without a visible position, hence no NaN)
and pairs packed in one row never see each other. Outputs at padding are meaningless by design and
nothing that is trained or reported reads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bertjax.model.bias import add_bias
from bertjax.model.kernels import dropout_bits

# Finite, so that a difference of two masked scores is 0 and not NaN.
MASKED_SCORE = -1e30

# name -> "module:function", imported on first use so that a machine without the kernel's
# dependencies can use the others. Same signature as `reference_attention`.
IMPLEMENTATIONS: dict[str, str] = {
    "reference": "bertjax.model.attention:reference_attention",
    "cudnn": "bertjax.model.kernels.attention_cudnn:attention",
    "pallas": "bertjax.model.kernels.attention_pallas:attention",
    "pallas_tpu": "bertjax.model.kernels.tpu_attention:attention",
}
# Those that read queries, keys and values out of one product (see joined_attention).
JOINED_IMPLEMENTATIONS = {"pallas": "bertjax.model.kernels.attention_pallas:joined_attention"}
SELECTOR = "bertjax.model.kernels:select_attention"

AttentionFn = Callable[..., jax.Array]


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    several_pairs: bool = False,
    causal: bool = False,
) -> jax.Array:
    """Scaled dot-product attention with the whole [B, A, T, T] matrix, softmax in float32.

    Vaswani et al. 2017, section 3.2.1, with dropout on the probabilities as in the original BERT
    (modeling.py, attention_layer). With `causal` a position sees none after it, which no kernel
    can do.
    """
    dtype = query.dtype
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTAD,BSAD->BATS", query, key, preferred_element_type=jnp.float32) * scale
    visible = attention_mask[:, None, :, None] == attention_mask[:, None, None, :]
    if causal:
        visible &= jnp.tril(jnp.ones(visible.shape[-2:], bool))
    probabilities = jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)
    if dropout_key is not None and dropout_rate > 0.0:
        batch, length, heads, _ = query.shape
        # The bits that the fused kernels redraw tile by tile: same key, same mask.
        keep = dropout_bits.keep_mask(dropout_bits.stream_seeds(dropout_key, batch, heads), length, dropout_rate)
        inverse = 1.0 / dropout_bits.keep_probability(dropout_rate)
        probabilities = jnp.where(keep, probabilities * inverse, 0.0)
    return jnp.einsum("BATS,BSAD->BTAD", probabilities.astype(dtype), value)


def load_implementation(path: str) -> AttentionFn:
    """The function that "module:function" names."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    several_pairs: bool = False,
    platform: str = "auto",
) -> jax.Array:
    """Attention by the named implementation.

    Args:
      query, key, value: [B, T, A, D] in the compute type.
      attention_mask: int [B, T]; equal numbers see each other.
      dropout_rate: of the attention probabilities; no effect when `dropout_key` is None.
      implementation: a name of IMPLEMENTATIONS, or 'auto' for the fastest one known for this
        platform, type and shape.
      several_pairs: rows hold several pairs, so that a kernel may skip what none of them spans.
      platform: what the program is compiled for, 'cpu', 'gpu' or 'tpu'; 'auto' = this machine.

    Returns:
      [B, T, A, D], the query's type.

    Raises:
      ValueError: unknown name, or the kernel cannot run here (the message says why).
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    name = _resolved(implementation, query.shape, query.dtype, rate, platform)
    run = load_implementation(IMPLEMENTATIONS[name])
    return run(query, key, value, attention_mask, dropout_rate, dropout_key, several_pairs)


def joined_attention(
    product: jax.Array,
    bias: jax.Array,
    attention_mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    several_pairs: bool = False,
    platform: str = "auto",
) -> jax.Array:
    """`attention` over queries, keys and values that are still one product without its bias.

    Args:
      product: [B, T, 3 A D] in the compute type.
      bias: [3, A, D], to be added to it.
      The others: as of `attention`.
    """
    shape = (*product.shape[:2], *bias.shape[1:])
    rate = 0.0 if dropout_key is None else dropout_rate
    name = _resolved(implementation, shape, product.dtype, rate, platform)
    if name in JOINED_IMPLEMENTATIONS:
        run = load_implementation(JOINED_IMPLEMENTATIONS[name])
        return run(product, bias, attention_mask, dropout_rate, dropout_key, several_pairs)
    biased = add_bias(product, bias.reshape(-1))
    query, key, value = (x.reshape(shape) for x in jnp.split(biased, 3, axis=-1))
    return attention(query, key, value, attention_mask, dropout_rate, dropout_key, name, several_pairs)


def _resolved(implementation: str, shape: tuple[int, ...], dtype: jnp.dtype, dropout_rate: float, platform: str) -> str:
    """The implementation's name, 'auto' being the kernels' own choice where they exist."""
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"attention={implementation!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    if implementation != "auto":
        return implementation
    platform = jax.default_backend() if platform == "auto" else platform
    if platform == "cpu":
        return "reference"
    try:
        select = load_implementation(SELECTOR)
    except (ImportError, AttributeError):
        return "reference"
    return select(shape, dtype, dropout_rate, platform)
