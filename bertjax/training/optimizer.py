"""The learning-rate schedule and the optimizers: AdamW exactly as the original, and LAMB.

In: gradients and parameters as nested dicts, the step number. Out: updates to add to the
parameters, and the optimizer state {'mean': tree, 'variance': tree} in float32.

The state holds no counter. The learning rate follows `step` (batches seen) and the bias correction
follows `updates` (batches applied); the caller passes both, so a skipped step leaves no trace.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.config import OptimizerSettings, walk
from bertjax.model.paths import flatten, unflatten

if TYPE_CHECKING:  # a second of imports that only `from_optax` needs
    import optax

Params = Mapping[str, Any]
Schedule = Callable[[jax.Array | int], jax.Array]
Rules = Sequence[tuple[str, float]]

SCHEDULES = dict(walk(OptimizerSettings))["schedule"].allowed


def learning_rate_schedule(name: str, peak: float, warmup_steps: int, total_steps: int) -> Schedule:
    """Learning rate as a function of the step (0 = the first update).

    Warm-up is `peak * step / warmup_steps` for every schedule, so that with warm-up the first
    update has rate 0, as in the original. After it:
      linear               the original's (google-research/bert optimization.py): the line from
                           `peak` at step 0 to 0 at `total_steps`, joined where warm-up ends
      polynomial           NVIDIA's for LAMB (DeepLearningExamples, PolyWarmUpScheduler of degree
                           0.5): `peak` times the square root of what is left of 'linear'
      linear_after_warmup  Hugging Face's: from `peak` at the end of warm-up to 0
      cosine               half a cosine from `peak` at the end of warm-up to 0
      constant             `peak`

    Args:
      peak: the highest rate (which 'linear' with warm-up only approaches).
      warmup_steps, total_steps: in optimizer steps; 0 <= warmup_steps <= total_steps.

    Raises:
      ValueError: unknown name, or numbers outside those ranges.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {name!r}; one of {', '.join(SCHEDULES)}")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must lie between 0 and total_steps={total_steps}")
    if not peak >= 0:
        raise ValueError(f"learning rate {peak} must not be negative")

    def schedule(step: jax.Array | int) -> jax.Array:
        return jnp.float32(peak) * share_of_peak(name, step, warmup_steps, total_steps)

    return schedule


def share_of_peak(name: str, step: Any, warmup_steps: Any, total_steps: Any) -> jax.Array:
    """`learning_rate_schedule` for peak 1, unchecked; all numbers may be traced."""
    step = jnp.asarray(step, jnp.float32)
    from_start = 1 - jnp.minimum(step, total_steps) / total_steps
    from_peak = 1 - jnp.clip((step - warmup_steps) / jnp.maximum(total_steps - warmup_steps, 1), 0, 1)
    decayed = {
        "linear": from_start,
        "polynomial": jnp.sqrt(from_start),
        "linear_after_warmup": from_peak,
        "cosine": 0.5 * (1 - jnp.cos(math.pi * from_peak)),
        "constant": jnp.ones_like(step),
    }[name]
    return jnp.where(step < warmup_steps, step / jnp.maximum(warmup_steps, 1), decayed)


class Optimizer(NamedTuple):
    """An optimizer; `init` and `update` are those of an optax.GradientTransformationExtraArgs."""

    init: Callable[[Params], Params]  # params -> state
    # (gradients, state, params, step=, updates=) -> (updates to add to params, new state)
    update: Callable[..., tuple[Params, Params]]
    learning_rate: Callable[[Any, Params], jax.Array]  # (step, state) -> the rate that `update` uses there
    gradient_norm: Callable[[Params], jax.Array]  # global norm of what is trained, before clipping


def make_optimizer(
    settings: OptimizerSettings, learning_rate: Schedule | float, learning_rate_rules: Rules = ()
) -> Optimizer:
    """The original's AdamW, or LAMB, behind clipping by global norm.

    adamw: AdamWeightDecayOptimizer of google-research/bert (optimization.py):
      m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  p -= lr (m / (sqrt(v) + eps) + decay p)
    lamb: You et al. 2020, algorithm 2, with phi the identity: the same direction, scaled for each
      parameter array by |p| / |direction| (1 where either norm is 0). Arrays that `no_decay`
      matches are not scaled, as in the authors' code. Algorithm 2 has bias correction: turn it on.

    Args:
      settings: config.optimizer. Its learning rate, warm-up and schedule are not read here.
        bias_correction divides m and v by 1 - b^updates, as Adam does and the original does not:
        first step with g = 1: the update is 0.999999 lr with it, 3.162178 lr without.
      learning_rate: a schedule, or a constant.
      learning_rate_rules: ordered (regex over the path, multiplier); the first match counts, no
        match means 1. Multiplier 0 freezes: no optimizer state, no part in the gradient norm.

    Raises:
      ValueError: unknown name, or (at init) a rule that matches no parameter.
    """
    if settings.name not in ("adamw", "lamb"):
        raise ValueError(f"unknown optimizer {settings.name!r}; one of adamw, lamb")
    schedule = (
        learning_rate
        if callable(learning_rate)
        else (lambda step: jnp.full_like(jnp.asarray(step, jnp.float32), learning_rate))
    )
    direction, clip_norm = _Direction(settings), settings.clip_norm
    excluded = re.compile(settings.no_decay)

    def trained(tree: Params) -> dict[str, Any]:
        """The flat {path: leaf} of what is not frozen."""
        return {path: leaf for path, leaf in flatten(tree).items() if first_match(learning_rate_rules, path, 1.0)}

    def init(params: Params) -> Params:
        check_rules(learning_rate_rules, flatten(params))
        # Two separate trees of zeros: shared buffers could not be donated.
        return {
            moment: unflatten({path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in trained(params).items()})
            for moment in ("mean", "variance")
        }

    def gradient_norm(gradients: Params) -> jax.Array:
        return global_norm(trained(gradients))

    def update(
        gradients: Params,
        state: Params,
        params: Params,
        *,
        step: jax.Array | int,
        updates: jax.Array | int | None = None,
    ) -> tuple[Params, Params]:
        updates = jnp.asarray(step if updates is None else updates, jnp.float32)
        scale = jnp.float32(1)
        if clip_norm:
            scale = clip_norm / jnp.maximum(gradient_norm(gradients), clip_norm)
        means, variances = flatten(state["mean"]), flatten(state["variance"])
        flat_params, rate = flatten(params), schedule(step)
        changes, new_means, new_variances = {}, {}, {}
        for path, gradient in flatten(gradients).items():
            multiplier = first_match(learning_rate_rules, path, 1.0)
            if not multiplier:
                changes[path] = jnp.zeros_like(flat_params[path])
                continue
            step_direction, new_means[path], new_variances[path] = direction.of(
                gradient, means[path], variances[path], flat_params[path], scale, updates, not excluded.search(path)
            )
            changes[path] = (-rate * multiplier * step_direction).astype(flat_params[path].dtype)
        return unflatten(changes), {"mean": unflatten(new_means), "variance": unflatten(new_variances)}

    return Optimizer(init, update, lambda step, state: schedule(step), gradient_norm)


@dataclasses.dataclass(frozen=True)
class _Direction:
    """Where a step of one array goes, before the learning rate."""

    settings: OptimizerSettings

    # A function of its own, so that it is traced and lowered once for all arrays of a shape.
    @functools.partial(jax.jit, static_argnums=(0, 7))
    def of(
        self, g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, scale: jax.Array, updates: jax.Array, decays: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(direction, new m, new v) in float32; g is scaled first, `updates` were made before."""
        s = self.settings
        g, p = g.astype(jnp.float32) * scale, p.astype(jnp.float32)
        m = s.b1 * m + (1 - s.b1) * g
        v = s.b2 * v + (1 - s.b2) * jnp.square(g)
        m_hat, v_hat = m, v
        if s.bias_correction:
            # 1 - b^n as -expm1(n log b): in float32, 1 - 0.999 has only 4 good digits.
            m_hat = m / -jnp.expm1((updates + 1) * (math.log(s.b1) if s.b1 else -math.inf))
            v_hat = v / -jnp.expm1((updates + 1) * math.log(s.b2))
        direction = m_hat / (jnp.sqrt(v_hat) + s.eps)
        if decays and s.weight_decay:
            direction += s.weight_decay * p
        if decays and s.name == "lamb":
            p_norm, d_norm = jnp.linalg.norm(p.ravel()), jnp.linalg.norm(direction.ravel())
            ratio = p_norm / jnp.where(d_norm > 0, d_norm, 1)
            direction *= jnp.where((p_norm > 0) & (d_norm > 0), ratio, 1)
        return direction, m, v


def from_optax(transform: "optax.GradientTransformation", learning_rate: Schedule) -> Optimizer:
    """Any optax optimizer as the trainer's: Trainer(from_optax(optax.lion(1.0), schedule), mesh).

    Args:
      transform: made with learning rate 1, so that the rate is the schedule's at the step (a count
        of its own would not see skipped steps); clipping belongs in its chain.
    """

    def update(
        gradients: Params, state: Any, params: Params, *, step: jax.Array | int, updates: jax.Array | int | None = None
    ) -> tuple[Params, Any]:
        del updates
        changes, state = transform.update(gradients, state, params)
        rate = learning_rate(step)
        return jax.tree.map(lambda change: rate * change, changes), state

    return Optimizer(transform.init, update, lambda step, state: learning_rate(step), global_norm)


def layerwise_decay_rules(num_layers: int, decay: float) -> list[tuple[str, float]]:
    """Learning-rate rules that shrink the rate by `decay` for each layer further from the head.

    Heads and pooler 1, layer L-1 `decay`^2 ... layer 0 `decay`^(L+1), embeddings `decay`^(L+2)
    (google-research/electra model/optimization.py, `_get_layer_lrs`).
    """
    layers = [(f"(^|/)layer_{i}/", decay ** (num_layers + 1 - i)) for i in range(num_layers)]
    return [*layers, ("embeddings/", decay ** (num_layers + 2))]


@jax.jit  # traced once for all who ask for the norm of the same tree
def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves together, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def first_match(rules: Rules, path: str, default: float) -> float:
    """Value of the first rule whose regex is found in `path`."""
    return next((value for pattern, value in rules if re.search(pattern, path)), default)


def check_rules(rules: Rules, paths: Sequence[str] | Mapping[str, Any]) -> None:
    """Refuses a rule that matches nothing, which is a mistyped pattern rather than a wish."""
    for pattern, value in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        if not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(list(paths)[:5])
            raise ValueError(f"the rule ({pattern!r}, {value}) matches no parameter path; paths look like: {shown} ...")
