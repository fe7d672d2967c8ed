"""Machine code is kept where it can be."""

import numba
import pytest
from numba.core import caching

from bertjax.formats.compiled import compiled


def double(x):
    return 2 * x


def test_code_runs_where_neither_package_nor_home_can_be_written(monkeypatch):
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(double)
    assert compiled(double)(3) == 6
