"""A plan of one configuration, and the search for a better one.

In: a configuration and where it is to run. Out: the `Cost`s of its stages; of a search, `Plan`s
with the best first. How a stage is compiled (cache, quick) comes with a `Planner`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from bertjax import config as settings
from bertjax.model.kernels import select_attention
from bertjax.model.presets import BertConfig
from bertjax.tools.plan import candidates, chips
from bertjax.tools.plan.compilation import Cache, compile_stage
from bertjax.tools.plan.cost import Cost, cost
from bertjax.tools.plan.vocabulary import vocabulary_size

UNKNOWN_BYTES = 16 * chips.GIB  # taken as the memory of a device that does not tell


class Place(NamedTuple):
    """Where a configuration is to run."""

    topology: str
    platform: str
    devices: int
    device_bytes: float | None
    peak_flops: float | None  # of a device


def place_of(piece: chips.Slice | None) -> Place:
    """A slice, or where it is None this machine."""
    if piece is not None:
        return Place(piece.name, "tpu", piece.devices, piece.chip.hbm_bytes, piece.chip.peak_flops)
    import jax

    from bertjax.process import hardware

    return Place("local", jax.default_backend(), jax.device_count(), chips.local_device_bytes(), hardware.peak_flops())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a configuration costs; `overrides` is what a search changed of it."""

    stages: list[Cost]
    overrides: str = ""

    @property
    def unfit(self) -> Cost | None:
        """The first stage that does not fit, if any."""
        return next((stage for stage in self.stages if not stage.fits), None)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans for one place.

    Attributes:
      piece: the slice; None = the devices of this machine.
      cache: of compiled steps.
      quick: stop the compiler once it has assigned memory (TPU only).
      say: told what goes on.
    """

    piece: chips.Slice | None
    cache: Cache
    quick: bool = False
    say: Callable[[str], None] = lambda text: None

    def plan(self, config: Any, overrides: str = "", by_roofline: bool = False) -> Plan:
        """Costs of every stage of a configuration; `by_roofline` as of cost()."""
        place = place_of(self.piece)
        count = 1 if config.job == "finetune" else len(config.phases)
        stages = [
            compile_stage(config, place.topology, number, self.cache, quick=self.quick, say=self.say)
            for number in range(count)
        ]
        return Plan(
            [cost(*stage, self.piece, place.peak_flops, place.device_bytes, by_roofline) for stage in stages], overrides
        )

    def search(self, config: Any, count: int) -> list[Plan]:
        """Plans of the first `count` candidates, the best first: those that fit, by days."""
        if config.job == "finetune":
            raise ValueError("--search is for pre-training; fine-tuning fits almost everywhere")
        place = place_of(self.piece)
        limit = place.device_bytes or UNKNOWN_BYTES
        length = max(length for _, length in config.phases)
        model = settings.model_config(config, vocabulary_size(config))
        worth = candidates.candidates(
            model,
            config.batch_size,
            length,
            settings.max_predictions(config, length),
            place.devices,
            limit,
            _attention_is_fused(config, model, length, place.platform),
        )
        plans = []
        for candidate in itertools.islice(worth, count):
            self.say(
                f"candidate {len(plans) + 1}: {candidate}, about {candidate.bytes / chips.GIB:.1f} GiB by arithmetic"
            )
            tried = config.copy_and_resolve_references()
            tried.update_from_flattened_dict(candidate.overrides())
            # One method for all: a candidate that was once compiled to the end has cycles, which
            # are more than the roofline of the others.
            plans.append(self.plan(tried, str(candidate), by_roofline=self.quick))
        if not plans:
            raise ValueError(
                f"no candidate should fit {limit / chips.GIB:.0f} GiB a device by "
                "arithmetic: take more chips, or chips with more memory"
            )
        return sorted(plans, key=_order)


def _attention_is_fused(config: Any, model: BertConfig, length: int, platform: str) -> bool:
    execution = settings.execution(config, platform)
    if execution.attention != "auto":
        return execution.attention != "reference"
    shape = (1, length, model.num_attention_heads, model.head_size)
    return (
        select_attention(shape, jnp.dtype(execution.dtype), model.attention_probs_dropout_prob, platform) != "reference"
    )


def _order(plan: Plan) -> tuple[bool, float]:
    days = [each.days if each.days is not None else each.total for each in plan.stages]
    return plan.unfit is not None, sum(days)
