"""What a directory of sentence-transformers says about embeddings: length, pooling, normalisation.

    modules.json  sentence_bert_config.json  config_sentence_transformers.json
    1_Pooling/config.json  2_Normalize/

In: a model directory. Out: `SentenceSettings`, which inference.sentence_embeddings obeys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bertjax.formats.arrays import LoadError

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens")
# Keys of 1_Pooling/config.json, old and new -> a pooling.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
_HARMLESS_POOLING = ("word_embedding_dimension", "embedding_dimension", "include_prompt")
# Of sentence_bert_config.json; the rest would change what the model gets to see.
_HARMLESS_TRANSFORMER = (
    "model_args",
    "config_args",
    "tokenizer_args",
    "model_kwargs",
    "config_kwargs",
    "tokenizer_kwargs",
    "processor_kwargs",
    "transformer_task",
    "modality_config",
    "module_output_name",
)


class SentenceSettings(NamedTuple):
    """How a text becomes one vector.

    Attributes:
      directory: of the encoder's files.
      pooling: names of POOLINGS, whose vectors are joined in this order.
      normalise: whether the vectors have length 1.
      max_length: tokens of a text, specials included; None = as many as there are positions.
      lower_case: whether texts are lower-cased before the tokenizer sees them.
    """

    directory: Path
    pooling: tuple[str, ...] = ("mean",)
    normalise: bool = False
    max_length: int | None = None
    lower_case: bool = False

    def write(self, directory: Path, hidden_size: int) -> None:
        """Writes the files that `read` reads, beside those of the encoder."""
        kinds = ["Transformer", "Pooling", "Normalize"][: 3 if self.normalise else 2]
        modules = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(kinds)
        ]
        pooling = {"word_embedding_dimension": hidden_size} | {
            key: mode in self.pooling for key, mode in _MODES.items()
        }
        for name, values in (
            ("modules.json", modules),
            ("1_Pooling/config.json", pooling),
            ("sentence_bert_config.json", {"max_seq_length": self.max_length, "do_lower_case": self.lower_case}),
        ):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(json.dumps(values, indent=2) + "\n")


def read(directory: Path) -> SentenceSettings | None:
    """The settings of a directory; None without modules.json.

    Raises:
      LoadError: a file is damaged, or asks for a step that is not done here.
    """
    if not (directory / "modules.json").is_file():
        return None
    settings, pooled = SentenceSettings(directory), False
    for number, module in enumerate(_json(directory / "modules.json", list)):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, Mapping) else ""
        place = directory / str(module.get("path") or "") if kind else directory
        if kind == "Transformer" and number == 0:
            settings = settings._replace(directory=place, **_transformer(place))
        elif kind == "Pooling" and number == 1:
            pooled, settings = True, settings._replace(pooling=_pooling(place / "config.json"))
        elif kind == "Normalize" and pooled:
            settings = settings._replace(normalise=True)
        elif kind != "Dropout":  # it does nothing in prediction
            raise LoadError(
                f"{directory / 'modules.json'}: module {number}, {kind or module}, is not "
                "supported there; to use the encoder without it, copy the model's files without "
                "modules.json"
            )
    prompts = directory / "config_sentence_transformers.json"
    if prompts.is_file() and (name := _json(prompts, dict).get("default_prompt_name")):
        raise LoadError(
            f"{prompts}: default_prompt_name={name!r}: a text that stands before every "
            "input is not supported; set it to null and write it into your texts"
        )
    return settings


def _transformer(directory: Path) -> dict[str, Any]:
    path = directory / "sentence_bert_config.json"
    values = _json(path, dict) if path.is_file() else {}
    known = ("max_seq_length", "do_lower_case", *_HARMLESS_TRANSFORMER)
    if unknown := [name for name, value in values.items() if value and name not in known]:
        raise LoadError(f"{path}: {', '.join(unknown)} not supported")
    length = values.get("max_seq_length")
    if length is None and (directory / "tokenizer_config.json").is_file():
        stored = _json(directory / "tokenizer_config.json", dict).get("model_max_length")
        length = stored if type(stored) is int and 3 <= stored < 10**6 else None
    if length is not None and (type(length) is not int or length < 3):
        raise LoadError(f"{path}: max_seq_length={length!r:.40} must be a number of tokens, 3 or more, or null")
    return {"max_length": length, "lower_case": bool(values.get("do_lower_case"))}


def _pooling(path: Path) -> tuple[str, ...]:
    values = _json(path, dict)
    modes = values.get("pooling_mode")
    chosen = [modes] if isinstance(modes, str) else list(modes or ())
    for name, value in values.items():
        if name in _MODES:
            if value and _MODES[name] not in chosen:
                chosen.append(_MODES[name])
        elif value and name not in (*_HARMLESS_POOLING, "pooling_mode"):
            chosen.append(name)
    if wrong := [mode for mode in chosen if mode not in POOLINGS]:
        raise LoadError(f"{path}: pooling {', '.join(map(str, wrong))} is not supported, only {', '.join(POOLINGS)}")
    order = ("cls", "max", "mean", "mean_sqrt_len_tokens")  # in which they are joined
    return tuple(sorted(chosen, key=order.index)) or ("mean",)


def _json(path: Path, kind: type) -> Any:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, kind):
            raise ValueError(f"not a JSON {'object' if kind is dict else 'array'}")
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(f"{path}: {error}") from error
    return values
