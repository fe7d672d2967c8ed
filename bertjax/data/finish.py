"""The last part of a build: whole shards -> the tables of the splits and the manifest.

In: a directory of shards (`store.ShardWriter`). Out: `train.*`, `heldout.*` and `manifest.json`,
written last. One pass over the shards' small tables; tokens are not read. Running it again gives
the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data import store as stores
from bertjax.data.verification import TABLES, hash_file

SHARD_FIELDS = ("documents", "sentences", "tokens", "hash", "tokens_hash")  # in the manifest
REPAIRED = ("undecodable_lines", "long_documents_cut")  # kept, unlike what else is counted
JUDGED_LENGTH = 128  # sequence length at which the share of random pairs is judged


@dataclasses.dataclass(frozen=True)
class BuildSettings:
    """What decides the bytes of a store, beside the text and the tokenizer.

    Attributes:
      heldout_fraction: share of documents kept out of training, chosen by the hash of their text;
        at least one document on either side where there are two or more.
      shard_bytes: input a shard, about; smaller ones balance better over processes and lose less
        in a restart, but every shard is three files and a memory map (65,530 at most on Linux).
      max_tokens: stop after this many tokens (whole documents); None takes everything.
      deduplicate: keep only the first of documents with identical text (8 bytes of memory each).
      max_unknown_rate: refuse a tokenizer that makes a larger share of tokens unknown.
      max_random_share: refuse a corpus whose next-sentence pairs are 'random' more often.
    """

    heldout_fraction: float = 0.01
    shard_bytes: int = 16 << 20
    max_tokens: int | None = None
    deduplicate: bool = False
    max_unknown_rate: float = 0.05
    max_random_share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction {self.heldout_fraction}: must be in [0, 1)")
        for name in ("max_unknown_rate", "max_random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be in [0, 1]")
        for name in ("shard_bytes", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} {value}: must be positive")


def check_unknown_rate(
    records: Iterable[dict[str, Any]], options: BuildSettings, at_least: int = 1
) -> float:
    """Share of unknown tokens; ValueError over the limit once there are `at_least` tokens."""
    records = list(records)
    tokens = sum(record["tokens"] for record in records)
    unknown = sum(record["unknown_tokens"] for record in records)
    rate = unknown / max(tokens, 1)
    if tokens >= at_least and rate > options.max_unknown_rate:
        raise ValueError(
            f"{rate:.1%} of {tokens:,} tokens are unknown to the tokenizer (limit "
            f"{options.max_unknown_rate:.1%}). Usual causes: the vocabulary is lower-case but the "
            "text is not lower-cased (do_lower_case), a vocabulary of another language, or "
            "SentencePiece pieces in a WordPiece vocabulary. Train one on this text with "
            "python -m bertjax.tools.train_vocab, or raise max_unknown_rate")
    return rate


def finish_store(
    out_dir: Path, shards: int, build: dict[str, Any], options: BuildSettings, num_files: int
) -> dict[str, Any]:
    """Write the tables and the manifest of the first `shards` shards; return the manifest."""
    dtype = stores.ids_dtype(build["tokenizer"]["vocab_size"])
    directory = out_dir / "shards"
    records = _read_records(directory, shards, dtype)
    noticed: Counter[str] = Counter()
    for record in records:
        noticed.update(record["noticed"])
    repaired = {what: noticed.pop(what) for what in REPAIRED if what in noticed}
    unknown_rate = check_unknown_rate(records, options)
    if not sum(record["documents"] for record in records):
        source = f"{num_files} file{'s' * (num_files != 1)}" if num_files else "memory"
        raise ValueError(
            f"0 examples from {source}: no document has a token"
            + (f" ({dict(noticed)})" if noticed else "")
            + "; check the input pattern, the format and the field name")

    kept, why = _select(directory, records, options)
    dropped = {**noticed, **why}
    splits = _write_tables(out_dir, directory, records, kept)
    judged = _judge_pairs(out_dir, splits, build, options, records, dtype)
    manifest = {
        **build,
        "dtype": dtype.str,
        "nsp_labels": stores.NSP_LABELS,
        "splits": splits,
        "documents": sum(split["documents"] for split in splits.values()),
        "sentences": sum(split["sentences"] for split in splits.values()),
        "tokens": sum(split["tokens"] for split in splits.values()),
        "unknown_rate": unknown_rate,
        "dropped": dict(sorted(dropped.items())),
        "repaired": repaired,
        **judged,
        "shards": [{key: record[key] for key in SHARD_FIELDS if key in record}
                   for record in records],
        "parts": {name: hash_file(out_dir / name).hexdigest() for name in _parts(out_dir)},
        "content_hash": _content_hash(out_dir, records),
    }
    manifest["manifest_hash"] = stores.manifest_hash(manifest)
    stores.write_atomically(out_dir / "manifest.json", stores.to_json(manifest))
    return manifest


def _read_records(directory: Path, shards: int, dtype: np.dtype) -> list[dict[str, Any]]:
    """The records of the first `shards` shards, all of which must be there and whole."""
    records = []
    for number in range(shards):
        record = stores.read_shard_record(directory, number, dtype)
        if record is None:
            raise ValueError(f"{directory}: shard {number} is missing or damaged; build it again")
        records.append(record)
    return records


def _parts(out_dir: Path) -> list[str]:
    """Names of the tables and of the tokenizer's files."""
    tokenizer = sorted(path.relative_to(out_dir).as_posix()
                       for path in (out_dir / "tokenizer").rglob("*") if path.is_file())
    return [f"{split}.{name}" for split in stores.SPLITS for name in TABLES] + tokenizer


def _content_hash(out_dir: Path, records: list[dict[str, Any]]) -> str:
    """Of the tokens, by the hashes of their shards, and of the tables."""
    digest = hashlib.blake2b(digest_size=32)
    for record in records:
        digest.update(bytes.fromhex(record["hash"]))
    for split in stores.SPLITS:
        for name in TABLES:
            with open(out_dir / f"{split}.{name}", "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _select(
    directory: Path, records: list[dict[str, Any]], options: BuildSettings
) -> tuple[list[np.ndarray], dict[str, int]]:
    """For each shard and document -1 (left out), 0 (train) or 1 (heldout); why some are out."""
    tables = [stores.read_shard_tables(directory, n)[1] for n in range(len(records))]
    hashes = np.concatenate([table["hash"] for table in tables])
    keep = np.ones(len(hashes), bool)
    why = {}
    if options.deduplicate:
        first = np.unique(hashes, return_index=True)[1]
        keep[:] = False
        keep[first] = True
        why["duplicate_documents"] = int(len(hashes) - len(first))
    if options.max_tokens is not None:
        tokens = np.concatenate([table["tokens"] for table in tables]).astype(np.int64)
        before = np.cumsum(np.where(keep, tokens, 0)) - tokens
        beyond = keep & (before >= options.max_tokens)
        why["documents_beyond_max_tokens"] = int(np.count_nonzero(beyond))
        keep &= ~beyond
    heldout = (hashes >> np.uint64(11)) * 2.0**-53 < options.heldout_fraction
    kept = np.flatnonzero(keep)
    if options.heldout_fraction and len(kept) >= 2:  # at least one document on either side
        if not heldout[kept].any():
            heldout[kept[np.argmin(hashes[kept])]] = True
        elif heldout[kept].all():
            heldout[kept[np.argmax(hashes[kept])]] = False
    elif len(kept) < 2:
        heldout[:] = False
    choice = np.where(keep, heldout.astype(np.int8), np.int8(-1))
    ends = np.cumsum([len(table) for table in tables])
    return np.split(choice, ends[:-1]), {reason: n for reason, n in why.items() if n}


def _write_tables(
    out_dir: Path, directory: Path, records: list[dict[str, Any]], kept: list[np.ndarray]
) -> dict[str, dict[str, int]]:
    totals = {split: dict(documents=0, sentences=0, tokens=0, one_sentence_documents=0)
              for split in stores.SPLITS}
    with contextlib.ExitStack() as stack:
        paths = {(split, name): stores.temporary_name(out_dir / f"{split}.{name}")
                 for split in stores.SPLITS for name in TABLES}
        files = {key: stack.enter_context(open(path, "wb")) for key, path in paths.items()}
        for split in stores.SPLITS:
            files[split, "documents"].write(np.zeros(1, "<i8").tobytes())
        for number in range(len(records)):
            lengths, documents = stores.read_shard_tables(directory, number)
            sentences = documents["sentences"].astype(np.int64)
            tokens = documents["tokens"].astype(np.int64)
            token_starts = np.cumsum(tokens) - tokens
            ends = np.cumsum(lengths, dtype=np.int64) - np.repeat(token_starts, sentences)
            for code, split in enumerate(stores.SPLITS):
                chosen = kept[number] == code
                total = totals[split]
                firsts = total["sentences"] + np.cumsum(sentences[chosen])
                files[split, "documents"].write(firsts.astype("<i8").tobytes())
                addresses = (number << stores.ADDRESS_BITS) + token_starts[chosen]
                files[split, "addresses"].write(addresses.astype("<i8").tobytes())
                files[split, "sentences"].write(
                    ends[np.repeat(chosen, sentences)].astype("<u4").tobytes())
                total["documents"] += int(np.count_nonzero(chosen))
                total["sentences"] += int(sentences[chosen].sum())
                total["tokens"] += int(tokens[chosen].sum())
                total["one_sentence_documents"] += int(np.count_nonzero(sentences[chosen] == 1))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for (split, name), path in paths.items():
        os.replace(path, out_dir / f"{split}.{name}")
    return totals


def _judge_pairs(
    out_dir: Path, splits: dict[str, dict[str, int]], build: dict[str, Any],
    options: BuildSettings, records: list[dict[str, Any]], dtype: np.dtype,
) -> dict[str, Any]:
    """Share of random next-sentence pairs; ValueError where NSP would have nothing to learn."""
    from bertjax.data.pairs import PairIndex, random_share_problem

    train = splits["train"]
    draft = {**build, "dtype": dtype.str, "splits": splits, "shards": records}
    index = PairIndex(stores.TokenStore.of_manifest(out_dir, "train", draft), JUDGED_LENGTH, seed=0)
    single = train["one_sentence_documents"] / train["documents"]
    if problem := random_share_problem(index, options.max_random_share):
        raise ValueError(f"{problem}. For a corpus of single sentences train without NSP and raise "
                         "max_random_share")
    return {"random_share": round(index.random_share, 6), "one_sentence_share": round(single, 6)}
