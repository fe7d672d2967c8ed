"""The token store: a corpus as memory-mapped token ids, ready to be drawn from in any order.

In: documents as lists of sentences of token ids (from `shard.py`). Out: `TokenStore`, the tables
that `pairs.py` indexes and the ids that `batches.py` copies into rows. A store is independent of
the sequence length, of masking and of the number of machines.

    DIR/manifest.json         written last: a directory without it is an unfinished build
    DIR/tokenizer/            the tokenizer's own files
    DIR/shards/00000.tokens   ids of every document of the shard, uint16 or uint32, end to end
    DIR/shards/00000.sentences, .documents   .npy tables of the shard: what a restart reads again
    DIR/shards/00000.json     counts and hash of the shard; written last: the shard is whole
    DIR/train.sentences       uint32 [S]    end of each sentence in tokens from its document's start
    DIR/train.documents       int64  [D+1]  first sentence of each document; the last entry is S
    DIR/train.addresses       int64  [D]    shard << 40 | first token within the shard
    DIR/heldout.*             the same three for the documents that are kept out of training

Splits are tables over the same shards, so that the split, the removal of duplicates and
`max_tokens` are decided once all shards exist, and do not depend on how they were made.
All numbers are little-endian.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.files import write_whole

FORMAT = "bertjax-token-store"
VERSION = 1
SPLITS = ("train", "heldout")
ADDRESS_BITS = 40  # a shard holds at most 2**40 tokens
NSP_LABELS = {"0": "is next", "1": "random"}
DOCUMENT_DTYPE = np.dtype([("hash", "<u8"), ("sentences", "<u4"), ("tokens", "<u8")])


def ids_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def content_hash(sentences: list[str]) -> int:
    """64-bit hash of a document's text, the same for every tokenizer: decides the split."""
    digest = hashlib.blake2b("\n".join(sentences).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that it is there whole or not at all, also after a power cut."""
    write_whole(path, data)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def disk_full(error: OSError, directory: Path) -> OSError | None:
    """The error to raise instead of `error` where that says that the disk is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return OSError(
        error.errno,
        f"the disk of {directory} is full ({os.strerror(error.errno)}). Free some space and run "
        "the same command again: finished shards are kept, the unfinished one is made anew",
    )


class ShardWriter:
    """Writes one shard; memory is the two tables (12 bytes a sentence at most), not the tokens.

    Nothing is visible under the shard's names before `finish`; a writer that is left without it
    leaves only `.tmp` files, which the next run overwrites.
    """

    def __init__(self, directory: Path, number: int, dtype: np.dtype):
        self.directory, self.number, self.dtype = Path(directory), number, np.dtype(dtype)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._tokens_path = shard_path(self.directory, number, "tokens")
        self._temporary = self._tokens_path.with_name(self._tokens_path.name + ".tmp")
        self._file = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115
        self._hash = hashlib.blake2b(digest_size=32)
        self._lengths: list[np.ndarray] = []
        self._documents: list[np.ndarray] = []
        self._num_tokens = 0

    def add(self, ids: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> None:
        """Append whole documents: ids [N], sentence lengths [S], documents [D] (DOCUMENT_DTYPE)."""
        data = np.ascontiguousarray(ids, self.dtype).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self._lengths.append(np.asarray(lengths, "<u4"))
        self._documents.append(np.asarray(documents, DOCUMENT_DTYPE))
        self._num_tokens += len(ids)

    def finish(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """Make the shard whole and return its record (also stored as `<number>.json`)."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate([np.empty(0, "<u4"), *self._lengths])
        documents = np.concatenate([np.empty(0, DOCUMENT_DTYPE), *self._documents])
        for name, table in (("sentences", lengths), ("documents", documents)):
            self._hash.update(table.tobytes())
            path = shard_path(self.directory, self.number, name)
            with open(path.with_name(path.name + ".tmp"), "wb") as file:
                np.save(file, table)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path.with_name(path.name + ".tmp"), path)
        os.replace(self._temporary, self._tokens_path)
        record = {
            **counts,
            "documents": len(documents),
            "sentences": len(lengths),
            "tokens": self._num_tokens,
            "hash": self._hash.hexdigest(),
        }
        write_atomically(shard_path(self.directory, self.number, "json"), to_json(record))
        return record

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def shard_path(directory: Path, number: int, kind: str) -> Path:
    return Path(directory) / f"{number:05d}.{kind}"


def read_shard_record(directory: Path, number: int, dtype: np.dtype) -> dict[str, Any] | None:
    """The record of a whole shard, None where it is not there yet.

    A shard whose files contradict its record (cut off, or edited) counts as not there.
    """
    try:
        record = json.loads(shard_path(directory, number, "json").read_bytes())
        size = shard_path(directory, number, "tokens").stat().st_size
        tables = [np.load(shard_path(directory, number, k), mmap_mode="r") if record[k] else ()
                  for k in ("sentences", "documents")]
    except (OSError, ValueError, KeyError):
        return None
    whole = size == record["tokens"] * np.dtype(dtype).itemsize
    whole &= len(tables[0]) == record["sentences"] and len(tables[1]) == record["documents"]
    return record if whole else None


def read_shard_tables(directory: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(sentence lengths uint32 [S], documents DOCUMENT_DTYPE [D]) of one whole shard."""
    return (np.load(shard_path(directory, number, "sentences")),
            np.load(shard_path(directory, number, "documents")))


class TokenStore:
    """One split of a store, memory-mapped: opening it costs nothing, whatever its size.

    Attributes: `sentence_ends` uint32 [S], `document_sentences` int64 [D+1], `document_addresses`
    int64 [D], `shards` (list of id arrays), `manifest` (dict), `num_documents`, `num_sentences`,
    `num_tokens`, `vocab_size`, `tokenizer_directory`.

    Raises:
      ValueError: no store there, an unfinished one, or another version; unknown split.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train"):
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: a token store has the splits {', '.join(SPLITS)}")
        self._open(Path(path).expanduser(), split, read_manifest(path))

    @classmethod
    def of_manifest(cls, path: Path, split: str, manifest: dict[str, Any]) -> TokenStore:
        """A split of a store whose manifest is not written yet."""
        store = cls.__new__(cls)
        store._open(path, split, manifest)
        return store

    def _open(self, path: Path, split: str, manifest: dict[str, Any]) -> None:
        self.path, self.split, self.manifest = path, split, manifest
        counts = self.manifest["splits"][split]
        self.num_documents: int = counts["documents"]
        self.num_sentences: int = counts["sentences"]
        self.num_tokens: int = counts["tokens"]
        self.vocab_size: int = self.manifest["tokenizer"]["vocab_size"]
        self.tokenizer_directory = self.path / "tokenizer"
        self.dtype = np.dtype(self.manifest["dtype"])
        self.sentence_ends = self._table("sentences", "<u4", self.num_sentences)
        self.document_sentences = self._table("documents", "<i8", self.num_documents + 1)
        self.document_addresses = self._table("addresses", "<i8", self.num_documents)
        self.shards = [
            _map(shard_path(self.path / "shards", i, "tokens"), self.dtype, shard["tokens"])
            for i, shard in enumerate(self.manifest["shards"])
        ]

    def _table(self, name: str, dtype: str, length: int) -> np.ndarray:
        return _map(self.path / f"{self.split}.{name}", np.dtype(dtype), length)

    def __len__(self) -> int:
        return self.num_documents

    def document(self, number: int) -> list[np.ndarray]:
        """The sentences of one document, each an array of ids."""
        first, last = self.document_sentences[number : number + 2]
        address = int(self.document_addresses[number])
        shard, start = address >> ADDRESS_BITS, address & ((1 << ADDRESS_BITS) - 1)
        ends = self.sentence_ends[first:last]
        ids = self.shards[shard][start : start + int(ends[-1])]
        return np.split(ids, ends[:-1])

    def documents(self) -> Iterator[list[np.ndarray]]:
        """Every document in the order of the corpus."""
        return map(self.document, range(self.num_documents))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "split": self.split}  # processes map the files again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a finished store. ValueError where there is none."""
    path = Path(path).expanduser()
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        unfinished = (path / "build.json").exists()
        raise ValueError(
            f"{path}: " + ("the build of this token store is unfinished; run the same "
                           "build_corpus command again to finish it" if unfinished else
                           "no token store here (no manifest.json); make one with "
                           "python -m bertjax.tools.build_corpus")
        ) from None
    except ValueError as error:
        raise ValueError(f"{path / 'manifest.json'} is damaged ({error}); copy or build the store "
                         "again") from None
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r}, this "
            f"program reads {FORMAT!r} version {VERSION}; build the store again")
    return manifest


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    size = path.stat().st_size
    if size != length * dtype.itemsize:
        raise ValueError(
            f"{path} has {size:,} bytes, its manifest says {length * dtype.itemsize:,}: the store "
            "is damaged or was copied in part; copy or build it again")
    if not length:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=(length,)))
