"""Texts through a loaded model: rows, padded or packed batches, and the outputs of each row.

In: a `LoadedModel` (bertjax.load_model) with a tokenizer, texts or rows. Out: the model's outputs in the order of the
rows. Rows of similar length share a batch, many short ones a row, and the model is compiled once for each length of the
rows of a batch (BUCKET). What the outputs say is the business of inference.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax import jax_settings
from bertjax.interop.loaded import LoadedModel
from bertjax.tasks.batches import INPUTS, evaluation_batches, of_examples
from bertjax.tasks.encoding import pair_rows, require_segments
from bertjax.tasks.shapes import SHORTEST, Shape, slots

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
    rows: Sequence[Row], batch_size: int, pad_id: int, longest: int, tokens: int | None = None, packs: bool = True
) -> Iterator[tuple[Shape, list[list[int]], dict[str, np.ndarray]]]:
    """Batches of rows of similar length, longest first: padded, or packed where they would not fit one padded batch.

    A batch has the width T of its longest row's bucket and R = `batch_size` rows, or as many as `tokens` hold of this
    width; the last one is filled up with empty ones. So there are no more compiled shapes than buckets. A batch may
    reach into the next bucket: its shorter rows cost what empty ones would. Rows that want positions are not packed,
    nor any without `packs`.

    Yields:
      (Shape, of each row of the batch the indices of `rows` in it, inputs int32 [R, T] by name, with what packed
      rows have more (tasks/batches.py); masked_positions [R, P] where rows want some, P a power of two for the sake of
      few shapes).
    """
    wanted = max((len(row.positions) for row in rows), default=0)
    packed = packs and len(rows) > batch_size and not wanted

    def shape_of(length: int) -> Shape:
        width = min(longest, max(SHORTEST * packed, -(-length // BUCKET) * BUCKET))
        most = min(batch_size, max(1, tokens // width)) if tokens else batch_size
        return Shape(min(most, len(rows)), width, slots(width) if packed else 1)

    features = [{name: np.asarray(values, np.int32) for name, values in zip(INPUTS, row, strict=False)} for row in rows]
    for shape, members, inputs in evaluation_batches(features, shape_of, pad_id):
        del inputs["weights"]
        if wanted:
            positions = np.zeros((shape.rows, 1 << (wanted - 1).bit_length()), np.int32)
            for place, (i,) in enumerate(members):
                positions[place, : len(rows[i].positions)] = rows[i].positions
            inputs["masked_positions"] = positions
        yield shape, members, inputs


def run(
    loaded: LoadedModel,
    rows: Sequence[Row],
    batch_size: int = 32,
    keep: Callable[[Row, Any], Any] = lambda row, output: output,
    **options: Any,
) -> list[Any]:
    """`keep` of each row and the model's outputs for it: numpy, by token maybe padded.

    `batch_size` is the most rows of a batch; on a CPU long rows come in fewer (CPU_TOKENS). The next batch is
    dispatched before the last one is fetched, so that the device never waits. Where outputs are large, `keep` should
    copy the part that is needed: a view holds its batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    outputs: dict[int, Any] = {}
    lengths = [len(row.ids) for row in rows]
    waiting: tuple[Shape, list[list[int]], Any] | None = None

    def fetch(shape: Shape, members: list[list[int]], result: Any) -> None:
        leaves, structure = jax.tree.flatten(result)
        leaves = [np.asarray(leaf) for leaf in leaves]
        by_token = [shape.slots > 1 and leaf.shape[1] == shape.length for leaf in leaves]
        parts = (of_examples(leaf, shape, members, lengths, by) for leaf, by in zip(leaves, by_token, strict=True))
        for found in zip(*parts, strict=True):
            i, output = found[0][0], [part for _, part in found]
            outputs[i] = keep(rows[i], output[0] if structure.num_nodes == 1 else structure.unflatten(output))

    for shape, members, inputs in batches_by_length(
        rows,
        batch_size,
        loaded.tokenizer.pad_id,
        loaded.config.max_position_embeddings,
        CPU_TOKENS if jax.default_backend() == "cpu" else None,
        loaded.model.packs,
    ):
        with jax_settings.fixed():
            result = loaded(**inputs, **options)
        if waiting is not None:
            fetch(*waiting)
        waiting = shape, members, result
    if waiting is not None:
        fetch(*waiting)
    return [outputs[i] for i in range(len(rows))]
