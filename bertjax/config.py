"""Every setting once: its default, its meaning with unit, where the default comes from, what it may be.

The sections below are frozen dataclasses, and `Config` holds them all: it is what the program works with. A config
file (`configs/*.py`) and the command line write to a ConfigDict of the same names and types instead
(`default_config()`; `--config.optimizer.learning_rate=3e-5`); `frozen` turns it into a Config once, and sections are
handed on whole from there. `describe` gives the text of `--help_config`; config_checks.py refuses what cannot work.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import ml_collections


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


def setting(default: Any, help: str, source: str = "", allowed: Range | tuple[str, ...] | None = None) -> Any:
    """The field of a section; see Setting."""
    metadata = {"setting": Setting(default, help, source, allowed)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """The field of Config that holds a section."""
    return dataclasses.field(default_factory=kind, metadata={"section": kind})


PAPER, PAPER_TASKS = "BERT paper A.2", "BERT paper A.3"  # pre-training, fine-tuning
CODE = "google-research/bert"
# 'gelu' is x * Phi(x) through erf, as transformers names it; 'gelu_new' is the tanh approximation that the original
# code computes (modeling.py, last commit); 'swish' is what transformers also calls 'silu'.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """config.data: the corpus of pre-training and how rows are made of it."""

    corpus: str = setting(
        "",
        "token store made by bertjax.tools.build_corpus (at gs:// too), or a comma-separated mixture "
        "DIR=WEIGHT,DIR=WEIGHT; 'tfrecord:PATTERN' = files of the original's create_pretraining_data.py, {length} in "
        "PATTERN being that of the phase; 'docstrings' = the embedded demo corpus",
    )
    tokenizer: str = setting("", "vocabulary of tfrecord: files (token stores bring their own)")
    heldout: str = setting(
        "", "tfrecord: files to evaluate on, 'tfrecord:PATTERN'; '' = some of the corpus's own records"
    )
    heldout_fraction: float = setting(
        0.01,
        "share of the records of tfrecord: files that is held out, if 'heldout' names no others",
        allowed=BELOW_ONE,
    )
    cache: str = setting(
        "",
        "directory for what must be on a local disk: unpacked GZIP tfrecord: files ('' = a temporary one), copies of "
        "stores at gs:// ('' = ~/.cache/bertjax/stores)",
    )
    short_seq_prob: float = setting(0.1, "share of pairs with a random shorter target length", CODE, allowed=SHARE)
    nsp: bool = setting(True, "next-sentence pairs; False = one segment of contiguous text a row and no NSP loss")
    corpus_limits: str = setting(
        "refuse",
        "what follows where a number of the corpus is beyond its limit (tokens that no row holds, random pairs, "
        "unknown tokens, copies): refuse, or warn and train",
        allowed=("refuse", "warn"),
    )
    packed: bool = setting(False, "several pairs in one row, attention confined to each pair")
    workers: int = setting(0, "processes that assemble batches ahead of time; 0 = threads only", allowed=AT_LEAST_0)
    prefetch: int = setting(4, "batches kept ready in host memory", allowed=AT_LEAST_0)
    demo_megabytes: float = setting(6.0, "largest size of the embedded demo corpus, in MB of text", allowed=POSITIVE)
    demo_vocab_size: int = setting(8000, "vocabulary trained on the embedded demo corpus, in entries")


@dataclasses.dataclass(frozen=True)
class MaskingSettings:
    """config.masking: what the masked language model predicts."""

    rate: float = setting(0.15, "share of a row's tokens that are predicted", PAPER, allowed=SHARE)
    mask_prob: float = setting(0.8, "share of the predicted tokens replaced by [MASK]", PAPER, allowed=SHARE)
    random_prob: float = setting(
        0.1, "share of the predicted tokens replaced by a random token; the rest stays as it is", PAPER, allowed=SHARE
    )
    whole_word: bool = setting(False, "choose whole words instead of single pieces")
    max_predictions: int = setting(
        0,
        "predicted positions a row (static shape); 0 = rate x length rounded up: 20 at 128, 77 at 512",
        CODE,
        allowed=AT_LEAST_0,
    )
    replace_with_special: bool = setting(
        False, "let random replacement draw special and unused tokens too, as the original code does"
    )


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What the network computes, in Hugging Face's names; model/presets.py's BertConfig adds what files alone say.

    Raises:
      ValueError: a field is out of range or two fields contradict each other.
    """

    _where: ClassVar[str] = "BertConfig"  # what messages call it

    vocab_size: int = setting(
        0,
        "entries of the embedding table; 0 = the tokenizer's, rounded up to a multiple of 'vocab_multiple'",
        allowed=AT_LEAST_0,
    )
    hidden_size: int = setting(768, "H, width of the encoder")
    num_hidden_layers: int = setting(12, "L, encoder layers")
    num_attention_heads: int = setting(12, "A, attention heads; must divide H")
    intermediate_size: int = setting(3072, "F, width of the feed-forward layer")
    hidden_act: str = setting(
        "gelu_new", "activation: gelu_new (tanh form), gelu (erf), relu or silu", CODE + " modeling.py", ACTIVATIONS
    )
    hidden_dropout_prob: float = setting(0.1, "dropout after embeddings and each sub-layer", PAPER, allowed=BELOW_ONE)
    attention_probs_dropout_prob: float = setting(0.1, "dropout on attention probabilities", PAPER, allowed=BELOW_ONE)
    max_position_embeddings: int = setting(512, "longest sequence, in tokens", PAPER)
    is_decoder: bool = setting(
        False,
        "left to right: a position sees itself and those before it, and the loss is that of the next token; needs "
        "data.nsp=False",
    )
    initializer_range: float = setting(0.02, "standard deviation of the truncated normal", CODE)
    layer_norm_eps: float = setting(1e-12, "epsilon of LayerNorm", CODE)

    def __post_init__(self) -> None:
        where = self._where
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            require_positive_integer(f"{where}.{name}", getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{where}.num_attention_heads={self.num_attention_heads} must divide "
                f"hidden_size={self.hidden_size}; BERT uses hidden_size / 64 heads"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"{where}.hidden_act={self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            require_dropout(f"{where}.{name}", getattr(self, name))
        for name in ("layer_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not _is_number(value) or not 0.0 < value < 1e6:
                raise ValueError(f"{where}.{name} must be positive and below a million, got {value!r:.40}")
        if not isinstance(self.is_decoder, bool):
            raise ValueError(f"{where}.is_decoder must be true or false, got {self.is_decoder!r:.40}")


def require_positive_integer(name: str, value: Any) -> None:
    """Raises ValueError for anything but an integer from 1 to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{name} must be a positive integer below 2**31, got {value!r:.40}")


def require_dropout(name: str, value: Any) -> None:
    """Raises ValueError for anything but a number in [0, 1)."""
    if not _is_number(value) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r:.40}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class ModelSettings(Architecture):
    """config.model: the architecture of a pre-training run."""

    _where: ClassVar[str] = "config.model"

    vocab_multiple: int = setting(
        1,
        "round the embedding table up to a multiple of this (64 or 128 speeds the MLM head up; extra rows are left "
        "out of the softmax and of the exported model)",
        allowed=AT_LEAST_1,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """config.optimizer: the update rule and its learning rate."""

    name: str = setting(
        "adamw",
        "adamw (the original's), lamb, or an optimizer of optax by its name: optax.lion, optax.contrib.muon, ...",
    )
    options: dict[str, Any] = setting({}, "arguments of the optax optimizer, as optimizer.options.NAME=VALUE")
    learning_rate: float = setting(1e-4, "peak learning rate", PAPER, allowed=POSITIVE)
    warmup_steps: int = setting(10_000, "steps of linear warm-up", PAPER)
    schedule: str = setting(
        "linear",
        "after warm-up: linear (the original's: to 0, measured from step 0), polynomial (its square root: NVIDIA's), "
        "linear_after_warmup (Hugging Face's), cosine, constant",
        CODE,
        allowed=("linear", "polynomial", "linear_after_warmup", "cosine", "constant"),
    )
    b1: float = setting(0.9, "decay of the first moment", PAPER, allowed=BELOW_ONE)
    b2: float = setting(0.999, "decay of the second moment", PAPER, allowed=BELOW_ONE)
    eps: float = setting(1e-6, "added to the root of the second moment", CODE + " optimization.py", allowed=POSITIVE)
    weight_decay: float = setting(0.01, "decoupled weight decay", PAPER, allowed=AT_LEAST_0)
    no_decay: str = setting(
        r"(^|/)(bias|scale)$",
        "parameter paths (regex) without weight decay: biases and LayerNorm",
        CODE + " optimization.py",
    )
    clip_norm: float = setting(
        1.0, "gradient clipping by global norm; 0 = off", CODE + " optimization.py", allowed=AT_LEAST_0
    )
    bias_correction: bool = setting(False, "Adam's bias correction; the original has none", CODE + " optimization.py")
    max_skipped_in_row: int = setting(
        20, "stop after this many non-finite steps in a row (each is skipped and counted)", allowed=AT_LEAST_1
    )


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """config.execution: speed, memory and rounding; never what is computed."""

    dtype: str = setting(
        "auto",
        "arithmetic of the encoder: float32 or bfloat16 over float32 parameters; auto = bfloat16 on TPU and GPU, "
        "float32 on CPU",
        allowed=("auto", "float32", "bfloat16"),
    )
    kernels: str = setting(
        "auto",
        "auto = hand-written kernels where they are faster (attention; GPU: residual + dropout + LayerNorm too), xla "
        "= plain XLA everywhere; or the name of an attention kernel: reference, cudnn, pallas (GPU), pallas_tpu",
    )
    layers: str = setting("unrolled", "unrolled, or scan (compiles faster, needs remat to fit)")
    remat: str = setting("none", "what the backward pass recomputes instead of keeping: none, dots, full")
    prng: str = setting(
        "auto", "random bits: threefry2x32 or rbg; auto = rbg on TPU", allowed=("auto", "threefry2x32", "rbg")
    )
    compilation_cache: str = setting(
        "~/.cache/bertjax/xla", "directory of compiled programs, reused by later starts; '' = off"
    )
    debug_nans: bool = setting(False, "stop at the operation that makes the first NaN (slow)")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """config.mesh: how the devices share the work."""

    auto: bool = setting(
        False,
        "choose the three sizes from the model's size and the devices' memory, and say why (then they are ignored); "
        "--config.mesh=auto for short",
    )
    data: int = setting(-1, "devices along the data axis; -1 = all that are left")
    fsdp: int = setting(1, "devices that share one copy of parameters and optimizer state")
    tensor: int = setting(1, "devices that split each layer's matrices")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """config.checkpoint: when a pre-training run is saved, and what is kept."""

    every_steps: int = setting(
        1000, "steps between checkpoints; one more at the end and at SIGTERM", allowed=AT_LEAST_0
    )
    keep_last: int = setting(3, "newest checkpoints kept", allowed=AT_LEAST_1)
    keep_best: int = setting(1, "best checkpoints kept, by 'metric'", allowed=AT_LEAST_0)
    keep_every: int = setting(
        0,
        "keep every checkpoint whose step is a multiple of this, to evaluate or export it later as WORKDIR@STEP; 0 = "
        "none",
        allowed=AT_LEAST_0,
    )
    metric: str = setting(
        "eval/loss",
        "what 'best' is measured by (lower is better)",
        allowed=("eval/loss", "eval/mlm_loss", "eval/nsp_loss"),
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """config.eval: evaluation on held-out rows during pre-training."""

    every_steps: int = setting(
        1000, "steps between evaluations on held-out pairs; 0 = only at the end", allowed=AT_LEAST_0
    )
    rows: int = setting(10_000, "held-out rows evaluated at most; 0 = all", allowed=AT_LEAST_0)
    seq_length: int = setting(
        0,
        "tokens of a held-out row, the same in all phases, so that their losses compare; 0 = that of the phase",
        allowed=AT_LEAST_0,
    )
    masking_rate: float = setting(
        0.0, "share of a held-out row's tokens that is predicted; 0 = masking.rate", allowed=SHARE
    )


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """config.log: what is written down, and where."""

    every_steps: int = setting(
        100,
        "steps between log lines, whose losses and accuracies are the means of the steps since the line before; 1 = "
        "every step's own",
        allowed=AT_LEAST_1,
    )
    tensorboard: bool = setting(True, "write TensorBoard events beside metrics.jsonl")
    csv: bool = setting(False, "write metrics.csv too, for a spreadsheet")
    wandb: str = setting("", "project at Weights & Biases that the run reports to (pip install wandb)")
    fill_mask: tuple[str, ...] = setting((), "sentences with [MASK] whose best fillings are printed at the end")


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """config.task: a fine-tuning task, its data and its loop."""

    name: str = setting(
        "",
        "fine-tuning task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax, all (of these), xnli, squad1.1, "
        "squad2.0, ner, tag, swag, or table (your own CSV, TSV, JSON lines)",
    )
    data: str = setting("", "directory of the task's files in their official layout, or tfds:NAME")
    options: dict[str, Any] = setting({}, "options of the task's class (tasks/*.py), such as columns of a table")
    metric: str = setting("", "what 'best on dev' means; '' = the task's own")
    max_length: int = setting(128, "tokens of a row", PAPER_TASKS)
    epochs: int = setting(3, "passes over the training set", PAPER_TASKS, allowed=AT_LEAST_1)
    warmup: float = setting(0.1, "share of the steps with linear warm-up", CODE + " run_classifier.py", allowed=SHARE)
    buckets: int = setting(0, "padded lengths, each one compilation; 0 = by the amount of data", allowed=AT_LEAST_0)
    group_by_length: bool = setting(
        False, "training batches of rows of similar length: less padding, but no random draws any more"
    )
    eval_batch_size: int = setting(128, "rows of an evaluation batch", allowed=AT_LEAST_1)
    evaluations_per_epoch: int = setting(1, "evaluations on dev an epoch", allowed=AT_LEAST_1)
    early_stopping: int = setting(
        0, "stop after this many evaluations without a new best; 0 = never", allowed=AT_LEAST_0
    )
    layer_decay: float = setting(1.0, "factor on the learning rate for each layer further from the head", allowed=SHARE)
    freeze: tuple[str, ...] = setting((), "parameter paths (regex) that stay as they are")
    class_weights: tuple[Any, ...] = setting((), "weight of each class in the loss")
    feature_layers: str = setting(
        "", "tagging over a frozen encoder: layers used as features (paper table 7), such as concat_last_4"
    )
    bilstm: int = setting(
        0,
        "layers of a BiLSTM, drawn at random, between encoder and head (paper section 5.1: the left-to-right "
        "model's); 0 = none",
        allowed=AT_LEAST_0,
    )
    head_init: str = setting(
        "truncated_normal",
        "how a new head is drawn: as the original draws it, or 'normal', as transformers does, 14 % larger",
        CODE,
        allowed=("truncated_normal", "normal"),
    )
    predict: tuple[str, ...] = setting(("dev",), "splits whose predictions and submission files are written")


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    job: str = setting("pretrain", "what to do: pretrain, or finetune (on 'task')", allowed=("pretrain", "finetune"))
    seed: int = setting(0, "seed of everything random: initial weights, pairs, order, masks, dropout", allowed=SEED)
    init_from: str = setting(
        "",
        "model directory (Hugging Face, TF1 or bertjax) whose weights are loaded at step 0; optimizer and step start "
        "fresh. Ignored when a run is resumed",
    )
    reinitialise_head: bool = setting(
        False, "let heads (MLM, NSP, pooler) that init_from lacks start afresh instead of refusing the checkpoint"
    )
    resume: str = setting(
        "auto",
        "what to do when the workdir already holds a run: auto = go on if the settings agree, stop if they differ; "
        "changed = go on with the new settings; overwrite = delete the old run (what this command has begun itself "
        "goes on, so that a launcher may repeat it); never = stop",
        allowed=("auto", "changed", "overwrite", "never"),
    )
    phases: tuple[tuple[int, int], ...] = setting(
        ((1_000_000, 512),),
        "((steps, sequence length), ...): phases of one run with one optimizer state and one schedule; lengths in "
        "tokens, never shrinking",
        PAPER,
    )
    budget_minutes: float = setting(
        0.0,
        "end the run by wall clock, start-up included: 'phases' then is the scale of a schedule that follows the time "
        "(process/clock.py); 0 = off",
        allowed=AT_LEAST_0,
    )
    batch_size: int = setting(256, "rows of the global batch (sequences an optimizer step)", PAPER, allowed=AT_LEAST_1)
    accumulation: int = setting(
        1,
        "micro-batches an optimizer step; the update is the large batch's, except that each micro-batch draws dropout "
        "of its own",
        allowed=AT_LEAST_1,
    )
    data: DataSettings = section(DataSettings)
    masking: MaskingSettings = section(MaskingSettings)
    model: ModelSettings = section(ModelSettings)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    execution: ExecutionSettings = section(ExecutionSettings)
    mesh: MeshSettings = section(MeshSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    eval: EvaluationSettings = section(EvaluationSettings)
    log: LogSettings = section(LogSettings)
    task: TaskSettings = section(TaskSettings)
    watchdog_seconds: float = setting(
        3600.0,
        "end the process (exit code 76, stacks on stderr) when a step, a batch of data or of an evaluation takes so "
        "long: something hangs. Compiling and saving may take half an hour at least; 0 = never",
        allowed=AT_LEAST_0,
    )
    profile_steps: tuple[int, int] = setting(
        (0, 0), "(first, last) step recorded as a profiler trace under WORKDIR/profile; (0, 0) = none"
    )

    def replace(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values: {'batch_size': 16, 'optimizer.learning_rate': 3e-5}.

        Raises ValueError for a name that is none.
        """
        known = dict(walk())
        changed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"there is no setting {name!r}.{nearest(name, list(known))}")
            group, _, own = name.rpartition(".")
            if group:
                changed[group] = dataclasses.replace(changed.get(group, getattr(self, group)), **{own: value})
            else:
                changed[own] = value
        return dataclasses.replace(self, **changed)

    def to_json(self) -> str:
        """The text of config.json in a work directory."""
        return json.dumps(dataclasses.asdict(self), indent=1)


# By job: what has no effect on it, and what has instead. Refused where it was changed.
WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "pretrain": {"task.": "it is for fine-tuning"},
    "finetune": {
        "phases": "config.task.epochs says how long",
        "budget_minutes": "config.task.epochs says how long",
        "data.": "config.task.data names the data",
        "masking.": "nothing is masked",
        "model.": "the model is that of config.init_from",
        "optimizer.warmup_steps": "config.task.warmup is the share of the steps",
        "checkpoint.every_steps": "every evaluation is saved (config.task.evaluations_per_epoch)",
        "checkpoint.metric": "config.task.metric says which is best",
        "eval.": "config.task.evaluations_per_epoch says how often",
        "log.fill_mask": "there is no MLM head",
    },
}

# Whose names are not listed here: they are checked by the task or the optimizer that takes them.
FREE = ("task.options.", "optimizer.options.")

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


def walk(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """('optimizer.learning_rate', its Setting) of every setting, in order."""
    for field in dataclasses.fields(kind):
        if "section" in field.metadata:
            yield from walk(field.metadata["section"], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.metadata["setting"]


def default_config() -> ml_collections.ConfigDict:
    """The original BERT-base pre-training: a ConfigDict whose keys and types are fixed."""
    import ml_collections  # late: only config files need it

    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def frozen(config: ml_collections.ConfigDict | Config) -> Config:
    """The settings that a config file and the command line have made, which no longer change.

    Raises ValueError for an architecture that cannot be; see config_checks.py for other refusals.
    """
    return config if isinstance(config, Config) else _of(Config, config.to_dict())


def _of(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass of nested values."""
    sections = {field.name: field.metadata.get("section") for field in dataclasses.fields(kind)}
    return kind(**{name: _of(sections[name], value) if sections.get(name) else value for name, value in values.items()})


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
    config.checkpoint.keep_last = 1  # beside the best one
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

    Which policy fits which slice is what `python -m bertjax.tools.plan` found
    (docs/plan.md).
    """

    def variant(config: ml_collections.ConfigDict) -> None:
        config.execution.layers = "scan"
        config.execution.remat = remat
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = -1, 1, 1
        config.accumulation = 1

    return variant


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

    def plain(value: Any) -> Any:  # JSON turns tuples into lists
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    before, after = flatten(Config()) | flatten(old), flatten(new)
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if not name.startswith(FREE_ON_RESUME) and plain(before.get(name)) != plain(after.get(name))
    ]


def order_of_sums(config: Config) -> dict[str, Any]:
    """The settings that may change on a resume, but order sums otherwise."""
    return {name: value for name, value in flatten(config).items() if name.startswith(ORDER_OF_SUMS)}


def total_steps(config: Config | ml_collections.ConfigDict) -> int:
    """Optimizer steps of the whole run, over all phases."""
    return sum(steps for steps, _ in config.phases)


def max_predictions(config: Config, seq_length: int, rate: float | None = None) -> int:
    """P, the predicted positions of a row of `seq_length` tokens (at `rate`: config.masking's)."""
    rate = config.masking.rate if rate is None else rate
    # 1e-9: 0.15 * 20 is 3.0000000000000004 in floating point, which must not become 4.
    return config.masking.max_predictions or math.ceil(rate * seq_length - 1e-9)
