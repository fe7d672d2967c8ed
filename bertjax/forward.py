"""Texts through a loaded model: rows, padded batches, and the outputs of each row.

In: a `LoadedModel` (bertjax.load_model) with a tokenizer, texts or rows. Out: the model's outputs in the order of the
rows. Rows of similar length share a padded batch, and the model is compiled once for each padded length (BUCKET). What
the outputs say is the business of inference.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax import jax_settings
from bertjax.interop.loading import LoadedModel
from bertjax.tasks.encoding import pair_rows, require_segments

BUCKET = 32  # rows are padded to a multiple of this many tokens: at most 16 shapes up to 512
# Tokens of a batch on a CPU, whose caches hold no more: MiniLM takes half the time for a row of 384
# by twos as by 32, and for a row of 32 tokens by 32 half the time as one by one.
CPU_TOKENS = 1024


class Row(NamedTuple):
    """One input of the model: ids and segment types of equal length, specials included.

    `positions` are the tokens whose MLM logits are wanted; a run of rows without any gives those of every token, from a
    model that has them.
    """

    ids: Sequence[int]
    types: Sequence[int]
    positions: Sequence[int] = ()


def make_rows(loaded: LoadedModel, texts: Sequence[str | tuple[str, str]], longest: int | None = None) -> list[Row]:
    """[CLS] first [SEP] (second [SEP]) of each text or pair.

    The longer of two texts is cut until both fit `longest` tokens and the model's positions. Raises ValueError for what
    is neither a text nor a pair, and for pairs on a model of one segment.
    """
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    for pair in pairs:
        match pair:
            case (str(), str() | None):
                continue
        raise ValueError(f"an input is a text or a pair of two texts, not {pair!r:.80}")
    if any(second is not None for _, second in pairs):
        require_segments(loaded.config, loaded.tokenizer)
    longest = min(longest or sys.maxsize, loaded.config.max_position_embeddings)
    return [Row(*row) for row in pair_rows(loaded.tokenizer, pairs, longest)]


def batches_by_length(
    rows: Sequence[Row], batch_size: int, pad_id: int, longest: int, tokens: int | None = None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Padded batches of rows of similar length, longest first (too large a batch fails at once).

    Every batch has the width T of its longest row's bucket and B = `batch_size` rows, or as many as `tokens` hold of
    this width; the last one is filled up with empty ones. So there are no more compiled shapes than buckets. A batch
    may reach into the next bucket: its shorter rows cost what empty ones would.

    Yields:
      (indices of the rows [<= B], inputs int32 [B, T] by name; masked_positions [B, P] where rows
      want some, P a power of two for the sake of few shapes).
    """
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    order = np.argsort(-lengths, kind="stable")
    width = np.minimum(longest, -(-lengths // BUCKET) * BUCKET)
    wanted = max((len(row.positions) for row in rows), default=0)
    at = 0
    while at < len(order):
        widest = int(width[order[at]])
        shape = (min(batch_size, max(1, tokens // widest)) if tokens else batch_size, widest)
        chosen = order[at : at + shape[0]]
        at += len(chosen)
        inputs = {name: np.zeros(shape, np.int32) for name in ("input_ids", "attention_mask", "token_type_ids")}
        inputs["input_ids"][:] = pad_id
        real = np.zeros(shape, bool)
        real[: len(chosen)] = np.arange(shape[1]) < lengths[chosen, None]
        inputs["attention_mask"][real] = 1
        inputs["input_ids"][real] = np.concatenate([rows[i].ids for i in chosen])
        inputs["token_type_ids"][real] = np.concatenate([rows[i].types for i in chosen])
        if wanted:
            positions = np.zeros((shape[0], 1 << (wanted - 1).bit_length()), np.int32)
            for place, i in enumerate(chosen):
                positions[place, : len(rows[i].positions)] = rows[i].positions
            inputs["masked_positions"] = positions
        yield chosen, inputs


def run(
    loaded: LoadedModel,
    rows: Sequence[Row],
    batch_size: int = 32,
    keep: Callable[[Row, Any], Any] = lambda row, output: output,
    **options: Any,
) -> list[Any]:
    """What `keep` makes of each row and the model's outputs of it: numpy, padded to its bucket.

    `batch_size` is the most rows of a batch; on a CPU long rows come in fewer (CPU_TOKENS). The next batch is
    dispatched before the last one is fetched, so that the device never waits. Where outputs are large, `keep` should
    copy the part that is needed: a view holds its batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    outputs: list[Any] = [None] * len(rows)
    waiting: tuple[np.ndarray, Any] | None = None

    def fetch(indices: np.ndarray, result: Any) -> None:
        leaves, structure = jax.tree.flatten(result)
        leaves = [np.asarray(leaf) for leaf in leaves]
        for i, *row in zip(indices, *leaves, strict=False):
            output = row[0] if structure.num_nodes == 1 else structure.unflatten(row)
            outputs[i] = keep(rows[i], output)

    for indices, inputs in batches_by_length(
        rows,
        min(batch_size, max(1, len(rows))),
        loaded.tokenizer.pad_id,
        loaded.config.max_position_embeddings,
        CPU_TOKENS if jax.default_backend() == "cpu" else None,
    ):
        with jax_settings.fixed():
            result = loaded(**inputs, **options)
        if waiting is not None:
            fetch(*waiting)
        waiting = indices, result
    if waiting is not None:
        fetch(*waiting)
    return outputs
