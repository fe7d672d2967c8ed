"""What a store's pairs look like: numbers over an epoch, and decoded rows for human eyes."""

from collections.abc import Iterator

import numpy as np

from bertjax.config import Config
from bertjax.data import laws
from bertjax.data.batches import PretrainingBatches
from bertjax.data.pairs import PairIndex
from bertjax.data.rows import Batch, PackedEpoch, pairs_per_row
from bertjax.data.store import TokenStore
from bertjax.tokenization import Tokenizer

MOST_PAIRS = 2_000_000  # statistics of larger epochs are of an even sample
RESET, BOLD, DIM, RED, GREEN, CYAN = (f"\x1b[{code}m" for code in (0, 1, 2, 31, 32, 36))


def pair_statistics(store: TokenStore, seq_length: int, seed: int = 0) -> dict[str, float]:
    """Numbers over the first epoch at a sequence length.

    Keys: pairs; random (share of random next); mean_length, mean_a, mean_b (tokens, without special ones); full (share
    of pairs that fill the row); padded_fill and packed_fill (share of positions that hold a token); packed_rows;
    coverage (share of the corpus's tokens that some pair of the epoch holds, see laws.measure).
    """
    index = PairIndex(store, seq_length, seed)
    step = -(-len(index) // MOST_PAIRS)
    pairs = index.describe(np.arange(0, len(index), step))
    lengths = pairs[:, 1] + pairs[:, 3]
    room = seq_length - store.layout.count(pair=True)
    packed = PackedEpoch(index, seq_length, pairs_per_row(seq_length))
    return {
        "pairs": len(index),
        "random": index.random_share,
        "mean_length": float(lengths.mean()),
        "mean_a": float(pairs[:, 1].mean()),
        "mean_b": float(pairs[:, 3].mean()),
        "full": float((lengths == room).mean()),
        "padded_fill": float((lengths + seq_length - room).mean() / seq_length),
        "packed_fill": packed.share_filled,
        "packed_rows": len(packed),
        "coverage": laws.measure(store, seq_length, seed)["seen_in_epoch"],
    }


def decoded_examples(
    store: TokenStore,
    tokenizer: Tokenizer,
    config: Config,
    seq_length: int,
    count: int = 3,
    seed: int = 0,
    packed: bool = False,
    colour: bool = True,
) -> Iterator[str]:
    """Some rows as text, masked as config.masking says, a line a pair: NSP label, segments A and B, masked tokens {what
    stands there -> what is to be predicted}.
    """
    batch = PretrainingBatches(store, seq_length, count, seed, packed=packed)[0]
    masked, labels = _draw_masks(batch, tokenizer, seed, config)

    def paint(text: str, *codes: str) -> str:
        return "".join(codes) + text + RESET if colour else text

    layout = tokenizer.layout
    special = {*layout.prefix, *layout.middle, *layout.suffix}
    for row in range(count):
        mask = batch["attention_mask"][row]
        for slot in range(1, int(mask.max()) + 1):
            random = bool(batch["nsp_labels"][row, slot - 1])
            where = np.flatnonzero(mask == slot)
            ids, words = batch["input_ids"][row, where].tolist(), []
            # Not every tokenizer numbers the segments; what stands between them they all have.
            a = next(i for i in range(len(layout.prefix), len(ids)) if ids[i] in special)
            for number, position in enumerate(where.tolist()):
                token = tokenizer.readable(int(masked[row, position]))
                in_b = number >= a + len(layout.middle)
                if labels[row, position] >= 0:
                    label = tokenizer.readable(int(labels[row, position]))
                    words.append(paint("{" + f"{token}->{label}" + "}", BOLD, RED))
                elif batch["input_ids"][row, position] in special:
                    words.append(paint(token, DIM))
                else:
                    words.append(paint(token, CYAN) if in_b else token)
            label = paint("1 random ", BOLD, RED) if random else paint("0 is next", BOLD, GREEN)
            if not batch["nsp_weights"][row, slot - 1]:
                label = paint("no NSP   ", DIM)
            yield (f"row {row} pair {slot}  {label}  {len(where)} tokens\n  " + " ".join(words))


def _draw_masks(batch: Batch, tokenizer: Tokenizer, seed: int, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(masked ids, original id where predicted and -1 elsewhere), both [B, T]."""
    # Late: statistics need no jax.
    import jax

    from bertjax.data.masking import MaskingSpec, mask_tokens

    pairs = batch["nsp_labels"].shape[1] if "position_ids" in batch else 1
    spec = MaskingSpec.of(config, tokenizer, batch["input_ids"].shape[1], pairs)
    draw = jax.jit(lambda ids, mask: mask_tokens(jax.random.key(seed), ids, mask, spec))
    masked = draw(batch["input_ids"], batch["attention_mask"])
    labels = np.full(batch["input_ids"].shape, -1, np.int32)
    row, slot = np.nonzero(np.asarray(masked.weights))
    labels[row, np.asarray(masked.positions)[row, slot]] = np.asarray(masked.labels)[row, slot]
    return np.asarray(masked.input_ids), labels
