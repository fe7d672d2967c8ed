"""Refuses settings that cannot work, before any data is read or anything compiled.

In: a ConfigDict of config.py. Out: nothing, or a ValueError that names the setting, its value and
the remedy. What depends on the data or the devices is checked by the jobs that read them.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import ml_collections

from bertjax import config as settings
from bertjax.command_line import check_name


def check_config(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that cannot work, before any data is read or anything compiled.

    Raises ValueError that names the setting, its value and the remedy.
    """
    values = settings.flatten(config)
    for name in values:
        check_name(name)
    for name, setting in settings.walk():
        if setting.allowed is not None:
            _check_allowed(name, values[name], setting.allowed)
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"config.log.wandb={config.log.wandb} needs the package of Weights & Biases: pip install wandb"
        )
    try:
        re.compile(config.optimizer.no_decay)
    except re.error as error:
        raise ValueError(
            f"config.optimizer.no_decay={config.optimizer.no_decay!r} is not a regular expression: {error}"
        ) from None
    _check_effect(config.job, values)
    if config.job == "pretrain":
        _check_pretraining(config)
    if config.batch_size % config.accumulation:
        raise ValueError(
            f"config.batch_size={config.batch_size} is not divisible by config.accumulation="
            f"{config.accumulation}; the next valid batch size is "
            f"{-(-config.batch_size // config.accumulation) * config.accumulation}"
        )


def _check_effect(job: str, values: Mapping[str, Any]) -> None:
    """Refuses what would be ignored in silence."""
    for name, setting in settings.walk():
        value = values.get(name, setting.default)
        for prefix, instead in settings.WITHOUT_EFFECT[job].items():
            if name.startswith(prefix) and value != setting.default:
                raise ValueError(f"config.{name}={value!r} has no effect on config.job={job!r}: {instead}")


def _check_allowed(name: str, value: Any, allowed: settings.Range | tuple[str, ...]) -> None:
    if isinstance(allowed, settings.Range):
        if not allowed.holds(value):
            raise ValueError(f"config.{name}={value} {allowed.complaint}")
    elif value not in allowed:
        raise ValueError(f"config.{name}={value!r} is unknown.{settings.nearest(value, list(allowed))}")


def _check_pretraining(config: ml_collections.ConfigDict) -> None:
    _check_phases(config)
    if config.model.is_decoder and config.data.nsp:
        raise ValueError(
            "config.model.is_decoder=True has no next-sentence prediction: [CLS], at "
            "the left, sees nothing. Set --config.data.nsp=False"
        )
    if config.eval.seq_length and not (5 <= config.eval.seq_length <= config.model.max_position_embeddings):
        raise ValueError(
            f"config.eval.seq_length={config.eval.seq_length} must be between 5 and "
            f"config.model.max_position_embeddings={config.model.max_position_embeddings}"
        )
    if config.masking.rate == 0:
        raise ValueError("config.masking.rate=0: nothing would be predicted; the paper has 0.15")
    longest = config.phases[-1][1]
    if config.masking.max_predictions > longest:
        raise ValueError(
            f"config.masking.max_predictions={config.masking.max_predictions} is more "
            f"than the {longest} tokens of the longest rows (config.phases); 0 is "
            "rate x length"
        )
    if config.masking.mask_prob + config.masking.random_prob > 1 + 1e-9:
        raise ValueError(
            f"config.masking.mask_prob={config.masking.mask_prob} and random_prob="
            f"{config.masking.random_prob} add up to more than 1; the rest stays unchanged"
        )

    steps, warmup = settings.total_steps(config), config.optimizer.warmup_steps
    if not 0 <= warmup <= steps:
        raise ValueError(
            f"config.optimizer.warmup_steps={warmup} must be between 0 and the {steps:,} steps of config.phases"
        )
    profiled = config.profile_steps
    if not (
        len(profiled) == 2
        and all(isinstance(step, int) for step in profiled)
        and 0 <= profiled[0] <= profiled[1] <= steps
    ):
        raise ValueError(f"config.profile_steps={profiled!r} must be (first, last) with 0 <= first <= last <= {steps}")
    settings.model_config(config.copy_and_resolve_references(), config.model.vocab_size or 5)


def _check_phases(config: ml_collections.ConfigDict) -> None:
    phases = config.phases
    if not phases or not all(
        isinstance(phase, tuple | list) and len(phase) == 2 and all(isinstance(number, int) for number in phase)
        for phase in phases
    ):
        raise ValueError(
            f"config.phases={phases!r} must be ((steps, sequence length), ...) in "
            "whole numbers, such as ((900000, 128), (100000, 512))"
        )
    previous = 0
    for steps, length in phases:
        if steps < 1:
            raise ValueError(f"config.phases={phases!r}: a phase of {steps} steps; at least 1")
        if length < 5:
            raise ValueError(
                f"config.phases={phases!r}: a sequence of {length} tokens has no room "
                "for [CLS] A [SEP] B [SEP]; at least 5"
            )
        if length < previous:
            raise ValueError(
                f"config.phases={phases!r} shrinks from {previous} to {length} tokens; put the "
                "shorter phase first (positions beyond it would go untrained)"
            )
        previous = length
    limit = config.model.max_position_embeddings
    if previous > limit:
        raise ValueError(
            f"config.phases asks for sequences of {previous} tokens, but "
            f"config.model.max_position_embeddings is {limit}; shorten the phase or raise it"
        )
