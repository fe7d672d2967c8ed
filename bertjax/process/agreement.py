"""Refuses processes that are not of one run: other settings, other code, other data.

Each process compiles its own program, so a rate or a seed that differs is not an error to jax: the copies of the
weights would drift apart in silence.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bertjax import jax_settings
from bertjax.config import Config, flatten
from bertjax.process.distributed import wait_for_all
from bertjax.version import source_digest

LOCAL_SETTINGS = ("data.cache", "execution.compilation_cache")  # of a machine and not of the run


def require_same_command(config: Config, workdir: str) -> None:
    """Raises ValueError unless all processes have these settings, this workdir and this code."""
    require_same(
        {
            **{f"--config.{name}": value for name, value in flatten(config).items() if name not in LOCAL_SETTINGS},
            "--workdir": workdir,
            **jax_settings.environment(),
            "the code of bertjax": source_digest(),
            "jax": jax.__version__,
        }
    )


def require_same(facts: Mapping[str, Any]) -> None:
    """Raises ValueError on all processes unless all give the same facts; those that differ say in what. All call it."""
    if jax.process_count() == 1:
        return
    wait_for_all("preparing its data")  # an exchange between devices may have a time-out
    ours = {name: repr(value) for name, value in facts.items()}
    text = np.frombuffer(json.dumps(ours).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    theirs = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(text, length))).tobytes())
    others = np.flatnonzero(multihost_utils.process_allgather(np.bool_(ours != theirs))).tolist()
    if not others:
        return
    if jax.process_index() not in others:
        raise ValueError(
            f"processes {', '.join(map(str, others))} of {jax.process_count()} were "
            "started with other settings than this one, and print which; start all alike"
        )
    differences = ";".join(
        f"\n  {name}: {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
    raise ValueError(
        f"process {jax.process_index()} was started with other settings than process 0:"
        f"{differences}.\nStart all processes of a run alike."
    )
