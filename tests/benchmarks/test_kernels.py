"""What the bench makes of the launches in a profile."""

import pytest

from tests.benchmarks.kernels import Kernel, by_kind, idle, totals


def launches(*rows, device="/device:GPU:0"):
    return [Kernel(device, name, start, duration) for name, start, duration in rows]


def test_totals_count_launches_and_add_up_time():
    found = totals(launches(("gelu_backward", 0.0, 1.0), ("gelu_backward", 2.0, 3.0)))
    assert found == {"gelu_backward": (2, 4.0)}
    assert by_kind(found, steps=2) == {"normalisation, dropout, reductions": 2000.0}


def test_idle_time_is_what_no_stream_covers():
    # b runs on another stream, wholly within a; c starts before a ends; d after a gap of 2.
    kernels = launches(("a", 0.0, 4.0), ("b", 1.0, 1.0), ("c", 3.0, 2.0), ("d", 7.0, 1.0))
    assert idle(kernels) == {"c -> d": (1, pytest.approx(2.0))}


def test_idle_time_does_not_reach_from_one_device_to_the_next():
    kernels = launches(("a", 0.0, 1.0)) + launches(("a", 5.0, 1.0), device="/device:GPU:1")
    assert idle(kernels) == {}
