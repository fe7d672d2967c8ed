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
    DIR/verified.json         sizes and times of the files when they last were as the manifest says

Splits are tables over the same shards, so that the split, the removal of duplicates and
`max_tokens` are decided once all shards exist, and do not depend on how they were made.
All numbers are little-endian.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.verification import ADDRESS_BITS, TABLES, SplitTables, hash_file, map_file, verify
from bertjax.formats.files import parse_json, read_json
from bertjax.tokenization import load_tokenizer

FORMAT = "bertjax-token-store"
VERSION = 1
SPLITS = ("train", "heldout")
TOKENIZER_FIELDS = ("fingerprint", "vocab_size", "unk_id", "pad_id", "cls_id", "sep_id")
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
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def temporary_name(path: Path) -> Path:
    """A name of this process alone: others that write the same file do not get in each other's way."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


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

    Nothing is visible under the shard's names before `finish`; a writer that is killed before
    leaves only `.tmp` files, which the next run removes.
    """

    def __init__(self, directory: Path, number: int, dtype: np.dtype):
        self.directory, self.number, self.dtype = Path(directory), number, np.dtype(dtype)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._tokens_path = shard_path(self.directory, number, "tokens")
        self._temporary = temporary_name(self._tokens_path)
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
        tokens_hash = self._hash.hexdigest()
        for name, table in (("sentences", lengths), ("documents", documents)):
            self._hash.update(table.tobytes())
            content = io.BytesIO()
            np.save(content, table)
            write_atomically(shard_path(self.directory, self.number, name), content.getbuffer())
        os.replace(self._temporary, self._tokens_path)
        record = {
            **counts,
            "documents": len(documents),
            "sentences": len(lengths),
            "tokens": self._num_tokens,
            "tokens_hash": tokens_hash,
            "hash": self._hash.hexdigest(),
        }
        write_atomically(shard_path(self.directory, self.number, "json"), to_json(record))
        return record

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def shard_path(directory: Path, number: int, kind: str) -> Path:
    return Path(directory) / f"{number:05d}.{kind}"


def read_shard_record(directory: Path, number: int, dtype: np.dtype, verified: bool = False) -> dict[str, Any] | None:
    """The record of a whole shard, None where it is not there yet.

    A shard whose files contradict its record (cut off, or edited) counts as not there. Contents are
    compared if `verified`, which reads the files; otherwise sizes.
    """
    try:
        record = read_json(shard_path(directory, number, "json"))
        size = shard_path(directory, number, "tokens").stat().st_size
        tables = [
            np.load(shard_path(directory, number, k), mmap_mode="r") if record[k] else ()
            for k in ("sentences", "documents")
        ]
        whole = size == record["tokens"] * np.dtype(dtype).itemsize
        whole &= len(tables[0]) == record["sentences"] and len(tables[1]) == record["documents"]
        if whole and verified:
            digest = hash_file(shard_path(directory, number, "tokens"))
            for table in tables:
                digest.update(np.ascontiguousarray(table))
            whole = digest.hexdigest() == record["hash"]
    except Exception:  # a damaged header makes np.load raise about anything
        return None
    return record if whole else None


def read_shard_tables(directory: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(sentence lengths uint32 [S], documents DOCUMENT_DTYPE [D]) of one whole shard."""
    return (np.load(shard_path(directory, number, "sentences")), np.load(shard_path(directory, number, "documents")))


class TokenStore:
    """One split of a store, memory-mapped. The first opening reads and verifies all of the store
    (verification.py); others cost nothing, whatever its size.

    Attributes: `sentence_ends` uint32 [S], `document_sentences` int64 [D+1], `document_addresses`
    int64 [D], `shards` (list of id arrays), `manifest` (dict), `num_documents`, `num_sentences`,
    `num_tokens`, `vocab_size`, `tokenizer_directory`.

    Raises:
      ValueError: no store there, an unfinished one, or another version; unknown split; a file that
        is missing or is not the one that was built.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train"):
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: a token store has the splits {', '.join(SPLITS)}")
        self._open(Path(path).expanduser(), split, read_manifest(path))
        verify(self.path, self.manifest, self.shards, {s: self._tables(s) for s in SPLITS})

    @classmethod
    def of_manifest(cls, path: Path, split: str, manifest: dict[str, Any]) -> TokenStore:
        """A split of a store that is verified already, or whose manifest is not written yet."""
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
        self.sentence_ends, self.document_sentences, self.document_addresses = self._tables(split)
        self.shards = [
            map_file(shard_path(self.path / "shards", i, "tokens"), self.dtype, shard["tokens"])
            for i, shard in enumerate(self.manifest["shards"])
        ]

    def _tables(self, split: str) -> SplitTables:
        counts = self.manifest["splits"][split]
        sizes = (counts["sentences"], counts["documents"] + 1, counts["documents"])
        return SplitTables(
            *(
                map_file(self.path / f"{split}.{name}", np.dtype(dtype), size)
                for name, dtype, size in zip(TABLES, ("<u4", "<i8", "<i8"), sizes, strict=True)
            )
        )

    def other_split(self, split: str) -> TokenStore:
        """Another split of the same store."""
        return TokenStore.of_manifest(self.path, split, self.manifest)

    def load_tokenizer(self) -> Any:
        """The tokenizer that the ids were made with; ValueError where the store's differs."""
        recorded = self.manifest["tokenizer"]
        try:
            tokenizer = load_tokenizer(self.tokenizer_directory)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None
        found = {name: getattr(tokenizer, name) for name in TOKENIZER_FIELDS}
        if differing := [
            f"{name} {found[name]!r}, was {recorded[name]!r}"
            for name in TOKENIZER_FIELDS
            if found[name] != recorded[name]
        ]:
            raise ValueError(
                f"{self.tokenizer_directory} is not the tokenizer that the ids of the store were "
                f"made with ({', '.join(differing)}); put the original files back, or build the "
                "store again"
            )
        return tokenizer

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
        self._open(**state, manifest=read_manifest(state["path"]))  # verified by who sent it


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a finished store. ValueError where there is none, or a damaged one."""
    path = Path(path).expanduser()
    try:
        content = (path / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        unfinished = (path / "build.json").exists()
        raise ValueError(
            f"{path}: "
            + (
                "the build of this token store is unfinished; run the same build_corpus command again to finish it"
                if unfinished
                else "no token store here (no manifest.json); make one with python -m bertjax.tools.build_corpus"
            )
        ) from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """The manifest in the bytes of the manifest.json of the store at `path`.

    Raises:
      ValueError: another version; not the bytes that were written.
    """
    damaged = f"{path}/manifest.json is damaged ({{}}); copy or build the store again"
    try:
        manifest = parse_json(content, "it")
    except ValueError as error:
        raise ValueError(damaged.format(error)) from None
    if not isinstance(manifest, dict):
        raise ValueError(damaged.format("not a JSON object"))
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r}, this "
            f"program reads {FORMAT!r} version {VERSION}; build the store again"
        )
    # Earlier versions had neither.
    if "parts" in manifest and manifest.get("manifest_hash") != manifest_hash(manifest):
        raise ValueError(damaged.format("its own hash differs"))
    if not _is_complete(manifest):
        raise ValueError(damaged.format("a field is missing or has an impossible value"))
    return manifest


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Of all that stands in a manifest beside the hash itself."""
    content = {key: value for key, value in manifest.items() if key != "manifest_hash"}
    return hashlib.blake2b(to_json(content), digest_size=32).hexdigest()


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether there is all that opening a store relies on, numbers in their ranges."""
    try:
        tokenizer, shards = manifest["tokenizer"], manifest["shards"]
        fingerprint, size, *ids = (tokenizer[name] for name in TOKENIZER_FIELDS)
        counts = [
            part[name]
            for part in [*(manifest["splits"][split] for split in SPLITS), *shards]
            for name in ("documents", "sentences", "tokens")
        ]
        hashes = [manifest["content_hash"], *(shard["hash"] for shard in shards)]
        return (
            all(type(n) is int and 0 <= n < 1 << 48 for n in [size, *ids, *counts])
            and max(ids) < size <= 1 << 32
            and manifest["dtype"] == ids_dtype(size).str
            and all(len(bytes.fromhex(digest)) == 32 for digest in hashes)
            and isinstance(fingerprint, str)
        )
    except (KeyError, TypeError, ValueError):
        return False
