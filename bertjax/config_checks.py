"""Refuses settings that cannot work, before any data is read or anything compiled.

In: the ConfigDict that a config file and the command line have made. Out: a Config, or a ValueError
that names the setting, its value and the remedy. What depends on the data or the devices is checked
by the jobs that read them.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bertjax import config as settings
from bertjax.config import Config, OptimizerSettings, nearest

if TYPE_CHECKING:
    import ml_collections


# What the original, transformers and others call the settings of this one.
_PHASES = "phases=((STEPS, LENGTH),)"
ALIASES = {
    alias: setting
    for setting, aliases in {
        _PHASES: "steps max_steps num_steps total_steps train_steps num_train_steps training_steps "
        "seq_length max_seq_len sequence_length",
        f"task.epochs (fine-tuning), or --config.{_PHASES} (pre-training)": (
            "epoch epochs num_epochs num_train_epochs max_epochs"
        ),
        f"task.max_length (fine-tuning), or --config.{_PHASES} (pre-training)": (
            "max_len max_seq_length model_max_length"
        ),
        "optimizer.learning_rate": "lr peak_lr max_lr",
        "optimizer.warmup_steps (pre-training), or --config.task.warmup (fine-tuning)": (
            "warmup num_warmup_steps warmup_ratio warmup_proportion"
        ),
        "optimizer.schedule": "lr_scheduler_type lr_schedule",
        "optimizer.weight_decay": "wd decay",
        "optimizer.clip_norm": "max_grad_norm grad_clip clip clip_grad gradient_clip",
        "optimizer.eps": "adam_epsilon epsilon",
        "optimizer.b1": "adam_beta1 beta1",
        "optimizer.b2": "adam_beta2 beta2",
        "optimizer.name": "optim optimizer",
        "batch_size": "bs train_batch_size global_batch_size per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps accumulation_steps grad_accum",
        "task.eval_batch_size": "per_device_eval_batch_size",
        "task.name": "task_name",
        "masking.rate": "mlm_probability masked_lm_prob mask_rate masking_rate",
        "masking.max_predictions": "max_predictions_per_seq",
        "masking.whole_word": "do_whole_word_mask",
        "execution.dtype": "bf16 fp16 precision mixed_precision",
        "execution.remat": "gradient_checkpointing",
        "model.hidden_dropout_prob": "dropout",
        "model.num_hidden_layers": "num_layers n_layers depth",
        "model.num_attention_heads": "num_heads n_heads",
        "checkpoint.every_steps": "save_steps save_every save_checkpoints_steps",
        "checkpoint.keep_last": "save_total_limit keep_checkpoint_max",
        "eval.every_steps": "eval_steps eval_every",
        "log.every_steps": "logging_steps log_every",
        "init_from": "init_checkpoint model_name_or_path pretrained model_path",
        "data.corpus (pre-training), or --config.task.data (fine-tuning)": (
            "data_dir input_file train_file dataset dataset_name"
        ),
        "data.tokenizer": "vocab_file tokenizer_name",
        "seed": "random_seed rng",
    }.items()
    for alias in aliases.split()
}


def check_config(config: ml_collections.ConfigDict | Config) -> Config:
    """The settings as the program works with them, once it is known that they can work.

    Raises ValueError that names the setting, its value and the remedy.
    """
    values = settings.flatten(config)
    for name in values:
        check_name(name)
    for name, setting in settings.walk(Config):
        if setting.allowed is not None:
            settings.check(f"config.{name}", values[name], setting.allowed)
    config = settings.frozen(config)
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"config.log.wandb={config.log.wandb} needs the package of Weights & Biases: pip install wandb"
        )
    _check_optimizer(config.optimizer, config.job)
    _check_effect(config.job, values)
    if config.job == "pretrain":
        _check_pretraining(config)
    _check_profile(config)
    if config.batch_size % config.accumulation:
        raise ValueError(
            f"config.batch_size={config.batch_size} is not divisible by config.accumulation="
            f"{config.accumulation}; the next valid batch size is "
            f"{-(-config.batch_size // config.accumulation) * config.accumulation}"
        )
    return config


OWN_OPTIMIZERS = ("adamw", "lamb", "stableadamw")


def optax_factory(settings: OptimizerSettings) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function optax.NAME (or optax.contrib.NAME) and the arguments that config.optimizer.options give it.

    Raises ValueError for an unknown name or argument, with the nearest one and what there is.
    """
    import optax  # late: it imports jax

    factories = {
        f"{prefix}.{name}": function
        for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib))
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if "learning_rate" in inspect.signature(function).parameters and not name.startswith(("_", "scale_by_"))
    }
    if "schedule_free" in settings.name:
        raise ValueError(
            f"config.optimizer.name={settings.name!r} is not supported: the weights that it evaluates are not those "
            "that it trains"
        )
    if settings.name not in factories:
        names = {name: name for name in OWN_OPTIMIZERS} if "optax" not in settings.name else {}
        names = {name.rsplit(".", 1)[-1]: name for name in factories} | names
        close = difflib.get_close_matches(settings.name.rsplit(".", 1)[-1], names, 3)
        close.sort(key=lambda name: "." in names[name])
        raise ValueError(
            f"config.optimizer.name={settings.name!r} is unknown. "
            + (f"Did you mean {' or '.join(repr(names[name]) for name in close)}?" if close else "")
            + f" Valid: {', '.join((*OWN_OPTIMIZERS, *factories))}." * (not close)
        )
    takes = dict(inspect.signature(factories[settings.name]).parameters)
    elsewhere = {
        "learning_rate": "config.optimizer.learning_rate",
        "weight_decay": "config.optimizer.weight_decay",
        "weight_decay_rate": "config.optimizer.weight_decay",
        "adam_weight_decay": "config.optimizer.weight_decay",
        "mask": "config.optimizer.no_decay",
        "weight_decay_mask": "config.optimizer.no_decay",
    }
    own = {name: parameter for name, parameter in takes.items() if name not in elsewhere}
    signature = ", ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in own.items()
    )
    for name in settings.options:
        if name in takes and name in elsewhere:
            raise ValueError(f"config.optimizer.options.{name} is a setting of its own: {elsewhere[name]}")
        if name not in takes:
            raise ValueError(
                f"config.optimizer.options.{name}: {settings.name} has no argument {name!r}."
                f"{nearest(name, list(own)).split(' Valid')[0]} It takes ({signature})"
            )
    missing = [name for name, p in own.items() if p.default is p.empty and name not in settings.options]
    if missing:
        raise ValueError(f"{settings.name} needs --config.optimizer.options.{missing[0]}=VALUE; it takes ({signature})")
    return factories[settings.name], dict(settings.options)


def _check_optimizer(o: OptimizerSettings, job: str) -> None:
    try:
        re.compile(o.no_decay)
    except re.error as error:
        raise ValueError(f"config.optimizer.no_decay={o.no_decay!r} is not a regular expression: {error}") from None
    if o.schedule != "warmup_stable_decay" and o.decay_share != OptimizerSettings.decay_share:
        raise ValueError(
            f"config.optimizer.decay_share={o.decay_share} has no effect on config.optimizer.schedule={o.schedule!r}; "
            "it is for warmup_stable_decay"
        )
    if o.name in OWN_OPTIMIZERS:
        if o.options:
            raise ValueError(
                f"config.optimizer.options.{next(iter(o.options))} has no effect on config.optimizer.name={o.name!r}: "
                f"options are the arguments of an optax optimizer; {', '.join(OWN_OPTIMIZERS)} have b1, b2, eps and "
                "bias_correction"
            )
        return
    optax_factory(o)
    # Fine-tuning's recipe turns bias_correction on, which says nothing about other optimizers.
    for name in ("b1", "b2", "eps", *(["bias_correction"] if job == "pretrain" else [])):
        value, default = getattr(o, name), getattr(OptimizerSettings, name)
        if value != default:
            raise ValueError(
                f"config.optimizer.{name}={value!r} has no effect on config.optimizer.name={o.name!r}, whose arguments "
                f"are config.optimizer.options; leave it at {default}"
            )


def _check_effect(job: str, values: Mapping[str, Any]) -> None:
    """Refuses what would be ignored in silence."""
    for name, setting in settings.walk(Config):
        value = values.get(name, setting.default)
        unused, instead = setting.unused or ("", "")
        if job == unused and value != setting.default:
            raise ValueError(f"config.{name}={value!r} has no effect on config.job={job!r}: {instead}")


def _check_pretraining(config: Config) -> None:
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


def _check_profile(config: Config) -> None:
    steps, last = config.profile_steps, settings.total_steps(config) if config.job == "pretrain" else sys.maxsize
    if not (len(steps) == 2 and all(isinstance(step, int) for step in steps) and 0 <= steps[0] <= steps[1] <= last):
        limit = f" <= {last}" if config.job == "pretrain" else ""
        raise ValueError(f"config.profile_steps={steps!r} must be (first, last) with 0 <= first <= last{limit}")


def _check_phases(config: Config) -> None:
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


def check_name(name: str) -> None:
    """Refuses a setting that does not exist, naming the nearest one.

    The options of a task or an optimizer are checked where they are used.
    """
    if name in dict(settings.walk(Config)) or name.startswith(settings.FREE):
        return
    close = meant(name)
    raise ValueError(
        f"unknown setting --config.{name}"
        + (f". Did you mean --config.{close}?" if close else "; --help_config lists all")
    )


def meant(name: str) -> str:
    """The setting that an unknown name means, '' if none: another program's word for it, a right
    name in the wrong group ('learning_rate' for 'optimizer.learning_rate'), or the nearest.
    """
    valid = [path for path, _ in settings.walk(Config)]
    name = name.lower().replace("-", "_")
    last = name.rsplit(".", 1)[-1]
    if last in ALIASES:
        return ALIASES[last]
    same = [path for path in valid if path.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6) or [
        path
        for path in valid  # 'lerning_rate' for 'optimizer.learning_rate'
        if difflib.get_close_matches(last, [path.rsplit(".", 1)[-1]], cutoff=0.75)
    ]
    return " or --config.".join(same) or next(iter(close), "")
