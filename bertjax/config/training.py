"""Settings that all jobs share: optimizer, execution, mesh, checkpoints, log."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bertjax.config.pretraining import CODE, PAPER
from bertjax.config.setting import AT_LEAST_0, AT_LEAST_1, BELOW_ONE, POSITIVE, POSITIVE_SHARE, setting

LAYER_MODES = ("unrolled", "scan")
REMAT_POLICIES = ("none", "dots", "minimal", "full")
OPTIMIZATION = CODE + " optimization.py"


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """config.optimizer: the update rule and its learning rate."""

    name: str = setting(
        "adamw",
        "adamw (the original's), lamb, stableadamw (ModernBERT's), or an optimizer of optax by its name: optax.lion, "
        "optax.contrib.muon, ...",
    )
    options: dict[str, Any] = setting({}, "arguments of the optax optimizer, as optimizer.options.NAME=VALUE")
    learning_rate: float = setting(1e-4, "peak learning rate", POSITIVE, source=PAPER)
    warmup_steps: int = setting(
        10_000,
        "length of the linear warm-up",
        source=PAPER,
        unit="steps",
        unused=("finetune", "config.task.warmup is the share of the steps"),
    )
    schedule: str = setting(
        "linear",
        "after warm-up: linear (the original's: to 0, measured from step 0), polynomial (NVIDIA's: the square root of "
        "linear), linear_after_warmup (Hugging Face's), cosine, constant, warmup_stable_decay (ModernBERT's: constant, "
        "then down by 1 - square root)",
        ("linear", "polynomial", "linear_after_warmup", "cosine", "constant", "warmup_stable_decay"),
        source=CODE,
    )
    decay_share: float = setting(0.1, "share of the run over which warmup_stable_decay goes down to 0", POSITIVE_SHARE)
    b1: float = setting(0.9, "decay of the first moment", BELOW_ONE, source=PAPER)
    b2: float = setting(0.999, "decay of the second moment", BELOW_ONE, source=PAPER)
    eps: float = setting(1e-6, "added to the root of the second moment", POSITIVE, source=OPTIMIZATION)
    weight_decay: float = setting(0.01, "decoupled weight decay", AT_LEAST_0, source=PAPER)
    no_decay: str = setting(
        r"(^|/)(bias|scale)$", "parameter paths (regex) without weight decay: biases and LayerNorm", source=OPTIMIZATION
    )
    clip_norm: float = setting(1.0, "gradient clipping by global norm; 0 = off", AT_LEAST_0, source=OPTIMIZATION)
    bias_correction: bool = setting(False, "Adam's bias correction; the original has none", source=OPTIMIZATION)
    max_skipped_in_row: int = setting(
        20, "stop after so many non-finite steps in a row (each is skipped and counted)", AT_LEAST_1, unit="steps"
    )


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """config.execution: speed, memory and rounding; never what is computed."""

    dtype: str = setting(
        "auto",
        "arithmetic of the encoder: float32 or bfloat16 over float32 parameters; float8 = bfloat16 with the large "
        "products of the layers in 8 bits (GPU, Ada or newer); auto = bfloat16 on TPUs and on GPUs from Ampere on, "
        "else float32",
        ("auto", "float32", "bfloat16", "float8"),
    )
    kernels: str = setting(
        "auto",
        "auto = hand-written kernels where they are faster (attention; GPU: residual + dropout + LayerNorm too), xla "
        "= plain XLA everywhere; or the name of an attention kernel: reference, triton (GPU), pallas_tpu",
    )
    layers: str = setting("unrolled", "unrolled, or scan (compiles faster; fits only with remat)", LAYER_MODES)
    remat: str = setting(
        "none",
        "what the backward pass recomputes: none = nothing; dots = all but matrix products and attention; minimal = "
        "all but two arrays a layer; full = all but a layer's input. On a CPU it saves memory with layers=scan only",
        REMAT_POLICIES,
    )
    prng: str = setting("auto", "random bits: threefry2x32 or rbg; auto = rbg on TPU", ("auto", "threefry2x32", "rbg"))
    compilation_cache: str = setting(
        "~/.cache/bertjax/xla", "directory of compiled programs for later starts; '' = off"
    )
    debug_nans: bool = setting(False, "stop at the operation that makes the first NaN (slow)")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """config.mesh: how the devices share the work."""

    auto: bool = setting(
        False,
        "choose data, fsdp and tensor from the model's size and the devices' memory, print why, and ignore what is set "
        "for them; --config.mesh=auto for short",
    )
    data: int = setting(-1, "size of the data axis; -1 = all that are left", unit="devices")
    fsdp: int = setting(1, "devices that share one copy of parameters and optimizer state", unit="devices")
    tensor: int = setting(1, "devices that split each layer's matrices", unit="devices")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """config.checkpoint: when a run is saved, and what is kept."""

    every_steps: int = setting(
        1000,
        "steps between checkpoints; one more at the end and at SIGTERM",
        AT_LEAST_0,
        unit="steps",
        unused=("finetune", "every evaluation is saved (config.task.evaluations_per_epoch)"),
    )
    keep_last: int = setting(3, "newest checkpoints kept", AT_LEAST_1)
    keep_best: int = setting(1, "best checkpoints kept, by 'metric'", AT_LEAST_0)
    keep_every: int = setting(
        0,
        "keep every checkpoint whose step is a multiple of this, to evaluate or export it later as WORKDIR@STEP; 0 = "
        "none",
        AT_LEAST_0,
        unit="steps",
        unused=("finetune", "its model is the best one"),
    )
    metric: str = setting(
        "eval/loss",
        "what 'best' is measured by (lower is better)",
        ("eval/loss", "eval/mlm_loss", "eval/nsp_loss"),
        unused=("finetune", "config.task.metric says which is best"),
    )

    def kept(self, steps: Sequence[int], ranked: Sequence[int]) -> set[int]:
        """Which checkpoints stay of `steps`, in order; `ranked` are those that have the metric, the best first."""
        kept = {*steps[-self.keep_last :], *ranked[: self.keep_best]}
        return kept | {step for step in steps if self.keep_every and step % self.keep_every == 0}


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """config.log: what is written down, and where."""

    every_steps: int = setting(
        0,
        "steps between log lines; losses and accuracies are the means since the line before; 0 = a fiftieth of the "
        "run, up to 100",
        AT_LEAST_0,
        unit="steps",
    )
    tensorboard: bool = setting(True, "write TensorBoard events beside metrics.jsonl")
    csv: bool = setting(False, "write metrics.csv too, for a spreadsheet")
    wandb: str = setting("", "project at Weights & Biases that the run reports to (pip install wandb)")
    fill_mask: tuple[str, ...] = setting(
        (),
        "sentences with [MASK] whose best fillings are printed at the end",
        unused=("finetune", "there is no MLM head"),
    )

    def interval(self, steps: int) -> int:
        """Steps between two lines of a run of so many."""
        return self.every_steps or min(100, -(-steps // 50))


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """config.export: where the model goes at the end of the run, beside WORKDIR/model."""

    push: str = setting(
        "",
        "USER/MODEL at the Hugging Face Hub that model, card and report are pushed to; checked at the start; '' = "
        "nowhere",
    )
    private: bool = setting(False, "make it a private model")
