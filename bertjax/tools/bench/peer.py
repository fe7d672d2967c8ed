"""The same pre-training step in transformers + torch.compile, as a user would write it.

BertForPreTraining with scaled-dot-product attention, bfloat16 autocast over float32 parameters,
dropout 0.1, logits for every position and the loss over those with a label, gradient clipping and
fused AdamW. Run as a process of its own so that the two frameworks share no memory:

    python -m bertjax.tools.bench.peer base-128x256     -> one JSON object on the last line
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np

from bertjax.model.presets import PRESETS
from bertjax.tools.arguments import make_parser
from bertjax.tools.bench.workloads import MASK_ID, SPECIAL_IDS, Workload, rows


def _batch(data: dict[str, np.ndarray], work: Workload, device: str):
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


def measure(
    work: Workload, steps: int = 20, compiled: bool = True, wait: bool = False,
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

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    settings = {k: v for k, v in PRESETS[work.model].to_dict().items() if k != "model_type"}
    config = transformers.BertConfig(**settings)
    config._attn_implementation = "sdpa"
    model = transformers.BertForPreTraining(config).cuda().train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=1e-4, eps=1e-6, fused=True,
    )  # fmt: skip
    batch = _batch(rows(work) if batch is None else batch, work, "cuda")
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_seconds = time.perf_counter() - started
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    if wait:
        print("ready", flush=True)
        sys.stdin.readline()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    pipelined = (time.perf_counter() - started) / steps
    return {
        "step_seconds": min(pipelined, statistics.median(seconds)),
        "step_seconds_one_by_one": statistics.median(seconds),
        "compile_seconds": compile_seconds,
        "loss": float(loss),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def main() -> None:
    parser = make_parser("bench.peer", __doc__)
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
