"""Any BERT in: parameters of a model, or a whole model, from what source.py opens.

`load_pretrained_params` fits stored weights to a given model, `load_model` makes the model as well.
Nothing is loaded in part: what is missing, unexpected or of another shape is listed and refused,
and only a task head may start with random weights, when asked for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bertjax import jax_settings
from bertjax.formats.arrays import LoadError
from bertjax.interop.huggingface import BERT_ALONE
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.matching import match, match_headers
from bertjax.interop.names import heads_in
from bertjax.interop.source import Source, open_source
from bertjax.model import heads
from bertjax.model.model_types import TYPES
from bertjax.model.outputs import STYLES
from bertjax.model.paths import flatten, unflatten
from bertjax.model.presets import BertConfig, Execution
from bertjax.tokenization import Tokenizer

# task name -> model; the class names are transformers' architecture names.
TASKS: dict[str, type[heads.BertNetwork]] = {
    "features": heads.BertModel,
    "pretraining": heads.BertForPreTraining,
    "mlm": heads.BertForMaskedLM,
    "next-sentence": heads.BertForNextSentencePrediction,
    "sequence-classification": heads.BertForSequenceClassification,
    "token-classification": heads.BertForTokenClassification,
    "question-answering": heads.BertForQuestionAnswering,
    "multiple-choice": heads.BertForMultipleChoice,
}
# transformers' class -> ours
ARCHITECTURES = {
    **{
        model.__name__.replace("Bert", kind.prefix, 1): model
        for kind in TYPES.values()
        for model in TASKS.values()
        if kind.prefix == "Bert" or model.__name__ not in BERT_ALONE
    },
    # The same arrays; left to right if is_decoder.
    **dict.fromkeys(("BertLMHeadModel", "RobertaForCausalLM", "XLMRobertaForCausalLM"), heads.BertForMaskedLM),
    "CamembertForCausalLM": heads.BertForMaskedLM,
}
_ENCODER_ALONE = {"ElectraForPreTraining": heads.BertModel}  # its discriminator's head is not read
_LABELLED = (heads.BertForSequenceClassification, heads.BertForTokenClassification)
_CLASSIFIERS = {*_LABELLED, heads.BertForMultipleChoice}  # heads of one name in the files
# Fields that the parameters do not depend on, so that they may differ from the checkpoint's.
_FREE = (
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout initializer_range pad_token_id model_type"
).split()


def check_vocabulary(path: str | Path, tokenizer: Tokenizer) -> None:
    """Refuses weights that were trained on other ids than the data have, as far as they say.

    Raises:
      LoadError: not a checkpoint, or its tokenizer is another one.
    """
    source = open_source(path)
    if source.tokenizer is not None and source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise LoadError(
            f"{path} was trained with another vocabulary or casing than the data were made with, "
            "so the same ids would mean other words. Build the corpus again with build_corpus "
            f"--tokenizer={path} (for a model with more words: bertjax.tools.convert --add_vocab)"
        )


def check_pretrained(
    path: str | Path,
    model: heads.BertNetwork,
    reinitialise_head: bool | Collection[str] = False,
    extend_positions: str = "",
) -> Source:
    """Refuses a checkpoint that does not fit, before anything is built or its weights are read.

    Activation, epsilon and heads have no shape, so nothing else would notice that they differ.

    Args:
      model: that the weights are for.
      reinitialise_head: whether heads may start with random weights, or the names of those that may.
      extend_positions: how a table of fewer positions is extended (positions.EXTENSIONS); '' = not at all.

    Raises:
      LoadError: not a checkpoint; its configuration, or its names and shapes, differ.
    """
    source = open_source(path)
    if extend_positions and model.config.max_position_embeddings > source.config.max_position_embeddings:
        source = source.extended(model.config.max_position_embeddings, extend_positions)
    differences = []
    theirs, ours = source.config.without_padding(), model.config.without_padding()
    for field in dataclasses.fields(BertConfig):
        stored, asked = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name == "vocab_size" and stored == model.config.vocab_size:
            continue  # the file has the rows that pad the table as well
        if field.name not in _FREE and _same(stored) != _same(asked):
            differences.append(f"  {field.name}: checkpoint {stored!r}, model {asked!r}")
    if differences:
        raise LoadError(
            f"{path} is not a checkpoint of the configured model:\n"
            + "\n".join(differences)
            + ".\nSet config.model to the checkpoint's values. A larger vocabulary "
            "comes from `python -m bertjax.tools.convert --add_vocab`, more positions from "
            "--config.extend_positions=repeat or interpolate."
        )
    stored = _as_stored(source, model)
    match_headers(_shapes(source, model), stored.headers, source.naming, str(source.directory), reinitialise_head)
    return source


def _as_stored(source: Source, model: heads.BertNetwork) -> Source:
    """The source as `model` reads it: before ModernBERT's task heads stands the transform of its MLM head, as in
    `transformers`, and not a pooler that has learnt next sentences, which keeps little else of a vector.

    Raises LoadError for an MLM head whose decoder is not the table of words.
    """
    if not source.naming.tied and isinstance(model, heads.BertForPreTraining | heads.BertForMaskedLM):
        raise LoadError(
            f"{source.directory}: an MLM head with a decoder of its own (tie_word_embeddings=false) is not computed "
            "here. The encoder is read by task='features' and by fine-tuning"
        )
    task = isinstance(model, heads.TaskNetwork) and STYLES[model.config.heads].normed
    return source.with_transform_as_pooler() if task else source


def _same(value: Any) -> Any:
    return "gelu_new" if value == "gelu_pytorch_tanh" else value


def load_pretrained_params(
    path: str | Path,
    model: heads.BertNetwork,
    key: jax.Array,
    reinitialise_head: bool | Collection[str] = False,
    extend_positions: str = "",
) -> dict[str, Any]:
    """The parameters of `model` from any checkpoint, as a nested dict of float32 numpy arrays.

    Args:
      path: see `open_source`.
      key: draws new heads.
      reinitialise_head: draw heads at random that the file lacks or has in another size (a new
        task); the encoder is always loaded in full.
      extend_positions: see `check_pretrained`.

    Raises:
      LoadError: the configurations differ, or names and shapes do, all of them listed.
    """
    source = check_pretrained(path, model, reinitialise_head, extend_positions)
    params, _ = fit(source, model, key, reinitialise_head)
    return params


def fit(
    source: Source, model: heads.BertNetwork, key: jax.Array, reinitialise_head: bool | Collection[str] = False
) -> tuple[dict[str, Any], list[str]]:
    """(parameters of `model` from `source`, the paths that were drawn at random).

    Raises:
      LoadError: names or shapes do not fit.
    """
    loaded, fresh = stored_parameters(source, model, reinitialise_head)
    if fresh:
        loaded |= jax.device_get(draw(model, fresh)(key))
    shapes = heads.parameter_shapes(model)
    return unflatten({path: loaded[path] for path in flatten(shapes)}), fresh


def stored_parameters(
    source: Source, model: heads.BertNetwork, reinitialise_head: bool | Collection[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """({path: array} of `model` from `source`, the paths that it lacks).

    Raises:
      LoadError: names or shapes do not fit.
    """
    declared = {*map(ARCHITECTURES.get, source.settings.get("architectures") or ())} & _CLASSIFIERS - {type(model)}
    if declared and type(model) in _CLASSIFIERS and not reinitialise_head:
        own = declared.pop()
        task = next(task for task, kind in TASKS.items() if kind is own)
        raise LoadError(
            f"{source.directory}: a {own.__name__} cannot be used as a {type(model).__name__}; its own task is {task}"
        )
    arrays = _as_stored(source, model).read()
    loaded, fresh = match(_shapes(source, model), arrays, source.naming, str(source.directory), reinitialise_head)
    return heads.with_rows(loaded, model.config.vocab_size), fresh


def _shapes(source: Source, model: heads.BertNetwork) -> dict[str, tuple[int, ...]]:
    """{path: shape} of the model's parameters, with as many rows of words as the source has where
    the model has more for padding alone."""
    source.check_layers()
    config = model.config
    if config.words == source.config.vocab_size:
        model = model.clone(config=config.without_padding())
    return {path: leaf.shape for path, leaf in flatten(heads.parameter_shapes(model)).items()}


def draw(model: heads.BertNetwork, paths: Sequence[str]) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """A compiled key -> {path: initial parameter} of these paths only.

    They are what `init_params` draws for them; to compile the drawing of a whole encoder would take
    seconds, so a head is drawn above an encoder of one layer where it is the same there.
    """
    small = model.clone(config=dataclasses.replace(model.config, num_hidden_layers=1))
    here, there = (flatten(heads.parameter_shapes(m)) for m in (model, small))
    drawn = small if all(there.get(path) == here[path] for path in paths) else model

    def chosen(key: jax.Array) -> dict[str, jax.Array]:
        return flatten(heads.init_params(drawn, key, paths))

    return jax.jit(chosen)


@jax_settings.fixed()
def load_model(
    path: str | os.PathLike[str],
    task: str | None = None,
    execution: Execution | None = None,
    num_labels: int | None = None,
    reinitialise_head: bool = False,
    seed: int = 0,
    max_positions: int | None = None,
    extend_positions: str = "repeat",
) -> LoadedModel:
    """A model from any checkpoint in one line.

    Args:
      path: Hugging Face directory or name at its Hub, TF1 checkpoint (directory or prefix), or bertjax workdir.
      task: a name of TASKS; None takes what the checkpoint says it is.
      execution: how to run it; None is float32.
      num_labels: of a new classifier; None takes the file's.
      reinitialise_head: draw the task head at random where the file has none or one of another size.
      seed: of that head.
      max_positions: extend a table of fewer positions to this many; None leaves it as it is.
      extend_positions: how, 'repeat' or 'interpolate'.

    Raises:
      LoadError: no checkpoint, another network, or weights that do not fit.
      ValueError: unknown task.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    if num_labels is not None and num_labels < 1:
        raise ValueError(f"num_labels={num_labels} must be at least 1")
    source = open_source(path)
    if max_positions is not None:
        source = source.extended(max_positions, extend_positions)
    kind = TASKS[task] if task else declared(source)
    options: dict[str, Any] = {}
    labels: tuple[str, ...] = ()
    if kind in _LABELLED:
        stored = stored_labels(source)
        labels = source.labels
        options["num_labels"] = num_labels or stored or len(labels) or 2
        if labels and len(labels) != options["num_labels"]:
            if not num_labels:
                raise LoadError(
                    f"{source.directory}: id2label names {len(labels)} classes, the "
                    f"head has {stored}; correct config.json"
                )
            labels = ()
    model = kind(source.config, execution or Execution(), **options)
    params, fresh = fit(source, model, jax.random.key(seed), reinitialise_head)
    params, names = jax.tree.map(jax.numpy.asarray, params), dict(enumerate(labels)) or None
    return LoadedModel(model, params, source.tokenizer, names, source.settings, tuple(fresh), source.sentence)


def declared(source: Source) -> type[heads.BertNetwork]:
    """The model class that the checkpoint was written from; if it does not say, what it holds."""
    if source.kind == "bertjax":
        return heads.pretraining_network(source.config, "nsp" in heads_in(source.headers, source.naming))
    for name in source.settings.get("architectures") or ():
        if kind := ARCHITECTURES.get(name) or _ENCODER_ALONE.get(name):
            return kind
    if source.settings.get("architectures"):
        raise LoadError(
            f"{source.directory}: architectures {source.settings['architectures']} is none of "
            f"{', '.join(ARCHITECTURES)}; name a task ({', '.join(TASKS)})"
        )
    stored = heads_in(source.headers, source.naming)
    if "mlm" in stored:
        return heads.BertForPreTraining if "nsp" in stored else heads.BertForMaskedLM
    return heads.BertForPreTraining if source.kind == "tf1" else heads.BertModel


def stored_labels(source: Source) -> int | None:
    """Rows of the stored classifier, which the weights know: config files often lie."""
    for leaves in source.naming.heads["classifier"]:
        bias = source.headers.get(source.naming(f"classifier/{leaves[-1]}").name)
        if bias is not None and len(bias.shape) == 1:
            return bias.shape[0]
    return None
