"""Candidates of --search: meshes, remat policies and accumulation, the fastest expected first.

In: the configuration's rows and model, devices and their memory. Out: `Candidate`s worth compiling.
Most combinations are discarded by arithmetic: a compilation takes minutes, a product nothing.
"""

import dataclasses
from collections.abc import Iterator

from bertjax.model.presets import BertConfig, parameter_count
from bertjax.tools.plan.cost import REPEATED

# Bytes that a layer keeps for the backward pass, in units of [rows, T, H] bfloat16 arrays, beside
# its attention matrices [rows, A, T, T]: fitted to what the TPU compiler assigns.
KEPT = {"none": 34, "dots": 10, "minimal": 4, "full": 2}
KEPT_MATRICES = {"none": 4.5, "dots": 0, "minimal": 0, "full": 0}  # bytes an element
WORKING_MATRICES = 10  # bytes an element of the one layer at work
ROOM = 0.9  # share of the memory that a candidate may take by this arithmetic


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings to try, and what arithmetic says of them."""

    fsdp: int
    tensor: int
    remat: str
    accumulation: int
    bytes: float  # of a device
    work: float  # relative time: 1 = the model's products alone

    def overrides(self) -> dict[str, object]:
        """Settings, by name."""
        return {"mesh.auto": False, "mesh.data": -1, "mesh.fsdp": self.fsdp,
                "mesh.tensor": self.tensor, "execution.layers": "scan",
                "execution.remat": self.remat, "accumulation": self.accumulation}

    def __str__(self) -> str:
        return (f"mesh.fsdp={self.fsdp} mesh.tensor={self.tensor} execution.layers=scan "
                f"execution.remat={self.remat} accumulation={self.accumulation}")


def bytes_of(config: BertConfig, rows: int, length: int, predictions: int, devices: int,
             fsdp: int, tensor: int, remat: str, accumulation: int) -> float:
    """Bytes of a device by arithmetic: state, gradients, kept activations, work at its widest.

    Args:
      rows: of the global batch.
      length: T; predictions: P, positions that the MLM head sees.
    """
    parameters = parameter_count(config) / (fsdp * tensor)
    state = parameters * (4 * 3 + 4 * (1 if accumulation == 1 else 2) + 2)
    here = rows * tensor / devices / accumulation
    hidden = here * length * config.hidden_size * 2
    matrices = here * config.num_attention_heads / tensor * length * length
    kept = config.num_hidden_layers * (
        KEPT[remat] * hidden + KEPT_MATRICES[remat] * matrices)
    logits = here * predictions * config.vocab_size / tensor * 10
    return state + kept + max(WORKING_MATRICES * matrices + 20 * hidden, logits)


def candidates(config: BertConfig, rows: int, length: int, predictions: int, devices: int,
               limit: float) -> Iterator[Candidate]:
    """Candidates that should fit into `limit` bytes, by expected time."""
    found = []
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor in (1, 2):
        if devices % tensor or config.num_attention_heads % tensor:
            continue
        for fsdp in divisors:
            shards = devices // tensor
            if shards % fsdp or rows % shards:
                continue
            for accumulation in (1, 2, 4, 8):
                if rows // shards % accumulation:
                    continue
                for remat in KEPT:
                    size = bytes_of(config, rows, length, predictions, devices, fsdp, tensor,
                                    remat, accumulation)
                    if size <= ROOM * limit:
                        found.append(Candidate(fsdp, tensor, remat, accumulation, size, _work(
                            fsdp, tensor, remat, accumulation)))
    # Of equal settings but more sharding or smaller pieces, the work is larger: order by it.
    yield from sorted(found, key=lambda candidate: (candidate.work, candidate.bytes))


def _work(fsdp: int, tensor: int, remat: str, accumulation: int) -> float:
    """Time relative to the bare products: repetition, gathers, and smaller products."""
    gathers = 0.02 * (fsdp > 1) * accumulation
    return 1 + REPEATED[remat] / 3 + gathers + 0.15 * (tensor - 1) + 0.02 * (accumulation - 1)
