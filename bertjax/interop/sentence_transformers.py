"""What a directory of sentence-transformers says about embeddings, read, done and written.

    modules.json                         the modules in their order
    sentence_bert_config.json            greatest length, lower-casing
    1_Pooling/config.json                what makes one vector of the states of a text
    2_Dense/ (config.json, weights), 3_Normalize/      what is done with that vector
    config_sentence_transformers.json    prompts: what stands before a text; how many of its numbers a vector keeps

In: a model directory. Out: `SentenceSettings`, which embeddings.sentence_embeddings obeys. A module that is not done
here is refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bertjax.formats.arrays import LoadError, read_safetensors, write_safetensors
from bertjax.formats.files import read_json, write_json
from bertjax.formats.torch_pickle import read_torch_pickle

# What each pooling makes of the states [tokens, H] of one text, and the place of each token in it, from 1.
_POOLED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cls": lambda states, places: states[0],
    "max": lambda states, places: states.max(axis=0),
    "mean": lambda states, places: states.sum(axis=0) / len(states),
    "mean_sqrt_len_tokens": lambda states, places: states.sum(axis=0) / len(states) ** 0.5,
    "weightedmean": lambda states, places: places @ states / places.sum(),
    "lasttoken": lambda states, places: states[-1],
}
POOLINGS = tuple(_POOLED)
# Keys of 1_Pooling/config.json before `pooling_mode`, in the order in which their vectors are joined.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS = ("word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode")
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
}
_DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function", "use_residual")
# Of sentence_bert_config.json; the rest would change what the model gets to see.
_HARMLESS_TRANSFORMER = (
    "model_args config_args tokenizer_args model_kwargs config_kwargs tokenizer_kwargs processor_kwargs "
    "transformer_task modality_config module_output_name"
).split()


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """A layer over the vectors: activation(x W + b), and with `residual` x, or x times a matrix, added to it."""

    weight: np.ndarray  # [out, in], as torch has it
    bias: np.ndarray | None
    activation: str  # a name of torch.nn
    residual: np.ndarray | bool = False  # [out, in]; True = x itself

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        outputs = vectors @ self.weight.T + (0 if self.bias is None else self.bias)
        outputs = np.asarray(_ACTIVATIONS[self.activation](outputs), np.float32)
        if self.residual is False:
            return outputs
        return outputs + (vectors if self.residual is True else vectors @ self.residual.T)

    def write(self, directory: Path) -> None:
        """Its configuration and its weights, by the names of sentence-transformers."""
        out, size = self.weight.shape
        package = "linear" if self.activation == "Identity" else "activation"
        values = {
            "in_features": size,
            "out_features": out,
            "bias": self.bias is not None,
            "activation_function": f"torch.nn.modules.{package}.{self.activation}",
            **({"use_residual": True} if self.residual is not False else {}),
        }
        write_json(directory / "config.json", values)
        named = {"linear.weight": self.weight, "linear.bias": self.bias, "residual.weight": self.residual}
        tensors = {name: np.ascontiguousarray(x) for name, x in named.items() if isinstance(x, np.ndarray)}
        write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})


def normalise(vectors: np.ndarray) -> np.ndarray:
    """The vectors [N, H] scaled to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


Step = Dense | Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class SentenceSettings:
    """How a text becomes one vector.

    Attributes:
      directory: of the encoder's files.
      pooling: names of POOLINGS, whose vectors are joined in this order.
      steps: what is done with the vectors [N, H] then: `normalise`, or a Dense.
      max_length: tokens of a text, specials included; None = as many as there are positions.
      lower_case: whether texts are lower-cased before the tokenizer sees them.
      prompts: by name, what may stand before a text.
      default_prompt: the name of the one that does if none is named.
      include_prompt: whether the tokens of a prompt are pooled too.
      truncate_dim: how many numbers are left of a vector in the end; None = all.
    """

    directory: Path = Path()
    pooling: tuple[str, ...] = ("mean",)
    steps: tuple[Step, ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    truncate_dim: int | None = None

    def prompt(self, name: str | None = None) -> str:
        """The prompt of this name, which stands before a text. Raises ValueError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            raise ValueError(f"prompt={name!r} is not one of this model's: {', '.join(self.prompts) or 'it has none'}")
        return "" if name is None else self.prompts[name]

    def given(self, text: Any, prompt: str | None = None) -> Any:
        """What the tokenizer gets of a text, or of a pair, after the prompt of this name; anything else as it is."""
        before = self.prompt(prompt)
        match text:
            case str():
                return self._lowered(before + text)
            case (str() as first, str() as second):
                return self._lowered(before + first), self._lowered(second)
            case _:
                return text

    def _lowered(self, text: str) -> str:
        # Letter by letter, as sentence-transformers does: the end of a word makes no difference.
        return "".join(map(str.lower, text)) if self.lower_case else text

    def pooled(self, states: np.ndarray, first: int = 0) -> np.ndarray:
        """The vector of a text, of its last hidden states [tokens, H] from token `first` on."""
        places = np.arange(1, len(states) + 1, dtype=np.float32)[first:]
        return np.concatenate([_POOLED[one](states[first:], places) for one in self.pooling])

    def write(self, directory: Path, hidden_size: int) -> None:
        """Writes the files that `read` reads, beside those of the encoder."""
        steps = ["Dense" if isinstance(step, Dense) else "Normalize" for step in self.steps]
        paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(["Pooling", *steps], 1))]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(zip(paths, ["Transformer", "Pooling", *steps], strict=True))
        ]
        for path in paths:
            (directory / path).mkdir(exist_ok=True)
        pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size}
        if list(self.pooling) == [mode for mode in _MODES.values() if mode in self.pooling]:  # for any version
            pooling |= {key: mode in self.pooling for key, mode in _MODES.items()}
        else:
            pooling["pooling_mode"] = list(self.pooling)
        lengths = {"max_seq_length": self.max_length, "do_lower_case": self.lower_case}
        write_json(directory / "modules.json", modules)
        write_json(directory / "sentence_bert_config.json", lengths)
        write_json(directory / "1_Pooling/config.json", pooling | {"include_prompt": self.include_prompt})
        if self.prompts or self.truncate_dim:
            values = {"prompts": dict(self.prompts), "default_prompt_name": self.default_prompt}
            values |= {"similarity_fn_name": "cosine", "truncate_dim": self.truncate_dim}
            write_json(directory / "config_sentence_transformers.json", values)
        for path, step in zip(paths[2:], self.steps, strict=True):
            if isinstance(step, Dense):
                step.write(directory / path)


def read(directory: Path) -> SentenceSettings | None:
    """The settings of a directory; None without modules.json.

    Raises:
      LoadError: a file is damaged, or asks for a step that is not done here.
    """
    if not (directory / "modules.json").is_file():
        return None
    settings, pooled, steps = SentenceSettings(directory), False, []
    for number, module in enumerate(_json(directory / "modules.json", list)):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, Mapping) else ""
        place = directory / str(module.get("path") or "") if kind else directory
        if kind == "Transformer" and number == 0:
            settings = dataclasses.replace(settings, directory=place, **_transformer(place))
        elif kind == "Pooling" and number == 1:
            pooled, settings = True, dataclasses.replace(settings, **_pooling(place / "config.json"))
        elif kind == "Normalize" and pooled:
            _check_keys(place / "config.json", ())
            steps.append(normalise)
        elif kind == "Dense" and pooled:
            steps.append(_dense(place))
        elif kind != "Dropout":  # it does nothing in prediction
            raise LoadError(
                f"{directory / 'modules.json'}: module {number}, {kind or module}, is not supported there; to use the "
                "encoder without it, copy the model's files without modules.json"
            )
    return dataclasses.replace(settings, steps=tuple(steps), **_of_sentences(directory))


def _of_sentences(directory: Path) -> dict[str, Any]:
    path = directory / "config_sentence_transformers.json"
    values = _json(path, dict) if path.is_file() else {}
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise LoadError(f"{path}: prompts={prompts!r:.80} must be texts by name")
    if default is not None and default not in prompts:
        raise LoadError(f"{path}: default_prompt_name={default!r:.40} is not one of prompts ({', '.join(prompts)})")
    if (size := values.get("truncate_dim")) is not None and (type(size) is not int or size < 1):
        raise LoadError(f"{path}: truncate_dim={size!r:.40} must be a whole number, at least 1, or null")
    prompts = {name: text or "" for name, text in prompts.items()}
    return {"prompts": prompts, "default_prompt": default, "truncate_dim": size}


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


def _pooling(path: Path) -> dict[str, Any]:
    values = _json(path, dict)
    modes = values.get("pooling_mode")
    if modes is None:  # as it was before sentence-transformers 5.3
        modes = [mode for key, mode in _MODES.items() if values.get(key)] or ["mean"]
    chosen = list(modes) if isinstance(modes, list) else [modes]
    chosen += [name for name, value in values.items() if value and name not in (*_POOLING_KEYS, *_MODES)]
    if wrong := [mode for mode in chosen if mode not in POOLINGS]:
        raise LoadError(f"{path}: pooling {', '.join(map(str, wrong))} is not supported, only {', '.join(POOLINGS)}")
    return {"pooling": tuple(chosen), "include_prompt": bool(values.get("include_prompt", True))}


def _check_keys(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """The settings of a module over the vectors; LoadError for one that is not known."""
    values = _json(path, dict) if path.is_file() else {}
    for name in ("module_input_name", "module_output_name"):
        if values.pop(name, None) not in (None, "sentence_embedding"):
            raise LoadError(f"{path}: {name} is not supported, only the sentence's vector")
    if unknown := [name for name, value in values.items() if value and name not in known]:
        raise LoadError(f"{path}: {', '.join(unknown)} not supported")
    return values


def _dense(directory: Path) -> Dense:
    path = directory / "config.json"
    values = _check_keys(path, _DENSE_KEYS)
    activation = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, name = activation.rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise LoadError(f"{path}: activation_function {activation:.80} is not one of {', '.join(_ACTIVATIONS)}")
    weights, old = directory / "model.safetensors", directory / "pytorch_model.bin"
    state = read_safetensors(weights) if weights.is_file() else read_torch_pickle(old)
    state = {key: np.asarray(array, np.float32) for key, array in state.items()}
    shape = (values.get("out_features"), values.get("in_features"))
    wanted = {"linear.weight": shape}
    if values.get("bias", True):
        wanted["linear.bias"] = shape[:1]
    projected = values.get("use_residual", False) and shape[0] != shape[1]
    if projected:
        wanted["residual.weight"] = shape
    if wanted != (found := {key: array.shape for key, array in state.items()}):
        raise LoadError(f"{directory}: its weights are {found}, but {path.name} says {wanted}")
    residual = state["residual.weight"] if projected else bool(values.get("use_residual", False))
    return Dense(state["linear.weight"], state.get("linear.bias"), name, residual)


def _json(path: Path, kind: type) -> Any:
    try:
        return read_json(path, kind)
    except (ValueError, OSError) as error:
        raise LoadError(str(error)) from error
