"""Settings of fine-tuning."""

import dataclasses
from typing import Any

from bertjax.config.pretraining import CODE
from bertjax.config.setting import AT_LEAST_0, AT_LEAST_1, SHARE, check, setting

PAPER_TASKS = "BERT paper A.3"


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """config.task: a fine-tuning task, its data and its loop."""

    name: str = setting(
        "",
        "fine-tuning task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax, all (of these), xnli, squad1.1, "
        "squad2.0, ner, tag, swag, or table (your own CSV, TSV, JSON lines)",
    )
    data: str = setting("", "directory of the task's files in their official layout, hf:NAME,CONFIG or tfds:NAME")
    options: dict[str, Any] = setting({}, "options of the task's class (tasks/*.py), such as columns of a table")
    metric: str = setting("", "what 'best on dev' means; '' = the task's own")
    max_length: int = setting(128, "length of a row", source=PAPER_TASKS, unit="tokens")
    epochs: int = setting(3, "passes over the training set", AT_LEAST_1, source=PAPER_TASKS, unit="epochs")
    warmup: float = setting(0.1, "share of the steps with linear warm-up", SHARE, source=CODE + " run_classifier.py")
    buckets: int = setting(0, "how many lengths rows are padded to; 0 = by the amount of data", AT_LEAST_0)
    group_by_length: bool = setting(False, "batches of rows of similar length: less padding, less random order")
    pack: str = setting(
        "evaluation",
        "where a row holds several examples in place of padding: none, evaluation (the same numbers to rounding), or "
        "all, training too (the same batches, other dropout)",
        ("none", "evaluation", "all"),
    )
    eval_batch_size: int = setting(128, "size of an evaluation batch", AT_LEAST_1, unit="rows")
    evaluations_per_epoch: int = setting(1, "evaluations on dev an epoch", AT_LEAST_1)
    early_stopping: int = setting(0, "stop after so many without a new best; 0 = never", AT_LEAST_0, unit="evaluations")
    layer_decay: float = setting(1.0, "factor on the learning rate for each layer further from the head", SHARE)
    freeze: tuple[str, ...] = setting((), "parameter paths (regex) that stay as they are")
    class_weights: tuple[Any, ...] = setting(
        (),
        "weights of labels in the loss, such as (('spam', 5.0),), others 1; ('balanced',): all labels count the same",
    )
    feature_layers: str = setting(
        "",
        "tagging over a frozen encoder: layers used as features (paper table 7); '' = train the encoder",
        ("", "embeddings", "second_to_last", "last", "weighted_sum_last_4", "concat_last_4", "weighted_sum_all"),
    )
    bilstm: int = setting(
        0,
        "layers of a BiLSTM, drawn at random, between encoder and head (paper section 5.1: the left-to-right "
        "model's); 0 = none",
        AT_LEAST_0,
    )
    head_init: str = setting(
        "truncated_normal",
        "a new head is drawn from: truncated_normal (the original's) or normal (that of transformers, 14 % wider)",
        ("truncated_normal", "normal"),
        source=CODE,
    )
    predict: tuple[str, ...] = setting(("dev",), "splits whose predictions and submission files are written")

    def __post_init__(self) -> None:
        """Raises ValueError for weights that do not say which label they are for, or are none."""
        weights = self.class_weights
        named = all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in weights)
        if weights != ("balanced",) and not named:
            raise ValueError(
                f"config.task.class_weights={weights!r} does not say which weight is for which label: write "
                "(('LABEL', WEIGHT), ...), or ('balanced',)"
            )
        for label, weight in weights if named else ():
            check(f"config.task.class_weights of {label!r}", weight, AT_LEAST_0)
