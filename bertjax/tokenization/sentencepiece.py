"""sentencepiece models behind the interface of tokenizer.py.

In: a .model file. Out: ids, tokens, offsets, the special ids. The model brings its own text
normalisation (casing included); the special tokens are found by name among its pieces.
"""

import hashlib
import json
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2, sentencepiece_pb2

from bertjax.tokenization.families import OWN_CLASS
from bertjax.tokenization.parts import SPACE_MARK
from bertjax.tokenization.tokenizer import CONFIG_FILE, SPECIAL_NAMES, USUAL_NAMES, Span, Tokenizer

_PieceType = sentencepiece_model_pb2.ModelProto.SentencePiece.Type


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer over a sentencepiece model.

    Args:
      content: of the .model file `source`.
      special_tokens: {name of SPECIAL_NAMES: piece} where they are not the usual ones ([PAD] or <pad>,
        [CLS] or <s>, [SEP] or </s>, [MASK] or <mask>).

    Raises:
      ValueError: not a sentencepiece model, or special tokens missing (all listed).
    """

    VOCABULARY_FILE = "spiece.model"

    def __init__(self, content: bytes, source: str, special_tokens: dict[str, str]) -> None:
        model = parse_model(content, source)
        self._model, self._source = content, source
        vocab = [piece.piece for piece in model.pieces]
        unknown = next((p.piece for p in model.pieces if p.type == _PieceType.UNKNOWN), None)
        if unknown is None:
            raise ValueError(f"{source} has no unknown piece: the file is damaged")
        super().__init__(vocab, _find_specials(set(vocab), unknown, special_tokens, source))
        types = np.array([piece.type for piece in model.pieces])
        self._is_text &= np.isin(types, (_PieceType.NORMAL, _PieceType.USER_DEFINED, _PieceType.BYTE))
        # A user-defined piece is recognised inside text. Special tokens must not be: a literal
        # [SEP] in a corpus would otherwise become a separator.
        for i in self.special_ids:
            if model.pieces[i].type == _PieceType.USER_DEFINED:
                model.pieces[i].type = _PieceType.CONTROL
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
            self.do_lower_case = self._processor.normalize("ABC") == self._processor.normalize("abc")
        except Exception as error:
            raise ValueError(f"{source} is damaged: {error}") from None

    def __reduce__(self) -> tuple:
        made_of = (self._model, self._source, self.special_tokens)
        return SentencePieceTokenizer, made_of, {"model_max_length": self.model_max_length}

    @property
    def is_continuation(self) -> np.ndarray:
        """bool [V]: pieces of text that do not start with U+2581."""
        return self._is_text & ~np.array([piece.startswith(SPACE_MARK) for piece in self.vocab], dtype=bool)

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over the model and the names of the special tokens."""
        digest = hashlib.sha256(self._model)
        digest.update(json.dumps(self.special_tokens, sort_keys=True).encode())
        return digest.hexdigest()

    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        if keep_special_tokens:
            return self.encode_with_offsets(text, keep_special_tokens)[0]
        return self._processor.encode(text, out_type=int)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def _spans(self, text: str) -> list[Span]:
        """White space before a word is left outside. Where the model's normalisation makes several
        pieces of one character, the character belongs to one of them; the others are empty.
        """
        encoded = self._processor.encode(text, out_type="serialized_proto")
        # The library counts UTF-8 bytes.
        bounds = accumulate((len(char.encode("utf-8", "surrogatepass")) for char in text), initial=0)
        char_of = {byte: i for i, byte in enumerate(bounds)}
        found = []
        for piece in sentencepiece_pb2.SentencePieceText.FromString(encoded).pieces:
            start, end = char_of[piece.begin], char_of[piece.end]
            while start < end and text[start].isspace():
                start += 1
            found.append((piece.id, start, end))
        return found

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

    def _content(self) -> bytes:
        return self._model

    def _config(self) -> dict[str, Any]:
        return {"tokenizer_class": OWN_CLASS, "do_lower_case": self.do_lower_case, **self.special_tokens}


def parse_model(content: bytes, source: str) -> sentencepiece_model_pb2.ModelProto:
    """The content of a .model file."""
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except Exception as error:
        raise ValueError(f"{source} is not a sentencepiece model: {error}") from None
    if not model.pieces:
        raise ValueError(f"{source} is not a sentencepiece model: it holds no pieces")
    return model


def _find_specials(pieces: set[str], unknown: str, given: dict[str, str], source: str) -> dict[str, str]:
    """Name of each special token in the model."""
    if given.get("unk_token", unknown) != unknown:
        raise ValueError(f"{source}: unk_token={given['unk_token']!r}, but the model's unknown piece is {unknown!r}")
    names = {name: (given[name],) if name in given else usual for name, usual in USUAL_NAMES.items()}
    names["unk_token"] = (unknown,)
    found = {name: next((token for token in names[name] if token in pieces), None) for name in SPECIAL_NAMES}
    if missing := [f"{name} ({' or '.join(names[name])})" for name, token in found.items() if token is None]:
        raise ValueError(
            f"{source} lacks the special tokens {', '.join(missing)}; name the pieces it uses instead in {CONFIG_FILE} "
            "beside it (for example cls_token='<s>'), or train it with pad_id=0, pad_piece='[PAD]' and "
            "control_symbols=['[CLS]', '[SEP]', '[MASK]']"
        )
    return found
