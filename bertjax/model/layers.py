"""The parts that every network is made of: modules that own their parameters and compute with them.

A module is built without values. Each of its parameters holds a shape and the function that draws it, which
`heads.init_params` calls; `Network.apply` is the module with given values, as a pure function.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from bertjax.model.kernels.gelu import gelu_erf, gelu_tanh
from bertjax.model.mesh import gathered
from bertjax.model.paths import flatten, unflatten
from bertjax.model.presets import BertConfig

Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]  # of a key and a shape
Multiply = Callable[[jax.Array, jax.Array], jax.Array]  # of a kernel [in, out] and x
zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones
normal = functools.cache(jax.nn.initializers.normal)

truncated_normal_rescaled = functools.cache(jax.nn.initializers.truncated_normal)  # to a deviation of its argument


@functools.cache
def truncated_normal(stddev: float) -> Draw:
    """The original's tf.truncated_normal_initializer: a normal of `stddev` cut at two standard
    deviations and not rescaled, so the result's own deviation is 0.880 * stddev."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)

    return draw


# How weights may be drawn: as the original draws all, and as transformers does.
DISTRIBUTIONS = {"truncated_normal": truncated_normal, "normal": normal}


def parameter(draw: Draw, *shape: int, number: int = 0) -> nnx.Param:
    """A float32 parameter, not yet drawn. `number` tells those apart that one module draws at random."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), draw=draw, number=number)


# Of every network: equal descriptions are equal networks, as the static arguments of jax.jit must be.
described = dataclasses.dataclass(unsafe_hash=True, repr=False)


class Network(nnx.Module):
    """A module that can be run with parameters from outside. Subclasses are `described`: dataclasses that build
    their parts in __post_init__."""

    config: BertConfig

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The outputs with the parameters variables['params'], a nested dict; others in it are not used."""
        graph, state = nnx.split(self)
        given = flatten(variables["params"])
        values = unflatten({path: given[path] for path in flatten(nnx.to_pure_dict(state))})
        return nnx.merge(graph, values)(*args, **kwargs)

    def clone(self, **changes: Any) -> Self:
        """The network with other fields."""
        return dataclasses.replace(self, **changes)


class Dense(nnx.Module):
    """x [..., in] -> x W + b [..., out]; bias=False: without b. `multiply` computes x W, as `product` does."""

    def __init__(
        self, features_in: int, features_out: int, draw: Draw, bias: bool = True, multiply: Multiply | None = None
    ) -> None:
        self.multiply = multiply or product
        self.kernel = parameter(draw, features_in, features_out)
        self.bias = parameter(zeros, features_out) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.product(x) if self.bias is None else add_bias(self.product(x), self.bias[...])

    def product(self, x: jax.Array) -> jax.Array:
        """Without the bias."""
        return self.multiply(self.kernel[...], x)

    def float32(self, x: jax.Array) -> jax.Array:
        """In float32, as a small output layer is: it feeds a softmax and costs nothing."""
        return self(x.astype(jnp.float32))


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis (Ba et al. 2016), statistics in float32, x's type out.

    The variance is that of the centred values: the mean of squares minus the squared mean would
    lose an epsilon as small as 1e-12 to cancellation.
    """

    def __init__(self, features: int, epsilon: float, bias: bool = True) -> None:
        self.epsilon = epsilon
        self.scale = parameter(ones, features)
        self.bias = parameter(zeros, features) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normalised = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled = normalised * self.scale[...]
        return (scaled if self.bias is None else scaled + self.bias[...]).astype(x.dtype)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation of a name: 'gelu' is exact (erf), 'gelu_new' is by tanh."""
    return {
        "tanh": jnp.tanh,
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


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [..., H] + bias [H], in x's type; the gradient of the bias is summed up in float32.

    jax's own gradient is a sum over all tokens in x's type, and so it runs on CPUs and, from Hopper
    on, on GPUs: of 2,048 bfloat16 terms it is 4 to 20 % off, in float32 0.7 %.
    """
    return x + bias.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x, bias), bias


def _add_bias_backward(bias: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = jnp.sum(cotangent.astype(jnp.float32), axis=range(cotangent.ndim - 1))
    return cotangent, total.astype(bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)
