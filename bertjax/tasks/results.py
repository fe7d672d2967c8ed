"""What a fine-tuning run leaves: result.json, predictions, the model with its card.

In: a FineTuner and what one of its trainings gave. Out: files in the work directory; process 0 writes, all predict.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bertjax.config import Config
from bertjax.formats.files import write_json
from bertjax.interop.card import model_card
from bertjax.interop.huggingface import class_name, write_directory
from bertjax.log.report import as_warning
from bertjax.model.size import parameter_count, parameters_text
from bertjax.tasks.kinds import KINDS
from bertjax.tasks.make import plain, to_remember
from bertjax.tasks.shown import on_map, shown
from bertjax.version import source_version

if TYPE_CHECKING:
    from bertjax.tasks.finetune import FineTuner, Trained

log = logging.getLogger(__name__)


def result_json(tuner: FineTuner, trained: Trained, checkpoint: str) -> dict[str, Any]:
    """Everything needed to check a result and to reproduce it."""
    return {
        "bertjax": source_version(),
        "task": tuner.task.name,
        "metric": tuner.task.metric,
        "value": trained.value,
        "scores": dict(trained.scores.values),
        "flags": list(trained.scores.flags),
        "details": plain(trained.scores.details),
        "checkpoint": checkpoint,
        "tokenizer": tuner.tokenizer.fingerprint,
        "data": {name: split.fingerprint for name, (split, _) in tuner.used.items()},
        "rows": {name: len(rows) for name, (_, rows) in tuner.used.items()},
        "notes": [note for split, _ in tuner.used.values() for note in split.notes],
        "dropped": tuner.task.dropped,
        "labels": list(tuner.task.labels),
        **recorded(trained.settings),
        "best_step": trained.best_step,
        "steps": trained.steps,
        "history": [[step, value if math.isfinite(value) else None] for step, value in trained.history],
        "seconds": round(trained.seconds, 3),
        "devices": f"{tuner.mesh.devices.size} x {tuner.mesh.devices.flat[0].device_kind}",
    }


def recorded(config: Config) -> dict[str, dict[str, Any]]:
    """The settings of a run as its files have them: 'run', what a search varies first, and 'settings', the others."""
    task, optimizer = dataclasses.asdict(config.task), dataclasses.asdict(config.optimizer)
    run = {
        "learning_rate": optimizer.pop("learning_rate"),
        "batch_size": config.batch_size,
        "epochs": task.pop("epochs"),
        "seed": config.seed,
    }
    for name in ("name", "data", "options", "metric", "predict"):  # of the task, not of its training
        del task[name]
    del optimizer["warmup_steps"]  # task.warmup is
    task["class_weights"] = "balanced" if task["class_weights"] == ("balanced",) else task["class_weights"]
    task["optimizer"], task["optimizer_options"] = optimizer.pop("name"), optimizer.pop("options")
    settings = {**task, **optimizer, "accumulation": config.accumulation}
    return {"run": run, "settings": settings}


def summary_line(task: Any, trained: Trained) -> str:
    """'mrpc: accuracy_f1 0.8512 (step 345 of 345; ...)' with the flags that make it doubtful."""
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in trained.scores.values.items())
    flags = "".join(f"  [{flag}]" for flag in trained.scores.flags)
    return (
        f"{task.name}: best {task.metric} {trained.value:.4f} at step {trained.best_step} of {trained.steps} "
        f"({numbers}){flags}, {trained.seconds:.1f} s"
    )


def write_predictions(
    tuner: FineTuner, params: Any, splits: tuple[str, ...], directory: pathlib.Path
) -> list[pathlib.Path]:
    """Prediction and submission files of the splits; of dev also what the report shows, where that can be made."""
    paths: list[pathlib.Path] = []
    for name in dict.fromkeys((*splits, "dev")):
        split, features = tuner.data(name)
        mapped = name == "dev" and tuner.model.has_vectors
        vectors = on_map(len(features)) if mapped else {}
        outputs = tuner.predict(params, features, vectors)
        files: dict[str, Any] = {}
        if name == "dev":
            with as_warning("the report shows no examples"):
                files = shown(tuner, params, split, features, outputs, vectors)
        if jax.process_index() != 0:
            continue
        if name in splits:
            paths += tuner.task.write(split, features, outputs, directory)
        for file, content in files.items():
            write_json(directory / file, content, allow_nan=False)
    return paths


def save_model(tuner: FineTuner, params: Any, directory: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Writes the model in Hugging Face's layout, with its label names."""
    if tuner.model.storable is not tuner.model:
        log.warning("no model directory is written: Hugging Face's layout cannot hold a BiLSTM")
        return
    host = jax.tree.map(lambda leaf: np.asarray(jax.device_get(leaf)), params)
    if jax.process_index() != 0:
        return
    task = tuner.task
    kind = KINDS[task.head]
    settings: dict[str, Any] = {"finetuned": to_remember(task, result, tuner.settings.task.max_length)}
    if kind.problem_type:
        settings["problem_type"] = kind.problem_type
    labels = dict(enumerate(task.labels)) or (None if kind.named else {0: "value"})
    write_directory(
        directory,
        tuner.model_config,
        host,
        type(tuner.model).__name__,
        tuner.tokenizer,
        labels,
        settings=settings,
        overwrite=True,
        card=card(tuner, result),
    )


def card(tuner: FineTuner, result: Mapping[str, Any]) -> str:
    """README.md of the model: what it does, how well, from what; no path of this machine."""
    task, run, model = tuner.task, result["run"], tuner.model_config
    origin = pathlib.PurePath(result["checkpoint"])
    # A run's model is RUN/model, which says nothing without the run's name.
    start = "/".join(origin.parts[-2:]) if origin.name == "model" else origin.name
    summary = (
        f"An encoder with {model.num_hidden_layers} layers of width {model.hidden_size} and "
        f"{parameters_text(parameter_count(model, heads=('pooler',)))}, fine-tuned from the "
        f"weights of `{start}` for the task {task.name} ({task.head.replace('_', ' ')})."
    )
    if task.labels:
        summary += f" Its labels are {', '.join(f'`{label}`' for label in task.labels)}."
    data = "\n".join(f"* {split}: {n:,} rows, sha256 {result['data'][split]}" for split, n in result["rows"].items())
    recipe = {
        "steps": f"{result['best_step']:,} (the best on dev) of {result['steps']:,}, {run['batch_size']} rows each",
        "learning rate": run["learning_rate"],
        "epochs": run["epochs"],
        "seed": run["seed"],
        "longest row": f"{result['settings']['max_length']} tokens",
        "hardware": f"{result['devices']}, {tuner.model.execution.dtype}",
    }
    sections = {
        "Results": "On the development set:\n\n"
        + "\n".join(f"* {name} {value:.4f}" for name, value in result["scores"].items())
    }
    architecture, model_type = class_name(model, type(tuner.model.storable).__name__)
    return model_card(
        f"BERT fine-tuned on {task.name}", architecture, summary, data, recipe, sections, model_type=model_type
    )
