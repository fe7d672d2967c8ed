"""The workloads of the benchmark and the batch that both sides train on."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from bertjax.model.presets import PRESETS
from bertjax.model.size import flops_per_row

MASK_ID, SPECIAL_IDS = 103, (0, 101, 102)  # of the original vocabularies


@dataclasses.dataclass(frozen=True)
class Workload:
    """One pre-training step: rows [batch_size, seq_length], P predictions a row."""

    model: str
    seq_length: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.seq_length}x{self.batch_size}"

    @property
    def predictions(self) -> int:
        """20 at 128 and 77 at 512, as the original's recipes; 15 % of the row otherwise."""
        return {128: 20, 512: 77}.get(self.seq_length, max(1, round(0.15 * self.seq_length)))

    @property
    def flops(self) -> float:
        """Model FLOPs of one step, forward and backward."""
        config = PRESETS[self.model]
        return self.batch_size * flops_per_row(config, self.seq_length, self.predictions)

    @classmethod
    def parse(cls, text: str) -> Workload:
        """'base-128x256' -> base, rows of 128, 256 rows a step."""
        try:
            model, shape = text.split("-")
            length, batch = map(int, shape.split("x"))
            PRESETS[model]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(
                f"workload {text!r} is not MODEL-LENGTHxROWS with a model of "
                f"{', '.join(PRESETS)}, for example base-128x256"
            ) from None
        return cls(model, length, batch)


DEFAULT = ("base-128x256", "base-512x64", "large-128x128", "large-512x32")


def rows(work: Workload) -> dict[str, np.ndarray]:
    """A batch of random words in bertjax's layout (unmasked ids), two segments a row, all full."""
    rng = np.random.default_rng(0)
    b, t = work.batch_size, work.seq_length
    ids = rng.integers(1000, 30000, (b, t))
    middle = t // 2
    ids[:, 0] = 101
    ids[:, [middle, t - 1]] = 102
    return {
        "input_ids": ids.astype(np.int32),
        "token_type_ids": np.tile((np.arange(t) > middle).astype(np.int32), (b, 1)),
        "attention_mask": np.ones((b, t), np.int32),
        "nsp_labels": rng.integers(0, 2, (b, 1)).astype(np.int32),
        "nsp_weights": np.ones((b, 1), np.float32),
    }
