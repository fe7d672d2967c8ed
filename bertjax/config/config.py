"""Config, all settings of a run, and what depends on the names of settings: resuming, jobs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bertjax.config.pretraining import PAPER, DataSettings, EvaluationSettings, MaskingSettings, ModelSettings
from bertjax.config.setting import AT_LEAST_0, AT_LEAST_1, SEED, nearest, section, setting, walk
from bertjax.config.task import TaskSettings
from bertjax.config.training import (
    CheckpointSettings,
    ExecutionSettings,
    ExportSettings,
    LogSettings,
    MeshSettings,
    OptimizerSettings,
)

if TYPE_CHECKING:
    import ml_collections


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    job: str = setting("pretrain", "what to do: pretrain, or finetune (on 'task')", ("pretrain", "finetune"))
    seed: int = setting(0, "seed of everything random: initial weights, pairs, order, masks, dropout", SEED)
    init_from: str = setting(
        "",
        "model directory (Hugging Face, TF1 or bertjax) whose weights are loaded at step 0; optimizer and step start "
        "fresh. Ignored when a run is resumed",
    )
    reinitialise_head: bool = setting(
        False,
        "let heads (MLM, NSP, pooler) that init_from lacks start with random weights; False = refuse the checkpoint",
        unused=("finetune", "a head that config.init_from lacks always starts with random weights"),
    )
    extend_positions: str = setting(
        "",
        "how the position table of init_from is made longer where rows need it: repeat = its rows again, interpolate "
        "= values between its rows; '' = refuse such rows",
        ("", "repeat", "interpolate"),
    )
    resume: str = setting(
        "auto",
        "what to do when the workdir already holds a run: auto = go on if the settings agree, stop if they differ; "
        "changed = go on with the new settings; overwrite = delete the old run (the same command, given again by a "
        "launcher, goes on with its own run); never = stop",
        ("auto", "changed", "overwrite", "never"),
    )
    phases: tuple[tuple[int, ...], ...] = setting(
        ((1_000_000, 512),),
        "((steps, sequence length[, rows]), ...): phases of one run with one optimizer state and one schedule; lengths "
        "in tokens, never shrinking; rows of the global batch where they are not batch_size",
        source=PAPER,
        unused=("finetune", "config.task.epochs says how long"),
    )
    budget_minutes: float = setting(
        0.0,
        "end the run after so much time, start-up included: phases and learning rate then follow the time, and the "
        "steps of 'phases' are the most that are done; 0 = off",
        AT_LEAST_0,
        unit="minutes",
        unused=("finetune", "config.task.epochs says how long"),
    )
    batch_size: int = setting(256, "global batch, sequences an optimizer step", AT_LEAST_1, source=PAPER, unit="rows")
    accumulation: int = setting(
        1,
        "micro-batches an optimizer step; the update is the large batch's, except that each micro-batch draws dropout "
        "of its own",
        AT_LEAST_1,
    )
    data: DataSettings = section(DataSettings, unused=("finetune", "config.task.data names the data"))
    masking: MaskingSettings = section(MaskingSettings, unused=("finetune", "nothing is masked"))
    model: ModelSettings = section(ModelSettings, unused=("finetune", "the model is that of config.init_from"))
    optimizer: OptimizerSettings = section(OptimizerSettings)
    execution: ExecutionSettings = section(ExecutionSettings)
    mesh: MeshSettings = section(MeshSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    eval: EvaluationSettings = section(
        EvaluationSettings, unused=("finetune", "config.task.evaluations_per_epoch says how often")
    )
    log: LogSettings = section(LogSettings)
    export: ExportSettings = section(ExportSettings)
    task: TaskSettings = section(TaskSettings, unused=("pretrain", "it is for fine-tuning"))
    watchdog_seconds: float = setting(
        3600.0,
        "end the process (exit code 76, stacks on stderr) when a step, a batch of data or of an evaluation takes so "
        "long: something hangs. Compiling and saving may take half an hour at least; 0 = never",
        AT_LEAST_0,
        unit="seconds",
    )
    profile_steps: tuple[int, int] = setting(
        (0, 0), "(first, last) step recorded as a profiler trace under WORKDIR/profile; (0, 0) = none"
    )

    def replace(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values: {'batch_size': 16, 'optimizer.learning_rate': 3e-5, 'task.options.label': 'x'}.

        Raises ValueError for an unknown name.
        """
        known = dict(walk(Config))
        changed: dict[str, Any] = {}
        for name, value in values.items():
            group, _, own = name.partition(".")
            own, _, option = own.partition(".")
            if name not in known and not name.startswith(FREE):
                raise ValueError(f"there is no setting {name!r}.{nearest(name, list(known))}")
            if own:
                before = changed.get(group, getattr(self, group))
                if option:
                    value = {**getattr(before, own), option: value}
                changed[group] = dataclasses.replace(before, **{own: value})
            else:
                changed[group] = value
        return dataclasses.replace(self, **changed)

    def to_json(self) -> str:
        """The text of config.json in a work directory."""
        return json.dumps(dataclasses.asdict(self), indent=1)


# Whose names are not listed here: they are checked by the task or the optimizer that takes them.
FREE = ("task.options.", "optimizer.options.")

# Settings that may change when a run is resumed: they alter neither data, loss nor update rule.
# (task.data is known by its content.)
FREE_ON_RESUME = tuple(
    "execution. mesh. checkpoint. eval. log. export. profile_steps resume init_from reinitialise_head extend_positions "
    "watchdog_seconds data.workers data.prefetch data.cache data.corpus_limits accumulation task.data "
    "task.predict".split()
)
# Settings that name stores and files, whose content is compared by itself.
PLACES = ("data.corpus", "data.tokenizer", "data.heldout")
# Of FREE_ON_RESUME, the settings on which the order of sums depends.
ORDER_OF_SUMS = tuple(
    "execution.dtype execution.kernels execution.layers execution.remat execution.prng mesh. accumulation".split()
)


def frozen(config: ml_collections.ConfigDict | Config) -> Config:
    """The settings that a config file and the command line have made, which no longer change.

    Raises ValueError for an architecture that cannot be; see config_checks.py for other refusals.
    """
    return config if isinstance(config, Config) else _of(Config, config.to_dict())


def _of(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass of nested values."""
    sections = {field.name: field.metadata.get("section") for field in dataclasses.fields(kind)}
    return kind(**{name: _of(sections[name], value) if sections.get(name) else value for name, value in values.items()})


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{'optimizer.learning_rate': 1e-4, ...} of a Config, a ConfigDict or a parsed config.json."""
    flat: dict[str, Any] = {}
    for name, value in (dataclasses.asdict(config) if isinstance(config, Config) else config).items():
        if hasattr(value, "items"):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def resume_conflicts(old: Mapping[str, Any], new: Config) -> list[str]:
    """Lines 'name: old -> new' of the settings that would change the run if it went on.

    Args:
      old: a parsed config.json; what it lacks is younger than the run, which had the default.
    """
    lines = differences(flatten(Config()) | flatten(old), flatten(new))
    return [line for line in lines if not line.startswith(FREE_ON_RESUME)]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines 'name: old -> new' of two flat records; a tuple equals the list that JSON makes of it, and a store its path
    in another spelling. Of fingerprints it says that the content is another one."""

    def plain(value: Any) -> Any:
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    def same(name: str) -> bool:
        before, now = plain(old.get(name)), plain(new.get(name))
        spelled = name.removeprefix("config.") in PLACES and isinstance(before, str) and isinstance(now, str)
        return before == now or (spelled and _places(before) == _places(now))

    def change(old: Any, new: Any) -> str:
        if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{32,}", value) for value in (old, new)):
            return f"other content ({old[:8]} -> {new[:8]})"
        return f"{old!r} -> {new!r}"

    return [
        f"{name}: {change(old.get(name), new.get(name))}" for name in sorted(old.keys() | new.keys()) if not same(name)
    ]


def _places(text: str) -> list[tuple[str, str]]:
    """(path, weight) of each part of DIR=WEIGHT,DIR: 'store/', './store' and its absolute path are one."""
    found = []
    for part in map(str.strip, text.split(",")):
        path, equals, weight = part.rpartition("=") if "=" in part else (part, "", "")
        found.append((os.path.realpath(os.path.expanduser(path)) if path else "", equals + weight))
    return found


def decides_bits(config: Config) -> dict[str, Any]:
    """The settings that the numbers of a run depend on, be it by the order of sums alone."""
    return {
        name: value
        for name, value in flatten(config).items()
        if name.startswith(ORDER_OF_SUMS) or not name.startswith(FREE_ON_RESUME)
    }


class PhaseSettings(NamedTuple):
    """One of config.phases."""

    steps: int
    length: int  # tokens of a row
    rows: int  # of the global batch
    first_row: int  # of the stream of rows of this length: the phases of one length follow each other in it


def phases(config: Config) -> list[PhaseSettings]:
    """The phases of a run."""
    found: list[PhaseSettings] = []
    for steps, length, *rows in config.phases:
        before = sum(phase.steps * phase.rows for phase in found if phase.length == length)
        found.append(PhaseSettings(steps, length, *(rows or [config.batch_size]), before))
    return found


def total_steps(config: Config | ml_collections.ConfigDict) -> int:
    """Optimizer steps of the whole run, over all phases."""
    return sum(phase[0] for phase in config.phases)


def max_predictions(config: Config, seq_length: int, rate: float | None = None) -> int:
    """P, the predicted positions of a row of `seq_length` tokens (at `rate`: config.masking's)."""
    rate = config.masking.rate if rate is None else rate
    # 1e-9: 0.15 * 20 is 3.0000000000000004 in floating point, which must not become 4.
    return config.masking.max_predictions or math.ceil(rate * seq_length - 1e-9)
