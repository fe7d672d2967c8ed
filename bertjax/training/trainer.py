"""The trainer: one compiled step over the mesh; `fit` repeats, logs, evaluates and saves it (loop.py).

In: an Objective (what is learnt), an optimizer, a mesh, host batches as a function of the step. Out: the trained
TrainState.

Everything random derives from (seed, step), and batches are asked for by step, so a resumed run repeats the undisturbed
one bit for bit:
  1. To resume, restore a TrainState and call `fit`: it goes on at state.step.
  2. The step's key is fold_in(key(seed), step); masks and dropout derive from it.
  3. The optimizer's schedule reads state.step; phases are chosen by state.step. Only a run with a budget of wall clock
     (process/clock.py) reads both from the time instead.
  4. A skipped (non-finite) step counts as a step: its batch is not repeated.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax import jax_settings
from bertjax.config import Config
from bertjax.log.logbook import Logbook
from bertjax.model.kernels import compiler_options
from bertjax.model.mesh import rows_on
from bertjax.process.clock import POSITION, Clock
from bertjax.process.hardware import prng_implementation
from bertjax.training import sharding
from bertjax.training.loop import Loop
from bertjax.training.optimizer import Optimizer
from bertjax.training.programs import Programs, batch_shapes

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]

# Streams of the root key beside the steps' own, which count up from 0.
INIT_STREAM, EVALUATION_STREAM = 2**32 - 1, 2**32 - 2
PREPARE, DROPOUT = 0, 1  # streams of a step's key

EVALUATED_AHEAD = 4  # batches of an evaluation that may wait for the devices


@flax.struct.dataclass
class TrainState:
    """All that a checkpoint holds."""

    step: jax.Array  # int32 scalar: batches seen
    params: Any  # nested dict, float32
    opt_state: Any  # {'mean': ..., 'variance': ...} like params
    skipped: jax.Array  # int32: steps that were not finite, so not applied
    skipped_in_row: jax.Array  # int32: of these, the unbroken series that ends now


class Objective(Protocol):
    """What is learnt; all methods are pure and run under jit."""

    def init(self, key: jax.Array) -> Any:
        """Initial parameters; must not depend on sharding."""

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The global batch made ready (pre-training draws the masks here); rows stay rows."""

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the global batch by which its losses are divided."""

    def loss(
        self, params: Any, batch: Batch, denominators: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Sums]:
        """Loss of a micro-batch, and {name: (numerator, denominator)} to report.

        Losses and sums of the micro-batches of one batch add up to the batch's. No dropout key means deterministic.
        """


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps up to `until_step` (of the whole run) with one objective and one batch shape."""

    until_step: int
    objective: Objective
    # first step of the phase, from 0 -> endless iterator of this process's rows, {name: [rows, ...]} numpy
    batches: Callable[[int], Iterator[Mapping[str, np.ndarray]]]
    tokens_per_step: int = 0  # of the global batch, padding included
    flops_per_step: float = 0.0  # model FLOPs of the global batch, forward and backward


class Trainer:
    """Compiles steps for objectives and runs them.

    Args:
      optimizer: see optimizer.make_optimizer.
      mesh: see sharding.make_mesh.
      seed: of initial parameters, masks and dropout.
      accumulation: micro-batches a step, each with dropout of its own; otherwise the update is the large batch's.
      prng: 'threefry2x32', 'rbg' or 'auto' (rbg on TPU); threefry always makes the initial parameters, so that they are
        the same everywhere.

    Attributes:
      programs: where steps are compiled.
      between_batches: called during an evaluation with the batches done, from 0 on, and their total (0: not known).
      while_compiling: called now and then while a program is waited for.

    With jax_debug_nans set, the state is not donated, since jax runs a failing step again.
    """

    def __init__(self, optimizer: Optimizer, mesh: Mesh, seed: int = 0, *, accumulation: int = 1, prng: str = "auto"):
        self.optimizer, self.mesh, self.seed = optimizer, mesh, seed
        self.accumulation = accumulation
        self.prng = prng_implementation(prng, mesh.devices.flat[0].platform)
        self.programs = Programs()
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.between_batches: Callable[[int, int], None] = lambda done, total: None
        self.while_compiling: Callable[[], None] = lambda: None
        self._compiled: dict[tuple[str, int], tuple[Objective, Any]] = {}

    @jax_settings.fixed()
    def init(self, objective: Objective, params: Any = None) -> TrainState:
        """A fresh state, sharded over the mesh; from `params` (arrays) where given."""

        def jitted(make: Callable[[Any], TrainState]) -> Any:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(objective))
            return jax.jit(make, out_shardings=shardings)

        if params is None:
            start = self._once("init", objective, lambda: jitted(lambda seed: self._drawn(objective, seed)))
            return start(np.int64(self.seed).astype(np.int32))  # as jax.random.key would make it
        params = jax.tree.map(
            lambda leaf, where: jax.make_array_from_callback(leaf.shape, where, lambda index, leaf=leaf: leaf[index]),
            params,
            sharding.tree_shardings(params, self.mesh),
        )
        # Not donated: a part of the result would alias the caller's arrays.
        return self._once("init from parameters", objective, lambda: jitted(self._state_of))(params)

    def abstract_state(self, objective: Objective) -> TrainState:
        """Shapes and shardings of the state: the target for Checkpoints.restore."""

        def state() -> TrainState:
            shapes = jax.eval_shape(lambda: self._drawn(objective, self.seed))
            return sharding.abstract(shapes, self.mesh)

        return self._once("abstract state", objective, state)

    def _state_of(self, params: Any) -> TrainState:
        return TrainState(jnp.int32(0), params, self.optimizer.init(params), jnp.int32(0), jnp.int32(0))

    def _drawn(self, objective: Objective, seed: jax.Array | int) -> TrainState:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), INIT_STREAM)
        return self._state_of(objective.init(key))

    def _once(self, kind: str, objective: Objective, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for each objective, which is kept alive so that its id stays its own."""
        if (kind, id(objective)) not in self._compiled:
            self._compiled[kind, id(objective)] = objective, make()
        return self._compiled[kind, id(objective)][1]

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        """XLA options of the training step."""
        one_fsdp_group = self.mesh.shape["fsdp"] > 1 and self.mesh.shape["data"] == 1
        return compiler_options(self.mesh.devices.flat[0].platform, one_fsdp_group)

    def train_step(
        self, objective: Objective
    ) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
        """The compiled step (state, global batch) -> (state, metrics). The old state is donated."""

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return self._step(objective, state, batch)

        def compiled() -> Any:
            states = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(objective))
            function = jax.jit(
                train_step,
                donate_argnums=() if jax.config.jax_debug_nans else (0,),
                compiler_options=self.compiler_options,
                in_shardings=(states, sharding.batch_sharding(self.mesh)),
                out_shardings=(states, self._replicated),
            )
            return self.programs.wrap("train", function)

        return self._once("train", objective, compiled)

    def _step(self, objective: Objective, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(self.seed, impl=self.prng), state.step)
        batch = dict(batch)
        place = batch.pop(POSITION)[0] if POSITION in batch else state.step
        batch = objective.prepare(batch, jax.random.fold_in(key, PREPARE))
        (loss, sums), gradients = self._gradients(objective, state.params, batch, jax.random.fold_in(key, DROPOUT))

        norm = self.optimizer.gradient_norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        changes, opt_state = self.optimizer.update(
            gradients, state.opt_state, state.params, step=place, updates=state.step - state.skipped
        )
        params = jax.tree.map(jnp.add, state.params, changes)

        def if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        new_state = TrainState(
            step=state.step + 1,
            params=if_finite(params, state.params),
            opt_state=if_finite(opt_state, state.opt_state),
            skipped=state.skipped + ~finite,
            skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
        )
        metrics = {
            "loss": loss,
            **ratios(sums),
            "grad_norm": norm,
            "learning_rate": self.optimizer.learning_rate(place, state.opt_state),
            "skipped": new_state.skipped,
            "skipped_in_row": new_state.skipped_in_row,
        }
        return new_state, metrics

    def _gradients(
        self, objective: Objective, params: Any, batch: Batch, dropout_key: jax.Array
    ) -> tuple[tuple[jax.Array, Sums], Any]:
        """((loss, sums), gradients) of the whole batch, added up over micro-batches."""
        denominators = objective.denominators(batch)
        shardings = sharding.tree_shardings(params, self.mesh)

        def of_micro_batch(index: jax.Array | int, micro_batch: Batch) -> Any:
            loss = rows_on(self.mesh)(objective.loss)  # traced with the mesh in mind
            result, gradients = jax.value_and_grad(loss, has_aux=True)(
                params, micro_batch, denominators, jax.random.fold_in(dropout_key, index)
            )
            return result, jax.lax.with_sharding_constraint(gradients, shardings)

        if self.accumulation == 1:
            return of_micro_batch(0, batch)

        # Row r goes to micro-batch r % accumulation, on whatever mesh: a device then finds all its
        # micro-batches among its own rows, and dropout does not depend on the number of devices.
        rows = NamedSharding(self.mesh, PartitionSpec(None, sharding.BATCH_AXES))

        def split(x: jax.Array) -> jax.Array:  # [B, ...] -> [accumulation, B/accumulation, ...]
            x = x.reshape(-1, self.accumulation, *x.shape[1:]).swapaxes(0, 1)
            return jax.lax.with_sharding_constraint(x, rows)

        micro_batches = jax.tree.map(split, batch)
        shapes = jax.eval_shape(of_micro_batch, 0, jax.tree.map(lambda x: x[0], micro_batches))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total: Any, indexed: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_micro_batch(*indexed)), None

        total, _ = jax.lax.scan(add, zeros, (jnp.arange(self.accumulation), micro_batches))
        return total

    def compile_ahead(self, kind: str, objective: Objective, batch: Mapping[str, np.ndarray]) -> None:
        """Starts to compile a step in the background (programs.py); its first use waits for that.

        Args:
          kind: 'train' or 'evaluate'.
          batch: of the shapes that will come; values do not matter.
        """
        state, shapes = self.abstract_state(objective), batch_shapes(batch, self.mesh)
        if kind == "train":
            step, arguments = self.train_step(objective), (state, shapes)
        else:
            step, arguments = self._evaluation(objective), (state.params, shapes, np.uint32(0))
        self.programs.start((kind, id(objective)), step, *arguments)

    def wait_for(self, kind: str, objective: Objective) -> None:
        """Returns once what `compile_ahead` started is compiled, if anything."""
        self.programs.wait((kind, id(objective)), lambda: self.while_compiling())

    def evaluation_key(self, number: jax.Array | int) -> jax.Array:
        """The key that `evaluate` gives to `prepare` for batch `number`."""
        key = jax.random.fold_in(jax.random.key(self.seed, impl=self.prng), EVALUATION_STREAM)
        return jax.random.fold_in(key, number)

    @jax_settings.fixed()
    def evaluate(
        self, objective: Objective, params: Any, batches: Iterable[Mapping[str, np.ndarray]]
    ) -> dict[str, float]:
        """Ratios of the objective's sums over all `batches`, without dropout; 'loss' is the sum of those that end so.

        Each row counts once, whatever the batch size (pad the last batch with weight 0). The key given to `prepare`
        depends on the seed and the batch's number only, so masks are the same at every evaluation.
        """
        compiled = self._evaluation(objective)
        self.wait_for("evaluate", objective)
        total_batches = operator.length_hint(batches)
        self.between_batches(0, total_batches)
        parts: list[Sums] = []
        for number, batch in enumerate(batches):
            if number >= EVALUATED_AHEAD:
                jax.block_until_ready(parts[number - EVALUATED_AHEAD])
            parts.append(compiled(params, sharding.put_batch(batch, self.mesh), np.uint32(number)))
            self.between_batches(number + 1, total_batches)
        if not parts:
            raise ValueError("nothing to evaluate: the evaluation data has no batch")
        parts = jax.device_get(parts)
        total = jax.tree.map(lambda *x: np.sum(np.float64(x)), *parts)
        result = {name: float(value) for name, value in ratios(total).items()}
        losses = [value for name, value in result.items() if name.endswith("loss")]
        return result if "loss" in result or not losses else {"loss": sum(losses), **result}

    def _evaluation(self, objective: Objective) -> Any:
        """The compiled (params, global batch, its number) -> sums."""

        def sums_of(params: Any, batch: Batch, number: jax.Array) -> Sums:
            batch = objective.prepare(batch, self.evaluation_key(number))
            return rows_on(self.mesh)(objective.loss)(params, batch, objective.denominators(batch), None)[1]

        def compiled() -> Any:
            params = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(objective).params)
            rows = sharding.batch_sharding(self.mesh)
            function = jax.jit(sums_of, out_shardings=self._replicated, in_shardings=(params, rows, None))
            return self.programs.wrap("evaluate", function)

        return self._once("evaluate", objective, compiled)

    @jax_settings.fixed()
    def fit(
        self,
        state: TrainState,
        phases: Sequence[Phase],
        config: Config = Config(),  # noqa: B008  frozen
        *,
        logbook: Logbook,
        checkpoints: Any = None,
        evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
        clock: Clock | None = None,
    ) -> TrainState:
        """Trains from state.step to the end of the last phase.

        Args:
          state: fresh or restored; donated, so not usable afterwards.
          config: of which log.every_steps, eval.every_steps, checkpoint.every_steps (the last step is always logged,
            evaluated and saved), profile_steps, watchdog_seconds and optimizer.max_skipped_in_row count.
          checkpoints: a run.checkpoint.Checkpoints that states are saved to.
          evaluate: gives the metrics of a state; EarlyStop raised by it ends the training.
          clock: None ends the training with the last phase. With a Budget, `until_step` of the phases and the settings
            above except log.every_steps are in steps of its scale.

        Raises:
          Preempted: after SIGTERM or SIGINT, once the state is saved (SystemExit, code 75).
          NotFiniteError: optimizer.max_skipped_in_row steps in a row were not finite.
          CheckpointError: a checkpoint could not be written.
        """
        clock = clock or Clock(phases[-1].until_step)
        return Loop(self, state, phases, config, logbook, checkpoints, evaluate, clock).run()


def ratios(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """numerator / denominator of each; 0 where nothing was counted."""

    def ratio(numerator: Any, denominator: Any) -> Any:
        safe = jnp.where(denominator == 0, 1, denominator) if isinstance(numerator, jax.Array) else denominator or 1
        return numerator / safe

    return {name: ratio(*pair) for name, pair in sums.items()}
