"""From a compiled step to bytes a chip, seconds a step and days of a recipe.

Without the chip the time is an estimate, of four parts:

  operations       the TPU compiler's cycles of each fused operation, loop bodies as often as they
                   run, over the chip's clock;
  kernels          (attention on TPU: no cycles given) the longer of the FLOPs that they declare, at
                   KERNEL_SHARE of the peak, and of their bytes;
  others           (random bits, sorting: no cycles given) bytes over the HBM bandwidth;
  collectives      bytes over the links of the torus: an all-reduce over n chips moves 2 (n-1)/n of
                   its bytes, a gather or scatter half of that. Asynchronous ones count only for
                   what exceeds the operations' time.

Where the compiler was stopped before it estimates cycles, a roofline takes their place: the model's
FLOPs (with those that remat repeats) over the peak plus bytes between HBM and the operations over
its bandwidth. Stalls, contention, the host, checkpoints and evaluation are not seen: compare plans
with each other before believing one to the percent.
"""

import dataclasses
from collections.abc import Mapping

from bertjax.tools.plan import hlo
from bertjax.tools.plan.chips import Slice
from bertjax.tools.plan.compilation import Compiled, StageInfo

# Operations whose work the compiler does not put into cycles.
UNCOSTED = ("rng-bit-generator", "sort", "custom-call")
# Share of the peak at which hand-written kernels do the FLOPs that they declare. Instructions of
# attention, as the compiler schedules them for v5e, reach 28 % forward and 33 % backward (T=512,
# D=64: half of the matrix unit is idle, and dropout and softmax are work for the vector unit).
KERNEL_SHARE = 0.3
# Custom calls of the TPU compiler that stand for no work of their own.
BOOKKEEPING = (
    "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound X64Combine GatherScatterIndicesBitpacked X64SplitLow "
    "X64SplitHigh Sharding"
).split()
# Share of the forward pass that the backward pass repeats (presets.Execution.remat).
REPEATED = {"none": 0.0, "dots": 0.1, "minimal": 0.7, "full": 1.0}


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
    info: StageInfo,
    compiled: Compiled,
    piece: Slice | None,
    peak: float | None = None,
    limit: float | None = None,
    by_roofline: bool = False,
) -> Cost:
    """What the step of a stage costs.

    Args:
      piece: the slice that it was compiled for; None = the devices of this machine.
      peak: FLOP/s of a local device, if known.
      limit: bytes of a local device, if known.
      by_roofline: also where there are cycles, to be compared with steps that have none.
    """
    limit = compiled.limit or (piece.chip.hbm_bytes if piece else limit) or 0
    parts = memory_parts(info, compiled)
    fits = compiled.fits and (not limit or sum(parts.values()) <= limit)
    paid = (piece.chips, "chip") if piece else (info.devices, "device")
    found = Cost(info, *paid, fits, parts, limit, largest_rows(info, parts, limit))
    if not compiled.fits:
        return found
    program = hlo.parse(compiled.hlo)
    exchanged = program.collectives(info.devices)
    unknown = tuple(name for name, trips in program.loops() if trips is None)
    found = dataclasses.replace(found, collectives=exchanged, unknown_loops=unknown)
    if compiled.measured_s:
        mfu = info.flops / compiled.measured_s / (peak * info.devices) if peak and piece is None else None
        return dataclasses.replace(found, method="measured", mfu=mfu, step_s=compiled.measured_s)
    if piece is None:
        return found
    chip, kernels = piece.chip, [(i.declared, times) for i, times in program.instructions() if i.declared]
    cycles = 0 if by_roofline else program.cycles()
    if cycles:
        # A hand-written kernel takes the longer of its FLOPs and its bytes.
        hand_written = sum(
            times * max(flops / (KERNEL_SHARE * chip.peak_flops), size / chip.hbm_bytes_s)
            for (flops, size), times in kernels
        )
        operations = cycles / chip.clock_hz + hand_written + uncosted_bytes(program) / chip.hbm_bytes_s
    else:
        repeated = info.flops * (1 + REPEATED[info.remat] / 3)
        moved = program.hbm_bytes() + sum(size * times for (_, size), times in kernels)
        operations = repeated / info.devices / chip.peak_flops + moved / chip.hbm_bytes_s
    waiting = sum(seconds_of(c, piece) for c in exchanged if not c.asynchronous)
    overlapped = sum(seconds_of(c, piece) for c in exchanged if c.asynchronous)
    step = max(operations, overlapped) + waiting
    return dataclasses.replace(
        found,
        method="cycles" if cycles else "roofline",
        operations_s=operations,
        collectives_s=waiting + overlapped,
        step_s=step,
        mfu=info.flops / step / (chip.peak_flops * info.devices),
    )


def memory_parts(info: StageInfo, compiled: Compiled) -> dict[str, int]:
    """Bytes of a device by purpose.

    The compiler lays arrays out in tiles; what its arguments take beyond the arrays' own bytes is
    'padding'. All that is not an argument - activations, gradients, buffers of collectives - is
    'temporaries'.
    """
    parts = {"parameters": info.parameters, "optimizer": info.optimizer, "batch": info.batch}
    state = sum(parts.values())
    if not compiled.fits:
        return {**parts, "temporaries": compiled.temporaries or max(0, compiled.wanted - state)}
    return {
        **parts,
        "padding": max(0, compiled.arguments - state),
        "temporaries": compiled.temporaries + compiled.fresh_outputs,
        "program": compiled.code,
    }


def largest_rows(info: StageInfo, parts: Mapping[str, int], limit: float) -> int | None:
    """Rows of a micro-batch on a device at which its memory is full, by proportion.

    Gradients (and with accumulation their sum) take their bytes whatever the rows; the rest of the
    temporaries is taken to grow with the rows.
    """
    rows = info.rows_per_device
    if not limit or not rows:
        return None
    fixed = min((1 if info.accumulation == 1 else 2) * parts["parameters"], parts["temporaries"])
    per_row = (parts["temporaries"] - fixed) / rows
    free = 0.97 * limit - sum(parts.values()) + parts["temporaries"] - fixed
    return max(0, int(free / per_row)) if per_row > 0 else None


def uncosted_bytes(program: hlo.Program) -> int:
    """Bytes written by operations for which the compiler estimates no cycles."""
    return sum(
        hlo.array_bytes(i.shape) * times
        for i, times in program.instructions()
        if i.opcode in UNCOSTED
        and i.cycles is None
        and i.declared is None
        and not any(f'"{name}"' in i.attributes for name in BOOKKEEPING)
    )


def seconds_of(collective: hlo.Collective, piece: Slice) -> float:
    """Least time of the exchanges on the links of the slice."""
    n = collective.group
    share = (n - 1) / n
    moved = {
        "all-reduce": 2 * share,
        "all-gather": share,
        "all-to-all": share / 4,
        "reduce-scatter": share * n,
        "collective-permute": 1.0,
    }[collective.kind]
    return moved * collective.bytes / piece.collective_bytes_s(n)
