"""Fine-tuning: one way for every task, from a pre-trained model to scores.

In: a Task, a tokenizer, the weights to start from, settings. Out: the weights that scored best on the development split
(best.py) and their scores; results.py writes them. `FineTuner` reads and featurises once and keeps its compiled steps:
any number of trainings with other learning rates, epochs and seeds share them (see sweep.py). `Training` is one of
them, for Trainer.fit, which this module gives length buckets and evaluation with the task's own metric.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.config import Config
from bertjax.log.logbook import Logbook
from bertjax.model.kernels import compiler_options
from bertjax.model.mesh import rows_on
from bertjax.model.presets import BertConfig, Execution
from bertjax.process.clock import Clock, reach
from bertjax.run.checkpoint import Checkpoints
from bertjax.tasks.batches import (
    INPUTS,
    Features,
    TrainingBatches,
    as_one_array,
    batch_of,
    evaluation_batches,
    has_pair,
    of_examples,
    process_slice,
    row_length,
)
from bertjax.tasks.best import Best, copy
from bertjax.tasks.encoding import require_segments
from bertjax.tasks.kinds import KINDS, TaskObjective, model_for
from bertjax.tasks.metrics import Scores, of_finite
from bertjax.tasks.shapes import Shape, Shapes
from bertjax.tasks.task import Split, Task, cut, name_of
from bertjax.tokenization import Tokenizer
from bertjax.training import sharding
from bertjax.training.optimizer import layerwise_decay_rules, make_optimizer, set_schedule, with_schedule_in_state
from bertjax.training.programs import batch_shapes
from bertjax.training.trainer import Phase, Trainer, TrainState

log = logging.getLogger(__name__)

GROUP = 16  # batches' worth of rows among which `group_by_length` looks for similar ones
# Settings in which the runs of one FineTuner may differ: neither features nor compiled steps depend on them.
PER_RUN = ("seed", "batch_size", "optimizer.learning_rate", "task.epochs", "task.warmup")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training: the parameters that scored best on the development split."""

    settings: Config
    params: Any
    scores: Scores
    value: float  # of the task's metric
    best_step: int
    steps: int  # trained, fewer than planned after early stopping
    history: tuple[tuple[int, float], ...]  # (step, value) of every evaluation
    seconds: float


class NoFiniteScore(ValueError):
    """Every evaluation of a run gave NaN, so nothing can be chosen as best."""


class FineTuner:
    """A task, its data as features, and the compiled steps of one model on one mesh."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        model_config: BertConfig,
        load_params: Callable[[Any, jax.Array], Any],
        settings: Config,
        execution: Execution = Execution(),  # noqa: B008  frozen
        mesh: Mesh | None = None,
    ):
        """load_params(model, key) gives the starting parameters; key draws the new head.

        Raises ValueError if rows could be longer than the model has positions.
        """
        recipe = settings.task
        if recipe.max_length > model_config.max_position_embeddings:
            raise ValueError(
                f"config.task.max_length={recipe.max_length} exceeds the {model_config.max_position_embeddings} "
                "positions of the model; shorten it, or train with more by --config.extend_positions=repeat"
            )
        if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} entries, the model "
                f"{model_config.vocab_size} rows: it is not this model's"
            )
        self.task, self.tokenizer, self.model_config, self.settings = task, tokenizer, model_config, settings
        self.mesh = sharding.make_mesh() if mesh is None else mesh
        self.model = model_for(task, model_config, execution, recipe.feature_layers, recipe.bilstm, recipe.head_init)
        self.load_params = load_params
        self._splits: dict[tuple[str, bool], tuple[Split, list[Features]]] = {}
        shards = sharding.batch_shards(self.mesh)
        self.shapes = Shapes(recipe, self.model.packs, model_config.max_position_embeddings, shards)

    # --- data

    def read(self, split: str) -> Split:
        """The records of a split. Raises ValueError naming a file that is not there or has no rows."""
        try:
            return self.task.rows_of(split)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} does not exist: the {split!r} split of {self.task.name} is "
                f"{self.task.splits[split]!r} in the folder that was named as its data"
                + "; config.task.options.files={'train': NAME, 'dev': NAME} names others" * (not self.task.published)
                + ". Where there is none, move some of the training rows to it" * (split == "dev")
            ) from None

    def data(self, split: str, training: bool = False) -> tuple[Split, list[Features]]:
        """The split and its features, read once."""
        if (split, training) not in self._splits:
            records = self.read(split)
            for note in records.notes:
                log.info("%s %s: %s", self.task.name, split, note)
            features = self.task.features(records, self.tokenizer, self.settings.task.max_length, training)
            if not features:
                raise ValueError(f"{self.task.name} {split}: no row is left: the tokenizer drops every word of it")
            if any(map(has_pair, features)):
                require_segments(self.model_config, self.tokenizer)
            self._splits[split, training] = records, features
        return self._splits[split, training]

    @property
    def used(self) -> dict[str, tuple[Split, list[Features]]]:
        """The splits that a training learns from and chooses its best step by."""
        return {"train": self.data("train", training=True), "dev": self.data("dev")}

    def training_shapes(self, batch_size: int) -> tuple[Shape, ...]:
        """The shapes of training batches, each of which takes the first that holds it."""
        lengths = list(map(row_length, self.data("train", training=True)[1]))
        return self.shapes.of_training(lengths, batch_size, self.settings.accumulation)

    # --- compiled parts

    @functools.cached_property
    def objective(self) -> TaskObjective:
        """What is learnt."""
        return TaskObjective(self.model, self.task.head, self._class_weights())

    @functools.cached_property
    def trainer(self) -> Trainer:
        """What compiles the steps, for all trainings: seeds travel with the batches, and schedules in the state."""
        s, recipe = self.settings, self.settings.task
        frozen = (*recipe.freeze, *(("^encoder/",) if recipe.feature_layers else ()))
        rules = [(pattern, 0.0) for pattern in frozen]
        if recipe.layer_decay != 1.0:
            rules += layerwise_decay_rules(self.model_config.num_hidden_layers, recipe.layer_decay)
        unit = make_optimizer(s.optimizer, 1.0, rules)
        optimizer = with_schedule_in_state(unit, s.optimizer.schedule, s.optimizer.decay_share)
        return Trainer(optimizer, self.mesh, seed=0, accumulation=s.accumulation, prng=s.execution.prng)

    def _class_weights(self) -> tuple[float, ...]:
        """One a class, in the head's order, or () for none. Raises ValueError for those that do not go with the
        task."""
        weights, labels = self.settings.task.class_weights, self.task.labels
        if not weights:
            return ()
        if not KINDS[self.task.head].class_weights:
            raise ValueError(f"config.task.class_weights do not apply to the head {self.task.head!r}")
        if weights == ("balanced",):
            classes = KINDS[self.task.head].gold_classes(self.data("train", training=True)[1])
            counts = np.bincount(classes, minlength=len(labels))  # 1 on average over the rows
            return tuple(float(len(classes) / (len(counts) * max(1, count))) for count in counts)
        given = {str(name_of(label)): weight for label, weight in weights}
        if unknown := [label for label in given if label not in labels]:
            raise ValueError(f"config.task.class_weights: {unknown} are not among the labels {cut(str(list(labels)))}")
        if not any(factors := tuple(float(given.get(label, 1.0)) for label in labels)):
            raise ValueError("config.task.class_weights are 0 for every label: there is nothing to learn")
        return factors

    @functools.cached_property
    def _predict(self) -> Any:
        """(params, packed batch) -> logits and vectors (or None) on every device, compiled once a bucket."""
        objective, with_vectors = TaskObjective(self.model, self.task.head), self.model.has_vectors

        def predict(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
            with rows_on(self.mesh):
                made = objective.outputs(params, objective.prepare(batch, None), with_vectors=with_vectors)
            return made if with_vectors else (made, None)

        return self.trainer.programs.wrap(
            "predict",
            jax.jit(
                predict,
                out_shardings=NamedSharding(self.mesh, PartitionSpec()),
                compiler_options=compiler_options(self.mesh.devices.flat[0].platform),
            ),
        )

    def compile_ahead(self, batch_size: int) -> None:
        """Starts to compile the steps of all buckets (programs.py); `run` waits for them.

        What is needed first comes first.
        """
        trainer, programs, pad_id = self.trainer, self.trainer.programs, self.tokenizer.pad_id
        state = trainer.abstract_state(self.objective)
        shortest = min(self.data("train", training=True)[1], key=row_length)
        for shape in reversed(self.training_shapes(batch_size)):
            batch = batch_of([shortest], [[0]], shape, pad_id)
            batch["run"] = np.zeros(shape.rows, np.int32)
            step, shapes = trainer.train_step(self.objective), batch_shapes(as_one_array(batch), self.mesh)
            programs.start(("train", shape), step, state, shapes)
        features = sorted(map(_inputs, self.data("dev")[1]), key=row_length)
        lengths = [row_length(row) for row in reversed(features)]
        for shape in dict.fromkeys(map(self.shapes.of_evaluation(lengths), lengths)):
            batch = as_one_array(batch_of(features[:1], [[0]], shape, pad_id))
            programs.start(("predict", shape), self._predict, state.params, batch_shapes(batch, self.mesh))
        programs.start("copy", copy, state.params)
        programs.lowered_first()

    def predict(
        self, params: Any, features: Sequence[Features], vectors: dict[int, np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Logits of every row in feature order, without padding; each row computed once.

        `vectors` gets those [H] of the rows that are its keys, where the kind of head has them.
        """
        if not features:
            return []
        pending, (index, count) = [], sharding.batch_slice(self.mesh)
        inputs, lengths = [_inputs(row) for row in features], [row_length(row) for row in features]
        shape_of = self.shapes.of_evaluation(lengths)
        for shape, rows, batch in evaluation_batches(inputs, shape_of, self.tokenizer.pad_id):
            batch = sharding.put_batch(as_one_array(process_slice(batch, index, count)), self.mesh)
            logits, read = self._predict(params, batch)
            pending.append((logits, shape, rows))
            if vectors and not vectors.keys().isdisjoint(i for row in rows for i in row):
                found = of_examples(np.asarray(read), shape, rows, lengths, by_token=False)
                vectors.update((i, vector) for i, vector in found if i in vectors)
        outputs: dict[int, np.ndarray] = {}
        for number, (logits, shape, rows) in enumerate(pending):
            self.trainer.between_batches(number, len(pending))
            outputs.update(of_examples(np.asarray(logits), shape, rows, lengths, KINDS[self.task.head].by_token))
        return [outputs[i] for i in range(len(features))]

    def evaluate(self, params: Any, split: str = "dev") -> Scores:
        """The task's scores of a split with labels."""
        records, features = self.data(split)
        records.require_labels("evaluation")
        outputs = self.predict(params, features)
        return of_finite(self.task.score(records, features, outputs), outputs)

    # --- trainings

    def training_batches(self, settings: Config) -> TrainingBatches:
        """This process's rows of the batches of a training."""
        _, features = self.data("train", training=True)
        index, count = sharding.batch_slice(self.mesh)
        return TrainingBatches(
            features,
            settings.batch_size,
            settings.seed,
            self.training_shapes(settings.batch_size),
            self.tokenizer.pad_id,
            GROUP if self.settings.task.group_by_length else 0,
            index,
            count,
        )

    def run(self, settings: Config, logbook: Any = None, checkpoints: Checkpoints | None = None) -> Trained:
        """Trains once, without a work directory, and returns the best parameters on 'dev'.

        Args:
          settings: see Training.
          checkpoints: an interrupted training goes on from them.
        """
        training, started = Training(self, settings), time.monotonic()
        for remark in training.remarks:
            log.warning(remark)
        state = training.start(checkpoints)
        step, total = int(state.step), training.phases[-1].until_step
        clock = Clock(total, checkpoints.metrics(step) if step else None, started)
        self.trainer.fit(
            state,
            training.phases,
            training.config,
            logbook=logbook or Logbook(None),
            checkpoints=checkpoints,
            evaluate=training.evaluate,
            clock=clock,
        )
        return training.outcome(clock)


class Training:
    """One training of a FineTuner.

    Args:
      settings: those of the FineTuner, but for PER_RUN.

    Attributes:
      config: those of Trainer.fit: an evaluation so many times an epoch, each of which is saved.
      remarks: what does not go with the data or this machine.
      best: the best evaluation so far, once `start` was called.
    """

    def __init__(self, tuner: FineTuner, settings: Config):
        sharding.check_batch(settings.batch_size, tuner.mesh, settings.accumulation)
        self.tuner, batches = tuner, tuner.training_batches(settings)
        self.steps_per_epoch = batches.steps_per_epoch
        every = max(1, batches.steps_per_epoch // settings.task.evaluations_per_epoch)
        own = {"checkpoint.every_steps": every, "checkpoint.metric": f"eval/{tuner.task.metric}"}
        self.config = settings.replace({"eval.every_steps": every, **own})
        steps = batches.steps_per_epoch * settings.task.epochs

        def stream(first_step: int) -> Iterator[Mapping[str, np.ndarray]]:
            for step in range(first_step, steps):
                batch = batches[step]
                yield as_one_array(batch | {"run": np.full(len(batch["weights"]), settings.seed, np.int32)})

        tokens = settings.batch_size * int(np.mean([row_length(row) for row in batches.features]))
        self.phases = [Phase(steps, tuner.objective, stream, tokens)]
        self.warmup_steps = int(settings.task.warmup * steps)
        self.remarks: list[str] = []
        recipe, evaluations = settings.task, -(-steps // every)
        # The first evaluation is the best so far, the last ends the run anyway.
        if recipe.early_stopping and evaluations < (needed := recipe.early_stopping + 2):
            self.remarks.append(
                f"task.early_stopping={recipe.early_stopping} can only shorten a run of {needed} evaluations or more, "
                f"and this one has {evaluations}: raise task.epochs or task.evaluations_per_epoch"
            )
        if not (recipe.freeze or recipe.feature_layers):  # what is frozen keeps little for a backward pass
            largest, ids = batches.shapes[-1], batches.features[0]["input_ids"]
            choices = len(ids) if isinstance(ids, list) else 1
            shape = largest.rows * choices, largest.length, 0
            remat, split = settings.execution.remat, (tuner.mesh, settings.accumulation)
            self.remarks += sharding.check_memory(tuner.model_config, shape, *split, remat)
        self.best: Best | None = None

    def start(self, checkpoints: Checkpoints | None = None) -> TrainState:
        """The newest state of the checkpoints; without one, weights to start from with a head drawn from the seed."""
        tuner, config, trainer = self.tuner, self.config, self.tuner.trainer
        resuming = checkpoints is not None and checkpoints.latest() is not None
        tuner.compile_ahead(config.batch_size)
        if not resuming:
            params = tuner.load_params(tuner.model, jax.random.key(config.seed, impl="threefry2x32"))
            state = trainer.init(tuner.objective, params)
        trainer.programs.wait()
        reach("parameters and compiling")
        self.best = Best(config.task.early_stopping, checkpoints)
        if resuming:
            target = trainer.abstract_state(tuner.objective)
            newest = checkpoints.intact()  # what is beyond it is damaged
            if (step := checkpoints.best(newest)) is not None:
                state, _ = checkpoints.restore(target, step)
                scores = tuner.evaluate(state.params)
                self.best.keep(step, scores, scores[tuner.task.metric], state.params)
            state, _ = checkpoints.restore(target, newest)
            self.best.load_history(int(state.step))
        return set_schedule(state, config.optimizer.learning_rate, self.warmup_steps, self.phases[-1].until_step)

    def evaluate(self, state: TrainState) -> Mapping[str, float]:
        """Scores on 'dev'; raises EarlyStop if the last ones were no better than those before."""
        scores = self.tuner.evaluate(state.params)
        reach("first score")
        return self.best.update(int(state.step), scores, scores[self.tuner.task.metric], state.params)

    def outcome(self, clock: Clock) -> Trained:
        """The best of the evaluations. Raises NoFiniteScore."""
        best = self.best
        if best.params is None:
            raise NoFiniteScore(
                "no evaluation gave a finite score, so nothing can be chosen as best: lower the learning rate, or "
                "lengthen the warm-up (config.task.warmup)"
            )
        history = tuple(best.history)
        return Trained(
            settings=self.config,
            params=best.params,
            scores=best.scores,
            value=best.value,
            best_step=best.step,
            steps=history[-1][0],
            history=history,
            seconds=clock.elapsed(),
        )


def _inputs(row: Features) -> Features:
    """What a prediction needs of a row: no gold."""
    return {name: row[name] for name in INPUTS}
