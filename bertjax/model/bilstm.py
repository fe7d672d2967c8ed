"""A bidirectional LSTM over the tokens of each row, for heads that are drawn at random."""

import jax
import jax.numpy as jnp
from flax import nnx

from bertjax.model.layers import parameter, zeros

GATES = "ifgo"
_from_input = jax.nn.initializers.lecun_normal()
_from_state = jax.nn.initializers.orthogonal()


class Gate(nnx.Module):
    """The kernel of a gate, and its bias."""

    def __init__(self, features_in: int, features_out: int, recurrent: bool) -> None:
        self.kernel = parameter(_from_state if recurrent else _from_input, features_in, features_out)
        self.bias = parameter(zeros, features_out) if recurrent else None


class Lstm(nnx.Module):
    """Hochreiter and Schmidhuber's cell from the first token to the last: [B, T, in] -> [B, T, size]."""

    def __init__(self, features: int, size: int) -> None:
        for gate in GATES:
            setattr(self, f"i{gate}", Gate(features, size, recurrent=False))
            setattr(self, f"h{gate}", Gate(size, size, recurrent=True))

    def _joined(self, source: str) -> jax.Array:
        return jnp.concatenate([getattr(self, source + gate).kernel[...] for gate in GATES], axis=-1)

    def __call__(self, x: jax.Array) -> jax.Array:
        from_input, from_state = self._joined("i"), self._joined("h")
        bias = jnp.concatenate([getattr(self, f"h{gate}").bias[...] for gate in GATES])

        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple:
            c, h = carry
            i, f, g, o = jnp.split((h @ from_state + bias) + x @ from_input, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        start = jnp.zeros((len(x), from_state.shape[0]), x.dtype)
        _, out = jax.lax.scan(step, (start, start), x.swapaxes(0, 1))
        return out.swapaxes(0, 1)


class BiLstm(nnx.Module):
    """One layer, in float32: hidden [B, T, features], attention_mask [B, T] -> [B, T, 2 size].

    Padding, which must come last in a row, changes nothing before it.
    """

    def __init__(self, features: int, size: int) -> None:
        self.forward, self.backward = Lstm(features, size), Lstm(features, size)

    def __call__(self, hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
        x, lengths = hidden.astype(jnp.float32), jnp.sum(attention_mask > 0, -1, keepdims=True)
        # Position t of the reversed row is length - 1 - t of the row; padding stays behind it.
        turned = (lengths - 1 - jnp.arange(x.shape[1])) % x.shape[1]
        turn = lambda x: jnp.take_along_axis(x, turned[..., None], axis=1)  # noqa: E731
        return jnp.concatenate([self.forward(x), turn(self.backward(turn(x)))], axis=-1)
