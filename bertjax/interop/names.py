"""One table of names: parameter paths of bertjax, of Hugging Face and of Google's checkpoints.

A parameter path is the keys of the nested dict joined by '/', as in encoder.py and heads.py. Dense
kernels are [in, out] here and in Google's files and [out, in] in Hugging Face's; Google's output
layers, which were never `tf.layers.dense`, are [out, in] as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np


class LoadError(ValueError):
    """A checkpoint does not hold what the model needs, or cannot be read; the message lists it."""


class Place(NamedTuple):
    """Where a parameter lives in a foreign file: its name, and whether it is transposed there."""

    name: str
    transposed: bool


# bertjax module -> (Hugging Face module, Google module). {i} is the layer.
_MODULES: tuple[tuple[str, str, str], ...] = (
    (r"encoder/embeddings/(word|position|token_type)_embeddings", r"bert.embeddings.\1_embeddings",
     r"bert/embeddings/\1_embeddings"),
    (r"encoder/embeddings/LayerNorm", "bert.embeddings.LayerNorm", "bert/embeddings/LayerNorm"),
    (r"encoder/layer_(\d+)/attention/(query|key|value)", r"bert.encoder.layer.\1.attention.self.\2",
     r"bert/encoder/layer_\1/attention/self/\2"),
    (r"encoder/layer_(\d+)/attention/output", r"bert.encoder.layer.\1.attention.output.dense",
     r"bert/encoder/layer_\1/attention/output/dense"),
    (r"encoder/layer_(\d+)/attention/LayerNorm",
     r"bert.encoder.layer.\1.attention.output.LayerNorm",
     r"bert/encoder/layer_\1/attention/output/LayerNorm"),
    (r"encoder/layer_(\d+)/(intermediate|output)", r"bert.encoder.layer.\1.\2.dense",
     r"bert/encoder/layer_\1/\2/dense"),
    (r"encoder/layer_(\d+)/LayerNorm", r"bert.encoder.layer.\1.output.LayerNorm",
     r"bert/encoder/layer_\1/output/LayerNorm"),
    (r"pooler", "bert.pooler.dense", "bert/pooler/dense"),
    (r"mlm/transform", "cls.predictions.transform.dense", "cls/predictions/transform/dense"),
    (r"mlm/LayerNorm", "cls.predictions.transform.LayerNorm",
     "cls/predictions/transform/LayerNorm"),
    (r"mlm", "cls.predictions", "cls/predictions"),
    (r"nsp", "cls.seq_relationship", "cls/seq_relationship"),
    (r"classifier", "classifier", ""),
    (r"qa_outputs", "qa_outputs", "cls/squad"),
)
_TABLES = re.compile(r"encoder/embeddings/\w+_embeddings")

HEAD_PARTS = ("pooler", "mlm", "nsp", "classifier", "qa_outputs")


def part_of(path: str) -> str:
    """'encoder' or the head that a parameter path belongs to."""
    return path.split("/", 1)[0]


def _translate(path: str, column: int) -> tuple[str, str]:
    """(foreign module, leaf name) of a parameter path; tables have the leaf ''."""
    module, leaf = (path, "") if _TABLES.fullmatch(path) else path.rsplit("/", 1)
    for row in _MODULES:
        match = re.fullmatch(row[0], module)
        if match:
            return match.expand(row[column]), leaf
    raise KeyError(f"no foreign name is known for parameter {path!r}")


def hugging_face_place(path: str) -> Place:
    """The state-dict entry of a parameter, e.g. bert.encoder.layer.3.attention.self.query.weight.

    Raises:
      KeyError: the path is not a parameter of any model in heads.py.
    """
    module, leaf = _translate(path, 1)
    name = {"": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}[leaf]
    return Place(f"{module}.{name}", leaf == "kernel")


def google_place(path: str) -> Place:
    """The variable of a parameter in Google's checkpoints.

    A fine-tuned classifier's variables are called plainly output_weights and output_bias
    (run_classifier.py), a reader's cls/squad/output_* (run_squad.py).

    Raises:
      KeyError: as `hugging_face_place`.
    """
    module, leaf = _translate(path, 2)
    if part_of(path) in ("nsp", "classifier", "qa_outputs"):
        name = {"kernel": "output_weights", "bias": "output_bias"}[leaf]
        return Place(f"{module}/{name}".lstrip("/"), leaf == "kernel")
    if path == "mlm/bias":
        return Place("cls/predictions/output_bias", False)
    if not leaf:
        return Place(module, False)
    layer_norm = module.endswith("LayerNorm")
    name = {"kernel": "kernel", "scale": "gamma", "bias": "beta" if layer_norm else "bias"}[leaf]
    return Place(f"{module}/{name}", False)


# -------------------------------------------------------------------------------------- matching


def match(
    wanted: Mapping[str, tuple[int, ...]],
    available: Mapping[str, np.ndarray],
    place: Any,
    source: str,
    fresh_heads: bool = False,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Picks a model's parameters out of a foreign file, or says in one message what is wrong.

    Every array of the file must be a parameter of this model or belong to a head that the model
    does not have (a pre-training head is of no use to a classifier). The encoder must be complete.

    Args:
      wanted: parameter path -> shape of the model.
      available: foreign name -> array, buffers and optimizer slots already left out.
      place: `hugging_face_place` or `google_place`.
      source: the file, for the message.
      fresh_heads: leave out heads that are missing or of another shape, instead of refusing.

    Returns:
      (parameter path -> float32 array, paths left to a fresh initialisation).

    Raises:
      LoadError: missing, unexpected or mis-shaped names, all listed with their shapes; values
        that are not finite.
    """
    found = _compare(wanted, available, place, fresh_heads)
    known = {place(path).name for path in wanted} | _names_of_other_heads(wanted, place)
    unexpected = [f"{name} {array.shape}" for name, array in available.items()
                  if name not in known]
    if found.missing or found.misshaped or unexpected:
        raise LoadError(_complaint(source, found.missing, unexpected, found.misshaped))
    with ThreadPoolExecutor() as threads:  # kernels are transposed: a second for a base model
        copies = dict(zip(found.loaded, threads.map(_finite, found.loaded.values()), strict=True))
    if broken := [place(path).name for path, array in copies.items() if array is None]:
        raise LoadError(
            f"{source}: {len(broken)} weights hold values that are NaN or infinite in float32: "
            f"{', '.join(broken[:20])}. The training diverged, or the file is damaged")
    return copies, found.fresh


class _Compared(NamedTuple):
    """What a file has of a model's parameters; the last two are lines of a message."""

    loaded: dict[str, np.ndarray]
    fresh: list[str]
    missing: list[str]
    misshaped: list[str]


def _compare(wanted: Mapping[str, tuple[int, ...]], available: Mapping[str, np.ndarray],
             place: Any, fresh_heads: bool) -> _Compared:
    """Looks for every parameter of the model; arguments as of `match`."""
    loaded, fresh, missing, misshaped = found = _Compared({}, [], [], [])
    for path, shape in wanted.items():
        name, transposed = place(path)
        array = available.get(name)
        if array is not None and transposed and array.ndim == 2:
            array = array.T
        if array is not None and array.shape == tuple(shape):
            loaded[path] = array
        elif fresh_heads and part_of(path) in HEAD_PARTS:
            fresh.append(path)
        elif array is None:
            missing.append(f"{name} {_foreign_shape(shape, transposed)}")
        else:
            misshaped.append(
                f"{name}: the file has {available[name].shape}, the model needs "
                f"{_foreign_shape(shape, transposed)}"
            )
    if not fresh:
        return found
    # A head is taken whole or not at all: half of one is no head.
    parts = {part_of(path) for path in fresh}
    return found._replace(
        loaded={path: array for path, array in loaded.items() if part_of(path) not in parts},
        fresh=[path for path in wanted if part_of(path) in parts])


def _finite(array: np.ndarray) -> np.ndarray | None:
    """As contiguous float32; None where a value is not finite."""
    with np.errstate(over="ignore"):  # of float64
        array = np.ascontiguousarray(array, np.float32)
    return array if np.isfinite(array).all() else None


def _foreign_shape(shape: Iterable[int], transposed: bool) -> tuple[int, ...]:
    return tuple(shape)[::-1] if transposed else tuple(shape)


def _names_of_other_heads(wanted: Iterable[str], place: Any) -> set[str]:
    """Foreign names of every parameter of the heads that the model lacks."""
    present = {part_of(path) for path in wanted}
    leaves = {"pooler": ("kernel", "bias"), "nsp": ("kernel", "bias"),
              "classifier": ("kernel", "bias"), "qa_outputs": ("kernel", "bias"),
              "mlm": ("transform/kernel", "transform/bias", "LayerNorm/scale", "LayerNorm/bias",
                      "bias")}
    return {
        place(f"{head}/{leaf}").name
        for head in HEAD_PARTS
        if head not in present
        for leaf in leaves[head]
    }


def _complaint(
    source: str, missing: list[str], unexpected: list[str], misshaped: list[str], limit: int = 100
) -> str:
    lines = [f"{source} does not fit the model:"]
    for title, entries in (
        ("missing in the file", missing),
        ("unexpected in the file", unexpected),
        ("of another shape", misshaped),
    ):
        if entries:
            lines.append(f"  {len(entries)} {title}:")
            lines += [f"    {entry}" for entry in entries[:limit]]
            if len(entries) > limit:
                lines.append(f"    ... and {len(entries) - limit} more")
    lines.append(
        "The encoder must fit in full. If only a task head is missing or differs: to predict, "
        "fine-tune the model first (configs/glue.py, squad.py, ner.py, classify.py ...); to train "
        "on, start that head afresh with reinitialise_head=True (--config.reinitialise_head=True)."
    )
    return "\n".join(lines)
