"""transformers' side of `modern`: ModernBertForMaskedLM as a user would train it.

torch.compile, bfloat16 autocast over float32 parameters, logits for every position and the loss over those with a
label, gradient clipping and fused AdamW.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from bertjax.model.presets import BertConfig
from tests.benchmarks import modern
from tests.benchmarks.modern import Workload
from tests.benchmarks.peer import make_optimizer, make_step


def tensors(work: Workload, config: BertConfig, device: str) -> dict[str, Any]:
    """The batch, one text a row, masked once; full rows need no mask of attention."""
    import torch

    random = np.random.default_rng(2)
    batch = work.batch(config, packed=False)
    ids, labels = batch["input_ids"], np.full_like(batch["input_ids"], -100)
    for row, (length,) in enumerate(work.texts(packed=False)):
        chosen = 1 + random.choice(length - 2, round(modern.RATE * length), replace=False)
        labels[row, chosen] = ids[row, chosen]
        ids[row, chosen] = modern.MASK
    arrays = {"input_ids": ids, "labels": labels}
    if work.several:
        arrays["attention_mask"] = batch["attention_mask"]
    return {name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in arrays.items()}


def main() -> None:
    parser = modern.side_parser("modern_transformers", __doc__)
    parser.add_argument("--compile", default="model", choices=("model", "layers", "none"))
    parser.add_argument("--attention", default="sdpa")
    args = modern.parse(parser)
    (work,), config = args.workloads, modern.MINIATURE if args.miniature else modern.BASE

    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    fields = {name: value for name, value in config.to_dict("modernbert").items() if name != "model_type"}
    architecture = transformers.ModernBertConfig(**fields)
    architecture._attn_implementation = args.attention
    model = transformers.ModernBertForMaskedLM(architecture).to(device).train()
    forward = torch.compile(model) if args.compile == "model" else model
    if args.compile == "layers":
        for layer in model.model.layers:
            layer.compile()
    step, batch = (
        make_step(model, forward, make_optimizer(model, learning_rate=1e-4), device),
        tensors(work, config, device),
    )

    def timed(count: int) -> tuple[float, torch.Tensor]:
        started = time.perf_counter()
        for _ in range(count):
            loss = step(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, loss

    def time_round(name: str, steps: int) -> dict[str, Any]:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed(3)
        one_by_one = statistics.median(timed(1)[0] for _ in range(steps))
        pipelined, loss = timed(steps)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        free()
        return {"step_seconds": min(pipelined / steps, one_by_one), "loss": float(loss.detach()), "peak_bytes": peak}

    def free() -> None:
        """Leaves the memory that no tensor needs to the other processes."""
        if device == "cuda":
            torch.cuda.empty_cache()

    seconds, _ = timed(1)
    timed(2)
    free()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    modern.serve({"versions": versions, "compile_seconds": round(seconds, 1)}, time_round)


if __name__ == "__main__":
    main()
