"""Functions over arrays that numba compiles."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """`function` as machine code, which is kept for later starts where there is a place for it: beside the package, or
    in the user's cache. A container may have neither.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # "no locator available"
        return numba.njit(nogil=True)(function)
