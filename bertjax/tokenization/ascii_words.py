"""Compiled WordPiece for the ASCII part of a text, which is nearly all of most European text.

In: texts as UTF-8 bytes end to end. Out: ids, with a gap for every chunk (run without white space)
that holds anything but printable ASCII; `wordpiece.py` computes those and `fill_gaps` puts them in.
For printable ASCII the rules of normalization.py are few: white space separates, punctuation stands
alone, letters may be lower-cased. So a word is a run of letters and digits, and the longest piece
is found by look-ups in two hash tables of the pieces (exact: the bytes are compared).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bertjax.formats.compiled import compiled

GAP = -1  # stands for one chunk that was left out
_OTHER, _SPACE, _PUNCTUATION, _ALPHANUMERIC = range(4)
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


class PieceTable(NamedTuple):
    """Pieces of letters and digits, by open addressing over their FNV-1a hash."""

    slots: np.ndarray  # int32 [2**k]: number of the piece, -1 where empty
    starts: np.ndarray  # int64 [pieces+1]: where its bytes are
    letters: np.ndarray  # uint8: all pieces end to end
    ids: np.ndarray  # int32 [pieces]
    longest: int  # bytes of the longest piece


class AsciiVocabulary(NamedTuple):
    """What the compiled code knows of a vocabulary."""

    begin: PieceTable  # pieces that begin a word
    inside: PieceTable  # pieces that continue one, without ##
    kinds: np.ndarray  # uint8 [256]: what a byte is
    lower: np.ndarray  # uint8 [256]: the byte that stands for it
    punctuation: np.ndarray  # int32 [128]: id of each punctuation character
    unknown: int
    longest_word: int


def ascii_vocabulary(
    begin: Mapping[str, int], inside: Mapping[str, int], unknown: int, do_lower_case: bool, longest_word: int
) -> AsciiVocabulary:
    """Tables of the pieces that can occur in ASCII words."""
    kinds = np.full(256, _OTHER, np.uint8)
    lower = np.arange(256, dtype=np.uint8)
    punctuation = np.full(128, unknown, np.int32)
    for code in range(33, 127):
        char = chr(code)
        kinds[code] = _ALPHANUMERIC if char.isalnum() else _PUNCTUATION
        punctuation[code] = begin.get(char, unknown)
        if do_lower_case:
            lower[code] = ord(char.lower())
    kinds[[ord(char) for char in " \t\n\r"]] = _SPACE
    return AsciiVocabulary(_table(begin), _table(inside), kinds, lower, punctuation, unknown, longest_word)


def _table(pieces: Mapping[str, int]) -> PieceTable:
    usable = {piece: i for piece, i in pieces.items() if piece.isascii() and piece.isalnum()}
    lengths = [len(piece) for piece in usable]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    letters = np.frombuffer("".join(usable).encode(), np.uint8)
    slots = np.full(1 << (2 * len(usable) + 1).bit_length(), -1, np.int32)
    _insert(slots, starts, letters)
    ids = np.fromiter(usable.values(), np.int32, len(usable))
    return PieceTable(slots, starts, letters, ids, max(lengths, default=0))


@compiled
def _insert(slots, starts, letters):
    mask = np.uint64(len(slots) - 1)
    for piece in range(len(starts) - 1):
        code = _FNV_OFFSET
        for i in range(starts[piece], starts[piece + 1]):
            code = (code ^ np.uint64(letters[i])) * _FNV_PRIME
        slot = code & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = piece


@compiled
def _find(table, code, word, first, end):
    """Id of the piece word[first:end], whose hash is `code`; -1 where there is none."""
    mask = np.uint64(len(table.slots) - 1)
    slot = code & mask
    while table.slots[slot] >= 0:
        piece = table.slots[slot]
        start = table.starts[piece]
        if table.starts[piece + 1] - start == end - first:
            same = 0
            while same < end - first and table.letters[start + same] == word[first + same]:
                same += 1
            if same == end - first:
                return table.ids[piece]
        slot = (slot + np.uint64(1)) & mask
    return np.int32(-1)


@compiled
def _match(vocabulary, word, length, codes, ids, count):
    """Greedy longest match of word[:length] into ids[count:]; the new count."""
    first, begun = 0, count
    while first < length:
        table = vocabulary.begin if first == 0 else vocabulary.inside
        limit = min(length, first + table.longest)
        code = _FNV_OFFSET
        for i in range(first, limit):
            code = (code ^ np.uint64(word[i])) * _FNV_PRIME
            codes[i] = code
        found = np.int32(-1)
        end = limit
        while end > first:
            found = _find(table, codes[end - 1], word, first, end)
            if found >= 0:
                break
            end -= 1
        if found < 0:
            ids[begun] = vocabulary.unknown
            return begun + 1
        ids[count] = found
        count += 1
        first = end
    return count


@compiled
def encode(vocabulary, data, text_ends, ids, lengths, gaps):
    """Tokens of texts that end at data[text_ends]; a text's end also ends its last word.

    Args: data uint8 [N]; ids int32 [N], lengths int64 [texts], gaps int64 [N // 2 + 1, 2] are
      written: ids with GAP, the number of ids of each text (a gap counts as one), and [start, end)
      of the bytes of each gap.
    Returns: (number of ids, number of gaps).
    """
    word = np.empty(vocabulary.longest_word, np.uint8)
    codes = np.empty(vocabulary.longest_word, np.uint64)
    count, num_gaps, position = 0, 0, 0
    for text in range(len(text_ends)):
        end, before = text_ends[text], count
        while position < end:
            if vocabulary.kinds[data[position]] == _SPACE:
                position += 1
                continue
            chunk, begun = position, count
            plain = True
            while position < end:
                kind = vocabulary.kinds[data[position]]
                if kind == _SPACE:
                    break
                if kind == _OTHER:
                    plain = False
                    break
                if kind == _PUNCTUATION:
                    ids[count] = vocabulary.punctuation[data[position]]
                    count += 1
                    position += 1
                    continue
                length = 0
                while position < end and vocabulary.kinds[data[position]] == _ALPHANUMERIC:
                    if length < len(word):
                        word[length] = vocabulary.lower[data[position]]
                    length += 1
                    position += 1
                if length > len(word):
                    ids[count] = vocabulary.unknown
                    count += 1
                else:
                    count = _match(vocabulary, word, length, codes, ids, count)
            if not plain:
                while position < end and vocabulary.kinds[data[position]] != _SPACE:
                    position += 1
                gaps[num_gaps, 0], gaps[num_gaps, 1] = chunk, position
                num_gaps += 1
                ids[begun] = GAP
                count = begun + 1
        lengths[text] = count - before
    return count, num_gaps


@compiled
def fill_gaps(ids, lengths, filling, filling_ends, out):
    """Copy ids to out with the gaps filled, and make lengths those of the filled texts.

    The k-th gap becomes filling[filling_ends[k-1]:filling_ends[k]].
    """
    gap, read, written = 0, 0, 0
    for text in range(len(lengths)):
        before = written
        for _ in range(lengths[text]):
            if ids[read] == GAP:
                first = filling_ends[gap - 1] if gap else 0
                for i in range(first, filling_ends[gap]):
                    out[written] = filling[i]
                    written += 1
                gap += 1
            else:
                out[written] = ids[read]
                written += 1
            read += 1
        lengths[text] = written - before
