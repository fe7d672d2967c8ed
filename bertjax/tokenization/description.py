"""What the files of a tokenizer say, in one form: the content of a tokenizer.json.

In: vocab.txt or tokenizer.json, added_tokens.json, special_tokens_map.json, tokenizer_config.json.
Out: a checked dict as in tokenizer.json, with all added tokens in it; whether it describes BERT's
own rules (`is_plain_bert`). Whatever changes ids and is not obeyed is refused by name.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bertjax.formats.files import read_json
from bertjax.tokenization.hub import named_errors, parse
from bertjax.tokenization.tokenizer import CONFIG_FILE, SPECIAL_NAMES, USUAL_NAMES, Layout
from bertjax.tokenization.wordpiece import MAX_WORD_CHARS, WordPieceTokenizer

SPECIALS_FILE = "special_tokens_map.json"  # where old versions of transformers name the specials
ADDED_FILE = "added_tokens.json"

# Other rules than the original's for a vocab.txt: key -> the value that means the original's.
_BERT_RULES = {
    "word_tokenizer_type": "basic",
    "subword_tokenizer_type": "wordpiece",
    "do_basic_tokenize": True,
    "do_subword_tokenize": True,
}
# Keys of tokenizer_config.json that are obeyed, ...
_OBEYED = {*SPECIAL_NAMES, *_BERT_RULES} | set(
    "bos_token eos_token additional_special_tokens extra_special_tokens added_tokens_decoder do_lower_case "
    "strip_accents tokenize_chinese_chars max_input_chars_per_word model_max_length add_prefix_space never_split "
    "auto_map tokenizer_class trim_offsets truncation_side".split()
)
# ... or do not change which ids a text has. Padding is masked and on the right in any case.
_HARMLESS = set(
    "backend chat_template clean_up_tokenization_spaces device_map errors from_slow init_inputs is_local "
    "jumanpp_kwargs legacy local_files_only max_len max_length mecab_kwargs model_input_names "
    "model_specific_special_tokens model_type name_or_path pad_to_multiple_of pad_token_type_id padding padding_side "
    "processor_class revision sep_token_extra special_tokens_map_file split_special_tokens stride sudachi_kwargs "
    "tokenizer_file torch_dtype trust_remote_code truncation truncation_strategy unk_token_id use_fast vocab_file "
    "_commit_hash".split()
)
# Classes of transformers that read a vocab.txt as BERT's; others (Esm, Bertweet, Phobert) do not.
_BERT_CLASSES = re.compile(
    r"((Bert(Japanese)?|DistilBert|Electra|MobileBert|ConvBert|Funnel|LayoutLM(v2)?|Lxmert|MPNet|"
    r"RetriBert|Realm|Splinter|SqueezeBert|Nezha|DPR(Reader|QuestionEncoder|ContextEncoder)|"
    r"PreTrained)Tokenizer(Fast)?|Tokenizer|TokenizersBackend)"
)

# tokenizer.json: the caller cuts and pads, and a decoder makes text.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_JSON_KEYS = ("version", "truncation", "padding", "added_tokens", *_PARTS, "model")
_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")  # change which text a token takes
_FLAGS = (*_MATCHING, "special")
_LONGEST_WORD = 1 << 16
# `tokenizers` writes this limit into every BERT file; the original, and so such a file, means 200.
_LIBRARY_WORD_CHARS = 100


# ------------------------------------------------------------------------- tokenizer_config.json


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, checked; {} without them."""
    stored = {**read_object(directory / SPECIALS_FILE), **read_object(directory / CONFIG_FILE)}
    source = directory / CONFIG_FILE
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "trim_offsets"):
        if not isinstance(stored.get(name), bool | None):
            raise ValueError(f"{source}: {name} is {stored[name]!r}; it must be true or false")
    _check_word_limit(stored.get("max_input_chars_per_word"), source)
    for name, ours in _BERT_RULES.items():
        if stored.get(name, ours) not in (ours, None):
            raise ValueError(
                f"{source}: {name}={stored[name]!r} is another tokenization than "
                f"BERT's, which has {ours!r}: its ids would not be those of this model"
            )
    never_split = stored.get("never_split") or []
    if not isinstance(never_split, list) or not all(isinstance(item, str) for item in never_split):
        raise ValueError(f"{source}: never_split must be a list of strings")
    if kept_whole := set(never_split) - _usual_names(stored, source):
        raise ValueError(
            f"{source}: never_split={sorted(kept_whole)} is not supported; make them "
            "added tokens (add_tokens of transformers), which are kept whole"
        )
    if stored.get("truncation_side") == "left":
        raise ValueError(
            f"{source}: truncation_side='left' is not supported: long texts are cut "
            "at their end; remove the key if that is right"
        )
    code = stored.get("auto_map")
    if "AutoTokenizer" in code if isinstance(code, dict) else code:
        raise ValueError(
            f"{source}: auto_map names the model's own Python code, which is not run: "
            "save its tokenizer.json, or remove the key if BERT's rules are right"
        )
    return stored


def unknown_settings(stored: Mapping[str, Any]) -> list[str]:
    """Keys of tokenizer_config.json that nothing is known of."""
    return sorted(set(stored) - _OBEYED - _HARMLESS)


def special_names(stored: Mapping[str, Any], source: Path) -> dict[str, str]:
    """{name of SPECIAL_NAMES: token}, as far as stored."""
    return {key: _content(stored[key], key, source) for key in SPECIAL_NAMES if stored.get(key) is not None}


def _usual_names(stored: Mapping[str, Any], source: Path) -> set[str]:
    return set(special_names(stored, source).values()).union(*USUAL_NAMES.values())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no file."""
    return read_json(path, dict) if path.is_file() else {}


def _check_word_limit(value: Any, source: Path) -> None:
    if value is not None and (not is_id(value) or not 1 <= value <= _LONGEST_WORD):
        raise ValueError(f"{source}: max_input_chars_per_word={value!r:.100}, not a number from 1 to {_LONGEST_WORD}")


def is_id(value: Any) -> bool:
    """Whether a value of JSON can be an id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


# --------------------------------------------------------------------- tokenizer.json, vocab.txt


def of_vocab(pieces: list[str], stored: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """BERT's rules over the pieces of a vocab.txt; ValueError if it is that of another tokenizer."""
    name = stored.get("tokenizer_class")
    if name is not None and not _BERT_CLASSES.fullmatch(str(name)):
        raise ValueError(
            f"{source.parent}: tokenizer_class={name!r} does not read vocab.txt as BERT "
            "does; save its tokenizer.json, or set BertTokenizer if BERT's rules are right"
        )
    return dict.fromkeys(_JSON_KEYS) | {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": None,
            "strip_accents": None,
            "lowercase": None,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": special_names(stored, source).get("unk_token", "[UNK]"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _LIBRARY_WORD_CHARS,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
        },
    }


def of_wordpiece(tokenizer: WordPieceTokenizer) -> dict[str, Any]:
    """The tokenizer.json of a vocab.txt, for programs that read no other file."""
    made = of_vocab(list(tokenizer.vocab), tokenizer.special_tokens, Path())
    made["normalizer"] |= {
        "lowercase": tokenizer.do_lower_case,
        "strip_accents": tokenizer.strip_accents,
        "handle_chinese_chars": tokenizer.tokenize_chinese_chars,
    }
    ids = made["model"]["vocab"]
    flags = dict.fromkeys(_MATCHING, False) | {"special": True}
    specials = sorted(tokenizer.special_tokens.values(), key=ids.get)
    made["added_tokens"] = [{"id": ids[token], "content": token, **flags} for token in specials]
    made["post_processor"] = bert_template(tokenizer.special_tokens, ids)
    return made


def read_description(path: Path) -> dict[str, Any]:
    """The content of a tokenizer.json; ValueError for what no reader can obey."""
    with path.open("rb") as file:
        if file.read(100).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b""):
            raise ValueError(
                f"{path} is not valid JSON: it does not begin with {{. A list of pieces, one a line, is named vocab.txt"
            )
    content = read_object(path)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(f'{path} is not a tokenizer.json: it has no "model"')
    if unknown := sorted(set(content) - set(_JSON_KEYS)):
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}, which would not be obeyed")
    if not isinstance(model.get("unk_token"), str | None):
        raise ValueError(f"{path}: model.unk_token is {model['unk_token']!r:.100}; it must be a token")
    if model.get("dropout"):
        raise ValueError(f"{path}: model.dropout={model['dropout']!r} gives a text other ids each time; set it to null")
    if isinstance(content.get("truncation"), dict) and content["truncation"].get("direction") == "Left":
        raise ValueError(
            f"{path}: truncation.direction=Left is not supported: long texts are cut "
            "at their end; set truncation to null if that is right"
        )
    if not isinstance(content.get("added_tokens", []), list):
        raise ValueError(f"{path}: added_tokens must be a list")
    for part in _PARTS:
        if not isinstance(content.get(part), dict | None):
            raise ValueError(f"{path}: {part} must be an object or null")
    _check_word_limit(model.get("max_input_chars_per_word"), path)
    return {**dict.fromkeys(_JSON_KEYS[1:]), **content}


def piece_ids(description: Mapping[str, Any], source: Path) -> dict[str, int]:
    """Piece -> id of the model alone, without added tokens."""
    vocab = description["model"].get("vocab")
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocab):
            raise ValueError(f"{source}: model.vocab must list [piece, score] pairs")
        return {entry[0]: i for i, entry in enumerate(vocab)}
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{source}: model.vocab must map pieces to ids")
    numbers = vocab.values()
    if set(map(type, numbers)) != {int} or min(numbers) < 0:  # fast: this is part of every start
        bad = next(piece for piece, i in vocab.items() if not is_id(i))
        raise ValueError(f"{source}: the id of {bad!r} is {vocab[bad]!r:.100}; it must be a number")
    return dict(vocab)


def is_plain_bert(description: Mapping[str, Any], layout: Layout, special_tokens: Mapping[str, str]) -> bool:
    """Whether wordpiece.py follows the description, and no token but BERT's special ones is added."""
    model, normalizer = description["model"], description["normalizer"] or {}
    names = set(special_tokens.values())
    return (
        [*map(len, layout[:3]), layout.second] == [1, 1, 1, 1]
        and model.get("type") == "WordPiece"
        and model.get("continuing_subword_prefix") == "##"
        and model.get("unk_token") == special_tokens["unk_token"]
        and model.get("max_input_chars_per_word") in (_LIBRARY_WORD_CHARS, MAX_WORD_CHARS)
        and set(model) <= {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"}
        and normalizer.get("type") == "BertNormalizer"
        and normalizer.get("clean_text") is True
        and set(normalizer) <= {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
        and description["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and all(entry["content"] in names for entry in description["added_tokens"])
    )


# ---------------------------------------------------------------------------------- added tokens


def with_added_tokens(
    description: dict[str, Any], stored: Mapping[str, Any], directory: Path, source: Path
) -> dict[str, Any]:
    """The description with the added tokens of all files in its added_tokens.

    transformers keeps them in tokenizer.json, in tokenizer_config.json (added_tokens_decoder, lists
    of further special tokens) and in added_tokens.json.
    """
    ids = piece_ids(description, source)
    added: dict[str, dict[str, Any]] = {}
    places = {i: piece for piece, i in ids.items()}
    config = directory / CONFIG_FILE
    usual = _usual_names(stored, config)

    def add(entry: Any, number: Any, file: Path) -> None:
        entry = _entry(entry, number, file)
        token, i = entry["content"], entry["id"]
        known = ids.get(token, added.get(token, {}).get("id", i))
        if known != i or places.get(i, token) != token:
            raise ValueError(
                f"{file}: the added token {token!r} has the id {i}, which is "
                + (f"{known} in {source}" if known != i else f"that of {places[i]!r} in {source}")
            )
        other = added.setdefault(token, entry)
        # BERT's special tokens are not looked for in a text, and models in use differ there.
        differ = [flag for flag in _MATCHING if other[flag] != entry[flag]]
        if differ and token not in usual:
            raise ValueError(
                f"{file}: {differ[0]} of the added token {token!r} is {entry[differ[0]]} here and {other[differ[0]]} "
                "elsewhere; make them agree"
            )
        places[i] = token

    for entry in description["added_tokens"] or ():
        add(entry, None, source)
    decoder = stored.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ValueError(f"{config}: added_tokens_decoder must map ids to tokens")
    for number, entry in decoder.items():
        add(entry, number, config)
    special = _further_specials(stored, config)
    for token, number in read_object(directory / ADDED_FILE).items():
        entry = added.get(token) or special.get(token) or {"content": token, "normalized": True}
        add(entry, number, directory / ADDED_FILE)
    for token, entry in special.items():
        if token not in added:
            add(entry, ids.get(token, max(places, default=-1) + 1), config)
    if max(places) >= len(places):
        gap = next(i for i in range(len(places)) if i not in places)
        raise ValueError(f"{source}: ids are not 0 to {len(places) - 1}, each once: no piece has the id {gap}")
    return {**description, "added_tokens": sorted(added.values(), key=lambda entry: entry["id"])}


def added_beyond(stored: Mapping[str, Any], directory: Path, vocab: Collection[str]) -> list[str]:
    """Added tokens, named beside a vocabulary, that it lacks."""
    empty = {"model": {"vocab": {piece: i for i, piece in enumerate(vocab)}}, "added_tokens": []}
    found = with_added_tokens(empty, stored, directory, directory)["added_tokens"]
    return [entry["content"] for entry in found if entry["id"] >= len(vocab)]


def _further_specials(stored: Mapping[str, Any], source: Path) -> dict[str, dict[str, Any]]:
    """Special tokens that are named beside BERT's five, by content."""
    named = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = stored.get(key) or []
        if not isinstance(value, list | dict):
            raise ValueError(f"{source}: {key} must be a list of tokens")
        named += [(key, token) for token in (value.values() if isinstance(value, dict) else value)]
    named += [(key, stored[key]) for key in ("bos_token", "eos_token") if stored.get(key)]
    found = {}
    for key, value in named:
        entry = value if isinstance(value, dict) else {"content": value}
        found[_content(value, key, source)] = {**entry, "special": True}
    for name in special_names(stored, source).values():
        found.pop(name, None)
    return found


def _entry(entry: Any, number: Any, source: Path) -> dict[str, Any]:
    """One added token with its id and all its flags, checked."""
    if not isinstance(entry, dict):
        raise ValueError(f"{source}: an added token must be an object with its content, not {entry!r:.100}")
    token = _content(entry, "an added token", source)
    if number is None:  # of tokenizer.json, where nothing may be left out
        number = entry.get("id")
        if missing := [flag for flag in _FLAGS if flag not in entry]:
            raise ValueError(f"{source}: the added token {token!r} has no {missing[0]}")
    if isinstance(number, str) and re.fullmatch("[0-9]{1,9}", number):
        number = int(number)
    if not is_id(number):
        raise ValueError(f"{source}: the id of the added token {token!r} is {number!r:.100}; it must be a number")
    flags = {flag: entry.get(flag, False) for flag in _FLAGS}
    if bad := [flag for flag, value in flags.items() if not isinstance(value, bool)]:
        raise ValueError(f"{source}: {bad[0]} of the added token {token!r} must be true or false")
    return {"id": number, "content": token, **flags}


def _content(value: Any, key: str, source: Path) -> str:
    """A token that is written as a string or as transformers' AddedToken."""
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str) or not token:
        raise ValueError(f"{source}: {key} is {value!r:.100}; it must be a token")
    return token


# -------------------------------------------------------------------------------- post_processor


def bert_template(special_tokens: Mapping[str, str], ids: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that puts BERT's special tokens around texts."""
    cls, sep = special_tokens["cls_token"], special_tokens["sep_token"]
    return {"type": "BertProcessing", "sep": [sep, ids[sep]], "cls": [cls, ids[cls]]}


def read_layout(
    description: Mapping[str, Any], special_tokens: Mapping[str, str], ids: Mapping[str, int], source: Path
) -> Layout:
    """The special tokens that the post-processor puts around texts; BERT's where it adds none.

    Raises ValueError for what is not `prefix A suffix` and `prefix A middle B suffix`, from the
    token for classes to the separator, with segment 0 up to B.
    """
    processor = description["post_processor"]
    cls, sep = (ids[special_tokens[name]] for name in ("cls_token", "sep_token"))
    a, b = (1 << 32) - 2, (1 << 32) - 1  # ids that no vocabulary has
    words = {"type": "WordLevel", "vocab": {"A": a, "B": b}, "unk_token": "A"}
    mini = dict.fromkeys(_PARTS) | {"added_tokens": [], "post_processor": processor, "model": words}
    library = parse(mini, f"{source}: post_processor")
    with named_errors(f"{source}: post_processor"):
        one, two = library.encode("A"), library.encode("A", "B")
    if {step["type"] for step in processor.get("processors", [processor])} <= {"ByteLevel"}:
        return Layout.bert(cls, sep)
    if one.ids.count(a) == two.ids.count(a) == two.ids.count(b) == 1:
        text, middle, end = one.ids.index(a), two.ids.index(a) + 1, two.ids.index(b)
        parts = (one.ids[:text], two.ids[middle:end], one.ids[text + 1 :])
        layout = Layout(*map(tuple, parts), two.type_ids[end])
        if (
            layout.prefix[:1] == (cls,)
            and layout.suffix[-1:] == (sep,)
            and two.ids == [*layout.prefix, a, *layout.middle, b, *layout.suffix]
            and one.type_ids == [0] * len(one.ids)
            and two.type_ids == [0] * end + [layout.second] * (len(two.ids) - end)
            and sep in layout.middle
            and layout.second in (0, 1)
        ):
            return layout
    raise ValueError(
        f"{source}: post_processor ({processor['type']}) gives {one.tokens} with segments {one.type_ids} for a "
        f"text A and {two.tokens} with segments {two.type_ids} for a pair. What can be used begins with "
        f"{special_tokens['cls_token']} and ends in {special_tokens['sep_token']}, the same for one text and for "
        "two, has a separator between two, and segment 0 up to the second text. A model trained otherwise cannot "
        "be used; if it was not, set post_processor to null"
    )
