"""Rotary positions by the kernel that writes in place, against the plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model.kernels.rotary import turned, turned_in_place
from bertjax.model.positions import _turn


@pytest.mark.parametrize("packed", [False, True])
def test_queries_and_keys_are_turned_and_values_stay(packed):
    random = np.random.default_rng(0)
    product = jnp.asarray(random.normal(size=(2, 8, 3, 2, 16)), jnp.float32)
    ids = random.integers(0, 50, (2, 8)) if packed else np.arange(8)[None]
    turn = _turn(jnp.asarray(ids), 1e4, 16)
    got = turned_in_place(product, *turn)
    np.testing.assert_allclose(got, turned(product, turn), atol=1e-6)
    np.testing.assert_array_equal(got[:, :, 2], product[:, :, 2])
