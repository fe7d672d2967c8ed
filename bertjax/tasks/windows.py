"""Overlapping windows over a long token sequence, and which of them to trust for each token."""

from collections.abc import Sequence

import numpy as np


def window_starts(tokens: int, room: int, stride: int) -> list[int]:
    """First token of each window of `room` tokens; every token is in at least one.

    A stride above the room is reduced to it. Raises ValueError if windows could not advance.
    """
    if room < 1:
        raise ValueError(f"room={room}: a window must hold at least one token")
    if stride < 1:
        raise ValueError(f"stride={stride} must be at least 1, or windows do not advance")
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(stride, room))
    return starts


def most_context(starts: Sequence[int], room: int, tokens: int) -> np.ndarray:
    """[tokens]: the window that shows most of a token's surroundings, the first of equals.

    Worth of a window to a token: the smaller of its left and right context plus 0.01 of the
    window's length (run_squad.py of google-research/bert, _check_is_max_context).
    """
    if len(starts) == 1 or not tokens:
        return np.zeros(tokens, int)
    worth = np.full((len(starts), tokens), -np.inf)
    for number, start in enumerate(starts):
        end = min(start + room, tokens)
        place = np.arange(start, end)
        worth[number, start:end] = np.minimum(place - start, end - 1 - place) + 0.01 * (end - start)
    return worth.argmax(0)
