"""Google's original checkpoints.

bert_config.json  vocab.txt  bert_model.ckpt.index  bert_model.ckpt.data-00000-of-00001
"""

import functools
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.formats.arrays import Header, LoadError
from bertjax.formats.tensor_bundle import Entry, read_entry, read_index
from bertjax.interop.huggingface import config_of_file
from bertjax.model.presets import BertConfig

log = logging.getLogger(__name__)

# What training left beside the weights (optimization.py of the original, and LAMB variants).
_NOT_WEIGHTS = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|[mv]|Adam(_1)?|"
    r"AdamWeightDecayOptimizer|global_step)(_\d+)?$|"
    r"^(global_step|beta[12]_power|loss_scale.*|good_steps)$"
)


def find_prefix(path: str | Path) -> Path | None:
    """The checkpoint prefix (.../bert_model.ckpt) that a path means, or None.

    A prefix itself, its .index file, or a directory with one checkpoint are accepted; of several
    in a directory, bert_model.ckpt and then the highest step is taken, which is said.

    Raises LoadError for several of which neither is the case.
    """
    path = Path(path).absolute()  # the present directory, '.', has no name to add to
    if path.name.endswith(".index") and path.is_file():
        return path.with_name(path.name.removesuffix(".index"))
    if path.with_name(path.name + ".index").is_file():
        return path
    found = [index.with_name(index.name.removesuffix(".index")) for index in path.glob("*.index")]

    def rank(prefix: Path) -> tuple[bool, int]:
        step = re.search(r"-(\d+)$", prefix.name)
        return prefix.name == "bert_model.ckpt", int(step.group(1)) if step else -1

    best = max(found, key=rank, default=None)
    if len(found) > 1:
        names = ", ".join(sorted(prefix.name for prefix in found))
        if sum(rank(prefix) == rank(best) for prefix in found) > 1:
            raise LoadError(f"{path} holds several checkpoints, {names}: name one of them, as {path / found[0].name}")
        _tell_once(f"{path} holds several checkpoints, {names}: {best.name} is read; name another by its path")
    return best


@functools.cache
def _tell_once(text: str) -> None:
    log.warning("%s", text)


def read_headers(prefix: str | Path) -> dict[str, Header]:
    """Variable name -> type and shape of what `read_variables` gives. Raises LoadError as it."""
    weights, _ = _weights(Path(prefix))
    return {
        name: Header((sum(entry.shape[0] for entry in entries), *entries[0].shape[1:]), entries[0].dtype)
        for name, entries in weights.items()
    }


def read_variables(prefix: str | Path) -> dict[str, np.ndarray]:
    """Variable name -> array; optimizer slots and step counters are left out by rule.

    Raises:
      LoadError: files missing or truncated, or a checksum differs.
    """
    prefix = Path(prefix)
    weights, shards = _weights(prefix)
    variables = {}
    for name, entries in weights.items():
        try:
            arrays = [read_entry(name, entry, prefix, shards) for entry in entries]
            variables[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        except (ValueError, TypeError, OverflowError) as error:
            raise LoadError(f"{prefix}: {name}: {error}" if name not in str(error) else str(error)) from error
    return variables


def _weights(prefix: Path) -> tuple[dict[str, list[Entry]], int]:
    """(variable name -> its entries, number of data files), without what training left beside them.

    A variable below another ('VARIABLE/Adam') is a slot of an optimizer, and no weight is a scalar.
    Parts that were saved as variables of their own ('VARIABLE/part_0') are one variable.
    """
    entries, shards = read_index(f"{prefix}.index")
    weights: dict[str, list[Entry]] = {}
    for name, entry in entries.items():
        above = name
        while (above := above.rpartition("/")[0]) and above not in entries:
            pass
        if not above and entry.shape and not _NOT_WEIGHTS.match(name):
            weights[name] = [entry]
    for name in [name for name in weights if name.endswith("/part_0")]:
        whole = name.removesuffix("/part_0")
        numbered = [f"{whole}/part_{i}" for i in range(len(weights))]
        there = list(itertools.takewhile(weights.__contains__, numbered))
        weights[whole] = [weights.pop(part)[0] for part in there]
    return weights, shards


def read_config(prefix: str | Path) -> tuple[BertConfig, dict[str, Any]]:
    """(BertConfig, contents) of the bert_config.json beside a checkpoint.

    "gelu" there means the exact form: the released weights were trained before the original code
    moved to the tanh approximation, and transformers reads them so too.

    Raises:
      LoadError: the file is missing or wrong.
    """
    path = Path(prefix).parent / "bert_config.json"
    if not path.is_file():
        raise LoadError(f"{path} is missing: Google's checkpoints come with it")
    return config_of_file(path)
