"""Which run a work directory holds, and whether this command may go on with it.

Out: the step to go on from; a refusal that lists what differs; or the old run deleted, where `config.resume` says so.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from bertjax.config import Config, differences, resume_conflicts
from bertjax.formats.files import parse_json, write_json, write_whole
from bertjax.interop.source import step_of_run
from bertjax.log.report.runs import STARTS_FILE
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.programs import DIRECTORY as PROGRAMS_DIRECTORY

RECORD = "config.json"  # the settings that a run was begun with
SEARCH = "sweep.json"  # what a search (tasks/sweep.py) was begun with
# By job: the file that holds what else the run was begun with, {name: text}: fingerprints of data, vocabulary, weights.
FACTS = {"pretrain": "corpus.json", "finetune": "finetune.json"}
KINDS = {"pretrain": "pre-training", "finetune": "fine-tuning"}
# Files of a run beside its checkpoints; `delete_run` leaves all others alone.
_TOLD = "metrics.jsonl examples.json map.json result.json report.html checkpoints.evaluations.json".split()
FILES = (RECORD, STARTS_FILE, *FACTS.values(), *_TOLD)


class DamagedRecord(ValueError):
    """A file that tells which run a directory holds cannot be read; the message says what to do."""


def read_record(path: epath.Path, *texts: str) -> dict[str, Any]:
    """The JSON object of a run's record, with a text under each of `texts`; raises DamagedRecord naming the file."""
    problem = f"{path} holds no object" + (f" with {', '.join(texts)}" if texts else "")
    try:
        found = parse_json(path.read_bytes(), str(path))
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in texts):
            return found
    except (ValueError, FileNotFoundError) as error:
        problem = str(error)
    raise DamagedRecord(
        f"{problem}. It tells which run {path.parent} holds: put a copy of it back, or choose "
        "another --workdir; --config.resume=changed goes on without comparing the run with this "
        "command, and --config.resume=overwrite deletes the run"
    )


def step_to_resume(config: Config, workdir: epath.Path) -> int | None:
    """The step that this run goes on from, None = it starts at step 0.

    Raises ValueError where the directory holds a run that must not go on, by its settings; see also `goes_on_with`.
    """
    record = workdir / RECORD
    # Opened even where nothing is read: this checks that it can be written and that no other process trains there.
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        begun: dict[str, Any] = {}
        with contextlib.suppress(DamagedRecord):
            begun = read_record(record)
        # The config.json of a model, without checkpoints, names no job.
        old = "finetune" if (workdir / FACTS["finetune"]).exists() else "pretrain"
        is_run = "job" in begun or old == "finetune" or record.exists() and checkpoints.steps()
        if is_run:
            if (job := begun.get("job", old)) != config.job:
                raise ValueError(f"{workdir} holds a {KINDS.get(job, job)} run; choose another --workdir")
        elif (workdir / SEARCH).exists():
            raise ValueError(f"{workdir} holds a search, whose results would be replaced; choose another --workdir")
        elif not checkpoints.steps():
            of_model = record if record.exists() else workdir / "model"
            if begun or (of_model != record and of_model.exists()):
                raise ValueError(
                    f"{of_model} belongs to a model that this run would overwrite; choose another --workdir"
                )
        # A launcher repeats the command after a pre-emption, which must then go on and not overwrite what it has begun.
        own = begun.get("resume") == "overwrite" and not (workdir / "model").exists()
        if config.resume == "overwrite" and not (own and not resume_conflicts(begun, config)):
            start = step_of_run(config.init_from)[0].resolve()
            here = pathlib.Path(workdir).resolve()
            if config.init_from and start in (here, here / "model"):
                what = f"config.init_from={config.init_from} is of the run that config.resume='overwrite' deletes"
                raise ValueError(f"{what}; choose another --workdir")
            return None
        newest = checkpoints.latest()
    if newest is None:
        return None
    if config.resume == "never":
        raise ValueError(f"{workdir} holds a run at step {newest:,}, config.resume='never'; choose another --workdir")
    if not record.exists():
        raise ValueError(
            f"{workdir} holds checkpoints, but no {RECORD} that says of which run; choose another --workdir, "
            "or delete it with --config.resume=overwrite"
        )
    if config.resume != "changed" and (changes := resume_conflicts(begun or read_record(record), config)):
        raise _other_run(workdir, changes)
    return newest


def with_its_origin(config: Config, workdir: epath.Path) -> Config:
    """The settings of a run that goes on: `init_from`, which is ignored then, tells what it was begun with."""
    with contextlib.suppress(DamagedRecord):
        return config.replace({"init_from": read_record(workdir / RECORD, "init_from")["init_from"]})
    return config


def goes_on_with(
    config: Config,
    workdir: epath.Path,
    facts: Mapping[str, str],
    always: Mapping[str, str] = MappingProxyType({}),
    known: Callable[[], Mapping[str, str]] = dict,
) -> bool:
    """Whether to go on with the run in `workdir`, whose settings are those of `config`; False = overwrite it.

    Args:
      facts: of this command, as the file that FACTS names holds those of the run.
      always: facts that must not change even with config.resume=changed, each with the error message.
      known: returns the facts that can still be found out if the file is damaged.

    Raises ValueError if the facts differ, unless config.resume allows it.
    """
    try:
        before = read_record(workdir / FACTS[config.job], *facts)
    except DamagedRecord:
        if config.resume not in ("changed", "overwrite"):
            raise
        before = {**facts, **known()} if config.resume == "changed" else {}
    changes = differences({name: before.get(name) for name in facts}, facts)
    if config.resume == "overwrite":
        return not changes
    for name, refusal in always.items():
        if before[name] != facts[name]:
            raise ValueError(refusal)
    if changes and config.resume != "changed":
        raise _other_run(workdir, changes)
    return True


def write_records(directory: pathlib.Path, config: Config, facts: Mapping[str, str], **more: Any) -> None:
    """Writes what `step_to_resume` and `goes_on_with` read; `more` stands beside the facts."""
    write_whole(directory / RECORD, config.to_json())
    write_json(directory / FACTS[config.job], {**facts, **more}, ensure_ascii=False)


def _other_run(workdir: epath.Path, changes: Sequence[str]) -> ValueError:
    lines = ";\n  ".join(changes)
    return ValueError(
        f"{workdir} holds a run with other settings or data:\n  {lines}.\n"
        "Choose another --workdir, or one of these: --config.resume=changed goes on with the new settings and data, "
        "--config.resume=overwrite deletes the old run."
    )


def delete_run(workdir: epath.Path) -> None:
    """Deletes what the run there has left."""
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        checkpoints.clear()
    if jax.process_index() == 0:
        for name in FILES:
            (workdir / name).unlink(missing_ok=True)
        for name in ("model", PROGRAMS_DIRECTORY):
            place = workdir / name
            if place.exists():  # a link to another disk stays
                (place if "://" in str(place) else epath.Path(os.path.realpath(place))).rmtree()
