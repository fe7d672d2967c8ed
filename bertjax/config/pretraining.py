"""Settings of pre-training: corpus, masks, architecture, evaluation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from bertjax.config.setting import (
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_ONE,
    COUNT,
    POSITIVE,
    POSITIVE_INTEGER,
    SHARE,
    SMALL,
    check,
    setting,
    walk,
)

PAPER, CODE = "BERT paper A.2", "google-research/bert"
TFRECORD = "tfrecord:"  # begins a config.data.corpus of files of the original
# 'gelu' is x * Phi(x) through erf, as transformers names it; 'gelu_new' is the tanh approximation that the original
# code computes (modeling.py, last commit); 'swish' is what transformers also calls 'silu'.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
MODERN = "ModernBERT paper, table 4"
HEADS = ("bert", "roberta", "distilbert", "electra", "modernbert")
MODEL_TYPES = ("", "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert")


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
    heldout: str = setting("", "tfrecord: files to evaluate on, 'tfrecord:PATTERN'; '' = some of the corpus's records")
    heldout_fraction: float = setting(
        0.01, "share of the records of tfrecord: files that is held out, if 'heldout' names no others", BELOW_ONE
    )
    cache: str = setting(
        "",
        "directory for what must be on a local disk: unpacked GZIP tfrecord: files ('' = a temporary one), copies of "
        "stores at gs:// ('' = ~/.cache/bertjax/stores)",
    )
    short_seq_prob: float = setting(0.1, "share of pairs with a random shorter target length", SHARE, source=CODE)
    nsp: bool = setting(True, "next-sentence pairs; False = one segment of contiguous text a row and no NSP loss")
    corpus_limits: str = setting(
        "refuse",
        "what to do if a number of the corpus is beyond its limit (tokens that no row holds, random pairs, unknown "
        "tokens, copies): refuse, or warn and train",
        ("refuse", "warn"),
    )
    packed: bool = setting(False, "several pairs in one row, attention confined to each pair")
    workers: int = setting(0, "processes that assemble batches ahead of time; 0 = threads only", AT_LEAST_0)
    prefetch: int = setting(4, "batches kept ready in host memory", AT_LEAST_0, unit="batches")
    demo_megabytes: float = setting(6.0, "largest size of the embedded demo corpus's text", POSITIVE, unit="MB")
    demo_vocab_size: int = setting(8000, "vocabulary trained on the embedded demo corpus", unit="entries")
    demo_vocab_model: str = setting(
        "wordpiece",
        "kind of that vocabulary: BERT's WordPiece, uncased; RoBERTa's byte-level BPE; XLM-R's Unigram",
        ("wordpiece", "bpe", "unigram"),
    )


@dataclasses.dataclass(frozen=True)
class MaskingSettings:
    """config.masking: what the masked language model predicts."""

    rate: float = setting(0.15, "share of a row's tokens that are predicted", BELOW_ONE, source=PAPER)
    mask_prob: float = setting(0.8, "share of the predicted tokens replaced by [MASK]", SHARE, source=PAPER)
    random_prob: float = setting(
        0.1, "share of the predicted tokens replaced by a random token; the rest stays as it is", SHARE, source=PAPER
    )
    whole_word: bool = setting(False, "choose whole words instead of single pieces")
    max_predictions: int = setting(
        0,
        "predicted positions a row (static shape); 0 = rate x length rounded up: 20 at 128, 77 at 512",
        AT_LEAST_0,
        source=CODE,
        unit="tokens",
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
        AT_LEAST_0,
        unit="entries",
    )
    hidden_size: int = setting(768, "H, width of the encoder", POSITIVE_INTEGER)
    num_hidden_layers: int = setting(12, "L, encoder layers", POSITIVE_INTEGER)
    num_attention_heads: int = setting(12, "A, attention heads; must divide H", POSITIVE_INTEGER)
    intermediate_size: int = setting(3072, "F, width of the feed-forward layer", POSITIVE_INTEGER)
    hidden_act: str = setting(
        "gelu_new",
        "activation: gelu_new (tanh form), gelu (erf), relu or silu",
        ACTIVATIONS,
        source=CODE + " modeling.py",
    )
    hidden_dropout_prob: float = setting(0.1, "dropout after embeddings and each sub-layer", BELOW_ONE, source=PAPER)
    attention_probs_dropout_prob: float = setting(0.1, "dropout on attention probabilities", BELOW_ONE, source=PAPER)
    max_position_embeddings: int = setting(512, "longest sequence", POSITIVE_INTEGER, source=PAPER, unit="tokens")
    is_decoder: bool = setting(
        False,
        "left to right: a position sees itself and those before it, and the loss is that of the next token; needs "
        "data.nsp=False",
    )
    initializer_range: float = setting(0.02, "standard deviation of the truncated normal", SMALL, source=CODE)
    layer_norm_eps: float = setting(1e-12, "epsilon of LayerNorm", SMALL, source=CODE)
    type_vocab_size: int = setting(2, "segments a token can belong to; 0 = no segment embeddings", COUNT, source=CODE)
    positions: str = setting(
        "learned",
        "how positions are encoded: learned (a table), offset (RoBERTa's table, which counts from the padding "
        "token's id + 1) or rotary (queries and keys are turned)",
        ("learned", "offset", "rotary"),
        source=CODE,
    )
    global_rope_theta: float = setting(
        160_000.0, "base of rotary positions in layers that see the whole row", POSITIVE, source=MODERN
    )
    local_rope_theta: float = setting(1e4, "base of rotary positions in layers with a window", POSITIVE, source=MODERN)
    local_attention: int = setting(
        0,
        "window of attention, half of it to each side; 0 = every layer sees the whole row",
        COUNT,
        source=CODE,
        unit="tokens",
    )
    global_attn_every_n_layers: int = setting(
        3, "where there are windows: layers 0, n, 2n, ... see the whole row", POSITIVE_INTEGER, source=MODERN
    )
    norm: str = setting(
        "after",
        "LayerNorm after each sub-layer and its residual, or before each sub-layer",
        ("after", "before"),
        source=CODE,
    )
    norm_bias: bool = setting(True, "LayerNorm adds a bias", source=CODE)
    embedding_norm: bool = setting(True, "LayerNorm after the embeddings", source=CODE)
    first_norm: bool = setting(
        True, "norm=before: LayerNorm before the first layer's attention too; ModernBERT has none there", source=CODE
    )
    final_norm: bool = setting(False, "LayerNorm after the last layer, which norm=before needs", source=CODE)
    feed_forward: str = setting(
        "plain",
        "plain = activation(x W), gated = activation(x W) * (x V): GeGLU with hidden_act=gelu",
        ("plain", "gated"),
        source=CODE,
    )
    attention_bias: bool = setting(True, "biases in the four products of attention", source=CODE)
    mlp_bias: bool = setting(True, "biases in the products of the feed-forward layer", source=CODE)
    embedding_size: int = setting(
        0, "width of the embedding tables (ELECTRA: a matrix makes H of it); 0 = H", COUNT, source=CODE
    )
    heads: str = setting("bert", "model family whose pooler, MLM head and classifiers are built", HEADS, source=CODE)
    classifier_pooling: str = setting(
        "cls", "what a classifier with heads=modernbert reads: the first vector or the mean", ("cls", "mean")
    )
    model_type: str = setting(
        "",
        "name of the architecture in the exported config.json, where several are the same network (roberta, "
        "xlm-roberta, camembert); '' = the first that fits",
        MODEL_TYPES,
    )

    def __post_init__(self) -> None:
        for name, field in walk(type(self)):
            check(f"{self._where}.{name}", getattr(self, name), field.allowed)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{self._where}.num_attention_heads={self.num_attention_heads} must divide "
                f"hidden_size={self.hidden_size}; BERT uses hidden_size / 64 heads"
            )
        for field in dataclasses.fields(Architecture):
            if field.type == "bool" and not isinstance(value := getattr(self, field.name), bool):
                raise ValueError(f"{self._where}.{field.name} must be true or false, got {value!r:.40}")
        if self.positions == "rotary" and self.hidden_size // self.num_attention_heads % 2:
            raise ValueError(
                f"{self._where}.positions='rotary' turns pairs of numbers, so hidden_size / num_attention_heads = "
                f"{self.hidden_size // self.num_attention_heads} must be even"
            )
        if self.is_decoder and self.local_attention:
            raise ValueError(f"{self._where}.is_decoder=True has no windows: set {self._where}.local_attention=0")

    @property
    def idle(self) -> dict[str, str]:
        """Fields without effect -> the value of another field that would give them one."""
        rotary, local = self.positions == "rotary", self.local_attention > 0
        used = {
            "global_rope_theta": (rotary, "positions='rotary'"),
            "local_rope_theta": (rotary and local, "positions='rotary' with local_attention"),
            "global_attn_every_n_layers": (local, "local_attention"),
            "first_norm": (self.norm == "before", "norm='before'"),
            "classifier_pooling": (self.heads == "modernbert", "heads='modernbert'"),
        }
        return {name: purpose for name, (is_used, purpose) in used.items() if not is_used}


@dataclasses.dataclass(frozen=True)
class ModelSettings(Architecture):
    """config.model: the architecture of a pre-training run."""

    _where: ClassVar[str] = "config.model"

    vocab_multiple: int = setting(
        1,
        "round the embedding table up to a multiple of this (64 or 128 speeds the MLM head up; extra rows are left "
        "out of the softmax and of the exported model)",
        AT_LEAST_1,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """config.eval: evaluation on held-out rows during pre-training."""

    every_steps: int = setting(1000, "steps between evaluations; 0 = only at the end", AT_LEAST_0, unit="steps")
    rows: int = setting(10_000, "held-out rows evaluated at most; 0 = all", AT_LEAST_0, unit="rows")
    seq_length: int = setting(
        0,
        "length of a held-out row, the same in all phases, so that their losses compare; 0 = that of the phase",
        AT_LEAST_0,
        unit="tokens",
    )
    masking_rate: float = setting(0.0, "share of held-out tokens that is predicted; 0 = masking.rate", BELOW_ONE)
