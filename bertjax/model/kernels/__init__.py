"""Hand-written kernels and the choice among them.

dropout_bits       attention dropout as a hash of (key, row, head, query, key position)
attention_programs what one GPU program of the fused attention computes (Pallas)
flash_attention    the launch of these programs, as one differentiable function
attention_pallas   attention() over flash_attention, for the dispatch table
attention_cudnn    attention() over cuDNN, without dropout
tpu_attention      fused attention for TPUs (Pallas)
residual_norm      LayerNorm(residual + dropout(h + b)), one pass forward and backward (GPU)
bias_gelu          backward pass of GELU(h + b) with the bias's gradient (GPU)
gelu               GELU recomputed in backward, in the form that cuBLASLt takes over
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bertjax.model.rows import rows_are_placed


def compiler_options(platform: str) -> dict[str, bool | str]:
    """XLA options of a training step on `platform` ('gpu', 'tpu', 'cpu'), for jax.jit.

    On GPU, products go to cuBLASLt only: XLA's own Triton products are tried first otherwise, and
    then the bias and GELU behind a product are separate passes over memory instead of part of it.
    And gradients are added up over devices where they lie: XLA would copy those that it adds up
    together into one array, and out of it again.
    """
    if platform != "gpu":
        return {}
    return {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "all-reduce-contiguous"}


def select_attention(shape: Sequence[int], dtype: jnp.dtype, dropout_rate: float, platform: str) -> str:
    """The implementation that 'auto' stands for.

    Args:
      shape: of the query, [B, T, A, D].
      dtype: compute type.
      dropout_rate: of the attention probabilities, 0 when deterministic.
      platform: what the program is compiled for, 'cpu', 'gpu' or 'tpu'.

    Returns:
      'pallas' on NVIDIA GPUs from Ampere on, in 16-bit types and with a head size that is a power
      of two; 'pallas_tpu' on TPUs, in bfloat16 and for rows and heads that it takes; else
      'reference'. cuDNN's attention is never chosen: its dropout offset is a counter inside the
      process, so that a resumed run would draw other masks, and without dropout it has no lead
      (see flash_attention).
    """
    del dropout_rate
    _, length, _, head = shape
    if platform == "tpu":
        from bertjax.model.kernels import tpu_attention  # a tenth of a second that others save

        taken = dtype == jnp.bfloat16 and not tpu_attention.refusal(length, head)
        # Such a kernel in a program that XLA partitions by itself is an error on TPUs.
        return "pallas_tpu" if taken and rows_are_placed() else "reference"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if platform != "gpu" or capability is None or float(capability) < 8.0:
        return "reference"
    half = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    return "pallas" if half and head >= 16 and head & (head - 1) == 0 else "reference"
