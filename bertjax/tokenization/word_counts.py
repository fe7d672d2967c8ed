"""Words of a corpus, counted in bounded memory, and what they lose when their marks are dropped.

In: text. Out: normalised words with their counts; the share of the words that fall together with
others without their combining marks (accents, vowel signs, the voicing marks of kana); how much of
the text is in scripts that put no spaces between words.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bertjax.tokenization.normalization import BertNormalizer, is_mark, split_chunks

_BUFFER = 1 << 20  # characters counted at once in a small, cache-friendly dictionary
# Thai, Lao, Burmese, Khmer, kana; Chinese characters where they do not stand alone.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff"
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff"
# Scripts that can be read without their marks; in all others marks are vowels or consonants.
_READABLE = ("LATIN", "GREEK", "CYRILLIC", "HEBREW", "ARABIC")
# A spelling rarer than this share of the commonest with the same letters counts as a misspelling.
_MISSPELLING = 0.05

log = logging.getLogger(__name__)


class WordCounts:
    """Counts of normalised words over a stream of text, in bounded memory.

    When there are more than `max_words` distinct words, the rarest half is forgotten (their
    occurrences are summed in `forgotten`); counts are Python integers and never overflow.
    """

    def __init__(self, normalizer: BertNormalizer, max_words: int = 2_000_000) -> None:
        if max_words < 1:
            raise ValueError(f"max_words={max_words} must be positive")
        self._normalizer = normalizer
        self._max_words = max_words
        self._words: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()  # not yet normalised: each distinct one once
        self._buffer: list[str] = []
        self._buffered = 0
        self.forgotten = 0
        chinese = "" if normalizer.tokenize_chinese_chars else _CHINESE
        self._find_spaceless = re.compile(f"[{_SPACELESS}{chinese}]").findall
        self._spaceless = [0, 0, 0]  # characters; those of spaceless scripts; their chunks' lengths

    def add(self, text: str) -> None:
        """Counts the words of `text`."""
        self._buffer.append(text)
        self._buffered += len(text)
        if self._buffered >= _BUFFER:
            self._count_buffer()

    def _count_buffer(self) -> None:
        self._chunks.update(Counter(split_chunks("\n".join(self._buffer))))
        self._buffer.clear()
        self._buffered = 0
        if len(self._chunks) > self._max_words // 2:
            self._fold()

    def _fold(self) -> None:
        words = self._words
        for chunk, count in self._chunks.items():
            self._spaceless[0] += len(chunk) * count
            if not chunk.isascii() and (found := len(self._find_spaceless(chunk))):
                self._spaceless[1] += found * count
                self._spaceless[2] += found * len(chunk) * count
            for word in self._normalizer.words(chunk):
                words[word] = words.get(word, 0) + count
        self._chunks.clear()
        if len(words) > self._max_words:
            ranked = rank(words)
            kept = self._max_words // 2
            self.forgotten += sum(count for _, count in ranked[kept:])
            self._words = Counter(dict(ranked[:kept]))

    def spaceless(self) -> tuple[float, float]:
        """(share of the characters that are of scripts without spaces between words, mean length of
        the runs without white space that they stand in), of what was counted. Call `ranked` first.
        """
        total, found, lengths = self._spaceless
        return (found / total, lengths / found) if found else (0.0, 0.0)

    def ranked(self) -> list[tuple[str, int]]:
        """(word, count), most frequent first, ties by code point. Refuses to train on no words."""
        self._count_buffer()
        self._fold()
        if self.forgotten:
            log.info("%d occurrences of rare words were forgotten to keep to %d words", self.forgotten, self._max_words)
        if not self._words:
            raise ValueError("no words to train a vocabulary on: the sentences are empty")
        return rank(self._words)


class LostMarks(NamedTuple):
    """What dropping combining marks does to the words of a corpus.

    Attributes:
      confused: share of the words that fall together with another word.
      unreadable: share of the words that lose marks of scripts that need them.
      examples: the commonest such words, those that fall together joined by " = ".
    """

    confused: float
    unreadable: float
    examples: tuple[str, ...]


def strip_marks(words: Iterable[tuple[str, int]], stripping: BertNormalizer) -> tuple[list[tuple[str, int]], LostMarks]:
    """(ranked words without their marks, what was lost) of words counted with their marks."""
    stripped: Counter[str] = Counter()
    spellings: dict[str, Counter[str]] = {}  # of words with marks, by what is left
    total = unreadable = 0
    for word, count in words:
        total += count
        left = [word] if word.isascii() else stripping.words(word)
        for part in left:
            stripped[part] += count
        plain, usual = " ".join(left), unicodedata.normalize("NFC", word)
        if plain != usual and unicodedata.normalize("NFC", plain) != usual:
            spellings.setdefault(plain, Counter())[usual] += count
            unreadable += count * _needs_marks(usual)
    confused: Counter[str] = Counter()
    for plain, found in spellings.items():
        bare = stripped[plain] - found.total()
        forms = {**found, **({plain: bare} if bare > 0 else {})}
        least = _MISSPELLING * max(forms.values())
        common = {form: count for form, count in forms.items() if count >= least}
        if len(common) > 1:
            confused[" = ".join(form for form, _ in rank(common))] = sum(common.values())
    total = max(total, 1)
    examples = tuple(names for names, _ in rank(confused)[:5])
    return rank(stripped), LostMarks(confused.total() / total, unreadable / total, examples)


def _needs_marks(word: str) -> bool:
    """Whether a mark of the word stands on a letter of a script that cannot be read without."""
    decomposed = unicodedata.normalize("NFD", word)
    return any(
        is_mark(mark) and not unicodedata.name(char, "").startswith(_READABLE)
        for char, mark in zip(decomposed, decomposed[1:], strict=False)
        if char.isalpha()
    )


def warn_of_few(found: int, wanted: int) -> None:
    """Says when a corpus gives fewer than the wanted entries."""
    if found < wanted:
        remedy = "train on more text, or set vocab_size=%d"
        log.warning(f"the corpus gives only %d of the %d entries asked for: {remedy}", found, wanted, found)


def rank(words: Mapping[str, int]) -> list[tuple[str, int]]:
    """(word, count), most frequent first, ties by code point."""
    return sorted(words.items(), key=lambda item: (-item[1], item[0]))
