"""Where a step's time goes: a jax.profiler trace, read back and grouped by kind of kernel."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re

import jax

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"attention_(forward|backward)|flash|fmha|cudnn.*sdpa|sdpa"),
    ("collectives", r"nccl|all_reduce|all_gather|reduce_scatter"),
    ("copies and fills", r"memset|memcpy|^copy"),
    ("matrix products", r"gemm|cutlass|nvjet|xmma|cublas|wgmma|triton_mm|dot"),
    ("optimizer", r"multi_tensor|adam"),
    ("embedding", r"scatter|gather|embedding"),
    ("transposes", r"transpose"),
    ("normalisation, dropout, reductions", r"gelu_backward|reduce|norm|softmax|rng|native_layer"),
    ("elementwise", r"."),
)
"""(kind, regex over the kernel's lower-cased name); the first match counts."""


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    name = kernel.lower()
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: on which device, what, when; seconds."""

    device: str
    name: str
    start: float
    duration: float


def read_trace(directory: str) -> list[Kernel]:
    """Every kernel on a GPU stream of the newest trace in `directory`, by device and start.

    Raises:
      ValueError: when the directory holds no trace.
    """
    files = sorted(pathlib.Path(directory).rglob("*.xplane.pb"), key=lambda f: f.stat().st_mtime)
    if not files:
        raise ValueError(f"no *.xplane.pb under {directory}: was the trace stopped?")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        if "/device:gpu" not in plane.name.lower():
            continue
        for line in plane.lines:
            # Beside the streams a plane holds derived lines (modules, operations, steps), which
            # would count the same time again.
            if line.name.lower().startswith("stream"):
                found += [
                    Kernel(plane.name, event.name, event.start_ns / 1e9, event.duration_ns / 1e9)
                    for event in line.events
                ]
    return sorted(found, key=lambda kernel: (kernel.device, kernel.start))


def totals(kernels: list[Kernel]) -> dict[str, tuple[int, float]]:
    """Kernel name -> (launches, seconds)."""
    counts: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for kernel in kernels:
        entry = counts[kernel.name]
        entry[0] += 1
        entry[1] += kernel.duration
    return {name: (int(count), seconds) for name, (count, seconds) in counts.items()}


def idle(kernels: list[Kernel]) -> dict[str, tuple[int, float]]:
    """'kernel before -> kernel after' -> (gaps, seconds) with no stream of the device busy."""
    gaps: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    last: Kernel | None = None
    for kernel in kernels:
        if last is not None and last.device == kernel.device:
            gap = kernel.start - (last.start + last.duration)
            if gap > 0:
                entry = gaps[f"{last.name[:48]} -> {kernel.name[:48]}"]
                entry[0] += 1
                entry[1] += gap
            elif kernel.start + kernel.duration <= last.start + last.duration:
                continue  # within a longer one on another stream
        last = kernel
    return {name: (int(count), seconds) for name, (count, seconds) in gaps.items()}


def by_kind(kernels: dict[str, tuple[int, float]], steps: int) -> dict[str, float]:
    """Milliseconds a step of each kind, largest first."""
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, (_, seconds) in kernels.items():
        kinds[kind_of(name)] += 1e3 * seconds / steps
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def largest(kernels: dict[str, tuple[int, float]], steps: int, count: int = 25) -> list[str]:
    """Lines 'ms a step, launches a step, name' of the kernels that take longest."""
    order = sorted(kernels.items(), key=lambda item: -item[1][1])[:count]
    return [
        f"{1e3 * seconds / steps:8.3f} ms {launches / steps:7.1f}x  {name[:100]}" for name, (launches, seconds) in order
    ]
