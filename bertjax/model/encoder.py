"""The encoder: ids [B, T] in, hidden states [B, T, H] out. Its description is a BertConfig.

Its parameters (all float32; kernels are [in, out]; those in brackets are there if the description has them):

    embeddings/word_embeddings          [V, E]    E = H but for ELECTRA
    [embeddings/position_embeddings]    [N, E]    not with rotary positions
    [embeddings/token_type_embeddings]  [S, E]
    [embeddings/LayerNorm/{scale,bias}] [E]
    [embeddings/projection/{kernel [E, H], bias [H]}]
    layer_i/attention/{query,key,value,output}/{kernel [H, H], bias [H]}
    layer_i/attention/LayerNorm/{scale,bias}
    layer_i/intermediate/{kernel [H, F], bias [F]}
    [layer_i/gate/{kernel [H, F], bias [F]}]
    layer_i/output/{kernel [F, H], bias [H]}
    layer_i/LayerNorm/{scale,bias}
    [final_norm/{scale,bias}]

Dropout takes an explicit key; no key means deterministic. Site s of the network draws with
fold_in(key, s): 0 is the embeddings, 1 + 3i .. 3 + 3i are layer i's attention probabilities,
attention output and layer output, 1 + 3L is the task head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bertjax.model import positions
from bertjax.model.dropout import dropout, site_keys
from bertjax.model.kernels.choice import Kernels, Pair, choose, multiply
from bertjax.model.kernels.rotary import Turn, turned
from bertjax.model.layers import Dense, Draw, LayerNorm, Multiply, Network, described, parameter, truncated_normal
from bertjax.model.lookup import check_ids, small_table_lookup, table_lookup
from bertjax.model.mesh import by_columns, keep_rows
from bertjax.model.presets import BertConfig, Execution

SITES_PER_LAYER = 3


class Layout(NamedTuple):
    """What the layers know about the tokens of a batch; see BertEncoder.__call__."""

    attention_mask: jax.Array
    position_ids: jax.Array | None
    turns: dict[float, Turn]  # base of rotary positions -> cosines and sines


class Embeddings(nnx.Module):
    """Sum of word, position and segment embeddings, LayerNorm, dropout: [B, T] -> [B, T, H].

    Only the word table is looked up by gather. Positions without explicit ids are a slice, whose
    gradient is a sum over the batch; two segments are a select, whose gradient is two masked sums.
    A gather there would scatter every token of the batch into a handful of rows.
    """

    def __init__(self, config: BertConfig) -> None:
        self.config = config
        e, draw = config.embedding_width, truncated_normal(config.initializer_range)
        self.word_embeddings = parameter(_zero_above(config.words, draw), config.vocab_size, e)
        if config.position_rows:
            self.position_embeddings = parameter(draw, config.position_rows, e, number=1)
        if config.type_vocab_size:
            self.token_type_embeddings = parameter(draw, config.type_vocab_size, e, number=2)
        self.LayerNorm = LayerNorm(e, config.layer_norm_eps, config.norm_bias) if config.embedding_norm else None
        self.projection = None if e == config.hidden_size else Dense(e, config.hidden_size, draw)

    def __call__(self, input_ids, token_type_ids, position_ids, execution: Execution, key: jax.Array | None):
        x = by_columns(table_lookup, self.word_embeddings[...], input_ids)
        if self.config.position_rows:
            x += positions.learned(self.config, self.position_embeddings[...], input_ids, position_ids)
        if self.config.type_vocab_size:
            x += _segments(self.token_type_embeddings[...], token_type_ids)
        x = (x if self.LayerNorm is None else self.LayerNorm(x)).astype(execution.array_dtype)
        x = dropout(x, self.config.hidden_dropout_prob, key, execution.dropout_words)
        return x if self.projection is None else self.projection(x)


def _segments(types: jax.Array, token_type_ids: jax.Array | None) -> jax.Array:
    """Rows of the table of segments, [B, T, E], or [E] for all."""
    if token_type_ids is None or len(types) == 1:
        return types[0]
    if len(types) == 2:
        return jnp.where(token_type_ids[..., None] == 0, types[0], types[1])
    return small_table_lookup(types, token_type_ids)


class Attention(nnx.Module):
    """Multi-head self-attention: [B, T, H] -> [B, T, H].

    `output` comes after it, and `LayerNorm` before or after; Layer calls them, since kernels add the residual too.
    """

    def __init__(self, config: BertConfig, number: int, multiply: Multiply) -> None:
        self.config, self.window = config, config.window(number)
        self.base = positions.base(config, self.window)
        h, draw = config.hidden_size, truncated_normal(config.initializer_range)
        self.query, self.key, self.value = (Dense(h, h, draw, config.attention_bias, multiply) for _ in range(3))
        self.output = Dense(h, h, draw, config.attention_bias)
        has_norm = number > 0 or config.first_norm or config.norm == "after"
        self.LayerNorm = LayerNorm(h, config.layer_norm_eps, config.norm_bias) if has_norm else None

    def __call__(self, x: jax.Array, layout: Layout, key: jax.Array | None, kernels: Kernels) -> jax.Array:
        heads = (self.config.num_attention_heads, self.config.head_size)
        rate, packed = self.config.attention_probs_dropout_prob, layout.position_ids is not None
        how = (layout.attention_mask, rate, key, packed)
        window = {} if self.window is None else {"window": self.window}
        turn = None if self.base is None else layout.turns[self.base]
        projections = self.query, self.key, self.value
        if kernels.joined_attention:
            joined = self.query.multiply(jnp.concatenate([dense.kernel[...] for dense in projections], axis=1), x)
            bias = None
            if self.config.attention_bias:
                bias = jnp.stack([dense.bias[...] for dense in projections]).reshape(3, *heads)
            else:
                joined = joined.reshape(*x.shape[:2], 3, *heads)
            options = window if turn is None else {**window, "turn": turn}
            context = kernels.joined_attention(joined, bias, *how, **options)
        else:
            q, k, v = (dense(x).reshape(*x.shape[:2], *heads) for dense in projections)
            if turn is not None:
                q, k = turned(q, turn), turned(k, turn)
            context = kernels.attention(q, k, v, *how, **window)
        return checkpoint_name(context.reshape(x.shape), "attention_context")


class Layer(nnx.Module):
    """One Transformer layer, with LayerNorm after its sub-layers (original: transformer_model) or before them.

    A hidden state is passed on as a Pair, for its two uses (kernels/choice.py). With LayerNorm before the sub-layers,
    the incoming one is normalised by this layer's first norm already; the outgoing one is normalised by `following`,
    the first norm of the next layer.
    """

    def __init__(self, config: BertConfig, number: int, multiply: Multiply) -> None:
        self.before, self.dropout_rate = config.norm == "before", config.hidden_dropout_prob
        h, f, draw = config.hidden_size, config.intermediate_size, truncated_normal(config.initializer_range)
        self.attention = Attention(config, number, multiply)
        self.intermediate = Dense(h, f, draw, config.mlp_bias, multiply)
        self.gate = Dense(h, f, draw, config.mlp_bias, multiply) if config.feed_forward == "gated" else None
        self.output = Dense(f, h, draw, config.mlp_bias, multiply)
        self.LayerNorm = LayerNorm(h, config.layer_norm_eps, config.norm_bias)

    def __call__(
        self, pair: Pair, layout: Layout, keys: jax.Array | None, kernels: Kernels, following: LayerNorm | None
    ) -> Pair:
        """keys: [3], of the layer's dropout sites."""
        attention_key, output_key, ffn_key = (None,) * SITES_PER_LAYER if keys is None else keys
        attention, rate = self.attention, self.dropout_rate
        middle, end = (self.LayerNorm, following) if self.before else (attention.LayerNorm, self.LayerNorm)

        residual, x = map(keep_rows, pair)
        x = attention(x, layout, attention_key, kernels)
        x = attention.output.product(x)
        pair = kernels.add_norm(attention.output.bias, middle, x, residual, rate, output_key)
        residual, x = (checkpoint_name(y, "attention_normalised") for y in pair)
        x = kernels.feed_forward(self.intermediate, self.gate, self.output, x)
        return kernels.add_norm(self.output.bias, end, x, residual, rate, ffn_key)


@described
class BertEncoder(Network):
    """Embeddings and L Transformer layers (Devlin et al. 2019; original: BertModel), with switches of later models."""

    config: BertConfig
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        self.embeddings = Embeddings(self.config)
        product = multiply(self.execution)  # one object: layers that differ in it are neither shared nor scanned
        for i in range(self.config.num_hidden_layers):
            setattr(self, f"layer_{i}", Layer(self.config, i, product))
        c = self.config
        self.final_norm = LayerNorm(c.hidden_size, c.layer_norm_eps, c.norm_bias) if c.final_norm else None

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        all_hidden: bool = False,
    ) -> jax.Array | tuple[jax.Array, ...]:
        """Hidden states of the last layer, or of all.

        Args:
          input_ids: int [B, T].
          attention_mask: int [B, T]; 0 is padding, equal numbers see each other.
          token_type_ids: int [B, T]; None means all 0.
          position_ids: int [B, T], given when rows hold several pairs; None means 0..T-1.
          dropout_key: None means deterministic.

        Returns:
          [B, T, H] in `execution.array_dtype`, or a tuple of L+1 of them, the embeddings' first.

        Raises:
          ValueError: T exceeds the position table; ids exceed theirs (not while tracing).
        """
        config, execution = self.config, self.execution
        (batch, length), longest = input_ids.shape, config.max_position_embeddings
        if length > longest:
            raise ValueError(f"rows of {length} tokens exceed max_position_embeddings={longest}")
        ids = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids}
        check_ids(table_sizes(config), ids)
        key, layer_keys = _dropout_keys(config, dropout_key)
        kernels = choose(config, execution, batch, length)

        def run(layer: Layer, pair: Pair, layout: Layout, keys: jax.Array | None, following: LayerNorm | None) -> Pair:
            return layer(pair, layout, keys, kernels, following)

        x = self.embeddings(input_ids, token_type_ids, position_ids, execution, key)
        run = _rematerialised(run, execution.remat)
        if isinstance(x, jax.core.Tracer):
            # As a function of its own a layer is traced and lowered once, not L times; XLA puts
            # the copies in place before it looks at them.
            run = jax.jit(run)
        layers = [getattr(self, f"layer_{i}") for i in range(config.num_hidden_layers)]
        layout = Layout(attention_mask, position_ids, positions.turns(config, length, position_ids))
        pairs = self._through(layers, x, layout, layer_keys, run)
        # Of the first of a pair no norm was taken that belongs to the next layer, or to the end.
        last = pairs[-1][config.norm == "after" or self.final_norm is not None]
        return (*(pair[0] for pair in pairs[:-1]), last) if all_hidden else last

    def _through(
        self, layers: list[Layer], x: jax.Array, layout: Layout, keys: jax.Array | None, run: Callable
    ) -> list[Pair]:
        """The hidden state of the embeddings, and of every layer."""
        following: list[LayerNorm | None] = [None] * len(layers)
        pair = x, x
        if self.config.norm == "before":
            norms = [layer.attention.LayerNorm for layer in layers]
            following = [*norms[1:], self.final_norm or layers[-1].LayerNorm]
            pair = x, x if norms[0] is None else norms[0](x)
        pairs = [pair]
        first, size = _scanned(self.config) if self.execution.layers == "scan" else (len(layers), 1)
        for i, layer in enumerate(layers[:first]):
            pairs.append(run(layer, pairs[-1], layout, None if keys is None else keys[i], following[i]))
        if first == len(layers):
            return pairs

        def body(pair: Pair, xs: tuple[list[Layer], list[LayerNorm | None], jax.Array | None]) -> tuple[Pair, Any]:
            made = []
            for i, (layer, norm) in enumerate(zip(*xs[:2], strict=True)):
                pair = run(layer, pair, layout, None if xs[2] is None else xs[2][i], norm)
                made.append(pair)
            return pair, made

        groups = [(layers[i : i + size], following[i : i + size]) for i in range(first, len(layers), size)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)
        keys = None if keys is None else keys[first:].reshape(len(groups), size, *keys.shape[1:])
        _, made = jax.lax.scan(body, pairs[-1], (*stacked, keys))
        return pairs + [(one[i], two[i]) for i in range(len(groups)) for one, two in made]


def _scanned(config: BertConfig) -> tuple[int, int]:
    """(the first layer of a scan over equal groups of layers, layers in a group). The layers before it run by
    themselves: what is left when the groups are cut from the end, and a first layer that is unlike the others."""
    size = config.global_attn_every_n_layers if config.local_attention else 1
    first = config.num_hidden_layers % size
    unlike = config.norm == "before" and not config.first_norm
    return min(first or size * unlike, config.num_hidden_layers), size


def head_site(config: BertConfig) -> int:
    """The dropout site of a task head, the first one after the encoder's."""
    return 1 + SITES_PER_LAYER * config.num_hidden_layers


def table_sizes(config: BertConfig) -> dict[str, int]:
    """The rows of the tables, by the name of their ids. Without a table of segments their ids are not read."""
    sizes = {"input_ids": config.vocab_size, "position_ids": config.max_position_embeddings}
    return sizes | ({"token_type_ids": config.type_vocab_size} if config.type_vocab_size else {})


def _zero_above(rows: int | None, draw: Draw) -> Draw:
    """`draw` with zeros in the rows that pad a table, so that no norm counts them."""
    return draw if rows is None else lambda key, shape: draw(key, shape).at[rows:].set(0.0)


def _dropout_keys(config: BertConfig, key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """(the embeddings' key, [L, 3] keys of the layers)."""
    if key is None:
        return None, None
    keys = site_keys(key, head_site(config))
    return keys[0], keys[1:].reshape(config.num_hidden_layers, SITES_PER_LAYER, *keys.shape[1:])


def _rematerialised(function: Callable, remat: str) -> Callable:
    """`function` with the checkpoint policy that `Execution.remat` names."""
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    # Fused attention is not a matrix product to the policy; its output and residuals carry names.
    names = policies.save_only_these_names("attention_context", "attention_residuals")
    policy = {
        "full": policies.nothing_saveable,
        "dots": policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, names),
        "minimal": policies.save_only_these_names("attention_context", "attention_residuals", "attention_normalised"),
    }[remat]
    return jax.checkpoint(function, policy=policy, prevent_cse=True)
