"""The machine: peak arithmetic and memory of a device, slices of TPUs, and what a record of a run says of it.

Peaks are the vendors' for dense bfloat16 products without sparsity, the denominator of MFU. A device that is not listed
has no MFU.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import platform as host
import re
import threading
from collections.abc import Mapping
from typing import Any

import jax

from bertjax import jax_settings
from bertjax.version import source_version

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Tpu:
    """One device as jax sees it: a chip, except for v2 and v3, where a device is a core.

    Peaks, memory and links as the vendor publishes them (cloud.google.com/tpu, "TPU architecture"); the clock follows
    from the peak and the number of multiply-accumulate units.
    """

    name: str
    peak_flops: float  # bfloat16, FLOP/s
    clock_hz: float  # of the cycles that the compiler estimates
    hbm_bytes: float  # nominal
    hbm_bytes_s: float
    link_bytes_s: float  # of one link, one way
    dimensions: int  # of the torus
    cores_per_chip: int  # as accelerator names count them: v4-32 has 16 chips
    devices_per_chip: int = 1
    wrap: int = 4  # a dimension whose size this divides is closed to a ring


V5E = Tpu("v5e", 197e12, 1.50e9, 16 * GIB, 819e9, 45e9, 2, 1, wrap=16)
V5P = Tpu("v5p", 459e12, 1.75e9, 95 * GIB, 2765e9, 90e9, 3, 2)
# By what jax's lower-cased device_kind contains; of several names the first counts.
TPUS: dict[str, Tpu] = {
    "tpu v6": Tpu("v6e", 918e12, 1.75e9, 32 * GIB, 1638e9, 90e9, 2, 1, wrap=16),
    "tpu v5p": V5P,
    "tpu v5 lite": V5E,
    "tpu v5e": V5E,
    "tpu v5": V5P,  # as v5p reports itself
    "tpu v4": Tpu("v4", 275e12, 1.05e9, 32 * GIB, 1228e9, 45e9, 3, 2),
    "tpu v3": Tpu("v3", 123e12 / 2, 0.94e9, 16 * GIB, 450e9, 82e9, 2, 2, devices_per_chip=2, wrap=32),
    "tpu v2": Tpu("v2", 45e12 / 2, 0.70e9, 8 * GIB, 350e9, 62e9, 2, 2, devices_per_chip=2, wrap=16),
}
CHIPS = {chip.name: chip for chip in TPUS.values()}
# The shapes of slices that accelerator names stand for, by the number of dimensions.
SHAPES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16",
}
VALID = """valid are
  local               this machine's own devices, measured instead of estimated
  GENERATION:SHAPE    v2:4x4 v3:4x4 v4:2x2x4 v5e:4x4 v5p:2x2x2 v6e:4x4 (chips along each axis)
  accelerator names   v2-32 v3-32 v4-32 v5p-16 (cores), v5e-16 v5litepod-16 v6e-16 (chips)"""
GPU_PEAK_FLOPS: dict[str, float] = {
    "gb200": 2.25e15,
    "b200": 2.25e15,
    "h100 pcie": 756e12,
    "h100": 989e12,
    "h200": 989e12,
    "gh200": 989e12,
    "a100": 312e12,
    "l40s": 362e12,
    "l4": 121e12,
    "v100": 125e12,
    "t4": 65e12,
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """So many chips of one kind in one torus."""

    chip: Tpu
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices_per_chip

    @property
    def accelerator(self) -> str:
        """The name by which such a slice is rented: v4-32, v5litepod-16."""
        return f"{self.chip.name.replace('v5e', 'v5litepod')}-{self.chips * self.chip.cores_per_chip}"

    def collective_bytes_s(self, group: int) -> float:
        """Bytes per second that a chip can exchange with the others of its group, one way.

        All axes of the torus work at once where the group spans the slice, one axis otherwise. An axis closed to a ring
        carries data in both directions.
        """
        axes = sorted((size * d, d) for size in self.shape if size > 1 for d in [1 if size % self.chip.wrap else 2])
        used = axes[-1:] if group < self.devices else axes
        return self.chip.link_bytes_s * (sum(directions for _, directions in used) or 1)


def slice_of(text: str) -> Slice:
    """The slice that a topology or accelerator name stands for; ValueError lists the valid forms."""

    def refuse(why: str) -> ValueError:
        return ValueError(f"topology {text!r}{why}; {VALID}")

    found = re.fullmatch(r"(v\d\w*):(\d+(?:x\d+)*)|(v\d(?:litepod|[ep])?)-(\d+)", text)
    if not found:
        raise refuse(" is not understood")
    exact, axes, rented, size = found.groups()
    chip = CHIPS.get(exact or rented.replace("v5litepod", "v5e"))
    if chip is None:
        raise refuse(f": no TPU is called {exact or rented!r}")
    known = [Slice(chip, tuple(map(int, one.split("x")))) for one in (axes or SHAPES[chip.dimensions]).split()]
    if exact:
        if len(known[0].shape) != chip.dimensions or not known[0].chips:
            example = f"{chip.name}:{'4x4' if chip.dimensions == 2 else '2x2x4'}"
            raise refuse(f": a {chip.name} slice has {chip.dimensions} axes, such as {example}")
        return known[0]
    sizes = {piece.chips * chip.cores_per_chip: piece for piece in known}
    if int(size) not in sizes:
        raise refuse(f": there is no such slice; {chip.name} has {', '.join(f'{chip.name}-{n}' for n in sizes)}")
    return sizes[int(size)]


def _listed(table: Mapping[str, Any], device: jax.Device) -> Any:
    """The entry of a device in a table by kind; None where it is not listed."""
    return next((found for name, found in table.items() if name in device.device_kind.lower()), None)


def wake() -> None:
    """Starts the devices in the background: a GPU takes seconds, in which Python can import."""

    def start() -> None:
        with contextlib.suppress(Exception):  # the next use of a device raises it again
            jax.devices()

    threading.Thread(target=start, name="wake devices", daemon=True).start()


def peak_flops(device: jax.Device | None = None) -> float | None:
    """Peak FLOP/s of one device in bfloat16, or None if it is not in the table (CPU)."""
    device = device or jax.devices()[0]
    tpu = _listed(TPUS, device)
    return tpu.peak_flops if tpu else _listed(GPU_PEAK_FLOPS, device)


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
    tpu = _listed(TPUS, device)
    return tpu.hbm_bytes if tpu else None


def local_device_bytes() -> int | None:
    """Memory of a device of this machine, if known: of CPU devices, their share of what is free."""
    return host_bytes()[0] // jax.device_count() if jax.default_backend() == "cpu" else device_bytes()


def host_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> tuple[int, int]:
    """(free, all): what a process can take before the machine swaps, and all there is, with swap.

    Without these files both are the memory of the machine.
    """
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = {"MemAvailable": most // 1024, "MemTotal": most // 1024}
    with contextlib.suppress(OSError):
        lines |= {name: int(kb) for name, kb in re.findall(r"(?m)^(\w+): +(\d+) kB", pathlib.Path(meminfo).read_text())}
    free, there = 1024 * lines["MemAvailable"], 1024 * (lines["MemTotal"] + lines.get("SwapTotal", 0))
    with contextlib.suppress(OSError, ValueError):  # it says 'max' where there is no limit
        most = int(pathlib.Path(limit).read_text())
        free, there = min(free, most), min(there, most)
    return free, there


def prng_implementation(name: str, platform: str) -> str:
    """'threefry2x32' or 'rbg'. 'auto' is the faster one: rbg on TPU, where it is an instruction, threefry elsewhere."""
    automatic = "rbg" if platform == "tpu" else "threefry2x32"
    return automatic if name == "auto" else name


def describe() -> dict[str, Any]:
    """The content of `hardware.json`."""
    device = jax.devices()[0]
    return {
        "devices": jax.device_count(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
        "memory_per_device_gib": round(size / GIB, 1) if (size := device_bytes()) else None,
        "peak_bf16_tflops_per_device": peak / 1e12 if (peak := peak_flops()) else None,
        "host": host.node(),
        "python": host.python_version(),
        "jax": jax.__version__,
        "bertjax": source_version(),
        "environment": jax_settings.environment(),
    }
