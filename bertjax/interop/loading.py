"""Any BERT in: one way to open Hugging Face directories, Google's checkpoints and bertjax runs.

`open_source` finds out what a path holds and reads its weights under their foreign names;
`load_pretrained_params` fits them to a given model, `load_model` makes the model as well. Nothing
is loaded in part: what is missing, unexpected or of another shape is listed and refused, and only
a task head may start afresh, when asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from bertjax import config as settings_of_runs
from bertjax.interop import huggingface, tf1
from bertjax.interop.names import LoadError, Place, google_place, hugging_face_place, match
from bertjax.model import heads
from bertjax.model.kernels import compiler_options
from bertjax.model.paths import flatten, unflatten
from bertjax.model.presets import BertConfig, Execution
from bertjax.tokenization import load_tokenizer

# task name -> model; the class names are transformers' architecture names.
TASKS: dict[str, type[heads.BertNetwork]] = {
    "features": heads.BertModel,
    "pretraining": heads.BertForPreTraining,
    "mlm": heads.BertForMaskedLM,
    "sequence-classification": heads.BertForSequenceClassification,
    "token-classification": heads.BertForTokenClassification,
    "question-answering": heads.BertForQuestionAnswering,
    "multiple-choice": heads.BertForMultipleChoice,
}
ARCHITECTURES = {model.__name__: model for model in TASKS.values()}
# kind of source -> its weight files (of a run the manifests, which hold their checksums)
_WEIGHTS = {"huggingface": ("*.safetensors", "*.bin"), "tf1": ("*.data-*",),
            "bertjax": ("checkpoints/*/manifest.json",)}
_LABELLED = (heads.BertForSequenceClassification, heads.BertForTokenClassification)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a path holds.

    Attributes:
      kind: 'huggingface', 'tf1' or 'bertjax'.
      config: the network.
      settings: everything else that the configuration file says.
      place: parameter path -> its foreign name.
      read: reads the weights, foreign name -> array.
      directory: where tokenizer files are looked for.
    """

    kind: str
    config: BertConfig
    settings: Mapping[str, Any]
    place: Callable[[str], Place]
    read: Callable[[], dict[str, np.ndarray]]
    directory: Path

    def fingerprint(self) -> str:
        """Hash of the weight files' names, sizes and first MiB, by which other weights at the same
        place are told apart without reading them all."""
        digest = hashlib.sha256()
        for pattern in _WEIGHTS[self.kind]:
            for path in sorted(self.directory.glob(pattern)):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                with open(path, "rb") as file:
                    digest.update(file.read(1 << 20))
        return digest.hexdigest()


def open_source(path: str | Path) -> Source:
    """Recognises a model directory, a TF1 checkpoint (directory or prefix) or a bertjax workdir.

    WORKDIR@STEP is the checkpoint of that step of a run instead of its newest.

    Raises:
      LoadError: none of these, or its configuration is missing or describes no BERT.
    """
    if "://" in str(path):
        raise LoadError(f"{path} is not on a local disk; copy the model there first (for example "
                        "gcloud storage cp -r) and name the copy")
    path = Path(path).expanduser()
    if path.is_dir() and huggingface.is_hugging_face(path):
        config, settings = huggingface.read_config(path)
        return Source("huggingface", config, settings, hugging_face_place,
                      lambda: huggingface.read_state_dict(path), path)
    if (path / "checkpoints").is_dir():
        return _open_run(path)
    workdir, _, step = path.name.rpartition("@")
    if step.isdigit() and (path.parent / workdir / "checkpoints").is_dir():
        return _open_run(path.parent / workdir, int(step))
    prefix = tf1.find_prefix(path)
    if prefix is not None:
        config, settings = tf1.read_config(prefix)
        return Source("tf1", config, settings, google_place,
                      lambda: tf1.read_variables(prefix), prefix.parent)
    if path.is_file():
        raise LoadError(f"{path} is a file; give the directory that it is in")
    if not path.exists():
        raise LoadError(f"{path} does not exist. Nothing is downloaded here: a model of the hub "
                        "comes with `hf download NAME --local-dir=DIR`")
    raise LoadError(
        f"{path} holds no model: expected config.json with {' or '.join(huggingface.WEIGHT_FILES)}"
        ", bert_config.json with bert_model.ckpt.index, or a bertjax workdir with checkpoints/"
    )


def _open_run(workdir: Path, step: int | None = None) -> Source:
    """A checkpoint of a training run; None = the newest intact one."""
    if (workdir / "finetune.json").is_file():
        raise LoadError(f"{workdir} is a fine-tuning run; its best model is in {workdir / 'model'}"
                        + ("" if (workdir / "model").is_dir() else ", once it has finished"))
    if not (workdir / "config.json").is_file():
        raise LoadError(f"{workdir} has checkpoints/ but no config.json that describes the model")
    run = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    vocab_size = load_tokenizer(workdir).vocab_size
    config = settings_of_runs.model_config(ml_collections.ConfigDict(run), vocab_size)

    def read() -> dict[str, np.ndarray]:
        # Late: orbax takes a second to import.
        from bertjax.training.checkpoint import CheckpointError, Checkpoints

        # Read only: the run may still be training, or be on a disk that cannot be written.
        checkpoints = Checkpoints(str(workdir / "checkpoints"), read_only=True)
        try:
            state, _ = checkpoints.restore_numpy(step)
        except CheckpointError as error:
            raise LoadError(str(error)) from error
        finally:
            checkpoints.close()
        return flatten(state["params"])

    return Source("bertjax", config, run, lambda name: Place(name, False), read, workdir)


def check_pretrained(path: str | Path, config: BertConfig) -> None:
    """Refuses a checkpoint of another network before anything is built or read in full.

    Activation, epsilon and heads have no shape, so nothing else would notice that they differ.

    Raises:
      LoadError: not a checkpoint, or its configuration differs from `config`.
    """
    theirs = open_source(path).config
    ignored = {"hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range",
               "pad_token_id"}
    same = {"gelu_pytorch_tanh": "gelu_new"}
    differences = []
    for field in dataclasses.fields(BertConfig):
        stored, asked = getattr(theirs, field.name), getattr(config, field.name)
        if field.name not in ignored and same.get(stored, stored) != same.get(asked, asked):
            differences.append(f"  {field.name}: checkpoint {stored!r}, model {asked!r}")
    if differences:
        raise LoadError(
            f"{path} is not a checkpoint of the configured model:\n" + "\n".join(differences)
            + "\nSet the model's configuration to the checkpoint's values. A larger vocabulary "
            "comes from `python -m bertjax.tools.convert --add_vocab`."
        )


def load_pretrained_params(
    path: str | Path, model: heads.BertNetwork, key: jax.Array, reinitialise_head: bool = False
) -> dict[str, Any]:
    """The parameters of `model` from any checkpoint, as a nested dict of float32 numpy arrays.

    Args:
      path: see `open_source`.
      key: draws the heads that start afresh.
      reinitialise_head: start heads afresh that the file lacks or has in another size (a new
        task); the encoder is always loaded in full.

    Raises:
      LoadError: the configurations differ, or names and shapes do, all of them listed.
    """
    check_pretrained(path, model.config)
    params, _ = fit(open_source(path), model, key, reinitialise_head)
    return params


def fit(
    source: Source, model: heads.BertNetwork, key: jax.Array, reinitialise_head: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """(parameters of `model` from `source`, the paths that started afresh).

    Raises:
      LoadError: names or shapes do not fit.
    """
    loaded, fresh = stored_parameters(source, model, reinitialise_head)
    if fresh:
        loaded |= jax.device_get(draw(model, fresh)(key))
    shapes = heads.parameter_shapes(model)
    return unflatten({path: loaded[path] for path in flatten(shapes)}), fresh


def stored_parameters(
    source: Source, model: heads.BertNetwork, reinitialise_head: bool = False
) -> tuple[dict[str, np.ndarray], list[str]]:
    """({path: array} of `model` from `source`, the paths that it lacks).

    Raises:
      LoadError: names or shapes do not fit.
    """
    wanted = {path: leaf.shape for path, leaf in flatten(heads.parameter_shapes(model)).items()}
    return match(wanted, source.read(), source.place, str(source.directory), reinitialise_head)


def draw(
    model: heads.BertNetwork, paths: Sequence[str]
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """A compiled key -> {path: initial parameter} of these paths only.

    They are what `init_params` draws for them; to compile the drawing of a whole encoder would take
    seconds, so a head is drawn above an encoder of one layer where it is the same there.
    """
    small = model.clone(config=dataclasses.replace(model.config, num_hidden_layers=1))
    here, there = (flatten(heads.parameter_shapes(m)) for m in (model, small))
    drawn = small if all(there.get(path) == here[path] for path in paths) else model

    def chosen(key: jax.Array) -> dict[str, jax.Array]:
        flat = flatten(heads.init_params(drawn, key))
        return {path: flat[path] for path in paths}

    return jax.jit(chosen)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, ready to be called.

    Attributes:
      model: the flax module (config and execution inside).
      params: nested dict of arrays.
      tokenizer: None where the directory has none.
      labels: class number -> name, for classifiers that name their classes.
      settings: the whole configuration file.
      fresh: parameters that were initialised afresh on request.
    """

    model: heads.BertNetwork
    params: dict[str, Any]
    tokenizer: Any = None
    labels: dict[int, str] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fresh: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        static = ("all_hidden",)
        object.__setattr__(self, "_apply", jax.jit(
            lambda params, *args, **kwargs: self.model.apply({"params": params}, *args, **kwargs),
            static_argnames=static, compiler_options=compiler_options(jax.default_backend()),
        ))

    @property
    def config(self) -> BertConfig:
        """The network's configuration."""
        return self.model.config

    def __call__(self, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, compiled once a shape; arguments as in heads.py."""
        return self._apply(self.params, input_ids, attention_mask, *args, **kwargs)


def load_model(
    path: str | Path,
    task: str | None = None,
    execution: Execution | None = None,
    num_labels: int | None = None,
    reinitialise_head: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """A model from any checkpoint in one line.

    Args:
      path: Hugging Face directory, TF1 checkpoint (directory or prefix), or bertjax workdir.
      task: a name of TASKS; None takes what the checkpoint says it is.
      execution: how to run it; None is float32.
      num_labels: of a new classifier; None takes the file's.
      reinitialise_head: start the task head afresh where the file has none or one of another size.
      seed: of that head.

    Raises:
      LoadError: no checkpoint, another network, or weights that do not fit.
      ValueError: unknown task.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    if num_labels is not None and num_labels < 1:
        raise ValueError(f"num_labels={num_labels} must be at least 1")
    source = open_source(path)
    kind = TASKS[task] if task else _declared(source)
    options: dict[str, Any] = {}
    labels = _labels(source.settings)
    if kind in _LABELLED:
        options["num_labels"] = num_labels or _stored_labels(source) or 2
        if labels and len(labels) != options["num_labels"]:
            labels = None
    model = kind(source.config, execution or Execution(), **options)
    tokenizer = _tokenizer(source)
    if tokenizer is not None and tokenizer.vocab_size > source.config.vocab_size:
        raise LoadError(
            f"{source.directory}: the tokenizer has {tokenizer.vocab_size} entries, the model "
            f"{source.config.vocab_size} rows: the vocabulary is not this checkpoint's")
    params, fresh = fit(source, model, jax.random.key(seed), reinitialise_head)
    return LoadedModel(
        model, jax.tree.map(jax.numpy.asarray, params), tokenizer, labels,
        source.settings, tuple(fresh),
    )


def _declared(source: Source) -> type[heads.BertNetwork]:
    """The model class that the checkpoint was written from; if it does not say, what it holds."""
    if source.kind != "huggingface":
        return heads.BertForPreTraining
    if not source.settings.get("architectures"):
        stored = source.read()
        if "cls.predictions.bias" not in stored:
            return heads.BertModel
        both = "cls.seq_relationship.bias" in stored
        return heads.BertForPreTraining if both else heads.BertForMaskedLM
    for name in source.settings["architectures"]:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise LoadError(
        f"{source.directory}: architectures {source.settings['architectures']} is none of "
        f"{', '.join(ARCHITECTURES)}; name a task ({', '.join(TASKS)})"
    )


def _labels(settings: Mapping[str, Any]) -> dict[int, str] | None:
    stored = settings.get("id2label")
    return {int(i): name for i, name in stored.items()} if isinstance(stored, Mapping) else None


def _stored_labels(source: Source) -> int | None:
    """Rows of the stored classifier, read from the weights themselves: config files often lie."""
    bias = source.read().get(source.place("classifier/bias").name)
    return None if bias is None else bias.shape[0]


def _tokenizer(source: Source) -> Any:
    """The tokenizer beside the weights, or None without vocabulary files."""
    try:
        return load_tokenizer(source.directory)
    except FileNotFoundError:
        return None
