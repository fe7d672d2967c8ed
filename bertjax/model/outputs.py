"""What heads are made of: pooler, MLM head, deep classifier, and how each family of models builds them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bertjax.model.encoder import BertEncoder
from bertjax.model.layers import DISTRIBUTIONS, Dense, Draw, LayerNorm, activation, parameter, truncated_normal, zeros
from bertjax.model.lookup import gather_positions, product_float32
from bertjax.model.mesh import with_copies
from bertjax.model.presets import BertConfig

NEVER = -1e9  # a logit whose probability is 0 in float32


@dataclasses.dataclass(frozen=True)
class HeadStyle:
    """How a family of models builds its heads (BertConfig.heads).

    Attributes:
      act: of the pooler, and of the first product of a deep classifier.
      pooled: whether the encoder alone has a pooler.
      deep: whether sequences are classified by a head of two products instead of pooler and classifier.
      normed: whether the pooler and the MLM transform have a LayerNorm for their bias, and stand before the
        classifiers of tokens too.
      mlm_act: of the MLM transform; '' = hidden_act.
      tokens_as_hidden: whether dropout before a head over tokens has the rate of hidden states, not of classifiers.
      spans_dropped: whether the head of answer spans has dropout before it, as other heads over tokens have.
    """

    act: str = "tanh"
    pooled: bool = True
    deep: bool = False
    normed: bool = False
    mlm_act: str = "gelu"
    tokens_as_hidden: bool = False
    spans_dropped: bool = False


STYLES = {
    "bert": HeadStyle(mlm_act=""),
    "roberta": HeadStyle(deep=True),
    "distilbert": HeadStyle("relu", pooled=False, mlm_act="", tokens_as_hidden=True, spans_dropped=True),
    "electra": HeadStyle("gelu", pooled=False, deep=True),
    "modernbert": HeadStyle("gelu", pooled=False, normed=True, spans_dropped=True),
}


class Pooler(Dense):
    """tanh(W h + b) of the [CLS] vectors (original: modeling.py, "pooler"), or what a HeadStyle has instead."""

    def __init__(self, config: BertConfig, head_init: str = "truncated_normal") -> None:
        h, style = config.hidden_size, STYLES[config.heads]
        super().__init__(h, h, DISTRIBUTIONS[head_init](config.initializer_range), not style.normed)
        self.LayerNorm = LayerNorm(h, config.layer_norm_eps, config.norm_bias) if style.normed else None
        self.act, self.left_to_right, self.mean = style.act, config.is_decoder, config.classifier_pooling == "mean"

    def of_vectors(self, x: jax.Array) -> jax.Array:
        """Of vectors [..., H] that are chosen already."""
        x = activation(self.act)(super().__call__(x))
        return x if self.LayerNorm is None else self.LayerNorm(x)

    def __call__(self, hidden: jax.Array, cls_positions: jax.Array | None = None) -> jax.Array:
        """[B, H] of position 0 of every row [B, T, H], or [B, K, H] at cls_positions, int [B, K]."""
        return self.of_vectors(cls_vectors(hidden, cls_positions))

    def of_rows(
        self, hidden: jax.Array, attention_mask: jax.Array, cls_positions: jax.Array | None = None
    ) -> jax.Array:
        """[B, H] for rows of one text: at [CLS], or at the last token of a left-to-right model, whose
        [CLS] sees nothing (as in GPT; the paper's ablation does not say). [B, K, H] for packed rows."""
        if cls_positions is not None and (self.mean or self.left_to_right):
            own = tokens_of_each(attention_mask, cls_positions.shape[1])
            count = jnp.maximum(jnp.sum(own, axis=-1), 1)  # 1 where a slot is empty
            if self.mean:
                weights = own.astype(hidden.dtype)
                total = jnp.einsum("BKT,BTH->BKH", weights, hidden, precision=jax.lax.Precision.HIGHEST)
                return self.of_vectors(total / count[..., None].astype(hidden.dtype))
            return self(hidden, cls_positions + count - 1)
        if self.mean:
            weights = (attention_mask > 0).astype(hidden.dtype)[..., None]
            return self.of_vectors(jnp.sum(hidden * weights, axis=1) / jnp.sum(weights, axis=1))
        if not self.left_to_right:
            return self(hidden, cls_positions)
        last = jnp.maximum(jnp.sum(attention_mask > 0, -1, keepdims=True) - 1, 0)
        return self(hidden, last)[:, 0]


def tokens_of_each(attention_mask: jax.Array, slots: int) -> jax.Array:
    """bool [B, K, T]: which tokens of a packed row belong to each of its K slots."""
    return attention_mask[:, None] == jnp.arange(1, slots + 1)[:, None]


def cls_vectors(hidden: jax.Array, positions: jax.Array | None) -> jax.Array:
    """[B, H] at position 0, or [B, K, H] at positions."""
    return hidden[:, 0] if positions is None else gather_positions(hidden, positions)


class DeepClassifier(nnx.Module):
    """Two products with dropout before each, of the [CLS] vector."""

    def __init__(self, config: BertConfig, labels: int, draw: Draw) -> None:
        h = config.hidden_size
        self.dense, self.out_proj = Dense(h, h, draw), Dense(h, labels, draw)
        self.act = STYLES[config.heads].act

    def __call__(self, cls: jax.Array, drop: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        x = activation(self.act)(self.dense(drop(cls, 0)))
        return self.out_proj.float32(drop(x, 1))


class MlmHead(nnx.Module):
    """Transform, its LayerNorm, and the output bias of the masked language model."""

    def __init__(self, config: BertConfig) -> None:
        self.config = config
        h, e, style = config.hidden_size, config.embedding_width, STYLES[config.heads]
        self.transform = Dense(h, e, truncated_normal(config.initializer_range), not style.normed)
        self.LayerNorm = LayerNorm(e, config.layer_norm_eps, config.norm_bias)
        self.act = style.mlm_act or config.hidden_act
        self.bias = parameter(zeros, config.vocab_size)

    def __call__(self, encoder: BertEncoder, hidden: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Float32 logits [B, P, V] at positions [B, P] of hidden [B, T, H]; None means all T
        (original: get_masked_lm_output)."""
        config, bias = self.config, self.bias[...]
        if positions is not None:
            hidden = gather_positions(hidden, positions)
        x = self.LayerNorm(activation(self.act)(self.transform(hidden)))
        if config.words is not None:  # rows that pad the table have no share in the softmax
            bias += np.where(np.arange(config.vocab_size) < config.words, 0, NEVER).astype(np.float32)
        return with_copies(product_float32, encoder.embeddings.word_embeddings[...], x, bias)
