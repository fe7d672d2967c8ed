"""WordPiece exactly as the original BERT: text -> ids, with offsets, and ids -> text.

In: str. Out: token ids (lists, or one int32 array for a whole batch), tokens, offsets. Follows
`FullTokenizer` of google-research/bert `tokenization.py`: basic tokenization (normalization.py),
then greedy longest match, at most 200 characters a word unless the files say otherwise. Bounded
caches (chunk -> ids, word -> ids) carry the speed: most of a text is a dictionary look-up a chunk,
made in C. For whole batches `encode_flat` is three times faster still: see ascii_words.py.
"""

import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.tokenization.normalization import BertNormalizer, chunk_spans, split_chunks
from bertjax.tokenization.tokenizer import SPECIAL_NAMES, BoundedCache, Span, Tokenizer

MAX_WORD_CHARS = 200
# Entries of a generation, of some 180 bytes each: under 200 MB when all are full.
_CACHED_CHUNKS = 1 << 18
_CACHED_WORDS = 1 << 17
_CACHED_ALIGNED = 1 << 15  # of some 500 bytes
_PARTED = tuple((mark, f" {mark} ") for mark in ',.")(-')
_ID = "i"  # array type code: int32, in the caches and in what leaves this module


class WordPieceTokenizer(Tokenizer):
    """The original BERT tokenizer over a list of pieces (`vocab[i]` is the piece of id i).

    Args:
      vocab: the lines of vocab.txt in order; a piece that continues a word starts with `##`.
      do_lower_case: lower-case the text (an "uncased" vocabulary).
      strip_accents: drop combining marks; None follows `do_lower_case`, as the original.
      tokenize_chinese_chars: isolate CJK ideographs.
      max_word_chars: a longer word is unknown; 200 in the original.
      pad_token ... mask_token: names of the special tokens in `vocab`; ids come from the file.

    Raises:
      ValueError: duplicate or empty entries, or special tokens that `vocab` lacks (all listed).
    """

    VOCABULARY_FILE = "vocab.txt"

    def __init__(
        self,
        vocab: Sequence[str],
        do_lower_case: bool,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        *,
        max_word_chars: int = MAX_WORD_CHARS,
        pad_token: str = "[PAD]",
        unk_token: str = "[UNK]",
        cls_token: str = "[CLS]",
        sep_token: str = "[SEP]",
        mask_token: str = "[MASK]",
    ) -> None:
        refuse_repeated(vocab, "the vocabulary")
        super().__init__(
            vocab, dict(zip(SPECIAL_NAMES, (pad_token, unk_token, cls_token, sep_token, mask_token), strict=True))
        )
        self.do_lower_case = bool(do_lower_case)
        self.strip_accents = strip_accents
        self.tokenize_chinese_chars = bool(tokenize_chinese_chars)
        self.max_word_chars = max_word_chars

        self.normalizer = BertNormalizer(self.do_lower_case, self.strip_accents, self.tokenize_chinese_chars)
        self._inside = {p[2:]: i for p, i in self._ids.items() if p.startswith("##")}
        self._longest = max((len(piece) for piece in self.vocab), default=0)
        self._words = BoundedCache(self._pack_word, _CACHED_WORDS)
        self._chunks = BoundedCache(self._pack_chunk, _CACHED_CHUNKS)
        self._mixed = BoundedCache(lambda chunk: self._packed(chunk.decode("utf-8", "surrogatepass")), _CACHED_WORDS)
        self._aligned = BoundedCache(self._align_chunk, _CACHED_ALIGNED)
        self._ascii = None  # tables of ascii_words.py, made when first needed

    def __reduce__(self) -> tuple:
        """Pickles what it was made of, so that a worker process starts with empty caches."""
        made = functools.partial(WordPieceTokenizer, self.vocab, **self._options())
        return made, (), {"model_max_length": self.model_max_length}

    def extended(self, pieces: Sequence[str]) -> "WordPieceTokenizer":
        larger = WordPieceTokenizer((*self.vocab, *pieces), **self._options())
        larger.model_max_length = self.model_max_length
        return larger

    def _options(self) -> dict[str, Any]:
        options = {
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.tokenize_chinese_chars,
            **self.special_tokens,
        }
        if self.max_word_chars != MAX_WORD_CHARS:  # the usual one was no option when stores were first built
            options["max_word_chars"] = self.max_word_chars
        return options

    @property
    def is_continuation(self) -> np.ndarray:
        """bool [V]: pieces that continue a word."""
        return np.array([piece.startswith("##") for piece in self.vocab], dtype=bool)

    @property
    def fingerprint(self) -> str:
        content = json.dumps([list(self.vocab), self._options()], ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        if keep_special_tokens:
            return [
                i
                for part, is_special in self._split_at_specials(text)
                for i in ([self._ids[part]] if is_special else self.encode(part))
            ]
        return memoryview(self._packed(text)).cast(_ID).tolist()

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        packed = self._packed
        return [memoryview(packed(text)).cast(_ID).tolist() for text in texts]

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """The fastest way into a token store: words of ASCII are found by compiled code."""
        from bertjax.tokenization import ascii_words  # late: numba takes a second to import, and only corpora need it

        texts = list(texts)
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        if sum(map(len, parts)) > 1.4 * sum(map(len, texts)):  # another script: few ASCII words
            rows = [self._packed(text) for text in texts]
            lengths = np.array([len(row) for row in rows], np.int64) // array(_ID).itemsize
            return np.frombuffer(b"".join(rows), np.int32), lengths
        if self._ascii is None:
            self._ascii = ascii_words.ascii_vocabulary(
                self._ids, self._inside, self.unk_id, self.do_lower_case, self.max_word_chars
            )
        content = b"".join(parts)
        ids = np.empty(len(content), np.int32)
        lengths = np.empty(len(parts), np.int64)
        gaps = np.empty((len(content) // 2 + 1, 2), np.int64)
        count, num_gaps = ascii_words.encode(
            self._ascii,
            np.frombuffer(content, np.uint8),
            np.cumsum([len(part) for part in parts], dtype=np.int64),
            ids,
            lengths,
            gaps,
        )
        mixed = self._mixed
        chunks = [mixed[content[start:end]] for start, end in gaps[:num_gaps].tolist()]
        ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64) // array(_ID).itemsize
        filling = np.frombuffer(b"".join(chunks), np.int32)
        out = np.empty(count - num_gaps + len(filling), np.int32)
        ascii_words.fill_gaps(ids, lengths, filling, ends, out)
        return out, lengths

    def _spans(self, text: str) -> Iterator[Span]:
        """Removed characters (accents, controls) at the edge of a token are left outside."""
        aligned = self._aligned
        for start, chunk in chunk_spans(text):
            for token_id, first, end in aligned[chunk]:
                yield token_id, start + first, start + end

    def _packed(self, text: str) -> bytes:
        # Punctuation stands alone in the end; parting it from its words here makes for half as
        # many distinct chunks. Not with a capital sigma: its lower case looks past a full stop.
        if "\u03a3" not in text:
            for mark, apart in _PARTED:
                if mark in text:
                    text = text.replace(mark, apart)
        return b"".join(map(self._chunks.__getitem__, split_chunks(text)))

    def _pack_chunk(self, chunk: str) -> bytes:
        return b"".join(map(self._words.__getitem__, self.normalizer.words(chunk)))

    def _align_chunk(self, chunk: str) -> tuple[Span, ...]:
        """(id, first, end) of each token, in code points of the chunk."""
        return tuple(
            (token_id, origin[first], origin[last - 1] + 1)
            for word, origin in self.normalizer.aligned_words(chunk)
            for token_id, first, last in self._match(word)
        )

    def _pack_word(self, word: str) -> bytes:
        return array(_ID, [token_id for token_id, _, _ in self._match(word)]).tobytes()

    def _match(self, word: str) -> list[Span]:
        """Greedy longest match of a normalised word: [(id, first, end) in characters of `word`]."""
        length = len(word)
        if length > self.max_word_chars:
            return [(self.unk_id, 0, length)]
        pieces: list[Span] = []
        known = self._ids
        start = 0
        while start < length:
            for end in range(min(length, start + self._longest), start, -1):
                token_id = known.get(word[start:end])
                if token_id is not None:
                    break
            else:
                return [(self.unk_id, 0, length)]
            pieces.append((token_id, start, end))
            start = end
            known = self._inside
        return pieces

    def count_use(self, words: Iterable[tuple[str, int]]) -> np.ndarray:
        """int64 [V]: how often each piece is used in normalised words with these counts."""
        used = [0] * len(self.vocab)
        for word, count in words:
            for token_id, _, _ in self._match(word):
                used[token_id] += count
        return np.array(used, dtype=np.int64)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`: pieces joined by spaces, continuations glued on. Case stays as encoded."""
        special = set(self.special_ids) if skip_special_tokens else ()
        words: list[str] = []
        for token_id in map(int, ids):
            if token_id in special:
                continue
            piece = self.id_to_token(token_id)
            if piece.startswith("##") and words:
                words[-1] += piece[2:]
            else:
                words.append(piece)
        return " ".join(words)

    def _content(self) -> bytes:
        return ("\n".join(self.vocab) + "\n").encode()

    def _config(self) -> dict[str, Any]:
        options = self._options()
        if limit := options.pop("max_word_chars", None):
            options["max_input_chars_per_word"] = limit
        return {"tokenizer_class": "BertTokenizer", **options}


def refuse_repeated(vocab: Sequence[str], source: object) -> None:
    """Raises ValueError for lines of a vocabulary that are empty or that another line repeats."""
    seen: dict[str, int] = {}
    for line, piece in enumerate(vocab, 1):
        if not piece:
            raise ValueError(f"{source}, line {line} is empty; every line must hold one piece")
        if seen.setdefault(piece, line) != line:
            raise ValueError(
                f"{source}, line {line} repeats {piece!r} of line {seen[piece]}; a vocabulary lists each piece once. "
                f"Rename one of them (say to [unused{len(vocab)}]): without its line all ids after it would move"
            )
