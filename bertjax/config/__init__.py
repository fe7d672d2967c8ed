"""Every setting once: its default, meaning, unit, source and what it may be.

The sections are frozen dataclasses, and `Config` holds them all: it is what the program works with. A config file
(`configs/*.py`) and the command line write to a ConfigDict of the same names and types instead (`default_config()`;
`--config.optimizer.learning_rate=3e-5`); `frozen` turns it into a Config once, and sections are handed on whole from
there. `--help_config` and docs/settings.md are made from them; config_checks.py refuses what cannot work.
"""

from bertjax.config.config import (
    FREE,
    FREE_ON_RESUME,
    Config,
    PhaseSettings,
    decides_bits,
    differences,
    flatten,
    frozen,
    max_predictions,
    phases,
    resume_conflicts,
    total_steps,
)
from bertjax.config.describe import describe
from bertjax.config.pretraining import (
    TFRECORD,
    Architecture,
    DataSettings,
    EvaluationSettings,
    MaskingSettings,
    ModelSettings,
)
from bertjax.config.recipes import PRETRAINING_VARIANTS, apply_variants, default_config, finetune_config, scan_layers
from bertjax.config.setting import BELOW_ONE, POSITIVE_INTEGER, Range, Setting, check, did_you_mean, nearest, walk
from bertjax.config.task import TaskSettings
from bertjax.config.training import CheckpointSettings, ExecutionSettings, LogSettings, MeshSettings, OptimizerSettings
