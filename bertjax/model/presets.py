"""What a BERT is (BertConfig), how it is run (Execution), the published sizes and their costs.

A `BertConfig` fixes the function that the network computes and travels with every checkpoint as
`config.json` (Hugging Face's field names). An `Execution` fixes only speed, memory and rounding:
two runs that differ in it alone compute the same thing, so it is never stored with the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bertjax.config import BELOW_ONE, POSITIVE_INTEGER, Architecture, ExecutionSettings, ModelSettings, check
from bertjax.config.training import LAYER_MODES, REMAT_POLICIES
from bertjax.model.kernels import ATTENTION, compute_capability
from bertjax.model.model_types import OWN, SWITCHES, TYPES, ModelType, fitting

DTYPES = ("float32", "bfloat16", "float16", "float8")


@dataclasses.dataclass(frozen=True)
class BertConfig(Architecture):
    """The architecture (Devlin et al. 2019, section 3), in Hugging Face's names; bertjax/config has most of its fields.

    Raises:
      ValueError: a field is out of range or two fields contradict each other.
    """

    vocab_size: int = 30522
    pad_token_id: int = 0
    classifier_dropout: float | None = None  # before a task head; None = hidden_dropout_prob
    words: int | None = None  # rows that stand for a word; those above pad the table. None = all

    def __post_init__(self) -> None:
        super().__post_init__()
        check("BertConfig.vocab_size", self.vocab_size, POSITIVE_INTEGER)
        if self.classifier_dropout is not None:
            check("BertConfig.classifier_dropout", self.classifier_dropout, BELOW_ONE)
        if self.words is not None and not 0 < self.words <= self.vocab_size:
            raise ValueError(f"BertConfig.words={self.words} must be from 1 to vocab_size={self.vocab_size}")
        if type(self.pad_token_id) is not int or not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"BertConfig.pad_token_id={self.pad_token_id} is outside vocab_size={self.vocab_size}")

    @property
    def head_size(self) -> int:
        """D = H / A."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """E, of the embedding tables."""
        return self.embedding_size or self.hidden_size

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions."""
        offset = {"rotary": -self.max_position_embeddings, "offset": self.pad_token_id + 1, "learned": 0}
        return self.max_position_embeddings + offset[self.positions]

    def window(self, layer: int) -> int | None:
        """How far a token of a layer sees to each side; None = the whole row."""
        is_global = not self.local_attention or layer % self.global_attn_every_n_layers == 0
        return None if is_global else self.local_attention // 2

    @property
    def type(self) -> str:
        """The model type that it is exported as. Raises ValueError as `model_types.fitting`."""
        return fitting(self)

    @classmethod
    def of(cls, settings: ModelSettings, tokenizer_vocab_size: int, pad_token_id: int = 0) -> BertConfig:
        """The architecture that config.model asks for, for a tokenizer's size and padding token.

        Raises ValueError if the vocabulary is larger than an explicit `model.vocab_size`, or no model of
        `model.model_type` is like this.
        """
        fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Architecture)}
        if not settings.vocab_size:
            multiple = settings.vocab_multiple
            fields["vocab_size"] = -(-tokenizer_vocab_size // multiple) * multiple
        if tokenizer_vocab_size > (size := fields["vocab_size"]):
            raise ValueError(
                f"the tokenizer has {tokenizer_vocab_size} entries, but config.model.vocab_size is {size}: ids from "
                f"{size} on would have no embedding. Set --config.model.vocab_size=0 to follow the tokenizer."
            )
        words = tokenizer_vocab_size if tokenizer_vocab_size < size else None
        config = cls(**fields, pad_token_id=pad_token_id, words=words)
        _ = config.type
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BertConfig:
        """Reads a `config.json` (Hugging Face) or `bert_config.json` (original) dictionary.

        Every key is obeyed, or known to change nothing, or refused. The files' own defaults hold for absent
        keys: erf GELU.

        Raises:
          ValueError: the file describes a network that this code does not compute.
        """
        model_type = values.get("model_type") or "bert"
        if model_type not in (*TYPES, OWN):
            raise ValueError(f"config model_type={model_type!r:.80} is not one of {', '.join(TYPES)}")
        kind = _kind(model_type)
        values = kind.read({name: _number(value) for name, value in values.items() if value is not None})
        for name, supported in (_ONE_VALUE | dict(kind.one_value)).items():
            if values.get(name, supported) != supported:
                raise ValueError(f"config {name}={values[name]!r:.80} is not supported, only {supported!r}")
        fields = _file_fields(kind)
        harmless = {*fields.values(), *_ONE_VALUE, *kind.one_value, *HARMLESS, *kind.harmless, "model_type"}
        ignored = {name: value for name, value in values.items() if name not in harmless}
        fixed = _DEFAULTS | dict(kind.fixed)
        unknown = [
            name
            for name, value in ignored.items()
            if (value != fixed[name] if name in fixed else value and not name.startswith(_PRIVATE))
        ]
        if unknown:
            raise ValueError(
                f"config {', '.join(f'{name}={values[name]!r:.40}' for name in unknown[:10])} is not known here and "
                "may change what the network computes; remove it from the file if it does not"
            )
        found = {name: values[key] for name, key in fields.items() if key in values}
        act = found.setdefault("hidden_act", "gelu")
        found["hidden_act"] = _SAME_ACTIVATION.get(act, act) if isinstance(act, str) else act
        if model_type != OWN:
            found["model_type"] = "" if model_type == "bert" else model_type
        config = cls(**{**kind.absent, **kind.fixed, **found})
        if model_type != OWN and (misfits := kind.misfits(config)):
            told = ", ".join(f"{name}={getattr(config, name)!r}" for name in misfits)
            raise ValueError(f"config {told}: no model of model_type={model_type!r} has that")
        return config

    def to_dict(self, model_type: str = "") -> dict[str, Any]:
        """The fields as a dictionary that `from_dict` and transformers both read.

        model_type: of TYPES or OWN; '' = `type`.
        """
        kind = _kind(model_type := model_type or self.type)
        values = dataclasses.asdict(self.without_padding())
        if values["classifier_dropout"] is None and "classifier_dropout" in kind.absent:
            values["classifier_dropout"] = values["hidden_dropout_prob"]
        return {"model_type": model_type} | kind.write({key: values[name] for name, key in _file_fields(kind).items()})

    def without_padding(self) -> BertConfig:
        """The same network with a row for each word and no more."""
        return dataclasses.replace(self, vocab_size=self.words or self.vocab_size, words=None)


_DEFAULTS: dict[str, Any] = dataclasses.asdict(BertConfig())


def _kind(model_type: str) -> ModelType:
    return ModelType(free=SWITCHES) if model_type == OWN else TYPES[model_type]


def _file_fields(kind: ModelType) -> dict[str, str]:
    """Field -> its key in config.json, for those that a file of the type sets."""
    fixed = {"words", "model_type", *SWITCHES, *kind.fixed} - {*kind.free}
    return {name: kind.keys.get(name, name) for name in _DEFAULTS if name not in fixed}


# Keys of config.json that may have one value only: any other would be another network.
_ONE_VALUE: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": {},
    "auto_map": {},  # code of its own
    "cross_attention_hidden_size": 0,
}
# Keys that change nothing of what is computed here: names and places, what is returned beside the
# logits, how transformers runs or generates, the original's description of a pooler that its code
# does not read. Heads are described by id2label, label2id, num_labels, problem_type, tie_word_embeddings and
# untrained_heads, which interop and inference.py obey, the tokenizer by tokenizer_class, which tokenization does.
HARMLESS = frozenset(
    """
    architectures id2label label2id num_labels problem_type tie_word_embeddings tokenizer_class finetuned
    untrained_heads finetuning_task task_specific_params name name_or_path model_name language license author
    transformers_version torch_dtype dtype torchscript use_bfloat16 use_cache gradient_checkpointing
    chunk_size_feed_forward return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores output_past output_logits output_all_encoded_layers
    attn_implementation experts_implementation
    bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    prefix tf_legacy_loss base_model_tp_plan base_model_pp_plan is_composition
    sentence_transformers
""".split()
)
_PRIVATE = ("_", "sbert_ce_")
_SAME_ACTIVATION = {"gelu_python": "gelu", "gelu_fast": "gelu_new", "gelu_accurate": "gelu_new"}


def _number(value: Any) -> Any:
    """A number that was written as text; anything else as it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the network is run: changes speed, memory and rounding, never the meaning.

    Attributes:
      dtype: of activations and matrix products. Parameters, LayerNorm statistics, softmax and losses stay float32.
        'float8' is bfloat16 but for the large products of the layers; see kernels/float8.py.
      attention: 'auto', 'reference' or the name of a fused kernel (see kernels/__init__.py).
      layers: 'unrolled', or 'scan' for one compiled layer body (compile time, less code). The parameters are one leaf
        a layer in both.
      remat: what the backward pass finds in memory. 'none' keeps everything; 'dots' keeps the outputs of matrix
        products and of attention; 'minimal' keeps two [B,T,H] arrays a layer beside its input; 'full' its input only.
      qkv: 'fused' runs query, key and value as one product; the parameters stay separate.
      dropout_words: generator of hidden-state dropout; see dropout.py.
      pointwise: 'fused' runs bias + dropout + residual + LayerNorm, and the backward pass of bias + GELU, each as one
        kernel (GPU; needs dropout_words='hash', whose masks the kernel draws again instead of storing them).
      platform: what the program is compiled for, 'cpu', 'gpu' or 'tpu', which decides what attention='auto' stands
        for; 'auto' is this machine.
    """

    dtype: str = "float32"
    attention: str = "auto"
    layers: str = ExecutionSettings.layers
    remat: str = ExecutionSettings.remat
    qkv: str = "separate"
    dropout_words: str = "threefry"
    pointwise: str = "xla"
    platform: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("layers", LAYER_MODES),
            ("remat", REMAT_POLICIES),
            ("qkv", ("separate", "fused")),
            ("dropout_words", ("threefry", "hash")),
            ("pointwise", ("xla", "fused")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Execution.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.pointwise == "fused" and self.dropout_words != "hash":
            raise ValueError("Execution.pointwise='fused' needs dropout_words='hash'")

    @property
    def array_dtype(self) -> str:  # of activations
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @classmethod
    def of(
        cls, settings: ExecutionSettings, backend: str, tensor_parallel: bool = False, model: BertConfig | None = None
    ) -> Execution:
        """What config.execution asks for on `backend`; see for_backend.

        Raises ValueError for an attention kernel that there is not, or that does not compute `model`.
        """
        chosen = {name: getattr(settings, name) for name in ("dtype", "layers", "remat")}
        fastest = cls.for_backend(backend, tensor_parallel, **chosen)
        if settings.kernels == "xla":
            return dataclasses.replace(fastest, attention="reference", pointwise="xla")
        if settings.kernels not in ("auto", *ATTENTION):
            raise ValueError(
                f"config.execution.kernels={settings.kernels!r} is not one of auto, xla, {', '.join(ATTENTION)}"
            )
        if model is not None and (reason := _refusal(settings.kernels, model)):
            raise ValueError(f"config.execution.kernels={settings.kernels} {reason}; use auto or reference")
        return dataclasses.replace(fastest, attention=settings.kernels)

    @classmethod
    def for_backend(cls, backend: str, tensor_parallel: bool = False, **overrides: Any) -> Execution:
        """The fastest known execution on `backend` ('cpu', 'gpu', 'tpu').

        Args:
          tensor_parallel: whether the heads of a layer are split over devices.
          **overrides: other fields; dtype 'auto' is float32 on CPUs and on GPUs without bfloat16 (T4, V100).
        """
        fastest = {"platform": backend}
        if overrides.get("dtype", "auto") == "auto":
            slow = backend == "cpu" or (backend == "gpu" and 0 < compute_capability() < 8)
            overrides["dtype"] = "float32" if slow else "bfloat16"
        if backend == "gpu" and overrides["dtype"] != "float32":
            qkv = "separate" if tensor_parallel else "fused"
            fastest |= {"qkv": qkv, "dropout_words": "hash", "pointwise": "fused"}
        elif backend in ("cpu", "tpu"):
            # Compiles in half the time on a CPU. Of jax.random, each TPU chip draws the bits of the whole batch.
            fastest["dropout_words"] = "hash"
        return cls(**fastest | overrides)


def _refusal(kernel: str, model: BertConfig) -> str:
    """Why an attention kernel does not compute a model; '' = it does, or depends on more than the model."""
    head = model.head_size
    if kernel in ("triton", "pallas_tpu") and model.is_decoder:
        return "does not compute models that read left to right"
    if kernel == "triton" and (head < 16 or head & (head - 1)):
        return f"needs heads of a power of two >= 16, not of {head}"
    if kernel == "pallas_tpu" and 128 % head:
        return f"needs heads of a divisor of 128, not of {head}"
    return ""


def miniature(layers: int, hidden: int, **overrides: Any) -> BertConfig:
    """One of the 24 miniatures of Turc et al. 2019: A = H / 64, F = 4 H.

    Args:
      layers: 2, 4, 6, 8, 10 or 12.
      hidden: 128, 256, 512 or 768.
      **overrides: other fields of BertConfig.
    """
    if hidden % 64:
        raise ValueError(f"hidden={hidden} must be a multiple of 64, the size of one head")
    sizes = dict(hidden_size=hidden, num_attention_heads=hidden // 64, intermediate_size=4 * hidden)
    return BertConfig(num_hidden_layers=layers, **sizes, **overrides)


def modern(layers: int, hidden: int, inner: int, **overrides: Any) -> BertConfig:
    """A ModernBERT (Warner et al. 2024): rotary positions, windows of 128, GeGLU, norms before, no biases.

    Args:
      layers, hidden, inner: L, H and F; A = H / 64.
      **overrides: other fields of BertConfig.
    """
    kind = TYPES["modernbert"]
    fields = {name: value for name, value in kind.absent.items() if name not in ("vocab_size", "pad_token_id")}
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    sizes["num_attention_heads"] = hidden // 64
    # Published: of MLM alone, [CLS] learns little.
    published = {"hidden_act": "gelu", "local_attention": 128, "classifier_pooling": "mean"}
    return BertConfig(**{**fields, **kind.fixed, **sizes, **published, **overrides})


PRESETS: dict[str, BertConfig] = {
    "base": miniature(12, 768),  # Devlin et al. 2019, section 3
    "large": miniature(24, 1024),
    "medium": miniature(8, 512),  # google-research/bert, README, "Smaller BERT Models"
    "small": miniature(4, 512),
    "mini": miniature(4, 256),
    "tiny": miniature(2, 128),
    "modernbert-base": modern(22, 768, 1152),  # Warner et al. 2024, table 4
    "modernbert-large": modern(28, 1024, 2624),
    "modernbert-small": modern(12, 384, 576),  # ours: half of base each way
}
