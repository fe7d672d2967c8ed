"""The kinds of heads: for each its network, its gold, its loss and what its logits mean.

A task names its kind by `head`; CONTRIBUTING.md says how to add one. Kinds for a text or a pair (`TextKind`) also make
gold from labels and predictions and scores from logits; for the others, whose predictions need the rows, the task does
that.

Losses are sums over rows divided by the global weights, so that accumulation and padding rows change nothing. They are
the original's and those of transformers' models of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model import heads
from bertjax.model.outputs import NEVER, tokens_of_each
from bertjax.model.presets import BertConfig, Execution
from bertjax.tasks import metrics
from bertjax.tasks.batches import PACKED, Features, fields_of
from bertjax.tasks.feature_tagger import BertFeatureTagger
from bertjax.tasks.task import Rows, Task, name_of, number_of
from bertjax.training import losses

Batch = Mapping[str, jax.Array]


class Kind:
    """What the trainer needs to know of a kind of head."""

    network: type[heads.TaskNetwork]
    # Gold of a batch by dtype and axes: B rows, T tokens, C outputs of the network. Packed rows have K values for B.
    gold_fields: Mapping[str, str]
    sized = True  # the network has `num_labels` outputs; False where their number is fixed
    by_token = False  # logits have an entry for each token
    classes: str | None = None  # the batch's field of gold classes, for accuracy
    class_weights = False  # whether classes can be weighted
    named = True  # False where the outputs are numbers, which have no names
    problem_type: str | None = None  # what transformers calls it in config.json

    def logits(self, outputs: Any, attention_mask: jax.Array) -> jax.Array:
        """The network's outputs as one float32 array [B, ...]."""
        return outputs

    def counted(self, batch: Batch) -> jax.Array:
        """1 where a row (or a token) has a loss, else 0."""
        return batch["weights"]

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """Loss of each entry of `counted`."""
        return losses.cross_entropy(logits, batch[self.classes])

    def gold_classes(self, rows: Rows) -> np.ndarray:
        """The gold classes of all rows (or words)."""
        return np.array([row[self.classes] for row in rows])


class Tagging(Kind):
    """A class for each word: gold `tags`, weighted by `tag_weights`; logits [B, T, tags]."""

    network = heads.BertForTokenClassification
    gold_fields = {"tags": "int32 B T", "tag_weights": "float32 B T"}
    by_token = True
    classes = "tags"
    class_weights = True

    def counted(self, batch: Batch) -> jax.Array:
        return batch["tag_weights"]

    def gold_classes(self, rows: Rows) -> np.ndarray:
        return np.concatenate([row["tags"][row["tag_weights"] > 0] for row in rows])


class Spans(Kind):
    """First and last token of an answer: logits [B, T, 2], padding masked out, whatever the bucket."""

    network = heads.BertForQuestionAnswering
    gold_fields = {"start_positions": "int32 B", "end_positions": "int32 B"}
    sized = False
    by_token = True

    def logits(self, outputs: Any, attention_mask: jax.Array) -> jax.Array:
        return jnp.where(attention_mask[..., None] > 0, jnp.stack(outputs, -1), NEVER)

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        if "cls_positions" in batch:  # packed: each among the tokens of its own example, [R, K, T, 2]
            own = tokens_of_each(batch["attention_mask"], batch["cls_positions"].shape[1])
            logits = jnp.where(own[..., None], logits[:, None], NEVER)
        start = losses.cross_entropy(logits[..., 0], batch["start_positions"])
        end = losses.cross_entropy(logits[..., 1], batch["end_positions"])
        return (start + end) / 2


class MultipleChoice(Kind):
    """The right one of C rows: gold `labels`; logits [B, C]."""

    network = heads.BertForMultipleChoice
    gold_fields = {"labels": "int32 B"}
    sized = False
    classes = "labels"


class TextKind(Kind):
    """What a text or a pair is mapped to. `labels` are the names of the head's outputs."""

    network = heads.BertForSequenceClassification
    metrics: tuple[str, ...]  # scores that can choose the best checkpoint, the default first

    def label(self, value: Any, where: str, column: str) -> Any:
        """The label in a cell of a table, or of JSON lines; None if there is none."""
        if isinstance(value, list | dict):
            raise ValueError(
                f"{where}: {column} {str(value)!r:.60} is not one label: set the "
                "option head='multilabel' for lists of them"
            )
        value = value.strip() if isinstance(value, str) else value
        if value is None or value == "":
            return None
        if not self.named:
            return number_of(value, where, column)
        value = name_of(value)
        return None if value == "-1" or value != value else str(value)  # pandas writes NaN for an empty cell

    def gold(self, label: Any, index: Callable[[str], int], outputs: int) -> Features:
        """The gold fields of a row, from a record's label; `index` gives a name's place."""
        raise NotImplementedError

    def predict(self, logits: np.ndarray) -> np.ndarray:
        """One prediction for each of the logits [N, C]."""
        raise NotImplementedError

    def readable(self, prediction: Any, labels: Sequence[str]) -> Any:
        """A prediction as a number, a name, or a list of names."""
        raise NotImplementedError

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """[..., C] of logits [..., C]."""
        return metrics.softmax(logits)

    def lean(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """[N]: log odds that each of the logits [N, C] gives to the prediction of `chosen` [C]; of a number, itself."""
        return np.where(chosen >= 0, logits, -logits).sum(1)

    def score(self, rows: Rows, logits: np.ndarray, labels: Sequence[str]) -> metrics.Scores:
        """The scores of metrics.py, with details by class."""
        raise NotImplementedError

    def compare(self, gold: Any, logits: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
        """Gold and prediction of one record as text, for a reader (task.Example)."""
        predicted = self.readable(self.predict(logits[None])[0], labels)
        score = float(self.probabilities(logits).max())
        return {"gold": str(gold), "predicted": str(predicted), "right": predicted == gold, "score": score}


class Classification(TextKind):
    """One class: gold `labels`; logits [B, C]."""

    gold_fields = {"labels": "int32 B"}
    classes = "labels"
    class_weights = True
    problem_type = "single_label_classification"
    metrics = ("accuracy", "matthews", "macro_f1", "f1")

    def gold(self, label: Any, index: Callable[[str], int], outputs: int) -> Features:
        return {"labels": index(label)}

    def predict(self, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(1)

    def readable(self, prediction: Any, labels: Sequence[str]) -> str:
        return labels[int(prediction)]

    def lean(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        best = chosen.argmax()
        return logits[:, best] - np.logaddexp.reduce(np.delete(logits, best, 1), axis=1)

    def score(self, rows: Rows, logits: np.ndarray, labels: Sequence[str]) -> metrics.Scores:
        gold, predicted = self.gold_classes(rows), self.predict(logits)
        details = metrics.by_class(gold, predicted, labels) | metrics.calibration(gold, self.probabilities(logits))
        return dataclasses.replace(metrics.classification_scores(gold, predicted), details=details)


class MultiLabel(TextKind):
    """Any number of classes: gold `label_set` [C] of 0 and 1; logits [B, C]."""

    gold_fields = {"label_set": "float32 B C"}
    problem_type = "multi_label_classification"
    metrics = ("micro_f1", "macro_f1", "accuracy")

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        softplus = jnp.logaddexp(0.0, logits)  # binary cross-entropy, stable for large logits
        return jnp.mean(softplus - logits * batch["label_set"], -1)

    def gold(self, label: Any, index: Callable[[str], int], outputs: int) -> Features:
        chosen = np.zeros(outputs, np.float32)
        chosen[[index(name) for name in label]] = 1.0
        return {"label_set": chosen}

    def gold_classes(self, rows: Rows) -> np.ndarray:
        """Each class once for every row that has it."""
        return np.nonzero([row["label_set"] for row in rows])[1]

    def predict(self, logits: np.ndarray) -> np.ndarray:
        return logits >= 0  # a probability of at least one half

    def readable(self, prediction: Any, labels: Sequence[str]) -> list[str]:
        return [name for name, on in zip(labels, prediction, strict=True) if on]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(-np.clip(logits, -500, 500)))

    def score(self, rows: Rows, logits: np.ndarray, labels: Sequence[str]) -> metrics.Scores:
        gold, predicted = np.array([row["label_set"] > 0 for row in rows]), self.predict(logits)
        shares = self.probabilities(logits).ravel()  # each label is a decision of its own
        decisions = metrics.calibration(gold.ravel().astype(int), np.stack([1 - shares, shares], -1))
        details = metrics.by_class(gold, predicted, labels) | decisions
        return dataclasses.replace(metrics.multilabel_scores(gold, predicted), details=details)

    def compare(self, gold: Any, logits: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
        predicted = self.readable(self.predict(logits[None])[0], labels)
        sure = np.abs(self.probabilities(logits) - 0.5).min() * 2
        names = {"gold": ", ".join(gold) or "none", "predicted": ", ".join(predicted) or "none"}
        return {**names, "right": set(predicted) == set(gold), "score": float(sure)}


class Regression(TextKind):
    """A number: gold `targets`; logits [B, 1]."""

    gold_fields = {"targets": "float32 B"}
    problem_type = "regression"
    metrics = ("pearson_spearman", "pearson", "spearman")
    named = False

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        return jnp.square(logits[..., 0] - batch["targets"])

    def gold(self, label: Any, index: Callable[[str], int], outputs: int) -> Features:
        return {"targets": float(label)}

    def predict(self, logits: np.ndarray) -> np.ndarray:
        return logits[:, 0]

    def readable(self, prediction: Any, labels: Sequence[str]) -> float:
        return float(prediction)

    def lean(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return logits[:, 0]

    def score(self, rows: Rows, logits: np.ndarray, labels: Sequence[str]) -> metrics.Scores:
        return metrics.regression_scores([row["targets"] for row in rows], self.predict(logits))

    def compare(self, gold: Any, logits: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
        value = float(logits[0])
        return {"gold": f"{gold:.2f}", "predicted": f"{value:.2f}", "right": None, "score": abs(value - gold)}


KINDS: dict[str, Kind] = {
    "classification": Classification(),
    "regression": Regression(),
    "multilabel": MultiLabel(),
    "tagging": Tagging(),
    "spans": Spans(),
    "multiple_choice": MultipleChoice(),
}


def model_for(
    task: Task,
    config: BertConfig,
    execution: Execution,
    feature_layers: str = "",
    bilstm: int = 0,
    head_init: str = "truncated_normal",
) -> Any:
    """The model of the task's head, with as many outputs as the task has.

    Args:
      feature_layers: for tagging, a choice of feature_tagger.py makes the paper's feature-based model over a frozen
        encoder.
      bilstm, head_init: layers of a BiLSTM between encoder and head, and how that is drawn (heads.TaskNetwork).
    """
    if not feature_layers:
        kind = KINDS[task.head]
        sizes = {"num_labels": task.num_labels} if kind.sized else {}
        return kind.network(config, execution, bilstm, head_init, **sizes)
    if task.head != "tagging":
        raise ValueError(f"feature_layers={feature_layers!r} is for tagging, not {task.head}")
    return BertFeatureTagger(config, execution, num_labels=task.num_labels, layers=feature_layers)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskObjective:
    """The trainer's Objective (training/trainer.py) for every kind of head.

    class_weights: one factor a class (classification) or tag (tagging), () = all 1; the loss is the weighted mean. A
    batch may carry `run` int32 [B], the run's seed: dropout derives from it as well, so that runs with different seeds
    share one compiled step.
    """

    model: Any
    head: str
    class_weights: tuple[float, ...] = ()

    @property
    def kind(self) -> Kind:
        return KINDS[self.head]

    def init(self, key: jax.Array) -> dict[str, Any]:
        return heads.shared_init(self.model, key)

    def prepare(self, batch: Batch, key: jax.Array | None) -> Batch:
        """The fields of a batch that travelled as one array."""
        return fields_of(batch)

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
        total = jnp.sum(self.kind.losses(logits, batch) * weights)
        sums = {"loss": (total, jnp.sum(weights))}
        if self.kind.classes is not None:
            counted = self.kind.counted(batch)
            correct = (jnp.argmax(logits, -1) == batch[self.kind.classes]).astype(jnp.float32)
            sums["accuracy"] = (jnp.sum(correct * counted), jnp.sum(counted))
        return losses.mean(total, denominators["loss"]), sums

    def outputs(
        self, params: Any, batch: Batch, dropout_key: jax.Array | None = None, with_vectors: bool = False
    ) -> Any:
        """float32 logits: [B, labels], [B, C] choices, [B, T, tags], or [B, T, 2] start and end.

        with_vectors: of a TextKind (logits, vectors [B, H] that the head reads). Packed rows give [R, K, ...] for
        [B, labels] and [B, H].
        """
        mask, more = batch["attention_mask"], {name: batch[name] for name in PACKED if name in batch}
        if with_vectors:
            more["with_vectors"] = True
        made = self.model.apply(
            {"params": params}, batch["input_ids"], mask, batch["token_type_ids"], dropout_key=dropout_key, **more
        )
        return made if with_vectors else self.kind.logits(made, mask)

    def _weights(self, batch: Batch) -> jax.Array:
        counted = self.kind.counted(batch)
        if not self.class_weights:
            return counted
        return counted * jnp.asarray(self.class_weights, jnp.float32)[batch[self.kind.classes]]
