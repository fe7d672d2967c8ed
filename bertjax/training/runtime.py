"""What must be set before jax touches a device: processes, compiler flags, compilation cache."""

import os
import pathlib

import jax
import ml_collections

from bertjax.training import distributed

# What helps BERT on NVIDIA GPUs; a flag that XLA_FLAGS already has keeps the user's value.
GPU_FLAGS: dict[str, str] = {}


def start(config: ml_collections.ConfigDict, coordinator: str = "", processes: int = 0,
          process_id: int = -1) -> None:
    """Joins the other processes of the run and applies config.execution. Call it first.

    Args:
      coordinator, processes, process_id: see distributed.detect; empty = found by environment.
    """
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{flag}={value}" for flag, value in GPU_FLAGS.items() if flag not in given]
    if added and _has_nvidia_gpu():
        os.environ["XLA_FLAGS"] = " ".join(filter(None, [given, *added]))
    if config.execution.compilation_cache:
        cache = pathlib.Path(config.execution.compilation_cache).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_debug_nans", config.execution.debug_nans)
    distributed.initialize(coordinator, processes, process_id)


def _has_nvidia_gpu() -> bool:
    # Other back ends stop at flags that they do not know.
    return pathlib.Path("/dev/nvidiactl").exists()
