"""What a task teaches the trainer: a model with a head, its loss, and its outputs.

In: batches of task.collate. Out: the loss as a sum over rows divided by the global weights, so that
accumulation and padding rows change nothing, and the logits that tasks turn into predictions.
The losses are the original's and those of transformers' models of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.heads import (
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    shared_init,
)
from bertjax.model.presets import BertConfig, Execution
from bertjax.tasks.feature_tagger import LAYER_CHOICES, BertFeatureTagger
from bertjax.tasks.task import Features
from bertjax.tasks.transfer import unpack
from bertjax.training import losses

Batch = Mapping[str, jax.Array]


def model_for(
    task: Any,
    config: BertConfig,
    execution: Execution,
    feature_layers: str = "",
    bilstm: int = 0,
    head_init: str = "truncated_normal",
) -> Any:
    """The model of the task's head, with as many outputs as the task has.

    Args:
      feature_layers: for tagging, a choice of feature_tagger.py makes the paper's feature-based
        model over a frozen encoder.
      bilstm, head_init: layers of a BiLSTM between encoder and head, and how that is drawn
        (heads.TaskNetwork).
    """
    if feature_layers:
        if bilstm:
            raise ValueError(f"feature_layers={feature_layers!r} brings a BiLSTM: set bilstm=0")
        if head_init != "truncated_normal":
            raise ValueError(f"feature_layers={feature_layers!r} draws its own head: head_init has no effect")
        if task.head != "tagging":
            raise ValueError(f"feature_layers={feature_layers!r} is for tagging, not {task.head}")
        if feature_layers not in LAYER_CHOICES:
            raise ValueError(f"feature_layers={feature_layers!r}; one of {', '.join(LAYER_CHOICES)}")
        return BertFeatureTagger(config, execution, num_labels=task.outputs, layers=feature_layers)
    common = (config, execution, bilstm, head_init)
    if task.head == "tagging":
        return BertForTokenClassification(*common, num_labels=task.outputs)
    if task.head == "spans":
        return BertForQuestionAnswering(*common)
    if task.head == "multiple_choice":
        return BertForMultipleChoice(*common)
    if task.head in ("classification", "regression", "multilabel"):
        return BertForSequenceClassification(*common, num_labels=task.outputs)
    raise ValueError(f"unknown head {task.head!r} of task {task.name!r}")


def balanced_class_weights(labels: Sequence[int], classes: int) -> tuple[float, ...]:
    """Weights inversely proportional to the frequency of each class, 1 on average over the rows."""
    counts = np.bincount(np.asarray(labels), minlength=classes)
    return tuple(float(len(labels) / (classes * max(1, count))) for count in counts)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskObjective:
    """The trainer's Objective (training/trainer.py) for every head.

    class_weights: one factor a class (classification) or tag (tagging), () = all 1; the loss is
    the weighted mean. A batch may carry `run` int32 [B], the run's seed: dropout derives from it
    as well, so that runs with different seeds share one compiled step.
    """

    model: Any
    head: str
    class_weights: tuple[float, ...] = ()

    def init(self, key: jax.Array) -> dict[str, Any]:
        return shared_init(self.model, key)

    def prepare(self, batch: Batch, key: jax.Array | None) -> Batch:
        """The fields of a batch that travelled as one array (see transfer.py)."""
        return unpack(batch)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Sum of the weights of what is averaged: rows, or words when tagging."""
        return {"loss": jnp.sum(self._weights(batch))}

    def loss(
        self, params: Any, batch: Batch, denominators: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        if dropout_key is not None and "run" in batch:
            dropout_key = jax.random.fold_in(dropout_key, batch["run"][0])
        logits = self.outputs(params, batch, dropout_key)
        weights = self._weights(batch)
        total = jnp.sum(self._losses(logits, batch) * weights)
        sums = {"loss": (total, jnp.sum(weights))}
        if self.head in ("classification", "multiple_choice", "tagging"):
            gold, counted = self._gold(batch)
            correct = (jnp.argmax(logits, -1) == gold).astype(jnp.float32)
            sums["accuracy"] = (jnp.sum(correct * counted), jnp.sum(counted))
        return losses.mean(total, denominators["loss"]), sums

    def outputs(self, params: Any, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """float32 logits: [B, labels], [B, C] choices, [B, T, tags], or [B, T, 2] start and end.

        Padding positions of spans are masked out, so that the result does not depend on the bucket.
        """
        mask = batch["attention_mask"]
        logits = self.model.apply(
            {"params": params}, batch["input_ids"], mask, batch["token_type_ids"], dropout_key=dropout_key
        )
        if self.head == "spans":
            return jnp.where(mask[..., None] > 0, jnp.stack(logits, -1), -1e9)
        return logits

    def _gold(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(labels, weight 1 or 0) of the rows, or of the words when tagging."""
        if self.head == "tagging":
            return batch["tags"], batch["tag_weights"] * batch["weights"][:, None]
        return batch["labels"], batch["weights"]

    def _weights(self, batch: Batch) -> jax.Array:
        if self.head not in ("classification", "tagging"):
            return batch["weights"]
        gold, counted = self._gold(batch)
        if not self.class_weights:
            return counted
        return counted * jnp.asarray(self.class_weights, jnp.float32)[gold]

    def _losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """Loss of each row [B] (each token [B, T] when tagging), unweighted."""
        if self.head == "regression":
            return jnp.square(logits[:, 0] - batch["targets"])
        if self.head == "multilabel":
            wanted = batch["label_set"]  # binary cross-entropy, stable for large logits
            softplus = jnp.logaddexp(0.0, logits)
            return jnp.mean(softplus - logits * wanted, -1)
        if self.head == "spans":
            start = losses.cross_entropy(logits[..., 0], batch["start_positions"])
            end = losses.cross_entropy(logits[..., 1], batch["end_positions"])
            return (start + end) / 2
        return losses.cross_entropy(logits, self._gold(batch)[0])


def class_counts(features: Sequence[Features], head: str) -> np.ndarray:
    """All gold classes of the rows, one entry a row or tagged word, for class weights."""
    if head == "tagging":
        return np.concatenate([row["tags"][row["tag_weights"] > 0] for row in features])
    return np.array([row["labels"] for row in features])
