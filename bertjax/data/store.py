"""The token store: a corpus as memory-mapped token ids, ready to be drawn from in any order.

In: a directory that build.py wrote. Out: `TokenStore`, the tables that pairs.py indexes and the ids that rows.py
copies into rows. A store is independent of the sequence length, of masking and of the number of machines.

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
    DIR/build.json, build.lock   what is being built, and the lock of who builds it (build_directory.py)

Splits are tables over the same shards, so that the split, the removal of duplicates and `max_tokens` are decided once
all shards exist, and do not depend on how they were made. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from bertjax.data.verification import ADDRESS_BITS, TABLES, SplitTables, map_file, verify
from bertjax.formats.files import parse_json, whole_file
from bertjax.tokenization import Layout, Tokenizer, load_tokenizer

FORMAT = "bertjax-token-store"
VERSION = 1
SPLITS = ("train", "heldout")
TOKENIZER_FIELDS = ("fingerprint", "vocab_size", "unk_id", "pad_id", "cls_id", "sep_id")
NSP_LABELS = {"0": "is next", "1": "random"}


def ids_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def temporary_name(path: Path) -> Path:
    """A name that no other process uses: machines that share a build may write the same file at once."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def atomic_file(path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    """A stream that becomes the file `path`, see `whole_file`; machines that share a build may write it at once."""
    return whole_file(path, "wb", temporary_name(path))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(to_json(value))


def to_json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # JSON's escape of what a file's name has that is not UTF-8


def shard_path(directory: Path, number: int, kind: str) -> Path:
    return Path(directory) / f"{number:05d}.{kind}"


class TokenStore:
    """One split of a store, memory-mapped. The first opening reads and verifies all of the store (verification.py);
    others cost nothing, whatever its size.

    Attributes: `sentence_ends` uint32 [S], `document_sentences` int64 [D+1], `document_addresses` int64 [D], `shards`
    (list of id arrays), `manifest`, `num_documents`, `num_sentences`, `num_tokens`, `vocab_size`,
    `tokenizer_directory`, `dtype`.

    Args:
      manifest: of a store that is verified already, or whose manifest is not written yet.

    Raises:
      ValueError: no store there, an unfinished one, or another version; unknown split; a file that is missing or is
        not the one that was built.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train", manifest: dict[str, Any] | None = None):
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: a token store has the splits {', '.join(SPLITS)}")
        self.path, self.split = Path(path).expanduser(), split
        self.manifest = read_manifest(path) if manifest is None else manifest
        counts = self.manifest["splits"][split]
        self.num_documents: int = counts["documents"]
        self.num_sentences: int = counts["sentences"]
        self.num_tokens: int = counts["tokens"]
        self.vocab_size: int = self.manifest["tokenizer"]["vocab_size"]
        self.tokenizer_directory = self.path / "tokenizer"
        self.dtype = np.dtype(self.manifest["dtype"])
        self.sentence_ends, self.document_sentences, self.document_addresses = self._tables(split)
        self.shards = [
            map_file(shard_path(self.path / "shards", number, "tokens"), self.dtype, shard["tokens"])
            for number, shard in enumerate(self.manifest["shards"])
        ]
        if manifest is None:
            verify(self.path, self.manifest, self.shards, {s: self._tables(s) for s in SPLITS})

    def _tables(self, split: str) -> SplitTables:
        counts = self.manifest["splits"][split]
        sizes = (counts["sentences"], counts["documents"] + 1, counts["documents"])
        types = map(np.dtype, ("<u4", "<i8", "<i8"))
        return SplitTables(*map(map_file, (self.path / f"{split}.{name}" for name in TABLES), types, sizes))

    def heldout(self) -> TokenStore:
        """The held-out split of the same store."""
        return TokenStore(self.path, "heldout", self.manifest)

    def require_documents(self) -> None:
        """Raises ValueError for a split without documents."""
        if not self.num_documents:
            raise ValueError(
                f"{self.path}: 0 examples in the split {self.split!r}; build the store with more text"
                + ", or with another --heldout_fraction" * bool(self.manifest["files"])
            )

    @property
    def layout(self) -> Layout:
        """The special tokens around texts, as the tokenizer has them."""
        recorded = self.manifest["tokenizer"]
        if (layout := recorded.get("layout")) is None:  # BERT's is not written down
            return Layout.bert(recorded["cls_id"], recorded["sep_id"])
        return Layout(*(tuple(part) if isinstance(part, list) else part for part in layout))

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the ids were made with; ValueError where the store's differs."""
        recorded = self.manifest["tokenizer"]
        try:
            tokenizer = load_tokenizer(self.tokenizer_directory)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None
        found = {name: getattr(tokenizer, name) for name in TOKENIZER_FIELDS}
        bad = [f"{name} {value!r}, was {recorded[name]!r}" for name, value in found.items() if value != recorded[name]]
        if bad:
            raise ValueError(
                f"{self.tokenizer_directory} is not the tokenizer that the ids of the store were made with "
                f"({', '.join(bad)}); put the original files back, or build the store again"
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
        return np.split(self.shards[shard][start : start + int(ends[-1])], ends[:-1])

    def documents(self) -> Iterator[list[np.ndarray]]:
        """Every document in the order of the corpus."""
        return map(self.document, range(self.num_documents))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "split": self.split}  # processes map the files again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state, manifest=read_manifest(state["path"]))  # verified by the process that sent it


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a finished store. ValueError where there is none, or a damaged one."""
    path = Path(path).expanduser()
    try:
        content = (path / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        problem = "no token store here (no manifest.json); make one with python -m bertjax.tools.build_corpus"
        if (path / "build.json").exists():
            again = "run the same build_corpus command again"
            problem = f"the build of this token store is unfinished, or was refused; {again} to finish it or to see why"
        raise ValueError(f"{path}: {problem}") from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """The content of the manifest.json of the store at `path`; ValueError for another version or damaged bytes."""

    def damaged(why: object) -> ValueError:
        return ValueError(f"{path}/manifest.json is damaged ({why}); copy or build the store again")

    try:
        manifest = parse_json(content, "it")
    except ValueError as error:
        raise damaged(error) from None
    if not isinstance(manifest, dict):
        raise damaged("not a JSON object")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r}, this program reads "
            f"{FORMAT!r} version {VERSION}; build the store again"
        )
    if missing := sorted({"parts", "duplicate_share", "seen_ever", "seen_in_epoch", "worst"} - manifest.keys()):
        raise ValueError(f"{path}: built by an earlier version (no {', '.join(missing)}); build the store again")
    if manifest.get("manifest_hash") != manifest_hash(manifest):
        raise damaged("its own hash differs")
    if not _is_complete(manifest):
        raise damaged("a field is missing or has an impossible value")
    return manifest


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of the tokenizer; the layout where it is not BERT's."""
    layout = tokenizer.layout
    bert = layout == Layout.bert(tokenizer.cls_id, tokenizer.sep_id)
    return {name: getattr(tokenizer, name) for name in TOKENIZER_FIELDS} | ({} if bert else {"layout": layout})


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Of everything in a manifest, or the record of a shard, but the hash itself."""
    content = {key: value for key, value in manifest.items() if key != "manifest_hash"}
    return hashlib.blake2b(to_json(content), digest_size=32).hexdigest()


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether all that opening a store relies on is there, numbers in their ranges."""
    try:
        shards = manifest["shards"]
        fingerprint, size, *ids = (manifest["tokenizer"][name] for name in TOKENIZER_FIELDS)
        parts = [*(manifest["splits"][split] for split in SPLITS), *shards]
        counts = [part[name] for part in parts for name in ("documents", "sentences", "tokens")]
        hashes = [manifest["content_hash"], *(shard["tokens_hash"] for shard in shards), *manifest["parts"].values()]
        return (
            all(type(n) is int and 0 <= n < 1 << 48 for n in [size, *ids, *counts])
            and max(ids) < size <= 1 << 32
            and manifest["dtype"] == ids_dtype(size).str
            and all(len(bytes.fromhex(digest)) == 32 for digest in hashes)
            and isinstance(fingerprint, str)
        )
    except (KeyError, TypeError, ValueError):
        return False
