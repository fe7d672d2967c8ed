"""What must be set before jax touches a device: signals, settings, processes, caches."""

import faulthandler
import pathlib
import signal
from typing import Any

from bertjax import jax_settings
from bertjax.config import Config
from bertjax.process import distributed, preemption


def start(
    config: Config, coordinator: str = "", processes: int = 0, process_id: int = -1, wait_s: int = distributed.WAIT_S
) -> None:
    """Joins the other processes of the run and applies config.execution. Call it first, in programs only.

    From then on SIGUSR1 prints the stacks of the process. The other arguments are those of distributed.initialize.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # shows what a run is doing
    jax_settings.fix({**jax_settings.FIXED, **settings(config)})
    distributed.initialize(coordinator, processes, process_id, wait_s)
    if preemption.on_compute_engine():
        preemption.watch_for_notice()


def settings(config: Config) -> dict[str, Any]:
    """Those of jax that a run has beside jax_settings.FIXED."""
    return {
        # A kernel holds the paths of its source: else another place of installation would make another program of it.
        "jax_hlo_source_file_canonicalization_regex": ".*/",
        "jax_debug_nans": config.execution.debug_nans,
        **(compilation_cache(config.execution.compilation_cache) if config.execution.compilation_cache else {}),
    }


def compilation_cache(directory: str) -> dict[str, Any]:
    """Keeps compiled programs in `directory`, also the small ones: a run has a dozen of them."""
    return {
        "jax_compilation_cache_dir": str(pathlib.Path(directory).expanduser()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
