"""Where a fine-tuning run starts: the encoder of any checkpoint and a head, old or new.

In: a path that bertjax.interop opens. Out: {path: array} parameters of the task's model; what the checkpoint lacks is
drawn from the run's key.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from bertjax.config import Config
from bertjax.interop import open_source
from bertjax.interop.loading import draw, stored_labels, stored_parameters
from bertjax.interop.names import heads_in
from bertjax.model.heads import parameter_shapes
from bertjax.model.outputs import STYLES
from bertjax.model.paths import flatten, unflatten

log = logging.getLogger(__name__)


class Pretrained:
    """Starting parameters: the encoder of a checkpoint, read once, and a head drawn from a key.

    Attributes:
      keep_head: False where the head is drawn even if the checkpoint has one of the same size.
    """

    keep_head = True

    def __init__(self, path: str | pathlib.Path):
        self.path = str(path)
        self.source = open_source(path)
        self._loaded: dict[str, np.ndarray] = {}
        self._draw: Any = None

    @classmethod
    def of(cls, config: Config) -> Pretrained:
        """Where the run of a config file starts: config.init_from, with as many positions as rows have tokens where
        config.extend_positions says how."""
        start, length = cls(config.init_from), config.task.max_length
        if config.extend_positions and length > start.source.config.max_position_embeddings:
            start.source = start.source.extended(length, config.extend_positions)
        return start

    def read_ahead(self) -> None:
        """Starts to read the weights beside what Python does until they are needed."""
        reading = ThreadPoolExecutor(1).submit(self.source.read)
        self.source = dataclasses.replace(self.source, read=reading.result)

    def __call__(self, model: Any, key: jax.Array) -> dict[str, Any]:
        """Parameters of `model`; what the checkpoint lacks is drawn from `key`."""
        if self._draw is None:
            loaded, _ = stored_parameters(self.source, model.storable, reinitialise_head=True)
            shapes = flatten(parameter_shapes(model))
            fresh = {path for path in shapes if path not in loaded}
            if not self.keep_head:
                heads = ("classifier/", "qa_outputs/")
                fresh |= {path for path in shapes if path.startswith(heads)}
            self._loaded = {path: loaded[path] for path in shapes if path not in fresh}
            log.info("%s: drawn at random: %s", self.path, ", ".join(sorted(fresh)) or "nothing")
            left_out = "classifier" in heads_in(self.source.headers, self.source.naming)
            if left_out and any(path.startswith("classifier/") for path in fresh):
                log.warning(
                    "%s: its head of %s outputs is for other classes and is left out; one of %s is drawn at random",
                    self.path,
                    stored_labels(self.source),
                    getattr(model, "num_labels", 1),
                )
            if "pooler/kernel" in fresh and STYLES[model.config.heads].pooled:  # else it is part of each new head
                log.warning("%s has no pooler: it is drawn at random, as the new head is", self.path)
            self._draw = draw(model, sorted(fresh))
        return unflatten(self._loaded | self._draw(key))
