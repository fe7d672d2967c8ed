"""Plans of a configuration, the search for a better one, and the text of both.

In: a configuration and where it is to run. Out: a `Plan`, of a search several with the best first; lines of text.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import markdown
from bertjax.config import Config, max_predictions, phases
from bertjax.model.kernels.choice import select_attention
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.size import KEPT, bytes_of
from bertjax.process import hardware
from bertjax.process.hardware import GIB, Slice
from bertjax.tools.plan.compilation import compile_stage, say
from bertjax.tools.plan.estimate import Cost, cost
from bertjax.tools.stages import vocabulary_size

UNKNOWN_BYTES = 16 * GIB  # taken as the memory of a device that does not tell
ROOM = 0.9  # share of the memory that a candidate may take by arithmetic
METHODS = {
    "cycles": "estimate: the compiler's cycles of every operation (loop bodies as often as they run) over the clock, "
    "hand-written kernels by the FLOPs and bytes that they declare, plus collectives at the speed of the links. It "
    "sees no stalls, contention, input, checkpoints or evaluation: compare plans by it, and expect a real step to take "
    "longer",
    "roofline": "a roofline: FLOPs over the peak plus bytes to and from HBM over its bandwidth, plus collectives at "
    "the speed of the links. The compiler's own cycles, which most plans without --quick have, were 1.0 to 2.0 times "
    "that, and the memory 1.06 to 1.7 times what --quick finds",
    "measured": "measured: the median of up to five steps on this machine, on random rows",
}
UNRANKED = (
    "not refused = memory is assigned; the time is a roofline, too coarse to order the remat policies of a mesh: "
    "leave --quick out to compile the candidates to the end"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the stages of a configuration cost; `overrides` is what a search changed of it."""

    stages: list[Cost]
    overrides: str = ""

    @property
    def unfit(self) -> Cost | None:
        """The first stage that does not fit, if any."""
        return next((stage for stage in self.stages if not stage.fits), None)

    @property
    def rank(self) -> tuple[bool, float]:
        """The best plan has the least: those that fit first, by time (of a step where their number is not known)."""
        times = (s.total if s.step_s is None else s.step_s * (s.info.steps or 1) for s in self.stages)
        return self.unfit is not None, sum(times)


def make_plan(config: Config, piece: Slice | None, cache: pathlib.Path, quick: bool, overrides: str = "") -> Plan:
    """Costs of every stage of a configuration on a slice, or on this machine (None).

    Args:
      cache: directory of compiled steps.
      quick: stop the compiler once it has assigned memory (TPU only).
    """
    peak, limit = (piece.chip.peak_flops if piece else hardware.peak_flops()), device_bytes(piece)
    count = 1 if config.job == "finetune" else len(config.phases)
    stages = (compile_stage(config, piece, number, cache, quick) for number in range(count))
    return Plan([cost(info, compiled, piece, limit, peak, quick) for info, compiled in stages], overrides)


def device_bytes(piece: Slice | None) -> float:
    """Memory of a device, 0 = unknown."""
    return piece.chip.hbm_bytes if piece else hardware.local_device_bytes() or 0


def search(config: Config, piece: Slice | None, cache: pathlib.Path, quick: bool, count: int) -> list[Plan]:
    """Plans of the first `count` candidates, the best first; see make_plan."""
    if config.job == "finetune":
        raise ValueError("--search is for pre-training; fine-tuning fits almost everywhere")
    limit, plans = device_bytes(piece) or UNKNOWN_BYTES, []
    worth = candidates(config, piece.devices if piece else jax.device_count(), limit, bool(piece))
    for number, (settings, size) in enumerate(itertools.islice(worth, count), 1):
        overrides = " ".join(f"{name}={value}" for name, value in settings.items())
        say(f"candidate {number}: {overrides}, about {size / GIB:.1f} GiB by arithmetic")
        tried = config.replace({"mesh.auto": False, "mesh.data": -1, **settings})
        plans.append(make_plan(tried, piece, cache, quick, overrides))
    if not plans:
        remedy = "take more chips, or chips with more memory"
        raise ValueError(f"no candidate should fit {limit / GIB:.0f} GiB a device by arithmetic: {remedy}")
    return sorted(plans, key=lambda plan: plan.rank)


def candidates(config: Config, devices: int, limit: float, tpu: bool) -> Iterator[tuple[dict[str, Any], float]]:
    """Settings that should fit into `limit` bytes, and their bytes: the fewest exchanges first, then the largest
    micro-batches, then the least recomputation.

    Arithmetic discards what cannot fit, since a compilation takes minutes. It does not choose a remat policy: which is
    the fastest depends on what the compiler can fuse (large on a v5e-16 is faster with "full" than with "dots", though
    it computes a quarter more), so of a mesh all policies that fit are candidates.
    """
    # Of the longest rows the most: they take the most memory, attention apart.
    length, rows = max((phase.length, phase.rows) for phase in phases(config))
    model = BertConfig.of(config.model, vocabulary_size(config))
    platform = "tpu" if tpu else jax.default_backend()
    execution = Execution.of(config.execution, platform, config.mesh.tensor > 1, model)
    attention = execution.attention
    if attention == "auto":
        shape = (1, length, model.num_attention_heads, model.head_size)
        attention = select_attention(shape, jnp.dtype(execution.array_dtype), platform)
    # In this order each costs more than the next: tensor exchanges activations in every layer, accumulation repeats
    # fsdp's gathers and makes products smaller, fsdp gathers weights beside the work.
    for tensor, accumulation, fsdp in itertools.product((1, 2), (1, 2, 4, 8), range(1, devices + 1)):
        unit = devices // tensor * accumulation
        uneven = devices % (tensor * fsdp) or any(phase.rows % unit for phase in phases(config))
        if uneven or model.num_attention_heads % tensor:
            continue
        for remat in KEPT:
            shape, split = (rows, length, max_predictions(config, length)), (devices, fsdp, tensor, accumulation)
            size = bytes_of(model, shape, split, remat, fused=attention != "reference")
            if size <= ROOM * limit:
                settings = {"mesh.fsdp": fsdp, "mesh.tensor": tensor, "execution.layers": "scan"}
                yield settings | {"execution.remat": remat, "accumulation": accumulation}, size


def heading(name: str, piece: Slice | None, cost: Cost, versions: str) -> str:
    """'configs/large.py on v5e:4x4 (v5litepod-16): 16 chips of TPU v5 lite, 16 GiB a chip; jax'."""
    kind = cost.info.device_kind
    if piece is None:
        return f"{name} on this machine: {cost.info.devices} x {kind}; {versions}"
    unit = "core" if piece.chip.devices_per_chip > 1 else "chip"
    place = f"{piece.name} ({piece.accelerator}): {piece.devices} {unit}s of {kind}"
    return f"{name} on {place}, {piece.chip.hbm_bytes / GIB:.0f} GiB a {unit}; {versions}"


def stage_text(cost: Cost) -> str:
    """One stage: memory, time, collectives."""
    info, steps = cost.info, f"{cost.info.steps:,} steps of " if cost.info.steps else ""
    used, limit = _size(cost.total, cost), _size(cost.limit, cost)
    if not cost.limit:
        fits = f"not known, {info.device_kind} does not tell its memory: {used} a device"
    else:
        answer = "NO:" if not cost.fits else "yes:" if cost.complete else "not refused: at least"
        fits = f"{answer} {used.split()[0]} of {limit} a device"
    lines = [
        f"{info.name}: {steps}{info.rows} x {info.length} tokens, {info.rows_per_device} rows a device at a time",
        f"{'model':>14}  {info.model}",
        f"{'execution':>14}  {info.split}, {info.execution}",
        f"{'fits':>14}  {fits}",
    ]
    shown = ((name, size) for name, size in cost.bytes.items() if size >= cost.total / 1000)
    lines += [f"{name:>18}  {_size(size, cost):>10}" for name, size in shown]
    if cost.largest_rows is not None:
        rows = f"about {cost.largest_rows:,} rows a device at a time (by proportion; plan it to be sure)"
        lines.append(f"{'largest batch':>14}  {rows}")
    for c in cost.collectives:
        how = "asynchronous" if c.asynchronous else "the step waits"
        text = f"{c.count:,} {c.kind} over {c.group}: {c.bytes / 1e6:,.1f} MB a step, {how}"
        lines.append(f"{'collectives':>14}  {text}")
    if cost.step_s is not None:
        parts, mfu = "", f", MFU {cost.mfu:.1%}" if cost.mfu is not None else ""
        if cost.operations_s is not None:
            parts = f" (operations {cost.operations_s * 1e3:,.1f}, collectives {cost.collectives_s * 1e3:,.1f})"
        lines.append(f"{'step':>14}  {cost.step_s * 1e3:,.1f} ms{parts}{mfu}, {cost.tokens_s:,.0f} tokens/s")
    if cost.days is not None:
        lines.append(f"{'whole stage':>14}  {_duration(cost.days, cost)}")
    if cost.unknown_loops:
        loops = ", ".join(cost.unknown_loops)
        lines.append(f"{'note':>14}  counted once, since their length is unknown: {loops}")
    return "\n".join(lines)


def _size(size: float, cost: Cost) -> str:
    """Bytes, in the unit that suits the whole of a device's."""
    return f"{size / GIB:,.2f} GiB" if cost.total >= GIB else f"{size / GIB * 1024:,.1f} MiB"


def _duration(days: float, cost: Cost) -> str:
    """'4.2 days, 1,618 chip-hours': how long it takes and what is paid for."""
    hours = days * 24
    paid = hours * cost.chips
    long = f"{days:,.1f} days" if days >= 1 else f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    return f"{long}, {paid:,.{0 if paid >= 10 else 1}f} {cost.unit}-hours"


def recipe_text(costs: Sequence[Cost], budget_minutes: float = 0.0) -> str:
    """The run as a whole, which may end by the clock, and by what method its time was found."""
    days = [budget_minutes / 1440] if budget_minutes else [cost.days for cost in costs]
    lines = [] if None in days else [f"whole run: {_duration(sum(days), costs[0])}"]
    lines += [f"times are {METHODS[method]}" for method in dict.fromkeys(cost.method for cost in costs if cost.method)]
    return "\n".join(lines)


def ranking(plans: Sequence[Plan]) -> str:
    """A table of plans in order."""

    def each(values: list[float | None], form: str) -> str:
        return ", ".join(format(value, form) if value else "-" for value in values)

    quick = any(stage.method == "roofline" for plan in plans for stage in plan.stages)
    rows = []
    for rank, plan in enumerate(plans, 1):
        stages, days = plan.stages, [stage.days for stage in plan.stages]
        fits = "no" if plan.unfit else "not refused" if quick else "yes"
        sizes = each([stage.total / GIB for stage in stages], ".2f")
        milliseconds = each([stage.step_s and stage.step_s * 1e3 for stage in stages], ",.0f")
        mfu, tokens = each([stage.mfu for stage in stages], ".1%"), each([stage.tokens_s for stage in stages], ",.0f")
        whole = "-" if None in days else f"{sum(days):.2f}"
        rows.append([rank, plan.overrides, fits, sizes, milliseconds, mfu, tokens, whole])
    columns = ("rank", "overrides", "fits", "GiB a device", "step ms", "MFU", "tokens/s", "days")
    return markdown.table(columns, rows) + (f"\n{UNRANKED}" if quick else "")


def remedies(cost: Cost) -> list[str]:
    """Overrides to try for a step that does not fit, the cheapest first."""
    info, policies = cost.info, list(KEPT)
    less = policies[policies.index(info.remat) + 1 :]
    found = [f"--config.execution.layers=scan --config.execution.remat={p}" for p in ("dots", "full") if p in less]
    if info.rows_per_device > 1:
        found.append(f"--config.accumulation={2 * info.accumulation}")
    shards = info.mesh["data"]
    if shards > 1 and cost.limit and cost.bytes["parameters"] + cost.bytes["optimizer"] > 0.2 * cost.limit:
        factor = next((n for n in (2, 4, 8, 16) if shards % n == 0), shards)
        found.append(f"--config.mesh.fsdp={info.mesh['fsdp'] * factor}")
    return found or ["more chips, or chips with more memory"]


def numbers(plan: Plan) -> Mapping[str, Any]:
    """A plan as JSON."""
    derived = ("total", "tokens_s", "days")
    stages = [dataclasses.asdict(one) | {name: getattr(one, name) for name in derived} for one in plan.stages]
    return {"overrides": plan.overrides, "stages": stages}
