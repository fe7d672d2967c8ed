"""Documents -> one whole shard of a token store: read, tokenized, written in one pass.

In: extents of files (or documents) and a tokenizer. Out: the files of the shard and its record.
Which shards there are, and who makes them, is the business of build.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data import store as stores
from bertjax.data.documents import Document, read_extent
from bertjax.data.sources import Extent, Reading

BATCH_CHARACTERS = 1 << 20  # tokenized at a time; bounds a worker's memory
JUDGED_LENGTH = 128  # tokens of the rows for which a build is judged
ROOM = JUDGED_LENGTH - 3  # of them without [CLS] and [SEP]
LONGEST_SHOWN = 40  # characters by which the longest line can be found
# Of each source: documents, tokens, unknown tokens, tokens by which lines are longer than a row,
# documents of a single sentence.
SOURCE_NUMBERS = ("documents", "tokens", "unknown", "long", "single")


def build_shard(
    extents: Sequence[Extent],
    number: int,
    directory: Path,
    dtype: np.dtype,
    reading: Reading,
    split_lines: int | None = None,
    *,
    tokenizer: Any,
) -> dict[str, Any]:
    """Read, tokenize and write one shard; return its record. Pure: same input, same bytes."""
    counts: Counter[str] = Counter()
    documents = (
        (source, document) for source, extent in enumerate(extents) for document in read_extent(extent, reading, counts)
    )
    return write_shard(documents, number, directory, dtype, tokenizer, counts, split_lines)


def write_shard(
    documents: Iterable[tuple[int, Document | Sequence[str]]],
    number: int,
    directory: Path,
    dtype: np.dtype,
    tokenizer: Any,
    counts: Counter[str] | None = None,
    split_lines: int | None = None,
) -> dict[str, Any]:
    """Tokenize documents and write them as one whole shard; return its record.

    Documents without a token are dropped and counted ('empty_documents'), as are sentences
    ('empty_sentences'). The record's 'sources' has a row of numbers, named in SOURCE_NUMBERS, for
    each source of documents (0, 1, ...).
    """
    counts = Counter() if counts is None else counts
    writer = stores.ShardWriter(directory, number, dtype)
    sources: Counter[tuple[int, int]] = Counter()  # by (source, number in SOURCE_NUMBERS)
    longest = (0, "", 0)
    try:
        for batch, origins in _batches(documents):
            sentences = [s for document in batch for s in document]
            ids, lengths = encode(tokenizer, sentences)
            if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                raise ValueError(
                    f"the tokenizer gave ids from {ids.min()} to {ids.max()}, and has "
                    f"{tokenizer.vocab_size} entries: its files do not fit together"
                )
            if (most := int(lengths.max(initial=0))) > longest[0]:
                text = sentences[int(lengths.argmax())]
                begin = np.cumsum([len(document) for document in batch])
                longest = (most, text[:LONGEST_SHOWN], origins[int(np.searchsorted(begin, lengths.argmax(), "right"))])
            first = np.cumsum([0] + [len(document) for document in batch])[:-1]
            pieces = lengths > 0
            counts["empty_sentences"] += int(np.count_nonzero(lengths == 0))
            if split_lines:
                pieces = -(-lengths // split_lines)
                counts["long_lines_split"] += int(np.count_nonzero(pieces > 1))
            table = np.zeros(len(batch), stores.DOCUMENT_DTYPE)
            table["hash"] = [stores.content_hash(document) for document in batch]
            table["sentences"] = np.add.reduceat(pieces, first)
            table["tokens"] = np.add.reduceat(lengths, first)
            _count_sources(sources, origins, table, first, lengths, ids == tokenizer.unk_id)
            kept = table[table["tokens"] > 0]
            counts["empty_documents"] += len(table) - len(kept)
            lengths = _cut(lengths, pieces) if split_lines else lengths[pieces]
            writer.add(ids, lengths, kept)
        rows = [
            [sources[source, i] for i in range(len(SOURCE_NUMBERS))]
            for source in range(max((source for source, _ in sources), default=-1) + 1)
        ]
        return writer.finish(
            {
                "noticed": {k: v for k, v in sorted(counts.items()) if v},
                "unknown_tokens": sum(row[SOURCE_NUMBERS.index("unknown")] for row in rows),
                "sources": rows,
                "longest_line": list(longest),
            }
        )
    except BaseException:
        writer.abandon()
        raise


def _count_sources(
    sources: Counter[tuple[int, int]],
    origins: list[int],
    table: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
    unknown: np.ndarray,
) -> None:
    """Add the numbers of a batch of documents to those of their sources."""
    tokens = table["tokens"].astype(np.int64)
    begin = np.cumsum(tokens) - tokens
    long = np.add.reduceat(np.maximum(lengths - ROOM, 0), first)
    unknown = np.add.reduceat(np.append(unknown, False), begin, dtype=np.int64)
    numbers = np.stack(
        [tokens > 0, tokens, np.where(tokens > 0, unknown, 0), long, table["sentences"] == 1], axis=1
    ).astype(np.int64)
    where = np.unique(origins, return_index=True)[1]  # a source's documents lie together
    for origin, row in zip(np.array(origins)[where].tolist(), np.add.reduceat(numbers, where).tolist(), strict=True):
        for i, value in enumerate(row):
            sources[origin, i] += value


def _cut(lengths: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Lengths of the `pieces` of equal size (to a token) into which sentences are cut."""
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lengths, pieces = np.repeat(lengths, pieces), np.repeat(pieces, pieces)
    return lengths * (number + 1) // pieces - lengths * number // pieces


def _batches(documents: Iterable[tuple[int, Document | Sequence[str]]]) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Sentence lists of whole documents, about BATCH_CHARACTERS together, and their sources."""
    batch: list[list[str]] = []
    origins: list[int] = []
    size = 0
    for source, document in documents:
        sentences = document.sentences if isinstance(document, Document) else document
        if isinstance(sentences, str):
            raise ValueError(
                "a document is a list of sentences, this one is a string: "
                f"{sentences[:60]!r}; split it with bertjax.data.sentences"
            )
        batch.append(list(sentences) or [""])
        origins.append(source)
        size += sum(map(len, sentences))
        if size >= BATCH_CHARACTERS:
            yield batch, origins
            batch, origins, size = [], [], 0
    if batch:
        yield batch, origins


def encode(tokenizer: Any, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [N] end to end, length of each sentence int64 [S])."""
    if hasattr(tokenizer, "encode_flat"):
        return tokenizer.encode_flat(sentences)
    rows = tokenizer.encode_batch(sentences)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter((i for row in rows for i in row), np.int32, int(lengths.sum()))
    return ids, lengths
