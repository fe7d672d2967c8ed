"""Hugging Face's model directories, read without torch and written so that transformers loads them.

    config.json  model.safetensors (or shards with an index, or pytorch_model.bin)
    vocab.txt  tokenizer_config.json  README.md

Reading gives (BertConfig, the whole config.json, state dict of numpy arrays under today's names);
`matching.match` then fits the state dict to a model. Writing is atomic: a directory appears complete
or not at all.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.formats.arrays import Header, LoadError, read_safetensors, safetensors_headers, write_safetensors
from bertjax.formats.files import parse_json, whole_directory, write_json
from bertjax.formats.torch_pickle import read_torch_pickle, torch_headers
from bertjax.interop.names import HUGGING_FACE, Naming
from bertjax.interop.sentence_transformers import SentenceSettings
from bertjax.model import heads
from bertjax.model.model_types import OWN, TYPES
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from bertjax.tokenization import Tokenizer
from bertjax.tokenization.description import of_wordpiece
from bertjax.tokenization.wordpiece import WordPieceTokenizer

_LFS_POINTER = b"version https://git-lfs"
# Parts of names where torch's wrappers were saved with the model: DataParallel before every name, others anywhere.
_PARALLEL = "module."
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What the keys that do not describe the network have to look like.
_OTHER_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id2label": (
        lambda x: (
            isinstance(x, dict)
            and all(
                key.isdecimal() and len(key) < 10 and isinstance(name, str | int | float) for key, name in x.items()
            )
        ),
        "map the numbers of the classes to their names",
    ),
    "label2id": (
        lambda x: isinstance(x, dict) and all(type(n) is int or str(n).isdecimal() for n in x.values()),
        "map the names of the classes to their numbers",
    ),
    "tie_word_embeddings": (lambda x: isinstance(x, bool), "be true or false"),
    "architectures": (lambda x: isinstance(x, list) and all(isinstance(n, str) for n in x), "be a list of class names"),
    "problem_type": (
        lambda x: x in ("regression", "single_label_classification", "multi_label_classification"),
        "be regression, single_label_classification or multi_label_classification",
    ),
    "finetuned": (lambda x: isinstance(x, dict), "be an object"),
    "untrained_heads": (lambda x: isinstance(x, list), "be a list of names of heads"),
}
_BUFFERS = (".embeddings.position_ids", ".embeddings.token_type_ids")  # of old files; they hold 0, 1, 2, ...
_OLD_ENDS = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    "dense_act.weight": "dense.weight",
    "dense_act.bias": "dense.bias",
}  # NVIDIA's
BERT_ALONE = ("BertForPreTraining", "BertForNextSentencePrediction")

WEIGHT_FILES = "model.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json".split()


def is_hugging_face(directory: str | Path) -> bool:
    """Whether a directory holds weights in this layout, and is no export (stablehlo.py)."""
    weights, config, export = (
        any((Path(directory) / name).is_file() for name in names)
        for names in (WEIGHT_FILES, ["config.json"], ["export.json"])
    )
    return weights and (config or not export)


def read_config(directory: str | Path) -> tuple[BertConfig, dict[str, Any]]:
    """(BertConfig, everything in config.json, or in the bert_config.json of before 2019).

    Raises:
      LoadError: neither of them, not JSON, another architecture than BERT's, or a key that would
        change the network and is not known.
    """
    path = Path(directory) / "config.json"
    if not path.is_file() and (old := path.with_name("bert_config.json")).is_file():
        path = old
    if not path.is_file():
        raise LoadError(f"{directory} has no config.json")
    return config_of_file(path)


def config_of_file(path: Path) -> tuple[BertConfig, dict[str, Any]]:
    """(BertConfig, contents) of a configuration file; LoadError as of `read_config`."""
    try:
        values = parse_json(path.read_bytes(), "this")
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        for key, (fits, what) in _OTHER_KEYS.items():
            if values.get(key) and not fits(values[key]):
                raise ValueError(f"{key} must {what}")
        return BertConfig.from_dict(values), values
    except (ValueError, TypeError, OSError) as error:
        raise LoadError(f"{path}: {error}") from error


def read_state_dict(directory: str | Path, naming: Naming = HUGGING_FACE["bert"]) -> dict[str, np.ndarray]:
    """All weights of a directory under today's names; buffers and the tied decoder are left out.

    naming: of its model type.

    Raises:
      LoadError: no weights, a missing or broken shard, or a decoder that should be tied and is not.
    """
    path = _weights_file(directory)
    arrays: dict[str, np.ndarray] = {}
    for file in _shards(path):
        arrays.update(read_torch_pickle(file) if file.suffix == ".bin" else read_safetensors(file))
    return normalise_names(arrays, str(path), naming)


def read_headers(directory: str | Path, naming: Naming = HUGGING_FACE["bert"]) -> dict[str, Header]:
    """Types and shapes of what `read_state_dict` gives, without reading the weights.

    Raises:
      LoadError: no weights, a missing or broken shard, or two entries for one parameter.
    """
    path = _weights_file(directory)
    headers: dict[str, Header] = {}
    for file in _shards(path):
        headers.update(torch_headers(file) if file.suffix == ".bin" else safetensors_headers(file))
    return {name: headers[old] for name, old in _todays_names(headers, str(path), naming)[0].items()}


def _weights_file(directory: str | Path) -> Path:
    for name in WEIGHT_FILES:
        if (path := Path(directory) / name).is_file():
            return path
    raise LoadError(f"{directory} has none of {', '.join(WEIGHT_FILES)}")


def _shards(path: Path) -> list[Path]:
    """The files that a file of weights consists of: itself, or those that an index names."""
    files = [path]
    if path.name.endswith(".index.json"):
        try:
            placement = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
            files = [path.parent / shard for shard in sorted(set(placement.values()))]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LoadError(f"{path} is not an index of shards: {error}") from None
        for file in files:
            if file.parent != path.parent or not file.is_file():
                raise LoadError(f"{path} names the shard {file.name!r}, which is not beside it")
        read = torch_headers if ".bin." in path.name else safetensors_headers
        held = {name: file.name for file in files for name in read(file)}
        if lost := sorted(name for name in placement if name not in held):
            raise LoadError(f"{path} promises {len(lost)} tensors that no shard holds: {lost[:5]}")
    for file in files:
        with open(file, "rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise LoadError(
                    f"{file} is a pointer of Git LFS and not the weights: run `git lfs "
                    "pull` in the clone that it comes from"
                )
    return files


def normalise_names(
    state: Mapping[str, np.ndarray], source: str, naming: Naming = HUGGING_FACE["bert"]
) -> dict[str, np.ndarray]:
    """Old names (gamma, beta, dense_act, no "bert." in front, names of torch's wrappers) become today's; buffers
    and tied copies are dropped.

    Raises:
      LoadError: the MLM decoder is not the word embedding table.
    """
    names, ties = _todays_names(state, source, naming)
    for copy, original in ties.items():
        array, kept = state[copy], state[names[original]]
        if not np.array_equal(array, kept):
            raise LoadError(
                f"{source}: {copy} {array.shape} differs from {original} {kept.shape}; "
                "the decoder is tied to the embeddings"
            )
    return {name: state[old] for name, old in names.items()}


def _todays_names(state: Iterable[str], source: str, naming: Naming) -> tuple[dict[str, str], dict[str, str]]:
    """(today's name -> the name in the file, name of a tied copy -> today's name of its original).

    Raises LoadError for two entries of one parameter.
    """
    inner = {old: _WRAPPERS.sub("", old) for old in state}
    parallel = all(name.startswith(_PARALLEL) for name in inner.values())
    named: dict[str, str] = {}
    for old, name in inner.items():
        name = _todays_name(name.removeprefix(_PARALLEL) if parallel else name, naming)
        if name in named:
            raise LoadError(f"{source} has two entries for {name}: {named[name]} and {old}")
        named[name] = old
    ties = {}
    for copy, original in naming.ties.items():
        if (old := named.pop(copy, None)) is not None and naming.tied:
            if named.setdefault(original, old) != old:
                ties[old] = original
    buffers = {naming.root + end for end in _BUFFERS}
    return {name: old for name, old in named.items() if name not in buffers}, ties


def _todays_name(name: str, naming: Naming) -> str:
    if naming.bare and name.startswith(naming.bare):
        name = f"{naming.root}.{name}"
    for old, new in _OLD_ENDS.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name


# --------------------------------------------------------------------------------------- writing


def state_dict(params: Mapping[str, Any], naming: Naming = HUGGING_FACE["bert"]) -> dict[str, np.ndarray]:
    """Hugging Face's names and orientation for {path: parameter}, float32 contiguous arrays.

    Raises:
      ValueError: a parameter is NaN or infinite: such a model is not worth keeping.
    """
    pieces: dict[str, dict[int, np.ndarray]] = {}
    broken = []
    for path, value in params.items():
        name, transposed = naming(path)
        array = np.asarray(value, np.float32)
        if not np.isfinite(array).all():
            broken.append(f"{path}: {np.count_nonzero(~np.isfinite(array))} of {array.size}")
        pieces.setdefault(name, {})[naming.part(path)[0]] = array.T if transposed else array
    if broken:
        raise ValueError("parameters hold NaN or infinite values and were not written:\n  " + "\n  ".join(broken[:20]))
    return {
        name: np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate([parts[i] for i in sorted(parts)]))
        for name, parts in pieces.items()
    }


def class_name(config: BertConfig, architecture: str) -> tuple[str, str]:
    """(transformers' class for a class of heads.py, its model_type); (the class itself, OWN) where it has none.

    architecture: 'BertForMaskedLM', or transformers' own name of a class, which stays.
    """
    model_type = config.type
    # Left to right, [CLS] sees nothing: the pooler reads the last token here, and [CLS] in transformers.
    pooled = ("BertForSequenceClassification", "BertForMultipleChoice")
    last = config.is_decoder and config.heads == "bert" and architecture in pooled
    if last or model_type == OWN or (model_type != "bert" and architecture in BERT_ALONE):
        return architecture, OWN
    prefix = TYPES[model_type].prefix
    if not architecture.startswith(prefix):
        architecture = prefix + architecture.removeprefix("Bert")
    return architecture, model_type


def export_text(config: BertConfig, architecture: str) -> str:
    """A note on the class that a model is written as, if it is not one of BERT's; else ''."""
    name, model_type = class_name(config, architecture)
    if model_type == OWN:
        return (
            "transformers has no class for this network with these heads: the model is written in bertjax's own "
            "layout, which bertjax alone reads"
        )
    return "" if model_type == "bert" else f"transformers' {name} (model_type {model_type})"


def write_directory(
    target: str | Path,
    config: BertConfig,
    params: Mapping[str, Any],
    architecture: str,
    tokenizer: Tokenizer | None = None,
    labels: Mapping[int, str] | None = None,
    card: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    sentence: SentenceSettings | None = None,
) -> None:
    """Writes a model as Hugging Face does; transformers gives the same logits from it.

    Args:
      params: parameter tree of the model named by `architecture` (a class name of heads.py).
      tokenizer: of bertjax.tokenization; its files are written beside the weights.
      labels: class number -> name, for classifiers.
      card: text of README.md; see `model_card`.
      settings: more entries of config.json, e.g. problem_type.
      sentence: written as a directory of sentence-transformers.

    Raises:
      ValueError: NaN in the weights, or a vocabulary larger than the embedding table.
      FileExistsError: see `whole_directory`.
    """
    config = config.without_padding()
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size} rows")
    architecture, model_type = class_name(config, architecture)
    state = state_dict(heads.with_rows(flatten(params), config.vocab_size), HUGGING_FACE[model_type])
    values = {"architectures": [architecture], **config.to_dict(model_type), "dtype": "float32", **(settings or {})}
    if tokenizer is not None and model_type != OWN:
        values |= {
            key: tokenizer.token_to_id(tokenizer.special_tokens[name])
            for key, name in TYPES[model_type].special.items()
        }
    if labels is None and architecture.endswith(("SequenceClassification", "TokenClassification")):
        # The number of classes is nowhere else in config.json.
        flat = flatten(params)
        last = flat.get("classifier/out_proj/bias", flat.get("classifier/bias", ()))
        labels = {i: f"LABEL_{i}" for i in range(len(last))} or None
    if labels is not None:
        values["id2label"] = {str(i): name for i, name in sorted(labels.items())}
        values["label2id"] = {name: i for i, name in sorted(labels.items())}
    with whole_directory(target, overwrite) as directory:
        write_safetensors(directory / "model.safetensors", state, {"format": "pt"})
        write_json(directory / "config.json", values, indent=2)
        if tokenizer is not None:
            tokenizer.save(directory, config.max_position_embeddings, segments=config.type_vocab_size > 1)
            if (
                model_type != OWN
                and TYPES[model_type].only_tokenizer_json
                and isinstance(tokenizer, WordPieceTokenizer)
            ):
                write_json(directory / "tokenizer.json", of_wordpiece(tokenizer), indent=2, ensure_ascii=False)
        if sentence is not None:
            sentence.write(directory, config.hidden_size)
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")
