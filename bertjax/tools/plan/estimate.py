"""What a step costs on a TPU slice such as v5e:4x4 or v4-32: bytes per chip, seconds per step, days of the run.

Without the chip the time is an estimate: the TPU compiler's cycles of each fused operation over the chip's clock, loop
bodies as often as they run; kernels written by hand, which have no cycles, by the FLOPs and bytes that they declare;
collectives by their bytes over the links of the torus (an all-reduce over n chips moves 2 (n-1)/n of its bytes, a
gather or scatter half of that), where they are asynchronous only what exceeds the operations' time. Where the compiler
was stopped before it estimates cycles, a roofline takes their place: the model's FLOPs (with those that remat repeats)
over the peak plus bytes between HBM and the operations over its bandwidth.
"""

import dataclasses
from collections.abc import Mapping

from bertjax.process.hardware import Slice, Tpu
from bertjax.tools.plan import hlo
from bertjax.tools.stages import StageInfo

# Share of the peak at which hand-written kernels do the FLOPs that they declare. Instructions of attention, as the
# compiler schedules them for v5e, reach 28 % forward and 33 % backward (T=512, D=64: half of the matrix unit is idle,
# and dropout and softmax are work for the vector unit).
KERNEL_SHARE = 0.3
# Share of the forward pass that the backward pass repeats (presets.Execution.remat).
REPEATED = {"none": 0.0, "dots": 0.1, "minimal": 0.7, "full": 1.0}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step; bytes are those of one device.

    A step that was refused, by the compiler or by arithmetic, has only `wanted` and `limit`.
    """

    hlo: str = ""
    arguments: int = 0
    temporaries: int = 0
    fresh_outputs: int = 0  # results that do not take an argument's place
    code: int = 0
    complete: bool = True  # False = stopped after memory was assigned
    wanted: int = 0
    limit: int = 0
    measured_s: float | None = None  # seconds per step, local devices only

    @property
    def fits(self) -> bool:
        return not self.wanted


@dataclasses.dataclass(frozen=True)
class Cost:
    """One step of a stage on one slice; times None where nothing estimates or measures them."""

    info: StageInfo
    chips: int  # that are paid for; of this machine, devices
    unit: str  # what they are: chip or device
    fits: bool
    bytes: Mapping[str, int]  # of a device, by purpose; they add up to what the compiler takes
    limit: float  # bytes of a device, 0 = unknown
    largest_rows: int | None  # of a micro-batch on a device, by proportion
    collectives: list[hlo.Collective] = dataclasses.field(default_factory=list)
    unknown_loops: tuple[str, ...] = ()
    complete: bool = True  # False = stopped once memory was assigned, which so is a lower bound
    method: str = ""  # how the time was found: cycles, roofline or measured
    operations_s: float | None = None
    collectives_s: float | None = None
    step_s: float | None = None
    mfu: float | None = None

    @property
    def total(self) -> int:
        """Bytes of a device."""
        return sum(self.bytes.values())

    @property
    def tokens_s(self) -> float | None:
        return self.info.tokens / self.step_s if self.step_s else None

    @property
    def days(self) -> float | None:
        """Of the whole stage."""
        return self.info.steps * self.step_s / 86400 if self.info.steps and self.step_s else None


def cost(
    info: StageInfo, compiled: Compiled, piece: Slice | None, limit: float, peak: float | None, quick: bool = False
) -> Cost:
    """What the step of a stage costs on the slice that it was compiled for, or on this machine (None).

    `limit` and `peak` are the bytes (0 = unknown) and FLOP/s of a device; `quick` takes a roofline also where there are
    cycles.
    """
    limit, parts = compiled.limit or limit, memory_parts(info, compiled)
    fits = compiled.fits and (not limit or sum(parts.values()) <= limit)
    found = Cost(
        info,
        chips=piece.chips if piece else info.devices,
        unit="chip" if piece else "device",
        fits=fits,
        bytes=parts,
        limit=limit,
        largest_rows=largest_rows(info, parts, limit),
    )
    if not compiled.fits:
        return found
    program = hlo.Program(compiled.hlo)
    exchanged, step = program.collectives(info.devices), compiled.measured_s
    method, operations, exchange = "measured" if step else "", None, None
    if piece:
        method, operations = operation_seconds(info, program, piece.chip, quick)
        waiting = sum(seconds_of(c, piece) for c in exchanged if not c.asynchronous)
        overlapped = sum(seconds_of(c, piece) for c in exchanged if c.asynchronous)
        exchange, step = waiting + overlapped, max(operations, overlapped) + waiting
    return dataclasses.replace(
        found,
        collectives=exchanged,
        unknown_loops=tuple(name for name, trips in program.loops.items() if trips is None),
        complete=compiled.complete,
        method=method,
        operations_s=operations,
        collectives_s=exchange,
        step_s=step,
        mfu=info.flops / step / (peak * info.devices) if peak and step else None,
    )


def operation_seconds(info: StageInfo, program: hlo.Program, chip: Tpu, quick: bool) -> tuple[str, float]:
    """Seconds per step of all but collectives, after the method by which they were found."""
    kernels = [(*kernel, times) for i, times in program.instructions() if (kernel := i.numbers(hlo.KERNEL))]
    if not quick and (cycles := program.cycles()):
        peak, speed = KERNEL_SHARE * chip.peak_flops, chip.hbm_bytes_s
        return "cycles", cycles / chip.clock_hz + sum(n * max(flops / peak, size / speed) for flops, size, n in kernels)
    flops = info.flops * (1 + REPEATED[info.remat] / 3) / info.devices
    moved = program.hbm_bytes() + sum(size * times for _, size, times in kernels)
    return "roofline", flops / chip.peak_flops + moved / chip.hbm_bytes_s


def memory_parts(info: StageInfo, compiled: Compiled) -> dict[str, int]:
    """Bytes of a device by purpose.

    The compiler lays arrays out in tiles; what its arguments take beyond the arrays' own bytes is 'padding'. All that
    is not an argument (activations, gradients, buffers of collectives) is 'temporaries'.
    """
    parts = {"parameters": info.parameters, "optimizer": info.optimizer, "batch": info.batch}
    state = sum(parts.values())
    if not compiled.fits:
        return parts | {"temporaries": compiled.temporaries or max(0, compiled.wanted - state)}
    temporaries = compiled.temporaries + compiled.fresh_outputs
    return parts | {"padding": max(0, compiled.arguments - state), "temporaries": temporaries, "program": compiled.code}


def largest_rows(info: StageInfo, parts: Mapping[str, int], limit: float) -> int | None:
    """Rows of a micro-batch on a device at which its memory is full, by proportion.

    Gradients (and with accumulation their sum) take their bytes whatever the rows; the rest of the temporaries is taken
    to grow with the rows.
    """
    rows = info.rows_per_device
    if not limit or not rows:
        return None
    fixed = min((1 if info.accumulation == 1 else 2) * parts["parameters"], parts["temporaries"])
    per_row = (parts["temporaries"] - fixed) / rows
    free = 0.97 * limit - sum(parts.values()) + parts["temporaries"] - fixed
    return max(0, int(free / per_row)) if per_row > 0 else None


def seconds_of(collective: hlo.Collective, piece: Slice) -> float:
    """Least time of the exchanges on the links of the slice."""
    n = collective.group
    share = (n - 1) / n
    moved = {"all-reduce": 2 * share, "all-to-all": share / 4, "reduce-scatter": share * n, "collective-permute": 1.0}
    return moved.get(collective.kind, share) * collective.bytes / piece.collective_bytes_s(n)
