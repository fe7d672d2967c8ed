"""Property tests: a few inputs in the fast suite, many with `pytest -m nightly`.

BERTJAX_PROPERTY_EXAMPLES=100000 pytest -m nightly tests/properties --hypothesis-seed=7
"""

import os
import pathlib
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from bertjax.formats.files import scratch_directory

FAST, NIGHTLY = 30, 2000  # inputs a test

settings.register_profile(
    "bertjax",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)


def pytest_configure(config):
    nightly = "nightly" in config.getoption("markexpr", "")
    examples = int(os.environ.get("BERTJAX_PROPERTY_EXAMPLES", NIGHTLY if nightly else FAST))
    settings.register_profile(
        "bertjax-run", settings.get_profile("bertjax"), max_examples=examples, derandomize=not nightly
    )
    settings.load_profile("bertjax-run")


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in pathlib.Path(item.fspath).parents:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="module")
def folder():
    """For files that are written in each example: in memory where that can be, and gone even after a kill."""
    with pytest.MonkeyPatch.context() as patch:
        if os.path.isdir("/dev/shm"):
            patch.setattr(tempfile, "tempdir", "/dev/shm")
        with scratch_directory() as directory:
            patch.undo()
            yield directory
