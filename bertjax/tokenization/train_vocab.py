"""Trains a WordPiece vocabulary: sentences -> word counts -> pieces -> WordPieceTokenizer.

1. Words are counted after BERT's own normalisation, streamed into bounded dictionaries, so memory
   does not grow with the corpus.
2. sentencepiece merges pairs (BPE) over the table of word counts, for more pieces than are wanted.
   Of its model types BPE gave the fewest tokens a word under BERT's greedy longest match (the
   unigram model 14 % more, in twenty times the memory).
3. Pieces that the greedy match hardly uses are dropped in rounds until the size is right.

Everything is a deterministic function of the sentences in their order and of the settings.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from bertjax.tokenization.normalization import BertNormalizer
from bertjax.tokenization.parts import SPACE_MARK
from bertjax.tokenization.train_subwords import LONGEST, learn_pieces
from bertjax.tokenization.word_counts import WordCounts, rank, strip_marks, warn_of_few
from bertjax.tokenization.wordpiece import MAX_WORD_CHARS, WordPieceTokenizer

VOCAB_SIZE = 30522
ORIGINAL_UNUSED = 994
_UNUSED_BEFORE_UNK = 99  # [UNK] is id 100 in the original when there are that many unused rows
_SURPLUS = 1.5  # pieces learnt for each one wanted; 1.2 and 2.0 gave more tokens a word
_PRUNING_ROUNDS = 4
_FEW_CHARACTERS = 10_000  # in a smaller corpus a character that is seen once gets an entry too
_MAX_CHARS = 1000  # characters with entries, ...
_COVERED = 0.9995  # ... more where they are not this share of the text (Chinese, Japanese)
# Shares of the words that are lost with their marks: above the first "auto" keeps marks, above the second a line tells.
_CONFUSED, _SAID = 0.01, 0.0005
# Text without spaces between words: share of its characters, mean length of its runs. Segmented
# Thai or Japanese has runs of under 8 characters, unsegmented of over 20.
_SPACELESS_SHARE, _SPACELESS_RUN = 0.05, 12
_SPACELESS_PIECE = 8  # characters of the longest piece there; otherwise entries are whole clauses

log = logging.getLogger(__name__)


def train_wordpiece(
    sentences: Iterable[str],
    vocab_size: int = VOCAB_SIZE,
    do_lower_case: bool = True,
    strip_accents: bool | Literal["auto"] | None = None,
    tokenize_chinese_chars: bool = True,
    *,
    num_unused: int | None = None,
    min_char_count: int | None = None,
    max_chars: int | None = None,
    max_words: int = 2_000_000,
) -> WordPieceTokenizer:
    """Trains a vocabulary of `vocab_size` entries on `sentences`, read once.

    Entries, in BERT's layout: [PAD] at 0, unused rows, [UNK] [CLS] [SEP] [MASK], more unused rows,
    single characters and their `##` forms, then pieces by decreasing use.

    Args:
      strip_accents: drop combining marks; None follows `do_lower_case`, as the original. "auto"
        does too, but keeps marks where over 1 % of the words would fall together with others, or
        lose vowel signs and other marks that their script needs.
      num_unused: rows `[unusedN]` for later words; None is a thirtieth of `vocab_size` and at most
        994, the original's number.
      min_char_count: a character seen less often gets no entry (words with it are unknown). None is
        2, and 1 in a corpus of under 10,000 characters.
      max_chars: at most so many characters get entries, the most frequent ones. None is 1000, or as
        many as cover 99.95 % of the text, at most a third of `vocab_size`.
      max_words: bound on the distinct words kept in memory, about 250 bytes each.

    Raises:
      ValueError: no words in `sentences`, or `vocab_size` too small for the entries that must be.
    A corpus too small for `vocab_size` gives the largest vocabulary it can, with a warning.
    """
    if num_unused is None:
        num_unused = min(ORIGINAL_UNUSED, vocab_size // 30)
    unused = [f"[unused{i}]" for i in range(num_unused)]
    head = ["[PAD]", *unused[:_UNUSED_BEFORE_UNK], "[UNK]", "[CLS]", "[SEP]", "[MASK]", *unused[_UNUSED_BEFORE_UNK:]]
    if vocab_size <= len(head):  # before the text is read
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(head)} special and unused entries alone need more. Raise it, "
            "or lower --num_unused"
        )
    counts = WordCounts(BertNormalizer(do_lower_case, False, tokenize_chinese_chars), max_words)
    for sentence in sentences:
        counts.add(sentence)
    words = counts.ranked()
    longest = _longest_piece(*counts.spaceless())
    del counts  # large
    if do_lower_case if strip_accents in (None, "auto") else strip_accents:
        words, strip_accents = _without_marks(
            words, BertNormalizer(do_lower_case, True, tokenize_chinese_chars), strip_accents
        )
    elif strip_accents == "auto":
        strip_accents = None
    if longest < LONGEST:  # the words are clauses, of which parts are learnt
        words = _parts(words)
    if min_char_count is None:
        few = sum(len(word) * count for word, count in words) < _FEW_CHARACTERS
        min_char_count = 1 if few else 2

    alphabet, chars = _characters(words, min_char_count, max_chars, vocab_size)
    if not chars:
        raise ValueError(
            f"{len(words)} words are too few to train a vocabulary on: no character "
            f"is seen min_char_count={min_char_count} times"
        )
    fixed = list(dict.fromkeys(head + chars))
    wanted = vocab_size - len(fixed)
    if wanted < 0:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(head)} special and unused entries and {len(chars)} for single "
            f"characters need {len(fixed)}. Raise it, lower --num_unused or --max_chars, or raise --min_char_count"
        )

    words = [(word, count) for word, count in words if len(word) <= LONGEST and alphabet.issuperset(word)]
    pieces: list[str] = []
    if wanted and words:
        learnt = learn_pieces(words, "bpe", math.ceil(_SURPLUS * vocab_size) + len(alphabet), longest)
        taken = set(fixed)
        pieces = [piece for piece in wordpiece_pieces(piece for piece, _ in learnt) if piece not in taken]
    warn_of_few(len(fixed) + len(pieces), vocab_size)

    def tokenizer(entries: list[str]) -> WordPieceTokenizer:
        return WordPieceTokenizer(entries, do_lower_case, strip_accents, tokenize_chinese_chars)

    return tokenizer(fixed + _most_used(pieces, wanted, fixed, words, tokenizer))


def _without_marks(
    words: list[tuple[str, int]], stripping: BertNormalizer, strip_accents: bool | str | None
) -> tuple[list[tuple[str, int]], bool | None]:
    """(the words to train on, strip_accents of the tokenizer), and says what marks matter."""
    stripped, lost = strip_marks(words, stripping)
    harm = f"{lost.confused:.1%} of the words fall together with other words"
    if lost.examples:
        harm += f" ({', '.join(lost.examples)})"
    if lost.unreadable >= _SAID:
        harm += f", {lost.unreadable:.1%} lose marks that their script needs"
    if strip_accents == "auto":
        if max(lost.confused, lost.unreadable) > _CONFUSED:
            log.warning("combining marks are kept (strip_accents=false): without them %s", harm)
            return words, False
        strip_accents = None
    if max(lost.confused, lost.unreadable) >= _SAID:
        log.warning("without their combining marks %s; strip_accents=false keeps the marks", harm)
    return stripped, strip_accents


def _longest_piece(share: float, run: float) -> int:
    """Characters of the longest piece, and says where words are not set apart by spaces."""
    if share < _SPACELESS_SHARE or run < _SPACELESS_RUN:
        return LONGEST
    log.warning(
        "%.0f %% of the text is in scripts without spaces between words (Thai, Lao, Khmer, "
        "Burmese, kana, Chinese with tokenize_chinese_chars=false), in runs of %.0f characters: to "
        "BERT's tokenizer each run is one word, unknown if it is over %d characters long. Pieces "
        "are held to %d characters. Better: put spaces between the words first with a segmenter "
        "(Japanese: fugashi or SudachiPy; Thai: PyThaiNLP), also in all later text, or train a vocabulary "
        "with --model=unigram, which needs none",
        100 * share,
        run,
        MAX_WORD_CHARS,
        _SPACELESS_PIECE,
    )
    return _SPACELESS_PIECE


def _parts(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The words, long ones in parts that are short enough to learn pieces from."""
    counts: Counter[str] = Counter()
    for word, count in words:
        for start in range(0, len(word), LONGEST):
            counts[word[start : start + LONGEST]] += count
    return rank(counts)


def _most_used(
    pieces: list[str],
    wanted: int,
    fixed: list[str],
    words: list[tuple[str, int]],
    tokenizer: Callable[[list[str]], WordPieceTokenizer],
) -> list[str]:
    """The `wanted` pieces that the greedy longest match uses most on `words`, the most used first.

    Args:
      fixed: entries that stand before the pieces whatever their use.
      tokenizer: makes one of all entries.
    """
    surplus = max(0, len(pieces) - wanted)
    for left in range(_PRUNING_ROUNDS - 1, -1, -1):
        used = tokenizer(fixed + pieces).count_use(words)
        order = sorted(range(len(pieces)), key=lambda k: (-used[len(fixed) + k], k))
        # Dropping a piece changes the use of the others: go half of the way and count again.
        kept = wanted + (surplus >> (_PRUNING_ROUNDS - left) if left else 0)
        pieces = [pieces[k] for k in order[:kept]]
    return pieces


def _characters(
    words: list[tuple[str, int]], min_count: int, limit: int | None, vocab_size: int
) -> tuple[set[str], list[str]]:
    """The alphabet, and its entries: each character, then `##` forms of those seen inside words."""
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words:
        for char in word:
            counts[char] += count
        inside.update(word[1:])
    ranked = rank(counts)
    limit = limit or max(_MAX_CHARS, min(_covering(ranked), vocab_size // 3))
    alphabet = sorted(char for char, count in ranked[:limit] if count >= min_count)
    return set(alphabet), alphabet + [f"##{char}" for char in alphabet if char in inside]


def _covering(ranked: list[tuple[str, int]]) -> int:
    """How many of the ranked characters are 99.95 % of the text."""
    missing = (1 - _COVERED) * sum(count for _, count in ranked)
    common = len(ranked)
    while common and (missing := missing - ranked[common - 1][1]) >= 0:
        common -= 1
    return common


def wordpiece_pieces(pieces: Iterable[str]) -> list[str]:
    """sentencepiece pieces -> WordPiece: `\u2581the` starts a word, `er` continues one (`##er`).

    Left out: the bare word mark, pieces across words, and names in angle brackets (`<unk>`, `<s>`,
    `<0x0A>`), which are not text.
    """
    found: dict[str, None] = {}
    for piece in pieces:
        if len(piece) > 2 and piece.startswith("<") and piece.endswith(">"):
            continue
        start = piece.startswith(SPACE_MARK)
        body = piece[1:] if start else piece
        if body and SPACE_MARK not in body:
            found[body if start else f"##{body}"] = None
    return list(found)
