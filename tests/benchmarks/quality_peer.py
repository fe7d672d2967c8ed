"""The other side of `quality`: BERT pre-training in transformers, as a user would write it.

BertForPreTraining with SDPA attention, torch.compile, bfloat16 autocast over float32 parameters,
fused AdamW, clipping, a linear schedule. It gets the same token store, pairs (one a row) and clock
as bertjax, is fed by a thread of its own and masks on the device, both of which are faster than the
data collator of transformers. Neither jax nor the rest of bertjax is loaded.
"""

from __future__ import annotations

import json
import pathlib
import queue
import threading
from typing import Any

import numpy as np
import torch

from bertjax.data.batches import PretrainingBatches
from bertjax.process.clock import Budget, process_age
from bertjax.tokenization import load_tokenizer
from tests.benchmarks import peer
from tests.benchmarks.quality import UNITS, Settings
from tests.benchmarks.quality_curves import write_curve

IGNORED = -100  # label of a token that is not predicted


def train(settings: Settings, heldout_file: pathlib.Path, out: pathlib.Path) -> None:
    """Trains for settings.minutes; writes curve.jsonl, model/ and a line of summary to stdout."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(settings.seed)
    batches = [
        PretrainingBatches(settings.store, length, settings.batch_size, settings.seed) for length, _ in settings.phases
    ]
    tokenizer = load_tokenizer(batches[0].stores[0].tokenizer_directory)
    mask = Masking(tokenizer, device)
    heldout = {name: torch.from_numpy(value).to(device) for name, value in np.load(heldout_file).items()}

    model = peer.make_model(settings.model, device, vocab_size=tokenizer.vocab_size)
    # Lengths are compiled one by one: kernels for any length would be slower.
    forward = model if settings.eager else torch.compile(model, dynamic=False)
    optimizer = peer.make_optimizer(model, settings.learning_rate)
    train_step = peer.make_step(model, forward, optimizer, device)

    budget = Budget(settings.minutes_of("peer"), UNITS)
    warmup, every = round(UNITS * settings.warmup), UNITS // settings.evaluations
    points: list[dict[str, float]] = []
    step = place = until = 0

    def record() -> None:
        points.append({"seconds": process_age(), "step": step, **evaluate(model, heldout, settings.batch_size)})
        points[-1]["seconds"] = process_age()
        print(json.dumps(points[-1]), flush=True)
        write_curve(out, points)

    for number, (span, _) in enumerate(settings.scaled_phases):
        until += span
        budget.begin_phase(number, step)
        rows = feed(batches[number], device)
        compiling = True
        while place < until:
            batch = mask(next(rows))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(place, warmup)
            loss = train_step(batch)
            step += 1
            if compiling:
                print(
                    f"phase {number + 1}: first loss {loss.item():.4f}, compiled at {process_age():.0f} s", flush=True
                )
                budget.compiled()
                compiling = False
            before, place = place, budget.position(step)
            if place >= UNITS or place // every > before // every:
                record()
    model.save_pretrained(out / "model")
    tokenizer.save(out / "model")


def schedule(place: int, warmup: int) -> float:
    """Linear warm-up, then linear to 0 at the end: 'linear_after_warmup'."""
    if place < warmup:
        return place / warmup
    return max(0.0, (UNITS - place) / max(1, UNITS - warmup))


def feed(batches: PretrainingBatches, device: str) -> Any:
    """Batches on the device, made and copied ahead by a thread."""
    ready: queue.Queue[dict[str, torch.Tensor]] = queue.Queue(8)

    def work() -> None:
        step = 0
        while True:
            tensors = {name: torch.from_numpy(value.astype(np.int64)) for name, value in batches[step].items()}
            if device == "cuda":
                tensors = {name: value.pin_memory() for name, value in tensors.items()}
            ready.put(tensors)
            step += 1

    threading.Thread(target=work, daemon=True).start()
    while True:
        yield {name: value.to(device, non_blocking=True) for name, value in ready.get().items()}


class Masking:
    """Dynamic masking on the device: 15 % of the words, of these 80 % [MASK], 10 % random."""

    def __init__(self, tokenizer: Any, device: str):
        self.mask_id = tokenizer.mask_id
        self.special = torch.zeros(tokenizer.vocab_size, dtype=torch.bool, device=device)
        self.special[[tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id]] = True
        self.words = torch.from_numpy(np.asarray(tokenizer.replacement_ids, np.int64)).to(device)

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch, masked, by the names of transformers' arguments."""
        ids = batch["input_ids"]
        chosen = (torch.rand(ids.shape, device=ids.device) < 0.15) & ~self.special[ids]
        labels = torch.where(chosen, ids, IGNORED)
        kind = torch.rand(ids.shape, device=ids.device)
        words = self.words[torch.randint(len(self.words), ids.shape, device=ids.device)]
        replaced = torch.where(kind < 0.8, self.mask_id, torch.where(kind < 0.9, words, ids))
        return {
            "input_ids": torch.where(chosen, replaced, ids),
            "labels": labels,
            "attention_mask": batch["attention_mask"],
            "token_type_ids": batch["token_type_ids"],
            "next_sentence_label": batch["nsp_labels"][:, 0],
        }


@torch.no_grad()
def evaluate(model: Any, rows: dict[str, torch.Tensor], batch_size: int) -> dict[str, float]:
    """MLM loss and accuracy and NSP accuracy of the held-out rows; the MLM head sees the masks."""
    model.eval()
    device = rows["input_ids"].device.type
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for start in range(0, len(rows["input_ids"]), batch_size):
        part = {name: value[start : start + batch_size] for name, value in rows.items()}
        with peer.autocast(device):
            hidden, pooled = model.bert(
                part["input_ids"].long(), part["attention_mask"].long(), part["token_type_ids"].long()
            )[:2]
            used = part["mlm_weights"] > 0
            where = part["mlm_positions"].long()[..., None].expand(-1, -1, hidden.shape[-1])
            words, nsp = model.cls(torch.gather(hidden, 1, where)[used], pooled)
        labels = part["mlm_labels"].long()[used]
        real = part["nsp_weights"][:, 0] > 0
        right = nsp.argmax(-1)[real] == part["nsp_labels"].long()[real, 0]
        sums += torch.stack(
            [
                torch.nn.functional.cross_entropy(words.float(), labels, reduction="sum").double(),
                (words.argmax(-1) == labels).sum().double(),
                used.sum().double(),
                right.sum().double(),
                real.sum().double(),
            ]
        )
    model.train()
    loss, correct, count, right, pairs = sums.tolist()
    return {"mlm_loss": loss / count, "mlm_accuracy": correct / count, "nsp_accuracy": right / pairs}
