"""The last part of a build: whole shards -> the tables of the splits and the manifest.

In: a directory of shards (shards.py). Out: `train.*`, `heldout.*` and `manifest.json`, written last.
One pass over the shards' small tables; tokens are not read. Running it again gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data import laws
from bertjax.data import store as stores
from bertjax.data.shards import JUDGED_LENGTH, SOURCE_NUMBERS, read_shard_record, read_shard_tables
from bertjax.data.verification import ADDRESS_BITS, TABLES, hash_file

SHARD_FIELDS = ("documents", "sentences", "tokens", "hash", "tokens_hash")  # in the manifest
# Counted, but not a loss of text.
REPAIRED = ("undecodable_lines", "long_documents_cut", "long_lines_split", "unclosed_documents")
NAMED = 3  # files named as those that hold most of what is wrong


@dataclasses.dataclass(frozen=True)
class BuildSettings(laws.Limits):
    """What decides the bytes of a store, beside the text and the tokenizer; and the limits.

    Attributes:
      heldout_fraction: share of documents kept out of training, chosen by the hash of their text;
        at least two texts on either side where there are four or more, one where there are two.
      shard_bytes: input a shard, about; smaller ones balance better over processes and lose less
        in a restart, but every shard is three files and a memory map (65,530 at most on Linux).
      max_tokens: stop after this many tokens (whole documents); None takes everything.
      deduplicate: keep only the first of documents with identical text (8 bytes of memory each).
      split_lines: cut lines of more tokens into equal parts, which are sentences then; None keeps
        them, as the original does, whose pairs hold a part of a longer one.
    """

    heldout_fraction: float = 0.01
    shard_bytes: int = 16 << 20
    max_tokens: int | None = None
    deduplicate: bool = False
    split_lines: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction {self.heldout_fraction}: must be in [0, 1)")
        for name in ("shard_bytes", "max_tokens", "split_lines"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} {value}: must be positive")


def check_unknown_rate(
    records: Mapping[int, dict[str, Any]], options: BuildSettings, paths: list[list[str]], at_least: int = 1
) -> float:
    """Share of unknown tokens; ValueError over the limit once there are `at_least` tokens.

    `records` by the number of the shard; `paths` are the sources of each shard.
    """
    tokens = sum(record["tokens"] for record in records.values())
    unknown = sum(record["unknown_tokens"] for record in records.values())
    rate = unknown / max(tokens, 1)
    if tokens >= at_least and rate > options.max_unknown_rate:
        worst = ", ".join(f"{path} ({share:.0%})" for path, share in _worst(_by_path(records, paths), "unknown"))
        raise ValueError(
            f"{rate:.1%} of {tokens:,} tokens are unknown to the tokenizer (limit "
            f"{options.max_unknown_rate:.1%}){f', most of them in {worst}' if worst else ''}. "
            "Usual causes: the vocabulary is lower-case but the "
            "text is not lower-cased (do_lower_case), a vocabulary of another language, or "
            "SentencePiece pieces in a WordPiece vocabulary. Train one on this text with "
            "python -m bertjax.tools.train_vocab, or raise max_unknown_rate"
        )
    return rate


def finish_store(
    out_dir: Path, shards: int, build: dict[str, Any], options: BuildSettings, paths: list[list[str]]
) -> dict[str, Any]:
    """Write the tables and the manifest of the first `shards` shards; return the manifest.

    `paths` are the sources of each shard; empty where the documents were in memory.
    """
    dtype = stores.ids_dtype(build["tokenizer"]["vocab_size"])
    directory = out_dir / "shards"
    records = _read_records(directory, shards, dtype)
    noticed: Counter[str] = Counter()
    for record in records:
        noticed.update(record["noticed"])
    repaired = {what: noticed.pop(what) for what in REPAIRED if what in noticed}
    unknown_rate = check_unknown_rate(dict(enumerate(records)), options, paths)
    if not sum(record["documents"] for record in records):
        num_files = len({path for shard in paths for path in shard})
        source = f"{num_files} file{'s' * (num_files != 1)}" if num_files else "memory"
        raise ValueError(
            f"0 examples from {source}: no document has a token"
            + (f" ({dict(noticed)})" if noticed else "")
            + "; check the input pattern, the format and the field name"
        )

    kept, why, copies = _select(directory, records, options)
    dropped = {**noticed, **why}
    splits = _write_tables(out_dir, directory, records, kept)
    duplicate_tokens = sum(int(of_shard.sum()) for of_shard in copies)
    draft = {
        **build,
        "dtype": dtype.str,
        "nsp_labels": stores.NSP_LABELS,
        "splits": splits,
        "unknown_rate": unknown_rate,
        "duplicate_share": round(duplicate_tokens / sum(split["tokens"] for split in splits.values()), 6),
        "worst": _responsible(records, paths, copies),
    }
    judged = _judge(out_dir, draft, options, records)
    manifest = {
        **draft,
        "documents": sum(split["documents"] for split in splits.values()),
        "sentences": sum(split["sentences"] for split in splits.values()),
        "tokens": sum(split["tokens"] for split in splits.values()),
        "dropped": dict(sorted(dropped.items())),
        "repaired": repaired,
        **judged,
        "shards": [{key: record[key] for key in SHARD_FIELDS if key in record} for record in records],
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
        record = read_shard_record(directory, number, dtype)
        if record is None:
            raise ValueError(f"{directory}: shard {number} is missing or damaged; build it again")
        records.append(record)
    return records


def _parts(out_dir: Path) -> list[str]:
    """Names of the tables and of the tokenizer's files."""
    tokenizer = sorted(
        path.relative_to(out_dir).as_posix() for path in (out_dir / "tokenizer").rglob("*") if path.is_file()
    )
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
) -> tuple[list[np.ndarray], dict[str, int], list[np.ndarray]]:
    """What becomes of the documents, shard by shard.

    Returns:
      for each document -1 (left out), 0 (train) or 1 (heldout); why some are out; for each document
      its tokens where it is kept and its text is that of an earlier one, else 0.
    """
    tables = [read_shard_tables(directory, n)[1] for n in range(len(records))]
    hashes = np.concatenate([table["hash"] for table in tables])
    tokens = np.concatenate([table["tokens"] for table in tables]).astype(np.int64)
    distinct, first = np.unique(hashes, return_index=True)
    copy = np.ones(len(hashes), bool)
    copy[first] = False
    keep = np.ones(len(hashes), bool)
    why = {}
    if options.deduplicate:
        keep &= ~copy
        why["duplicate_documents"] = int(len(hashes) - len(first))
    if options.max_tokens is not None:
        before = np.cumsum(np.where(keep, tokens, 0)) - tokens
        beyond = keep & (before >= options.max_tokens)
        why["documents_beyond_max_tokens"] = int(np.count_nonzero(beyond))
        keep &= ~beyond
        distinct = np.unique(hashes[keep])
    heldout = (hashes >> np.uint64(11)) * 2.0**-53 < options.heldout_fraction
    # A pair takes its random half from another document: at least two texts on either side.
    count = len(np.unique(hashes[keep & heldout]))
    kept = np.flatnonzero(keep)
    if options.heldout_fraction and len(distinct) >= 4 and not 2 <= count <= len(distinct) - 2:
        heldout = hashes < distinct[min(max(count, 2), len(distinct) - 2)]
    elif options.heldout_fraction and len(kept) >= 2 and not heldout[kept].any():
        heldout[kept[np.argmin(hashes[kept])]] = True
    elif heldout[kept].all():
        heldout[kept[np.argmax(hashes[kept])]] = False
    choice = np.where(keep, heldout.astype(np.int8), np.int8(-1))
    ends = np.cumsum([len(table) for table in tables])[:-1]
    return (
        np.split(choice, ends),
        {reason: n for reason, n in why.items() if n},
        np.split(np.where(copy & keep, tokens, 0), ends),
    )


def _write_tables(
    out_dir: Path, directory: Path, records: list[dict[str, Any]], kept: list[np.ndarray]
) -> dict[str, dict[str, int]]:
    totals = {split: dict(documents=0, sentences=0, tokens=0, one_sentence_documents=0) for split in stores.SPLITS}
    with contextlib.ExitStack() as stack:
        paths = {
            (split, name): stores.temporary_name(out_dir / f"{split}.{name}")
            for split in stores.SPLITS
            for name in TABLES
        }
        files = {key: stack.enter_context(open(path, "wb")) for key, path in paths.items()}
        for split in stores.SPLITS:
            files[split, "documents"].write(np.zeros(1, "<i8").tobytes())
        for number in range(len(records)):
            lengths, documents = read_shard_tables(directory, number)
            sentences = documents["sentences"].astype(np.int64)
            tokens = documents["tokens"].astype(np.int64)
            token_starts = np.cumsum(tokens) - tokens
            ends = np.cumsum(lengths, dtype=np.int64) - np.repeat(token_starts, sentences)
            for code, split in enumerate(stores.SPLITS):
                chosen = kept[number] == code
                total = totals[split]
                firsts = total["sentences"] + np.cumsum(sentences[chosen])
                files[split, "documents"].write(firsts.astype("<i8").tobytes())
                addresses = (number << ADDRESS_BITS) + token_starts[chosen]
                files[split, "addresses"].write(addresses.astype("<i8").tobytes())
                files[split, "sentences"].write(ends[np.repeat(chosen, sentences)].astype("<u4").tobytes())
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


def _judge(
    out_dir: Path, draft: dict[str, Any], options: BuildSettings, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """The numbers of the training split; ValueError where one is beyond its limit."""
    store = stores.TokenStore.of_manifest(out_dir, "train", {**draft, "shards": records})
    numbers = laws.measure(store, JUDGED_LENGTH)
    single = draft["splits"]["train"]["one_sentence_documents"] / store.num_documents
    found = [
        f"{problem}. To take the corpus as it is, raise {setting}"
        for setting, problem in laws.problems(numbers, dataclasses.asdict(options), draft["worst"], single)
    ]
    if found:
        raise ValueError(". Also: ".join(found))
    return {
        "random_share": numbers["random_share"],
        "one_sentence_share": round(single, 6),
        **{name: numbers[name] for name in ("seen_in_epoch", "seen_ever", "longest_line")},
    }


def _by_path(records: Mapping[int, dict[str, Any]], paths: list[list[str]]) -> dict[str, np.ndarray]:
    """SOURCE_NUMBERS of each file, int64."""
    found: dict[str, np.ndarray] = {}
    for number, record in records.items():
        for path, row in zip(paths[number] if paths else (), record.get("sources", ()), strict=False):
            found[path] = found.get(path, 0) + np.array(row, np.int64)
    return found


def _worst(by_path: dict[str, np.ndarray], kind: str) -> list[tuple[str, float]]:
    """(file, its share) of those that hold most of one of SOURCE_NUMBERS."""
    column = {path: int(row[SOURCE_NUMBERS.index(kind)]) for path, row in by_path.items()}
    total = sum(column.values())
    return [
        (path, round(column[path] / total, 4))
        for path in sorted(column, key=column.__getitem__, reverse=True)[:NAMED]
        if column[path]
    ]


def _responsible(
    records: list[dict[str, Any]], paths: list[list[str]], copies: list[np.ndarray]
) -> dict[str, list[Any]]:
    """Of each kind of loss the files that hold most of it, and the longest line."""
    by_path = _by_path(dict(enumerate(records)), paths)
    worst: dict[str, list[Any]] = {kind: _worst(by_path, kind) for kind in ("unknown", "long", "single")}
    duplicate: Counter[str] = Counter()
    for number, of_shard in enumerate(copies):
        documents = [row[0] for row in records[number].get("sources", ())]
        if paths and sum(documents) == len(of_shard) and of_shard.any():
            for path, part in zip(paths[number], np.split(of_shard, np.cumsum(documents)[:-1]), strict=False):
                duplicate[path] += int(part.sum())
    total = sum(duplicate.values())
    worst["duplicate"] = [(path, round(n / total, 4)) for path, n in duplicate.most_common(NAMED) if n]
    longest, number = max(
        ((record.get("longest_line", [0, "", 0]), n) for n, record in enumerate(records)), key=lambda entry: entry[0][0]
    )
    if longest[0]:
        path = paths[number][longest[2]] if paths else "memory"
        worst["longest"] = [(path, longest[1])]
    return {kind: found for kind, found in worst.items() if found}
