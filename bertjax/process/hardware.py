"""The machine: peak arithmetic and memory of a device, and what a record of a run says of it.

Peaks are the vendors' for dense bfloat16 products without sparsity, the denominator of MFU. A device that is not listed
has no MFU.
"""

import contextlib
import platform as host
import threading
from typing import Any

import jax

from bertjax import jax_settings
from bertjax.version import source_version

# FLOP/s in bfloat16; the first name found in jax's lower-cased device_kind counts.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("gb200", 2.25e15),
    ("b200", 2.25e15),
    ("h100 pcie", 756e12),
    ("h100", 989e12),
    ("h200", 989e12),
    ("gh200", 989e12),
    ("a100", 312e12),
    ("l40s", 362e12),
    ("l4", 121e12),
    ("v100", 125e12),
    ("t4", 65e12),
    ("tpu v6", 918e12),
    ("tpu v5p", 459e12),
    ("tpu v5 lite", 197e12),
    ("tpu v5e", 197e12),
    ("tpu v5", 459e12),  # v5p reports itself as 'TPU v5'
    ("tpu v4", 275e12),
    ("tpu v3", 123e12 / 2),
    ("tpu v2", 45e12 / 2),  # v2, v3: a device is a core
)
# GiB of a TPU device; the first name found in the lower-cased device_kind counts.
TPU_GIB = (
    ("tpu v6", 32),
    ("tpu v5p", 95),
    ("tpu v5 lite", 16),
    ("tpu v5e", 16),
    ("tpu v5", 95),
    ("tpu v4", 32),
    ("tpu v3", 16),
    ("tpu v2", 8),
)


def wake() -> None:
    """Starts the devices in the background: a GPU takes seconds, in which Python can import."""

    def start() -> None:
        with contextlib.suppress(Exception):  # the next use of a device raises it again
            jax.devices()

    threading.Thread(target=start, name="wake devices", daemon=True).start()


def peak_flops(device: jax.Device | None = None) -> float | None:
    """Peak FLOP/s of one device in bfloat16, or None if it is not in the table (CPU)."""
    kind = (device or jax.devices()[0]).device_kind.lower()
    return next((peak for name, peak in PEAK_BF16_FLOPS if name in kind), None)


def device_bytes(device: jax.Device | None = None) -> int | None:
    """Memory of one device that the runtime may use, or None if it is not known (CPU).

    TPUs that are only described, for planning, have what the vendor publishes.
    """
    device = device or jax.devices()[0]
    try:
        statistics = device.memory_stats()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        statistics = None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    kind = device.device_kind.lower()
    return next((size * 2**30 for name, size in TPU_GIB if name in kind), None)


def prng_implementation(name: str = "auto", platform: str | None = None) -> str:
    """'threefry2x32' or 'rbg'. 'auto' is the faster one: rbg on TPU, where it is an instruction, threefry elsewhere."""
    automatic = "rbg" if (platform or jax.default_backend()) == "tpu" else "threefry2x32"
    return automatic if name == "auto" else name


def describe() -> dict[str, Any]:
    """The content of `hardware.json`."""
    device = jax.devices()[0]
    return {
        "devices": jax.device_count(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
        "memory_per_device_gib": round(size / 2**30, 1) if (size := device_bytes()) else None,
        "peak_bf16_tflops_per_device": peak / 1e12 if (peak := peak_flops()) else None,
        "host": host.node(),
        "python": host.python_version(),
        "jax": jax.__version__,
        "bertjax": source_version(),
        "environment": jax_settings.environment(),
    }
