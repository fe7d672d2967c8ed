"""Shared test set-up: 8 forced host devices on the CPU, and the place of the real data sets."""

import os
import pathlib

# Before the first jax import of the process. A GPU run (`-m gpu`) sets BERTJAX_TEST_PLATFORM=cuda.
os.environ.setdefault("JAX_PLATFORMS", os.environ.get("BERTJAX_TEST_PLATFORM", "cpu"))
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Directory of the real data sets: $BERTJAX_SHARED_DATA, or `shared/data` beside the checkout."""
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    path = pathlib.Path(os.environ.get("BERTJAX_SHARED_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"real data sets not found at {path}; set BERTJAX_SHARED_DATA")
    return path
