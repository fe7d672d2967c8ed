"""The fine-tuning tasks by their names on the command line."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from bertjax.config import nearest
from bertjax.tasks.custom import TableTask
from bertjax.tasks.glue import GLUE, GlueTask
from bertjax.tasks.ner import NerTask
from bertjax.tasks.remembered import task_name
from bertjax.tasks.squad import SquadTask
from bertjax.tasks.swag import MultipleChoiceTask
from bertjax.tasks.xnli import XnliTask

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
      name: a GLUE task (cola ... ax), xnli, squad1.1, squad2.0, ner, tag (tags that are no entities), swag, or table
        (your own CSV, TSV or JSON lines); or an alias of these (remembered.py).
      options: keyword arguments of the task's class, see glue.py, squad.py, ner.py, swag.py and custom.py.

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
            f"task {name!r}: {error.filename} does not exist; its files are looked for in {str(data)!r}; the task's "
            f"option files={{'train': NAME, 'dev': NAME}}}} names others"
        ) from None
    if twice := sorted({label for label in task.labels if task.labels.count(label) > 1}):
        raise ValueError(f"task {name!r}: its labels name {', '.join(twice)} twice")
    task.kind, task.options = name, options
    return task
