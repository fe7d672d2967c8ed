"""Which attention 'auto' stands for."""

import types

import jax
import jax.numpy as jnp
import pytest

from bertjax.model.kernels import compiler_options
from bertjax.model.kernels.choice import select_attention


def _device(monkeypatch, platform, capability=None):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="TPU v5 lite")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])


@pytest.mark.parametrize(
    ("platform", "capability", "head", "dtype", "choice"),
    [
        ("gpu", "9.0", 64, jnp.bfloat16, "pallas"),
        ("gpu", "8.0", 64, jnp.float16, "pallas"),
        ("gpu", "7.5", 64, jnp.bfloat16, "reference"),
        ("gpu", "9.0", 96, jnp.bfloat16, "reference"),
        ("gpu", "9.0", 64, jnp.float32, "reference"),
        ("tpu", None, 64, jnp.bfloat16, "pallas_tpu"),
        ("tpu", None, 48, jnp.bfloat16, "reference"),
        ("tpu", None, 64, jnp.float32, "reference"),
        ("cpu", None, 64, jnp.bfloat16, "reference"),
    ],
)
def test_fused_kernels_are_chosen_where_they_run(monkeypatch, platform, capability, head, dtype, choice):
    _device(monkeypatch, platform, capability)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert select_attention((2, 128, 12, head), dtype, platform) == choice


def test_only_gpus_get_compiler_options():
    assert compiler_options("gpu") and not compiler_options("cpu") and not compiler_options("tpu")
