"""Candidates of --search: meshes, remat policies and accumulation, in the order to try them.

Arithmetic discards what cannot fit, since a compilation takes minutes and a product nothing. It does
not choose a remat policy: which is the fastest depends on what the compiler can fuse (large on a
v5e-16 is faster with "full" than with "dots", though it computes a quarter more), so of a mesh all
policies that fit are candidates.
"""

import dataclasses
from collections.abc import Iterator

from bertjax.model.presets import BertConfig, parameter_count

# [rows, T, H] arrays of bfloat16 that a layer keeps for its backward pass, as the compiler's buffer
# assignment lists them: "full" the layer's input, once for each of its two uses; "minimal" also the
# context and the normalised sum behind it; "dots" also queries, keys, values, both outputs, and the
# inner activations, which are four; "none" what fits best.
KEPT = {"none": 26, "dots": 12, "minimal": 4, "full": 2}
WORKING = 20  # arrays [rows, T, H] of the one layer at work
# Bytes of an element [A, T, T], where attention is not fused: kept by a layer (scores in float32,
# probabilities in bfloat16), at work in one.
KEPT_MATRICES = {"none": 6, "dots": 0, "minimal": 0, "full": 0}
WORKING_MATRICES = 10
WORKING_LOGITS = 10  # bytes of an element [P, V]
ROOM = 0.9  # share of the memory that a candidate may take by this arithmetic


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings to try, and what arithmetic says of them."""

    fsdp: int
    tensor: int
    remat: str
    accumulation: int
    bytes: float  # of a device

    def settings(self) -> dict[str, object]:
        """What the candidate is, by names of settings."""
        return {
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "execution.layers": "scan",
            "execution.remat": self.remat,
            "accumulation": self.accumulation,
        }

    def overrides(self) -> dict[str, object]:
        """All settings that it changes."""
        return {"mesh.auto": False, "mesh.data": -1, **self.settings()}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings().items())


def bytes_of(
    config: BertConfig,
    rows: int,
    length: int,
    predictions: int,
    devices: int,
    fsdp: int,
    tensor: int,
    remat: str,
    accumulation: int,
    fused: bool,
) -> float:
    """Bytes of a device by arithmetic: state, gradients, kept activations, work at its widest.

    This is what the compiler assigns to buffers, within a tenth; the program that it ends with
    takes 1.05 to 1.25 times as much.

    Args:
      rows: of the global batch.
      length: T; predictions: P, positions that the MLM head sees.
      fused: whether attention keeps its matrices out of memory.
    """
    # Weights and moments in float32, gradients (with accumulation also their sum), weights again
    # in bfloat16, stacked.
    state = parameter_count(config) / (fsdp * tensor) * (4 * 3 + 4 * (1 if accumulation == 1 else 2) + 2)
    here = rows * tensor / devices / accumulation
    hidden = here * length * config.hidden_size * 2
    matrices = 0 if fused else here * config.num_attention_heads / tensor * length * length
    kept = config.num_hidden_layers * (KEPT[remat] * hidden + KEPT_MATRICES[remat] * matrices)
    logits = here * predictions * config.vocab_size / tensor
    return state + kept + max(WORKING_MATRICES * matrices + WORKING * hidden, WORKING_LOGITS * logits)


def candidates(
    config: BertConfig, rows: int, length: int, predictions: int, devices: int, limit: float, fused: bool = False
) -> Iterator[Candidate]:
    """Candidates that should fit into `limit` bytes: the fewest exchanges first, then the largest
    micro-batches, then the least recomputation."""
    # In this order each costs more than the next: tensor exchanges activations in every layer,
    # accumulation repeats fsdp's gathers and makes products smaller, fsdp gathers weights beside the
    # work.
    divisions = [
        (tensor, accumulation, fsdp)
        for tensor in (1, 2)
        for accumulation in (1, 2, 4, 8)
        for fsdp in range(1, devices // tensor + 1)
        if not (devices % tensor or config.num_attention_heads % tensor)
        and not (rows % (devices // tensor * accumulation) or devices // tensor % fsdp)
    ]
    for tensor, accumulation, fsdp in divisions:
        for remat in KEPT:
            size = bytes_of(config, rows, length, predictions, devices, fsdp, tensor, remat, accumulation, fused)
            if size <= ROOM * limit:
                yield Candidate(fsdp, tensor, remat, accumulation, size)
