"""The text of a plan: what it is of, memory, time, collectives, and what to change.

In: Costs. Out: lines for a terminal. No numbers are computed here that a Cost does not have.
"""

from collections.abc import Sequence

from bertjax import markdown
from bertjax.tools.plan.candidates import KEPT
from bertjax.tools.plan.chips import GIB, Slice
from bertjax.tools.plan.cost import Cost
from bertjax.tools.plan.planner import Plan

METHODS = {
    "cycles": "estimate: the compiler's cycles of every operation (loop bodies as often as they "
    "run) over the clock, hand-written kernels by the FLOPs and bytes that they declare, "
    "plus collectives at the speed of the links. It sees no stalls, contention, input, "
    "checkpoints or evaluation: compare plans by it, and expect a real step to take "
    "longer",
    "roofline": "a roofline: FLOPs over the peak plus bytes to and from HBM over its bandwidth, "
    "plus collectives at the speed of the links. The compiler's own cycles, which the "
    "plan without --quick gives, were 1.0 to 2.0 times that, and the memory 1.06 to "
    "1.25 times",
    "measured": "measured: the median of up to five steps on this machine, on random rows",
}
UNRANKED = (
    "not refused = memory is assigned; the time is a roofline, too coarse to order the "
    "remat policies of a mesh: leave --quick out to compile the candidates to the end"
)


def heading(name: str, piece: Slice | None, cost: Cost, versions: str) -> str:
    """'configs/large.py on v5e:4x4 (v5litepod-16): 16 chips of TPU v5 lite, 16 GiB a chip; jax'."""
    kind = cost.info.device_kind
    if piece is None:
        return f"{name} on this machine: {cost.info.devices} x {kind}; {versions}"
    unit = piece.chip.units.removesuffix("s")
    return (
        f"{name} on {piece.name} ({piece.accelerator}): {piece.devices} {piece.chip.units} of "
        f"{kind}, {piece.chip.hbm_bytes / GIB:.0f} GiB a {unit}; {versions}"
    )


def stage_text(cost: Cost) -> str:
    """One stage: memory, time, collectives."""
    info = cost.info
    mesh = " x ".join(f"{name} {size}" for name, size in info.mesh.items())
    steps = f"{info.steps:,} steps of " if info.steps else ""
    lines = [
        f"{info.name}: {steps}{info.rows} x {info.length} tokens, {info.rows_per_device} rows a device at a time",
        f"{'model':>14}  {info.model}",
        f"{'execution':>14}  {mesh}, accumulation {info.accumulation}, {info.execution}",
        f"{'fits':>14}  {_fits(cost)}",
    ]
    lines += [
        f"{purpose:>18}  {_size(size, cost):>10}" for purpose, size in cost.bytes.items() if size >= cost.total / 1000
    ]
    if cost.largest_rows is not None:
        lines.append(
            f"{'largest batch':>14}  about {cost.largest_rows:,} rows a device at a time "
            "(by proportion; plan it to be sure)"
        )
    for c in cost.collectives:
        how = "asynchronous" if c.asynchronous else "the step waits"
        lines.append(f"{'collectives':>14}  {c.count:,} {c.kind} over {c.group}: {c.bytes / 1e6:,.1f} MB a step, {how}")
    if cost.step_s is not None:
        parts = (
            ""
            if cost.operations_s is None
            else (f" (operations {cost.operations_s * 1e3:,.1f}, collectives {cost.collectives_s * 1e3:,.1f})")
        )
        mfu = f", MFU {cost.mfu:.1%}" if cost.mfu is not None else ""
        lines.append(f"{'step':>14}  {cost.step_s * 1e3:,.1f} ms{parts}{mfu}, {cost.tokens_s:,.0f} tokens/s")
        if cost.days is not None:
            lines.append(f"{'whole stage':>14}  {_duration(cost.days)}, {_hours(cost.days, cost)}")
    if cost.unknown_loops:
        lines.append(f"{'note':>14}  counted once, since their length is unknown: {', '.join(cost.unknown_loops)}")
    return "\n".join(lines)


def _fits(cost: Cost) -> str:
    used = _size(cost.total, cost)
    if not cost.limit:
        return f"not known, {cost.info.device_kind} does not tell its memory: {used} a device"
    used = f"{used.split()[0]} of {_size(cost.limit, cost)} a device"
    if not cost.fits:
        return f"NO: {used}"
    return f"not refused: at least {used}" if cost.method == "roofline" else f"yes: {used}"


def _size(size: float, cost: Cost) -> str:
    """Bytes, in the unit that suits the whole of a device's."""
    return f"{size / GIB:,.2f} GiB" if cost.total >= GIB else f"{size / GIB * 1024:,.1f} MiB"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 1 else f"{days * 1440:.1f} minutes"


def _hours(days: float, cost: Cost) -> str:
    """'1,618 chip-hours': what is paid for."""
    hours = days * 24 * cost.chips
    return f"{hours:,.0f} {cost.unit}-hours" if hours >= 10 else f"{hours:.1f} {cost.unit}-hours"


def recipe_text(costs: Sequence[Cost]) -> str:
    """The run as a whole, and by what method its time was found."""
    lines = []
    days = [cost.days for cost in costs]
    if None not in days:
        total = sum(days)
        lines.append(f"whole run: {_duration(total)}, {_hours(total, costs[0])}")
    lines += [f"times are {METHODS[method]}" for method in dict.fromkeys(cost.method for cost in costs if cost.method)]
    return "\n".join(lines)


def ranking(plans: Sequence[Plan]) -> str:
    """A table of plans in order."""
    columns = ("rank", "overrides", "fits", "GiB a device", "step ms", "MFU", "tokens/s", "days")
    rows = []
    for rank, plan in enumerate(plans, 1):
        stages, days = plan.stages, [stage.days for stage in plan.stages]
        proven = all(stage.method != "roofline" for stage in stages)
        rows.append(
            [
                rank,
                plan.overrides,
                "no" if plan.unfit else "yes" if proven else "not refused",
                ", ".join(f"{stage.total / GIB:.2f}" for stage in stages),
                ", ".join(f"{stage.step_s * 1e3:,.0f}" if stage.step_s else "-" for stage in stages),
                ", ".join(f"{stage.mfu:.1%}" if stage.mfu else "-" for stage in stages),
                ", ".join(f"{stage.tokens_s:,.0f}" if stage.tokens_s else "-" for stage in stages),
                f"{sum(days):.2f}" if None not in days else "-",
            ]
        )
    text = markdown.table(columns, rows)
    if any(stage.method == "roofline" for plan in plans for stage in plan.stages):
        text += f"\n{UNRANKED}"
    return text


def remedies(cost: Cost) -> list[str]:
    """Overrides to try for a step that does not fit, the cheapest first."""
    info, rows = cost.info, cost.info.rows_per_device
    found = []
    less = list(KEPT)[list(KEPT).index(info.remat) + 1 :]
    found += [
        f"--config.execution.layers=scan --config.execution.remat={policy}"
        for policy in ("dots", "full")
        if policy in less
    ]
    if rows > 1:
        found.append(f"--config.accumulation={2 * info.accumulation}")
    shards = info.mesh["data"]
    state = sum(cost.bytes[name] for name in ("parameters", "optimizer"))
    if shards > 1 and cost.limit and state > 0.2 * cost.limit:
        factor = next((n for n in (2, 4, 8, 16) if shards % n == 0), shards)
        found.append(f"--config.mesh.fsdp={info.mesh['fsdp'] * factor}")
    return found or ["more chips, or chips with more memory"]
