"""Hugging Face's model directories, read without torch and written so that transformers loads them.

    config.json  model.safetensors (or shards with an index, or pytorch_model.bin)
    vocab.txt  tokenizer_config.json  README.md

Reading gives (BertConfig, the whole config.json, state dict of numpy arrays under today's names);
`names.match` then fits the state dict to a model. Writing is atomic: a directory appears complete
or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from bertjax.files import whole_directory
from bertjax.interop.names import LoadError, hugging_face_place
from bertjax.interop.torch_pickle import read_torch_pickle
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from bertjax.version import source_version

_SAFETENSORS_TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}
# Buffers that old versions of transformers stored beside the weights; they hold 0, 1, 2, ...
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_LFS_POINTER = b"version https://git-lfs"
_PARALLEL = "module."  # before every name, where torch's DataParallel was saved with its model
_BARE = ("embeddings.", "encoder.", "pooler.")  # a BertModel saved alone has no "bert." in front

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                "pytorch_model.bin.index.json")


def is_hugging_face(directory: str | Path) -> bool:
    """Whether a directory holds weights in this layout."""
    return any((Path(directory) / name).is_file() for name in WEIGHT_FILES)


def read_config(directory: str | Path) -> tuple[BertConfig, dict[str, Any]]:
    """(BertConfig, everything in config.json, or in the bert_config.json of before 2019).

    Raises:
      LoadError: neither of them, not JSON, or another architecture than BERT's.
    """
    path = Path(directory) / "config.json"
    if not path.is_file() and (old := path.with_name("bert_config.json")).is_file():
        path = old
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if not all(str(key).isdigit() for key in values.get("id2label") or ()):
            raise ValueError("id2label must map the numbers of the classes to their names")
        return BertConfig.from_dict(values), values
    except FileNotFoundError:
        raise LoadError(f"{directory} has no config.json") from None
    except (json.JSONDecodeError, ValueError, TypeError) as error:
        raise LoadError(f"{path}: {error}") from error


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Name -> array of one file, bfloat16 included (as ml_dtypes.bfloat16).

    Raises:
      LoadError: truncated or malformed.
    """
    try:
        with safetensors.safe_open(path, "numpy"):
            pass  # checks header and size; its tensors would be copied, one by one, from the disk
    except safetensors.SafetensorError as error:
        raise LoadError(f"{path} is not a readable safetensors file: {error}") from error
    content = np.fromfile(path, np.uint8)
    start = 8 + int(content[:8].view("<u8")[0])
    arrays = {}
    for name, entry in json.loads(content[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _SAFETENSORS_TYPES:
            raise LoadError(f"{path}: {name} has type {entry['dtype']}, which is not supported")
        first, last = entry["data_offsets"]
        data = content[start + first : start + last].view(_SAFETENSORS_TYPES[entry["dtype"]])
        arrays[name] = data.reshape(entry["shape"])
    return arrays


def read_state_dict(directory: str | Path) -> dict[str, np.ndarray]:
    """All weights of a directory under today's names; buffers and the tied decoder are left out.

    Raises:
      LoadError: no weights, a missing or broken shard, or an untied decoder, which BERT has not.
    """
    directory = Path(directory)
    for name in WEIGHT_FILES:
        path = directory / name
        if path.is_file():
            read = _read_shards if name.endswith(".index.json") else _read_weights
            return normalise_names(read(path), str(path))
    raise LoadError(f"{directory} has none of {', '.join(WEIGHT_FILES)}")


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise LoadError(f"{path} is a pointer of Git LFS and not the weights: run `git lfs "
                            "pull` in the clone that it comes from")
    return read_torch_pickle(path) if path.suffix == ".bin" else read_safetensors(path)


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    try:
        placement = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{index} is no index of shards: {error}") from None
    arrays: dict[str, np.ndarray] = {}
    for shard in sorted(set(placement.values())):
        path = index.parent / shard
        if path.name != shard or not path.is_file():
            raise LoadError(f"{index} names the shard {shard!r}, which is not beside it")
        arrays.update(_read_weights(path))
    lost = sorted(set(placement) - set(arrays))
    if lost:
        raise LoadError(f"{index} promises {len(lost)} tensors that no shard holds: {lost[:5]}")
    return arrays


def normalise_names(state: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
    """Old names (gamma, beta, no "bert.", all with "module.") become today's; buffers and tied
    copies are dropped.

    Raises:
      LoadError: the MLM decoder is not the word embedding table.
    """
    named: dict[str, np.ndarray] = {}
    parallel = all(name.startswith(_PARALLEL) for name in state)
    for name, array in state.items():
        if parallel:
            name = name.removeprefix(_PARALLEL)
        if name.startswith(_BARE):
            name = "bert." + name
        if name.endswith("LayerNorm.gamma"):
            name = name.removesuffix("gamma") + "weight"
        elif name.endswith("LayerNorm.beta"):
            name = name.removesuffix("beta") + "bias"
        if name in named:
            raise LoadError(f"{source} has two entries for {name}")
        if name not in _BUFFERS:
            named[name] = array

    copies = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    for copy, original in copies.items():
        array = named.pop(copy, None)
        if array is None:
            continue
        if original not in named:
            named[original] = array
        elif not np.array_equal(array, named[original]):
            raise LoadError(
                f"{source}: {copy} {array.shape} differs from {original} "
                f"{named[original].shape}; BERT's decoder is tied to its embeddings"
            )
    return named


# --------------------------------------------------------------------------------------- writing


def state_dict(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face's names and orientation for a parameter tree, float32 contiguous arrays.

    Raises:
      ValueError: a parameter is NaN or infinite: such a model is not worth keeping.
    """
    state: dict[str, np.ndarray] = {}
    broken = []
    for path, value in flatten(params).items():
        name, transposed = hugging_face_place(path)
        array = np.asarray(value, np.float32)
        if not np.isfinite(array).all():
            broken.append(f"{path}: {np.count_nonzero(~np.isfinite(array))} of {array.size}")
        state[name] = np.ascontiguousarray(array.T if transposed else array)
    if broken:
        raise ValueError(
            "the parameters hold NaN or infinite values and were not written:\n  "
            + "\n  ".join(broken[:20])
        )
    return state


def write_directory(
    target: str | Path,
    config: BertConfig,
    params: Mapping[str, Any],
    architecture: str,
    tokenizer: Any = None,
    labels: Mapping[int, str] | None = None,
    card: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model as Hugging Face does; transformers gives the same logits from it.

    Args:
      params: parameter tree of the model named by `architecture` (a class name of heads.py, which
        are transformers' own).
      tokenizer: of bertjax.tokenization; its files are written beside the weights.
      labels: class number -> name, for classifiers.
      card: text of README.md; see `model_card`.
      settings: more entries of config.json, e.g. problem_type.

    Raises:
      ValueError: NaN in the weights, or a vocabulary larger than the embedding table.
      FileExistsError: see `whole_directory`.
    """
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size} rows"
        )
    state = state_dict(params)
    values = {
        "architectures": [architecture],
        **config.to_dict(),
        "dtype": "float32",
        **(settings or {}),
    }
    if labels is not None:
        values["id2label"] = {str(i): name for i, name in sorted(labels.items())}
        values["label2id"] = {name: i for i, name in sorted(labels.items())}
    with whole_directory(target, overwrite) as directory:
        safetensors.numpy.save_file(
            state, directory / "model.safetensors", metadata={"format": "pt"}
        )
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(directory, config.max_position_embeddings)
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")


def model_card(
    name: str,
    architecture: str,
    summary: str,
    data: str = "",
    recipe: Mapping[str, Any] | None = None,
    sections: Mapping[str, str] | None = None,
    fill_mask: bool = False,
) -> str:
    """README.md of a model directory: what it is, how to load it, what it was trained on and how.

    Args:
      architecture: the class of heads.py and of transformers that the weights are of.
      summary: the first paragraph.
      recipe: what of the training -> value, in the order to print.
      sections: further titles and their Markdown.
      fill_mask: whether it answers `fill-mask`, which the card then shows.
    """
    head = ["---", "library_name: transformers", "tags:", "- bert", "- bertjax"]
    head += ["pipeline_tag: fill-mask"] if fill_mask else []
    sentence = "The capital of France is [MASK]."
    theirs = (["from transformers import pipeline", "",
               'fill = pipeline("fill-mask", model="DIRECTORY")', f'fill("{sentence}")']
              if fill_mask else
              [f"from transformers import AutoTokenizer, {architecture}", "",
               'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")',
               f'model = {architecture}.from_pretrained("DIRECTORY")'])
    ours = ["import bertjax", "", 'model = bertjax.load_model("DIRECTORY")']
    ours += [f'bertjax.fill_mask(model, "{sentence}")'] if fill_mask else []
    lines = [*head, "---", "", f"# {name}", "", summary, "",
             f"Written by bertjax {source_version()} as `{architecture}`.", "", "## Use", "",
             "```python", *theirs, "```", "", "or, without torch,", "", "```python", *ours, "```"]
    if data:
        lines += ["", "## Data", "", data]
    if recipe:
        rows = [f"| {what} | {value:.6g} |" if isinstance(value, float) else
                f"| {what} | {value} |" for what, value in recipe.items()]
        lines += ["", "## Training", "", "| | |", "|---|---|", *rows]
    for title, text in (sections or {}).items():
        lines += ["", f"## {title}", "", text]
    return "\n".join(lines) + "\n"
