"""What config files start from: the ConfigDict of all defaults, fine-tuning's recipe, variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bertjax.config.config import Config, total_steps
from bertjax.config.setting import nearest

if TYPE_CHECKING:  # late: only config files need it
    from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """The original BERT-base pre-training: a ConfigDict whose keys and types are fixed."""
    from ml_collections import ConfigDict

    return ConfigDict(dataclasses.asdict(Config()))


def finetune_config() -> ConfigDict:
    """The recipe of the paper's section 4 and appendix A.3 for a task; name it in `config.task`."""
    config = default_config()
    config.job = "finetune"
    config.batch_size = 32  # A.3: 16 or 32
    config.optimizer.learning_rate = 2e-5  # A.3: 5e-5, 3e-5 or 2e-5
    # Without it, small tasks often fail to train (Mosbach et al. 2021); the original has none.
    config.optimizer.bias_correction = True
    config.checkpoint.keep_last = 1  # beside the best one
    return config


def apply_variants(
    config: ConfigDict, text: str | None, variants: Mapping[str, Callable[[ConfigDict], None]]
) -> ConfigDict:
    """Applies the comma-separated variants of `--config=FILE:variant,variant` in order.

    Raises ValueError naming the nearest variant when one is unknown.
    """
    for name in filter(None, (text or "").split(",")):
        if name not in variants:
            raise ValueError(f"unknown variant {name!r}.{nearest(name, list(variants))}")
        variants[name](config)
    return config


def two_phase(config: ConfigDict) -> None:
    """Variant: 128 tokens for 90 % of the steps, 512 for the last 10 % (paper A.2)."""
    steps = total_steps(config)
    short = steps * 9 // 10
    config.phases = ((short, 128), (steps - short, 512))


def packed(config: ConfigDict) -> None:
    """Variant: several pairs in one row, so that no work is spent on padding."""
    config.data.packed = True


PRETRAINING_VARIANTS = {"two_phase": two_phase, "packed": packed}


def scan_layers(remat: str) -> Callable[[ConfigDict], None]:
    """Variant for a TPU slice: one compiled layer and this remat policy (docs/plan.md), pure data parallelism."""

    def variant(config: ConfigDict) -> None:
        config.execution.layers = "scan"
        config.execution.remat = remat
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = -1, 1, 1
        config.accumulation = 1

    return variant
