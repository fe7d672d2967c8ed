"""Builds the training steps of a configuration, without a corpus.

In: a configuration and the devices of a topology. Out: a `Stage` for each shape of batch that the run has (a phase of
pre-training; the longest rows of a fine-tuning task), which `bench` times and `plan` compiles. Objective, optimizer and
trainer are made by the same functions as in a run, so that neither can differ from what runs.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from bertjax.config import Config, phases
from bertjax.data.rows import pairs_per_row
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.size import PRETRAINING_HEADS, bytes_of, flops_per_row, parameter_count
from bertjax.pretraining import job as pretraining
from bertjax.pretraining.objective import make_objective
from bertjax.process import hardware
from bertjax.run.run import model_text
from bertjax.tasks.finetune import FineTuner
from bertjax.tasks.glue import GLUE
from bertjax.tasks.kinds import KINDS
from bertjax.tasks.pretrained import Pretrained
from bertjax.tasks.shapes import Shape
from bertjax.tokenization import Layout
from bertjax.training import sharding
from bertjax.training.trainer import Objective, Trainer

RELEASED_VOCABULARY = 30522  # entries of the released uncased models
# Training rows of the official data sets, for the length of a fine-tuning run.
TRAINING_ROWS = dict(cola=8551, sst2=67349, mrpc=3668, stsb=5749, qqp=363849, mnli=392702, qnli=104743, rte=2490)
TRAINING_ROWS |= {"wnli": 635, "squad1.1": 88524, "squad2.0": 131944, "swag": 73546, "ner": 14041}
# Fields of a batch, as gold_fields of tasks/kinds.py. B, C, P, T: rows, choices (or outputs), pairs (of a task:
# examples) of a row, tokens.
TEXT = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), "int32 B T")
CHOICES = dict.fromkeys(TEXT, "int32 B C T")
PAIRS = {"nsp_labels": "int32 B P", "nsp_weights": "float32 B P"}
PACKED = {"position_ids": "int32 B T", "cls_positions": "int32 B P"}


@dataclasses.dataclass(frozen=True)
class StageInfo:
    """A stage in numbers; bytes are those of one device, without the padding of layouts."""

    name: str
    steps: int | None  # in the whole run; None = not known without the data, or before the time is over
    tokens: int  # per step, padding included
    flops: float  # per step: the model's, forward and backward
    rows: int  # per step
    length: int  # tokens of a row
    mesh: Mapping[str, int]
    accumulation: int
    model: str
    execution: str
    remat: str
    parameters: int
    optimizer: int
    batch: int
    device_kind: str

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def rows_per_device(self) -> int:
        """Rows of a micro-batch on a device."""
        return self.rows // (self.mesh["data"] * self.mesh["fsdp"] * self.accumulation)

    @property
    def split(self) -> str:
        """Over which devices, and in how many micro-batches."""
        return " x ".join(f"{name} {n}" for name, n in self.mesh.items()) + f", accumulation {self.accumulation}"


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Steps of one shape: what to compile, and its numbers."""

    info: StageInfo
    objective: Objective
    trainer: Trainer
    batch: Mapping[str, jax.ShapeDtypeStruct]  # the global one
    vocabulary: int
    expected_bytes: float  # of a device, by arithmetic: less than the CPU's compiler takes, which fuses little

    def random_batch(self) -> dict[str, jax.Array]:
        """Full rows of random words, on the devices."""
        random = np.random.default_rng(0)
        batch = {}
        for name, array in self.batch.items():
            size = self.vocabulary if name == "input_ids" else 2
            batch[name] = random.integers(0, size, array.shape).astype(array.dtype)
            if name in ("attention_mask", "nsp_weights", "weights"):
                batch[name][...] = 1
        return sharding.put_batch(batch, self.trainer.mesh)

    def measure(self, executable: Any) -> float:
        """Seconds per step on this machine: the median after a step of warm-up, of five or as many as start in 60 s."""
        batch, state = self.random_batch(), self.trainer.init(self.objective)
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < 6 and sum(seconds) < 60):
            began = time.perf_counter()
            state, metrics = executable(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])


def stages(config: Config, devices: Sequence[Any]) -> list[Stage]:
    """The steps that a run of `config` on `devices` compiles.

    Raises:
      ValueError: mesh or batch do not fit the devices; names the setting and valid values.
    """
    size = vocabulary_size(config)
    model = BertConfig.of(config.model, size)
    mesh, _ = sharding.mesh_of(config.mesh, parameter_count(model), devices, hardware.device_bytes(devices[0]))
    execution = Execution.of(config.execution, devices[0].platform, config.mesh.tensor > 1, model)
    if config.job == "finetune":
        sharding.check_batch(config.batch_size, mesh, config.accumulation)
        return [_task_stage(config, model, execution, mesh)]
    pretraining.check_rows(config, mesh)
    tokenizer = SimpleNamespace(
        vocab_size=size,
        **{"pad_id": 0, "mask_id": 4},
        layout=Layout.bert(2, 3),
        replacement_ids=np.arange(5, size, dtype=np.int32),
        is_continuation=np.arange(size) % 2 == 1,
    )
    trainer, found, packed = pretraining.make_trainer(config, mesh), [], config.data.packed
    fields = TEXT | (PACKED if packed else {}) | PAIRS
    for number, (steps, length, rows, _) in enumerate(phases(config), 1):
        pairs = pairs_per_row(length, packed)
        objective = make_objective(config, model, execution, tokenizer, length, pairs)
        slots = length - 1 if model.is_decoder else objective.masking.slots
        sizes = {"B": rows, "T": length, "P": pairs}
        flops = rows * flops_per_row(model, length, slots, config.data.nsp)
        steps = None if config.budget_minutes else steps  # a scale
        found.append(_stage(f"phase {number}", steps, objective, trainer, fields, sizes, flops, slots))
    return found


def _task_stage(config: Config, model: BertConfig, execution: Execution, mesh: Any) -> Stage:
    task, rows = config.task, config.batch_size
    if config.init_from:
        source = Pretrained.of(config).source
        source.check_layers()
        model = source.config
    elif config.extend_positions:
        positions = max(task.max_length, model.max_position_embeddings)
        model = dataclasses.replace(model, max_position_embeddings=positions)
    head, num_labels = task_head(task.name, task.options)
    shape = SimpleNamespace(name=task.name, head=head, num_labels=num_labels, labels=tuple(map(str, range(num_labels))))
    tuner = FineTuner(shape, None, model, None, config, execution, mesh)
    choices = 4 if head == "multiple_choice" else 1
    fields, gold = CHOICES if choices > 1 else TEXT, {**KINDS[head].gold_fields, "weights": "float32 B"}
    batch = Shape(rows, task.max_length)
    if task.pack == "all":  # as if every example had max_length tokens
        batch = tuner.shapes.of_training([task.max_length], rows, config.accumulation)[-1]
        fields = TEXT | PACKED
        gold = {name: form if " T" in form else form.replace(" B", " B P") for name, form in gold.items()}
    fields = {**fields, **gold, "run": "int32 B"}
    sizes = {"B": batch.rows, "T": batch.length, "P": batch.slots, "C": max(choices, num_labels)}
    known = TRAINING_ROWS.get(task.name)
    steps = -(-known // rows) * task.epochs if known else None
    flops = rows * choices * flops_per_row(model, task.max_length, 0, nsp=False)
    return _stage(task.name, steps, tuner.objective, tuner.trainer, fields, sizes, flops)


def task_head(name: str, options: Mapping[str, Any]) -> tuple[str, int]:
    """Head and number of outputs of a task, without its data."""
    if name in GLUE:
        names = GLUE[name].names
        return "classification" if names else "regression", len(names) or 1
    tags = ("tagging", 9)  # of CoNLL-2003
    known = {"ner": tags, "tag": tags, "swag": ("multiple_choice", 1), "xnli": ("classification", 3)}
    return ("spans", 2) if name.startswith("squad") else known.get(name, (options.get("head", "classification"), 2))


def _stage(
    name: str,
    steps: int | None,
    objective: Any,
    trainer: Trainer,
    fields: Mapping[str, str],  # of the global batch
    sizes: Mapping[str, int],  # of the axes that `fields` name
    flops: float,
    predictions: int = 0,  # positions of a row that the MLM head sees
) -> Stage:
    mesh, state = trainer.mesh, trainer.abstract_state(objective)
    model, execution = objective.model.config, objective.model.execution
    batch = {}
    for field, (kind, *axes) in ((field, form.split()) for field, form in fields.items()):
        shape = tuple(sizes[axis] for axis in axes)
        batch[field] = jax.ShapeDtypeStruct(shape, kind, sharding=sharding.batch_sharding(mesh))

    def size(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    rows, length = sizes["B"], sizes["T"]
    info = StageInfo(
        name=name,
        steps=steps,
        tokens=batch["input_ids"].size,
        flops=flops,
        rows=rows,
        length=length,
        mesh=dict(mesh.shape),
        accumulation=trainer.accumulation,
        model=model_text(model, PRETRAINING_HEADS),
        execution=f"{execution.dtype}, layers {execution.layers}, remat {execution.remat}",
        remat=execution.remat,
        parameters=size(state.params),
        optimizer=size(state.opt_state),
        batch=size(batch),
        device_kind=mesh.devices.flat[0].device_kind,
    )
    split = mesh.size, mesh.shape["fsdp"], mesh.shape["tensor"], trainer.accumulation
    expected = bytes_of(model, (rows, length, predictions), split, execution.remat, fused=False)
    return Stage(info, objective, trainer, batch, model.vocab_size, expected)


def vocabulary_size(config: Config) -> int:
    """Entries that the vocabulary of a run will have, as far as its configuration says so."""
    demo = config.data.corpus == "docstrings"
    return config.model.vocab_size or (config.data.demo_vocab_size if demo else RELEASED_VOCABULARY)
