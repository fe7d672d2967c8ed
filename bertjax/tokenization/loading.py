"""Finds a tokenizer on disk: directory or file -> tokenizer, with the casing stored beside it.

Reads Hugging Face's layout (tokenizer.json, vocab.txt, or vocab.json with merges.txt, with
tokenizer_config.json), a bare vocab.txt, Google's checkpoint directories (vocab.txt beside
bert_config.json) and sentencepiece models. BERT's own rules run in wordpiece.py; whatever has
others, or added tokens, runs in hub.py. The casing comes, in this order, from tokenizer_config.json,
tokenizer.json, the name of the directory (`cased_L-12_H-768_A-12`), the argument, and last from
the pieces themselves.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax.formats import hub
from bertjax.formats.files import on_disk, parse_json
from bertjax.tokenization import description as files
from bertjax.tokenization import families
from bertjax.tokenization.description import CONFIG_FILE
from bertjax.tokenization.hub import HubTokenizer, check_content
from bertjax.tokenization.tokenizer import SPECIAL_NAMES, USUAL_NAMES, Layout, Tokenizer, check_special_tokens
from bertjax.tokenization.wordpiece import MAX_WORD_CHARS, WordPieceTokenizer, refuse_repeated

_GOOGLE_NAME = re.compile(r"(?:^|_)(uncased|cased|multilingual|chinese)_L-\d+_H-\d+_A-\d+")
_CASING_WORD = re.compile(r"(?:^|[^a-z])(uncased|cased)(?:[^a-z]|$)", re.IGNORECASE)
# The share of pieces with upper-case letters that makes a vocabulary cased: about 0 in the
# original uncased one, a quarter in the cased one.
_CASED_SHARE = 0.01
_UNLIMITED = 1 << 30  # transformers writes int(1e30) where no length is known

log = logging.getLogger(__name__)


def load_tokenizer(path: str | Path, do_lower_case: bool | None = None) -> Tokenizer:
    """Loads the tokenizer at `path`: a directory, a vocab.txt, a tokenizer.json, a vocab.json (beside
    its merges.txt) or a sentencepiece .model file.

    Args:
      do_lower_case: None takes what is stored; otherwise it must agree with it.

    Raises:
      FileNotFoundError: nothing to load there.
      ValueError: what is given is no path, the argument contradicts what is stored or the name, the vocabulary
        is bad, or a file asks for what is not obeyed.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"{path!r:.80} is no path of a tokenizer; one of transformers is saved by its save_pretrained(DIR), and "
            "loaded from DIR"
        )
    path = Path(on_disk(path)).expanduser()
    directory, vocab_file = _find(path)
    named = directory if path.is_dir() else path
    stored = files.read_settings(directory)
    config = files.read_object(directory / "config.json")
    stored = {"tokenizer_class": config.get("tokenizer_class")} | stored  # as transformers looks for it
    if unknown := files.unknown_settings(stored):
        log.warning("%s: unknown keys are not obeyed: %s", directory / CONFIG_FILE, ", ".join(unknown[:10]))
    is_model = vocab_file.suffix == ".model"
    family = families.fairseq_family(vocab_file, stored, config) if is_model else None
    if is_model and family is None:
        tokenizer = _sentencepiece(vocab_file, stored)
        _check_own_rules(tokenizer, vocab_file, stored, do_lower_case)
    else:
        described, specials, pieces, layout = _described(vocab_file, named, stored, family)
        if (described["normalizer"] or {}).get("type") != "BertNormalizer":
            tokenizer = _hub(described, specials, layout, vocab_file, stored)
            _check_own_rules(tokenizer, vocab_file, stored, do_lower_case)
            check_casing_matches_name(named, tokenizer.do_lower_case)
        else:
            if vocab_file.suffix == ".json":
                check_content(described, str(vocab_file))
            rules = _bert_rules(described["normalizer"], stored, vocab_file, named, pieces, do_lower_case)
            described["normalizer"] |= rules
            if files.is_plain_bert(described, layout, specials):
                limit = stored.get("max_input_chars_per_word") or MAX_WORD_CHARS
                tokenizer = WordPieceTokenizer(pieces, *rules.values(), max_word_chars=limit, **specials)
            else:
                tokenizer = _hub(described, specials, layout, vocab_file, stored)
    tokenizer.model_max_length = _model_max_length(stored, directory)
    return tokenizer


def _find(path: Path) -> tuple[Path, Path]:
    """(directory, file of the vocabulary) of what the user names."""
    if path.is_file():
        return path.parent, path
    if not path.is_dir():
        path = hub.fetch(path, tokenizer_only=True)
    for name in ("tokenizer.json", "vocab.txt", "vocab.json"):
        if (path / name).is_file():
            return path, path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return path, models[0]
    raise FileNotFoundError(
        f"{path} holds no tokenizer: expected vocab.txt, tokenizer.json, vocab.json with merges.txt, or one "
        f"sentencepiece .model file (found {len(models)})"
    )


def _sentencepiece(vocab_file: Path, stored: Mapping[str, Any]) -> Tokenizer:
    from bertjax.tokenization.sentencepiece import SentencePieceTokenizer  # late: protobuf

    source = vocab_file.parent / CONFIG_FILE
    given = files.special_names(stored, source)
    tokenizer = SentencePieceTokenizer(vocab_file.read_bytes(), str(vocab_file), given)
    if added := files.added_beyond(stored, vocab_file.parent, tokenizer.vocab):
        raise ValueError(
            f"{source}: the added tokens {', '.join(map(repr, added[:5]))} are not in "
            f"{vocab_file.name}; save the tokenizer.json of this tokenizer, which holds them"
        )
    return tokenizer


def _check_own_rules(
    tokenizer: Tokenizer, vocab_file: Path, stored: Mapping[str, Any], do_lower_case: bool | None
) -> None:
    """Refuses settings that differ from the normalisation that a file brings."""
    own = tokenizer.do_lower_case
    if do_lower_case not in (None, own):
        raise ValueError(_contradiction(do_lower_case, own, vocab_file))
    if stored.get("do_lower_case") not in (None, own):
        raise ValueError(
            f"{vocab_file.parent / CONFIG_FILE}: do_lower_case={not own} contradicts {vocab_file}, whose own "
            f"rules mean do_lower_case={own}; remove the one that is wrong"
        )


def _contradiction(value: bool, stored: bool, source: Path) -> str:
    return (
        f"do_lower_case={value} contradicts do_lower_case={stored} stored in {source}; leave the argument "
        "out, or change the stored value if it is wrong"
    )


# ------------------------------------------------- vocab.txt, tokenizer.json, and what becomes one


def _described(
    vocab_file: Path, named: Path, stored: Mapping[str, Any], family: str | None
) -> tuple[dict[str, Any], dict[str, str], list[str], Layout]:
    """(description, special tokens, pieces by id, layout) of whatever file holds the vocabulary."""
    directory = vocab_file.parent
    config = directory / CONFIG_FILE
    if family is not None:
        described = families.of_fairseq_model(vocab_file, family, stored, files.special_names(stored, config))
    elif vocab_file.name == "vocab.json":
        described = families.of_bpe_files(vocab_file, stored, files.special_names(stored, config))
    elif vocab_file.suffix == ".json":
        described = families.with_prefix_space(files.read_description(vocab_file), stored)
        if named.is_dir() and (directory / "vocab.txt").is_file():
            _check_same_vocabulary(described, vocab_file, directory / "vocab.txt")
    else:
        described = files.of_vocab(read_vocab(vocab_file), stored, config)
    described = files.with_added_tokens(described, stored, directory, vocab_file)
    ids = files.piece_ids(described, vocab_file)
    ids |= {entry["content"]: entry["id"] for entry in described["added_tokens"]}
    specials = _special_tokens(described, stored, ids, vocab_file)
    if described["post_processor"] is None:  # for whoever reads what is saved
        described["post_processor"] = files.bert_template(specials, ids)
        layout = Layout.bert(ids[specials["cls_token"]], ids[specials["sep_token"]])
    else:
        layout = files.read_layout(described, specials, ids, vocab_file)
    return described, specials, sorted(ids, key=ids.get), layout


def _hub(
    described: dict[str, Any], specials: dict[str, str], layout: Layout, vocab_file: Path, stored: Mapping[str, Any]
) -> HubTokenizer:
    limit = stored.get("max_input_chars_per_word")
    if limit is not None and described["model"].get("type") == "WordPiece":
        described["model"] = {**described["model"], "max_input_chars_per_word": limit}
    return HubTokenizer(described, specials, str(vocab_file), layout)


def _special_tokens(
    described: Mapping[str, Any], stored: Mapping[str, Any], ids: Mapping[str, int], vocab_file: Path
) -> dict[str, str]:
    """{name of SPECIAL_NAMES: token}: as stored, the model's own unknown token, or usual names."""
    source, model = vocab_file.parent / CONFIG_FILE, described["model"]
    given = files.special_names(stored, source)
    unknown = model.get("unk_token")
    if isinstance(model.get("vocab"), list) and files.is_id(model.get("unk_id")):
        unknown = next((piece for piece, i in ids.items() if i == model["unk_id"]), None)
    if unknown is not None and given.get("unk_token", unknown) != unknown:
        raise ValueError(f"{source}: unk_token={given['unk_token']!r}, but {vocab_file} has {unknown!r}")
    if unknown is not None:
        given["unk_token"] = unknown
    names = {
        name: given.get(name) or next((usual for usual in USUAL_NAMES[name] if usual in ids), USUAL_NAMES[name][0])
        for name in SPECIAL_NAMES
    }
    check_special_tokens(ids, names, str(vocab_file))
    return names


def _check_same_vocabulary(described: Mapping[str, Any], json_file: Path, text_file: Path) -> None:
    """Raises ValueError where a vocab.txt beside tokenizer.json holds other pieces."""
    ids = files.piece_ids(described, json_file)
    ids |= {one.get("content"): one.get("id") for one in described["added_tokens"] or () if isinstance(one, dict)}
    for i, piece in enumerate(read_vocab(text_file)):
        if ids.get(piece) != i:
            raise ValueError(
                f"{text_file} and {json_file.name} disagree: {piece!r} is on line {i + 1}, and has the id "
                f"{ids.get(piece)} in {json_file.name}; remove the one that is not this model's"
            )


def _model_max_length(stored: Mapping[str, Any], directory: Path) -> int | None:
    """The longest input in tokens, [CLS] and [SEP] included, as transformers stores it."""
    value = stored.get("model_max_length")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise ValueError(f"{directory / CONFIG_FILE}: model_max_length is {value!r:.100}, not a number of tokens")
    return int(value) if value < _UNLIMITED else None


def read_vocab(path: str | Path) -> list[str]:
    """Pieces of a vocab.txt (a piece a line, UTF-8), by id."""
    path = Path(path)
    content = path.read_bytes()
    if other := _other_format(content):
        raise ValueError(f"{path} is {other}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    # Only line feeds end a line. Blanks at the ends go, as in the original, unless they are the
    # piece: some vocabularies list U+2028 or U+3000, which no text brings about.
    lines = [line.strip() or line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    for number, piece in enumerate(lines, start=1):
        if "\r" in piece:  # to some readers it ends a line, and ids after it move
            raise ValueError(f"{path}, line {number} holds a carriage return; end every line with a line feed")
    refuse_repeated(lines, path)
    return lines


def _other_format(content: bytes) -> str | None:
    """What a file that calls itself vocab.txt is instead, and where that belongs."""
    for start, name in (
        (b"version https://git-lfs", "a Git LFS pointer, not the file: run git lfs pull"),
        (b"#version:", "the merges.txt of a BPE tokenizer: give the directory that holds it and vocab.json"),
        (b"PK\x03\x04", "a zip archive: unpack it"),
        (b"\x1f\x8b", "a gzip file: unpack it"),
        (b"\xff\xfe", "UTF-16 text: save it as UTF-8"),
        (b"\xfe\xff", "UTF-16 text: save it as UTF-8"),
        (b"<!DOCTYPE", "a web page, not the file that it links to: download that"),
        (b"<html", "a web page, not the file that it links to: download that"),
    ):
        if content.startswith(start):
            return name
    text = content.lstrip(b"\xef\xbb\xbf \r\n\t")
    if text.startswith((b"{", b"[")):
        try:
            value = parse_json(content, "")
        except ValueError:
            value = None
        if isinstance(value, dict) and "model" in value:
            return "a tokenizer.json: name it tokenizer.json"
        if isinstance(value, dict | list):
            return "JSON, not a list of pieces, one a line: a vocab.json is read with its merges.txt"
    lines = content.split(b"\n", 4)[:4]
    if len(lines) == 4 and all(re.fullmatch(rb"[^\t]*\t-?[0-9.e+-]+\r?", line) for line in lines):
        return "the list of a sentencepiece model's pieces with their scores: give the .model file beside it"
    if b"\x00" in content and content.startswith(b"\n"):
        return "a binary file, perhaps a sentencepiece model: name it spiece.model"
    return None


# --------------------------------------------------------------------------------------- casing


def _bert_rules(
    normalizer: Mapping[str, Any],
    stored: Mapping[str, Any],
    vocab_file: Path,
    named: Path,
    vocab: Sequence[str],
    do_lower_case: bool | None,
) -> dict[str, Any]:
    """lowercase, strip_accents and handle_chinese_chars of BERT's normalizer.

    tokenizer_config.json goes before the normalizer of tokenizer.json, as in transformers.
    """
    config, source = vocab_file.parent / CONFIG_FILE, vocab_file
    if vocab_file.suffix != ".json":  # a vocab.txt that was named itself
        beside = files.read_object(vocab_file.parent / "tokenizer.json").get("normalizer")
        if isinstance(beside, dict) and beside.get("type") == "BertNormalizer":
            normalizer, source = beside, vocab_file.parent / "tokenizer.json"
    options = {}
    for name, key in (
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ):
        value = normalizer.get(key)
        if not isinstance(value, bool | None):
            raise ValueError(f"{source}: normalizer.{key} is {value!r:.100}; it must be true or false")
        if stored.get(name) is not None or (name == "strip_accents" and name in stored):
            if value not in (None, stored[name]):
                log.warning("%s=%s of %s goes before %s=%s of %s", name, stored[name], config, key, value, source.name)
            value = stored[name]
        options[key] = value
    if stored.get("do_lower_case") is not None:
        source = config
    if do_lower_case is not None and options["lowercase"] not in (None, do_lower_case):
        raise ValueError(_contradiction(do_lower_case, options["lowercase"], source))
    options["lowercase"] = _resolve_casing(options["lowercase"], do_lower_case, named, config, vocab)
    if options["handle_chinese_chars"] is None:
        options["handle_chinese_chars"] = True
    return options


def _resolve_casing(
    stored: bool | None, argument: bool | None, named: Path, config: Path, vocab: Sequence[str]
) -> bool:
    for known in (stored, argument):
        if known is not None:
            check_casing_matches_name(named, known)
    if stored is not None:
        return stored
    for name in _names(named):
        if match := _GOOGLE_NAME.search(name) or _CASING_WORD.search(name):
            lower = match.group(1).lower() != "cased"
            if argument not in (None, lower):
                raise ValueError(
                    f"do_lower_case={argument} contradicts the name {name!r}, which says "
                    f'do_lower_case={lower}; if the name is wrong, write {{"do_lower_case": '
                    f"{str(argument).lower()}}} to {config}"
                )
            return lower
    if argument is not None:
        return argument
    cased = sum(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    lower = cased <= _CASED_SHARE * len(vocab)
    log.warning(
        "no casing is stored beside %s: do_lower_case=%s, because %d of its %d pieces have "
        "upper-case letters. Pass do_lower_case, or save() the tokenizer, to store it",
        named,
        lower,
        cased,
        len(vocab),
    )
    return lower


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
                "pre-training, or rename the directory if the name is wrong"
            )


def _names(path: str | Path) -> list[str]:
    """Names that may tell the casing: of a directory its own; of a file also its directory's."""
    path = Path(path).absolute()
    return [path.name] if path.is_dir() else [path.name, path.parent.name]
