"""The three functions of a layer that a kernel may compute, and the choice of kernels.

In: a BertConfig, an Execution and the size of a batch. Out: `Kernels`, which the encoder calls.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from bertjax.model.dropout import dropout
from bertjax.model.kernels import ATTENTION, attention_reference, bias_gelu, gpu_launch, residual_norm
from bertjax.model.kernels.gated_gelu import gated_gelu
from bertjax.model.kernels.gelu import Activation, gated, gelu_erf, gelu_tanh
from bertjax.model.kernels.rotary import Turn, turned, turned_in_place
from bertjax.model.layers import Dense, LayerNorm, activation, add_bias, product
from bertjax.model.mesh import rows_are_placed
from bertjax.model.presets import BertConfig, Execution

log = logging.getLogger(__name__)

# One array twice: for the residual branch and for the next product. Two variables have two
# cotangents, which the fused LayerNorm adds up in its backward pass instead of XLA before it.
Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What computes the heavy parts of a layer.

    Attributes:
      attention: (query, key, value, attention_mask, dropout_rate, dropout_key, several_pairs,
        window=None) -> context [B, T, A, D], as attention_reference.attention.
      joined_attention: (product [B, T, 3 A D], bias [3, A, D], attention_mask, ..., turn=None) ->
        the same, of queries, keys and values that are still one product without its bias, queries and
        keys still to be turned (rotary.turned). If the product has none, bias is None and the product
        [B, T, 3, A, D]. None: as `attention`.
      dense_add_norm: (dense, norm, x, residual, dropout_rate, dropout_key) -> norm(residual +
        dropout(dense(x))) [B, T, H], once for each of its two uses. Where norms come before the
        sub-layers, the first is that sum itself.
      dense_activation: (dense, x [B, T, H]) -> the activation of dense(x) [B, T, F].
      dense_gated: (dense, gate, x [B, T, H]) -> activation(dense(x)) * gate(x) [B, T, F].
    """

    attention: Callable[..., jax.Array]
    joined_attention: Callable[..., jax.Array] | None
    dense_add_norm: Callable[[Dense, LayerNorm, jax.Array, jax.Array, float, jax.Array | None], Pair]
    dense_activation: Callable[[Dense, jax.Array], jax.Array]
    dense_gated: Callable[[Dense, Dense, jax.Array], jax.Array]


def choose(config: BertConfig, execution: Execution, batch: int, length: int) -> Kernels:
    """The kernels for rows [batch, length] on the machine that a program is traced for.

    Raises:
      ValueError: an unknown kernel. (One that does not take these rows says so when it is called.)

    On a GPU without triton and jax-triton, 'auto' is plain XLA, and a warning says so.
    """
    if config.is_decoder:
        attention, joined = functools.partial(attention_reference.attention, causal=True), None
    else:
        shape = (batch, length, config.num_attention_heads, config.head_size)
        name = execution.attention
        if name == "auto":
            name = select_attention(shape, jnp.dtype(execution.dtype), execution.platform)
        kernel = attention_kernel(name)
        attention = kernel.attention
        joined = functools.partial(joined_attention, kernel) if execution.qkv == "fused" else None
    xla = execution.pointwise == "xla" or (jax.default_backend() == "gpu" and not _triton_runs())
    before, act, width = config.norm == "before", activation(config.hidden_act), config.intermediate_size
    add_norm: Callable[..., Pair] = functools.partial(dense_add_norm, words=execution.dropout_words, before=before)
    activated, gate, turn = functools.partial(dense_activation, act), gated(act), turned
    if not xla:
        if config.hidden_size % 16 == 0:
            add_norm = functools.partial(residual_norm.dense_add_norm, before=before)
        if act is gelu_tanh and width % 128 == 0 and config.mlp_bias:
            activated = bias_gelu.dense_gelu
        if act in (gelu_tanh, gelu_erf) and width % 16 == 0:
            gate = functools.partial(gated_gelu, tanh=act is gelu_tanh)
        if gpu_launch.writes_in_place() and config.head_size & (config.head_size - 1) == 0:
            turn = turned_in_place
    if joined is not None:
        joined = functools.partial(joined, turned=turn)
    return Kernels(attention, joined, add_norm, activated, functools.partial(dense_gated, gate))


def attention_kernel(name: str) -> ModuleType:
    """The module of an attention kernel; imported on first use, since some need what others lack."""
    if name not in ATTENTION:
        raise ValueError(f"attention={name!r} is not one of auto, {', '.join(ATTENTION)}")
    return importlib.import_module(f"bertjax.model.kernels.{ATTENTION[name]}")


def select_attention(shape: Sequence[int], dtype: jnp.dtype, platform: str) -> str:
    """The kernel that 'auto' stands for.

    Args:
      shape: of the query, [B, T, A, D].
      dtype: compute type.
      platform: what the program is compiled for, 'cpu', 'gpu' or 'tpu'; 'auto' = this machine.

    Returns:
      'triton' on NVIDIA GPUs from Ampere on, in 16-bit types and with a head size that is a power
      of two; 'pallas_tpu' on TPUs, in bfloat16 and for rows and heads that it takes; else
      'reference'. cuDNN's attention is never chosen: its dropout offset is a counter inside the
      process, so that a resumed run would draw other masks, and without dropout it has no lead.
    """
    _, length, _, head = shape
    platform = jax.default_backend() if platform == "auto" else platform
    if platform == "tpu":
        taken = dtype == jnp.bfloat16 and not attention_kernel("pallas_tpu").refusal(length, head)
        # Such a kernel in a program that XLA partitions by itself is an error on TPUs.
        return "pallas_tpu" if taken and rows_are_placed() else "reference"
    if platform != "gpu":
        return "reference"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None or float(capability) < 8.0:
        return "reference"
    half = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    taken = half and head >= 16 and head & (head - 1) == 0
    return "triton" if taken and _triton_runs() else "reference"


@functools.cache
def _triton_runs() -> bool:
    """Whether this machine has what the GPU kernels need; says once what it lacks."""
    if reason := gpu_launch.missing():
        log.warning("The encoder runs as plain XLA, slower: %s", reason)
    return not reason


# ------------------------------------------------------------------------- the functions in plain XLA


def dense_add_norm(dense, norm, x, residual, rate: float, key: jax.Array | None, words: str, before: bool) -> Pair:
    """See Kernels; `words` is Execution.dropout_words."""
    z = residual + dropout(dense(x), rate, key, words)
    y = norm(z)
    return z if before else y, y


def dense_activation(act: Activation, dense: Dense, x: jax.Array) -> jax.Array:
    return act(dense(x))


def dense_gated(gated: Activation, dense: Dense, gate: Dense, x: jax.Array) -> jax.Array:
    """`gated` of dense(x) and gate(x), [B, T, 2F] -> [B, T, F], of one product with both matrices."""
    u = product(jnp.concatenate([dense.kernel[...], gate.kernel[...]], axis=1), x)
    if dense.bias is not None:
        u = add_bias(u, jnp.concatenate([dense.bias[...], gate.bias[...]]))
    return gated(u)


def joined_attention(
    kernel: ModuleType,
    product: jax.Array,
    bias: jax.Array | None,
    *how,
    turned: Callable[[jax.Array, Turn], jax.Array] = turned,
    turn: Turn | None = None,
    **window,
) -> jax.Array:
    """See Kernels. What the kernel does not do itself, bias, turn and split, comes before it."""
    in_place = getattr(kernel, "joined_attention", None)
    if not (in_place and turn is None):
        if bias is not None:
            product, bias = add_bias(product, bias.reshape(-1)).reshape(*product.shape[:2], *bias.shape), None
        if turn is not None:
            product = turned(product, turn)
    if in_place:
        return in_place(product, bias, *how, **window)
    return kernel.attention(*(product[:, :, part] for part in range(3)), *how, **window)
