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
from flax import nnx

from bertjax.model.dropout import dropout
from bertjax.model.kernels import (
    ATTENTION,
    attention_reference,
    bias_gelu,
    compute_capability,
    float8,
    gpu_launch,
    residual_norm,
)
from bertjax.model.kernels.gated_gelu import gated_gelu
from bertjax.model.kernels.gelu import Activation, gated, gelu_erf, gelu_tanh
from bertjax.model.kernels.rotary import Turn, turned
from bertjax.model.layers import Dense, LayerNorm, Multiply, activation, add_bias, product
from bertjax.model.mesh import HEADS_AXIS, current_mesh, rows_are_placed
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
      add_norm: (bias or None, norm, product, residual, dropout_rate, dropout_key) -> norm(residual +
        dropout(product + bias)) [B, T, H], once for each of its two uses. Where norms come before the
        sub-layers, the first is that sum itself.
      feed_forward: (first, gate or None, second, x [B, T, H]) -> the product [B, T, H], without its bias, of the dense
        layer `second` with the activation of first(x), times gate(x) if there is a gate.
    """

    attention: Callable[..., jax.Array]
    joined_attention: Callable[..., jax.Array] | None
    add_norm: Callable[[nnx.Param | None, LayerNorm, jax.Array, jax.Array, float, jax.Array | None], Pair]
    feed_forward: Callable[[Dense, Dense | None, Dense, jax.Array], jax.Array]


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
            name = select_attention(shape, jnp.dtype(execution.array_dtype), execution.platform)
        kernel = attention_kernel(name)
        attention = kernel.attention
        joined = functools.partial(joined_attention, kernel) if execution.qkv == "fused" else None
    xla = execution.pointwise == "xla" or (jax.default_backend() == "gpu" and not _triton_runs())
    before, act, width = config.norm == "before", activation(config.hidden_act), config.intermediate_size
    norm: Callable[..., Pair] = functools.partial(add_norm, words=execution.dropout_words, before=before)
    activated, gate = functools.partial(dense_activation, act), gated(act)
    float8_products = execution.dtype == "float8"
    if float8_products:  # XLA would have cuBLASLt compute a GELU behind a product, which it cannot in 8 bits
        activated = functools.partial(dense_activation, lambda u: act(jax.lax.optimization_barrier(u)))
    if not xla:
        if config.hidden_size % 16 == 0:
            norm = functools.partial(residual_norm.add_norm, before=before)
        if act is gelu_tanh and width % 128 == 0 and config.mlp_bias and not float8_products:
            activated = bias_gelu.dense_gelu
        if act in (gelu_tanh, gelu_erf) and width % 16 == 0:
            gate = functools.partial(gated_gelu, tanh=act is gelu_tanh)
    forward = functools.partial(feed_forward, activated, gate)
    if not xla and float8_products and act in (gelu_tanh, gelu_erf) and width % 128 == 0:
        forward = functools.partial(float8.feed_forward, forward, act is gelu_tanh)
    return Kernels(attention, joined, norm, forward)


def multiply(execution: Execution) -> Multiply:
    """What computes the products of a layer that are worth the casts to 8 bits: all but that behind attention, which is
    square.

    Raises:
      ValueError: float8 on a device that does not multiply it.
    """
    if execution.dtype != "float8":
        return product
    platform = jax.default_backend() if execution.platform == "auto" else execution.platform
    if platform == "tpu" or (platform == jax.default_backend() == "gpu" and compute_capability() < 8.9):
        raise ValueError("dtype='float8' needs an NVIDIA GPU from Ada on (RTX 40, L4, H100); use 'bfloat16' here")
    return functools.partial(float8.product, fused=execution.pointwise == "fused" and _triton_runs())


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
      'reference', also where the mesh cuts through heads.
    """
    _, length, heads, head = shape
    platform = jax.default_backend() if platform == "auto" else platform
    mesh = current_mesh()
    if mesh is not None and heads % mesh.shape[HEADS_AXIS]:
        return "reference"
    if platform == "tpu":
        taken = dtype == jnp.bfloat16 and not attention_kernel("pallas_tpu").refusal(length, head)
        # Such a kernel in a program that XLA partitions by itself is an error on TPUs.
        return "pallas_tpu" if taken and rows_are_placed() else "reference"
    if platform != "gpu" or compute_capability() < 8.0:
        return "reference"
    taken = jnp.dtype(dtype).itemsize == 2 and head >= 16 and head & (head - 1) == 0
    return "triton" if taken and _triton_runs() else "reference"


@functools.cache
def _triton_runs() -> bool:
    """Whether this machine has what the GPU kernels need; says once what it lacks."""
    reason = gpu_launch.missing()
    if jax.default_backend() == "gpu" and compute_capability() < 8:
        reason = "its kernels need an NVIDIA GPU from Ampere on (A100, RTX 30)"
    if reason:
        log.warning("The encoder runs as plain XLA, slower: %s", reason)
    return not reason


# ------------------------------------------------------------------------- the functions in plain XLA


def add_norm(bias, norm, product, residual, rate: float, key: jax.Array | None, words: str, before: bool) -> Pair:
    """See Kernels; `words` is Execution.dropout_words."""
    x = product if bias is None else add_bias(product, bias[...])
    z = residual + dropout(x, rate, key, words)
    y = norm(z)
    return z if before else y, y


def feed_forward(
    activated: Callable[[Dense, jax.Array], jax.Array], gated: Activation, first: Dense, gate: Dense | None,
    second: Dense, x: jax.Array,
) -> jax.Array:  # fmt: skip
    """See Kernels; `activated` is that of a dense layer, `gated` of two."""
    return second.product(activated(first, x) if gate is None else dense_gated(gated, first, gate, x))


def dense_activation(act: Activation, dense: Dense, x: jax.Array) -> jax.Array:
    return act(dense(x))


def dense_gated(gated: Activation, dense: Dense, gate: Dense, x: jax.Array) -> jax.Array:
    """`gated` of dense(x) and gate(x), [B, T, 2F] -> [B, T, F], of one product with both matrices."""
    u = dense.multiply(jnp.concatenate([dense.kernel[...], gate.kernel[...]], axis=1), x)
    if dense.bias is not None:
        u = add_bias(u, jnp.concatenate([dense.bias[...], gate.bias[...]]))
    return gated(u)


def joined_attention(
    kernel: ModuleType, product: jax.Array, bias: jax.Array | None, *how, turn: Turn | None = None, **window
) -> jax.Array:
    """See Kernels. A kernel without a `joined_attention` of its own gets what bias, turn and split make."""
    if hasattr(kernel, "joined_attention"):
        return kernel.joined_attention(product, bias, *how, turn=turn, **window)
    if bias is not None:
        product = add_bias(product, bias.reshape(-1)).reshape(*product.shape[:2], *bias.shape)
    if turn is not None:
        product = turned(product, turn)
    return kernel.attention(*(product[:, :, part] for part in range(3)), *how, **window)
