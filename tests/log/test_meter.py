"""Rates of a run, on a clock that the test moves."""

import jax
import pytest

from bertjax.log import meter
from bertjax.process import hardware
from bertjax.training.sharding import make_mesh


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    return now


def test_rates_leave_out_compilation_evaluation_and_saving(clock, monkeypatch):
    monkeypatch.setattr(meter, "peak_flops", lambda device: 1e12)
    watch = meter.Meter(make_mesh())
    clock[0] += 60  # compilation
    watch.step_done()
    assert watch.rates(1000, 1e12)["step_time"] is None
    for _ in range(4):
        with watch.waiting_for_data():
            clock[0] += 0.1
        clock[0] += 0.4
        watch.step_done()
    with watch.paused():
        clock[0] += 30
    rates = watch.rates(1000, 1e12)
    assert rates == pytest.approx(
        {"step_time": 0.5, "data_wait": 0.1, "tokens_per_second": 2000, "mfu": 1e12 / 0.5 / 8e12}
    )
    clock[0] += 2
    watch.step_done()
    assert watch.rates(1000, 0)["step_time"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_peak_by_the_name_that_the_device_gives_itself(kind, peak):
    class Device:
        device_kind = kind

    assert hardware.peak_flops(Device()) == peak


def test_random_bits_by_backend():
    assert hardware.prng_implementation("auto", "tpu") == "rbg"
    assert hardware.prng_implementation("auto", "gpu") == "threefry2x32"
    assert hardware.prng_implementation("rbg", "cpu") == "rbg"
    assert hardware.describe()["devices"] == jax.device_count()
