"""What pairs hold, counted apart from the package."""

import numpy as np


def covered(pairs: np.ndarray) -> int:
    """Number of distinct tokens in pairs [n, 5] (fields of `pairs.Pair`)."""
    starts = np.concatenate([pairs[:, 0], pairs[:, 2]])
    ends = starts + np.concatenate([pairs[:, 1], pairs[:, 3]])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([[np.iinfo(np.int64).min], ends[:-1]])
    return int(np.maximum(ends - np.maximum(starts, before), 0).sum())
