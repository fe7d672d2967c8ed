"""The same pre-training step in transformers + torch.compile, as a user would write it.

BertForPreTraining with scaled-dot-product attention, bfloat16 autocast over float32 parameters,
dropout 0.1, logits for every position and the loss over those with a label, gradient clipping and
fused AdamW. Run as a process of its own so that the two frameworks share no memory:

    python -m tests.benchmarks.peer base-128x256     -> one JSON object on the last line
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.model.presets import PRESETS
from tests.benchmarks import harness
from tests.benchmarks.workloads import MASK_ID, SPECIAL_IDS, Workload, rows

if TYPE_CHECKING:  # --help needs neither
    import torch
    import transformers


def _batch(data: dict[str, np.ndarray], work: Workload, device: str) -> dict[str, torch.Tensor]:
    """Rows in bertjax's layout, one pair each, masked once, in transformers' names."""
    import torch

    rng = np.random.default_rng(1)
    ids = data["input_ids"].copy()
    labels = np.full_like(ids, -100)
    for r in range(work.batch_size):
        words = np.flatnonzero(~np.isin(ids[r], SPECIAL_IDS))
        count = min(work.predictions, max(1, round(0.15 * (data["attention_mask"][r].sum()))))
        chosen = rng.choice(words, count, replace=False)
        labels[r, chosen] = ids[r, chosen]
        ids[r, chosen] = MASK_ID
    batch = {
        "input_ids": ids,
        "token_type_ids": data["token_type_ids"],
        "attention_mask": data["attention_mask"],
        "labels": labels,
        "next_sentence_label": data["nsp_labels"][:, 0],
    }
    return {k: torch.from_numpy(v.astype(np.int64)).to(device) for k, v in batch.items()}


def make_model(preset: str, device: str, **fields: Any) -> transformers.BertForPreTraining:
    """A new model of bertjax's presets, to be trained; `fields` replace some of its configuration.

    float32 products of the process may run in TF32 from now on.
    """
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    architecture = {k: v for k, v in PRESETS[preset].to_dict().items() if k != "model_type"}
    config = transformers.BertConfig(**architecture | fields)
    config._attn_implementation = "sdpa"
    return transformers.BertForPreTraining(config).to(device).train()


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Fused AdamW; biases and LayerNorm do not decay."""
    import torch

    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        eps=1e-6,
        fused=True,
    )


def autocast(device: str) -> torch.autocast:
    """bfloat16 on the GPU, nothing on the CPU."""
    import torch

    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def make_step(
    model: Any, forward: Any, optimizer: torch.optim.Optimizer, device: str
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """A training step: a batch, by the names of the model's arguments, to its loss.

    Args:
      forward: `model`, or what torch.compile makes of it.
    """
    import torch

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast(device):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def measure(
    work: Workload,
    steps: int = 20,
    compiled: bool = True,
    wait: bool = False,
    batch: dict[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Seconds and peak memory of the peer's step.

    Args:
      batch: rows to train on instead of random words, one pair each.
      wait: say "ready" after the warm-up and wait for a line on standard input before timing, so
        that several processes can compile at once and be timed one by one.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    model = make_model(work.model, "cuda")
    step = make_step(
        model, torch.compile(model) if compiled else model, make_optimizer(model, learning_rate=1e-4), "cuda"
    )
    tensors = _batch(rows(work) if batch is None else batch, work, "cuda")

    def timed(count: int) -> tuple[float, torch.Tensor]:
        """Seconds that so many steps take, and the loss of the last."""
        started = time.perf_counter()
        for _ in range(count):
            loss = step(tensors)
        torch.cuda.synchronize()
        return time.perf_counter() - started, loss

    compile_seconds, _ = timed(1)
    timed(4)
    if wait:
        print("ready", flush=True)
        sys.stdin.readline()
    torch.cuda.reset_peak_memory_stats()
    one_by_one = statistics.median(timed(1)[0] for _ in range(steps))
    energy = harness.joules()
    pipelined, loss = timed(steps)
    energy = harness.spent(energy)
    return {
        "step_seconds": min(pipelined / steps, one_by_one),
        "step_seconds_one_by_one": one_by_one,
        "compile_seconds": compile_seconds,
        "step_joules": energy and energy / steps,
        "loss": float(loss),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def main() -> None:
    parser = harness.make_parser("peer", __doc__)
    parser.add_argument("workload", type=Workload.parse)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--wait", action="store_true", help="warm up, then wait for a line")
    parser.add_argument("--rows", help="npz of a batch to train on instead of random words")
    args = parser.parse_args()
    batch = dict(np.load(args.rows)) if args.rows else None
    print(json.dumps(measure(args.workload, args.steps, not args.eager, args.wait, batch)))


if __name__ == "__main__":
    main()
