"""The learning-rate schedule and the optimizers: AdamW exactly as the original, LAMB, and those of optax.

In: gradients and parameters as nested dicts, the step number. Out: updates to add to the parameters, and the optimizer
state in float32: {'mean': tree, 'variance': tree}, or {'optax': its state}.

The learning rate follows `step` (batches seen) and our bias correction follows `updates` (batches applied); the caller
passes both, and keeps the old state when it skips a step, so a skipped step leaves no trace.
"""

import collections
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.config import OptimizerSettings
from bertjax.config.optimizers import optax_factory
from bertjax.model.kernels import compute_capability
from bertjax.model.paths import flatten, unflatten

Params = Mapping[str, Any]
Schedule = Callable[[jax.Array | int], jax.Array]
Rules = Sequence[tuple[str, float]]


def learning_rate_schedule(
    name: str, peak: float, warmup_steps: int, total_steps: int, decay_share: float = OptimizerSettings.decay_share
) -> Schedule:
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
      warmup_stable_decay  ModernBERT's (Warner et al. 2024): `peak`, and over the last `decay_share` of the steps
                           1 - sqrt(share of the decay that is done) of it (Hägele et al. 2024)

    Args:
      peak: the highest rate (which 'linear' with warm-up only approaches).
      warmup_steps, total_steps: in optimizer steps; 0 <= warmup_steps <= total_steps.
    """
    return lambda step: jnp.float32(peak) * share_of_peak(name, step, warmup_steps, total_steps, decay_share)


def share_of_peak(name: str, step: Any, warmup_steps: Any, total_steps: Any, decay_share: float) -> jax.Array:
    """`learning_rate_schedule` for peak 1, unchecked; all numbers may be traced."""
    step = jnp.asarray(step, jnp.float32)
    from_start = 1 - jnp.minimum(step, total_steps) / total_steps
    from_peak = 1 - jnp.clip((step - warmup_steps) / jnp.maximum(total_steps - warmup_steps, 1), 0, 1)
    decay_done = jnp.clip((step - (1 - decay_share) * total_steps) / (decay_share * total_steps), 0, 1)
    decayed = {
        "linear": from_start,
        "polynomial": jnp.sqrt(from_start),
        "linear_after_warmup": from_peak,
        "cosine": 0.5 * (1 - jnp.cos(math.pi * from_peak)),
        "constant": jnp.ones_like(step),
        "warmup_stable_decay": 1 - jnp.sqrt(decay_done),
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
    """The original's AdamW, LAMB, or any optimizer of optax, behind clipping by global norm.

    adamw: AdamWeightDecayOptimizer of google-research/bert (optimization.py):
      m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  p -= lr (m / (sqrt(v) + eps) + decay p)
    lamb: You et al. 2020, algorithm 2, with phi the identity: the same direction, scaled for each
      parameter array by |p| / |direction| (1 where either norm is 0). Arrays that `no_decay`
      matches are not scaled, as in the authors' code. Algorithm 2 has bias correction: turn it on.
    stableadamw: AdamW whose rate is divided, for each parameter array, by the root mean square of g / sqrt(v) where
      that is above 1 (Wortsman et al. 2023, algorithm 2; ModernBERT's, with bias correction).
    optax.NAME: made with `options` and learning rate 1; the rate multiplies its whole update.

    Args:
      settings: config.optimizer. Its learning rate, warm-up and schedule are not read here.
        bias_correction divides m and v by 1 - b^updates, as Adam does and the original does not:
        first step with g = 1: the update is 0.999999 lr with it, 3.162178 lr without.
      learning_rate: a schedule, or a constant.
      learning_rate_rules: ordered (regex over the path, multiplier); the first match counts, no
        match means 1. Multiplier 0 freezes: no optimizer state, no part in the gradient norm.

    Raises:
      ValueError: unknown name or option, or (at init) a rule that matches no parameter, or rules that freeze all.
    """
    schedule = learning_rate if callable(learning_rate) else lambda step: jnp.float32(learning_rate)
    excluded = re.compile(settings.no_decay)

    def decayed(tree: Params) -> Params:
        """True for what weight decay applies to."""
        return unflatten({path: not excluded.search(path) for path in flatten(tree)})

    rule, after = _rule(settings, decayed)

    def rate_of(path: str) -> float:
        return first_match(learning_rate_rules, path, 1.0)

    def trained(tree: Params) -> Params:
        """What is not frozen, in float32."""
        return unflatten({path: leaf.astype(jnp.float32) for path, leaf in flatten(tree).items() if rate_of(path)})

    def init(params: Params) -> Params:
        check_rules(learning_rate_rules, flatten(params))
        if not any(map(rate_of, flatten(params))):
            frozen = ", ".join(repr(pattern) for pattern, rate in learning_rate_rules if not rate)
            raise ValueError(f"config.task.freeze leaves no parameter to train: {frozen}")
        return rule.init(trained(params))

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
        directions, weights = trained(gradients), trained(params)
        if settings.clip_norm:
            scale = settings.clip_norm / jnp.maximum(global_norm(directions), settings.clip_norm)
            directions = jax.tree.map(lambda gradient: gradient * scale, directions)
        directions, state = rule.update(directions, state, weights, updates=updates)
        directions, _ = after.update(directions, after.init(weights), weights)
        flat, rate = flatten(directions), schedule(step)
        changes = {
            path: (-rate * rate_of(path) * flat[path]).astype(leaf.dtype) if path in flat else jnp.zeros_like(leaf)
            for path, leaf in flatten(params).items()
        }
        return unflatten(changes), state

    return Optimizer(init, update, lambda step, state: schedule(step), gradient_norm)


def _rule(
    settings: OptimizerSettings, decayed: Callable[[Params], Params]
) -> tuple[optax.GradientTransformationExtraArgs, optax.GradientTransformation]:
    """The part with a state and the part without one, from gradients to the directions that the learning rate
    multiplies."""
    decay = optax.add_decayed_weights(settings.weight_decay, decayed)
    if settings.name == "adamw":
        return _adam(settings), decay
    if settings.name == "stableadamw":
        return _stable(settings, decay), optax.identity()
    if settings.name == "lamb":
        scaled = optax.stateless(lambda directions, weights: jax.tree.map(_trusted, directions, weights))
        return _adam(settings), optax.chain(decay, optax.masked(scaled, decayed))
    factory, arguments = optax_factory(settings)
    takes = inspect.signature(factory).parameters
    mask = next((name for name in ("mask", "weight_decay_mask") if name in takes), None)
    # The Adam that muon has for what is no matrix decays without a mask.
    if mask and "weight_decay" in takes and "adam_weight_decay" not in takes:
        arguments |= {"weight_decay": settings.weight_decay, mask: decayed}
        decay = optax.identity()
    elif "weight_decay" in takes:
        arguments["weight_decay"] = 0.0
    muon = factory is optax.contrib.muon
    if muon:
        arguments["muon_weight_dimension_numbers"] = _matrices
    shown = f"{settings.name}({', '.join(f'{name}={value!r}' for name, value in settings.options.items())})"
    example = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("kernel", (2, 3)), ("bias", (3,)))}

    def is_key(leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    def saved(state: Any) -> Params:  # keys of random numbers as numbers, which checkpoints hold
        return {"optax": jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)}

    def update(gradients: Params, state: Params, params: Params, **_: Any) -> tuple[Params, Params]:
        kinds = jax.eval_shape(made.init, params)
        before = jax.tree.map(
            lambda kind, leaf: jax.random.wrap_key_data(leaf) if is_key(kind) else leaf, kinds, state["optax"]
        )
        changes, new = made.update(gradients, before, params)
        return jax.tree.map(jnp.negative, changes), saved(new)

    try:
        made = factory(learning_rate=1.0, **arguments)
        made = _over_stacks(made) if muon else made
        rule = optax.GradientTransformationExtraArgs(lambda params: saved(made.init(params)), update)
        jax.eval_shape(lambda params: rule.update(params, rule.init(params), params), example)
    except Exception as error:  # whatever a wrong option of somebody else's function raises
        reason = str(error).split("\n")[0]
        raise ValueError(f"config.optimizer: {shown} cannot train here: {type(error).__name__}: {reason}") from error
    return rule, decay


def _matrices(tree: Params) -> Params:
    """What Muon trains, alone or in stacks: all matrices but tables of embeddings, which with the vectors are Adam's
    (Jordan 2024)."""
    axes = {2: optax.contrib.MuonDimensionNumbers(0, 1), 3: optax.contrib.MuonDimensionNumbers(1, 2)}

    def of(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        return None if path[-1].key.endswith("embeddings") else axes.get(leaf.ndim)

    return jax.tree_util.tree_map_with_path(of, tree)


def _over_stacks(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """`rule` over arrays [layers, rows, columns], each under its path in the first layer, instead of matrices [rows,
    columns] of layers: their products run in one batch, and compile once."""

    def paths(tree: Params) -> dict[str, list[str]]:
        """{path in the first layer that has it: paths in all layers}, of matrices of one name and shape."""
        flat, found = flatten(tree), collections.defaultdict(list)
        for path in sorted(flat, key=lambda path: (len(path), path)):  # layer_2 before layer_10
            if re.search(r"(^|/)layer_\d+/.*kernel$", path) and flat[path].ndim == 2:
                found[re.sub(r"layer_\d+", "", path), flat[path].shape].append(path)
        return {layers[0]: layers for layers in found.values()}

    def stacked(tree: Params) -> Params:
        flat = flatten(tree)
        stacks = {first: jnp.stack([flat.pop(path) for path in layers]) for first, layers in paths(tree).items()}
        return unflatten(flat | stacks)

    def update(gradients: Params, state: Any, params: Params) -> tuple[Params, Any]:
        # Newton-Schulz iterations run in bfloat16 (Jordan 2024): TPUs do so anyway, CPUs and GPUs before Ampere cannot.
        precision = "BF16_BF16_F32" if compute_capability() >= 8 else None
        with jax.default_matmul_precision(precision):
            changes, state = rule.update(stacked(gradients), state, stacked(params))
        flat = flatten(changes)
        for first, layers in paths(gradients).items():
            flat |= dict(zip(layers, flat[first], strict=True))
        return unflatten(flat), state

    return optax.GradientTransformation(lambda params: rule.init(stacked(params)), update)


@jax.jit  # traced and lowered once for all arrays of a shape
def _trusted(direction: jax.Array, weight: jax.Array) -> jax.Array:
    return optax.scale_by_trust_ratio().update(direction, optax.EmptyState(), weight)[0]


def _adam(settings: OptimizerSettings) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, with bias correction by the updates made before, or without."""
    b1, b2, eps, bias_correction = settings.b1, settings.b2, settings.eps, settings.bias_correction

    @jax.jit  # traced and lowered once for all arrays of a shape
    def one(g: jax.Array, m: jax.Array, v: jax.Array, updates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * jnp.square(g)
        m_hat, v_hat = (m / _weight_sum(b1, updates), v / _weight_sum(b2, updates)) if bias_correction else (m, v)
        return m_hat / (jnp.sqrt(v_hat) + eps), m, v

    def init(params: Params) -> Params:
        # Two separate trees of zeros: shared buffers could not be donated.
        return {moment: jax.tree.map(jnp.zeros_like, params) for moment in ("mean", "variance")}

    def update(gradients: Params, state: Params, params: Params, *, updates: jax.Array) -> tuple[Params, Params]:
        several = jax.tree.map(lambda g, m, v: one(g, m, v, updates), gradients, state["mean"], state["variance"])
        directions, mean, variance = jax.tree.transpose(
            jax.tree.structure(gradients), jax.tree.structure((0, 0, 0)), several
        )
        return directions, {"mean": mean, "variance": variance}

    return optax.GradientTransformationExtraArgs(init, update)


def _weight_sum(b: float, updates: jax.Array) -> jax.Array:
    """1 - b^(updates + 1), to all digits: in float32, 1 - 0.999 has only 4 good ones."""
    return -jnp.expm1((updates + 1) * (math.log(b) if b else -math.inf))


def _stable(settings: OptimizerSettings, decay: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """AdamW, divided where the second moment lags behind the gradient."""
    adam, least = _adam(settings), settings.eps**2

    def update(gradients: Params, state: Params, params: Params, *, updates: jax.Array) -> tuple[Params, Params]:
        directions, state = adam.update(gradients, state, params, updates=updates)
        directions, _ = decay.update(directions, decay.init(params), params)
        corrected = _weight_sum(settings.b2, updates) if settings.bias_correction else 1.0

        def settled(direction: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
            surprise = jnp.sqrt(jnp.mean(jnp.square(g) / jnp.maximum(v / corrected, least)))
            return direction / jnp.maximum(surprise, 1)

        return jax.tree.map(settled, directions, gradients, state["variance"]), state

    return optax.GradientTransformationExtraArgs(adam.init, update)


def with_schedule_in_state(unit: Optimizer, name: str, decay_share: float = OptimizerSettings.decay_share) -> Optimizer:
    """`unit` (an optimizer of learning rate 1) scaled by a schedule that is data, so that runs of other rates and
    lengths share one compiled step.

    The state gains 'schedule': peak, warmup_steps and total_steps; the rate is 0 until `set_schedule`.
    """

    def init(params: Any) -> dict[str, Any]:
        schedule = {"peak": jnp.float32(0), "warmup_steps": jnp.float32(0), "total_steps": jnp.float32(1)}
        return {**unit.init(params), "schedule": schedule}

    def rate(step: Any, state: Any) -> jax.Array:
        schedule = state["schedule"]
        share = share_of_peak(name, step, schedule["warmup_steps"], schedule["total_steps"], decay_share)
        return schedule["peak"] * share

    def update(gradients, state, params, *, step, updates=None):
        moments = {key: value for key, value in state.items() if key != "schedule"}
        changes, moments = unit.update(gradients, moments, params, step=step, updates=updates)
        scale = rate(step, state)
        changes = jax.tree.map(lambda change: change * scale.astype(change.dtype), changes)
        return changes, {**moments, "schedule": state["schedule"]}

    return Optimizer(init, update, rate, unit.gradient_norm)


def set_schedule(state: Any, peak: float, warmup_steps: int, total_steps: int) -> Any:
    """The TrainState with the numbers of a run in its optimizer state, sharded as before."""
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must lie between 0 and {total_steps}")
    new = {"peak": peak, "warmup_steps": warmup_steps, "total_steps": total_steps}
    old = state.opt_state["schedule"]
    placed = {name: jax.device_put(np.float32(value), old[name].sharding) for name, value in new.items()}
    return state.replace(opt_state={**state.opt_state, "schedule": placed})


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
    """Refuses a rule that matches no parameter: its pattern is mistyped."""
    for pattern, value in rules:
        if not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(list(paths)[:5])
            name = f"the rate {value} for" if value else "config.task.freeze:"
            listed = f'; several patterns are a list, "{tuple(pattern.split(","))}"' * ("," in pattern)
            raise ValueError(f"{name} {pattern!r} matches no parameter path{listed}; paths look like: {shown} ...")
