"""The fine-tuning jobs of the command line: from a config to a run, a suite entry or an evaluation.

In: the settings below, as a mapping. Out: in the workdir metrics.jsonl, result.json, predictions
(and submission files), and `model/` in Hugging Face's layout with the label names in config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from bertjax.config import Config, finetune_config, flatten, frozen, nearest
from bertjax.interop import load_pretrained_params
from bertjax.log.logbook import Logbook, counted
from bertjax.log.report import write_report
from bertjax.log.summary import devices_lines, model_line, screen
from bertjax.model.presets import Execution, parameter_count
from bertjax.process import hardware
from bertjax.process.distributed import wait_for_all
from bertjax.run.finish import writing_results
from bertjax.run.starts import Starts
from bertjax.run.workdir import read_record
from bertjax.tasks.custom import TableTask
from bertjax.tasks.finetune import FineTuner
from bertjax.tasks.glue import GLUE, GlueTask
from bertjax.tasks.ner import NerTask
from bertjax.tasks.pretrained import Pretrained
from bertjax.tasks.remembered import remembered, task_name
from bertjax.tasks.results import recorded, result_json, save_model, summary_line, write_json, write_predictions
from bertjax.tasks.shown import label_shares
from bertjax.tasks.squad import SquadTask, with_null_threshold
from bertjax.tasks.swag import MultipleChoiceTask
from bertjax.tasks.task import adopt_labels
from bertjax.tasks.xnli import XnliTask
from bertjax.training import sharding

log = logging.getLogger(__name__)

# name -> what makes the task from its data and options
TASKS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(GlueTask, name) for name in GLUE},
    "xnli": XnliTask,
    "squad1.1": functools.partial(SquadTask, version="1.1"),
    "squad2.0": functools.partial(SquadTask, version="2.0"),
    "ner": functools.partial(NerTask, name="ner", entities=True),
    "tag": functools.partial(NerTask, name="tag", entities=False),
    "swag": MultipleChoiceTask,
    "table": TableTask,
}


def make_task(name: str, data: str, options: Mapping[str, Any] | None = None) -> Any:
    """The task `name` over `data` (a directory, or 'tfds:...').

    Args:
      name: a GLUE task (cola ... ax), xnli, squad1.1, squad2.0, ner, tag (tags that are no
        entities), swag, or table (your own CSV, TSV or JSON lines); or an alias of these
        (remembered.py).
      options: keyword arguments of the task's class, see glue.py, squad.py, ner.py, swag.py and
        custom.py.

    The task keeps both as `kind` and `options`, for the model that is trained on it.
    """
    name = task_name(name, TASKS)
    make, options, data = TASKS[name], dict(options or {}), os.path.expanduser(data)
    fixed = ("source", *getattr(make, "keywords", ()))
    parameters = inspect.signature(make).parameters
    known = [option for option in parameters if option not in fixed]
    for option in options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}." + nearest(option, known))
    if os.path.isfile(data):
        raise ValueError(
            f"{data} is a file: name the directory that it is in, and which file is "
            "which split by the task's option files={'train': NAME, 'dev': NAME}"
        )
    if "files" in set(known) - set(options) and (parameters["files"].default is inspect.Parameter.empty):
        raise ValueError(
            f"task {name!r}: missing its option 'files', which file of {data} is "
            "which split: {'train': 'train.csv', 'dev': 'dev.csv'}"
        )
    if not hasattr(files := options.get("files", {}), "items"):
        raise ValueError(
            f"files={files!r} does not say which file is which split: give it as "
            "{'train': 'train.csv', 'dev': 'dev.csv'}"
        )
    try:
        task = make(data, **options)
    except TypeError as error:
        raise ValueError(f"task {name!r}: an option is of a wrong kind: {error}") from None
    except FileNotFoundError as error:  # label names are read from the training file
        raise ValueError(
            f"task {name!r}: {error.filename} does not exist; its files are looked "
            f"for in {str(data)!r}; the task's option files={{'train': NAME, 'dev': "
            "NAME}} names others"
        ) from None
    if twice := sorted({label for label in task.labels if task.labels.count(label) > 1}):
        raise ValueError(f"task {name!r}: its labels name {', '.join(twice)} twice")
    task.kind, task.options = name, options
    return task


@dataclasses.dataclass(frozen=True)
class Job:
    """A fine-tuning run whose data and settings have been read and checked."""

    tuner: FineTuner
    settings: Config
    workdir: pathlib.Path
    init_from: str
    predict: tuple[str, ...]
    mesh_reason: str = ""  # why the devices are used as they are


def prepare_task(
    task: Any,
    init_from: str | Pretrained,
    workdir: str | pathlib.Path,
    settings: Config,
    *,
    dropout: tuple[float, float] | None = None,
    execution: Execution = Execution(),  # noqa: B008  frozen
    mesh: Any = None,
    mesh_reason: str = "",
) -> Job:
    """Reads what can be read before anything compiles.

    Args:
      settings: config.task.options are those that the task was made with.
      dropout: (hidden, attention) in place of the checkpoint's.

    Raises ValueError or LoadError naming the setting, or file and line, and the remedy.
    """
    if "://" in str(workdir):
        raise ValueError(
            f"workdir={workdir}: fine-tuning writes to a local disk; name a directory "
            "there, and copy model/ from it when it is done"
        )
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
    predict = tuple(name for names in settings.task.predict for name in names.split(",") if name)
    for split in predict:
        if split not in task.splits:
            raise ValueError(f"cannot predict split {split!r}; one of {', '.join(task.splits)}")
    start = init_from if isinstance(init_from, Pretrained) else Pretrained(init_from)
    if task.labels:
        # A head for the same names goes on in its own order; one for other names, or for names
        # that are not known, is of no use.
        names = start.labels() or tuple(map(str, range(len(task.labels))))
        start.keep_head = set(task.labels) == set(names)
        if start.keep_head:
            task.labels = names
    config = start.config
    if dropout is not None:
        config = dataclasses.replace(config, hidden_dropout_prob=dropout[0], attention_probs_dropout_prob=dropout[1])
    tuner = FineTuner(task, start.tokenizer, config, start, settings, execution, mesh)
    tuner.data("train", training=True)
    tuner.data("dev")[0].require_labels("choosing the best checkpoint")
    for split in dict.fromkeys(predict):
        if split not in ("train", "dev"):
            tuner.read(split)  # what cannot be read shows now, not after the training
    objective, trainer = tuner.objective_and_trainer()
    trainer.abstract_state(objective)  # refuses rules for parameters that do not exist
    job = Job(tuner, settings, pathlib.Path(workdir), start.path, predict, mesh_reason)
    _refuse_other_run(job)
    return job


def prepare(config: Config, workdir: str, mesh: Any = None) -> Job:
    """The job of a config file: `config.task` beside the settings that pre-training shares."""
    t = config.task
    if not config.init_from:
        raise ValueError("config.init_from is empty: fine-tuning starts from a pre-trained model")
    if not t.data:
        raise ValueError("config.task.data is empty: name the directory of the task's files")
    start = Pretrained(config.init_from)  # before data are read
    task = make_task(t.name, t.data, t.options)
    if t.metric:
        task.metric = t.metric
    reason = ""
    if mesh is None:
        mesh, reason = sharding.mesh_of(
            config.mesh, parameter_count(start.config), jax.devices(), hardware.device_bytes()
        )
    execution = Execution.of(config.execution, mesh.devices.flat[0].platform, config.mesh.tensor > 1)
    return prepare_task(task, start, workdir, config, execution=execution, mesh=mesh, mesh_reason=reason)


def run(job: Job) -> dict[str, Any]:
    """Trains, keeps the best on dev, writes everything, and returns the result (see result.json).

    An interrupted run in the same workdir goes on; a finished one is only written out again.
    """
    tuner, workdir = job.tuner, job.workdir
    directory = workdir / "checkpoints"
    _refuse_other_run(job)
    wait_for_all("preparing its data")  # before process 0 writes what the line above looks for
    starts = Starts(epath.Path(workdir))
    starts.keep(tuner.programs, tuner.mesh)
    tuner.load_params.read_ahead()  # not before: a suite prepares all its jobs first
    tuner.compile_ahead(job.settings.batch_size)
    # Late, beside the compiler: orbax takes a second to import.
    from bertjax.run.checkpoint import Checkpoints

    if jax.process_index() == 0:
        write_json(workdir / "finetune.json", _identity(job))
    checkpoints = Checkpoints(str(directory), keep_last=1, keep_best=1, metric=f"eval/{tuner.task.metric}", mode="max")
    resumed_from = checkpoints.latest()
    with contextlib.closing(checkpoints), _logbook(job, resumed_from or 0) as logbook:
        logbook.message(summary(job, resumed_from))
        starts.begin(resumed_from or 0, logbook)
        done = tuner.run(job.settings, logbook, checkpoints)
        logbook.message(summary_line(tuner.task, done))
        if tuner.task.name == "squad2.0":
            with_null_threshold(tuner.task, done.scores)
        result = result_json(tuner, done, job.init_from)
        with writing_results(workdir):
            if jax.process_index() == 0:
                write_json(workdir / "result.json", result)
            files = write_predictions(tuner, done.params, job.predict, workdir)
            save_model(tuner, done.params, workdir / "model", result)
            logbook.message("\n".join([*(f"predictions: {path}" for path in files), f"model: {workdir / 'model'}"]))
            logbook.flush()
            if jax.process_index() == 0:
                logbook.message(f"report: {write_report([workdir])}")
    wait_for_all("writing model and report")  # a suite reads the model
    return result


def _logbook(job: Job, step: int) -> Logbook:
    log = job.settings.log
    return Logbook(
        str(job.workdir),
        step,
        tensorboard=log.tensorboard,
        csv=log.csv,
        wandb=log.wandb,
        settings=dataclasses.asdict(job.settings),
    )


def _identity(job: Job) -> dict[str, Any]:
    """The settings, data and weights that a workdir belongs to."""
    tuner = job.tuner
    identity = {
        "task": tuner.task.name,
        "metric": tuner.task.metric,
        "options": job.settings.task.options,
        "data": {split: tuner.data(split, training=split == "train")[0].fingerprint for split in ("train", "dev")},
        "init_from": job.init_from,
        "weights": tuner.load_params.source.fingerprint(),
        "tokenizer": tuner.tokenizer.fingerprint,
        **recorded(job.settings),
    }
    return json.loads(json.dumps(identity))


def _refuse_other_run(job: Job) -> None:
    """Raises ValueError naming every setting in which the workdir's run differs."""
    path = job.workdir / "finetune.json"
    if not path.exists():
        if (job.workdir / "checkpoints").exists():
            raise ValueError(f"{job.workdir} holds a pre-training run; choose another workdir")
        return
    before, now = read_record(epath.Path(path)), _identity(job)
    # Earlier versions wrote down less; what they did not set was as it is by default.
    now = {name: value for name, value in now.items() if name in before}
    default = {"settings": recorded(frozen(finetune_config()))["settings"]} if "settings" in now else {}
    old, new = flatten(default) | flatten(before), flatten(now)
    if changes := [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new)
        if old.get(name) != new.get(name)
    ]:
        raise ValueError(
            f"{job.workdir} holds a fine-tuning run with other settings or other content of the "
            f"same files ({'; '.join(changes)}); choose another workdir, or delete it"
        )


def summary(job: Job, resumed_from: int | None = None) -> str:
    """The start-up screen: what will be learnt, on what, from how many rows, in how many steps."""
    tuner, settings, task = job.tuner, job.settings, job.tuner.task
    splits = {name: tuner.data(name, training=name == "train") for name in ("train", "dev")}
    rows = {name: len(features) for name, (_, features) in splits.items()}
    lines = [
        model_line(tuner.config, heads=("pooler",)),
        *devices_lines(tuner.mesh, tuner.model.execution.dtype, job.mesh_reason),
        ("task", f"{task.name} ({task.head.replace('_', ' ')}), best on dev by {task.metric}"),
        ("rows", ", ".join(f"{name} {count:,}" for name, count in rows.items())),
    ]
    if task.labels:
        lines.append(("labels", label_shares(task, splits["train"][1])))
    for name, (split, _) in splits.items():
        lines += [("note", f"{name}: {note}") for note in split.notes]
    if task.dropped:
        lines.append(("note", f"{task.dropped:,} training answers are not in their passage: left out"))
    epochs, batch_size = settings.task.epochs, settings.batch_size
    per_epoch = -(-rows["train"] // batch_size)
    warmup = int(settings.task.warmup * per_epoch * epochs)
    lines += [
        ("lengths", f"padded to {', '.join(map(str, tuner.training_buckets(batch_size)))} tokens"),
        (
            "steps",
            f"{per_epoch * epochs:,}: {counted(epochs, 'epoch')} of {per_epoch:,} x "
            f"{batch_size} rows, learning rate {settings.optimizer.learning_rate:g}, "
            f"{warmup:,} of warm-up, seed {settings.seed}",
        ),
        (
            "start",
            f"weights of {job.init_from}"
            if resumed_from is None
            else f"resumed from the checkpoint of step {resumed_from:,}",
        ),
        ("workdir", str(job.workdir)),
    ]
    return screen(lines)


def evaluate(
    task: Any,
    model_directory: str | pathlib.Path,
    settings: Config,
    split: str = "dev",
    execution: Execution = Execution(),  # noqa: B008  frozen
    mesh: Any = None,
    write_to: str | pathlib.Path | None = None,
    labels: Sequence[str] = (),
) -> Any:
    """Scores a fine-tuned model on a split (None if it has no labels) and writes predictions.

    `labels` are the names of the head's classes in its order, for a model that does not store them
    (Google's checkpoints, or a config.json without id2label). The task takes over the head's label
    order and, for SQuAD 2.0, the null threshold that was found on the development split, unless
    its options name one. Raises LoadError for a checkpoint without the head and ValueError for
    labels that the head does not know.
    """
    source = Pretrained(model_directory)
    if labels and source.labels() not in ((), tuple(labels)):
        raise ValueError(
            f"labels={list(labels)} contradict those that {model_directory} names, "
            f"{list(source.labels())}; leave them out"
        )
    if task.labels and source.has_classifier():
        known = source.labels() or tuple(labels)
        task.labels = adopt_labels(task.labels, known, str(model_directory))
    stored = remembered(source.source.settings, str(model_directory)).null_threshold
    if stored is not None and task.name == "squad2.0" and "null_threshold" not in getattr(task, "options", {}):
        task.null_threshold = float(stored)
    tuner = FineTuner(task, source.tokenizer, source.config, source, settings, execution, mesh)
    params = load_pretrained_params(model_directory, tuner.model, jax.random.key(0))
    records, features = tuner.data(split)
    outputs = tuner.predict(params, features)
    if write_to is not None:
        task.write(records, features, outputs, pathlib.Path(write_to))
    return task.score(records, features, outputs) if records.labelled else None
