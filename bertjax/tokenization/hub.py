"""Any tokenizer.json, run by the `tokenizers` library behind the interface of tokenizer.py.

In: the content of a tokenizer.json (read and checked in description.py). Out: ids, tokens, offsets,
the special ids. Used where a file asks for more than BERT's own rules: added tokens, other
normalizers, pre-tokenizers or prefixes, BPE, Unigram, WordLevel. BERT's rules themselves stay with
wordpiece.py, which follows the original where `tokenizers` does not.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.tokenization.parts import SPACE_MARK, TextCutter, pre_tokenizers
from bertjax.tokenization.tokenizer import BoundedCache, Layout, Offsets, Tokenizer

if TYPE_CHECKING:
    import tokenizers

# Builders and loaders have processes of their own; threads below them would only compete, and the
# library warns of every fork after it has used some.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_HIDDEN = "\ufdd0"  # no character of any text
_CACHED_WORDS = 1 << 18  # entries of a generation, of some 150 bytes each
_TOGETHER = 4096  # texts that the library is given at a time; bounds memory
_SURROGATE = re.compile("[\ud800-\udfff]")
# How a vocabulary marks that a piece begins a word, by the pre-tokenizer that writes the mark.
_WORD_MARKS = {"ByteLevel": "\u0120", "Metaspace": SPACE_MARK}


class HubTokenizer(Tokenizer):
    """Tokenizer over the content of a tokenizer.json.

    Args:
      content: the JSON object.
      special_tokens: {name of SPECIAL_NAMES: piece}.
      source: the file, for errors.
      layout: the special tokens around texts, as the post-processor has them.

    Raises:
      ValueError: the library refuses the content, or its ids are not those in the file.
    """

    VOCABULARY_FILE = "tokenizer.json"

    def __init__(
        self, content: dict[str, Any], special_tokens: dict[str, str], source: str, layout: Layout | None = None
    ) -> None:
        self._file, self._source = content, source
        special = set(special_tokens.values())
        # The library can leave special tokens in a text unrecognised, as the interface wants it,
        # but not some of them: here only BERT's five are special.
        added = [{**entry, "special": entry["content"] in special} for entry in content["added_tokens"]]
        self._given = {**content, "added_tokens": added}
        self._special = special
        self._text = parse(_without_special(self._given, special), source)
        self._text.encode_special_tokens = True
        ids = {piece.removeprefix(_HIDDEN): i for piece, i in self._text.get_vocab(with_added_tokens=True).items()}
        moved = [
            f"{entry['content']!r} has the id {entry['id']} in the file, {ids.get(entry['content'])} in the library"
            for entry in added
            if ids.get(entry["content"]) != entry["id"]
        ]
        if moved:
            raise ValueError(f"{source}: {len(moved)} added tokens get other ids: {moved[0]}")
        vocab = sorted(ids, key=ids.get)
        if [ids[piece] for piece in vocab] != list(range(len(vocab))):
            raise ValueError(f"{source}: ids are not 0 to {len(vocab) - 1}, each once")
        super().__init__(vocab, special_tokens, layout)
        for entry in content["added_tokens"]:
            self._is_text[entry["id"]] &= not entry["special"]
        if any(step["type"] == "ByteLevel" and not step["add_prefix_space"] for step in pre_tokenizers(content)):
            self.word_prefix = " "
        self._parts_of = TextCutter.of(self._given)
        self._cache = BoundedCache(lambda part: self._pack([part])[0], _CACHED_WORDS)
        rules = self._text.normalizer
        with named_errors(source):
            self.do_lower_case = rules is not None and rules.normalize_str("ABC") == rules.normalize_str("abc")

    def __reduce__(self) -> tuple:
        made_of = (self._file, self.special_tokens, self._source, self.layout)
        return HubTokenizer, made_of, {"model_max_length": self.model_max_length}

    def readable(self, token_id: int) -> str:
        piece = self.id_to_token(token_id)
        if self._word_mark() != _WORD_MARKS["ByteLevel"] or not self._is_text[token_id]:
            return piece
        text = self.decode([token_id])
        # Part of a character is not text, and a blank at the start would not be seen.
        return piece if "\ufffd" in text else text.replace(" ", _WORD_MARKS["ByteLevel"])

    @property
    def is_continuation(self) -> np.ndarray | None:
        """bool [V]: pieces of text that continue a word; None where the pieces do not tell."""
        model = self._file["model"]
        if prefix := model.get("continuing_subword_prefix"):
            continues = [piece.startswith(prefix) for piece in self.vocab]
        elif mark := self._word_mark():
            continues = [not piece.startswith(mark) for piece in self.vocab]
            for entry in self._file["added_tokens"]:
                continues[entry["id"]] = False
        else:
            return None
        return np.array(continues, bool) & self._is_text

    def extended(self, pieces: Sequence[str]) -> "HubTokenizer":
        """The pieces become added tokens, found as whole words before anything else; where pieces begin
        with the space before them, they take it."""
        flags = {"single_word": True, "lstrip": self._word_mark() is not None, "rstrip": False}
        flags |= {"normalized": True, "special": False}
        added = [{"id": i, "content": piece, **flags} for i, piece in enumerate(pieces, self.vocab_size)]
        content = {**self._file, "added_tokens": [*self._file["added_tokens"], *added]}
        larger = HubTokenizer(content, self.special_tokens, self._source, self.layout)
        larger.model_max_length = self.model_max_length
        return larger

    def _word_mark(self) -> str | None:
        """What the first piece of a word starts with."""
        marks = [_WORD_MARKS[step["type"]] for step in pre_tokenizers(self._file) if step["type"] in _WORD_MARKS]
        if not marks and SPACE_MARK in json.dumps(self._file["normalizer"], ensure_ascii=False):
            marks = [SPACE_MARK]  # written in place of blanks
        return marks[0] if marks else None

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over what the library is given and the names of the special tokens."""
        content = json.dumps(
            [self._given | dict.fromkeys(("truncation", "padding", "decoder")), self.special_tokens], sort_keys=True
        )
        return hashlib.sha256(content.encode()).hexdigest()

    @functools.cached_property
    def _with_special(self) -> "tokenizers.Tokenizer":
        """The library's tokenizer that recognises the special tokens in a text."""
        return parse(self._given, self._source)

    def _encoding(self, text: str, keep_special_tokens: bool) -> "tokenizers.Encoding":
        library = self._with_special if keep_special_tokens else self._text
        with named_errors(self._source):
            return library.encode(_clean(text), add_special_tokens=False)

    def encode(self, text: str, keep_special_tokens: bool = False) -> list[int]:
        return self._encoding(text, keep_special_tokens).ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [np.frombuffer(row, np.int32).tolist() for row in self._rows(texts)]

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(texts)
        return np.frombuffer(b"".join(rows), np.int32), np.array([len(row) // 4 for row in rows], np.int64)

    def _rows(self, texts: Iterable[str]) -> list[bytes]:
        """The ids of each text as int32. Parts that are read one by one are looked up."""
        texts = [_clean(text) for text in texts]
        if self._parts_of is None:
            return self._encode_all(self._text, texts)
        parts = [self._parts_of(text) for text in texts]
        whole = [number for number, found in enumerate(parts) if found is None]
        rows = dict(zip(whole, self._encode_all(self._text, [texts[number] for number in whole]), strict=True))
        self._cache.fill(dict.fromkeys(itertools.chain.from_iterable(filter(None, parts))), self._pack)
        look_up = self._cache.__getitem__
        return [rows[i] if found is None else b"".join(map(look_up, found)) for i, found in enumerate(parts)]

    def _pack(self, parts: list[str]) -> list[bytes]:
        """The ids of parts of texts."""
        if not self._parts_of.pattern:
            return self._encode_all(self._text, parts)
        cut, words = ([part for part in parts if part.isascii() == ascii] for ascii in (True, False))
        made = dict(zip(words, self._encode_all(self._text, words), strict=True))
        made |= zip(cut, self._encode_all(self._of_parts, cut), strict=True)
        return [made[part] for part in parts]

    @functools.cached_property
    def _of_parts(self) -> "tokenizers.Tokenizer":
        """The library's tokenizer that takes each text for one part of GPT-2's pattern."""
        rule = {**pre_tokenizers(self._given)[0], "add_prefix_space": False, "use_regex": False}
        library = parse(_without_special({**self._given, "pre_tokenizer": rule}, self._special), self._source)
        library.encode_special_tokens = True
        return library

    def _encode_all(self, library: "tokenizers.Tokenizer", texts: list[str]) -> list[bytes]:
        rows: list[bytes] = []
        with named_errors(self._source):
            for begin in range(0, len(texts), _TOGETHER):
                found = library.encode_batch_fast(texts[begin : begin + _TOGETHER], add_special_tokens=False)
                rows += [array("i", encoding.ids).tobytes() for encoding in found]
        return rows

    def encode_with_offsets(self, text: str, keep_special_tokens: bool = False) -> tuple[list[int], Offsets]:
        found = self._encoding(text, keep_special_tokens)
        return found.ids, found.offsets

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`, as the decoder in the file has it."""
        special = set(self.special_ids) - {self.unk_id} if skip_special_tokens else ()
        kept = [int(i) for i in ids if int(i) not in special]
        for i in kept:
            self.id_to_token(i)  # refuses what is out of range
        with named_errors(self._source):
            return self._with_special.decode(kept, skip_special_tokens=False)

    def _content(self) -> bytes:
        return json.dumps(self._file, ensure_ascii=False, indent=2).encode("utf-8", "surrogatepass")

    def _config(self) -> dict[str, Any]:
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}


def _without_special(content: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """The same ids, with special tokens that no text contains: some models find the pieces of their
    vocabulary in a text by themselves (`<s>` is a likely piece to Unigram)."""
    model = dict(content["model"])

    def hidden(piece: str) -> str:
        return f"{_HIDDEN}{piece}" if piece in special else piece

    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden(piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden(piece), *rest] for piece, *rest in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = hidden(model["unk_token"])
    if isinstance(model.get("merges"), list):
        pairs = [(pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        model["merges"] = [pair for pair, parts in pairs if not special & {*parts, "".join(parts)}]
    added = [{**entry, "content": hidden(entry["content"])} for entry in content["added_tokens"]]
    return {**content, "model": model, "added_tokens": added}


def check_content(content: dict[str, Any], source: str) -> None:
    """Raises ValueError where the library refuses the content of a tokenizer.json."""
    model = dict(content["model"])
    if isinstance(model["vocab"], dict):  # a vocabulary takes the library long
        model |= {"vocab": {}} | ({"merges": []} if "merges" in model else {})
    parse({**content, "model": model, "added_tokens": []}, source)


def parse(content: Mapping[str, Any], source: str) -> "tokenizers.Tokenizer":
    """The library's tokenizer of the content of a tokenizer.json; ValueError begins with `source`."""
    import tokenizers  # late: a vocab.txt does not need it

    with named_errors(source):
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.no_truncation()  # the caller cuts and pads, as with transformers
    library.no_padding()
    return library


@contextlib.contextmanager
def named_errors(source: str) -> Iterator[None]:
    """The library raises plain Exceptions, and BaseExceptions where its Rust code panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{source}: {error}") from None


def _clean(text: str) -> str:
    """Half a surrogate pair is not a character to the library; U+FFFD is as long."""
    return _SURROGATE.sub("\ufffd", text) if not text.isascii() else text
