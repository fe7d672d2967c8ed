"""The word table's gradient: sums by id that equal float64's, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model import lookup
from bertjax.model.mesh import by_columns, rows_on
from bertjax.training.sharding import make_mesh

KINDS = ("uniform", "zipf", "one")


def ids_of(kind, size, count, rng):
    return {
        "uniform": lambda: rng.integers(0, size, count),
        "zipf": lambda: np.minimum(rng.zipf(1.2, count) - 1, size - 1),
        "one": lambda: np.full(count, size // 2),
    }[kind]().astype(np.int32)


def exact(ids, x, size):
    """(float64 sums by id, float64 sums of magnitudes)."""
    sums, magnitudes = np.zeros((2, size + 1, x.shape[1]))
    np.add.at(sums, ids, x.astype(np.float64))
    np.add.at(magnitudes, ids, np.abs(x).astype(np.float64))
    return sums[:size], magnitudes[:size]


@pytest.mark.parametrize("size", [1, 7, 1_000, 30_522, 250_000])
def test_sums_by_id_equal_those_of_float64(size):
    rng = np.random.default_rng(size)
    sums = jax.jit(functools.partial(lookup.sums_by_id, size=size))
    for kind in KINDS:
        ids, x = ids_of(kind, size, 4097, rng), rng.standard_normal((4097, 4), np.float32)
        expected, magnitudes = exact(ids, x, size)
        assert (np.abs(sums(ids, x) - expected) <= 1e-6 * magnitudes).all()


def test_rows_beyond_the_table_are_left_out():
    rng = np.random.default_rng(0)
    ids, x = rng.integers(0, 12, 100).astype(np.int32), rng.standard_normal((100, 3), np.float32)
    expected, _ = exact(np.minimum(ids, 9), x, 9)
    found = jax.jit(lookup.sums_by_id, static_argnums=2)(jnp.minimum(ids, 9), x, 9)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_single_row_and_a_single_block_are_sums_too():
    for count in (1, lookup.BLOCK, lookup.BLOCK + 1):
        x = np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)
        found = jax.jit(lookup.sums_by_id, static_argnums=2)(jnp.zeros(count, jnp.int32), x, 3)
        np.testing.assert_array_equal(found[0], x.sum(0))
        assert not found[1:].any()


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (4, 1, 2)])
def test_on_a_mesh_the_gradient_is_that_of_one_device(sizes, monkeypatch):
    monkeypatch.setattr(
        lookup, "_sums_by_id", lambda ids, x, size: lookup.sums_by_id(ids.reshape(-1), x.reshape(-1, x.shape[-1]), size)
    )
    mesh, rng = make_mesh(*sizes), np.random.default_rng(1)
    ids = rng.integers(0, 16, (8, 6)).astype(np.int32)
    weights = rng.standard_normal((8, 6, 8), np.float32)

    def loss(table):
        with rows_on(mesh):
            return jnp.sum(by_columns(lookup.table_lookup, table, ids) * weights)

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((16, 8)))
    expected, _ = exact(ids.reshape(-1), weights.reshape(-1, 8), 16)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1_000, 30_522, 250_000])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_repetitions_on_the_card_give_equal_bits(size, kind):
    rng = np.random.default_rng(2)
    ids = jnp.asarray(ids_of(kind, size, 16_384, rng))
    table, x = jnp.zeros((size, 256)), jnp.asarray(rng.standard_normal((16_384, 256), np.float32))
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(lookup.table_lookup(table, ids[None], None) * x[None])))
    first = np.asarray(gradient(table))
    expected, magnitudes = exact(np.asarray(ids), np.asarray(x), size)
    assert (np.abs(first - expected) <= 1e-6 * magnitudes).all()
    assert all(bool((gradient(table) == first).all()) for _ in range(50))
