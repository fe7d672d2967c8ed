"""The fine-tuning tasks by name: how they are made, and what a model remembers of its own.

The entry `finetuned` of a model's config.json holds the task, its options and what was found in training, so that tools
need not be told again.
"""

import functools
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertjax.config import did_you_mean, nearest
from bertjax.formats.files import on_disk
from bertjax.tasks.custom import TableTask
from bertjax.tasks.glue import GLUE, GlueTask
from bertjax.tasks.ner import NerTask
from bertjax.tasks.squad import SquadTask
from bertjax.tasks.swag import MultipleChoiceTask
from bertjax.tasks.xnli import NAMED, XnliTask

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
# Fine-tuning task -> what tools/predict.py calls the question that such a model answers.
ASKED = {
    **dict.fromkeys((*GLUE, "xnli", "table"), "classify"),
    **dict.fromkeys(("ner", "tag"), "ner"),
    **dict.fromkeys(("squad1.1", "squad2.0"), "qa"),
}
_ALIASES = {
    **dict.fromkeys(("classify", "classification", "text-classification", "sequence-classification"), "table"),
    **dict.fromkeys(("token-classification", "named-entities"), "ner"),
    **dict.fromkeys(("tagging", "pos"), "tag"),
    **{"multiple-choice": "swag", "nsp": "next-sentence"},
    **dict.fromkeys(("mlm", "masked-lm"), "fill-mask"),
    **dict.fromkeys(("squad", "question-answering"), "qa"),
    **dict.fromkeys(("squad-v1", "squad-v1.1"), "squad1.1"),
    **dict.fromkeys(("squad-v2", "squad-v2.0"), "squad2.0"),
}


# Options of a table that name columns, files and what parts labels.
_NAMES = {"text": str | list | tuple, "headerless": list | tuple, "files": Mapping, "separator": str}


def task_name(name: str, known: Collection[str]) -> str:
    """The one of `known` that is meant by `name`: itself, in another spelling, or an alias.

    Raises ValueError that lists them.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    for candidate in (name, key, key.replace("-", ""), _ALIASES.get(key)):
        if candidate in known:
            return candidate
    instead = ""
    if key in ("qa", "question-answering", "squad"):
        instead = ": squad1.1, or squad2.0 where questions may have no answer"
    known = list(dict.fromkeys(known))
    found = "" if instead else did_you_mean(name, known)
    raise ValueError(f"unknown task {name!r}{instead}" + (f".{found}" if found else f"; one of {', '.join(known)}"))


def names_in(value: Any) -> Any:
    """The names in a text with commas, as of --config.task.options.labels=good,bad, or in a list, where numbers are
    names too (labels=1,2); anything else as it is."""
    if isinstance(value, str):
        return tuple(name for name in map(str.strip, value.split(",")) if name)
    return _as_name(value) if isinstance(value, list | tuple) else value


def with_column_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with names of columns for numbers: pandas calls columns without names 0, 1, ..."""
    return {**options, **{option: _as_name(options[option]) for option in ("text", "label") if option in options}}


def _as_name(value: Any) -> Any:
    """A number as text, also in a list; anything else as it is."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_name, value))
    return str(value) if type(value) is int else value


def make_task(name: str, data: str, options: Mapping[str, Any] | None = None) -> Any:
    """The task `name` over `data` (a directory, hf:NAME or tfds:NAME).

    Args:
      name: a GLUE task (cola ... ax), xnli, squad1.1, squad2.0, ner, tag (tags that are not entities), swag, or table
        (your own CSV, TSV or JSON lines); or an alias of these.
      options: keyword arguments of the task's class, see glue.py, squad.py, ner.py, swag.py and custom.py.

    The task keeps both as `kind` and `options`, for the model that is trained on it.
    """
    name = task_name(name, TASKS)
    make, options, data = TASKS[name], with_column_names(options or {}), os.path.expanduser(on_disk(data))
    options |= {option: names_in(options[option]) for option in ("labels", "headerless") if option in options}
    parameters = inspect.signature(make).parameters
    known = [option for option in parameters if option not in ("source", *getattr(make, "keywords", ()))]
    for option in options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}." + nearest(option, known))
        kind = type(parameters[option].default)
        fits = {bool: bool, int: int, float: int | float}.get(kind, object)
        if not isinstance(options[option], fits) or (kind in (int, float) and isinstance(options[option], bool)):
            value = f"{option}={options[option]!r:.60} must be {kind.__name__}"
            raise ValueError(f"task {name!r}: an option is of a wrong kind: {value}")
    if os.path.isfile(data):
        raise ValueError(
            f"{data} is a file: name the directory that it is in, and which file is "
            "which split by the task's option files={'train': NAME, 'dev': NAME}"
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
        there = sorted(os.listdir(data)) if os.path.isdir(data) else []
        raise ValueError(
            f"task {name!r}: {error.filename} does not exist; its files are looked for in {str(data)!r}, which holds "
            f"{', '.join(there[:5]) or 'nothing'}{' ...' * (len(there) > 5)}; the task's option files={{'train': NAME, "
            "'dev': NAME} names others"
        ) from None
    if twice := sorted(label for label, times in Counter(task.labels).items() if times > 1):
        raise ValueError(f"task {name!r}: its labels name {', '.join(twice)} twice")
    task.kind, task.options = name, options
    return task


@dataclass(frozen=True)
class Remembered:
    """The entry `finetuned` of a config.json; None and empty where it does not say."""

    task: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    step: int | None = None
    null_threshold: float | None = None

    def columns(self, named: bool = False) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """(columns of the texts, columns of a file without a header) of a task that reads tables; None where there are
        none. `named`: in the data set of that name at the Hub.
        """
        if self.task == "table":
            text, headerless = self.options.get("text") or "text", self.options.get("headerless")
            text = (text,) if isinstance(text, str) else tuple(text)
            return text, tuple(headerless) if headerless else None
        if self.task in GLUE:
            spec = GLUE[self.task]
            return named and spec.named_text or spec.text, spec.headerless
        pair = NAMED if named else ("sentence1", "sentence2")
        return (pair if self.task == "xnli" else None), None


def remembered(settings: Mapping[str, Any], source: str) -> Remembered:
    """Of a model's config.json. Raises ValueError that names `source` for an entry of another layout."""
    stored = settings.get("finetuned") or {}
    options = stored.get("options") or {} if isinstance(stored, Mapping) else None
    if not isinstance(options, Mapping):
        raise ValueError(f"{source}: 'finetuned' in its config.json must be an object, and so must its 'options'")
    numbers = {name: stored.get(name) for name in ("max_length", "step", "null_threshold")}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float | None):
            raise ValueError(f"{source}: {name}={number!r} in 'finetuned' of its config.json is not a number")
    for name in ("doc_stride", "max_query_length", "max_answer_length", "n_best"):
        if type(options.get(name, 1)) is not int:
            raise ValueError(f"{source}: {name}={options[name]!r} in 'finetuned' of its config.json is not a number")
    for name, kind in _NAMES.items():
        value = options.get(name)
        parts = [value] if isinstance(value, str) else [*value.values()] if isinstance(value, Mapping) else value or ()
        if value is not None and not (isinstance(value, kind) and all(isinstance(part, str) for part in parts)):
            raise ValueError(f"{source}: {name}={value!r:.60} in 'finetuned' of its config.json does not name anything")
    task = stored.get("task")
    known = isinstance(task, str) and task in TASKS
    return Remembered(task, options, **numbers) if known else Remembered(**numbers)


def to_remember(task: Any, result: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The entry `finetuned` for the model of `result` (see results.py)."""
    entry = {
        "task": task.kind,
        "options": task.options,
        "value": result["value"],
        "step": result["best_step"],
        "max_length": max_length,
    }
    if task.name == "squad2.0":
        entry["null_threshold"] = result["details"]["null_threshold"]
    return plain(entry)


def plain(value: Any) -> Any:
    """The value as JSON has it; numbers that it lacks, and paths, as text."""
    if hasattr(value, "items"):
        return {str(name): plain(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, Collection) and not isinstance(value, str):
        return [plain(item) for item in value]
    known = isinstance(value, str | int | None) or isinstance(value, float) and math.isfinite(value)
    return value if known else str(value)
