"""The tokenizers of RoBERTa, XLM-R and CamemBERT, described as in a tokenizer.json.

In: vocab.json with merges.txt (byte-level BPE), sentencepiece.bpe.model (Unigram, whose ids fairseq
moves), or pieces that were just trained. Out: the content of a tokenizer.json, as transformers makes
it from the same files.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax.formats.files import read_json
from bertjax.tokenization.parts import SPACE_MARK
from bertjax.tokenization.tokenizer import CONFIG_FILE

MERGES_FILE = "merges.txt"
FAIRSEQ_FILE = "sentencepiece.bpe.model"
SPECIALS = {
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}  # in the order of their ids
_BPE_CLASSES = ("Roberta", "Bart", "Longformer", "LED")
_FAIRSEQ_CLASSES = {"XLMRoberta": "xlm-roberta", "Camembert": "camembert"}
OWN_CLASS = "PreTrainedTokenizerFast"  # beside a sentencepiece model whose ids are its own; without one, ...
_OWN_IDS = ("", "bert", "distilbert", "electra", "roberta", "modernbert", "bertjax")  # ... these model types


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    special_tokens: Mapping[str, str],
    *,
    normalizer: dict[str, Any] | None = None,
    add_prefix_space: bool = False,
    trim_offsets: bool = True,
    mask_lstrip: bool = False,
) -> dict[str, Any]:
    """RoBERTa's tokenizer; `special_tokens` must be in `vocab`."""
    steps = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets}
    sep, cls = special_tokens["sep_token"], special_tokens["cls_token"]
    return _content(vocab, special_tokens, mask_lstrip) | {
        "normalizer": normalizer,
        "pre_tokenizer": steps | {"use_regex": True},
        "post_processor": steps | {"type": "RobertaProcessing", "sep": [sep, vocab[sep]], "cls": [cls, vocab[cls]]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": [list(pair) for pair in merges],
        },
    }


def unigram(
    pieces: Sequence[tuple[str, float]],
    special_tokens: Mapping[str, str],
    *,
    normalizer: dict[str, Any] | None = None,
    mask_lstrip: bool = False,
) -> dict[str, Any]:
    """XLM-R's tokenizer over (piece, log probability) by id, `special_tokens` among them."""
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    metaspace = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": "always", "split": True}
    cls, sep = ({"SpecialToken": {"id": special_tokens[name], "type_id": 0}} for name in ("cls_token", "sep_token"))
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return _content(vocab, special_tokens, mask_lstrip) | {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [cls, a, sep],
            "pair": [cls, a, sep, sep, b, sep],
            "special_tokens": {
                token: {"id": token, "ids": [vocab[token]], "tokens": [token]}
                for token in (special_tokens["cls_token"], special_tokens["sep_token"])
            },
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": vocab[special_tokens["unk_token"]],
            "byte_fallback": False,
            "vocab": [list(entry) for entry in pieces],
        },
    }


def _content(vocab: Mapping[str, int], special_tokens: Mapping[str, str], mask_lstrip: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": vocab[token], "content": token, **flags} for token in dict.fromkeys(special_tokens.values())]
    added[-1]["lstrip"] = mask_lstrip
    added.sort(key=lambda entry: entry["id"])
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}


# ---------------------------------------------------------------------------------------- files


def _mask_lstrip(stored: Mapping[str, Any], usual: bool) -> bool:
    """Whether the mask takes the space before it; stored with the token, where it is."""
    mask = stored.get("mask_token")
    for entry in (mask, *(stored.get("added_tokens_decoder") or {}).values()):
        if isinstance(entry, dict) and entry.get("content") == (mask if isinstance(mask, str) else "<mask>"):
            return entry.get("lstrip") is True
    return usual


def of_bpe_files(vocab_file: Path, stored: Mapping[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """vocab.json and the merges.txt beside it; ValueError if they are those of another tokenizer."""
    name = str(stored.get("tokenizer_class") or "Roberta")
    if not name.startswith(_BPE_CLASSES):
        raise ValueError(
            f"{vocab_file.parent}: tokenizer_class={name!r} does not read vocab.json and merges.txt as RoBERTa does; "
            "save its tokenizer.json, or set RobertaTokenizer if RoBERTa's rules are right"
        )
    vocab = read_json(vocab_file)
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise ValueError(f"{vocab_file} must map pieces to ids")
    special_tokens = SPECIALS | given
    for piece in special_tokens.values():  # transformers appends what is missing
        vocab.setdefault(piece, len(vocab))
    return byte_level(
        vocab,
        _read_merges(vocab_file.parent / MERGES_FILE, vocab),
        special_tokens,
        add_prefix_space=stored.get("add_prefix_space") is True,
        trim_offsets=stored.get("trim_offsets") is not False,
        mask_lstrip=_mask_lstrip(stored, False),
    )


def with_prefix_space(description: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json as transformers' own classes for byte-level BPE read it: add_prefix_space of
    tokenizer_config.json goes before that of the file."""
    prefix = stored.get("add_prefix_space")
    if prefix is None or not str(stored.get("tokenizer_class") or "").startswith(_BPE_CLASSES):
        return description
    changed = {
        name: {**description[name], "add_prefix_space": prefix}
        for name, kind in (("pre_tokenizer", "ByteLevel"), ("post_processor", "RobertaProcessing"))
        if (description[name] or {}).get("type") == kind
    }
    return {**description, **changed}


def _read_merges(path: Path, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, the first one first."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: vocab.json holds the pieces, merges.txt how they are made") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.removesuffix("\r").split(" "))
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"{path}, line {number}: {line!r:.80} is not two pieces with a space between them")
        if missing := [piece for piece in (*pair, "".join(pair)) if piece not in vocab]:
            raise ValueError(f"{path}, line {number}: {missing[0]!r} is not in vocab.json")
        merges.append(pair)
    return merges


def fairseq_family(model_file: Path, stored: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """'xlm-roberta' or 'camembert', by which the ids of a sentencepiece model are moved; None where they are its own.

    Args:
      config: the model's config.json.

    Raises ValueError for the model of another class, and where the file's name means a family and nothing says which.
    """
    name, model_type = str(stored.get("tokenizer_class") or ""), str(config.get("model_type") or "")
    family = next((family for start, family in _FAIRSEQ_CLASSES.items() if name.startswith(start)), None)
    if family is None and not name and model_type in _FAIRSEQ_CLASSES.values():
        family = model_type
    if family is not None:
        return family
    if name == OWN_CLASS:
        return None
    what = f"{f'tokenizer_class={name!r}' if name else f'model_type={model_type!r}'} is none that is known"
    if not name and model_type in _OWN_IDS:
        if model_file.name != FAIRSEQ_FILE:
            return None
        what = "no file says which it is"
    raise ValueError(
        f"{model_file}: which ids and rules a sentencepiece model means depends on the tokenizer's class, and {what}: "
        f"save its tokenizer.json, or set tokenizer_class in {CONFIG_FILE} beside it to XLMRobertaTokenizer or "
        "CamembertTokenizer if it is one of them"
    )


def of_fairseq_model(model_file: Path, family: str, stored: Mapping[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """A sentencepiece Unigram model with the ids that XLM-R or CamemBERT has."""
    from bertjax.tokenization.sentencepiece import parse_model  # late: protobuf

    model = parse_model(model_file.read_bytes(), str(model_file))
    if model.trainer_spec.model_type != 1:
        raise ValueError(f"{model_file} is not a Unigram model, as those of {family} are; save the tokenizer.json")
    special = SPECIALS | given
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if family == "camembert":
        head = ["<s>NOTUSED", special["pad_token"], "</s>NOTUSED", special["unk_token"]]
        pieces = [*((piece, 0.0) for piece in head), ("<unk>NOTUSED", -100.0), *pieces[1:]]
    else:
        head = [special[name] for name in ("cls_token", "pad_token", "sep_token", "unk_token")]
        pieces = [*((piece, 0.0) for piece in head), *pieces[3:]]
    pieces.append((special["mask_token"], 0.0))
    names = [piece for piece, _ in pieces]
    if len(set(names)) < len(names) or not set(special.values()) <= set(names):
        raise ValueError(f"{model_file} does not begin with <unk>, <s>, </s>, as the models of {family} do")
    charsmap = model.normalizer_spec.precompiled_charsmap
    return unigram(
        pieces,
        special,
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        if charsmap
        else None,
        mask_lstrip=_mask_lstrip(stored, family == "camembert"),
    )
