"""Which run a work directory holds, and whether this command may go on with it.

Out: the step to go on from; a refusal that lists what differs; or the old run deleted, where `config.resume` says so.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from bertjax.config import Config
from bertjax.formats.files import parse_json
from bertjax.log.report.runs import STARTS_FILE
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.programs import DIRECTORY as PROGRAMS_DIRECTORY

# By job: the file that says what a run was begun with.
RECORDS = {"pretrain": "config.json", "finetune": "finetune.json"}
CORPUS_FILE = "corpus.json"  # what a pre-training run is trained on
# Files of a run beside its checkpoints; `delete_run` leaves all others alone.
FILES = (
    *RECORDS.values(),
    CORPUS_FILE,
    STARTS_FILE,
    "metrics.jsonl",
    "examples.json",
    "map.json",
    "result.json",
    "report.html",
    "checkpoints.evaluations.json",
)


class DamagedRecord(ValueError):
    """A file that tells which run a directory holds cannot be read; the message says what to do."""


def read_record(path: epath.Path, *texts: str) -> dict[str, Any]:
    """The JSON object of a run's record, with a text under each of `texts`; raises DamagedRecord naming the file."""
    problem = f"{path} holds no object" + (f" with {', '.join(texts)}" if texts else "")
    try:
        found = parse_json(path.read_bytes(), str(path))
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in texts):
            return found
    except ValueError as error:
        problem = str(error)
    raise DamagedRecord(
        f"{problem}. It tells which run {path.parent} holds: put a copy of it back, or choose "
        "another --workdir; --config.resume=changed goes on without comparing the run with this "
        "command, and --config.resume=overwrite deletes the run"
    )


def step_to_resume(
    config: Config, workdir: epath.Path, conflicts: Callable[[Mapping[str, Any]], list[str]]
) -> int | None:
    """The step that this run goes on from, None = it starts afresh.

    `conflicts` gives lines 'name: old -> new' of what differs between the record of a run (RECORDS) and this command.
    Raises ValueError where the directory holds a run that must not go on.
    """
    record = workdir / RECORDS[config.job]
    other, kind = ("finetune", "fine-tuning") if config.job == "pretrain" else ("pretrain", "pre-training")
    # Opened even where nothing is read: this checks that it can be written and that no other process trains there.
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        # A directory with config.json alone may be a model's.
        if not record.exists() and (workdir / RECORDS[other]).exists():
            if other == "finetune" or checkpoints.steps():
                raise ValueError(f"{workdir} holds a {kind} run; choose another --workdir")
        if config.resume == "overwrite" and not _has_overwritten(workdir, record, conflicts):
            return None
        newest = checkpoints.latest()
    if newest is None:
        return None
    if config.resume == "never":
        raise ValueError(
            f"{workdir} already holds a run at step {newest:,} and config.resume is 'never'; choose another --workdir"
        )
    if not record.exists():
        raise ValueError(
            f"{workdir} holds checkpoints, but no {record.name} that tells of which run; choose another --workdir, "
            "or delete it with --config.resume=overwrite"
        )
    if config.resume != "changed" and (changes := conflicts(read_record(record))):
        lines = "\n  ".join(changes)
        raise ValueError(
            f"{workdir} holds a run at step {newest:,} with other settings or data:\n  {lines}\n"
            "Choose another --workdir, or say what is meant: --config.resume=changed goes on from "
            "that step with the new settings, --config.resume=overwrite deletes the old run."
        )
    return newest


def _has_overwritten(
    workdir: epath.Path, record: epath.Path, conflicts: Callable[[Mapping[str, Any]], list[str]]
) -> bool:
    """Whether this same command has already overwritten an older run there, and not finished its own.

    A launcher repeats the command after a pre-emption, which must then go on and not start again from step 0.
    """
    if (workdir / "model").exists() or not record.exists():
        return False
    try:
        before = read_record(record)
    except DamagedRecord:
        return False
    return before.get("resume") == "overwrite" and not conflicts(before)


def delete_run(workdir: epath.Path) -> None:
    """Deletes what the run there has left."""
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        checkpoints.clear()
    if jax.process_index() == 0:
        for name in FILES:
            (workdir / name).unlink(missing_ok=True)
        for name in ("model", PROGRAMS_DIRECTORY):
            if (workdir / name).exists():
                (workdir / name).rmtree()
