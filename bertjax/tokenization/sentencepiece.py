"""sentencepiece models behind the same interface as WordPieceTokenizer.

In: a .model file. Out: ids, tokens, offsets, the special ids. The model brings its own text
normalisation (casing included); the special tokens are found by name among its pieces.
"""

import hashlib
import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2, sentencepiece_pb2

from bertjax.tokenization.wordpiece import (
    SPECIAL_NAMES,
    Offsets,
    special_pattern,
    split_at_specials,
    unused_pattern,
)

MODEL_FILE = "spiece.model"
SPACE = "\u2581"
# Names by which models call the special tokens, in order of preference; unk is the model's own.
_USUAL_NAMES = {
    "pad_token": ("[PAD]", "<pad>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_PieceType = sentencepiece_model_pb2.ModelProto.SentencePiece.Type


class SentencePieceTokenizer:
    """Tokenizer over a sentencepiece model.

    Args:
      model_file: the .model file.
      special_tokens: names for pad_token, cls_token, sep_token, mask_token where they are not the
        usual ones ([PAD] or <pad>, [CLS] or <s>, [SEP] or </s>, [MASK] or <mask>).

    Raises:
      ValueError: not a sentencepiece model, or special tokens missing (all listed).
    """

    def __init__(self, model_file: str | Path, **special_tokens: str) -> None:
        self._setup(Path(model_file).read_bytes(), str(model_file), special_tokens)

    def _setup(self, content: bytes, source: str, special_tokens: dict[str, str]) -> None:
        try:
            model = sentencepiece_model_pb2.ModelProto.FromString(content)
        except Exception as error:
            raise ValueError(f"{source} is not a sentencepiece model: {error}") from error
        if not model.pieces:
            raise ValueError(f"{source} is not a sentencepiece model: it holds no pieces")
        self._content = content
        self._source = source
        self.vocab = tuple(piece.piece for piece in model.pieces)
        types = np.array([piece.type for piece in model.pieces])
        self._ids = {piece: i for i, piece in enumerate(self.vocab)}
        unknown = next(p.piece for p in model.pieces if p.type == _PieceType.UNKNOWN)
        self.special_tokens = _find_specials(self._ids, unknown, special_tokens, source)
        self.special_ids: tuple[int, ...] = tuple(
            self._ids[self.special_tokens[name]] for name in SPECIAL_NAMES)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self._special_pattern = special_pattern(self.special_tokens.values())
        # A user-defined piece is recognised inside text. Special tokens must not be: a literal
        # [SEP] in a corpus would otherwise become a separator.
        for i in self.special_ids:
            if model.pieces[i].type == _PieceType.USER_DEFINED:
                model.pieces[i].type = _PieceType.CONTROL
        self._processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString())
        self.do_lower_case = self._processor.normalize("ABC") == self._processor.normalize("abc")
        is_text = np.isin(types, (_PieceType.NORMAL, _PieceType.USER_DEFINED, _PieceType.BYTE))
        is_text[list(self.special_ids)] = False
        self._is_text = is_text

    def __reduce__(self) -> tuple:
        return _rebuild, (self._content, self._source, self.special_tokens)

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

    @property
    def is_continuation(self) -> np.ndarray:
        """bool [V]: pieces of text that do not start with U+2581."""
        starts = np.array([piece.startswith(SPACE) for piece in self.vocab], dtype=bool)
        return self._is_text & ~starts

    @property
    def replacement_ids(self) -> np.ndarray:
        """int32 [<V]: pieces of text, those that may replace a masked token."""
        return np.array([i for i in np.flatnonzero(self._is_text)
                         if not unused_pattern.match(self.vocab[i])], dtype=np.int32)

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over the model and the names of the special tokens."""
        digest = hashlib.sha256(self._content)
        digest.update(json.dumps(self.special_tokens, sort_keys=True).encode())
        return digest.hexdigest()

    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        """Ids of `text` without special tokens; literal ones in it as WordPieceTokenizer.encode."""
        if keep_special_tokens:
            return self.encode_with_offsets(text, keep_special_tokens)[0]
        return self._processor.encode(text, out_type=int)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of each text."""
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """All texts in one array: (ids int32 [N], lengths int64 [number of texts])."""
        rows = self.encode_batch(texts)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return np.array([i for row in rows for i in row], dtype=np.int32), lengths

    def encode_with_offsets(
        self, text: str, keep_special_tokens: bool = False
    ) -> tuple[list[int], Offsets]:
        """Ids as `encode`, and for each the (start, end) of its code points in `text`.

        White space before a word is left outside. Where the model's normalisation makes several
        pieces of one character, the character belongs to one of them; the others are empty.
        """
        ids: list[int] = []
        offsets: Offsets = []
        parts = (split_at_specials(self._special_pattern, text) if keep_special_tokens
                 else [(text, False)])
        position = 0
        for part, is_special in parts:
            if is_special:
                ids.append(self._ids[part])
                offsets.append((position, position + len(part)))
            else:
                for token_id, start, end in self._aligned(part):
                    ids.append(token_id)
                    offsets.append((position + start, position + end))
            position += len(part)
        return ids, offsets

    def _aligned(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of the pieces of `text`, in code points."""
        parsed = sentencepiece_pb2.SentencePieceText.FromString(
            self._processor.encode(text, out_type="serialized_proto"))
        # The library counts UTF-8 bytes.
        bounds = [0, *accumulate(len(char.encode("utf-8", "surrogatepass")) for char in text)]
        char_of = {byte: i for i, byte in enumerate(bounds)}
        found = []
        for piece in parsed.pieces:
            start, end = char_of[piece.begin], char_of[piece.end]
            while start < end and text[start].isspace():
                start += 1
            found.append((piece.id, start, end))
        return found

    def tokenize(self, text: str, keep_special_tokens: bool = False) -> list[str]:
        """Pieces of `text`; unknown ones under the name of the unknown token."""
        return [self.vocab[i] for i in self.encode(text, keep_special_tokens)]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`, special tokens by name between spaces."""
        parts: list[str] = []
        run: list[int] = []
        special = set(self.special_ids) - {self.unk_id}
        for token_id in [*map(int, ids), None]:
            if token_id is not None and token_id not in special:
                self.id_to_token(token_id)  # refuses what is out of range
                run.append(token_id)
                continue
            if run:
                parts.append(self._processor.decode(run).strip())
                run = []
            if token_id is not None and not skip_special_tokens:
                parts.append(self.vocab[token_id])
        return " ".join(parts)

    def save(self, directory: str | Path) -> None:
        """Writes the model and tokenizer_config.json (names of the special tokens)."""
        directory = Path(directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MODEL_FILE).write_bytes(self._content)
        config = {"do_lower_case": self.do_lower_case, **self.special_tokens}
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rebuild(content: bytes, source: str, special_tokens: dict) -> SentencePieceTokenizer:
    tokenizer = SentencePieceTokenizer.__new__(SentencePieceTokenizer)
    tokenizer._setup(content, source, special_tokens)
    return tokenizer


def _find_specials(
    ids: dict[str, int], unknown: str, given: dict[str, str], source: str
) -> dict[str, str]:
    """Name of each special token in the model."""
    strange = set(given) - set(SPECIAL_NAMES)
    if strange:
        raise TypeError(f"unknown arguments {sorted(strange)}; use {', '.join(SPECIAL_NAMES)}")
    if given.get("unk_token", unknown) != unknown:
        raise ValueError(f"{source}: unk_token={given['unk_token']!r}, but the model's unknown "
                         f"piece is {unknown!r}")
    found = {"unk_token": unknown}
    missing = []
    for name, usual in _USUAL_NAMES.items():
        candidates = (given[name],) if name in given else usual
        token = next((token for token in candidates if token in ids), None)
        if token is None:
            missing.append(f"{name} ({' or '.join(candidates)})")
        else:
            found[name] = token
    if missing:
        raise ValueError(
            f"{source} lacks the special tokens {', '.join(missing)}; name the pieces it uses "
            "instead (for example cls_token='<s>'), or train it with pad_id=0, pad_piece='[PAD]' "
            "and control_symbols=['[CLS]', '[SEP]', '[MASK]']")
    return {name: found[name] for name in SPECIAL_NAMES}
