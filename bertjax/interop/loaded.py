"""A model with its weights, ready to be called, and how far the outputs of two such models differ.

In: a network and its parameters, which loading.py reads. Out: what forward.py and the questions above it call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bertjax.interop.sentence_transformers import SentenceSettings
from bertjax.model import heads
from bertjax.model.encoder import table_sizes
from bertjax.model.kernels import compiler_options
from bertjax.model.lookup import check_ids
from bertjax.model.presets import BertConfig
from bertjax.model.size import parameters_text
from bertjax.tokenization import Tokenizer

# (input_ids, attention_mask, token_type_ids), int32 [B, T] each -> outputs
Outputs = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model with its weights, ready to be called.

    Attributes:
      model: the flax module (config and execution inside).
      params: nested dict of arrays.
      tokenizer: None where the directory has none.
      labels: class number -> name, for classifiers that name their classes.
      settings: the whole configuration file.
      fresh: parameters that were drawn at random on request.
      sentence: how sentence-transformers makes embeddings with it, where the directory says so.
    """

    model: heads.BertNetwork
    params: dict[str, Any]
    tokenizer: Tokenizer | None = None
    labels: dict[int, str] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    sentence: SentenceSettings | None = None

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        return jax.jit(
            lambda params, *args, **kwargs: self.model.apply({"params": params}, *args, **kwargs),
            static_argnames="all_hidden",
            compiler_options=compiler_options(jax.default_backend()),
        )

    def __repr__(self) -> str:
        c, words = self.config, "no tokenizer"
        if self.tokenizer is not None:
            casing = "uncased" if self.tokenizer.do_lower_case else "cased"
            words = f"{self.tokenizer.vocab_size:,} {casing} words"
        labels = f", labels {', '.join(self.labels.values())}" if self.labels else ""
        return (
            f"<{type(self.model).__name__}: {c.num_hidden_layers} layers x {c.hidden_size}, "
            f"{self.size}, {words}{labels:.200}>"
        )

    @property
    def size(self) -> str:
        """'110.1 M parameters'."""
        return parameters_text(sum(x.size for x in jax.tree.leaves(self.params)))

    @property
    def config(self) -> BertConfig:
        """The network's configuration."""
        return self.model.config

    @functools.cached_property
    def encoder(self) -> LoadedModel:
        """The encoder and pooler alone; where the model has no pooler, one of zeros."""
        model = heads.BertModel(self.config, self.model.execution)
        shapes = {"pooler": heads.parameter_shapes(model)["pooler"]} if model.pooler is not None else {}
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        params = {"encoder": self.params["encoder"], **{head: self.params.get(head, zeros[head]) for head in shapes}}
        return dataclasses.replace(self, model=model, params=params)

    @functools.cached_property
    def next_sentence(self) -> LoadedModel:
        """The next-sentence head of a pre-training model alone, or the model as it is."""
        if not isinstance(self.model, heads.BertForPreTraining):
            return self
        model = heads.BertForNextSentencePrediction(self.config, self.model.execution)
        return dataclasses.replace(self, model=model, params={k: v for k, v in self.params.items() if k != "mlm"})

    def __call__(self, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, compiled once a shape; arguments as in heads.py.

        Raises:
          ValueError: ids that the tables do not have. (Within jax.jit they are clamped.)
        """
        names = ("token_type_ids", "position_ids")
        inputs = {"input_ids": input_ids} | dict(zip(names, args, strict=False)) | kwargs
        length = np.shape(input_ids)[-1]
        check_ids(table_sizes(self.config) | {"masked_positions": length, "cls_positions": length}, inputs)
        return self._apply(self.params, input_ids, attention_mask, *args, **kwargs)


def largest_difference(one: Outputs, other: Outputs, vocabulary: int, shape: tuple[int, int]) -> float:
    """Largest absolute difference of two models' outputs on the same random rows, of ids below `vocabulary`; over
    the classes that both have."""
    ids = np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)
    mask = np.ones(shape, np.int32)
    mask[-1, shape[1] // 2 :] = 0
    outputs = (map(np.asarray, jax.tree.leaves(model(ids, mask, np.zeros_like(ids)))) for model in (one, other))
    differences = []
    for a, b in zip(*outputs, strict=True):
        common = vocabulary if a.shape[-1] != b.shape[-1] else a.shape[-1]
        differences.append(np.abs(a[..., :common] - b[..., :common]).max())
    return float(max(differences))
