"""Overlapping windows over a long token sequence, and which of them to trust for each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bertjax.tokenization import Layout, Tokenizer


@dataclass(frozen=True)
class Window:
    """Which part of a passage a row shows; host-side companion of its ids.

    `first` is the row's position of the first passage token, `offsets` [n, 2] the characters of
    the n passage tokens, `best` [n] whether this window gives the token the most context.
    """

    first: int
    offsets: np.ndarray
    best: np.ndarray


def passage_tokens(tokenizer: Tokenizer, passage: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [n], the code points [start, end) of each, int32 [n, 2]).

    Characters that the tokenizer drops (combining marks, vowel signs, variation selectors, joiners)
    belong to the token that they touch, the one before them where it touches both: an answer that
    ends in one is found whole. Tokens made of one letter all get the span of that letter, so an
    answer that ends inside a letter is labelled, and predicted, with the whole letter.
    """
    ids, offsets = tokenizer.encode_with_offsets(passage)
    spans = np.array(offsets, np.int32).reshape(-1, 2)
    if not len(spans):
        return np.array(ids, np.int32), spans
    reached = np.maximum.accumulate(spans[:, 1])  # a token of no width may end before others
    lefts = np.concatenate([[0], reached])
    rights = np.concatenate([spans[:, 0], [len(passage)]])
    starts, ends = np.arange(len(passage) + 1), np.arange(len(passage) + 1)  # where each boundary moves to
    for number in np.flatnonzero(lefts < rights):  # between two tokens, before the first, after the last
        left, right = lefts[number], rights[number]
        gap = passage[left:right]
        if gap.isspace():
            continue
        after = 0 if number == 0 else _leading(gap)
        ends[left] += after
        starts[right] -= _leading(gap[after:][::-1])
    return np.array(ids, np.int32), np.stack([starts[spans[:, 0]], ends[spans[:, 1]]], 1).astype(np.int32)


def _leading(gap: str) -> int:
    """How many characters come before the first white space."""
    return next((i for i, char in enumerate(gap) if char.isspace()), len(gap))


def passage_windows(
    tokenizer: Tokenizer, query: Sequence[int], ids: np.ndarray, offsets: np.ndarray, max_length: int, stride: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Window]]:
    """(ids, segment types, Window) of every row [CLS] query [SEP] part of the passage [SEP].

    Raises:
      ValueError: the query leaves the passage no room, or windows could not advance.
    """
    layout = Layout.of(tokenizer)
    first = len(layout.prefix) + len(query) + len(layout.middle)
    room = max_length - first - len(layout.suffix)
    starts = window_starts(len(ids), room, stride)
    best = most_context(starts, room, len(ids))
    for number, start in enumerate(starts):
        part = slice(start, start + room)
        yield *layout.join(query, ids[part]), Window(first, offsets[part], best[part] == number)


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
