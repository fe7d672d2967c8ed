"""Finds a tokenizer on disk: directory or file -> tokenizer, with the casing stored beside it.

Reads Hugging Face's layout (vocab.txt or tokenizer.json, with tokenizer_config.json), a bare
vocab.txt, Google's checkpoint directories (vocab.txt beside bert_config.json) and sentencepiece
models. The casing comes, in this order, from tokenizer_config.json, tokenizer.json, the name of
the directory (`cased_L-12_H-768_A-12`), the argument, and last from the pieces themselves.
"""

import json
import logging
import re
from pathlib import Path

from bertjax.tokenization.tokenizer import CONFIG_FILE, SPECIAL_NAMES, Tokenizer
from bertjax.tokenization.wordpiece import WordPieceTokenizer

SPECIALS_FILE = "special_tokens_map.json"  # where old versions of transformers name the specials
_GOOGLE_NAME = re.compile(r"(?:^|_)(uncased|cased|multilingual|chinese)_L-\d+_H-\d+_A-\d+")
_CASING_WORD = re.compile(r"(?:^|[^a-z])(uncased|cased)(?:[^a-z]|$)", re.IGNORECASE)
# The share of pieces with upper-case letters that makes a vocabulary cased: about 0 in the
# original uncased one, a quarter in the cased one.
_CASED_SHARE = 0.01

log = logging.getLogger(__name__)


def load_tokenizer(
    path: str | Path, do_lower_case: bool | None = None, *, strip_accents: bool | None = None
) -> Tokenizer:
    """Loads the tokenizer at `path`: a directory, a vocab.txt or a sentencepiece .model file.

    Args:
      do_lower_case: None takes what is stored; otherwise it must agree with it.
      strip_accents: None takes what is stored (and otherwise follows the casing).

    Raises:
      FileNotFoundError: nothing to load there.
      ValueError: an argument contradicts what is stored or the name, or the vocabulary is bad.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        directory = path
        models = sorted(path.glob("*.model"))
        vocab_file = next((path / name for name in ("vocab.txt", "tokenizer.json")
                           if (path / name).is_file()), None)
        if vocab_file is None and len(models) == 1:
            vocab_file = models[0]
        if vocab_file is None:
            raise FileNotFoundError(
                f"{path} holds no tokenizer: expected vocab.txt, tokenizer.json or one "
                f"sentencepiece .model file (found {len(models)})")
    elif path.is_file():
        directory, vocab_file = path.parent, path
    else:
        raise FileNotFoundError(f"no tokenizer at {path}: neither a directory nor a file")

    stored = {**_read_json(directory / SPECIALS_FILE), **_read_json(directory / CONFIG_FILE)}
    if vocab_file.suffix == ".model":
        from bertjax.tokenization.sentencepiece import SentencePieceTokenizer  # late: protobuf

        tokenizer = SentencePieceTokenizer(vocab_file, **_special_names(stored))
        if do_lower_case not in (None, tokenizer.do_lower_case):
            raise ValueError(_contradiction(
                "do_lower_case", do_lower_case, tokenizer.do_lower_case, vocab_file))
        if strip_accents is not None:
            raise ValueError(f"strip_accents={strip_accents}: {vocab_file} brings its own "
                             "normalisation; leave the argument out")
        return tokenizer

    vocab = read_vocab(vocab_file)
    _refuse_other_tokenizations(stored, directory)
    _warn_of_added_tokens(stored, directory, len(vocab))
    options = _stored_options(stored, directory)
    for name, value in (("do_lower_case", do_lower_case), ("strip_accents", strip_accents)):
        kept = options.get(name)
        if value is not None and kept is not None and value != kept:
            raise ValueError(_contradiction(name, value, kept, options["source"]))
    named = directory if path.is_dir() else path
    casing = _resolve_casing(options.get("do_lower_case"), do_lower_case, named, directory, vocab)
    return WordPieceTokenizer(
        vocab, casing,
        strip_accents if strip_accents is not None else options.get("strip_accents"),
        options.get("tokenize_chinese_chars", True), **_special_names(stored))


def check_casing_matches_name(path: str | Path, do_lower_case: bool) -> None:
    """Raises ValueError where a checkpoint named as Google's (`cased_L-12_H-768_A-12`,
    `uncased_...`, `multilingual_...`, `chinese_...`) is used with the other casing.

    The check of the original (`validate_case_matches_checkpoint`), on a directory's name or, for a
    file or checkpoint prefix (`.../bert_model.ckpt`), also on that of the directory it is in.
    """
    for name in _names(path):
        match = _GOOGLE_NAME.search(name)
        if match and (match.group(1) != "cased") != do_lower_case:
            raise ValueError(
                f"do_lower_case={do_lower_case} contradicts the name {name!r}, which is "
                f"{'a cased' if match.group(1) == 'cased' else 'a lower-cased'} model: set "
                f"do_lower_case={not do_lower_case} so that the text is read as in its "
                "pre-training, or rename the directory if the name is wrong")


def read_vocab(path: str | Path) -> list[str]:
    """Pieces of a vocab.txt (a piece a line, UTF-8) or of a WordPiece tokenizer.json, by id."""
    path = Path(path)
    if path.suffix == ".json":
        return _vocab_of_json(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    # Only line feeds end a line. Blanks at the ends go, as in the original, unless they are the
    # piece: some vocabularies list U+2028 or U+3000, which no text brings about.
    lines = [line.strip() or line.removesuffix("\r")
             for line in text.removesuffix("\n").split("\n")]
    seen: dict[str, int] = {}
    for number, piece in enumerate(lines, start=1):
        if not piece:
            raise ValueError(f"{path}, line {number} is empty; every line must hold one piece")
        if piece in seen:
            raise ValueError(f"{path}, line {number} repeats {piece!r} of line {seen[piece]}; "
                             "a vocabulary lists each piece once. Rename one of them (say to "
                             f"[unused{len(lines)}]): without its line all ids after it would move")
        seen[piece] = number
    return lines


def _vocab_of_json(path: Path) -> list[str]:
    content = _read_json(path)
    model = content.get("model", {})
    if model.get("type") != "WordPiece":
        raise ValueError(f"{path} holds a {model.get('type')} tokenizer, not WordPiece; "
                         "give a vocab.txt, or the sentencepiece .model it was made from")
    ids = dict(model["vocab"])
    for added in content.get("added_tokens", ()):
        ids.setdefault(added["content"], added["id"])
    pieces = sorted(ids, key=ids.get)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise ValueError(f"{path}: ids are not 0 to {len(pieces) - 1}, each once")
    return pieces


def _refuse_other_tokenizations(stored: dict, directory: Path) -> None:
    """Raises ValueError where tokenizer_config.json asks for other rules than the original's."""
    for name, ours in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece"),
                       ("do_basic_tokenize", True)):
        if stored.get(name, ours) not in (ours, None):
            raise ValueError(
                f"{directory / CONFIG_FILE}: {name}={stored[name]!r} is another tokenization than "
                f"BERT's, which has {ours!r}: its ids would not be those of this model")


def _warn_of_added_tokens(stored: dict, directory: Path, vocab_size: int) -> None:
    """transformers keeps tokens added later beside vocab.txt, and looks for them first."""
    added = {entry["content"]: int(i) for i, entry in
             (stored.get("added_tokens_decoder") or {}).items()}
    added |= _read_json(directory / "added_tokens.json")
    beyond = [token for token, i in added.items() if i >= vocab_size]
    if beyond:
        log.warning(
            "%s: %d added tokens (%s) are not in the vocabulary and are read as ordinary text; "
            "bertjax.tools.convert --add_vocab adds words", directory, len(beyond),
            ", ".join(beyond[:5]))


def _stored_options(stored: dict, directory: Path) -> dict:
    """do_lower_case, strip_accents, tokenize_chinese_chars as far as stored, and their source."""
    options = {name: stored[name] for name in
               ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
               if stored.get(name) is not None}
    options["source"] = directory / CONFIG_FILE
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        if not isinstance(options.get(name, True), bool):
            raise ValueError(f"{options['source']}: {name} is {options[name]!r}; "
                             "it must be true or false")
    if "do_lower_case" not in options:
        normalizer = _read_json(directory / "tokenizer.json").get("normalizer") or {}
        if normalizer.get("type") == "BertNormalizer":
            options["source"] = directory / "tokenizer.json"
            for name, key in (("do_lower_case", "lowercase"), ("strip_accents", "strip_accents"),
                              ("tokenize_chinese_chars", "handle_chinese_chars")):
                if normalizer.get(key) is not None:
                    options.setdefault(name, normalizer[key])
    return options


def _resolve_casing(
    stored: bool | None, argument: bool | None, named: Path, directory: Path, vocab: list[str]
) -> bool:
    if stored is not None:
        check_casing_matches_name(named, stored)
        return stored
    if argument is not None:
        check_casing_matches_name(named, argument)
    by_name = _casing_of_name(named)
    if by_name is not None:
        lower, name = by_name
        if argument is not None and argument != lower:
            raise ValueError(
                f"do_lower_case={argument} contradicts the name {name!r}, which says "
                f"do_lower_case={lower}; if the name is wrong, write {{\"do_lower_case\": "
                f"{str(argument).lower()}}} to {directory / CONFIG_FILE}")
        return lower
    if argument is not None:
        return argument
    cased = sum(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    lower = cased <= _CASED_SHARE * len(vocab)
    log.warning(
        "no casing is stored beside %s: do_lower_case=%s, because %d of its %d pieces have "
        "upper-case letters. Pass do_lower_case, or save() the tokenizer, to store it",
        named, lower, cased, len(vocab))
    return lower


def _casing_of_name(path: Path) -> tuple[bool, str] | None:
    for name in _names(path):
        match = _GOOGLE_NAME.search(name) or _CASING_WORD.search(name)
        if match:
            return match.group(1).lower() != "cased", name
    return None


def _names(path: str | Path) -> list[str]:
    """Names that may tell the casing: of a directory its own; of a file also its directory's."""
    path = Path(path).absolute()
    return [path.name] if path.is_dir() else [path.name, path.parent.name]


def _special_names(stored: dict) -> dict[str, str]:
    names = {}
    for key in SPECIAL_NAMES:
        value = stored.get(key)
        if isinstance(value, dict):  # Hugging Face's AddedToken
            value = value.get("content")
        if value is not None:
            names[key] = value
    return names


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _contradiction(name: str, value: bool, stored: bool, source: Path) -> str:
    return (f"{name}={value} contradicts {name}={stored} stored in {source}; leave the argument "
            "out, or change the stored value if it is wrong")
