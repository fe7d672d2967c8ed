"""The paper's feature-based tagger: a frozen encoder, a choice of its layers, a 2-layer BiLSTM.

In: the fields of a tagging batch. Out: logits [B, T, tags]. Source: BERT paper, section 5.3 and Table 7: the features
feed a randomly initialised two-layer 768-dimensional BiLSTM and a classifier. The paper does not say how its sums are
weighted; here by a softmax over learnt scalars, equal at the start.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from bertjax.model.bilstm import BiLstm
from bertjax.model.heads import BertModel, BertNetwork
from bertjax.model.layers import add_bias, described, parameter, product, truncated_normal_rescaled, zeros

# Name -> hidden states used (index 0 = embeddings, -1 = last layer), and how.
LAYER_CHOICES: dict[str, tuple[slice, str]] = {
    "embeddings": (slice(0, 1), "sum"),
    "second_to_last": (slice(-2, -1), "sum"),
    "last": (slice(-1, None), "sum"),
    "weighted_sum_last_4": (slice(-4, None), "sum"),
    "concat_last_4": (slice(-4, None), "concat"),
    "weighted_sum_all": (slice(1, None), "sum"),
}


@described
class BertFeatureTagger(BertNetwork):
    """Tags from frozen features. Train it with the rule ('^encoder/', 0.0)."""

    num_labels: int = 2
    layers: str = "concat_last_4"
    lstm_size: int = 768
    lstm_layers: int = 2
    packs: ClassVar[bool] = False  # the BiLSTM reads a row from end to end

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.config
        states = range(c.num_hidden_layers + 1)[LAYER_CHOICES[self.layers][0]]
        if self.layers.startswith("weighted_sum"):
            self.mix = parameter(zeros, len(states))
        features = c.hidden_size * (len(states) if LAYER_CHOICES[self.layers][1] == "concat" else 1)
        for number in range(self.lstm_layers):
            setattr(self, f"bilstm_{number}", BiLstm(features, self.lstm_size))
            features = 2 * self.lstm_size
        draw = truncated_normal_rescaled(c.initializer_range)
        first = int(hasattr(self, "mix"))  # the number that decides how it is drawn
        self.classifier_kernel = parameter(draw, features, self.num_labels, number=first)
        self.classifier_bias = parameter(zeros, self.num_labels)

    def __call__(self, input_ids, attention_mask, token_type_ids=None, position_ids=None, dropout_key=None):
        """Float32 logits [B, T, labels]. The encoder never drops and gets no gradient."""
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, position_ids, None, True)
        mix = self.mix[...] if self.layers.startswith("weighted_sum") else None
        x = combine([jax.lax.stop_gradient(state) for state in hidden], self.layers, mix)
        for number in range(self.lstm_layers):
            x = self._drop(x, self._key(dropout_key, number))
            x = getattr(self, f"bilstm_{number}")(x, attention_mask)
        x = self._drop(x, self._key(dropout_key, self.lstm_layers))
        return add_bias(product(self.classifier_kernel[...], x.astype(jnp.float32)), self.classifier_bias[...])

    @property
    def storable(self) -> BertNetwork:
        return BertModel(self.config)

    def _key(self, dropout_key: jax.Array | None, number: int) -> jax.Array | None:
        return None if dropout_key is None else jax.random.fold_in(dropout_key, number)


def combine(hidden: Sequence[jax.Array], layers: str, mix: jax.Array | None = None) -> jax.Array:
    """The L+1 hidden states [B, T, H] as features, by a name of LAYER_CHOICES, in float32.

    mix: logits of the weights of a sum, one a layer; None = equal weights.
    """
    if layers not in LAYER_CHOICES:
        raise ValueError(f"layers={layers!r} is unknown; one of {', '.join(LAYER_CHOICES)}")
    chosen, how = LAYER_CHOICES[layers]
    states = [state.astype(jnp.float32) for state in hidden[chosen]]
    if how == "concat":
        return jnp.concatenate(states, -1)
    weights = jax.nn.softmax(jnp.zeros(len(states)) if mix is None else mix)
    return sum(weight * state for weight, state in zip(weights, states, strict=True))
