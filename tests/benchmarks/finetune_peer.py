"""transformers' side of the fine-tuning benchmark, as its users run it: Trainer, bf16 on a GPU.

AutoModelFor..., AutoTokenizer, dynamic padding to the longest row of a batch, AdamW with the
library's defaults but for what `Work` says, an evaluation an epoch, nothing saved. Texts of
sentence tasks are tokenised by transformers; rows of tagging and question answering are bertjax's,
so that both sides see the same windows. Scores are computed by the same code on both sides.

    python -m tests.benchmarks.finetune_peer WORK    -> a JSON object a seed; the last has all
"""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.finetune_work import SKIPPED, Result, Work

_GOLD = {
    "labels": "labels",
    "targets": "labels",
    "start_positions": "start_positions",
    "end_positions": "end_positions",
}


def make_task(work: Work) -> Any:
    """The task, without importing jax."""
    if work.task.startswith("squad"):
        from bertjax.tasks.squad import SquadTask

        return SquadTask(work.data, work.task.removeprefix("squad"), **work.options)
    if work.task in ("ner", "tag"):
        from bertjax.tasks.ner import NerTask

        return NerTask(work.data, name=work.task, entities=work.task == "ner", **work.options)
    from bertjax.tasks.glue import GlueTask

    return GlueTask(work.task, work.data, **work.options)


def rows_of(task: Any, split: str, work: Work, tokenizer: Any) -> tuple[Any, list, list[dict]]:
    """(records, bertjax's features for scoring, rows for torch) of a split."""
    records = task.read(split)
    training = split == "train"
    if task.head in ("tagging", "spans"):
        from bertjax.tokenization import load_tokenizer

        ours = load_tokenizer(work.checkpoint)
        features = task.features(records, ours, work.max_length, training)
        rows = [_torch_row(row) for row in features]
        if task.head == "spans" and not training:  # Trainer scores only what has labels
            rows = [row | {"start_positions": 0, "end_positions": 0} for row in rows]
        return records, features, rows
    from bertjax.tasks.task import label_places

    first = [record.text_a for record in records.records]
    pairs = records.records[0].text_b is not None
    second = [record.text_b for record in records.records] if pairs else None
    encoded = tokenizer(first, second, truncation=True, max_length=work.max_length)
    place = functools.partial(label_places(task.labels), what="label")
    features = [task.kind_of_head.gold(record.label, place, task.num_labels) for record in records.records]
    names = [name for name in tokenizer.model_input_names if name in encoded]
    columns = [encoded[name] for name in names]
    rows = [
        dict(zip(names, values, strict=True)) | {_GOLD[k]: v for k, v in gold.items()}
        for *values, gold in zip(*columns, features, strict=True)
    ]
    return records, features, rows


def _torch_row(row: dict[str, Any]) -> dict[str, Any]:
    made = {name: row[name].tolist() for name in ("input_ids", "token_type_ids")}
    made["attention_mask"] = [1] * len(made["input_ids"])
    if "tags" in row:
        made["labels"] = np.where(row["tag_weights"] > 0, row["tags"], -100).tolist()
    return made | {_GOLD[name]: row[name] for name in _GOLD if name in row and name != "tags"}


def make_model(task: Any, checkpoint: str) -> Any:
    """The model with a new head, in float32 as bertjax's, in whatever type the checkpoint is stored."""
    import torch
    import transformers

    if task.head == "spans":
        return transformers.AutoModelForQuestionAnswering.from_pretrained(checkpoint, dtype=torch.float32)
    kind = transformers.AutoModelForSequenceClassification
    if task.head == "tagging":
        kind = transformers.AutoModelForTokenClassification
    problem = (
        {}
        if task.head == "tagging"
        else {"problem_type": {"regression": "regression"}.get(task.head, "single_label_classification")}
    )
    return kind.from_pretrained(checkpoint, num_labels=task.num_labels, dtype=torch.float32, **problem)


def make_collator(task: Any, tokenizer: Any) -> Any:
    import transformers

    if task.head == "tagging":
        return transformers.DataCollatorForTokenClassification(tokenizer)
    return transformers.DataCollatorWithPadding(tokenizer)


def outputs_of(task: Any, predictions: Any, rows: Sequence[dict]) -> list[np.ndarray]:
    """The logits of each row without padding, as the task's `score` wants them."""
    if task.head == "spans":
        start, end = predictions[0], predictions[1]
        return [np.stack([s, e], -1)[: len(row["input_ids"])] for s, e, row in zip(start, end, rows, strict=True)]
    if task.head == "tagging":
        return [p[: len(row["input_ids"])] for p, row in zip(predictions, rows, strict=True)]
    return list(predictions)


class _Clock:
    """Seconds of training steps, evaluation and the first steps left out."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.first_step, self.steps, self.seconds = cuda, 0.0, 0, 0.0
        self._from: float | None = None
        self._counted = 0

    def now(self) -> float:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return time.time()

    def step(self, number: int) -> None:
        """A step has been launched."""
        self.first_step = self.first_step or self.now()
        if number == SKIPPED:
            self.resume()
        elif self._from is not None:
            self._counted += 1

    def pause(self) -> None:
        if self._from is not None:
            self.seconds += self.now() - self._from
            self.steps += self._counted
            self._from, self._counted = None, 0

    def resume(self) -> None:
        self._from = self.now()


def train(
    work: Work,
    seed: int,
    model: Any,
    rows: list,
    dev_rows: list,
    collator: Any,
    clock: _Clock,
    evaluated: Any,
    cuda: bool,
) -> int:
    """Runs transformers' Trainer; `evaluated` gets the predictions of each epoch. Returns steps."""
    import transformers

    class Timing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.step(state.global_step)

        def on_epoch_begin(self, args, state, control, **kwargs):
            if state.global_step > SKIPPED:
                clock.resume()

        def on_epoch_end(self, args, state, control, **kwargs):
            clock.pause()

    def scores(prediction):
        return evaluated(prediction.predictions)

    steps = -(-len(rows) // work.batch_size) * work.epochs
    wanted = dict(
        per_device_train_batch_size=work.batch_size,
        per_device_eval_batch_size=128,
        learning_rate=work.learning_rate,
        num_train_epochs=work.epochs,
        seed=seed,
        warmup_steps=int(work.warmup * steps),
        weight_decay=work.weight_decay,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        lr_scheduler_type="linear",
        bf16=cuda and work.dtype != "float32",
        use_cpu=not cuda,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="steps",
        logging_steps=500,
    )
    if work.group_by_length:
        known = inspect.signature(transformers.TrainingArguments).parameters
        wanted |= (
            {"group_by_length": True} if "group_by_length" in known else {"train_sampling_strategy": "group_by_length"}
        )
    with tempfile.TemporaryDirectory() as directory:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(output_dir=directory, **wanted),
            train_dataset=rows,
            eval_dataset=dev_rows,
            data_collator=collator,
            compute_metrics=scores,
            callbacks=[Timing()],
        )
        trainer.train()
        return trainer.state.global_step


def measure(work: Work) -> None:
    """Fine-tunes with every seed, times it, and prints what is known after each."""
    import accelerate
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    tokenizer = transformers.AutoTokenizer.from_pretrained(work.checkpoint)
    task = work.limit(make_task(work))
    _, _, rows = rows_of(task, "train", work, tokenizer)
    dev, dev_features, dev_rows = rows_of(task, "dev", work, tokenizer)
    collator = make_collator(task, tokenizer)
    full = len(rows) / (-(-len(rows) // work.batch_size) * work.batch_size)
    best, last, clocks, ends, steps = [], [], [], [], 0
    for seed in range(work.first_seed, work.seeds):
        transformers.set_seed(seed)
        values: list[float] = []

        def evaluated(predictions: Any, values: list[float] = values) -> dict[str, float]:
            outputs = outputs_of(task, predictions, dev_rows)
            values.append(task.score(dev, dev_features, outputs)[task.metric])
            print(f"seed {seed}: {task.metric} {values[-1]:.4f}", file=sys.stderr)  # noqa: B023
            return {task.metric: values[-1]}

        clocks.append(_Clock(cuda))
        model = make_model(task, work.checkpoint)
        steps = train(work, seed, model, rows, dev_rows, collator, clocks[-1], evaluated, cuda)
        ends.append(time.time())
        best.append(max(values))
        last.append(values[-1])
        Result(
            metric=task.metric,
            best=best,
            last=last,
            ready_seconds=clocks[0].first_step - work.started,
            score_seconds=ends[0] - work.started,
            all_seconds=ends[-1] - work.started,
            compile_seconds=0.0,
            compilations=0,
            speeds=[full * work.batch_size * c.steps / c.seconds for c in clocks if c.steps],
            rows=len(rows),
            steps=steps,
            device=torch.cuda.get_device_name() if cuda else "cpu",
            versions=f"transformers {transformers.__version__}, torch {torch.__version__}, "
            f"accelerate {accelerate.__version__}",
        ).print()


if __name__ == "__main__":
    measure(Work.parse(sys.argv[1]))
