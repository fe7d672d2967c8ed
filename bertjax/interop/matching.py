"""Fits what a file holds to the parameters of a model, or says in one message what is wrong.

In: the model's {path: shape} and the file's arrays or headers by their foreign names. Out: {path: array}.
"""

import logging
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from bertjax.formats.arrays import Header, LoadError
from bertjax.interop.names import Naming, Place, heads_in, part_of

log = logging.getLogger(__name__)
# Parts of names that other programs put into an encoder -> what to do first.
_PUT_IN = {
    r"\.(lora_\w+|base_layer|adapters)\.": "The file holds adapters beside the weights: merge them into the weights "
    "(merge_and_unload() of peft), and save the model again.",
    r"\.(SCB|absmax|qweight|qzeros|scales|weight_scale)$": "The weights are quantised: restore them (dequantize() in "
    "transformers), and save the model again.",
}


def match(
    wanted: Mapping[str, tuple[int, ...]],
    available: Mapping[str, np.ndarray],
    place: Naming,
    source: str,
    fresh_heads: bool | Collection[str] = False,
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

    def read(path: str) -> np.ndarray | None:
        """Contiguous float32; None where a value is not finite."""
        name, transposed = place(path)
        part, parts = place.part(path)
        array = available[name] if parts == 1 else np.split(available[name], parts)[part]
        with np.errstate(over="ignore"):  # of float64
            array = np.ascontiguousarray(array.T if transposed else array, np.float32)
        return array if np.isfinite(array).all() else None

    with ThreadPoolExecutor() as threads:  # kernels are transposed: a second for a base model
        copies = dict(zip(paths, threads.map(read, paths), strict=True))
    if broken := [place(path).name for path, array in copies.items() if array is None]:
        raise LoadError(
            f"{source}: {len(broken)} weights hold values that are NaN or infinite in float32: "
            f"{', '.join(broken[:20])}. The training diverged, or the file is damaged"
        )
    return copies, fresh


def match_headers(
    wanted: Mapping[str, tuple[int, ...]],
    available: Mapping[str, Header],
    place: Naming,
    source: str,
    fresh_heads: bool | Collection[str],
) -> tuple[list[str], list[str]]:
    """`match` by names, shapes and types alone, before anything is read.

    The encoder must be complete, and every array under its name a parameter of it. Heads that the
    model does not have are left out: a pre-training head is of no use to a classifier. So are heads
    that no model here has ('crf'), unless they may be part of the answer that a task head gives.

    Args:
      wanted: parameter path -> shape of the model.
      available: foreign name -> Header, buffers and optimizer slots already left out.
      place: the names of such files.
      source: the file, for the message.
      fresh_heads: leave out heads that are missing or of another shape, instead of refusing; or the names of those
        that may be left out.

    Returns:
      (paths that the file has, paths left to a fresh initialisation).

    Raises:
      LoadError: missing, unexpected or mis-shaped names, all listed with their shapes; types that
        are not floating-point numbers.
    """
    absent = {part_of(path) for path in wanted} - {"encoder", *place.heads}  # heads that such files never have
    places = {path: Place(path, False) if part_of(path) in absent else place(path) for path in wanted}
    needed = {
        path: tuple(shape) if part_of(path) in absent else _stored_shape(path, shape, place)
        for path, shape in wanted.items()
    }
    found = {path: available.get(places[path].name) for path in wanted}
    unfit = [path for path, header in found.items() if header is None or header.shape != needed[path]]
    # A head is taken whole or not at all: half of one is not a head.
    may_be = {*place.heads, *absent} if fresh_heads is True else {*(fresh_heads or ())}
    drawn = {part_of(path) for path in unfit} & may_be
    loaded = [path for path in wanted if part_of(path) not in drawn]
    unfit = [path for path in unfit if part_of(path) not in drawn]

    parts = {part_of(path) for path in wanted}
    known = {name for name, _ in places.values()}
    known.update(*(every for head in place.heads if head not in parts for _, every in place.names_of(head)))
    unexpected = [name for name in available if name not in known]
    root = _first(place("encoder/embeddings/word_embeddings").name)
    foreign = [name for name in unexpected if _first(name) != root]
    refused = unexpected
    if fresh_heads is True or not {"classifier", "qa_outputs"} & parts:
        if fresh_heads is not True:  # a head of this model with more parts than it has is another head
            heads = {_first(name) for name, _ in places.values()} - {root}
            foreign = [name for name in foreign if _first(name) not in heads]
        refused = [name for name in unexpected if name not in foreign]
    if unfit or refused:
        lines = [f"{source} does not fit the model:"]
        lines += _listed("missing in the file", [f"{places[p].name} {needed[p]}" for p in unfit if found[p] is None])
        lines += _listed("unexpected in the file", [f"{name} {available[name].shape}" for name in unexpected])
        lines += _listed(
            "of another shape",
            [
                f"{places[p].name}: the file has {found[p].shape}, the model needs {needed[p]}"
                for p in unfit
                if found[p] is not None
            ],
        )
        remedy = _remedy({part_of(path) for path in unfit}, unexpected, foreign, available, place, root)
        known = [what for start, what in place.unread.items() if any(name.startswith(start) for name in foreign)]
        raise LoadError("\n".join([*lines, *(f"{what}." for what in known), remedy]))
    if foreign:
        log.warning("%s: parts that no model here has are left out: %s", source, ", ".join(foreign[:20]))
    types = {places[path].name: found[path].dtype for path in loaded}
    if wrong := [f"{name} ({t})" for name, t in types.items() if t.kind != "f" and t != ml_dtypes.bfloat16]:
        raise LoadError(
            f"{source}: weights are floating-point numbers, but {len(wrong)} arrays "
            f"are not: {', '.join(wrong[:5])}; restore a quantised model first"
        )
    return loaded, [path for path in wanted if part_of(path) in drawn]


def _stored_shape(path: str, shape: tuple[int, ...], place: Naming) -> tuple[int, ...]:
    """The shape of the array that holds a parameter."""
    stored = tuple(shape)[:: -1 if place(path).transposed else 1]
    return (stored[0] * place.part(path)[1], *stored[1:])


def _first(name: str) -> str:
    """'bert' of 'bert.pooler.dense.weight' and of 'bert/pooler/dense/kernel'."""
    return re.split("[./]", name)[0]


def _listed(title: str, entries: list[str], limit: int = 100) -> list[str]:
    """Lines of a message."""
    lines = [f"  {len(entries)} {title}:", *(f"    {entry}" for entry in entries[:limit])] if entries else []
    return lines + ([f"    ... and {len(entries) - limit} more"] if len(entries) > limit else [])


def _remedy(
    unfit: set[str],
    unexpected: list[str],
    foreign: list[str],
    available: Mapping[str, Header],
    place: Naming,
    root: str,
) -> str:
    """What can be done about a file that does not fit; `unfit`: the heads (or 'encoder') that do not."""
    for pattern, what in _PUT_IN.items():
        if any(re.search(pattern, name) for name in unexpected):
            return what
    words = place("encoder/embeddings/word_embeddings").name
    inner = words.removeprefix(root)[1:]
    if inside := [name for name in available if name.endswith(inner) and name != words and not name.startswith(root)]:
        prefix = inside[0].removesuffix(inner).removesuffix(f"{root}.").removesuffix(f"{root}/")
        return (
            f"The names differ by {prefix!r} in front: the file was saved from a program of which the model is a part. "
            f"Save that part alone, or write the arrays again without {prefix!r} in their names."
        )
    if unfit and "encoder" not in unfit:
        stored = ", ".join(sorted(heads_in(available, place))) or "none"
        return (
            f"The encoder fits; the heads that the file has are: {stored}. To predict, take a task that it has a head "
            "for, or fine-tune the model first (configs/glue.py, squad.py, ner.py, classify.py ...). To train on, "
            "start with a new head: reinitialise_head=True (--config.reinitialise_head=True)"
            + ", or without next sentences: --config.data.nsp=False" * (unfit <= {"pooler", "nsp"})
            + "."
            + " Features and embeddings need no pooler: bertjax.tools.features, and convert --pooling=mean."
            * (unfit == {"pooler"})
        )
    if foreign and len(foreign) == len(unexpected) and not unfit:
        return (
            "The encoder fits, but the file has parts beside it that belong to another program "
            "and may be part of its answers. The encoder alone is read by task='features', by "
            "fine-tuning, and with reinitialise_head=True (--config.reinitialise_head=True)."
        )
    return "The encoder must fit in full: compare config.json with the file, or take the files that belong together."
