"""Batches that travel as one array come back bit for bit."""

import jax
import numpy as np
import pytest

from bertjax.tasks.batches import as_one_array, fields_of


def test_fields_come_back_with_shape_type_and_bits():
    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(-5, 2**31 - 1, (3, 4, 7)).astype(np.int32),
        "weights": np.array([1.0, 0.0, -np.inf], np.float32),
        "label_set": rng.normal(size=(3, 2)).astype(np.float32),
        "labels": np.array([0, -1, 7], np.int32),
    }
    packed = as_one_array(batch)
    assert len(packed) == 1 and next(iter(packed.values())).shape == (3, 4 * 7 + 1 + 2 + 1)
    back = jax.device_get(jax.jit(fields_of)(packed))
    assert set(back) == set(batch)
    for name, values in batch.items():
        assert back[name].dtype == values.dtype
        np.testing.assert_array_equal(back[name], values)


def test_other_batches_pass_and_other_types_are_refused():
    batch = {"input_ids": np.zeros((2, 3), np.int32)}
    assert fields_of(batch) == batch
    with pytest.raises(ValueError, match="'x' is int64; only int32 and float32"):
        as_one_array({"x": np.zeros(2, np.int64)})
