"""What every tokenizer is: pieces with their ids, special tokens among them, text to ids and back.

`WordPieceTokenizer` (wordpiece.py), `HubTokenizer` (hub.py) and `SentencePieceTokenizer`
(sentencepiece.py) add how text becomes pieces. `load_tokenizer` (loading.py) finds one on disk.
"""

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax.formats.files import write_json, write_whole

SPECIAL_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
# Names by which vocabularies call them, in order of preference.
USUAL_NAMES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
CONFIG_FILE = "tokenizer_config.json"
_CACHED_CHARS = 40  # longer texts (addresses, formulas) rarely come back
# Entries that no text brings about: BERT's (German BERT: [unused_punctuation0]), fairseq's (RoBERTa), CamemBERT's.
_UNUSED = re.compile(r"^(\[unused\w+\]|madeupword\d{4}|</?(s|unk)>NOTUSED)$")

Offsets = list[tuple[int, int]]
Span = tuple[int, int, int]  # id of a token, first and end of its code points


class Layout(NamedTuple):
    """Ids of the special tokens around texts: `prefix A suffix`, `prefix A middle B suffix`.

    B and the suffix after it belong to segment `second`, all else to segment 0.
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    second: int

    @classmethod
    def bert(cls, cls_id: int, sep_id: int) -> "Layout":
        """`[CLS] A [SEP] B [SEP]` with segments 0 and 1."""
        return cls((cls_id,), (sep_id,), (sep_id,), 1)

    def count(self, pair: bool) -> int:
        """Special tokens of one text or of a pair."""
        return len(self.prefix) + len(self.middle) * pair + len(self.suffix)

    def join(self, a: Sequence[int], b: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids, segments) int32 of one text or of a pair; an empty B stays a segment."""
        parts = (self.prefix, a, self.suffix) if b is None else (self.prefix, a, self.middle, b, self.suffix)
        ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
        types = np.zeros(len(ids), np.int32)
        if b is not None:
            types[len(ids) - len(b) - len(self.suffix) :] = self.second
        return ids, types


class Tokenizer(abc.ABC):
    """The interface of the tokenizers, and what they share.

    Attributes:
      vocab: `vocab[i]` is the piece of id i.
      special_tokens: {name of SPECIAL_NAMES: piece}.
      special_ids: their ids, in that order; also pad_id, unk_id, cls_id, sep_id and mask_id.
      layout: the special tokens around texts.
      word_prefix: what a word or sentence that stands alone needs in front to be read as in the middle
        of a text: a blank where pieces hold the blank before them (RoBERTa), nothing elsewhere.
      do_lower_case: whether text is lower-cased.
      model_max_length: the longest input of the model in tokens, where its files say so.

    Raises:
      ValueError: special tokens that `vocab` lacks (all listed).
    """

    VOCABULARY_FILE: str  # what `save` calls the vocabulary
    do_lower_case: bool
    model_max_length: int | None = None
    word_prefix: str = ""

    def __init__(self, vocab: Sequence[str], special_tokens: dict[str, str], layout: Layout | None = None) -> None:
        self.vocab = tuple(vocab)
        self.special_tokens = special_tokens
        self._ids = {piece: i for i, piece in enumerate(self.vocab)}
        check_special_tokens(self._ids, special_tokens, "the vocabulary")
        self.special_ids: tuple[int, ...] = tuple(self._ids[special_tokens[name]] for name in SPECIAL_NAMES)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.layout = layout or Layout.bert(self.cls_id, self.sep_id)
        # The longest first: a special token may begin like another.
        longest_first = sorted(set(special_tokens.values()), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._is_text = np.ones(len(self.vocab), bool)
        self._is_text[list(self.special_ids)] = False

    # --- vocabulary -------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """V, the number of pieces."""
        return len(self.vocab)

    def token_to_id(self, token: str) -> int:
        """Id of the piece `token`, or that of the unknown token."""
        return self._ids.get(token, self.unk_id)

    def id_to_token(self, token_id: int) -> str:
        """Piece of `token_id`. Raises IndexError outside [0, V)."""
        if not 0 <= token_id < len(self.vocab):
            raise IndexError(f"token id {token_id} is outside the vocabulary of {len(self.vocab)}")
        return self.vocab[token_id]

    def readable(self, token_id: int) -> str:
        """The piece of `token_id` for human eyes: itself, but for pieces that are written as bytes."""
        return self.id_to_token(token_id)

    @property
    @abc.abstractmethod
    def is_continuation(self) -> np.ndarray | None:
        """bool [V]: pieces that continue a word; None where the pieces do not tell."""

    @property
    def replacement_ids(self) -> np.ndarray:
        """int32 [<V]: pieces of text, which may replace a masked token; no specials, no unused ones."""
        return np.array([i for i in np.flatnonzero(self._is_text) if not _UNUSED.match(self.vocab[i])], dtype=np.int32)

    def extended(self, pieces: Sequence[str]) -> "Tokenizer":
        """The same tokenizer with more pieces at the end of its vocabulary."""
        raise ValueError(f"a {self.VOCABULARY_FILE} cannot be given more pieces; save its tokenizer.json")

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hex sha256 over the vocabulary and every option: equal means equal ids for any text."""

    # --- text to ids and back ---------------------------------------------------------------

    @abc.abstractmethod
    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, without [CLS] and [SEP].

        A literal `[MASK]` in the text is ordinary text, as in the original; with
        `keep_special_tokens` the names of special tokens become their ids.
        """

    @abc.abstractmethod
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of each text."""

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """All texts in one array: (ids int32 [N], lengths int64 [number of texts])."""
        rows = self.encode_batch(texts)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return np.array([i for row in rows for i in row], dtype=np.int32), lengths

    def encode_with_offsets(self, text: str, keep_special_tokens: bool = False) -> tuple[list[int], Offsets]:
        """Ids as `encode`, and for each the (start, end) of its code points in `text`."""
        ids: list[int] = []
        offsets: Offsets = []
        position = 0
        parts = self._split_at_specials(text) if keep_special_tokens else [(text, False)]
        for part, is_special in parts:
            spans = [(self._ids[part], 0, len(part))] if is_special else self._spans(part)
            for token_id, start, end in spans:
                ids.append(token_id)
                offsets.append((position + start, position + end))
            position += len(part)
        return ids, offsets

    def tokenize(self, text: str, keep_special_tokens: bool = False) -> list[str]:
        """Pieces of `text`, the unknown token for what is unknown."""
        return [self.vocab[i] for i in self.encode(text, keep_special_tokens)]

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; special tokens by name, unless they are skipped."""

    def _spans(self, text: str) -> Iterable[Span]:
        """The tokens of `text`, in which nothing is special. Abstract, but for tokenizers with an
        `encode_with_offsets` of their own (HubTokenizer), which need none."""
        raise NotImplementedError

    def _split_at_specials(self, text: str) -> Iterator[tuple[str, bool]]:
        """(part, whether it is a special token), in order; the parts joined are `text`."""
        done = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > done:
                yield text[done : match.start()], False
            yield match.group(), True
            done = match.end()
        if done < len(text):
            yield text[done:], False

    # --- files ------------------------------------------------------------------------------

    def save(self, directory: str | Path, max_length: int | None = None, segments: bool = True) -> None:
        """Writes the vocabulary and tokenizer_config.json in Hugging Face's layout.

        `load_tokenizer` reads all options back; so does `transformers.AutoTokenizer`, but for
        sentencepiece models.

        Args:
          max_length: positions of the model beside it; stored as model_max_length, by which
            transformers truncates, unless the tokenizer's own is shorter.
          segments: whether that model tells segments apart; one that does not may take no token_type_ids, which
            transformers makes unless it is told not to.
        """
        directory = Path(directory)
        lengths = [length for length in (self.model_max_length, max_length) if length is not None]
        config = self._config() | ({"model_max_length": min(lengths)} if lengths else {})
        config |= {} if segments else {"model_input_names": ["input_ids", "attention_mask"]}
        # The vocabulary last: without it there is no tokenizer, without the casing a guess at one.
        write_json(directory / CONFIG_FILE, config, indent=2, ensure_ascii=False)
        write_whole(directory / self.VOCABULARY_FILE, self._content())

    @abc.abstractmethod
    def _content(self) -> bytes:
        """The file of the vocabulary."""

    @abc.abstractmethod
    def _config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""


class BoundedCache(dict):
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
        self._keep(key, packed)
        return packed

    def fill(self, keys: Iterable[Any], compute: Callable[[list[Any]], list[Any]]) -> None:
        """Makes what is missing of the keys together, but for those that are not kept."""
        missing = [key for key in keys if key not in self and key not in self._old and len(key) <= _CACHED_CHARS]
        for key, packed in zip(missing, compute(missing), strict=True):
            self._keep(key, packed)

    def _keep(self, key: Any, packed: Any) -> None:
        if len(self) >= self._limit:
            self._old = dict(self)
            self.clear()
        self[key] = packed


def encode_words(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Ids of each word, as in the middle of a text."""
    return tokenizer.encode_batch([tokenizer.word_prefix + word for word in words])


def check_special_tokens(ids: Mapping[str, int], special_tokens: Mapping[str, str], source: str) -> None:
    """Raises ValueError that lists all special tokens that a vocabulary lacks."""
    missing = [f"{name}={token!r}" for name, token in special_tokens.items() if token not in ids]
    if missing:
        raise ValueError(
            f"{source} ({len(ids)} entries) lacks the special tokens {', '.join(missing)}; add them, or give the names "
            f"it uses instead (for example unk_token='<unk>'; beside the vocabulary they are keys of {CONFIG_FILE})"
        )
