"""BERT's basic tokenization: raw text -> normalised words, before any vocabulary is consulted.

In: str. Out: words (str), or words with the code point of the original text that each of their
characters came from. The rules are those of `BasicTokenizer` in the original `tokenization.py`:
drop control and format characters, NUL and U+FFFD; white space separates; CJK ideographs stand
alone; lower-case; decompose (NFD) and drop combining marks (Mn); every punctuation character
stands alone. WordPiece encoding and vocabulary training share this module, so they cannot differ.

Everything works on *chunks*, maximal runs of text without white space. All rules are local to a
chunk (also Python's context-dependent lower-casing of the Greek sigma, which looks no further than
the next space), hence the result for a chunk can be cached, which is where the speed comes from.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence

# str.split() treats these control characters as white space; the original deletes them (category
# Cc) before it splits, which joins their neighbours.
_DELETED_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_CHUNK = re.compile(f"[\\S{_DELETED_SPACES}]+")
_ASCII_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
# Translation tables hold one entry a distinct character; a text that walks through all of Unicode
# must not make them grow without bound.
_TABLE_LIMIT = 1 << 16

_CJK = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)


def is_cjk(char: str) -> bool:
    """True for the CJK ideographs that the original isolates (not kana, not hangul)."""
    return _CJK.match(char) is not None


def is_punctuation(char: str) -> bool:
    """True for Unicode categories P* and for every ASCII symbol, such as `$`, `^` and `+`."""
    if char.isascii():
        return char.isprintable() and not char.isalnum() and char != " "
    return unicodedata.category(char).startswith("P")


def is_removed(char: str) -> bool:
    """True for NUL, U+FFFD and control or format characters other than tab, CR and LF."""
    if char in "\t\n\r":
        return False
    return char in "\x00\ufffd" or unicodedata.category(char) in ("Cc", "Cf")


def is_mark(char: str) -> bool:
    """True for non-spacing marks (Mn): accents, but also vowel signs of many scripts."""
    return unicodedata.category(char) == "Mn"


class _Table(dict):
    """Lazily filled table for `str.translate`: code point -> replacement."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        if len(self) >= _TABLE_LIMIT:
            self.clear()
        value = self[code] = self._rule(chr(code))
        return value


def split_chunks(text: str) -> list[str]:
    """The runs of `text` between white space, as the original sees white space."""
    a, b, c, d, e, f, g = _DELETED_SPACES
    # Seven scans at memchr's speed: a fraction of the time of one regular-expression search.
    if a in text or b in text or c in text or d in text or e in text or f in text or g in text:
        return _CHUNK.findall(text)
    return text.split()


def chunk_spans(text: str) -> list[tuple[int, str]]:
    """(start, chunk) for the same chunks as `split_chunks`; start in code points."""
    return [(match.start(), match.group()) for match in _CHUNK.finditer(text)]


class BertNormalizer:
    """Splits chunks into normalised words.

    `strip_accents=None` follows `do_lower_case`, as the original does; False keeps the marks
    (needed for Hindi, Japanese, Thai, ...), True drops them from cased text too.
    """

    def __init__(
        self, do_lower_case: bool, strip_accents: bool | None = None, tokenize_chinese_chars: bool = True
    ) -> None:
        self.do_lower_case = do_lower_case
        self.strip_accents = strip_accents
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self._strips = do_lower_case if strip_accents is None else strip_accents
        self._clean = _Table(self._cleaned)
        self._split = _Table(self._separated)

    def __reduce__(self) -> tuple:
        return BertNormalizer, (self.do_lower_case, self.strip_accents, self.tokenize_chinese_chars)

    def _cleaned(self, char: str) -> str:
        if is_removed(char):
            return ""
        if unicodedata.category(char) == "Zs":
            return " "
        return f" {char} " if self.tokenize_chinese_chars and is_cjk(char) else char

    def _separated(self, char: str) -> str:
        if self._strips and is_mark(char):
            return ""
        return f" {char} " if is_punctuation(char) else char

    def words(self, text: str) -> list[str]:
        """Normalised words of a chunk, or of a whole text."""
        if text.isascii() and text.isprintable():  # nothing to clean, decompose or strip
            return _ASCII_WORD.findall(text.lower() if self.do_lower_case else text)
        text = text.translate(self._clean)
        if self.do_lower_case:
            text = text.lower()
        if self._strips and not text.isascii():
            text = unicodedata.normalize("NFD", text)
        return text.translate(self._split).split()

    def aligned_words(self, chunk: str) -> list[tuple[str, Sequence[int]]]:
        """`words(chunk)`, each with the index in `chunk` that each of its characters came from.

        A character that the normalisation removed belongs to no word; one that it expanded
        (`İ` -> `i` + U+0307, a Hangul syllable -> its letters) occurs several times.
        """
        if chunk.isascii() and chunk.isprintable():  # as in `words`: no character moves
            text = chunk.lower() if self.do_lower_case else chunk
            return [(m.group(), range(m.start(), m.end())) for m in _ASCII_WORD.finditer(text)]
        letters = [(cleaned, i) for i, char in enumerate(chunk) for cleaned in char.translate(self._clean)]
        if self.do_lower_case:
            # The context (final sigma) changes which letter comes out, never how many.
            lower = "".join(char for char, _ in letters).lower()
            letters = list(zip(lower, [i for char, i in letters for _ in char.lower()], strict=True))
        if self._strips:
            letters = _decompose(letters)
        found: list[list[tuple[str, int]]] = [[]]
        for char, i in letters:
            separated = char.translate(self._split)
            if separated == char and not char.isspace():
                found[-1].append((char, i))
            elif separated:  # white space, or a character that stands alone
                found += [[], []] if char.isspace() else [[(char, i)], []]
        return [("".join(char for char, _ in word), [i for _, i in word]) for word in found if word]


def _decompose(letters: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """NFD of characters with their origins, combining marks in canonical order."""
    keyed, run = [], 0  # a run begins with a character that is not a mark
    for char, i in letters:
        for part in unicodedata.normalize("NFD", char):
            order = unicodedata.combining(part)
            run += order == 0
            keyed.append((run, order, part, i))
    keyed.sort(key=lambda item: item[:2])  # stable
    return [(part, i) for _, _, part, i in keyed]
