"""An optimizer whose learning-rate schedule is data, so that runs share one compiled step.

The trainer compiles its optimizer into the step; a search over learning rates and epochs would compile again for each.
Here peak, warm-up and length live in the optimizer state as three scalars.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import OptimizerSettings
from bertjax.training.optimizer import Optimizer, share_of_peak


def rate_at(name: str, schedule: Mapping[str, Any], step: Any, decay_share: float) -> jax.Array:
    """The rate that optimizer.learning_rate_schedule gives, for traced numbers."""
    return schedule["peak"] * share_of_peak(name, step, schedule["warmup_steps"], schedule["total_steps"], decay_share)


def with_schedule_in_state(unit: Optimizer, name: str, decay_share: float = OptimizerSettings.decay_share) -> Optimizer:
    """`unit` (an optimizer of learning rate 1) scaled by the schedule in the state.

    The state gains 'schedule': peak, warmup_steps and total_steps; the rate is 0 until `set_schedule`.
    """

    def init(params: Any) -> dict[str, Any]:
        schedule = {"peak": 0.0, "warmup_steps": 0.0, "total_steps": 1.0}
        return {**unit.init(params), "schedule": {name: jnp.float32(number) for name, number in schedule.items()}}

    def update(gradients, state, params, *, step, updates=None):
        moments = {key: value for key, value in state.items() if key != "schedule"}
        changes, moments = unit.update(gradients, moments, params, step=step, updates=updates)
        rate = rate_at(name, state["schedule"], step, decay_share)
        changes = jax.tree.map(lambda change: change * rate.astype(change.dtype), changes)
        return changes, {**moments, "schedule": state["schedule"]}

    def rate(step: Any, state: Any) -> jax.Array:
        return rate_at(name, state["schedule"], step, decay_share)

    return Optimizer(init, update, rate, unit.gradient_norm)


def set_schedule(state: Any, peak: float, warmup_steps: int, total_steps: int) -> Any:
    """The TrainState with the numbers of a run in its optimizer state, sharded as before."""
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must lie between 0 and {total_steps}")
    new = {"peak": peak, "warmup_steps": warmup_steps, "total_steps": total_steps}
    old = state.opt_state["schedule"]
    placed = {name: jax.device_put(np.float32(value), old[name].sharding) for name, value in new.items()}
    return state.replace(opt_state={**state.opt_state, "schedule": placed})
