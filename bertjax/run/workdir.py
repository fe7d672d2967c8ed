"""Which run a work directory holds, and whether this command may go on with it.

In: the settings of a run and its directory. Out: the step to go on from; a refusal that lists what
differs; or the old run deleted, where `config.resume` says so.
"""

import contextlib
import json
from typing import Any

import jax
from etils import epath

from bertjax.config import Config, resume_conflicts
from bertjax.formats.files import parse_json
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.corpora import Corpus
from bertjax.run.starts import FILE as STARTS_FILE
from bertjax.tokenization import load_tokenizer
from bertjax.training.programs import DIRECTORY as PROGRAMS_DIRECTORY

SETTINGS_FILE = "config.json"  # of a run, in its work directory
CORPUS_FILE = "corpus.json"  # what it is trained on


def step_to_resume(config: Config, workdir: epath.Path) -> int | None:
    """The step that this run goes on from, None = it starts afresh.

    Raises ValueError where the directory holds a run that is not to be gone on with.
    """
    # Opened also where nothing is read: it may not be written, or another process trains there.
    with contextlib.closing(Checkpoints(str(workdir / "checkpoints"))) as checkpoints:
        if (workdir / "finetune.json").exists():
            raise ValueError(f"{workdir} holds a fine-tuning run; choose another --workdir")
        if config.resume == "overwrite" and not _has_overwritten(config, workdir):
            return None
        newest = checkpoints.latest()
    if newest is None:
        return None
    if config.resume == "never":
        raise ValueError(
            f"{workdir} already holds a run at step {newest:,} and config.resume is 'never'; choose another --workdir"
        )
    if not (workdir / SETTINGS_FILE).exists():
        raise ValueError(
            f"{workdir} holds checkpoints, but no {SETTINGS_FILE} that tells of which "
            "run; choose another --workdir, or delete it with "
            "--config.resume=overwrite"
        )
    conflicts = _conflicts(config, workdir)
    if conflicts and config.resume != "changed":
        changes = "\n  ".join(conflicts)
        raise ValueError(
            f"{workdir} holds a run at step {newest:,} with other settings:\n  {changes}\n"
            "Choose another --workdir, or say what is meant: --config.resume=changed goes on from "
            "that step with the new settings, --config.resume=overwrite deletes the old run."
        )
    return newest


class DamagedRecord(ValueError):
    """A file that tells which run a directory holds cannot be read; the message says what to do."""


def read_record(path: epath.Path, *texts: str) -> dict[str, Any]:
    """The JSON object that a run has written down of itself, with a text under each of `texts`.

    Raises DamagedRecord naming the file.
    """
    try:
        found = parse_json(path.read_bytes(), str(path))
    except ValueError as error:
        found, problem = None, str(error)
    else:
        problem = f"{path} holds no object" + (f" with {', '.join(texts)}" if texts else "")
    if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in texts):
        return found
    raise DamagedRecord(
        f"{problem}. It tells which run {path.parent} holds: put a copy of it back, or choose "
        "another --workdir; in pre-training --config.resume=changed goes on without comparing the "
        "run with this command, and --config.resume=overwrite deletes the run"
    )


def corpus_record(corpus: Corpus) -> str:
    """The text of CORPUS_FILE."""
    return (
        json.dumps(
            {**_identity(corpus), "numbers": corpus.numbers, "remarks": corpus.remarks}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def _identity(corpus: Corpus) -> dict[str, str]:
    return {"content": corpus.fingerprint, "vocabulary": corpus.tokenizer.fingerprint}


def goes_on_with(config: Config, workdir: epath.Path, corpus: Corpus) -> bool:
    """Whether the run there goes on with this corpus, False = it is to be overwritten.

    Raises ValueError where a corpus of the same name is another one now, unless `config.resume`
    says that it is meant. Other words under the same ids are never meant.
    """
    path = workdir / CORPUS_FILE
    if not path.exists():  # a run of an earlier version
        return True
    now = _identity(corpus)
    try:
        before = read_record(path, *now)
    except DamagedRecord:
        if config.resume == "overwrite":
            return False
        if config.resume != "changed":
            raise
        before = {**now, "vocabulary": load_tokenizer(str(workdir)).fingerprint}
    if config.resume == "overwrite":
        return {key: before.get(key) for key in now} == now
    name = f"config.data.corpus={config.data.corpus}"
    if before["vocabulary"] != now["vocabulary"]:
        raise ValueError(
            f"{name} has another vocabulary or casing now than the run in {workdir} was trained "
            "with, so the same ids would mean other words. Choose another --workdir, or build the "
            f"corpus again with build_corpus --tokenizer={workdir}"
        )
    if before["content"] != now["content"] and config.resume != "changed":
        raise ValueError(
            f"{name} holds other text now than the run in {workdir} was trained on. Choose another "
            "--workdir, or say what is meant: --config.resume=changed goes on with the new text, "
            "--config.resume=overwrite deletes the old run."
        )
    return True


def _conflicts(config: Config, workdir: epath.Path) -> list[str]:
    try:
        return resume_conflicts(read_record(workdir / SETTINGS_FILE), config)
    except DamagedRecord as error:
        if config.resume == "changed":
            return [str(error)]
        raise


def _has_overwritten(config: Config, workdir: epath.Path) -> bool:
    """Whether the run there is this command's own, begun over an older one and not finished.

    A launcher repeats the command after a pre-emption; that must not begin from nothing again.
    """
    if (workdir / "model").exists() or not (workdir / SETTINGS_FILE).exists():
        return False
    try:
        return read_record(workdir / SETTINGS_FILE).get("resume") == "overwrite" and not _conflicts(config, workdir)
    except DamagedRecord:
        return False


def delete_run(workdir: epath.Path) -> None:
    """Deletes what the run there has left, so that nothing of it passes for the next one's."""
    with contextlib.closing(Checkpoints(str(workdir / "checkpoints"))) as checkpoints:
        checkpoints.clear()
    if jax.process_index() == 0:
        for name in (
            SETTINGS_FILE,
            CORPUS_FILE,
            STARTS_FILE,
            "metrics.jsonl",
            "examples.json",
            "result.json",
            "report.html",
        ):
            (workdir / name).unlink(missing_ok=True)
        for name in ("model", PROGRAMS_DIRECTORY):
            if (workdir / name).exists():
                (workdir / name).rmtree()
