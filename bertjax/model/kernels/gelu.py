"""GELU that keeps only its argument for the backward pass.

Differentiated as it stands, GELU makes XLA write an intermediate of the argument's size in forward
and read it in backward. Here backward computes it again from the argument. The barrier keeps XLA
from finding that both passes compute the same tanh and keeping it after all; and with a single use
the tanh form is what XLA's matcher hands to cuBLASLt as the epilogue of the product before it
(BIAS_GELU_AUX), so that forward costs no pass over memory at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def tanh_form(u: jax.Array) -> jax.Array:
    """GELU by tanh, word for word the expression that XLA's product rewriter looks for."""
    cubic = u + 0.044715 * (u * (u * u))
    return u * (0.5 * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * cubic)))


def _erf_form(u: jax.Array) -> jax.Array:
    return jax.nn.gelu(u, approximate=False)


def _recomputing(function: Activation, name: str, doc: str) -> Activation:
    @jax.custom_vjp
    def gelu(u: jax.Array) -> jax.Array:
        return function(u)

    def forward(u: jax.Array):
        return function(u), u

    def backward(u: jax.Array, g: jax.Array):
        return jax.vjp(function, jax.lax.optimization_barrier(u))[1](g)

    gelu.defvjp(forward, backward)
    gelu.__name__, gelu.__doc__ = name, doc
    return gelu


gelu_tanh = _recomputing(tanh_form, "gelu_tanh", "GELU by tanh (google-research/bert, modeling.py, gelu).")
gelu_erf = _recomputing(_erf_form, "gelu_erf", "GELU by erf (Hendrycks and Gimpel 2016).")


@functools.cache
def gated(function: Activation) -> Activation:
    """u [..., 2F] -> function(first half) * second half [..., F] (Shazeer 2020, arXiv:2002.05202).

    Keeps only u, as GELU does; its gradient comes out as one array, for the one product before it.
    """

    @jax.custom_vjp
    def gate(u: jax.Array) -> jax.Array:
        a, b = jnp.split(u, 2, axis=-1)
        return function(a) * b

    def forward(u: jax.Array):
        return gate(u), u

    def backward(u: jax.Array, g: jax.Array):
        a, b = jnp.split(jax.lax.optimization_barrier(u), 2, axis=-1)
        y, pull = jax.vjp(function, a)
        return (jnp.concatenate([*pull(g * b), g * y], axis=-1),)

    gate.defvjp(forward, backward)
    return gate
