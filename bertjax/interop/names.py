"""One table of names: parameter paths of bertjax, of Hugging Face and of Google's checkpoints.

A parameter path is the keys of the nested dict joined by '/', as in encoder.py and heads.py. Dense
kernels are [in, out] here and in Google's files and [out, in] in Hugging Face's; Google's output
layers, which were never `tf.layers.dense`, are [out, in] as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bertjax.formats.arrays import Header, LoadError

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a parameter lives in a foreign file: its name, and whether it is transposed there."""

    name: str
    transposed: bool


# bertjax module -> (Hugging Face module, Google module). {i} is the layer.
_MODULES: tuple[tuple[str, str, str], ...] = (
    (
        r"encoder/embeddings/(word|position|token_type)_embeddings",
        r"bert.embeddings.\1_embeddings",
        r"bert/embeddings/\1_embeddings",
    ),
    (r"encoder/embeddings/LayerNorm", "bert.embeddings.LayerNorm", "bert/embeddings/LayerNorm"),
    (
        r"encoder/layer_(\d+)/attention/(query|key|value)",
        r"bert.encoder.layer.\1.attention.self.\2",
        r"bert/encoder/layer_\1/attention/self/\2",
    ),
    (
        r"encoder/layer_(\d+)/attention/output",
        r"bert.encoder.layer.\1.attention.output.dense",
        r"bert/encoder/layer_\1/attention/output/dense",
    ),
    (
        r"encoder/layer_(\d+)/attention/LayerNorm",
        r"bert.encoder.layer.\1.attention.output.LayerNorm",
        r"bert/encoder/layer_\1/attention/output/LayerNorm",
    ),
    (
        r"encoder/layer_(\d+)/(intermediate|output)",
        r"bert.encoder.layer.\1.\2.dense",
        r"bert/encoder/layer_\1/\2/dense",
    ),
    (
        r"encoder/layer_(\d+)/LayerNorm",
        r"bert.encoder.layer.\1.output.LayerNorm",
        r"bert/encoder/layer_\1/output/LayerNorm",
    ),
    (r"pooler", "bert.pooler.dense", "bert/pooler/dense"),
    (r"mlm/transform", "cls.predictions.transform.dense", "cls/predictions/transform/dense"),
    (r"mlm/LayerNorm", "cls.predictions.transform.LayerNorm", "cls/predictions/transform/LayerNorm"),
    (r"mlm", "cls.predictions", "cls/predictions"),
    (r"nsp", "cls.seq_relationship", "cls/seq_relationship"),
    (r"classifier", "classifier", ""),
    (r"qa_outputs", "qa_outputs", "cls/squad"),
)
_TABLES = re.compile(r"encoder/embeddings/\w+_embeddings")

# head -> the leaves of it
HEAD_PARTS: dict[str, tuple[str, ...]] = {
    "pooler": ("kernel", "bias"),
    "mlm": ("transform/kernel", "transform/bias", "LayerNorm/scale", "LayerNorm/bias", "bias"),
    "nsp": ("kernel", "bias"),
    "classifier": ("kernel", "bias"),
    "qa_outputs": ("kernel", "bias"),
}


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

    Arguments and errors as of `match_headers`.

    Returns:
      (parameter path -> float32 array, paths left to a fresh initialisation).

    Raises:
      LoadError: also values that are not finite.
    """
    headers = {name: Header(array.shape, array.dtype) for name, array in available.items()}
    paths, fresh = match_headers(wanted, headers, place, source, fresh_heads)
    arrays = []
    for path in paths:
        name, transposed = place(path)
        arrays.append(available[name].T if transposed else available[name])
    with ThreadPoolExecutor() as threads:  # kernels are transposed: a second for a base model
        copies = dict(zip(paths, threads.map(_finite, arrays), strict=True))
    if broken := [place(path).name for path, array in copies.items() if array is None]:
        raise LoadError(
            f"{source}: {len(broken)} weights hold values that are NaN or infinite in float32: "
            f"{', '.join(broken[:20])}. The training diverged, or the file is damaged"
        )
    return copies, fresh


def match_headers(
    wanted: Mapping[str, tuple[int, ...]],
    available: Mapping[str, Header],
    place: Any,
    source: str,
    fresh_heads: bool = False,
) -> tuple[list[str], list[str]]:
    """`match` by names, shapes and types alone, before anything is read.

    The encoder must be complete, and every array under its name a parameter of it. Heads that the
    model does not have are left out: a pre-training head is of no use to a classifier. So are heads
    that no model here has ('crf'), unless they may be part of the answer that a task head gives.

    Args:
      wanted: parameter path -> shape of the model.
      available: foreign name -> Header, buffers and optimizer slots already left out.
      place: `hugging_face_place` or `google_place`.
      source: the file, for the message.
      fresh_heads: leave out heads that are missing or of another shape, instead of refusing.

    Returns:
      (paths that the file has, paths left to a fresh initialisation).

    Raises:
      LoadError: missing, unexpected or mis-shaped names, all listed with their shapes; types that
        are no floating-point numbers.
    """
    found = _compare(wanted, available, place, fresh_heads)
    known = {place(path).name for path in wanted} | _names_of_other_heads(wanted, place)
    unexpected = [name for name in available if name not in known]
    root = re.split("[./]", place("encoder/embeddings/word_embeddings").name)[0]
    foreign = [name for name in unexpected if re.split("[./]", name)[0] != root]
    refused = unexpected
    if fresh_heads or not {"classifier", "qa_outputs"} & {part_of(path) for path in wanted}:
        if not fresh_heads:  # a head of this model with more parts than it has is another head
            heads = {re.split("[./]", place(path).name)[0] for path in wanted} - {root}
            foreign = [name for name in foreign if re.split("[./]", name)[0] not in heads]
        refused = [name for name in unexpected if name not in foreign]
    if found.missing or found.misshaped or refused:
        raise LoadError(
            _complaint(
                source,
                found,
                [f"{name} {available[name].shape}" for name in unexpected],
                _remedy(found, unexpected, foreign, available, place, root),
            )
        )
    if foreign:
        log.info("%s: heads that are not used: %s", source, ", ".join(foreign[:20]))
    if wrong := [
        f"{name} ({available[name].dtype})"
        for name in (place(path).name for path in found.loaded)
        if not _is_float(available[name])
    ]:
        raise LoadError(
            f"{source}: weights are floating-point numbers, but {len(wrong)} arrays "
            f"are not: {', '.join(wrong[:5])}; restore a quantised model first"
        )
    return found.loaded, found.fresh


class _Compared(NamedTuple):
    """What a file has of a model's parameters; the last two are lines of a message."""

    loaded: list[str]
    fresh: list[str]
    missing: list[str]
    misshaped: list[str]
    heads: set[str]  # that the missing and misshaped are of; 'encoder' is one of them


def _compare(
    wanted: Mapping[str, tuple[int, ...]], available: Mapping[str, Header], place: Any, fresh_heads: bool
) -> _Compared:
    """Looks for every parameter of the model; arguments as of `match_headers`."""
    loaded, fresh, missing, misshaped, parts = found = _Compared([], [], [], [], set())
    for path, shape in wanted.items():
        name, transposed = place(path)
        header, needed = available.get(name), _foreign_shape(shape, transposed)
        if header is not None and header.shape == needed:
            loaded.append(path)
        elif fresh_heads and part_of(path) in HEAD_PARTS:
            fresh.append(path)
        elif header is None:
            missing.append(f"{name} {needed}")
            parts.add(part_of(path))
        else:
            misshaped.append(f"{name}: the file has {header.shape}, the model needs {needed}")
            parts.add(part_of(path))
    if not fresh:
        return found
    # A head is taken whole or not at all: half of one is no head.
    heads = {part_of(path) for path in fresh}
    return found._replace(
        loaded=[path for path in loaded if part_of(path) not in heads],
        fresh=[path for path in wanted if part_of(path) in heads],
    )


def _is_float(header: Header) -> bool:
    return header.dtype.kind == "f" or header.dtype == ml_dtypes.bfloat16


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
    return {
        place(f"{head}/{leaf}").name for head, leaves in HEAD_PARTS.items() if head not in present for leaf in leaves
    }


def heads_in(names: Iterable[str], place: Any) -> set[str]:
    """The heads of HEAD_PARTS of which a file has every array."""
    names = set(names)
    return {
        head for head, leaves in HEAD_PARTS.items() if all(place(f"{head}/{leaf}").name in names for leaf in leaves)
    }


def _remedy(
    found: _Compared, unexpected: list[str], foreign: list[str], available: Mapping[str, Header], place: Any, root: str
) -> str:
    """What can be done about a file that does not fit."""
    words = place("encoder/embeddings/word_embeddings").name
    inner = words.removeprefix(root)[1:]
    if inside := [name for name in available if name.endswith(inner) and name != words and not name.startswith(root)]:
        prefix = inside[0].removesuffix(inner).removesuffix(f"{root}.").removesuffix(f"{root}/")
        return (
            f"The names differ by {prefix!r} in front: the file was saved from a program of "
            "which the model is a part. Save that part alone, or write the arrays again "
            f"without {prefix!r} in their names."
        )
    if found.heads and "encoder" not in found.heads:
        stored = ", ".join(sorted(heads_in(available, place))) or "none"
        return (
            f"The encoder fits; the heads that the file has are: {stored}. To predict, take a "
            "task that it has a head for, or fine-tune the model first (configs/glue.py, "
            "squad.py, ner.py, classify.py ...). To train on, start the head afresh with "
            "reinitialise_head=True (--config.reinitialise_head=True)."
        )
    if foreign and len(foreign) == len(unexpected) and not found.heads:
        return (
            "The encoder fits, but the file has parts beside it that belong to another program "
            "and may be part of its answers. The encoder alone is read by task='features', by "
            "fine-tuning, and with reinitialise_head=True (--config.reinitialise_head=True)."
        )
    return "The encoder must fit in full: compare config.json with the file, or take the files that belong together."


def _complaint(source: str, found: _Compared, unexpected: list[str], remedy: str, limit: int = 100) -> str:
    lines = [f"{source} does not fit the model:"]
    for title, entries in (
        ("missing in the file", found.missing),
        ("unexpected in the file", unexpected),
        ("of another shape", found.misshaped),
    ):
        if entries:
            lines.append(f"  {len(entries)} {title}:")
            lines += [f"    {entry}" for entry in entries[:limit]]
            if len(entries) > limit:
                lines.append(f"    ... and {len(entries) - limit} more")
    return "\n".join([*lines, remedy])
