"""Training from Python: a configuration to a run in its directory, and what came out of it.

In: a configuration (a name, a file, a ConfigDict or a Config), and data as paths or Python objects. Out: a `Result`.
The command line (main.py) calls `prepare` and the function that it gives; `train` and `finetune` add what a notebook
needs: exceptions, a picture of the run, and a process that goes on afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from bertjax import jax_settings
from bertjax.command_line import config_names, default_workdir, group_of, load_config
from bertjax.config import FREE, Config
from bertjax.config_checks import check_config, check_name
from bertjax.formats.checkpoint import resolve_directory
from bertjax.formats.files import parse_json, scratch_directory
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.loading import load_model
from bertjax.interruption import interruptible, one_line
from bertjax.log import notebook
from bertjax.log.logbook import METRICS_FILE, read_records
from bertjax.process import clock, runtime
from bertjax.process.agreement import require_same_command
from bertjax.process.distributed import wait_for_all
from bertjax.process.preemption import Preempted
from bertjax.run.claim import released, withdrawn_after_errors
from bertjax.tokenization import Tokenizer
from bertjax.tokenization.train_vocab import VOCAB_SIZE

if TYPE_CHECKING:
    import ml_collections

    AnyConfig = str | os.PathLike[str] | ml_collections.ConfigDict | Config


def prepare(config: Config, workdir: str) -> Callable[..., Any]:
    """Checks everything that can be checked without compiling; the function that it returns trains.

    That takes `write` and `show` of the Logbook. Raises what the jobs' `prepare` raises, and then leaves nothing of
    what it made in `workdir`.
    """
    if config.job == "finetune" and config.task.name == "all":
        from bertjax.tasks import suite as jobs
    elif config.job == "finetune":
        from bertjax.tasks import job as jobs
    else:
        from bertjax.pretraining import job as jobs
    clock.reach("imports")
    with withdrawn_after_errors():
        require_same_command(config, workdir)
        job = jobs.prepare(config, workdir)
    clock.reach("data")

    def run(**output: Any) -> Any:
        wait_for_all("preparing its data")
        return jobs.run(job, **output)

    return run


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run has left in its directory; a path of its model, wherever one is taken.

    Attributes:
      workdir: the directory of the run.
      step: how many steps the run has taken.
      metrics: {name: value} on held-out data, of the last evaluation of a pre-training or the best one of a
        fine-tuning. A run of all GLUE tasks has TASK/NAME of each, whose own runs are in WORKDIR/TASK.
    """

    workdir: str
    step: int
    metrics: Mapping[str, float]

    @property
    def model_path(self) -> str:
        """The directory of the model, in Hugging Face's layout."""
        return str(epath.Path(self.workdir) / "model")

    def __fspath__(self) -> str:
        return self.model_path

    @property
    def report(self) -> str:
        """The page with curves, results, examples and settings."""
        return str(epath.Path(self.workdir) / "report.html")

    @functools.cached_property
    def model(self) -> LoadedModel:
        """The model, loaded."""
        return load_model(self.model_path)

    @classmethod
    def of(cls, workdir: str | os.PathLike[str]) -> Result:
        """The result of a finished run. Raises ValueError if there is none."""
        directory = resolve_directory(workdir)
        if (directory / "glue.md").exists():
            tasks = {path.name: cls.of(path) for path in directory.iterdir() if (path / "result.json").exists()}
            metrics = {f"{task}/{name}": x for task in sorted(tasks) for name, x in tasks[task].metrics.items()}
            return cls(str(directory), sum(task.step for task in tasks.values()), metrics)
        if not (directory / "result.json").exists():
            raise ValueError(f"{directory} holds no finished run: it has no result.json")
        result = parse_json((directory / "result.json").read_bytes(), str(directory / "result.json"))
        records = read_records(directory / METRICS_FILE)
        last = next((record for record in records[::-1] if any(name.startswith("eval/") for name in record)), {})
        # A fine-tuning run goes back to its best step.
        metrics = result.get("scores") or {
            name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/")
        }
        return cls(str(directory), max((record["step"] for record in records), default=0), metrics)

    def _repr_html_(self) -> str:
        rows = [notebook.named(name, value) for name, value in self.metrics.items() if value is not None]
        links = "".join(
            f' <a href="{html.escape(os.path.relpath(path))}" target="_blank">{name}</a>'
            for name, path in (("report", self.report), ("model", self.model_path))
            if os.path.exists(path)  # here, and not in a bucket
        )
        return f"{notebook.table([('steps', f'{self.step:,}'), *rows])}<p>{html.escape(self.workdir)}{links}</p>"


def train(
    config: AnyConfig = "demo",
    workdir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    texts: Any = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Result:
    """Pre-trains a model, or goes on with the run that `workdir` holds.

    Args:
      config: the name of an experiment that comes with the package ("demo", "large:two_phase"), a config file, the
        ConfigDict of one, or a Config.
      workdir: directory of the run; None is runs/NAME where `config` is a name or a file.
      settings: changes to it, {"optimizer.learning_rate": 2e-4}.
      texts: the corpus in place of that of the config, each text a document: a list, a pandas Series or DataFrame, or a
        Dataset (column "text"). Its token store is made in `workdir`, with a tenth of the documents held out.
      tokenizer: of the texts, or its directory; None takes that of config.init_from, or trains a WordPiece vocabulary.
      vocab_size: entries of the vocabulary that is trained, at most.

    Ctrl-C, or the interruption of the notebook's cell, saves a checkpoint and raises KeyboardInterrupt; SIGTERM saves
    one and raises SystemExit with code 75. The same call goes on from there.

    Raises:
      ValueError: a setting, or data, that cannot work; the message names it and the remedy.
      CheckpointError, NotFiniteError, OutputError: with the message of the command line.
    """
    if texts is None and tokenizer is not None:
        raise ValueError("tokenizer is for texts; a token store brings its own")
    if texts is not None:
        _require_one("texts", settings, "data.corpus")
    found, workdir = read_config(config, "pretrain", settings), _workdir(config, workdir)
    with _explained():
        if texts is None:
            return _run(found, workdir)
        from bertjax.given import text_store  # late: a run of files needs none of it

        own = tokenizer or found.init_from or None
        if own and vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={vocab_size} has no effect: the tokenizer, or that of init_from, brings its own"
            )
        with text_store(texts, workdir, own, vocab_size) as (store, keep):
            changes = {"data.corpus": str(store)}
            if found.data.corpus == "docstrings" and "log.fill_mask" not in (settings or {}):
                changes["log.fill_mask"] = ()  # the demo's sentences are about its own corpus
            return _run(found.replace(changes), workdir, keep)


def finetune(
    config: AnyConfig = "classify",
    workdir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    init_from: str | os.PathLike[str] | None = None,
    train: Any = None,
    dev: Any = None,
    test: Any = None,
) -> Result:
    """Fine-tunes a pre-trained model on a task, or goes on with the run that `workdir` holds.

    Args:
      config, workdir, settings: as of `train`; the config names the task ("glue:mrpc", "squad:2.0", "ner").
      init_from: what to start from: a model's directory, its name at the Hub, or the Result of a run.
      train, dev, test: rows in place of files. For "classify" a list of (text, label) or (text, text, label), for "ner"
        of (words, tags); or dicts, a pandas DataFrame or a Dataset with the columns that config.task.options names
        (text and label, or tokens and tags). Labels with a fraction make a regression, and a list of names is several
        labels of a text. Without `dev`, a tenth of `train` is held out.

    Interruption and errors are those of `train`.
    """
    settings, splits = dict(settings or {}), {"train": train, "dev": dev, "test": test}
    splits = {name: data for name, data in splits.items() if data is not None}
    if not isinstance(init_from, str | os.PathLike | None):
        raise ValueError(f"init_from={init_from!r:.80} is neither the path or name of a model nor the Result of a run")
    if init_from is not None:
        _require_one("init_from", settings, "init_from")
        settings["init_from"] = os.fspath(init_from)
    if splits:
        _require_one("train", settings, "task.data", "task.options.files")
    found, workdir = read_config(config, "finetune", settings), _workdir(config, workdir)
    with _explained():
        if not splits:
            return _run(found, workdir)
        from bertjax.given import write_splits

        with scratch_directory() as directory:
            options, numbers = write_splits(splits, found, directory)
            predict = *found.task.predict, *(["test"] if "test" in splits else [])
            found = found.replace({"task.data": str(directory), "task.options": options, "task.predict": predict})
            try:
                return _run(found, workdir)
            except ValueError as error:
                text = str(error).replace(f"{directory}{os.sep}", "")
                raise ValueError(_by_row(text, numbers)) from error


def _require_one(argument: str, settings: Mapping[str, Any] | None, *names: str) -> None:
    """Refuses a setting that says the same as an argument: one of them would have no effect."""
    for name in names:
        if name in (settings or {}):
            raise ValueError(f"{argument} is given, and so is {name!r} among the settings: leave one of them out")


def _by_row(text: str, numbers: Mapping[str, Sequence[int]]) -> str:
    """An error with 'dev: row 3' for dev.jsonl:4, as data/objects.py names rows.

    `numbers`: of train and dev, where dev was cut off, the number of each row among those that were given.
    """

    def row(found: re.Match[str]) -> str:
        split, line = found.groups()
        if not line:
            return split
        number = int(line) - 1
        return f"train: row {numbers[split][number]}" if split in numbers else f"{split}: row {number}"

    return re.sub(r"\b(train|dev|test)\.jsonl(?::(\d+))?", row, text)


def read_config(config: AnyConfig, job: str, settings: Mapping[str, Any] | None = None) -> Config:
    """The settings of an experiment with changes.

    Raises ValueError that names the setting, or the config file with its line; also where it is of another job.
    """
    import ml_collections

    if isinstance(config, str | os.PathLike):
        text = os.fspath(config)
        name = text.partition(":")[0]
        named = name.isidentifier() and name != "bertjax" and not os.path.exists(name)  # a name, misspelt perhaps
        if name in config_names() or named:
            text = f"bertjax:{text}"
        found = load_config(text)
    elif isinstance(config, Config):
        found = ml_collections.ConfigDict(dataclasses.asdict(config))
    elif isinstance(config, ml_collections.ConfigDict):
        found = config.copy_and_resolve_references()
    else:
        raise ValueError(f"config={config!r:.80} is not an experiment's name, a config file, a ConfigDict or a Config")
    found.unlock()
    for name, value in (settings or {}).items():
        check_name(name)
        group, own = group_of(found, name)
        try:  # an option is checked by the task or the optimizer that takes it
            with group.ignore_type() if name.startswith(FREE) else contextlib.nullcontext():
                group[own] = _listed(value) if isinstance(group.get(own), tuple) else _plain(value)
        except TypeError:
            raise ValueError(
                f"{name}={value!r:.80} must be {type(group[own]).__name__}, not {type(value).__name__}"
            ) from None
    checked = check_config(found)
    if checked.job != job:
        instead = {"pretrain": "bertjax.train", "finetune": "bertjax.finetune"}[checked.job]
        raise ValueError(f"config.job={checked.job!r}: this experiment is one for {instead}")
    if checked.watchdog_seconds == Config.watchdog_seconds:  # it would end the notebook's process with all in it
        checked = checked.replace({"watchdog_seconds": 0.0})
    return checked


def _plain(value: Any) -> Any:
    """A setting as a config file has it: tuples for lists, text for a path, what Python has for numpy's."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _listed(value: Any) -> Any:
    """A setting that is a list in a config file, for which a text alone or {label: weight} may stand."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    return (value,) if isinstance(value, str) else _plain(value)


def _workdir(config: AnyConfig, workdir: str | os.PathLike[str] | None) -> str:
    if workdir is not None:
        return os.path.expanduser(os.fspath(workdir))
    if not isinstance(config, str | os.PathLike):
        raise ValueError("workdir is missing: the directory of the run; a second call with it resumes the run")
    return default_workdir(os.fspath(config))


def _run(config: Config, workdir: str, on_prepared: Callable[[], None] = lambda: None) -> Result:
    """`on_prepared` is called once the run is not refused any more."""
    place = released(resolve_directory(workdir))
    with clock.begun(), interruptible(), place, jax_settings.fixed(runtime.settings(config)):
        run = prepare(config, workdir)
        on_prepared()
        try:
            run(**notebook.output())
        except Preempted as stopped:
            if stopped.reason != "SIGINT":
                raise
            raise KeyboardInterrupt(str(stopped)) from None
    return Result.of(workdir)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Adds to an error the remedy that the command line would print, if the error does not say it itself."""
    try:
        yield
    except Exception as error:
        if (line := one_line(error)) and " ".join(line.split()) not in " ".join(str(error).split()):
            error.add_note(line)
        raise
