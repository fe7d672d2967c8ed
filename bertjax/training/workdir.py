"""Which run a work directory holds, and whether this command may go on with it.

In: the settings of a run and its directory. Out: the step to go on from; a refusal that lists what
differs; or the old run deleted, where `config.resume` says so.
"""

import contextlib
import json

import jax
import ml_collections
from etils import epath

from bertjax import config as settings
from bertjax.training.checkpoint import Checkpoints
from bertjax.training.corpora import Corpus
from bertjax.training.programs import DIRECTORY as PROGRAMS_DIRECTORY
from bertjax.training.starts import FILE as STARTS_FILE

SETTINGS_FILE = "config.json"  # of a run, in its work directory
CORPUS_FILE = "corpus.json"  # what it is trained on


def step_to_resume(config: ml_collections.ConfigDict, workdir: epath.Path) -> int | None:
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
        raise ValueError(f"{workdir} already holds a run at step {newest:,} and config.resume is "
                         "'never'; choose another --workdir")
    if not (workdir / SETTINGS_FILE).exists():
        raise ValueError(f"{workdir} holds checkpoints, but no {SETTINGS_FILE} that tells of which "
                         "run; choose another --workdir, or delete it with "
                         "--config.resume=overwrite")
    conflicts = _conflicts(config, workdir)
    if conflicts and config.resume != "changed":
        changes = "\n  ".join(conflicts)
        raise ValueError(
            f"{workdir} holds a run at step {newest:,} with other settings:\n  {changes}\n"
            "Choose another --workdir, or say what is meant: --config.resume=changed goes on from "
            "that step with the new settings, --config.resume=overwrite deletes the old run.")
    return newest


def corpus_record(corpus: Corpus) -> str:
    """The text of CORPUS_FILE."""
    return json.dumps({**_identity(corpus), "numbers": corpus.numbers, "remarks": corpus.remarks},
                      indent=1, ensure_ascii=False) + "\n"


def _identity(corpus: Corpus) -> dict[str, str]:
    return {"content": corpus.fingerprint, "vocabulary": corpus.tokenizer.fingerprint}


def goes_on_with(config: ml_collections.ConfigDict, workdir: epath.Path, corpus: Corpus) -> bool:
    """Whether the run there goes on with this corpus, False = it is to be overwritten.

    Raises ValueError where a corpus of the same name is another one now, unless `config.resume`
    says that it is meant. Other words under the same ids are never meant.
    """
    path = workdir / CORPUS_FILE
    if not path.exists():  # a run of an earlier version
        return True
    before, now = json.loads(path.read_text()), _identity(corpus)
    if config.resume == "overwrite":
        return {key: before.get(key) for key in now} == now
    name = f"config.data.corpus={config.data.corpus}"
    if before["vocabulary"] != now["vocabulary"]:
        raise ValueError(
            f"{name} has another vocabulary or casing now than the run in {workdir} was trained "
            "with, so the same ids would mean other words. Choose another --workdir, or build the "
            f"corpus again with build_corpus --tokenizer={workdir}")
    if before["content"] != now["content"] and config.resume != "changed":
        raise ValueError(
            f"{name} holds other text now than the run in {workdir} was trained on. Choose another "
            "--workdir, or say what is meant: --config.resume=changed goes on with the new text, "
            "--config.resume=overwrite deletes the old run.")
    return True


def _conflicts(config: ml_collections.ConfigDict, workdir: epath.Path) -> list[str]:
    return settings.resume_conflicts(json.loads((workdir / SETTINGS_FILE).read_text()), config)


def _has_overwritten(config: ml_collections.ConfigDict, workdir: epath.Path) -> bool:
    """Whether the run there is this command's own, begun over an older one and not finished.

    A launcher repeats the command after a pre-emption; that must not begin from nothing again.
    """
    if (workdir / "model").exists() or not (workdir / SETTINGS_FILE).exists():
        return False
    before = json.loads((workdir / SETTINGS_FILE).read_text())
    return before.get("resume") == "overwrite" and not _conflicts(config, workdir)


def delete_run(workdir: epath.Path) -> None:
    """Deletes what the run there has left, so that nothing of it passes for the next one's."""
    with contextlib.closing(Checkpoints(str(workdir / "checkpoints"))) as checkpoints:
        checkpoints.clear()
    if jax.process_index() == 0:
        for name in (SETTINGS_FILE, CORPUS_FILE, STARTS_FILE, "metrics.jsonl", "examples.json",
                     "report.html"):
            (workdir / name).unlink(missing_ok=True)
        for name in ("model", PROGRAMS_DIRECTORY):
            if (workdir / name).exists():
                (workdir / name).rmtree()
