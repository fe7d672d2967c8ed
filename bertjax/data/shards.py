"""Documents -> whole shards of a token store: read, tokenized and written, each in one pass.

In: extents of files (or documents) and a tokenizer. Out: the files of a shard and its record. build.py decides which
shards there are; `make_here` makes them in this process or in several of this machine, `beam_maker` on Apache Beam. A
shard is whole once its record is there.
"""

import contextlib
import hashlib
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.documents import Document, read_extent
from bertjax.data.sources import Extent, Reading
from bertjax.data.store import atomic_file, manifest_hash, shard_path, write_json
from bertjax.data.verification import hash_file
from bertjax.formats.files import read_json
from bertjax.interruption import end_with_parent
from bertjax.tokenization import Tokenizer

DOCUMENT_DTYPE = np.dtype([("hash", "<u8"), ("sentences", "<u4"), ("tokens", "<u8")])
BATCH_CHARACTERS = 1 << 20  # tokenized at a time; bounds a worker's memory
JUDGED_LENGTH = 128  # tokens of the rows for which a build is judged
ROOM = JUDGED_LENGTH - 3  # of them without [CLS] and [SEP]
LONGEST_SHOWN = 40  # characters by which the longest line can be found
# Of each source: documents, tokens, unknown tokens, tokens by which lines are longer than a row, documents of a single
# sentence.
SOURCE_NUMBERS = ("documents", "tokens", "unknown", "long", "single")


class ShardTask(NamedTuple):
    """What decides the bytes of a shard, beside the tokenizer."""

    extents: Sequence[Extent]
    number: int
    directory: Path
    dtype: np.dtype
    reading: Reading
    split_lines: int | None = None


# Makes shards: (tasks, tokenizer, whether to stop early) -> (number, record) of each as it is finished.
ShardMaker = Callable[[list[ShardTask], Tokenizer, Callable[[], bool]], Iterator[tuple[int, dict[str, Any]]]]


def build_shard(task: ShardTask, tokenizer: Tokenizer) -> dict[str, Any]:
    """Reads, tokenizes and writes one shard; returns its record. The same input gives the same bytes."""
    counts: Counter[str] = Counter()
    documents = (
        (source, document)
        for source, extent in enumerate(task.extents)
        for document in read_extent(extent, task.reading, counts)
    )
    return write_shard(documents, task.number, task.directory, task.dtype, tokenizer, task.split_lines, counts)


def write_shard(
    documents: Iterable[tuple[int, Document | Sequence[str]]],
    number: int,
    directory: Path,
    dtype: np.dtype,
    tokenizer: Tokenizer,
    split_lines: int | None,
    counts: Counter[str] | None = None,
) -> dict[str, Any]:
    """Tokenizes documents and writes them as one whole shard; returns its record.

    Documents without a token are dropped and counted ('empty_documents'), as are sentences ('empty_sentences'). The
    record's 'sources' has a row of SOURCE_NUMBERS for each source of documents (0, 1, ...). Memory is the two tables
    (12 bytes a sentence at most), not the tokens.
    """
    counts = Counter() if counts is None else counts
    sources = np.zeros((0, len(SOURCE_NUMBERS)), np.int64)
    longest, num_tokens = (0, "", 0), 0
    all_lengths, all_documents = [np.empty(0, "<u4")], [np.empty(0, DOCUMENT_DTYPE)]
    digest = hashlib.blake2b(digest_size=32)
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_file(shard_path(directory, number, "tokens")) as file:
        for batch, origins in _batches(documents):
            prefix = tokenizer.word_prefix  # as in the running text
            sentences = [(prefix if i and s else "") + s for document in batch for i, s in enumerate(document)]
            ids, lengths = tokenizer.encode_flat(sentences)
            if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                raise ValueError(
                    f"the tokenizer gave ids from {ids.min()} to {ids.max()}, and has {tokenizer.vocab_size} entries: "
                    "its files do not fit together"
                )
            sizes = np.array([len(document) for document in batch])
            ends = np.cumsum(sizes)
            if (most := int(lengths.max(initial=0))) > longest[0]:
                line = int(lengths.argmax())
                longest = (most, sentences[line][:LONGEST_SHOWN], origins[int(np.searchsorted(ends, line, "right"))])
            pieces = (lengths > 0).astype(np.int64)
            counts["empty_sentences"] += len(pieces) - int(pieces.sum())
            if split_lines:
                pieces = -(-lengths // split_lines)
                counts["long_lines_split"] += int(np.count_nonzero(pieces > 1))
            table = np.zeros(len(batch), DOCUMENT_DTYPE)
            table["hash"] = [content_hash(document) for document in batch]
            table["sentences"] = np.add.reduceat(pieces, ends - sizes)
            table["tokens"] = np.add.reduceat(lengths, ends - sizes)
            long = np.add.reduceat(np.maximum(lengths - ROOM, 0), ends - sizes)
            sources = _add_numbers(sources, origins, table, long, np.flatnonzero(ids == tokenizer.unk_id))
            kept = table[table["tokens"] > 0]
            counts["empty_documents"] += len(table) - len(kept)
            data = np.ascontiguousarray(ids, dtype).tobytes()
            digest.update(data)
            file.write(data)
            num_tokens += len(ids)
            all_lengths.append((_cut(lengths, pieces) if split_lines else lengths[lengths > 0]).astype("<u4"))
            all_documents.append(kept)
    tokens_hash = digest.hexdigest()
    tables = {"sentences": np.concatenate(all_lengths), "documents": np.concatenate(all_documents)}
    for name, numbers in tables.items():
        digest.update(numbers)
        with atomic_file(shard_path(directory, number, name)) as file:
            np.save(file, numbers)
    record = {
        "noticed": {k: v for k, v in sorted(counts.items()) if v},
        "unknown_tokens": int(sources[:, SOURCE_NUMBERS.index("unknown")].sum()),
        "sources": sources.tolist(),
        "longest_line": list(longest),
        **{name: len(numbers) for name, numbers in tables.items()},
        "tokens": num_tokens,
        "tokens_hash": tokens_hash,
        "hash": digest.hexdigest(),
    }
    record["manifest_hash"] = manifest_hash(record)
    write_json(shard_path(directory, number, "json"), record)
    return record


def _add_numbers(
    sources: np.ndarray, origins: list[int], table: np.ndarray, long: np.ndarray, unknown: np.ndarray
) -> np.ndarray:
    """SOURCE_NUMBERS of each source, int64 [sources, 5], with those of a batch of documents added.

    Args:
      origins: the source of each document.
      table, long: of each document, and its tokens by which lines are longer than a row.
      unknown: places of the unknown tokens in the batch.
    """
    tokens = table["tokens"].astype(np.int64)
    document_of = np.searchsorted(np.cumsum(tokens), unknown, side="right")
    unknown = np.bincount(document_of, minlength=len(table))
    numbers = np.stack([tokens > 0, tokens, unknown, long, table["sentences"] == 1], axis=1).astype(np.int64)
    sources = np.pad(sources, ((0, max(origins[-1] + 1 - len(sources), 0)), (0, 0)))
    np.add.at(sources, origins, numbers)
    return sources


def _cut(lengths: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Lengths of the `pieces` of equal size (to a token) into which sentences are cut."""
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lengths, pieces = np.repeat(lengths, pieces), np.repeat(pieces, pieces)
    return lengths * (number + 1) // pieces - lengths * number // pieces


def _batches(documents: Iterable[tuple[int, Document | Sequence[str]]]) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Sentence lists of whole documents, about BATCH_CHARACTERS together, and their sources."""
    batch, origins, size = [], [], 0
    for source, document in documents:
        sentences = document.sentences if isinstance(document, Document) else document
        if isinstance(sentences, str):
            raise ValueError(
                f"a document is a list of sentences, this one is a string: {sentences[:60]!r}; split it with "
                "bertjax.data.sentences"
            )
        batch.append(list(sentences) or [""])
        origins.append(source)
        size += sum(map(len, sentences))
        if size >= BATCH_CHARACTERS:
            yield batch, origins
            batch, origins, size = [], [], 0
    if batch:
        yield batch, origins


def content_hash(sentences: list[str]) -> int:
    """64-bit hash of a document's text, the same for every tokenizer: decides the split."""
    digest = hashlib.blake2b("\n".join(sentences).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def read_shard_record(directory: Path, number: int, dtype: np.dtype, verified: bool = False) -> dict[str, Any] | None:
    """The record of a whole shard, None where it is not there yet.

    A shard whose files contradict its record (cut off, or edited) counts as not there. Contents are compared if
    `verified`, which reads the files; otherwise sizes.
    """
    tokens = shard_path(directory, number, "tokens")
    try:
        record = read_json(shard_path(directory, number, "json"))
        tables = {
            name: np.load(shard_path(directory, number, name), mmap_mode="r") if record[name] else ()
            for name in ("sentences", "documents")
        }
        whole = record["manifest_hash"] == manifest_hash(record)
        whole &= tokens.stat().st_size == record["tokens"] * np.dtype(dtype).itemsize
        whole &= all(len(table) == record[name] for name, table in tables.items())
        if whole and verified:
            digest = hash_file(tokens)
            for table in tables.values():
                digest.update(np.ascontiguousarray(table))
            whole = digest.hexdigest() == record["hash"]
    except Exception:  # a damaged header makes np.load raise about anything
        return None
    return record if whole else None


def read_shard_tables(directory: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(sentence lengths uint32 [S], documents DOCUMENT_DTYPE [D]) of one whole shard."""
    return np.load(shard_path(directory, number, "sentences")), np.load(shard_path(directory, number, "documents"))


# --- where shards are made ------------------------------------------------------------------------


def make_here(
    tasks: list[ShardTask], tokenizer: Tokenizer, stop: Callable[[], bool], workers: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A `ShardMaker`: in this process, or in spawned ones, which end with it however that ends."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            if stop():
                return
            yield task.number, build_shard(task, tokenizer)
        return
    waiting: dict[Future, int] = {}
    remaining = iter(tasks)
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenizer,)
    ) as pool:
        try:
            while True:
                while len(waiting) < workers + 1 and not stop() and (task := next(remaining, None)):
                    with _signals_held():
                        waiting[pool.submit(_work, task)] = task.number
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            for future in waiting:
                future.cancel()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended; processes started in it never receive them.

    A worker must not be interrupted while it starts, and on Ctrl-C workers finish their shards.
    """
    resource_tracker.ensure_running()  # starts with the first worker, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # by which a broken pool ends it


def _work(task: ShardTask) -> dict[str, Any]:
    return build_shard(task, _worker_tokenizer)


def beam_maker(options: Sequence[str] = ()) -> ShardMaker:
    """A `ShardMaker` on Apache Beam (the [beam] extra); same shards, same bytes.

    Input and output must be paths that every worker sees under the same name: a network file system, or a mounted
    bucket.

    Args:
      options: of the pipeline; they name the runner (default: DirectRunner).

    Raises:
      ValueError: Apache Beam is not installed.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise ValueError("Apache Beam is not installed: pip install 'bertjax[beam]'") from error

    def make(
        tasks: list[ShardTask], tokenizer: Tokenizer, stop: Callable[[], bool]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if not tasks or stop():
            return
        with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
            _ = pipeline | beam.Create(tasks) | beam.Reshuffle() | beam.Map(build_shard, tokenizer=tokenizer)
        for task in tasks:
            if (record := read_shard_record(task.directory, task.number, task.dtype)) is None:
                raise ValueError(
                    f"{task.directory}: a Beam worker reported shard {task.number} as made, but it is not here; input "
                    "and output must be on a file system that all workers share"
                )
            yield task.number, record

    return make
