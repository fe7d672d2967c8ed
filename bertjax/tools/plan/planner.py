"""A plan of one configuration, and the search for a better one.

In: a configuration and where it is to run. Out: the `Cost`s of its stages; of a search, `Plan`s
with the best first.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bertjax.config import Config, max_predictions
from bertjax.model.kernels.choice import select_attention
from bertjax.model.presets import BertConfig, Execution
from bertjax.process import hardware
from bertjax.tools.plan import candidates, chips
from bertjax.tools.plan.compilation import Cache, compile_stage
from bertjax.tools.plan.cost import Cost, cost
from bertjax.tools.plan.vocabulary import vocabulary_size

UNKNOWN_BYTES = 16 * chips.GIB  # taken as the memory of a device that does not tell


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a configuration costs; `overrides` is what a search changed of it."""

    stages: list[Cost]
    overrides: str = ""

    @property
    def unfit(self) -> Cost | None:
        """The first stage that does not fit, if any."""
        return next((stage for stage in self.stages if not stage.fits), None)

    @property
    def rank(self) -> tuple[bool, float]:
        """The best plan has the least: those that fit first, by days."""
        return self.unfit is not None, sum(s.total if s.days is None else s.days for s in self.stages)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans for one place.

    Attributes:
      piece: the slice; None = the devices of this machine.
      cache: of compiled steps.
      quick: stop the compiler once it has assigned memory (TPU only).
      say: receives lines of progress.
    """

    piece: chips.Slice | None
    cache: Cache
    quick: bool = False
    say: Callable[[str], None] = lambda text: None

    @property
    def device_bytes(self) -> float | None:
        """Memory of a device, if known."""
        return self.piece.chip.hbm_bytes if self.piece else chips.local_device_bytes()

    def plan(self, config: Config, overrides: str = "", by_roofline: bool = False) -> Plan:
        """Costs of every stage of a configuration; `by_roofline` as of cost()."""
        topology = self.piece.name if self.piece else "local"
        peak = self.piece.chip.peak_flops if self.piece else hardware.peak_flops()
        limit, costs = self.device_bytes, []
        for number in range(1 if config.job == "finetune" else len(config.phases)):
            stage = compile_stage(config, topology, number, self.cache, quick=self.quick, say=self.say)
            costs.append(cost(*stage, self.piece, peak, limit, by_roofline))
        return Plan(costs, overrides)

    def search(self, config: Config, count: int) -> list[Plan]:
        """Plans of the first `count` candidates, the best first."""
        if config.job == "finetune":
            raise ValueError("--search is for pre-training; fine-tuning fits almost everywhere")
        limit = self.device_bytes or UNKNOWN_BYTES
        length = max(length for _, length in config.phases)
        model = BertConfig.of(config.model, vocabulary_size(config))
        worth = candidates.candidates(
            model,
            config.batch_size,
            length,
            max_predictions(config, length),
            self.piece.devices if self.piece else jax.device_count(),
            limit,
            _attention_is_fused(config, model, length, "tpu" if self.piece else jax.default_backend()),
        )
        plans = []
        for number, candidate in enumerate(itertools.islice(worth, count), 1):
            self.say(f"candidate {number}: {candidate}, about {candidate.bytes / chips.GIB:.1f} GiB by arithmetic")
            tried = config.replace(candidate.overrides())
            # One method for all: a candidate that was once compiled to the end has cycles, which
            # are more than the roofline of the others.
            plans.append(self.plan(tried, str(candidate), by_roofline=self.quick))
        if not plans:
            raise ValueError(
                f"no candidate should fit {limit / chips.GIB:.0f} GiB a device by "
                "arithmetic: take more chips, or chips with more memory"
            )
        return sorted(plans, key=lambda plan: plan.rank)


def _attention_is_fused(config: Config, model: BertConfig, length: int, platform: str) -> bool:
    execution = Execution.of(config.execution, platform, config.mesh.tensor > 1)
    kind = execution.attention
    if kind == "auto":
        shape = (1, length, model.num_attention_heads, model.head_size)
        kind = select_attention(shape, jnp.dtype(execution.dtype), platform)
    return kind != "reference"
