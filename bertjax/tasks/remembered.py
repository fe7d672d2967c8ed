"""What a fine-tuned model remembers of its task, so that tools need not be told again.

In: a task and its result. Out: the entry `finetuned` of the model's config.json, and from it the
task, its options and the columns of its texts. Also the one list of names by which people call a
task, for every tool.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertjax.tasks.glue import GLUE

ALIASES = {
    **dict.fromkeys(("classify", "classification", "text-classification", "sequence-classification"), "table"),
    **dict.fromkeys(("token-classification", "named-entities"), "ner"),
    **dict.fromkeys(("tagging", "pos"), "tag"),
    "multiple-choice": "swag",
    "squad-v1": "squad1.1",
    "squad-v1.1": "squad1.1",
    "squad-v2": "squad2.0",
    "squad-v2.0": "squad2.0",
}
_SQUAD = ("qa", "question-answering", "squad")
# Fine-tuning task -> what tools/predict.py calls the question that such a model answers.
ASKED = {
    **dict.fromkeys((*GLUE, "xnli", "table"), "classify"),
    "ner": "ner",
    "tag": "ner",
    "squad1.1": "qa",
    "squad2.0": "qa",
}


def task_name(name: str, known: Collection[str]) -> str:
    """The one of `known` that is meant by `name`: itself, in another spelling, or an alias.

    Raises ValueError that lists them.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    for candidate in (name, key, key.replace("-", ""), ALIASES.get(key)):
        if candidate in known:
            return candidate
    instead = ": squad1.1, or squad2.0 where questions may have no answer" * (key in _SQUAD)
    raise ValueError(f"unknown task {name!r}{instead}; one of {', '.join(known)}")


@dataclass(frozen=True)
class Remembered:
    """The entry `finetuned` of a config.json; None and empty where it does not say."""

    task: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    step: int | None = None
    null_threshold: float | None = None

    def columns(self) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """(columns of the texts, columns of a file without a header) of a task that reads tables;
        None where there are none.
        """
        if self.task == "table":
            text, headerless = self.options.get("text", "text"), self.options.get("headerless")
            text = (text,) if isinstance(text, str) else tuple(text)
            return text, tuple(headerless) if headerless else None
        if self.task in GLUE:
            return GLUE[self.task].text, GLUE[self.task].headerless
        return (("sentence1", "sentence2") if self.task == "xnli" else None), None


def remembered(settings: Mapping[str, Any], source: str) -> Remembered:
    """Of a model's config.json. Raises ValueError that names `source` for an entry of another
    layout.
    """
    stored = settings.get("finetuned") or {}
    options = stored.get("options") or {} if isinstance(stored, Mapping) else None
    if not isinstance(options, Mapping):
        raise ValueError(f"{source}: 'finetuned' in its config.json must be an object, and so must its 'options'")
    numbers = {name: stored.get(name) for name in ("max_length", "step", "null_threshold")}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float | None):
            raise ValueError(f"{source}: {name}={number!r} in 'finetuned' of its config.json is not a number")
    task = stored.get("task")
    known = task in ASKED or task == "swag"
    return Remembered(task if known else None, options if known else {}, **numbers)


def to_remember(task: Any, result: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The entry `finetuned` for the model of `result` (see results.py)."""
    entry = {
        "task": getattr(task, "kind", task.name),
        "options": dict(getattr(task, "options", {})),
        "value": result["value"],
        "step": result["best_step"],
        "max_length": max_length,
    }
    if task.name == "squad2.0":
        entry["null_threshold"] = result["details"]["best_f1_thresh"]
    return json.loads(json.dumps(entry, default=_plain))


def _plain(value: Any) -> Any:
    """A path as text, a mapping or set of another kind as JSON knows them."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return dict(value.items())
    return list(value) if isinstance(value, Collection) else str(value)
