"""Refuses settings that cannot work, before any data is read or anything compiled.

In: the ConfigDict that a config file and the command line have made. Out: a Config, or a ValueError
that names the setting, its value and the remedy. What depends on the data or the devices is checked
by the jobs that read them.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import math
import operator
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertjax import config as settings
from bertjax.config import TFRECORD, Config
from bertjax.config.optimizers import check_optimizer

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
        "model.positions": "position_embedding_type position_embeddings rope rotary",
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
        settings.check(f"config.{name}", values.get(name), setting.allowed)
    config = settings.frozen(config)
    check_optimizer(config.optimizer, config.job)
    for complaint in _complaints(config):
        raise ValueError(complaint)
    return config


def _complaints(config: Config) -> Iterator[str]:
    """What is wrong between settings, the first thing first."""
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        yield f"config.log.wandb={config.log.wandb} needs the package of Weights & Biases: pip install wandb"
    if config.export.push and config.task.name == "all":
        yield f"config.export.push={config.export.push} is one name, and config.task.name=all makes several models"
    if config.export.push and (config.task.bilstm or config.task.feature_layers):
        yield "config.export.push would push nothing: no format of models can hold a BiLSTM"
    if config.job == "finetune" and not config.checkpoint.keep_best:
        yield "config.checkpoint.keep_best=0 must be at least 1: a resumed fine-tuning would have lost its best model"
    frozen = [("task.freeze", pattern) for pattern in config.task.freeze]
    for name, pattern in [("optimizer.no_decay", config.optimizer.no_decay), *frozen]:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            yield f"config.{name}: {pattern!r} is not a regular expression: {error}"
    ignored = list(_ignored(config))
    for name, setting in settings.walk(Config):
        if (value := operator.attrgetter(name)(config)) == setting.default:
            continue
        unused, instead = setting.unused or ("", "")
        if config.job == unused:
            yield f"config.{name}={value!r} has no effect on config.job={config.job!r}: {instead}"
        for names, reason in ignored:
            if name.startswith(names):
                yield f"config.{name}={value!r} would have no effect: {reason}"
    last, limit = sys.maxsize, ""  # how long a fine-tuning is depends on its data
    batches = [("config.batch_size", config.batch_size)]
    if config.job == "pretrain":
        yield from _of_phases(config.phases, config.model.max_position_embeddings)
        yield from _of_pretraining(config)
        last = settings.total_steps(config)
        limit = f" <= {last}"
        batches += [(f"config.phases={config.phases!r}: rows", rows) for _, _, *own in config.phases for rows in own]
    steps = config.profile_steps
    whole = len(steps) == 2 and all(isinstance(step, int) for step in steps)
    if steps != (0, 0) and not (whole and 1 <= steps[0] <= steps[1] <= last):
        yield f"config.profile_steps={steps!r} must be (first, last) with 1 <= first <= last{limit}, or (0, 0)"
    for name, rows in batches:
        if rows % (parts := config.accumulation):
            yield (
                f"{name}={rows} is not divisible by config.accumulation={parts}; the next valid batch size is "
                f"{-(-rows // parts) * parts}" + ", or lower accumulation to 1" * (rows < parts)
            )


def _of_phases(phases: Any, limit: int) -> Iterator[str]:
    if not phases or not all(
        isinstance(phase, tuple | list) and len(phase) in (2, 3) and all(isinstance(number, int) for number in phase)
        for phase in phases
    ):
        yield (
            f"config.phases={phases!r} must be ((steps, sequence length), ...) in whole numbers, such as "
            "((900000, 128), (100000, 512)), with rows of the batch as a third number where they are not batch_size"
        )
    for (_, previous, *_), (steps, length, *rows) in itertools.pairwise([(1, 0), *phases]):
        if rows and rows[0] < 1:
            yield f"config.phases={phases!r}: batches of {rows[0]} rows; at least 1"
        if steps < 1:
            yield f"config.phases={phases!r}: a phase of {steps} steps; at least 1"
        if length < 5:
            yield f"config.phases={phases!r}: {length} tokens have no room for [CLS] A [SEP] B [SEP]; at least 5"
        if length < previous:
            yield (
                f"config.phases={phases!r} shrinks from {previous} to {length} tokens; put the shorter phase first "
                "(positions beyond it would go untrained)"
            )
    if phases[-1][1] > limit:
        yield (
            f"config.phases asks for sequences of {phases[-1][1]} tokens, but config.model.max_position_embeddings is "
            f"{limit}; shorten the phase or raise it"
        )


def _of_pretraining(config: Config) -> Iterator[str]:
    masking, positions, longest = config.masking, config.model.max_position_embeddings, config.phases[-1][1]
    if config.model.is_decoder and config.data.corpus.startswith(TFRECORD):
        yield "config.model.is_decoder=True reads text without masks, and TFRecords bring theirs; build a token store"
    if config.model.is_decoder and config.data.nsp:
        yield (
            "config.model.is_decoder=True has no next-sentence prediction: [CLS], the first token, sees no other. Set "
            "--config.data.nsp=False"
        )
    if config.checkpoint.metric == "eval/nsp_loss" and not config.data.nsp:
        yield "config.checkpoint.metric='eval/nsp_loss' is not measured with config.data.nsp=False; set eval/mlm_loss"
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep_every
    if keep and config.budget_minutes:
        yield f"config.checkpoint.keep_every={keep} counts steps, and config.budget_minutes saves by the clock"
    elif keep and (steps := settings.total_steps(config)) % keep and not 0 < math.lcm(keep, every) <= steps:
        yield (
            f"config.checkpoint.keep_every={keep} keeps nothing: no step up to {steps:,} is a multiple of it and of "
            f"config.checkpoint.every_steps={every}"
        )
    if config.eval.seq_length and not 5 <= config.eval.seq_length <= positions:
        yield (
            f"config.eval.seq_length={config.eval.seq_length} must be between 5 and "
            f"config.model.max_position_embeddings={positions}"
        )
    if masking.rate == 0:
        yield "config.masking.rate=0: nothing would be predicted; the paper has 0.15"
    if masking.max_predictions > longest:
        yield (
            f"config.masking.max_predictions={masking.max_predictions} is more than the {longest} tokens of the "
            "longest rows (config.phases); 0 is rate x length"
        )
    if masking.mask_prob + masking.random_prob > 1 + 1e-9:
        yield (
            f"config.masking.mask_prob={masking.mask_prob} and random_prob={masking.random_prob} add up to more than "
            "1; lower one of them"
        )
    for text in config.log.fill_mask:
        if "mask" not in str(text).lower():  # the tokenizer's own, which is not known yet, may stand there too
            yield f"config.log.fill_mask: there is no [MASK] in {text!r:.200}"
    steps, warmup = settings.total_steps(config), config.optimizer.warmup_steps
    if not 0 <= warmup <= steps:
        yield f"config.optimizer.warmup_steps={warmup} must be between 0 and the {steps:,} steps of config.phases"


def _ignored(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """(beginnings of names, reason) of the settings that others leave without effect."""
    if config.data.corpus.startswith(TFRECORD):
        reason = "TFRecords bring their pairs and masks. Build a token store from the text to choose them"
        drawn = ("masking.r", "masking.mask_prob", "masking.whole_word", "eval.masking_rate", "data.short_seq_prob")
        yield drawn, reason  # config.masking.max_predictions says which files are meant
        if config.data.heldout:
            yield ("data.heldout_fraction",), "config.data.heldout names the records that are held out"
    elif config.data.corpus:
        yield (
            ("data.tokenizer", "data.heldout"),
            f"it is for TFRecords (config.data.corpus={TFRECORD}PATTERN); a token store brings its own",
        )
    model = config.model
    if not config.masking.random_prob:
        yield ("masking.replace_with_special",), "config.masking.random_prob=0 replaces nothing by random tokens"
    if model.is_decoder:
        yield ("masking.", "eval.masking_rate", "log.fill_mask"), "config.model.is_decoder=True predicts the next token"
    for name, purpose in model.idle.items():
        yield (f"model.{name}",), f"it is for config.model.{purpose}"
    if model.vocab_size % model.vocab_multiple:
        yield ("model.vocab_multiple",), f"config.model.vocab_size={model.vocab_size} is the size of the table"
    if not config.init_from:
        yield ("reinitialise_head", "extend_positions"), "there is no config.init_from"
    if not config.checkpoint.keep_best:
        yield ("checkpoint.metric",), "config.checkpoint.keep_best=0 keeps no best one"
    if not config.export.push:
        yield ("export.private",), "there is no config.export.push"
    if config.task.pack == "all":
        yield ("task.buckets", "task.group_by_length"), "rows are packed (config.task.pack='all')"
    if config.task.feature_layers:
        names = "task.layer_decay", "task.bilstm", "task.head_init"
        yield names, "config.task.feature_layers trains a network of its own over a frozen encoder"
    if config.optimizer.schedule != "warmup_stable_decay":
        yield ("optimizer.decay_share",), "it is for config.optimizer.schedule='warmup_stable_decay'"


def check_name(name: str) -> None:
    """Refuses a setting that does not exist, naming the nearest one.

    The options of a task or an optimizer are checked where they are used.
    """
    if name in dict(settings.walk(Config)) or name.startswith(settings.FREE):
        return
    if parts := [path for path, _ in settings.walk(Config) if path.startswith(f"{name}.")]:
        few = ", ".join(f"--config.{part}=..." for part in parts[:4])
        raise ValueError(f"--config.{name} is a group of settings: give one of them, as {few} (all: --help_config)")
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
