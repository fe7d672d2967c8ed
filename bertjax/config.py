"""Every setting once: its default, its unit, where the value comes from, what it may be.

A config file (`configs/*.py`) starts from `default_config()` and changes values; the command line
overrides them (`--config.optimizer.learning_rate=3e-5`). `describe` gives the text of
`--help_config`. What follows from the settings of a run (its steps, the architecture, what may
change at a resume) is computed here; config_checks.py refuses those that cannot work.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections

from bertjax.model.presets import BertConfig, Execution


@dataclasses.dataclass(frozen=True)
class Range:
    """Which numbers a setting may be, and what is said of others."""

    holds: Callable[[float], bool]  # False for NaN, as every comparison with it
    complaint: str


AT_LEAST_1 = Range(lambda x: x >= 1, "must be at least 1")
AT_LEAST_0 = Range(lambda x: x >= 0, "must be at least 0")
SEED = Range(lambda x: 0 <= x < 2**31, "must be from 0 to 2,147,483,647")  # fits an int32
POSITIVE = Range(lambda x: 0 < x < math.inf, "must be positive")
SHARE = Range(lambda x: 0 <= x <= 1, "is not a probability (0 to 1)")
BELOW_ONE = Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: default, meaning (with its unit), source of the default, values it may have.

    allowed: a Range for numbers, or the names to choose from; None = whatever has the type.
    """

    default: Any
    help: str
    source: str = ""
    allowed: Range | tuple[str, ...] | None = None


S = Setting
PAPER, PAPER_TASKS = "BERT paper A.2", "BERT paper A.3"  # pre-training, fine-tuning
CODE = "google-research/bert"

SETTINGS: dict[str, Any] = {
    "job": S("pretrain", "what to do: pretrain, or finetune (on 'task')", allowed=("pretrain", "finetune")),
    "seed": S(0, "seed of everything random: initial weights, pairs, order, masks, dropout", allowed=SEED),
    "init_from": S(
        "",
        "model directory (Hugging Face, TF1 or bertjax) whose weights are loaded at "
        "step 0; optimizer and step start fresh. Ignored when a run is resumed",
    ),
    "reinitialise_head": S(
        False, "let heads (MLM, NSP, pooler) that init_from lacks start afresh instead of refusing the checkpoint"
    ),
    "resume": S(
        "auto",
        "what to do when the workdir already holds a run: auto = go on if the "
        "settings agree, stop if they differ; changed = go on with the new settings; "
        "overwrite = delete the old run (what this command has begun itself goes on, so "
        "that a launcher may repeat it); never = stop",
        allowed=("auto", "changed", "overwrite", "never"),
    ),
    "phases": S(
        ((1_000_000, 512),),
        "((steps, sequence length), ...): phases of one run with one "
        "optimizer state and one schedule; lengths in tokens, never shrinking",
        PAPER,
    ),
    "budget_minutes": S(
        0.0,
        "end the run by wall clock, start-up included: 'phases' then is the "
        "scale of a schedule that follows the time (training/budget.py); 0 = off",
        allowed=AT_LEAST_0,
    ),
    "batch_size": S(256, "rows of the global batch (sequences an optimizer step)", PAPER, allowed=AT_LEAST_1),
    "accumulation": S(
        1,
        "micro-batches an optimizer step; the update is the large batch's, except "
        "that each micro-batch draws dropout of its own",
        allowed=AT_LEAST_1,
    ),
    "data": {
        "corpus": S(
            "",
            "token store made by bertjax.tools.build_corpus (at gs:// too), or a "
            "comma-separated mixture DIR=WEIGHT,DIR=WEIGHT; 'tfrecord:PATTERN' = files of "
            "the original's create_pretraining_data.py, {length} in PATTERN being that of "
            "the phase; 'docstrings' = the embedded demo corpus",
        ),
        "tokenizer": S("", "vocabulary of tfrecord: files (token stores bring their own)"),
        "heldout": S("", "tfrecord: files to evaluate on, 'tfrecord:PATTERN'; '' = some of the corpus's own records"),
        "heldout_fraction": S(
            0.01,
            "share of the records of tfrecord: files that is held out, if 'heldout' names no others",
            allowed=BELOW_ONE,
        ),
        "cache": S(
            "",
            "directory for what must be on a local disk: unpacked GZIP tfrecord: files "
            "('' = a temporary one), copies of stores at gs:// ('' = "
            "~/.cache/bertjax/stores)",
        ),
        "short_seq_prob": S(0.1, "share of pairs with a random shorter target length", CODE, allowed=SHARE),
        "nsp": S(True, "next-sentence pairs; False = one segment of contiguous text a row and no NSP loss"),
        "corpus_limits": S(
            "refuse",
            "what follows where a number of the corpus is beyond its "
            "limit (tokens that no row holds, random pairs, unknown tokens, "
            "copies): refuse, or warn and train",
            allowed=("refuse", "warn"),
        ),
        "packed": S(False, "several pairs in one row, attention confined to each pair"),
        "workers": S(0, "processes that assemble batches ahead of time; 0 = threads only", allowed=AT_LEAST_0),
        "prefetch": S(4, "batches kept ready in host memory", allowed=AT_LEAST_0),
        "demo_megabytes": S(6.0, "largest size of the embedded demo corpus, in MB of text", allowed=POSITIVE),
        "demo_vocab_size": S(8000, "vocabulary trained on the embedded demo corpus, in entries"),
    },
    "masking": {
        "rate": S(0.15, "share of a row's tokens that are predicted", PAPER, allowed=SHARE),
        "mask_prob": S(0.8, "share of the predicted tokens replaced by [MASK]", PAPER, allowed=SHARE),
        "random_prob": S(
            0.1,
            "share of the predicted tokens replaced by a random token; the rest stays as it is",
            PAPER,
            allowed=SHARE,
        ),
        "whole_word": S(False, "choose whole words instead of single pieces"),
        "max_predictions": S(
            0,
            "predicted positions a row (static shape); 0 = rate x length rounded up: 20 at 128, 77 at 512",
            CODE,
            allowed=AT_LEAST_0,
        ),
        "replace_with_special": S(
            False, "let random replacement draw special and unused tokens too, as the original code does"
        ),
    },
    "model": {
        "vocab_size": S(
            0,
            "entries of the embedding table; 0 = the tokenizer's, rounded up to a multiple of 'vocab_multiple'",
            allowed=AT_LEAST_0,
        ),
        "vocab_multiple": S(
            1,
            "round the embedding table up to a multiple of this (64 or 128 "
            "speeds the MLM head up; extra rows are left out of the softmax "
            "and of the exported model)",
            allowed=AT_LEAST_1,
        ),
        "hidden_size": S(768, "H, width of the encoder"),
        "num_hidden_layers": S(12, "L, encoder layers"),
        "num_attention_heads": S(12, "A, attention heads; must divide H"),
        "intermediate_size": S(3072, "F, width of the feed-forward layer"),
        "hidden_act": S(
            "gelu_new", "activation: gelu_new (tanh form), gelu (erf), relu or silu", CODE + " modeling.py"
        ),
        "hidden_dropout_prob": S(0.1, "dropout after embeddings and each sub-layer", PAPER, allowed=BELOW_ONE),
        "attention_probs_dropout_prob": S(0.1, "dropout on attention probabilities", PAPER, allowed=BELOW_ONE),
        "max_position_embeddings": S(512, "longest sequence, in tokens", PAPER),
        "is_decoder": S(
            False,
            "left to right: a position sees itself and those before it, and the "
            "loss is that of the next token; needs data.nsp=False",
        ),
        "initializer_range": S(0.02, "standard deviation of the truncated normal", CODE),
        "layer_norm_eps": S(1e-12, "epsilon of LayerNorm", CODE),
    },
    "optimizer": {
        "name": S("adamw", "adamw or lamb", allowed=("adamw", "lamb")),
        "learning_rate": S(1e-4, "peak learning rate", PAPER, allowed=POSITIVE),
        "warmup_steps": S(10_000, "steps of linear warm-up", PAPER),
        "schedule": S(
            "linear",
            "after warm-up: linear (the original's: to 0, measured from step "
            "0), polynomial (its square root: NVIDIA's), linear_after_warmup (Hugging "
            "Face's), cosine, constant",
            CODE,
            allowed=("linear", "polynomial", "linear_after_warmup", "cosine", "constant"),
        ),
        "b1": S(0.9, "decay of the first moment", PAPER, allowed=BELOW_ONE),
        "b2": S(0.999, "decay of the second moment", PAPER, allowed=BELOW_ONE),
        "eps": S(1e-6, "added to the root of the second moment", CODE + " optimization.py", allowed=POSITIVE),
        "weight_decay": S(0.01, "decoupled weight decay", PAPER, allowed=AT_LEAST_0),
        "no_decay": S(
            r"(^|/)(bias|scale)$",
            "parameter paths (regex) without weight decay: biases and LayerNorm",
            CODE + " optimization.py",
        ),
        "clip_norm": S(1.0, "gradient clipping by global norm; 0 = off", CODE + " optimization.py", allowed=AT_LEAST_0),
        "bias_correction": S(False, "Adam's bias correction; the original has none", CODE + " optimization.py"),
        "max_skipped_in_row": S(
            20, "stop after this many non-finite steps in a row (each is skipped and counted)", allowed=AT_LEAST_1
        ),
    },
    "execution": {
        "dtype": S(
            "auto",
            "arithmetic of the encoder: float32 or bfloat16 over float32 "
            "parameters; auto = bfloat16 on TPU and GPU, float32 on CPU",
            allowed=("auto", "float32", "bfloat16"),
        ),
        "kernels": S(
            "auto",
            "auto = hand-written kernels where they are faster (attention; GPU: "
            "residual + dropout + LayerNorm too), xla = plain XLA everywhere",
            allowed=("auto", "xla"),
        ),
        "layers": S("unrolled", "unrolled, or scan (compiles faster, needs remat to fit)"),
        "remat": S("none", "what the backward pass recomputes instead of keeping: none, dots, full"),
        "prng": S(
            "auto", "random bits: threefry2x32 or rbg; auto = rbg on TPU", allowed=("auto", "threefry2x32", "rbg")
        ),
        "compilation_cache": S(
            "~/.cache/bertjax/xla", "directory of compiled programs, reused by later starts; '' = off"
        ),
        "debug_nans": S(False, "stop at the operation that makes the first NaN (slow)"),
    },
    "mesh": {
        "auto": S(
            False,
            "choose the three sizes from the model's size and the devices' memory, "
            "and say why (then they are ignored); --config.mesh=auto for short",
        ),
        "data": S(-1, "devices along the data axis; -1 = all that are left"),
        "fsdp": S(1, "devices that share one copy of parameters and optimizer state"),
        "tensor": S(1, "devices that split each layer's matrices"),
    },
    "checkpoint": {
        "every_steps": S(1000, "steps between checkpoints; one more at the end and at SIGTERM", allowed=AT_LEAST_0),
        "keep_last": S(3, "newest checkpoints kept", allowed=AT_LEAST_1),
        "keep_best": S(1, "best checkpoints kept, by 'metric'", allowed=AT_LEAST_0),
        "keep_every": S(
            0,
            "keep every checkpoint whose step is a multiple of this, to evaluate "
            "or export it later as WORKDIR@STEP; 0 = none",
            allowed=AT_LEAST_0,
        ),
        "metric": S(
            "eval/loss",
            "what 'best' is measured by (lower is better)",
            allowed=("eval/loss", "eval/mlm_loss", "eval/nsp_loss"),
        ),
    },
    "eval": {
        "every_steps": S(1000, "steps between evaluations on held-out pairs; 0 = only at the end", allowed=AT_LEAST_0),
        "rows": S(10_000, "held-out rows evaluated at most; 0 = all", allowed=AT_LEAST_0),
        "seq_length": S(
            0,
            "tokens of a held-out row, the same in all phases, so that their losses compare; 0 = that of the phase",
            allowed=AT_LEAST_0,
        ),
        "masking_rate": S(0.0, "share of a held-out row's tokens that is predicted; 0 = masking.rate", allowed=SHARE),
    },
    "log": {
        "every_steps": S(
            100,
            "steps between log lines, whose losses and accuracies are the means "
            "of the steps since the line before; 1 = every step's own",
            allowed=AT_LEAST_1,
        ),
        "tensorboard": S(True, "write TensorBoard events beside metrics.jsonl"),
        "csv": S(False, "write metrics.csv too, for a spreadsheet"),
        "wandb": S("", "project at Weights & Biases that the run reports to (pip install wandb)"),
        "fill_mask": S((), "sentences with [MASK] whose best fillings are printed at the end"),
    },
    "task": {
        "name": S(
            "",
            "fine-tuning task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax, "
            "all (of these), xnli, squad1.1, squad2.0, ner, tag, swag, or table (your own "
            "CSV, TSV, JSON lines)",
        ),
        "data": S("", "directory of the task's files in their official layout, or tfds:NAME"),
        "options": S({}, "options of the task's class (tasks/*.py), such as columns of a table"),
        "metric": S("", "what 'best on dev' means; '' = the task's own"),
        "max_length": S(128, "tokens of a row", PAPER_TASKS),
        "epochs": S(3, "passes over the training set", PAPER_TASKS, allowed=AT_LEAST_1),
        "warmup": S(0.1, "share of the steps with linear warm-up", CODE + " run_classifier.py", allowed=SHARE),
        "buckets": S(0, "padded lengths, each one compilation; 0 = by the amount of data", allowed=AT_LEAST_0),
        "group_by_length": S(
            False, "training batches of rows of similar length: less padding, but no random draws any more"
        ),
        "eval_batch_size": S(128, "rows of an evaluation batch", allowed=AT_LEAST_1),
        "evaluations_per_epoch": S(1, "evaluations on dev an epoch", allowed=AT_LEAST_1),
        "early_stopping": S(0, "stop after this many evaluations without a new best; 0 = never", allowed=AT_LEAST_0),
        "layer_decay": S(1.0, "factor on the learning rate for each layer further from the head", allowed=SHARE),
        "freeze": S((), "parameter paths (regex) that stay as they are"),
        "class_weights": S((), "weight of each class in the loss"),
        "feature_layers": S(
            "", "tagging over a frozen encoder: layers used as features (paper table 7), such as concat_last_4"
        ),
        "bilstm": S(
            0,
            "layers of a BiLSTM, drawn at random, between encoder and head (paper "
            "section 5.1: the left-to-right model's); 0 = none",
            allowed=AT_LEAST_0,
        ),
        "head_init": S(
            "truncated_normal",
            "how a new head is drawn: as the original draws it, or 'normal', as transformers does, 14 % larger",
            CODE,
            allowed=("truncated_normal", "normal"),
        ),
        "predict": S(("dev",), "splits whose predictions and submission files are written"),
    },
    "watchdog_seconds": S(
        3600.0,
        "end the process (exit code 76, stacks on stderr) when a step, a "
        "batch of data or of an evaluation takes so long: something hangs. "
        "Compiling and saving may take half an hour at least; 0 = never",
        allowed=AT_LEAST_0,
    ),
    "profile_steps": S((0, 0), "(first, last) step recorded as a profiler trace under WORKDIR/profile; (0, 0) = none"),
}

# By job: what has no effect on it, and what has instead. Refused where it was changed.
WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "pretrain": {"task.": "it is for fine-tuning"},
    "finetune": {
        "phases": "config.task.epochs says how long",
        "budget_minutes": "config.task.epochs says how long",
        "data.": "config.task.data names the data",
        "masking.": "nothing is masked",
        "model.": "the model is that of config.init_from",
        "optimizer.name": "the optimizer is adamw",
        "optimizer.warmup_steps": "config.task.warmup is the share of the steps",
        "optimizer.no_decay": "biases and LayerNorm do not decay",
        "optimizer.max_skipped_in_row": "it stops after 20",
        "checkpoint.": "the newest evaluation and the best one are saved",
        "eval.": "config.task.evaluations_per_epoch says how often",
        "log.fill_mask": "there is no MLM head",
        "profile_steps": "only pre-training is profiled",
        "watchdog_seconds": "only pre-training is watched",
        "resume": "name another workdir, or delete it, to begin anew",
    },
}

# Settings that may change when a run is resumed: they alter neither data, loss nor update rule.
FREE_ON_RESUME = (
    "execution.",
    "mesh.",
    "checkpoint.",
    "eval.",
    "log.",
    "profile_steps",
    "resume",
    "init_from",
    "reinitialise_head",
    "watchdog_seconds",
    "data.workers",
    "data.prefetch",
    "data.cache",
    "data.corpus_limits",
    "accumulation",
)


# Of these, the settings on which the order of sums depends.
ORDER_OF_SUMS = (
    "execution.dtype",
    "execution.kernels",
    "execution.layers",
    "execution.remat",
    "execution.prng",
    "mesh.",
    "accumulation",
)


def walk(settings: Mapping[str, Any] = SETTINGS, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """('optimizer.learning_rate', its Setting) of every setting, in order."""
    for name, value in settings.items():
        if isinstance(value, Setting):
            yield prefix + name, value
        else:
            yield from walk(value, f"{prefix}{name}.")


def default_config() -> ml_collections.ConfigDict:
    """The original BERT-base pre-training: a ConfigDict whose keys and types are fixed."""

    def build(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.default if isinstance(value, Setting) else build(value) for name, value in settings.items()}

    return ml_collections.ConfigDict(build(SETTINGS))


def describe() -> str:
    """All settings with defaults, meaning and source, as `--help_config` prints them."""
    lines = []
    for path, setting in walk():
        source = f" [{setting.source}]" if setting.source else ""
        lines.append(f"--config.{path}={setting.default!r}\n    {setting.help}{source}")
    return "\n".join(lines)


def nearest(name: str, valid: list[str]) -> str:
    """' Did you mean ...?' for an unknown name, or the list of valid ones."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Valid: {', '.join(valid)}."


def apply_variants(
    config: ml_collections.ConfigDict,
    text: str | None,
    variants: Mapping[str, Callable[[ml_collections.ConfigDict], None]],
) -> ml_collections.ConfigDict:
    """Applies the comma-separated variants of `--config=FILE:variant,variant` in order.

    Raises ValueError naming the nearest variant when one is unknown.
    """
    for name in filter(None, (text or "").split(",")):
        if name not in variants:
            raise ValueError(f"unknown variant {name!r}.{nearest(name, list(variants))}")
        variants[name](config)
    return config


def finetune_config() -> ml_collections.ConfigDict:
    """The recipe of the paper's section 4 and appendix A.3 for a task; name it in `config.task`."""
    config = default_config()
    config.job = "finetune"
    config.batch_size = 32  # A.3: 16 or 32
    config.optimizer.learning_rate = 2e-5  # A.3: 5e-5, 3e-5 or 2e-5
    # Without it, small tasks often fail to train (Mosbach et al. 2021); the original has none.
    config.optimizer.bias_correction = True
    config.log.every_steps = 50
    return config


def two_phase(config: ml_collections.ConfigDict) -> None:
    """Variant: 128 tokens for 90 % of the steps, 512 for the last 10 % (paper A.2)."""
    steps = total_steps(config)
    short = steps * 9 // 10
    config.phases = ((short, 128), (steps - short, 512))


def packed(config: ml_collections.ConfigDict) -> None:
    """Variant: several pairs in one row, so that no work is spent on padding."""
    config.data.packed = True


PRETRAINING_VARIANTS = {"two_phase": two_phase, "packed": packed}


def scan_layers(remat: str) -> Callable[[ml_collections.ConfigDict], None]:
    """Variant for a TPU slice: one compiled layer and this remat policy, pure data parallelism.

    Which policy fits which slice is what `python -m bertjax.tools.plan` found (README, "Plan before
    you rent").
    """

    def variant(config: ml_collections.ConfigDict) -> None:
        config.execution.layers = "scan"
        config.execution.remat = remat
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = -1, 1, 1
        config.accumulation = 1

    return variant


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'optimizer.learning_rate': 1e-4, ...} of a ConfigDict or of a parsed config.json."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def resume_conflicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines 'name: old -> new' of the settings that would change the run if it went on."""

    def plain(value: Any) -> Any:  # JSON turns tuples into lists
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if not name.startswith(FREE_ON_RESUME) and plain(before.get(name)) != plain(after.get(name))
    ]


def order_of_sums(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The settings that may change on a resume, but order sums otherwise."""
    return {name: value for name, value in flatten(config).items() if name.startswith(ORDER_OF_SUMS)}


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Optimizer steps of the whole run, over all phases."""
    return sum(steps for steps, _ in config.phases)


def max_predictions(config: ml_collections.ConfigDict, seq_length: int, rate: float | None = None) -> int:
    """P, the predicted positions of a row of `seq_length` tokens (at `rate`: config.masking's)."""
    rate = config.masking.rate if rate is None else rate
    # 1e-9: 0.15 * 20 is 3.0000000000000004 in floating point, which must not become 4.
    return config.masking.max_predictions or math.ceil(rate * seq_length - 1e-9)


def model_config(config: ml_collections.ConfigDict, tokenizer_vocab_size: int) -> BertConfig:
    """The architecture of this run for a vocabulary of the given size.

    Raises ValueError if the vocabulary is larger than an explicit `model.vocab_size`.
    """
    model = dict(config.model)
    multiple = model.pop("vocab_multiple")
    if model["vocab_size"] == 0:
        model["vocab_size"] = -(-tokenizer_vocab_size // multiple) * multiple
    if tokenizer_vocab_size > model["vocab_size"]:
        raise ValueError(
            f"the tokenizer has {tokenizer_vocab_size} entries, but config.model.vocab_size is "
            f"{model['vocab_size']}: ids from {model['vocab_size']} on would have no embedding. "
            "Set --config.model.vocab_size=0 to follow the tokenizer."
        )
    padded = tokenizer_vocab_size < model["vocab_size"]
    return BertConfig(**model, words=tokenizer_vocab_size if padded else None)


def execution(config: ml_collections.ConfigDict, backend: str) -> Execution:
    """How the encoder runs on `backend` ('cpu', 'gpu' or 'tpu')."""
    how = config.execution
    fastest = Execution.for_backend(
        backend, config.mesh.tensor > 1, dtype=how.dtype, layers=how.layers, remat=how.remat
    )
    if how.kernels == "xla":
        return dataclasses.replace(fastest, attention="reference", pointwise="xla")
    return fastest
