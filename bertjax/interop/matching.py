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
from bertjax.interop.names import Naming, heads_in, part_of

log = logging.getLogger(__name__)
_WORDS = "encoder/embeddings/word_embeddings"
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
    naming: Naming,
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
    paths, fresh = match_headers(wanted, headers, naming, source, fresh_heads)

    def read(path: str) -> np.ndarray | None:
        """Contiguous float32; None where a value is not finite."""
        name, transposed = naming(path)
        part, parts = naming.part(path)
        array = available[name] if parts == 1 else np.split(available[name], parts)[part]
        with np.errstate(over="ignore"):  # of float64
            array = np.ascontiguousarray(array.T if transposed else array, np.float32)
        return array if np.isfinite(array).all() else None

    with ThreadPoolExecutor() as threads:  # kernels are transposed: a second for a base model
        copies = dict(zip(paths, threads.map(read, paths), strict=True))
    if broken := [naming(path).name for path, array in copies.items() if array is None]:
        raise LoadError(
            f"{source}: {len(broken)} weights hold values that are NaN or infinite in float32: "
            f"{', '.join(broken[:20])}. The training diverged, or the file is damaged"
        )
    return copies, fresh


def match_headers(
    wanted: Mapping[str, tuple[int, ...]],
    available: Mapping[str, Header],
    naming: Naming,
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
      naming: the names of such files.
      source: the file, for the message.
      fresh_heads: leave out heads that are missing or of another shape, instead of refusing; or the names of those
        that may be left out.

    Returns:
      (paths that the file has, paths left to a fresh initialisation).

    Raises:
      LoadError: missing, unexpected or mis-shaped names, all listed with their shapes; types that
        are not floating-point numbers.
    """
    parts = {part_of(path) for path in wanted}
    never = parts - {"encoder", *naming.heads}  # heads that such files cannot have
    stored = {  # path -> its name and shape in the file
        path: (path, tuple(shape)) if part_of(path) in never else _stored(path, shape, naming)
        for path, shape in wanted.items()
    }
    missing = [path for path, (name, _) in stored.items() if name not in available]
    misshaped = [p for p, (name, shape) in stored.items() if name in available and available[name].shape != shape]
    # A head is taken whole or not at all: half of one is not a head.
    may_be_fresh = {*naming.heads, *never} if fresh_heads is True else set(fresh_heads or ())
    fresh = {part_of(path) for path in (*missing, *misshaped)} & may_be_fresh
    missing, misshaped = ([path for path in paths if part_of(path) not in fresh] for paths in (missing, misshaped))

    known = {name for name, _ in stored.values()}
    for head in set(naming.heads) - parts:  # of use to another model
        known.update(*(names for _, names in naming.names_of(head)))
    unexpected = [name for name in available if name not in known]
    root = _first(naming(_WORDS).name)
    if fresh_heads is True:
        left_out = [name for name in unexpected if _first(name) != root]
    elif parts & {"classifier", "qa_outputs"}:
        left_out = []  # each may be a part of the answer
    else:  # a head of this model with more parts than it has is another head
        ours = {root, *(_first(name) for name, _ in stored.values())}
        left_out = [name for name in unexpected if _first(name) not in ours]

    if missing or misshaped or len(left_out) < len(unexpected):
        lines = [
            f"{source} does not fit the model:",
            *_listed("missing in the file", [f"{name} {shape}" for name, shape in (stored[path] for path in missing)]),
            *_listed("unexpected in the file", [f"{name} {available[name].shape}" for name in unexpected]),
            *_listed(
                "of another shape",
                [
                    f"{name}: the file has {available[name].shape}, the model needs {shape}"
                    for name, shape in (stored[path] for path in misshaped)
                ],
            ),
            *(f"{what}." for start, what in naming.unread.items() if any(n.startswith(start) for n in unexpected)),
            _remedy({part_of(path) for path in (*missing, *misshaped)}, unexpected, available, naming),
        ]
        raise LoadError("\n".join(lines))
    if left_out:
        log.warning("%s: parts that no model here has are left out: %s", source, ", ".join(left_out[:20]))
    loaded = [path for path in wanted if part_of(path) not in fresh]
    types = {stored[path][0]: available[stored[path][0]].dtype for path in loaded}
    if wrong := [f"{name} ({t})" for name, t in types.items() if t.kind != "f" and t != ml_dtypes.bfloat16]:
        raise LoadError(
            f"{source}: weights are floating-point numbers, but {len(wrong)} arrays "
            f"are not: {', '.join(wrong[:5])}; restore a quantised model first"
        )
    return loaded, [path for path in wanted if part_of(path) in fresh]


def _stored(path: str, shape: tuple[int, ...], naming: Naming) -> tuple[str, tuple[int, ...]]:
    """(name, shape) of the array that holds a parameter."""
    name, transposed = naming(path)
    rows, *others = reversed(shape) if transposed else shape
    return name, (rows * naming.part(path)[1], *others)


def _first(name: str) -> str:
    """'bert' of 'bert.pooler.dense.weight' and of 'bert/pooler/dense/kernel'."""
    return re.split("[./]", name)[0]


def _listed(title: str, entries: list[str]) -> list[str]:
    """Lines of a message, of the first hundred entries."""
    lines = [f"  {len(entries)} {title}:", *(f"    {entry}" for entry in entries[:100])] if entries else []
    return lines + ([f"    ... and {len(entries) - 100} more"] if len(entries) > 100 else [])


def _remedy(unfit: set[str], unexpected: list[str], available: Mapping[str, Header], naming: Naming) -> str:
    """What can be done about a file that does not fit; `unfit`: the heads (or 'encoder') that do not."""
    for pattern, what in _PUT_IN.items():
        if any(re.search(pattern, name) for name in unexpected):
            return what
    words = naming(_WORDS).name
    root = _first(words)
    inner = words.removeprefix(root)[1:]
    if inside := [name for name in available if name.endswith(inner) and name != words and not name.startswith(root)]:
        prefix = inside[0].removesuffix(inner).removesuffix(f"{root}.").removesuffix(f"{root}/")
        return (
            f"The names differ by {prefix!r} in front: the file was saved from a program of which the model is a part. "
            f"Save that part alone, or write the arrays again without {prefix!r} in their names."
        )
    if unfit and "encoder" not in unfit:
        stored = ", ".join(sorted(heads_in(available, naming))) or "none"
        return (
            f"The encoder fits; the heads that the file has are: {stored}. To predict, take a task that it has a head "
            "for, or fine-tune the model first (configs/glue.py, squad.py, ner.py, classify.py ...). To train on, "
            "start with a new head: reinitialise_head=True (--config.reinitialise_head=True)"
            + ", or without next sentences: --config.data.nsp=False" * (unfit <= {"pooler", "nsp"})
            + "."
            + " Features and embeddings need no pooler: bertjax.tools.features, and convert --pooling=mean."
            * (unfit == {"pooler"})
        )
    if not unfit and all(_first(name) != root for name in unexpected):
        return (
            "The encoder fits, but the file has parts beside it that belong to another program "
            "and may be part of its answers. The encoder alone is read by task='features', by "
            "fine-tuning, and with reinitialise_head=True (--config.reinitialise_head=True)."
        )
    return "The encoder must fit in full: compare config.json with the file, or take the files that belong together."
