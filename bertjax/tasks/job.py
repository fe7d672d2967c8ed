"""The fine-tuning jobs of the command line: from a config to a run, a suite entry or an evaluation.

In: a Config, of which `task` says what is learnt. Out: in the workdir metrics.jsonl, result.json, predictions (and
submission files), and `model/` in Hugging Face's layout with the label names in config.json.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from bertjax.config import Config
from bertjax.formats.checkpoint import resolve_directory
from bertjax.formats.files import write_json
from bertjax.interop import load_pretrained_params
from bertjax.interop.loading import stored_labels
from bertjax.interop.names import heads_in
from bertjax.log.logbook import Logbook, counted
from bertjax.model.presets import Execution
from bertjax.model.size import parameter_count
from bertjax.process import hardware
from bertjax.process.agreement import require_same
from bertjax.process.clock import Clock
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.run import Line, check_export, run
from bertjax.run.workdir import goes_on_with, step_to_resume, write_records
from bertjax.tasks.batches import row_length
from bertjax.tasks.finetune import FineTuner, Training
from bertjax.tasks.kinds import KINDS
from bertjax.tasks.make import make_task, remembered
from bertjax.tasks.metrics import of_finite
from bertjax.tasks.pretrained import Pretrained
from bertjax.tasks.results import result_json, save_model, summary_line, write_predictions
from bertjax.tasks.task import Rows, Task, adopt_labels, respelled
from bertjax.tasks.text_task import TextTask
from bertjax.training import sharding
from bertjax.training.trainer import TrainState

log = logging.getLogger(__name__)
__all__ = ["TaskJob", "evaluate", "prepare", "prepare_run", "prepare_tuner", "run"]


@dataclasses.dataclass(eq=False)
class TaskJob:
    """A fine-tuning run whose data and settings have been read and checked; see run.Job."""

    workdir: epath.Path
    resumed_from: int | None
    tuner: FineTuner
    training: Training
    predict: tuple[str, ...]  # splits for which predictions (and submission files) are written
    made_of: Mapping[str, str]  # see workdir.FACTS
    mesh_reason: str = ""
    heads = ("pooler",)
    mode = "max"

    def __post_init__(self) -> None:
        self.config, self.phases = self.training.config, self.training.phases
        self.trainer, self.model_config = self.tuner.trainer, self.tuner.model_config
        self.execution = self.tuner.model.execution

    def compile_ahead(self) -> None:
        if self.resumed_from is None:
            self.tuner.load_params.read_ahead()  # not before: a suite prepares all its jobs first
        self.tuner.compile_ahead(self.config.batch_size)

    def start(self, checkpoints: Checkpoints) -> TrainState:
        return self.training.start(checkpoints)

    def record(self, directory: pathlib.Path) -> None:
        write_records(directory, self.config, self.made_of)

    def evaluate(self, state: TrainState, place: int) -> Mapping[str, float]:
        return self.training.evaluate(state)

    def facts(self) -> list[Line]:
        tuner, config, task = self.tuner, self.config, self.tuner.task
        splits = tuner.used
        lines = [
            ("task", f"{task.name} ({task.head.replace('_', ' ')}), best on dev by {task.metric}"),
            ("rows", ", ".join(f"{name} {len(features):,}" for name, (_, features) in splits.items())),
        ]
        if task.labels:
            lines.append(("labels", label_shares(task, splits["train"][1])))
        for name, (split, _) in splits.items():
            lines += [("note", f"{name}: {note}") for note in split.notes]
        lines += [("note", remark) for remark in self.training.remarks]
        if task.dropped:
            lines.append(("note", f"{task.dropped:,} training answers are not in their passage: left out"))
        limit = config.task.max_length
        full = np.mean([row_length(row) == limit for row in splits["train"][1]])
        if isinstance(task, TextTask) and full > 0.01:
            lines.append(("note", f"{full:.0%} of training rows fill task.max_length={limit}: longer texts are cut"))
        steps = (
            f"{self.phases[-1].until_step:,}: {counted(config.task.epochs, 'epoch')} of "
            f"{self.training.steps_per_epoch:,} x {config.batch_size} rows, learning rate "
            f"{config.optimizer.learning_rate:g}, {self.training.warmup_steps:,} of warm-up, seed {config.seed}"
        )
        shapes = tuner.training_shapes(config.batch_size)
        lengths = f"padded to {', '.join(str(shape.length) for shape in shapes)} tokens"
        if shapes[0].slots > 1:
            lengths = f"packed into {' or '.join(f'{shape.rows} x {shape.length}' for shape in shapes)} tokens"
        return [*lines, ("lengths", lengths), ("steps", steps)]

    def finish(self, state: TrainState, logbook: Logbook, clock: Clock) -> dict[str, Any]:
        """Writes predictions, model and result.json, whose content it returns."""
        tuner, directory = self.tuner, logbook.directory
        done = self.training.outcome(clock)
        logbook.message(summary_line(tuner.task, done))
        if tuner.task.name == "squad2.0":
            tuner.task.null_threshold = float(done.scores.details["null_threshold"])
        result = result_json(tuner, done, self.config.init_from)
        if jax.process_index() == 0:
            write_json(directory / "result.json", result, allow_nan=False)
        files = write_predictions(tuner, done.params, self.predict, directory)
        save_model(tuner, done.params, directory / "model", result)
        written = [("predictions", path.name) for path in files]
        written += [("model", "model")] * (tuner.model.storable is tuner.model)
        logbook.message("\n".join(f"{what}: {self.workdir / name}" for what, name in written))
        return result


def label_shares(task: Task, rows: Rows) -> str:
    """'not_equivalent 32 %, equivalent 68 %' of the training rows; the most frequent ones where there are many."""
    kind = KINDS[task.head]
    several = "label_set" in kind.gold_fields
    if not (kind.class_weights or several):
        return ", ".join(task.labels)
    counts = np.bincount(kind.gold_classes(rows), minlength=len(task.labels))
    order = range(len(counts)) if len(counts) <= 5 else np.argsort(-counts, kind="stable")[:5]
    total = len(rows) if several else counts.sum()
    shares = [f"{task.labels[i]} {100 * counts[i] / total:.0f} %" for i in order]
    more = len(counts) - len(shares)
    return ", ".join(shares) + (f" and {more} more" if more else "") + " (rows may have several)" * several


def prepare_tuner(
    task: Any,
    init_from: str | Pretrained,
    settings: Config,
    *,
    execution: Execution = Execution(),  # noqa: B008  frozen
    mesh: Any = None,
    read: bool = True,
) -> FineTuner:
    """The task with its data read and the weights to start from, before anything compiles.

    Args:
      settings: config.task.options are those that the task was made with.
      read: False leaves out the data, and what is checked against them.

    Raises ValueError or LoadError naming the setting, or file and line, and the remedy.
    """
    if "train" not in task.splits:
        raise ValueError(
            f"task {task.name!r} has no training split: score a fine-tuned model on it with "
            "python -m bertjax.tools.evaluate"
        )
    if task.metric not in task.metric_names:
        raise ValueError(
            f"metric {task.metric!r} cannot say which checkpoint of {task.name!r} is "
            f"best; one of {', '.join(task.metric_names)} (higher is better)"
        )
    start = init_from if isinstance(init_from, Pretrained) else Pretrained(init_from)
    if task.labels and stored_labels(start.source) == len(task.labels):
        # A head for the same names goes on in its own order; one for other names, or for names
        # that are not known, is of no use.
        names = respelled(start.source.labels, task.labels) or tuple(map(str, range(len(task.labels))))
        start.keep_head = set(task.labels) == set(names)
        if start.keep_head:
            task.labels = names
    source = start.source
    tuner = FineTuner(task, source.require_tokenizer(), source.config, start, settings, execution, mesh)
    if read:
        tuner.data("train", training=True)
        tuner.data("dev")[0].require_labels("choosing the best checkpoint")
    # This refuses rules for parameters that do not exist, and what leaves none to train.
    tuner.trainer.abstract_state(tuner.objective)
    return tuner


def prepare_run(tuner: FineTuner, workdir: str | os.PathLike[str], mesh_reason: str = "") -> TaskJob:
    """The job of a tuner in a work directory.

    Raises ValueError for settings that do not go with the data, and for a directory that holds something else.
    """
    settings = tuner.settings
    predict = tuple(name for names in settings.task.predict for name in names.split(",") if name)
    for split in dict.fromkeys(predict):
        if split not in tuner.task.splits:
            raise ValueError(f"cannot predict split {split!r}; one of {', '.join(tuner.task.splits)}")
        if split not in ("train", "dev"):
            found = tuner.read(split)  # what cannot be read, or a label that is unknown, shows now
            if found.labelled:
                tuner.data(split)
    settings = settings.replace({"init_from": tuner.load_params.path})
    training = Training(tuner, settings)
    if settings.profile_steps[1] > (last := training.phases[-1].until_step):
        raise ValueError(f"config.profile_steps={settings.profile_steps}: the run has {last:,} steps")
    made_of = facts_of(tuner)
    require_same({f"{name} of the fine-tuning": value for name, value in made_of.items()})
    directory = resolve_directory(workdir)
    resumed_from = step_to_resume(settings, directory)
    if resumed_from is not None and not goes_on_with(settings, directory, made_of):
        resumed_from = None
    return TaskJob(directory, resumed_from, tuner, training, predict, made_of, mesh_reason)


def facts_of(tuner: FineTuner) -> dict[str, str]:
    """What identifies a training beside its settings, see workdir.FACTS."""
    return {
        "metric": tuner.task.metric,
        **{f"data.{name}": split.fingerprint for name, (split, _) in tuner.used.items()},
        "weights": tuner.load_params.source.fingerprint(),
        "tokenizer": tuner.tokenizer.fingerprint,
    }


def prepare(config: Config, workdir: str, mesh: Any = None) -> TaskJob:
    """The job of a config file: `config.task` beside the settings that pre-training shares."""
    check_export(config)
    tuner, mesh_reason = tuner_of(config, mesh)
    return prepare_run(tuner, workdir, mesh_reason)


def tuner_of(config: Config, mesh: Any = None, read: bool = True) -> tuple[FineTuner, str]:
    """The FineTuner of a config file, and why its mesh was chosen; arguments and errors as of prepare_tuner."""
    t = config.task
    if not config.init_from:
        raise ValueError(
            "config.init_from is empty: fine-tuning starts from a pre-trained model. Give --config.init_from=DIR, a "
            "model, the workdir of a run, or a name at the Hugging Face Hub"
        )
    if not t.data:
        raise ValueError("config.task.data is empty: name the directory of the task's files")
    start = Pretrained.of(config)  # before data are read
    model, reason = start.source.config, ""
    if mesh is None:
        mesh, reason = sharding.mesh_of(config.mesh, parameter_count(model), jax.devices(), hardware.device_bytes())
    execution = Execution.of(config.execution, mesh.devices.flat[0].platform, config.mesh.tensor > 1, model)
    task = make_task(t.name, t.data, t.options)
    task.metric = t.metric or task.metric
    return prepare_tuner(task, start, config, execution=execution, mesh=mesh, read=read), reason


def evaluate(
    task: Any,
    model_directory: str | pathlib.Path,
    settings: Config,
    split: str = "dev",
    execution: Execution = Execution(),  # noqa: B008  frozen
    mesh: Any = None,
    write_to: str | pathlib.Path | None = None,
    labels: Sequence[str] = (),
    must_score: bool = False,
) -> Any:
    """Scores a fine-tuned model on a split and writes predictions.

    A split without labels has the scores None, or is refused with `must_score`.

    `labels` are the names of the head's classes in its order, for a model that does not store them
    (Google's checkpoints, or a config.json without id2label). The task takes over the head's label order and, for SQuAD
    2.0, the null threshold that was found on the development split, unless its options name one. Raises LoadError for a
    checkpoint without the head and ValueError for labels that the head does not know.
    """
    start = Pretrained(model_directory)
    source = start.source
    if labels and source.labels not in ((), tuple(labels)):
        raise ValueError(
            f"labels={list(labels)} contradict those that {model_directory} names, "
            f"{list(source.labels)}; leave them out"
        )
    if task.labels and "classifier" in heads_in(source.headers, source.naming):
        task.labels = adopt_labels(task.labels, source.labels or tuple(labels), str(model_directory))
    stored = remembered(source.settings, str(model_directory)).null_threshold
    if stored is not None and task.name == "squad2.0" and "null_threshold" not in task.options:
        task.null_threshold = float(stored)
    tuner = FineTuner(task, source.require_tokenizer(), source.config, start, settings, execution, mesh)
    params = load_pretrained_params(model_directory, tuner.model, jax.random.key(0))
    records, features = tuner.data(split)
    if must_score:
        records.require_labels("scoring")
    outputs = tuner.predict(params, features)
    if write_to is not None:
        task.write(records, features, outputs, pathlib.Path(write_to))
    if not records.labelled:
        log.warning("%s", "; ".join([f"{task.splits[split]}: no labels, and so no scores", *records.notes]))
        return None
    return of_finite(task.score(records, features, outputs), outputs)
