"""Trains byte-level BPE (RoBERTa's) and Unigram (XLM-R's) tokenizers: sentences -> word counts ->
pieces -> HubTokenizer.

Words are counted as the tokenizer will see them, in bounded memory, and sentencepiece learns the pieces
from the table of counts. Everything is a deterministic function of the sentences and of the settings.
"""

import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from bertjax.formats.files import scratch_directory
from bertjax.tokenization import families
from bertjax.tokenization.description import read_layout
from bertjax.tokenization.hub import HubTokenizer
from bertjax.tokenization.parts import SPACE_MARK
from bertjax.tokenization.word_counts import WordCounts, warn_of_few

LONGEST = 64  # characters of a piece; longer words (addresses, formulas) teach none, but for clauses without spaces
_COUNTED_WORDS = 400_000  # most frequent words that pieces are learnt from
_SEEDS = 20  # candidates that Unigram starts from, for each piece that is wanted
_COVERED = 0.99995  # share of the text whose characters have pieces of their own, in Unigram
_FEW_CHARACTERS = 10_000  # in a smaller corpus all of them have
_SPELLED = 40_000_000  # characters, of words as often as they are counted, that Unigram is learnt from: about 1 GB
_BYTES = 256
# Before the last character of a special token.
_IN_SPECIAL = re.compile("|".join(f"(?<={re.escape(t[:-1])})(?={t[-1]})" for t in families.SPECIALS.values()))


def train_subwords(
    sentences: Iterable[str],
    model: Literal["bpe", "unigram"],
    vocab_size: int,
    do_lower_case: bool = False,
    strip_accents: bool | None = None,
    max_words: int = 2_000_000,
) -> HubTokenizer:
    """Trains a tokenizer of `vocab_size` entries on `sentences`, read once.

    Byte-level BPE has `<s> <pad> </s> <unk>`, the 256 bytes, the merged pieces and `<mask>`, and no text
    is unknown to it. Unigram has `<s> <pad> </s> <unk>`, the pieces by decreasing probability and `<mask>`;
    characters beyond 99.995 % of the text are unknown.

    Args:
      do_lower_case: lower-case the text.
      strip_accents: drop combining marks; None follows `do_lower_case`.
      max_words: bound on the distinct words kept in memory, about 250 bytes each.

    Raises:
      ValueError: no words in `sentences`, or `vocab_size` too small for the entries that must be.
    A corpus too small for `vocab_size` gives the largest vocabulary it can, with a warning.
    """
    strip_accents = do_lower_case if strip_accents is None else strip_accents
    steps = [{"type": "NFD"}, {"type": "StripAccents"}] if strip_accents else []
    steps = [*steps, {"type": "Lowercase"}] if do_lower_case else steps
    normalizer = {"type": "Sequence", "normalizers": [*steps, {"type": "NFC" if model == "bpe" else "NFKC"}]}
    fixed = len(families.SPECIALS) + (_BYTES if model == "bpe" else 0)
    wanted = vocab_size - fixed
    if wanted < 1:
        raise ValueError(f"vocab_size={vocab_size} is too small: special tokens and bytes alone need {fixed}")
    counts = WordCounts(_Words(model, normalizer), max_words)
    for sentence in sentences:
        counts.add(sentence)
    make = _byte_level if model == "bpe" else _unigram
    # A special token that stands in the text must not be learnt as a piece: each entry is there once.
    words = [(part, count) for word, count in counts.ranked() for part in _IN_SPECIAL.split(word)]
    content = make(words, wanted, normalizer)
    ids = {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    layout = read_layout(content, families.SPECIALS, ids, Path("tokenizer.json"))
    tokenizer = HubTokenizer(content, families.SPECIALS, "tokenizer.json", layout)
    warn_of_few(tokenizer.vocab_size, vocab_size)
    return tokenizer


class _Words:
    """Splits chunks into words as the tokenizer will: normalised, for BPE written as bytes."""

    tokenize_chinese_chars = True

    def __init__(self, model: str, normalizer: dict[str, Any]) -> None:
        from tokenizers import Tokenizer, models
        from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit

        empty = Tokenizer(models.BPE())
        content = json.loads(empty.to_str()) | {"normalizer": normalizer}
        self._normalize = Tokenizer.from_str(json.dumps(content)).normalizer.normalize_str
        self._split = (ByteLevel(add_prefix_space=True) if model == "bpe" else WhitespaceSplit()).pre_tokenize_str
        inside = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        self._written = (lambda part: inside(part)[0][0]) if model == "bpe" else str
        self._part = LONGEST // 4 if model == "bpe" else LONGEST  # a character is up to four bytes

    def words(self, chunk: str) -> list[str]:
        text, found = self._normalize(chunk), []
        for word, (start, end) in self._split(text):
            if len(word) <= LONGEST:
                found.append(word)
            elif not text[start:end].isascii():  # Chinese, Thai ...: most of such a text stands in longer clauses
                found += [self._written(text[at : min(at + self._part, end)]) for at in range(start, end, self._part)]
        return found


def _byte_level(words: list[tuple[str, int]], wanted: int, normalizer: dict[str, Any]) -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learnt = learn_pieces(words, "bpe", wanted + _BYTES + 1, add_dummy_prefix=False)
    merged = [piece for piece, _ in learnt if len(piece) > 1][:wanted]
    *head, mask = families.SPECIALS.values()
    vocab = {piece: i for i, piece in enumerate([*head, *alphabet, *merged, mask])}
    merges = []
    for piece in merged:  # every way to make it of earlier pieces, as sentencepiece would
        for at in range(1, len(piece)):
            if max(vocab.get(piece[:at], len(vocab)), vocab.get(piece[at:], len(vocab))) < vocab[piece]:
                merges.append((piece[:at], piece[at:]))
    return families.byte_level(vocab, merges, families.SPECIALS, normalizer=normalizer, add_prefix_space=True)


def _unigram(words: list[tuple[str, int]], wanted: int, normalizer: dict[str, Any]) -> dict[str, Any]:
    few = sum(len(word) * count for word, count in words) < _FEW_CHARACTERS
    covered, seeds = 1.0 if few else _COVERED, max(100_000, _SEEDS * wanted)
    learnt = learn_pieces(words, "unigram", wanted + 1, seed_sentencepiece_size=seeds, character_coverage=covered)
    *head, mask = families.SPECIALS.values()
    pieces = [*((name, 0.0) for name in head), *learnt[:wanted], (mask, 0.0)]
    return families.unigram(pieces, families.SPECIALS, normalizer=normalizer)


def learn_pieces(
    words: Sequence[tuple[str, int]], model: str, size: int, longest: int = LONGEST, **options: Any
) -> list[tuple[str, float]]:
    """(piece, score) of the at most `size` pieces that sentencepiece learns from counted words.

    Args:
      words: (word, count), the most frequent first.
      longest: characters of the longest piece.
      options: others of sentencepiece's trainer.
    """
    import sentencepiece

    repeated = [item for item in words if item[1] > 1]
    # Words seen once are mostly noise, but a small corpus has too few others, and clauses without spaces are its text.
    enough = len(repeated) >= size and 2 * sum(n for _, n in repeated) >= sum(n for _, n in words)
    table = (repeated if enough else words)[:_COUNTED_WORDS]
    # The library writes each word out as often as it is counted, 16 bytes a character, to find Unigram's first pieces.
    spelled = sum(len(word) * count for word, count in table)
    if model == "unigram" and spelled > _SPELLED:
        table = [(word, fewer) for word, count in table if (fewer := round(count * _SPELLED / spelled))]
    trained = io.BytesIO()
    with scratch_directory() as directory:
        path = directory / "words.tsv"
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{word}\t{count}\n" for word, count in table if SPACE_MARK not in word)
        settings = {
            "input": str(path),
            "input_format": "tsv",
            "model_writer": trained,
            "model_type": model,
            "vocab_size": size,
            "hard_vocab_limit": False,
            "character_coverage": 1.0,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_by_unicode_script": False,
            "split_by_number": False,
            "max_sentencepiece_length": longest,
            "bos_id": -1,
            "eos_id": -1,
            "num_threads": 1,
            "minloglevel": 2,
        }
        try:
            sentencepiece.SentencePieceTrainer.train(**settings | options)
        except RuntimeError as error:  # 'INTERNAL: FILE(LINE) [CONDITION] Vocabulary size is smaller than ...'
            reason = str(error).rpartition("] ")[2].partition(" Increase")[0]
            raise ValueError(f"no vocabulary of {size} entries can be learnt: {reason} Raise --vocab_size") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    return [
        (processor.id_to_piece(i), processor.get_score(i))
        for i in range(processor.get_piece_size())
        if not (processor.is_unknown(i) or processor.is_control(i))
    ]
