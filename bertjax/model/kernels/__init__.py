"""Hand-written kernels, and the table of those for attention. (This file needs no jax.)

choice             the three functions of a layer that kernels compute, chosen for a machine
attention_*        attention: plain XLA, Triton for GPUs, Pallas for TPUs
gpu_launch         runs a GPU kernel: by jax-triton, or interpreted where there is no GPU
gpu_programs       the fused attention in the Triton language
gpu_row_programs   the next two in the Triton language
residual_norm      LayerNorm(residual + dropout(h + b)), one pass forward and backward (GPU)
bias_gelu          backward pass of GELU(h + b) with the bias's gradient (GPU)
gelu               GELU recomputed in backward, in the form that cuBLASLt takes over; gated activations
gated_gelu         GELU(a) * b, one pass forward and backward (GPU)
rotary             queries and keys of a product turned by their positions: plain, and in place (GPU)
dropout_bits       dropout as a hash of (key, row, head, query, key position)

A new attention kernel is a module with `attention` as in attention_reference, and an entry here.
`--config.execution.kernels=NAME` then runs it. If it reads queries, keys and values in place out of
one product, it also has `joined_attention` (see attention_triton).
"""

# Name -> module of this package.
ATTENTION = {"reference": "attention_reference", "triton": "attention_triton", "pallas_tpu": "attention_pallas_tpu"}


def compiler_options(platform: str, one_fsdp_group: bool = False) -> dict[str, bool | str]:
    """XLA options of a training step on `platform` ('gpu', 'tpu', 'cpu'), for jax.jit.

    On GPU, products go to cuBLASLt only: XLA's own Triton products are tried first otherwise, and
    then the bias and GELU behind a product are separate passes over memory instead of part of it.
    And gradients are added up over devices where they lie: XLA would copy those that it adds up
    together into one array, and out of it again.

    one_fsdp_group: every parameter is split over all devices. On TPU, the pass that takes sums over devices out of the
      loop over micro-batches then fails (RET_CHECK in while_loop_all_reduce_code_motion.cc, libtpu 0.0.42).
    """
    if platform == "tpu" and one_fsdp_group:
        return {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
    if platform != "gpu":
        return {}
    return {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "all-reduce-contiguous"}


def compute_capability() -> float:
    """What NVIDIA calls the compute capability of this machine's GPU, 9.0 of an H100; 0 if it says no number."""
    import jax

    try:
        return float(getattr(jax.devices()[0], "compute_capability", None) or 0)
    except ValueError:  # AMD's are names
        return 0.0
