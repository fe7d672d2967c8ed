"""The BERT encoder: ids [B, T] in, hidden states [B, T, H] out.

flax.linen modules declare the parameters and pure functions of (parameters, inputs) compute. The
split buys one parameter layout for every way of running: each layer owns its leaves
(`encoder/layer_3/attention/query/kernel`), and `layers='scan'` stacks them inside the step.

Parameter tree of the encoder (all float32; kernels are [in, out]):

    embeddings/word_embeddings        [V, H]
    embeddings/position_embeddings    [N, H]
    embeddings/token_type_embeddings  [S, H]
    embeddings/LayerNorm/{scale,bias} [H]
    layer_i/attention/{query,key,value,output}/{kernel [H, H], bias [H]}
    layer_i/attention/LayerNorm/{scale,bias}
    layer_i/intermediate/{kernel [H, F], bias [F]}
    layer_i/output/{kernel [F, H], bias [H]}
    layer_i/LayerNorm/{scale,bias}

Dropout takes an explicit key; no key means deterministic. Site s of the network draws with
fold_in(key, s): 0 is the embeddings, 1 + 3i .. 3 + 3i are layer i's attention probabilities,
attention output and layer output, 1 + 3L is the task head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.attention import attention, joined_attention, reference_attention
from bertjax.model.bias import add_bias
from bertjax.model.dropout import dropout, site_keys
from bertjax.model.kernels.bias_gelu import bias_gelu
from bertjax.model.kernels.dropout_bits import key_words
from bertjax.model.kernels.gelu import gelu_erf, gelu_tanh
from bertjax.model.kernels.residual_norm import residual_layer_norm
from bertjax.model.lookup import check_ids, small_table_lookup, table_lookup
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.rows import by_columns, gathered, keep_rows

Params = dict[str, Any]
# One array twice: for the residual branch and for the next product. Two variables have two
# cotangents, which the fused LayerNorm adds up in its backward pass instead of XLA before it.
Pair = tuple[jax.Array, jax.Array]
SITES_PER_LAYER = 3


def head_site(config: BertConfig) -> int:
    """The dropout site of a task head, the first one after the encoder's."""
    return 1 + SITES_PER_LAYER * config.num_hidden_layers


# ------------------------------------------------------------------------------------ parameters


def truncated_normal(stddev: float) -> Callable[..., jax.Array]:
    """Initialiser of the original (tf.truncated_normal_initializer): a normal of `stddev` cut at
    two standard deviations and not rescaled, so the result's own deviation is 0.880 * stddev."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


# How weights may be drawn: as the original draws all, and as transformers does.
DISTRIBUTIONS = {"truncated_normal": truncated_normal, "normal": nn.initializers.normal}


def _zero_above(rows: int | None, init: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`init` with zeros in the rows that pad a table, so that no norm counts them."""
    if rows is None:
        return init
    return lambda *args: init(*args).at[rows:].set(0.0)


class DenseParams(nn.Module):
    """Declares {'kernel': [in, out], 'bias': [out]}."""

    features_in: int
    features_out: int
    stddev: float
    distribution: str = "truncated_normal"

    @nn.compact
    def __call__(self) -> Params:
        init = DISTRIBUTIONS[self.distribution](self.stddev)
        return {
            "kernel": self.param("kernel", init, (self.features_in, self.features_out)),
            "bias": self.param("bias", nn.initializers.zeros, (self.features_out,)),
        }


class LayerNormParams(nn.Module):
    """Declares {'scale': ones [H], 'bias': zeros [H]}."""

    features: int

    @nn.compact
    def __call__(self) -> Params:
        return {
            "scale": self.param("scale", nn.initializers.ones, (self.features,)),
            "bias": self.param("bias", nn.initializers.zeros, (self.features,)),
        }


class EmbeddingParams(nn.Module):
    """Declares the three tables and their LayerNorm."""

    config: BertConfig

    @nn.compact
    def __call__(self) -> Params:
        c = self.config
        init = truncated_normal(c.initializer_range)
        h = c.hidden_size
        return {
            "word_embeddings": self.param("word_embeddings", _zero_above(c.words, init), (c.vocab_size, h)),
            "position_embeddings": self.param("position_embeddings", init, (c.max_position_embeddings, h)),
            "token_type_embeddings": self.param("token_type_embeddings", init, (c.type_vocab_size, h)),
            "LayerNorm": LayerNormParams(h, name="LayerNorm")(),
        }


class AttentionParams(nn.Module):
    """Declares the four projections and the LayerNorm of one layer's attention."""

    config: BertConfig

    @nn.compact
    def __call__(self) -> Params:
        h, std = self.config.hidden_size, self.config.initializer_range
        projections = ("query", "key", "value", "output")
        params = {name: DenseParams(h, h, std, name=name)() for name in projections}
        return {**params, "LayerNorm": LayerNormParams(h, name="LayerNorm")()}


class LayerParams(nn.Module):
    """Declares the parameters of one Transformer layer."""

    config: BertConfig

    @nn.compact
    def __call__(self) -> Params:
        c = self.config
        h, f, std = c.hidden_size, c.intermediate_size, c.initializer_range
        return {
            "attention": AttentionParams(c, name="attention")(),
            "intermediate": DenseParams(h, f, std, name="intermediate")(),
            "output": DenseParams(f, h, std, name="output")(),
            "LayerNorm": LayerNormParams(h, name="LayerNorm")(),
        }


# ------------------------------------------------------------------------------------- functions


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation that `hidden_act` names: 'gelu' is exact (erf), 'gelu_new' is by tanh."""
    return {
        "gelu": gelu_erf,
        "gelu_new": gelu_tanh,
        "gelu_pytorch_tanh": gelu_tanh,
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
    }[name]


def product(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """x [..., in] -> [..., out] in x's type, accumulated in float32 on accelerators."""
    # A plain matrix product: with [B, T, in], the weights' gradient would contract two axes, which
    # XLA's CPU backend does at half the speed.
    rows = x.reshape(-1, x.shape[-1]) @ gathered(kernel.astype(x.dtype))
    return rows.reshape(*x.shape[:-1], -1)


def dense(params: Params, x: jax.Array) -> jax.Array:
    """`product` plus the bias."""
    return add_bias(product(params["kernel"], x), params["bias"])


def layer_norm(params: Params, x: jax.Array, epsilon: float) -> jax.Array:
    """LayerNorm over the last axis (Ba et al. 2016), statistics in float32, x's type out.

    The variance is that of the centred values: the mean of squares minus the squared mean would
    lose an epsilon as small as 1e-12 to cancellation.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(variance + epsilon)
    return (normalised * params["scale"] + params["bias"]).astype(x.dtype)


def table_sizes(config: BertConfig) -> dict[str, int]:
    """The rows of the three tables, by the name of their ids."""
    return {
        "input_ids": config.vocab_size,
        "token_type_ids": config.type_vocab_size,
        "position_ids": config.max_position_embeddings,
    }


def embed(
    params: Params,
    config: BertConfig,
    execution: Execution,
    input_ids: jax.Array,
    token_type_ids: jax.Array | None,
    position_ids: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    """Sum of word, position and segment embeddings, LayerNorm, dropout -> [B, T, H].

    Only the word table is looked up by gather. Positions without explicit ids are a slice, whose
    gradient is a sum over the batch; two segments are a select, whose gradient is two masked sums.
    A gather there would scatter every token of the batch into a handful of rows.
    """
    length = input_ids.shape[1]
    x = by_columns(table_lookup, params["word_embeddings"], input_ids)
    if position_ids is None:
        x += params["position_embeddings"][:length]
    else:
        x += small_table_lookup(params["position_embeddings"], position_ids)
    types = params["token_type_embeddings"]
    if token_type_ids is None:
        x += types[0]
    elif config.type_vocab_size == 1:
        x += types[0]
    elif config.type_vocab_size == 2:
        x += jnp.where(token_type_ids[..., None] == 0, types[0], types[1])
    else:
        x += small_table_lookup(types, token_type_ids)
    x = layer_norm(params["LayerNorm"], x, config.layer_norm_eps).astype(execution.dtype)
    return dropout(x, config.hidden_dropout_prob, key, execution.dropout_words)


def self_attention(
    params: Params,
    config: BertConfig,
    execution: Execution,
    x: jax.Array,
    attention_mask: jax.Array,
    key: jax.Array | None,
    several_pairs: bool,
) -> jax.Array:
    """x [B, T, H] -> attention context [B, T, H], before the output projection."""
    batch, length, hidden = x.shape
    heads = (config.num_attention_heads, config.head_size)
    how = (
        attention_mask,
        config.attention_probs_dropout_prob,
        key,
        execution.attention,
        several_pairs,
        execution.platform,
    )
    projections = [params[name] for name in ("query", "key", "value")]
    if execution.qkv == "fused" and not config.is_decoder:
        kernel = jnp.concatenate([p["kernel"] for p in projections], axis=1)
        bias = jnp.stack([p["bias"] for p in projections]).reshape(3, *heads)
        context = joined_attention(product(kernel, x), bias, *how)
    else:
        q, k, v = (dense(p, x).reshape(batch, length, *heads) for p in projections)
        if config.is_decoder:
            context = reference_attention(q, k, v, *how[:3], causal=True)
        else:
            context = attention(q, k, v, *how)
    return checkpoint_name(context.reshape(batch, length, hidden), "attention_context")


def dense_activation(params: Params, config: BertConfig, execution: Execution, x: jax.Array) -> jax.Array:
    """The activation of `dense`, [B, T, H] -> [B, T, F]."""
    act = activation(config.hidden_act)
    if execution.pointwise == "fused" and act is gelu_tanh and config.intermediate_size % 128 == 0:
        interpret = jax.default_backend() != "gpu"
        return bias_gelu(product(params["kernel"], x), params["bias"], interpret)
    return act(dense(params, x))


def dense_add_norm(
    params: Params,
    norm: Params,
    config: BertConfig,
    execution: Execution,
    x: jax.Array,
    residual: jax.Array,
    key: jax.Array | None,
) -> Pair:
    """LayerNorm(residual + dropout(dense(x))), once for each of its two uses (see Pair)."""
    if execution.pointwise == "fused":
        return residual_layer_norm(
            product(params["kernel"], x),
            params["bias"],
            residual,
            norm["scale"],
            norm["bias"],
            None if key is None else key_words(key),
            0.0 if key is None else config.hidden_dropout_prob,
            config.layer_norm_eps,
            interpret=jax.default_backend() != "gpu",
        )
    h = dropout(dense(params, x), config.hidden_dropout_prob, key, execution.dropout_words)
    y = layer_norm(norm, residual + h, config.layer_norm_eps)
    return y, y


def layer(
    params: Params,
    pair: Pair,
    attention_mask: jax.Array,
    keys: jax.Array | None,
    *,
    config: BertConfig,
    execution: Execution,
    several_pairs: bool,
) -> Pair:
    """One post-LN Transformer layer, x [B, T, H] -> [B, T, H] (original: transformer_model).

    Args:
      keys: [3] dropout keys of this layer's sites, or None.
    """
    attention_key, output_key, ffn_key = (None,) * 3 if keys is None else keys
    attend = params["attention"]
    add_norm = functools.partial(dense_add_norm, config=config, execution=execution)

    residual, x = jax.tree.map(keep_rows, pair)
    context = self_attention(attend, config, execution, x, attention_mask, attention_key, several_pairs)
    pair = add_norm(attend["output"], attend["LayerNorm"], x=context, residual=residual, key=output_key)
    residual, x = (checkpoint_name(y, "attention_normalised") for y in pair)
    inner = dense_activation(params["intermediate"], config, execution, x)
    return add_norm(params["output"], params["LayerNorm"], x=inner, residual=residual, key=ffn_key)


def rematerialised(function: Callable, remat: str) -> Callable:
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


# ---------------------------------------------------------------------------------------- module


class BertEncoder(nn.Module):
    """Embeddings and L Transformer layers (Devlin et al. 2019; original: BertModel)."""

    config: BertConfig
    execution: Execution = Execution()

    def _parameters(self) -> list[Params]:
        """Those of the embeddings and of each layer, declared or as they were given."""
        modules = {
            "embeddings": EmbeddingParams,
            **{f"layer_{i}": LayerParams for i in range(self.config.num_hidden_layers)},
        }
        if self.is_initializing():
            return [module(self.config, name=name)() for name, module in modules.items()]
        # A module would evaluate all initialisers again, for the shapes: a quarter of a second.
        return [self.get_variable("params", name) for name in modules]

    @nn.compact
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
          [B, T, H] in `execution.dtype`, or a tuple of L+1 of them, the embeddings' first.

        Raises:
          ValueError: T exceeds the position table; ids exceed theirs (not while tracing).
        """
        config = self.config
        if input_ids.shape[1] > config.max_position_embeddings:
            raise ValueError(
                f"rows of {input_ids.shape[1]} tokens exceed max_position_embeddings={config.max_position_embeddings}"
            )
        check_ids(
            table_sizes(config),
            {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids},
        )
        count = config.num_hidden_layers
        embeddings, *layers = self._parameters()
        # Initialisation needs the shapes only, and kernels may refuse its toy inputs.
        execution = Execution() if self.is_initializing() else self.execution

        keys = None if dropout_key is None else site_keys(dropout_key, head_site(config))
        x = embed(
            embeddings, config, execution, input_ids, token_type_ids, position_ids, None if keys is None else keys[0]
        )
        layer_keys = None if keys is None else keys[1:].reshape(count, SITES_PER_LAYER, *keys.shape[1:])
        run = rematerialised(
            functools.partial(layer, config=config, execution=execution, several_pairs=position_ids is not None),
            execution.remat,
        )
        if isinstance(x, jax.core.Tracer):
            # As a function of its own a layer is traced and lowered once, not L times; XLA puts
            # the copies in place before it looks at them.
            run = jax.jit(run)

        if execution.layers == "scan":

            def body(carry: Pair, xs: tuple[Params, jax.Array | None]) -> tuple:
                out = run(xs[0], carry, attention_mask, xs[1])
                return out, out[1] if all_hidden else None

            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            (_, last), every = jax.lax.scan(body, (x, x), (stacked, layer_keys))
            return (x, *every) if all_hidden else last

        hidden, pair = [x], (x, x)
        for i, params in enumerate(layers):
            pair = run(params, pair, attention_mask, None if layer_keys is None else layer_keys[i])
            hidden.append(pair[1])
        return tuple(hidden) if all_hidden else pair[1]
