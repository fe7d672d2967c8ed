"""Documents -> one whole shard of a token store: read, tokenized, written in one pass.

In: extents of files (or documents) and a tokenizer. Out: the files of the shard and its record.
Which shards there are, and who makes them, is the business of build.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data import store as stores
from bertjax.data.documents import Document, read_extent
from bertjax.data.sources import Extent, Reading

BATCH_CHARACTERS = 1 << 20  # tokenized at a time; bounds a worker's memory


def build_shard(
    extents: Sequence[Extent], number: int, directory: Path, dtype: np.dtype, reading: Reading, *,
    tokenizer: Any,
) -> dict[str, Any]:
    """Read, tokenize and write one shard; return its record. Pure: same input, same bytes."""
    counts: dict[str, int] = {}
    documents = (doc for extent in extents for doc in read_extent(extent, reading, counts))
    return write_shard(documents, number, directory, dtype, tokenizer, counts)


def write_shard(
    documents: Iterable[Document | Sequence[str]], number: int, directory: Path, dtype: np.dtype,
    tokenizer: Any, counts: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Tokenize documents and write them as one whole shard; return its record.

    Documents without a token are dropped and counted ('empty_documents'), as are sentences
    ('empty_sentences').
    """
    counts = {} if counts is None else counts
    writer = stores.ShardWriter(directory, number, dtype)
    unknown = 0
    try:
        for batch in _batches(documents):
            ids, lengths = encode(tokenizer, [s for sentences in batch for s in sentences])
            if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                raise ValueError(f"the tokenizer gave ids from {ids.min()} to {ids.max()}, and has "
                                 f"{tokenizer.vocab_size} entries: its files do not fit together")
            unknown += int(np.count_nonzero(ids == tokenizer.unk_id))
            first = np.cumsum([0] + [len(sentences) for sentences in batch])
            table = np.zeros(len(batch), stores.DOCUMENT_DTYPE)
            table["hash"] = [stores.content_hash(sentences) for sentences in batch]
            table["sentences"] = np.add.reduceat(lengths > 0, first[:-1])
            table["tokens"] = np.add.reduceat(lengths, first[:-1])
            kept = table[table["tokens"] > 0]
            counts["empty_documents"] = (
                counts.get("empty_documents", 0) + len(table) - len(kept))
            counts["empty_sentences"] = (
                counts.get("empty_sentences", 0) + int(np.count_nonzero(lengths == 0)))
            writer.add(ids, lengths[lengths > 0], kept)
        return writer.finish({"noticed": {k: v for k, v in sorted(counts.items()) if v},
                              "unknown_tokens": unknown})
    except BaseException:
        writer.abandon()
        raise


def _batches(documents: Iterable[Document | Sequence[str]]) -> Iterator[list[list[str]]]:
    """Sentence lists of whole documents, about BATCH_CHARACTERS together."""
    batch: list[list[str]] = []
    size = 0
    for document in documents:
        sentences = document.sentences if isinstance(document, Document) else document
        if isinstance(sentences, str):
            raise ValueError("a document is a list of sentences, this one is a string: "
                             f"{sentences[:60]!r}; split it with bertjax.data.sentences")
        batch.append(list(sentences) or [""])
        size += sum(map(len, sentences))
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(tokenizer: Any, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [N] end to end, length of each sentence int64 [S])."""
    if hasattr(tokenizer, "encode_flat"):
        return tokenizer.encode_flat(sentences)
    rows = tokenizer.encode_batch(sentences)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter((i for row in rows for i in row), np.int32, int(lengths.sum()))
    return ids, lengths
