"""The settings of jax that numbers depend on, which the environment could change behind a run.

`clear` and `fix` give jax the values that bertjax is made for, in programs; `fixed` does so for a call of the library
and restores its caller's. `environment` lists the variables that only the compilers read and that may change numbers or
speed: it is recorded with a run and compared by a resume.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

# Settings of all versions of jax that we support; a version may lack some. The environment sets them too, by their
# names in upper case.
FIXED: Mapping[str, Any] = {
    # Types and shapes of results.
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_matmul_precision": None,
    "jax_allow_f16_reductions": True,
    "jax_softmax_custom_jvp": False,
    "jax_accurate_erf_inv": False,  # since jax 0.12
    "jax_use_hlo_logistic_lowering": None,  # since jax 0.12
    # Random draws: masks, dropout, initial weights.
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_random_seed_offset": 0,
    "jax_enable_custom_prng": False,
    "jax_legacy_prng_key": "allow",
    # What is compiled together, and so in which order it is summed.
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_optimization_level": "UNKNOWN",
    "jax_memory_fitting_level": "O2",
    "jax_exec_time_optimization_effort": 0.0,  # until jax 0.11
    "jax_memory_fitting_effort": 0.0,  # until jax 0.11
    "jax_compiler_enable_remat_pass": True,
    "jax_enable_pgle": False,
    # Checks that end a run, or run it otherwise; jax_debug_nans is config.execution.debug_nans.
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_check_tracer_leaks": False,
    "jax_transfer_guard": None,
    "jax_transfer_guard_host_to_device": None,
    "jax_transfer_guard_device_to_device": None,
    "jax_transfer_guard_device_to_host": None,
}
# Variables of jax that do not change numbers, by the beginning of their names.
_HARMLESS = tuple(
    """
    JAX_PLATFORMS JAX_PLATFORM_NAME JAX_COORDINATOR JAX_NUM_PROCESSES JAX_PROCESS_ID JAX_LOCAL_DEVICE_IDS
    JAX_CUDA_VISIBLE JAX_ROCM_VISIBLE JAX_CPU_GET JAX_NUM_CPU_DEVICES JAX_CROSS_HOST JAX_DISTRIBUTED
    JAX_ENABLE_PREEMPTION JAX_COMPILATION_CACHE JAX_ENABLE_COMPILATION_CACHE JAX_PERSISTENT_CACHE JAX_RAISE_PERSISTENT
    JAX_EXPLAIN JAX_LOG JAX_DUMP JAX_TRACEBACK JAX_INCLUDE JAX_PPRINT JAX_CHECK_PROXY JAX_DEBUG_LOG JAX_DEBUG_NANS
    JAX_CAPTURED JAX_COMPILER_DETAILED
    """.split()
)
# Read by XLA and by the libraries of GPUs and TPUs.
_COMPILERS = (
    "XLA_FLAGS LIBTPU_INIT_ARGS NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG TF_CUDNN_DETERMINISTIC "
    "NCCL_ALGO NCCL_PROTO"
).split()
# Flags of XLA that say where something is or is written, and not what is computed.
_HARMLESS_FLAGS = tuple(
    "--xla_dump --xla_gpu_cuda_data_dir --xla_force_host_platform_device_count "
    "--xla_gpu_per_fusion_autotune_cache_dir".split()
)


def clear(variables: MutableMapping[str, str] = os.environ) -> None:
    """Deletes the variables that set what is FIXED: for programs, before they import jax."""
    for name in [name for name in variables if name.lower() in FIXED]:
        del variables[name]


def fix(settings: Mapping[str, Any] = FIXED) -> None:
    """Gives jax these settings, whatever the environment says; for programs, at their start."""
    import jax  # late: a tool that needs none clears its environment all the same

    for name, value in settings.items():
        if name in jax.config.values and jax.config.values[name] != value:
            jax.config.update(name, value)


@contextlib.contextmanager
def fixed(more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """`fix`, and `more`, until the block or the decorated function ends; for all threads: compilation has its own."""
    import jax

    settings = {**FIXED, **more}
    before = {name: jax.config.values[name] for name in settings if name in jax.config.values}
    fix(settings)
    try:
        yield
    finally:
        fix(before)


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables set that may change what is compiled, by name; of XLA_FLAGS those flags."""
    found = {}
    for name, value in sorted(variables.items()):
        if name == "XLA_FLAGS":
            value = " ".join(sorted(flag for flag in value.split() if not flag.startswith(_HARMLESS_FLAGS)))
        unknown_jax = name.startswith("JAX_") and name.lower() not in FIXED and not name.startswith(_HARMLESS)
        if value and (name in _COMPILERS or unknown_jax):
            found[name] = value
    return found
