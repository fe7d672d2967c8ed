"""Heads and complete models: hidden states in, logits (float32) out.

Every model keeps the encoder under `encoder` and the pooler under `pooler`, so that weights move
between models by name:

    encoder/...                                     see encoder.py
    pooler/{kernel [H, H], bias [H]}
    mlm/transform/{kernel [H, H], bias [H]}, mlm/LayerNorm/{scale,bias}, mlm/bias [V]
    nsp/{kernel [H, 2], bias [2]}
    classifier/{kernel [H, labels], bias [labels]}  (one label for multiple choice)
    qa_outputs/{kernel [H, 2], bias [2]}
    bilstm_0/...                                    between encoder and head, where asked for

The MLM decoder is the transposed word embedding table: it has no leaf of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.bilstm import BiLstm
from bertjax.model.dropout import dropout
from bertjax.model.encoder import (
    BertEncoder,
    DenseParams,
    LayerNormParams,
    Params,
    activation,
    dense,
    head_site,
    layer_norm,
)
from bertjax.model.lookup import gather_positions
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.rows import with_copies

NEVER = -1e9  # a logit whose probability is 0 in float32


@jax.custom_vjp
def product_float32(table: jax.Array, x: jax.Array) -> jax.Array:
    """x [..., H] times table [V, H] transposed -> float32 [..., V].

    The operands are multiplied in x's type and accumulated in float32 without rounding the result,
    for the softmax. The backward products run in x's type: left alone, they would run in float32
    because the logits do. The table is padded to a multiple of 64 rows on the way: a product with
    30,522 columns, rows of odd alignment, takes more than twice the time on a GPU.
    """
    return _product_forward(table, x)[0]


def _padded(table: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.pad(table.astype(x.dtype), ((0, -table.shape[0] % 64), (0, 0)))


def _product_forward(table: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple]:
    logits = jnp.einsum("...H,VH->...V", x, _padded(table, x), preferred_element_type=jnp.float32)
    return logits[..., : table.shape[0]], (table, x)


def _product_backward(residuals: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    table, x = residuals
    rows = table.shape[0]
    widths = [(0, 0)] * (cotangent.ndim - 1) + [(0, -rows % 64)]
    g = jnp.pad(cotangent.astype(x.dtype), widths)
    dx = jnp.einsum("...V,VH->...H", g, _padded(table, x))
    dtable = jnp.einsum(
        "NV,NH->VH", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), preferred_element_type=jnp.float32
    )
    return dtable[:rows].astype(table.dtype), dx


product_float32.defvjp(_product_forward, _product_backward)


def pool(params: Params, hidden: jax.Array, cls_positions: jax.Array | None) -> jax.Array:
    """tanh(W h + b) of the [CLS] vectors (original: modeling.py, "pooler").

    Args:
      hidden: [B, T, H].
      cls_positions: int [B, K], or None for position 0 of every row.

    Returns:
      [B, K, H], or [B, H] when `cls_positions` is None.
    """
    cls = hidden[:, 0] if cls_positions is None else gather_positions(hidden, cls_positions)
    return jnp.tanh(dense(params, cls))


def pool_row(params: Params, config: BertConfig, hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """[B, H] for rows of one text: `pool` at [CLS], or at the last token of a left-to-right model,
    whose [CLS] sees nothing (as in GPT; the paper's ablation does not say)."""
    if not config.is_decoder:
        return pool(params, hidden, None)
    last = jnp.maximum(jnp.sum(attention_mask > 0, -1, keepdims=True) - 1, 0)
    return pool(params, hidden, last)[:, 0]


def dense_float32(params: Params, x: jax.Array) -> jax.Array:
    """A small output layer, in float32 because it feeds a softmax and costs nothing."""
    return dense(params, x.astype(jnp.float32))


class MlmHeadParams(nn.Module):
    """Declares the transform, its LayerNorm and the output bias [V]."""

    config: BertConfig

    @nn.compact
    def __call__(self) -> Params:
        c = self.config
        h = c.hidden_size
        return {
            "transform": DenseParams(h, h, c.initializer_range, name="transform")(),
            "LayerNorm": LayerNormParams(h, name="LayerNorm")(),
            "bias": self.param("bias", nn.initializers.zeros, (c.vocab_size,)),
        }


def mlm_inputs(encoder: BertEncoder, hidden: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(word embeddings [V, H], hidden at `positions` [B, P]: [B, P, H]); None means all T."""
    words = encoder.get_variable("params", "embeddings")["word_embeddings"]
    return words, hidden if positions is None else gather_positions(hidden, positions)


def mlm_logits(params: Params, config: BertConfig, word_embeddings: jax.Array, hidden: jax.Array) -> jax.Array:
    """hidden [B, P, H] -> float32 logits [B, P, V] (original: get_masked_lm_output)."""
    x = activation(config.hidden_act)(dense(params["transform"], hidden))
    x = layer_norm(params["LayerNorm"], x, config.layer_norm_eps)
    bias = params["bias"]
    if config.words is not None:  # rows that pad the table have no share in the softmax
        bias += np.where(np.arange(config.vocab_size) < config.words, 0, NEVER).astype(np.float32)
    return with_copies(product_float32, word_embeddings, x) + bias


class BertNetwork(nn.Module):
    """What every model shares: configuration, execution and the declaration of its parts."""

    config: BertConfig
    execution: Execution = Execution()
    head_init = "truncated_normal"  # of all heads but a task's, which has it as a field

    def _encoder(self) -> BertEncoder:
        return BertEncoder(self.config, self.execution, name="encoder")

    def _dense(self, name: str, features_out: int) -> Params:
        c = self.config
        return DenseParams(c.hidden_size, features_out, c.initializer_range, self.head_init, name=name)()

    def _pooler(self) -> Params:
        return self._dense("pooler", self.config.hidden_size)

    def _drop(self, x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """Dropout before a task head (original: run_classifier.py, create_model)."""
        if dropout_key is None:
            return x
        c, key = self.config, jax.random.fold_in(dropout_key, head_site(self.config))
        rate = c.hidden_dropout_prob if c.classifier_dropout is None else c.classifier_dropout
        return dropout(x, rate, key)

    @property
    def storable(self) -> BertNetwork:
        """The model without the parts that no checkpoint format knows; itself if it has none."""
        return self


class BertModel(BertNetwork):
    """Encoder and pooler."""

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        cls_positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        all_hidden: bool = False,
    ) -> tuple[jax.Array | tuple[jax.Array, ...], jax.Array]:
        """Arguments as in BertEncoder and `pool`.

        Returns:
          (hidden [B, T, H] or all L+1 of them, pooled [B, H] or [B, K, H] with cls_positions).
        """
        hidden = self._encoder()(input_ids, attention_mask, token_type_ids, position_ids, dropout_key, all_hidden)
        last = hidden[-1] if all_hidden else hidden
        return hidden, pool(self._pooler(), last, cls_positions)


class BertForPreTraining(BertNetwork):
    """Masked language model and next-sentence prediction over one encoder."""

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        masked_positions: jax.Array | None = None,
        cls_positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Logits of both objectives.

        Args:
          masked_positions: int [B, P], the positions that the MLM head sees; None means all T.
          cls_positions: int [B, K] in packed rows; None means one pair a row, K = 1.

        Returns:
          (mlm_logits [B, P, V], nsp_logits [B, K, 2]), float32. NSP class 0 is "is next".
        """
        encoder = self._encoder()
        hidden = encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        pooler = self._pooler()
        mlm = MlmHeadParams(self.config, name="mlm")()
        nsp = self._dense("nsp", 2)

        words, seen = mlm_inputs(encoder, hidden, masked_positions)
        pooled = pool(pooler, hidden, cls_positions)
        if cls_positions is None:
            pooled = pooled[:, None]
        return mlm_logits(mlm, self.config, words, seen), dense_float32(nsp, pooled)


class BertForMaskedLM(BertNetwork):
    """Masked language model alone: no pooler, as checkpoints trained without NSP have none."""

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        masked_positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits [B, P, V] at masked_positions [B, P]; None means all T positions."""
        encoder = self._encoder()
        hidden = encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        words, seen = mlm_inputs(encoder, hidden, masked_positions)
        return mlm_logits(MlmHeadParams(self.config, name="mlm")(), self.config, words, seen)


class BertForNextSentencePrediction(BertNetwork):
    """Next-sentence prediction alone."""

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits [B, 2] of a pair a row; class 0 is "is next"."""
        hidden = self._encoder()(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        return dense_float32(self._dense("nsp", 2), pool(self._pooler(), hidden, None))


class TaskNetwork(BertNetwork):
    """A model with a task head, over the encoder or over a BiLSTM that reads the encoder.

    bilstm: layers of it, 0 = none. The paper puts one, drawn at random, on its left-to-right model
    "to make a good faith attempt at strengthening" it (section 5.1; its size is not told: here H
    outputs, so that the head stays as it is).

    head_init: how a new head is drawn, one of encoder.DISTRIBUTIONS. A short training hardly
    changes how large its weights are, so tasks of few steps and many labels can tell.
    """

    bilstm: int = 0
    head_init: str = "truncated_normal"

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Any:
        """Arguments as in BertEncoder; float32 logits as the docstring of the model says."""
        hidden = self._encoder()(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        for number in range(self.bilstm):
            hidden = BiLstm(self.config.hidden_size // 2, name=f"bilstm_{number}")(hidden, attention_mask)
        return self._head(hidden, attention_mask, dropout_key)

    def _head(self, hidden: jax.Array, attention_mask: jax.Array, dropout_key: jax.Array | None) -> Any:
        """The logits of a subclass's task. (Not an abc method: flax makes its own classes.)"""
        raise NotImplementedError

    def _classify(self, labels: int, features: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """features [..., H] -> [..., labels], behind dropout."""
        classifier = self._dense("classifier", labels)
        return dense_float32(classifier, self._drop(features, dropout_key))

    def _pooled(self, hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
        return pool_row(self._pooler(), self.config, hidden, attention_mask)

    @property
    def storable(self) -> BertNetwork:
        return self.clone(bilstm=0, parent=None) if self.bilstm else self


class BertForSequenceClassification(TaskNetwork):
    """Classification or regression (num_labels = 1) of a sentence or a pair: [B, labels]."""

    num_labels: int = 2

    def _head(self, hidden, attention_mask, dropout_key):
        return self._classify(self.num_labels, self._pooled(hidden, attention_mask), dropout_key)


class BertForMultipleChoice(TaskNetwork):
    """Choice among C continuations, each scored by one output on its pooled vector.

    Inputs int [B, C, T] -> [B, C]; [N, T] -> [N].
    """

    def __call__(self, input_ids, attention_mask, token_type_ids=None, position_ids=None, dropout_key=None):
        rows = (
            None if x is None else x.reshape(-1, x.shape[-1])
            for x in (input_ids, attention_mask, token_type_ids, position_ids)
        )
        return super().__call__(*rows, dropout_key).reshape(input_ids.shape[:-1])

    def _head(self, hidden, attention_mask, dropout_key):
        return self._classify(1, self._pooled(hidden, attention_mask), dropout_key)


class BertForTokenClassification(TaskNetwork):
    """A label for every token (named entities, parts of speech), no pooler: [B, T, labels]."""

    num_labels: int = 2

    def _head(self, hidden, attention_mask, dropout_key):
        return self._classify(self.num_labels, hidden, dropout_key)


class BertForQuestionAnswering(TaskNetwork):
    """Start and end of an answer span, no pooler and no dropout before the head.

    (start_logits [B, T], end_logits [B, T]); padding is not excluded.
    """

    def _head(self, hidden, attention_mask, dropout_key):
        logits = dense_float32(self._dense("qa_outputs", 2), hidden)
        return logits[..., 0], logits[..., 1]


def init_params(model: BertNetwork | BertEncoder, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters as a plain nested dict of float32 arrays.

    Initialisation as the original: kernels and tables truncated normal (0.02), biases 0, LayerNorm
    1 and 0. Pure and jit-able (the forward pass is dropped as dead code); the values depend on the
    key and the parameter's path only, not on sharding or on the other parameters.
    """
    ids = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, ids, jnp.ones_like(ids))["params"]


def with_rows(flat: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """{path: parameter} with `rows` rows of the vocabulary: cut, or padded with zeros."""
    changed = {}
    for path in ("encoder/embeddings/word_embeddings", "mlm/bias"):
        if path in flat and len(table := flat[path]) != rows:
            table = np.asarray(table)[:rows]
            changed[path] = np.pad(table, [(0, rows - len(table))] + [(0, 0)] * (table.ndim - 1))
    return {**flat, **changed}


# `init_params` as a function that is traced once a model, by whatever program asks first.
shared_init = jax.jit(init_params, static_argnums=0)


def parameter_shapes(model: BertNetwork | BertEncoder) -> dict[str, Any]:
    """The tree of `init_params` with a ShapeDtypeStruct for each array."""
    return jax.eval_shape(lambda: shared_init(model, jax.random.key(0)))
