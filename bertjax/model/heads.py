"""Heads and complete models: hidden states in, logits (float32) out.

Every model keeps the encoder under `encoder` and the pooler under `pooler`, so that weights move
between models by name:

    encoder/...                                     see encoder.py
    pooler/{kernel [H, H], bias [H]}                (ModernBERT's: LayerNorm/{scale,bias} and no bias)
    mlm/transform/{kernel [H, H], bias [H]}, mlm/LayerNorm/{scale,bias}, mlm/bias [V]
    nsp/{kernel [H, 2], bias [2]}
    classifier/{kernel [H, labels], bias [labels]}  (one label for multiple choice)
    classifier/{dense,out_proj}/{kernel,bias}       (of sequences: RoBERTa and ELECTRA)
    qa_outputs/{kernel [H, 2], bias [2]}
    bilstm_0/...                                    between encoder and head, where asked for

The MLM decoder is the transposed word embedding table: it has no leaf of its own. What is meant by pooler and
classifier depends on the family of the heads, see STYLES.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bertjax.model.bilstm import BiLstm
from bertjax.model.dropout import dropout
from bertjax.model.encoder import BertEncoder, head_site
from bertjax.model.layers import DISTRIBUTIONS, Dense, Draw, Network, described, ones, zeros
from bertjax.model.outputs import STYLES, DeepClassifier, MlmHead, Pooler, cls_vectors
from bertjax.model.paths import unflatten
from bertjax.model.presets import BertConfig, Execution

OF_WORDS = ("encoder/embeddings/word_embeddings", "mlm/bias")  # parameters with a row for each word


@described
class BertNetwork(Network):
    """What every model has: configuration, execution and the encoder.

    A model is a description until `apply` gives it parameters. To add a head: a class below with its parts and
    its outputs, its names in other formats (interop/names.py) and its loss (tasks/kinds.py).
    """

    config: BertConfig
    execution: Execution = Execution()
    has_vectors: ClassVar[bool] = False  # a task's head reads one vector a row, which `_vectors` computes
    packs: ClassVar[bool] = True  # rows may hold several texts

    def __post_init__(self) -> None:
        self.encoder = BertEncoder(self.config, self.execution)

    def _dense(self, features_out: int, head_init: str = "truncated_normal") -> Dense:
        draw = DISTRIBUTIONS[head_init](self.config.initializer_range)
        return Dense(self.config.hidden_size, features_out, draw)

    def _drop(self, x: jax.Array, dropout_key: jax.Array | None, number: int = 0, as_hidden: bool = False) -> jax.Array:
        """Dropout before a task head (original: run_classifier.py, create_model)."""
        if dropout_key is None:
            return x
        c, key = self.config, jax.random.fold_in(dropout_key, head_site(self.config) + number)
        rate = c.hidden_dropout_prob if as_hidden or c.classifier_dropout is None else c.classifier_dropout
        return dropout(x, rate, key)

    @property
    def storable(self) -> BertNetwork:
        """The model without the parts that no checkpoint format knows; itself if it has none."""
        return self


@described
class BertModel(BertNetwork):
    """Encoder and pooler, or the encoder alone in families that have none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pooler = Pooler(self.config) if STYLES[self.config.heads].pooled else None

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
        """Arguments as in BertEncoder and Pooler.

        Returns:
          (hidden [B, T, H] or all L+1 of them, pooled [B, H] or [B, K, H] with cls_positions: without a
          pooler the [CLS] vectors).
        """
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key, all_hidden)
        last = hidden[-1] if all_hidden else hidden
        return hidden, (self.pooler or cls_vectors)(last, cls_positions)


@described
class BertForPreTraining(BertNetwork):
    """Masked language model and next-sentence prediction over one encoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pooler, self.mlm, self.nsp = Pooler(self.config), MlmHead(self.config), self._dense(2)

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
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        pooled = self.pooler(hidden, cls_positions)
        if cls_positions is None:
            pooled = pooled[:, None]
        return self.mlm(self.encoder, hidden, masked_positions), self.nsp.float32(pooled)


@described
class BertForMaskedLM(BertNetwork):
    """Masked language model alone: no pooler, as checkpoints trained without NSP have none."""

    packs: ClassVar[bool] = False  # in prediction, which asks for the masks of a row

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mlm = MlmHead(self.config)

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
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        return self.mlm(self.encoder, hidden, masked_positions)


@described
class BertForNextSentencePrediction(BertNetwork):
    """Next-sentence prediction alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pooler, self.nsp = Pooler(self.config), self._dense(2)

    def __call__(
        self, input_ids, attention_mask, token_type_ids=None, position_ids=None, cls_positions=None, dropout_key=None
    ):
        """Float32 logits [B, 2] of a pair a row, or [B, K, 2] of packed rows; class 0 is "is next"."""
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        return self.nsp.float32(self.pooler(hidden, cls_positions))


@described
class TaskNetwork(BertNetwork):
    """A model with a task head, over the encoder or over a BiLSTM that reads the encoder.

    bilstm: layers of it, 0 = none. The paper puts one, drawn at random, on its left-to-right model
    "to make a good faith attempt at strengthening" it (section 5.1; its size is not told: here H
    outputs, so that the head stays as it is).

    head_init: how a new head is drawn, one of layers.DISTRIBUTIONS. A short training hardly
    changes how large its weights are, so tasks of few steps and many labels can tell.
    """

    bilstm: int = 0
    head_init: str = "truncated_normal"
    reads_packed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in range(self.bilstm):
            setattr(self, f"bilstm_{number}", BiLstm(self.config.hidden_size, self.config.hidden_size // 2))

    @property
    def packs(self) -> bool:
        """Whether rows may hold several examples: not where a BiLSTM reads a row from end to end."""
        return self.reads_packed and not self.bilstm

    def __call__(
        self,
        input_ids,
        attention_mask,
        token_type_ids=None,
        position_ids=None,
        dropout_key=None,
        with_vectors=False,
        cls_positions=None,
    ) -> Any:
        """Arguments as in BertEncoder; float32 logits as the docstring of the model says.

        with_vectors: (logits, vectors [B, H]) where `has_vectors`, without dropout.
        cls_positions: int [B, K], where the examples of packed rows begin: what is [B, ...] by row is then
          [B, K, ...] by example.
        """
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, dropout_key)
        for number in range(self.bilstm):
            hidden = getattr(self, f"bilstm_{number}")(hidden, attention_mask)
        packed = {} if cls_positions is None else {"cls_positions": cls_positions}
        logits = self._logits(hidden, attention_mask, dropout_key, **packed)
        return (logits, self._vectors(hidden, attention_mask, **packed)) if with_vectors else logits

    def _vectors(self, hidden: jax.Array, attention_mask: jax.Array, **packed: jax.Array) -> jax.Array:
        """What a head with `has_vectors` reads: [B, H]."""
        raise NotImplementedError

    def _logits(
        self, hidden: jax.Array, attention_mask: jax.Array, dropout_key: jax.Array | None, **packed: jax.Array
    ) -> Any:
        """`packed` holds cls_positions where there are some, which only those that `packs` need take."""
        raise NotImplementedError

    def _add_token_pooler(self) -> None:
        self.pooler = Pooler(self.config, self.head_init) if STYLES[self.config.heads].normed else None

    def _tokens(self, hidden: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """What a head over tokens reads."""
        x = hidden if self.pooler is None else self.pooler.of_vectors(hidden)
        return self._drop(x, dropout_key, as_hidden=STYLES[self.config.heads].tokens_as_hidden)

    @property
    def storable(self) -> BertNetwork:
        return self.clone(bilstm=0) if self.bilstm else self


@described
class BertForSequenceClassification(TaskNetwork):
    """Classification or regression (num_labels = 1) of a sentence or a pair: [B, labels], packed [B, K, labels]."""

    num_labels: int = 2
    has_vectors: ClassVar[bool] = True
    reads_packed: ClassVar[bool] = True
    deep: ClassVar[bool] = True  # if its family has such heads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deep and STYLES[self.config.heads].deep:
            draw = DISTRIBUTIONS[self.head_init](self.config.initializer_range)
            self.classifier = DeepClassifier(self.config, self.num_labels, draw)
        else:
            self.pooler = Pooler(self.config, self.head_init)
            self.classifier = self._dense(self.num_labels, self.head_init)

    def _vectors(self, hidden, attention_mask, cls_positions=None):
        if isinstance(self.classifier, DeepClassifier):
            return cls_vectors(hidden, cls_positions)
        return self.pooler.of_rows(hidden, attention_mask, cls_positions)

    def _logits(self, hidden, attention_mask, dropout_key, cls_positions=None):
        vectors = self._vectors(hidden, attention_mask, cls_positions)
        if isinstance(self.classifier, DeepClassifier):
            return self.classifier(vectors, lambda x, number: self._drop(x, dropout_key, number))
        # Where classifiers are deep, this is multiple choice, whose rate is that of hidden states there.
        return self.classifier.float32(self._drop(vectors, dropout_key, as_hidden=STYLES[self.config.heads].deep))


@described
class BertForMultipleChoice(BertForSequenceClassification):
    """Choice among C continuations, each scored by one output on its pooled vector.

    Inputs int [B, C, T] -> [B, C]; [N, T] -> [N].
    """

    num_labels: int = 1
    has_vectors: ClassVar[bool] = False  # several vectors a row
    deep: ClassVar[bool] = False
    reads_packed: ClassVar[bool] = False

    def __call__(self, input_ids, attention_mask, token_type_ids=None, position_ids=None, dropout_key=None):
        inputs = input_ids, attention_mask, token_type_ids, position_ids
        rows = (None if x is None else x.reshape(-1, x.shape[-1]) for x in inputs)
        return super().__call__(*rows, dropout_key).reshape(input_ids.shape[:-1])


@described
class BertForTokenClassification(TaskNetwork):
    """A label for every token (named entities, parts of speech): [B, T, labels]. No pooler but ModernBERT's."""

    num_labels: int = 2
    reads_packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._add_token_pooler()
        self.classifier = self._dense(self.num_labels, self.head_init)

    def _logits(self, hidden, attention_mask, dropout_key, cls_positions=None):
        return self.classifier.float32(self._tokens(hidden, dropout_key))


@described
class BertForQuestionAnswering(TaskNetwork):
    """Start and end of an answer span; no dropout before the head in most families, and no pooler but ModernBERT's.

    (start_logits [B, T], end_logits [B, T]); padding is not excluded.
    """

    reads_packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._add_token_pooler()
        self.qa_outputs = self._dense(2, self.head_init)

    def _logits(self, hidden, attention_mask, dropout_key, cls_positions=None):
        key = dropout_key if STYLES[self.config.heads].spans_dropped else None
        logits = self.qa_outputs.float32(self._tokens(hidden, key))
        return logits[..., 0], logits[..., 1]


def pretraining_network(config: BertConfig, nsp: bool) -> type[BertNetwork]:
    """The network that is pre-trained: BERT always has pooler and NSP head, other families only with NSP."""
    return BertForPreTraining if nsp or config.heads == "bert" else BertForMaskedLM


def untrained_heads(config: BertConfig, nsp: bool) -> tuple[str, ...]:
    """Heads of the network above that are not trained; `config.json` says so under this name."""
    return () if nsp or pretraining_network(config, nsp) is BertForMaskedLM else ("pooler", "nsp")


def init_params(model: Network, key: jax.Array, paths: Collection[str] | None = None) -> dict[str, Any]:
    """Fresh parameters as a plain nested dict of float32 arrays: all, or those of `paths`.

    Initialisation as the original: kernels and tables truncated normal (0.02), biases 0, LayerNorm
    1 and 0. Pure and jit-able; the values depend on the key and the parameter's path only, not on
    sharding or on the other parameters.
    """
    leaves = {"/".join(path): (path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    alike: dict[tuple[Draw, tuple[int, ...]], list[str]] = {}
    for name in leaves if paths is None else paths:
        leaf = leaves[name][1]
        alike.setdefault((leaf.draw, leaf.get_value().shape), []).append(name)
    found = {}
    for (draw, shape), names in alike.items():
        if draw in (zeros, ones):
            found |= {name: draw(key, shape, jnp.float32) for name in names}
            continue
        # Drawn together: XLA compiles one draw for each kind of parameter, not one for each of them.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.array([_number(*leaves[name]) for name in names]))
        found |= zip(names, jax.lax.map(functools.partial(draw, shape=shape), keys), strict=True)
    return unflatten({name: found[name] for name in leaves if name in found})


def _number(path: tuple[str, ...], leaf: nnx.Param) -> np.uint32:
    """What is folded into the key of a parameter: as flax.linen does, with which models were first drawn."""
    digest = hashlib.sha1("".join(path[:-1]).encode() + bytes([leaf.number + 1])).digest()
    return np.uint32(int.from_bytes(digest[:4], "big"))


# `init_params` as a function that is traced once a model, by whatever program asks first.
shared_init = jax.jit(init_params, static_argnums=0)


def parameter_shapes(model: Network) -> dict[str, Any]:
    """The tree of `init_params` with a ShapeDtypeStruct for each array."""
    return nnx.to_pure_dict(nnx.state(model))


def with_rows(flat: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """{path: parameter} with `rows` rows of the vocabulary: cut, or padded with zeros."""
    changed = {}
    for path in OF_WORDS:
        if path in flat and len(table := flat[path]) != rows:
            table = np.asarray(table)[:rows]
            changed[path] = np.pad(table, [(0, rows - len(table))] + [(0, 0)] * (table.ndim - 1))
    return {**flat, **changed}
