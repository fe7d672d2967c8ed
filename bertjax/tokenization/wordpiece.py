"""WordPiece exactly as the original BERT: text -> ids, with offsets, and ids -> text.

In: str. Out: token ids (lists, or one int32 array for a whole batch), tokens, offsets. Follows
`FullTokenizer` of google-research/bert `tokenization.py`: basic tokenization (normalization.py),
then greedy longest match, at most 200 characters a word. Bounded caches (chunk -> ids, word ->
ids) carry the speed: most of a text is a dictionary look-up a chunk, made in C. For whole batches
`encode_flat` is three times faster still: see ascii_words.py.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.tokenization.normalization import BertNormalizer, chunk_spans, split_chunks

MAX_WORD_CHARS = 200
SPECIAL_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
# Entries of a generation, of some 180 bytes each: under 200 MB when all are full.
_CACHED_CHUNKS = 1 << 18
_CACHED_WORDS = 1 << 17
_CACHED_ALIGNED = 1 << 15  # of some 500 bytes
_CACHED_CHARS = 40  # longer chunks (addresses, formulas) rarely come back
unused_pattern = re.compile(r"^\[unused\d+\]$")
_PARTED = tuple((mark, f" {mark} ") for mark in ',.")(-')
_ID = "i"  # array type code: int32, in the caches and in what leaves this module

Offsets = list[tuple[int, int]]


class _BoundedCache(dict):
    """Text or its UTF-8 -> its ids in some form, made when missing, in at most `2 * limit` entries.

    Two generations: when this one is full it becomes the old one, and an old entry that is asked
    for again comes back. So common words never leave, at no cost for a hit.
    """

    def __init__(self, compute: Callable[[Any], Any], limit: int) -> None:
        super().__init__()
        self._compute = compute
        self._limit = limit
        self._old: dict[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        packed = self._old.get(key)
        if packed is None:
            packed = self._compute(key)
            if len(key) > _CACHED_CHARS:
                return packed
        if len(self) >= self._limit:
            self._old = dict(self)
            self.clear()
        self[key] = packed
        return packed


class WordPieceTokenizer:
    """The original BERT tokenizer over a list of pieces (`vocab[i]` is the piece of id i).

    Args:
      vocab: the lines of vocab.txt in order; a piece that continues a word starts with `##`.
      do_lower_case: lower-case the text (an "uncased" vocabulary).
      strip_accents: drop combining marks; None follows `do_lower_case`, as the original.
      tokenize_chinese_chars: isolate CJK ideographs.
      pad_token ... mask_token: names of the special tokens in `vocab`; ids come from the file.

    Raises:
      ValueError: duplicate or empty entries, or special tokens that `vocab` lacks (all listed).
    """

    def __init__(
        self,
        vocab: Sequence[str],
        do_lower_case: bool,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        *,
        pad_token: str = "[PAD]",
        unk_token: str = "[UNK]",
        cls_token: str = "[CLS]",
        sep_token: str = "[SEP]",
        mask_token: str = "[MASK]",
    ) -> None:
        self.vocab = tuple(vocab)
        self.do_lower_case = bool(do_lower_case)
        self.strip_accents = strip_accents
        self.tokenize_chinese_chars = bool(tokenize_chinese_chars)
        self.special_tokens = dict(zip(
            SPECIAL_NAMES, (pad_token, unk_token, cls_token, sep_token, mask_token), strict=True))
        self._ids = _index_vocab(self.vocab)
        special = require_special_tokens(self._ids, self.special_tokens, "the vocabulary")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
        self.special_ids: tuple[int, ...] = special
        self._special_pattern = special_pattern(self.special_tokens.values())

        self.normalizer = BertNormalizer(
            self.do_lower_case, self.strip_accents, self.tokenize_chinese_chars)
        self._start = {p: i for i, p in enumerate(self.vocab)}
        self._inside = {p[2:]: i for i, p in enumerate(self.vocab) if p.startswith("##")}
        self._longest = max((len(piece) for piece in self.vocab), default=0)
        self._words = _BoundedCache(self._pack_word, _CACHED_WORDS)
        self._chunks = _BoundedCache(self._pack_chunk, _CACHED_CHUNKS)
        self._mixed = _BoundedCache(
            lambda chunk: self._packed(chunk.decode("utf-8", "surrogatepass")), _CACHED_WORDS)
        self._aligned = _BoundedCache(self._align_chunk, _CACHED_ALIGNED)
        self._ascii = None  # tables of ascii_words.py, made when first needed

    def __reduce__(self) -> tuple:
        """Pickles what it was made of, so that a worker process starts with empty caches."""
        return _rebuild, (self.vocab, self._options())

    def _options(self) -> dict:
        return {
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.tokenize_chinese_chars,
            **self.special_tokens,
        }

    # --- vocabulary -------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """V, the number of entries."""
        return len(self.vocab)

    def token_to_id(self, token: str) -> int:
        """Id of `token`, or that of the unknown token."""
        return self._ids.get(token, self.unk_id)

    def id_to_token(self, token_id: int) -> str:
        """Piece of `token_id`. Raises IndexError outside [0, V)."""
        if not 0 <= token_id < len(self.vocab):
            raise IndexError(f"token id {token_id} is outside the vocabulary of {len(self.vocab)}")
        return self.vocab[token_id]

    @property
    def is_continuation(self) -> np.ndarray:
        """bool [V]: pieces that continue a word."""
        return np.array([piece.startswith("##") for piece in self.vocab], dtype=bool)

    @property
    def replacement_ids(self) -> np.ndarray:
        """int32 [<V]: ids that may replace a masked token, all but specials and `[unusedN]`."""
        special = set(self.special_ids)
        return np.array([i for i, piece in enumerate(self.vocab)
                         if i not in special and not unused_pattern.match(piece)], dtype=np.int32)

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over the vocabulary and every option: equal means equal ids for any text."""
        content = json.dumps([list(self.vocab), self._options()], ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    # --- text to ids ------------------------------------------------------------------------

    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, without [CLS] and [SEP].

        A literal `[MASK]` in the text is three tokens, as in the original; with
        `keep_special_tokens` the names of special tokens become their ids.
        """
        if keep_special_tokens:
            return [i for part, is_special in split_at_specials(self._special_pattern, text)
                    for i in ([self._ids[part]] if is_special else self.encode(part))]
        return memoryview(self._packed(text)).cast(_ID).tolist()

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of each text."""
        packed = self._packed
        return [memoryview(packed(text)).cast(_ID).tolist() for text in texts]

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """All texts in one array: (ids int32 [N], lengths int64 [number of texts]).

        The fastest way into a token store: words of ASCII are found by compiled code.
        """
        from bertjax.tokenization import ascii_words

        texts = list(texts)
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        if sum(map(len, parts)) > 1.4 * sum(map(len, texts)):  # another script: few ASCII words
            rows = [self._packed(text) for text in texts]
            lengths = np.array([len(row) for row in rows], np.int64) // array(_ID).itemsize
            return np.frombuffer(b"".join(rows), np.int32), lengths
        if self._ascii is None:
            self._ascii = ascii_words.ascii_vocabulary(
                self._start, self._inside, self.unk_id, self.do_lower_case, MAX_WORD_CHARS)
        content = b"".join(parts)
        ids = np.empty(len(content), np.int32)
        lengths = np.empty(len(parts), np.int64)
        gaps = np.empty((len(content) // 2 + 1, 2), np.int64)
        count, num_gaps = ascii_words.encode(
            self._ascii, np.frombuffer(content, np.uint8),
            np.cumsum([len(part) for part in parts], dtype=np.int64), ids, lengths, gaps)
        mixed = self._mixed
        chunks = [mixed[content[start:end]] for start, end in gaps[:num_gaps].tolist()]
        ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64) // array(_ID).itemsize
        filling = np.frombuffer(b"".join(chunks), np.int32)
        out = np.empty(count - num_gaps + len(filling), np.int32)
        ascii_words.fill_gaps(ids, lengths, filling, ends, out)
        return out, lengths

    def encode_with_offsets(
        self, text: str, keep_special_tokens: bool = False
    ) -> tuple[list[int], Offsets]:
        """Ids as `encode`, and for each the (start, end) of its code points in `text`.

        Removed characters (accents, control characters) at the edge of a token are left outside.
        """
        ids: list[int] = []
        offsets: Offsets = []
        parts = (split_at_specials(self._special_pattern, text) if keep_special_tokens
                 else [(text, False)])
        position, aligned = 0, self._aligned
        for part, is_special in parts:
            if is_special:
                ids.append(self._ids[part])
                offsets.append((position, position + len(part)))
            else:
                for chunk_start, chunk in chunk_spans(part):
                    base = position + chunk_start
                    for token_id, first, end in aligned[chunk]:
                        ids.append(token_id)
                        offsets.append((base + first, base + end))
            position += len(part)
        return ids, offsets

    def tokenize(self, text: str, keep_special_tokens: bool = False) -> list[str]:
        """Tokens of `text` (what the original's `FullTokenizer.tokenize` returns)."""
        return [self.vocab[i] for i in self.encode(text, keep_special_tokens)]

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

    def _align_chunk(self, chunk: str) -> tuple[tuple[int, int, int], ...]:
        """(id, first, end) of each token, in code points of the chunk."""
        return tuple(
            (token_id, origin[first], origin[last - 1] + 1)
            for word, origin in self.normalizer.aligned_words(chunk)
            for token_id, first, last in self._match(word)
        )

    def _pack_word(self, word: str) -> bytes:
        return array(_ID, [token_id for token_id, _, _ in self._match(word)]).tobytes()

    def _match(self, word: str) -> list[tuple[int, int, int]]:
        """Greedy longest match of a normalised word: [(id, first, end) in characters of `word`]."""
        length = len(word)
        if length > MAX_WORD_CHARS:
            return [(self.unk_id, 0, length)]
        pieces: list[tuple[int, int, int]] = []
        known = self._start
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

    # --- ids to text ------------------------------------------------------------------------

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

    # --- files ------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Writes vocab.txt and tokenizer_config.json in Hugging Face's layout.

        `transformers.AutoTokenizer` reads the directory; `load_tokenizer` reads all options back.
        """
        directory = Path(directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "vocab.txt").write_bytes(("\n".join(self.vocab) + "\n").encode())
        config = {"tokenizer_class": "BertTokenizer", **self._options()}
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rebuild(vocab: tuple[str, ...], options: dict) -> WordPieceTokenizer:
    return WordPieceTokenizer(vocab, **options)


def _index_vocab(vocab: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, piece in enumerate(vocab):
        if not piece:
            raise ValueError(f"vocabulary line {i + 1} is empty; every line must hold one piece")
        if piece in ids:
            raise ValueError(
                f"vocabulary line {i + 1} repeats {piece!r} of line {ids[piece] + 1}; remove one "
                "(removing a line moves all ids after it: check that the file fits its checkpoint)")
        ids[piece] = i
    return ids


def require_special_tokens(
    ids: dict[str, int], special_tokens: dict[str, str], what: str
) -> tuple[int, ...]:
    """Ids of the special tokens, or a ValueError that lists every missing one."""
    missing = [f"{name}={token!r}" for name, token in special_tokens.items() if token not in ids]
    if missing:
        raise ValueError(
            f"{what} ({len(ids)} entries) lacks the special tokens {', '.join(missing)}; add them, "
            "or give the names it uses instead (for example unk_token='<unk>'; beside the "
            "vocabulary they are keys of tokenizer_config.json)")
    return tuple(ids[token] for token in special_tokens.values())


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `tokens` literally, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(set(tokens), key=len, reverse=True))))


def split_at_specials(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """(part, whether it is a special token), in order; the parts joined are `text`."""
    done = 0
    for match in pattern.finditer(text):
        if match.start() > done:
            yield text[done:match.start()], False
        yield match.group(), True
        done = match.end()
    if done < len(text):
        yield text[done:], False


def unknown_rate(tokenizer, texts: Iterable[str]) -> float:
    """Share of the tokens of `texts` that are unknown (0 for no tokens); compare with a limit."""
    total = unknown = 0
    for text in texts:
        ids = tokenizer.encode(text)
        total += len(ids)
        unknown += ids.count(tokenizer.unk_id)
    return unknown / total if total else 0.0
