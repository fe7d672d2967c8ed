"""Builds the training steps of a configuration, without a corpus.

In: a configuration and the devices of a topology. Out: a `Stage` for each shape of batch that the
run has (a phase of pre-training; the longest rows of a fine-tuning task). Objective, optimizer and
trainer are made by the same functions as in a run, so that a plan cannot drift from what runs.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bertjax.config import Config
from bertjax.data.rows import default_pairs_per_row
from bertjax.model.presets import BertConfig, Execution, flops_per_row, parameter_count
from bertjax.pretraining import job as pretraining
from bertjax.pretraining.objective import make_objective
from bertjax.process import hardware
from bertjax.tasks.finetune import FineTuner
from bertjax.tasks.glue import GLUE
from bertjax.tools.plan import candidates
from bertjax.tools.plan.compilation import StageInfo
from bertjax.tools.plan.vocabulary import Vocabulary, vocabulary_size
from bertjax.training import sharding
from bertjax.training.trainer import Objective, Trainer

# Training rows of the official data sets, for the length of a fine-tuning run.
_TRAINING_ROWS = (
    "cola 8551, sst2 67349, mrpc 3668, stsb 5749, qqp 363849, mnli 392702, qnli 104743, rte 2490, wnli 635, "
    "squad1.1 88524, squad2.0 131944, swag 73546, ner 14041"
)
TRAINING_ROWS = {name: int(rows) for name, rows in map(str.split, _TRAINING_ROWS.split(", "))}


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Steps of one shape: what to compile and how often it runs."""

    name: str
    steps: int | None  # in the whole run; None = not known without the data
    objective: Objective
    trainer: Trainer
    batch: Mapping[str, tuple[tuple[int, ...], type]]  # name -> (shape of the global batch, type)
    flops: float  # a step: the model's, forward and backward
    config: BertConfig
    execution: Execution
    predictions: int = 0  # positions of a row that the MLM head sees

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.batch["input_ids"][0][0]

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.batch["input_ids"][0][-1]

    @property
    def tokens(self) -> int:
        """Tokens of a step, padding included."""
        return math.prod(self.batch["input_ids"][0])

    def expected_bytes(self) -> float:
        """Of a device, by arithmetic: less than the CPU's compiler takes, which fuses little."""
        mesh = self.trainer.mesh
        split = mesh.size, mesh.shape["fsdp"], mesh.shape["tensor"], self.execution.remat, self.trainer.accumulation
        return candidates.bytes_of(self.config, self.rows, self.length, self.predictions, *split, fused=False)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        where = sharding.batch_sharding(self.trainer.mesh)
        return {name: jax.ShapeDtypeStruct(shape, kind, sharding=where) for name, (shape, kind) in self.batch.items()}

    def random_batch(self) -> dict[str, jax.Array]:
        """Full rows of random words, on the devices."""
        random = np.random.default_rng(0)
        batch = {}
        for name, (shape, kind) in self.batch.items():
            size = self.config.vocab_size if name == "input_ids" else 2
            batch[name] = random.integers(0, size, shape).astype(kind)
            if name in ("attention_mask", "nsp_weights", "weights"):
                batch[name][...] = 1
        return sharding.put_batch(batch, self.trainer.mesh)


@dataclasses.dataclass(frozen=True)
class TaskShape:
    """Stands in for a fine-tuning task where only its head counts."""

    name: str
    head: str
    outputs: int

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.outputs)))


def stages(config: Config, devices: Sequence[Any]) -> list[Stage]:
    """The steps that a run of `config` on `devices` compiles.

    Raises:
      ValueError: mesh or batch do not fit the devices; names the setting and valid values.
    """
    vocabulary = Vocabulary(vocabulary_size(config))
    model = BertConfig.of(config.model, vocabulary.vocab_size)
    mesh, _ = sharding.mesh_of(config.mesh, parameter_count(model), devices, hardware.device_bytes(devices[0]))
    sharding.check_batch(config.batch_size, mesh, config.accumulation)
    execution = Execution.of(config.execution, devices[0].platform, config.mesh.tensor > 1)
    if config.job == "finetune":
        return [_task_stage(config, model, execution, mesh)]
    trainer, found = pretraining.make_trainer(config, mesh), []
    for number, (steps, length) in enumerate(config.phases, 1):
        rows, packed = config.batch_size, config.data.packed
        pairs = default_pairs_per_row(length) if packed else 1
        objective = make_objective(config, model, execution, vocabulary, length, pairs)
        batch = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), ((rows, length), np.int32))
        if packed:
            batch |= {"position_ids": ((rows, length), np.int32), "cls_positions": ((rows, pairs), np.int32)}
        batch |= {"nsp_labels": ((rows, pairs), np.int32), "nsp_weights": ((rows, pairs), np.float32)}
        slots = objective.masking.slots
        flops = rows * flops_per_row(model, length, slots, config.data.nsp)
        found.append(Stage(f"phase {number}", steps, objective, trainer, batch, flops, model, execution, slots))
    return found


def _task_stage(config: Config, model: BertConfig, execution: Execution, mesh: Any) -> Stage:
    task, rows = config.task, config.batch_size
    if config.init_from:
        from bertjax.interop import open_source

        source = open_source(config.init_from)
        _ = source.headers  # whose sizes are compared with those of the configuration
        model = source.config
    shape = task_shape(task.name, task.options)
    tuner = FineTuner(shape, None, model, None, config, execution, mesh)
    objective, trainer = tuner.objective, tuner.trainer
    words = (rows, *((4,) if shape.head == "multiple_choice" else ()), task.max_length)
    batch = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), (words, np.int32))
    batch |= {
        "classification": {"labels": ((rows,), np.int32)},
        "multiple_choice": {"labels": ((rows,), np.int32)},
        "regression": {"targets": ((rows,), np.float32)},
        "multilabel": {"label_set": ((rows, shape.outputs), np.float32)},
        "tagging": {"tags": (words, np.int32), "tag_weights": (words, np.float32)},
        "spans": {name: ((rows,), np.int32) for name in ("start_positions", "end_positions")},
    }[shape.head]
    batch |= {"weights": ((rows,), np.float32), "run": ((rows,), np.int32)}
    known = TRAINING_ROWS.get(task.name)
    steps = -(-known // rows) * task.epochs if known else None
    flops = math.prod(words[:-1]) * flops_per_row(model, task.max_length, 0, nsp=False)
    return Stage(task.name, steps, objective, trainer, batch, flops, model, execution)


def task_shape(name: str, options: Mapping[str, Any]) -> TaskShape:
    """Head and number of outputs of a task, without its data."""
    if name in GLUE:
        names = GLUE[name].names
        return TaskShape(name, "classification" if names else "regression", len(names) or 1)
    if name.startswith("squad"):
        return TaskShape(name, "spans", 2)
    if name in ("ner", "tag"):
        return TaskShape(name, "tagging", 9)  # CoNLL-2003 has 9 tags
    if name == "swag":
        return TaskShape(name, "multiple_choice", 1)
    return TaskShape(name, options.get("head", "classification"), 2)


def measure(stage: Stage, executable: Any, steps: int = 5, budget_s: float = 60) -> float:
    """Seconds of a step on this machine: the median after one step of warm-up, of `steps` or as many
    as start within `budget_s`."""
    batch, state = stage.random_batch(), stage.trainer.init(stage.objective)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= steps and sum(seconds) < budget_s):
        began = time.perf_counter()
        state, metrics = executable(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def describe(stage: Stage) -> StageInfo:
    """The numbers of a stage that its cost depends on."""
    mesh, state = stage.trainer.mesh, stage.trainer.abstract_state(stage.objective)
    c, e = stage.config, stage.execution

    def size(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    return StageInfo(
        stage.name,
        stage.steps,
        stage.tokens,
        stage.flops,
        stage.rows,
        stage.length,
        mesh=dict(mesh.shape),
        accumulation=stage.trainer.accumulation,
        model=f"L={c.num_hidden_layers} H={c.hidden_size} A={c.num_attention_heads} F={c.intermediate_size} "
        f"V={c.vocab_size:,}, {parameter_count(c) / 1e6:.1f} M parameters",
        execution=f"{e.dtype}, layers {e.layers}, remat {e.remat}",
        remat=e.remat,
        parameters=size(state.params),
        optimizer=size(state.opt_state),
        batch=size(stage.abstract_batch()),
        device_kind=mesh.devices.flat[0].device_kind,
    )
