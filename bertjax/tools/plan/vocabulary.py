"""The vocabulary of a plan: there is no tokenizer yet, and only the number of entries counts."""

import dataclasses
from typing import Any

import numpy as np

RELEASED = 30522  # entries of the released uncased models


def vocabulary_size(config: Any) -> int:
    """Entries that the run of a configuration will have, as far as it says so."""
    demo = config.data.corpus == "docstrings"
    return config.model.vocab_size or (config.data.demo_vocab_size if demo else RELEASED)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Stands in for a tokenizer."""

    vocab_size: int
    pad_id: int = 0
    cls_id: int = 2
    sep_id: int = 3
    mask_id: int = 4

    @property
    def replacement_ids(self) -> np.ndarray:
        return np.arange(5, self.vocab_size, dtype=np.int32)

    @property
    def is_continuation(self) -> np.ndarray:
        return np.arange(self.vocab_size) % 2 == 1
