"""The text of a plan: what it is of, memory, time, collectives, and what to change."""

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
    units, size = piece.chip.units, piece.chip.hbm_bytes / GIB
    place = f"{piece.name} ({piece.accelerator}): {piece.devices} {units} of {kind}"
    return f"{name} on {place}, {size:.0f} GiB a {units.removesuffix('s')}; {versions}"


def stage_text(cost: Cost) -> str:
    """One stage: memory, time, collectives."""
    info = cost.info
    mesh = " x ".join(f"{name} {size}" for name, size in info.mesh.items())
    steps = f"{info.steps:,} steps of " if info.steps else ""
    lines = [f"{info.name}: {steps}{info.rows} x {info.length} tokens, {info.rows_per_device} rows a device at a time"]

    def add(name: str, text: str) -> None:
        lines.append(f"{name:>14}  {text}")

    add("model", info.model)
    add("execution", f"{mesh}, accumulation {info.accumulation}, {info.execution}")
    add("fits", _fits(cost))
    shown = {purpose: size for purpose, size in cost.bytes.items() if size >= cost.total / 1000}
    lines += [f"{purpose:>18}  {_size(size, cost):>10}" for purpose, size in shown.items()]
    if cost.largest_rows is not None:
        add("largest batch", f"about {cost.largest_rows:,} rows a device at a time (by proportion; plan it to be sure)")
    for c in cost.collectives:
        how = "asynchronous" if c.asynchronous else "the step waits"
        add("collectives", f"{c.count:,} {c.kind} over {c.group}: {c.bytes / 1e6:,.1f} MB a step, {how}")
    if cost.step_s is not None:
        parts = mfu = ""
        if cost.operations_s is not None:
            parts = f" (operations {cost.operations_s * 1e3:,.1f}, collectives {cost.collectives_s * 1e3:,.1f})"
        if cost.mfu is not None:
            mfu = f", MFU {cost.mfu:.1%}"
        add("step", f"{cost.step_s * 1e3:,.1f} ms{parts}{mfu}, {cost.tokens_s:,.0f} tokens/s")
    if cost.days is not None:
        add("whole stage", _duration(cost.days, cost))
    if cost.unknown_loops:
        add("note", f"counted once, since their length is unknown: {', '.join(cost.unknown_loops)}")
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


def _duration(days: float, cost: Cost) -> str:
    """'4.2 days, 1,618 chip-hours': how long it takes and what is paid for."""
    paid = days * 24 * cost.chips
    paid = f"{paid:,.0f} {cost.unit}-hours" if paid >= 10 else f"{paid:.1f} {cost.unit}-hours"
    if days >= 1:
        return f"{days:,.1f} days, {paid}"
    return f"{days * 24:.1f} hours, {paid}" if days * 24 >= 1 else f"{days * 1440:.1f} minutes, {paid}"


def recipe_text(costs: Sequence[Cost]) -> str:
    """The run as a whole, and by what method its time was found."""
    lines = []
    days = [cost.days for cost in costs]
    if None not in days:
        lines.append(f"whole run: {_duration(sum(days), costs[0])}")
    lines += [f"times are {METHODS[method]}" for method in dict.fromkeys(cost.method for cost in costs if cost.method)]
    return "\n".join(lines)


def ranking(plans: Sequence[Plan]) -> str:
    """A table of plans in order."""

    def each(values: list[float | None], form: str) -> str:
        return ", ".join("-" if not value else format(value, form) for value in values)

    rows = []
    for rank, plan in enumerate(plans, 1):
        stages, days = plan.stages, [stage.days for stage in plan.stages]
        proven = all(stage.method != "roofline" for stage in stages)
        rows.append(
            [
                rank,
                plan.overrides,
                "no" if plan.unfit else "yes" if proven else "not refused",
                each([stage.total / GIB for stage in stages], ".2f"),
                each([stage.step_s and stage.step_s * 1e3 for stage in stages], ",.0f"),
                each([stage.mfu for stage in stages], ".1%"),
                each([stage.tokens_s for stage in stages], ",.0f"),
                f"{sum(days):.2f}" if None not in days else "-",
            ]
        )
    columns = ("rank", "overrides", "fits", "GiB a device", "step ms", "MFU", "tokens/s", "days")
    quick = any(stage.method == "roofline" for plan in plans for stage in plan.stages)
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
