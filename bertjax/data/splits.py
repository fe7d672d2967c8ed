"""The last part of a build: whole shards -> the tables of the splits and the manifest.

In: a directory of shards (shards.py). Out: `train.*`, `heldout.*` and `manifest.json`, written last. One pass over the
shards' small tables; tokens are not read. Running it again gives the same bytes.
"""

import contextlib
import dataclasses
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.config.setting import AT_LEAST_1, BELOW_ONE, setting
from bertjax.data import laws
from bertjax.data import store as stores
from bertjax.data.shards import JUDGED_LENGTH, SOURCE_NUMBERS, read_shard_record, read_shard_tables
from bertjax.data.verification import ADDRESS_BITS, TABLES, hash_file

SHARD_FIELDS = ("documents", "sentences", "tokens", "hash", "tokens_hash")  # in the manifest
# Counted, but not a loss of text.
REPAIRED = ("undecodable_lines", "long_documents_cut", "long_lines_split", "unclosed_documents")
LEFT_OUT = -1  # of a document, in place of how many of its last sentences are held out
# Of fewer texts than FEW, no whole documents are held out where their share of the tokens would exceed the one that was
# asked for by TOO_MUCH.
FEW, TOO_MUCH = 50, 0.05
NAMED = 3  # files named as those that hold most of what is wrong
Records = Mapping[int, dict[str, Any]]  # of shards, by their numbers


@dataclasses.dataclass(frozen=True)
class BuildSettings(laws.Limits):
    """What decides the bytes of a store, beside the text and the tokenizer; and the limits.

    Held out are, of a corpus of

      * four texts or more: whole documents, chosen by the hash of their text, so that two texts at least are on either
        side;
      * a few long ones (FEW), where these would be far more than the share that was asked for (TOO_MUCH): the last
        sentences of each document, two at least;
      * fewer than four texts, such as one book: these too. Where no document has four sentences, one is held out.

    Smaller shards balance better over processes and lose less in a restart, but each is three files and a memory map
    (65,530 at most on Linux). Removing duplicates takes 8 bytes of memory a document. Lines are not cut by default, as
    in the original, whose pairs hold a part of a longer one.
    """

    heldout_fraction: float = setting(0.01, "share of documents kept out of training", BELOW_ONE)
    shard_bytes: int = setting(16 << 20, "text of a shard, about", AT_LEAST_1)
    max_tokens: int | None = setting(None, "stop after so many tokens", AT_LEAST_1)
    deduplicate: bool = setting(False, "keep only the first of documents with identical text")
    split_lines: int | None = setting(None, "cut lines of more tokens into equal parts", AT_LEAST_1)


def check_unknown_rate(records: Records, options: BuildSettings, paths: list[list[str]], at_least: int = 1) -> float:
    """Share of unknown tokens; ValueError over the limit once there are `at_least` tokens.

    `paths` are the sources of each shard.
    """
    tokens = sum(record["tokens"] for record in records.values())
    rate = sum(record["unknown_tokens"] for record in records.values()) / max(tokens, 1)
    if tokens >= at_least and rate > options.max_unknown_rate:
        worst = ", ".join(f"{path} ({share:.0%})" for path, share in _worst(_by_path(records, paths, "unknown")))
        raise ValueError(
            f"{rate:.1%} of {tokens:,} tokens are unknown to the tokenizer (limit {options.max_unknown_rate:.1%})"
            f"{f', most of them in {worst}' if worst else ''}. {laws.UNKNOWN_CAUSES}, or raise "
            "--max_unknown_rate"
        )
    return rate


def finish_store(
    out_dir: Path,
    shards: int,
    build: dict[str, Any],
    options: BuildSettings,
    paths: list[list[str]],
    judged: bool = True,
) -> dict[str, Any]:
    """Writes the tables and the manifest of the first `shards` shards; returns the manifest.

    `paths` are the sources of each shard; empty where the documents were in memory. `judged`: as of `build_store`.
    """
    dtype, directory = stores.ids_dtype(build["tokenizer"]["vocab_size"]), out_dir / "shards"
    records: dict[int, dict[str, Any]] = {}
    dropped: Counter[str] = Counter()
    for number in range(shards):
        record = read_shard_record(directory, number, dtype)
        if record is None:
            raise ValueError(f"{directory}: shard {number} is missing or damaged; build it again")
        records[number] = record
        dropped.update(record["noticed"])
    repaired = {what: dropped.pop(what) for what in REPAIRED if what in dropped}
    unknown_rate = check_unknown_rate(records, options, paths, at_least=1 if judged else sys.maxsize)
    if not sum(record["documents"] for record in records.values()):
        num_files = len({path for shard in paths for path in shard})
        source = f"{num_files} file{'s' * (num_files != 1)}" if num_files else "memory"
        noticed = f" ({dict(dropped)})" if dropped else ""
        raise ValueError(
            f"0 examples from {source}: no document has a token{noticed}"
            + "; check the input pattern, the format and the field name" * bool(num_files)
        )
    heldout, why, copies = _select(directory, shards, options)
    splits = _write_tables(out_dir, directory, heldout)
    totals = {name: sum(split[name] for split in splits.values()) for name in ("sentences", "tokens")}
    totals["documents"] = sum(int(np.count_nonzero(of_shard != LEFT_OUT)) for of_shard in heldout)
    manifest = {
        **build,
        "dtype": dtype.str,
        "nsp_labels": stores.NSP_LABELS,
        "splits": splits,
        "unknown_rate": unknown_rate,
        "duplicate_share": round(sum(int(of_shard.sum()) for of_shard in copies) / totals["tokens"], 6),
        "worst": _responsible(records, paths, copies),
        "shards": [{key: record[key] for key in SHARD_FIELDS} for record in records.values()],
    }
    manifest |= _measured(out_dir, manifest, judged)
    tables = [f"{split}.{name}" for split in stores.SPLITS for name in TABLES]
    tokenizer = [path for path in (out_dir / "tokenizer").rglob("*") if path.is_file()]
    parts = tables + sorted(path.relative_to(out_dir).as_posix() for path in tokenizer)
    content = hashlib.blake2b(digest_size=32)  # of the tokens, by the hashes of their shards, and of the tables
    for record in records.values():
        content.update(bytes.fromhex(record["hash"]))
    for name in tables:
        hash_file(out_dir / name, content)
    manifest |= totals | {
        "dropped": dict(sorted((dropped + Counter(why)).items())),
        "repaired": repaired,
        "parts": {name: hash_file(out_dir / name).hexdigest() for name in parts},
        "content_hash": content.hexdigest(),
    }
    manifest["manifest_hash"] = stores.manifest_hash(manifest)
    stores.write_json(out_dir / "manifest.json", manifest)
    return manifest


def _select(
    directory: Path, shards: int, options: BuildSettings
) -> tuple[list[np.ndarray], dict[str, int], list[np.ndarray]]:
    """What becomes of the documents, shard by shard.

    Returns:
      of each document how many of its last sentences are held out: 0 (it is trained on), some, all, or LEFT_OUT; why
      some are; of each document its tokens where it is kept and its text is that of an earlier one, else 0.
    """
    tables = [read_shard_tables(directory, n)[1] for n in range(shards)]
    hashes = np.concatenate([table["hash"] for table in tables])
    tokens = np.concatenate([table["tokens"] for table in tables]).astype(np.int64)
    sentences = np.concatenate([table["sentences"] for table in tables])
    _, first = np.unique(hashes, return_index=True)
    copy = np.ones(len(hashes), bool)
    copy[first] = False
    keep = np.ones(len(hashes), bool)
    why = {}
    if options.deduplicate:
        keep &= ~copy
        why["duplicate_documents"] = len(hashes) - len(first)
    if options.max_tokens is not None:
        before = np.cumsum(np.where(keep, tokens, 0)) - tokens
        beyond = keep & (before >= options.max_tokens)
        why["documents_beyond_max_tokens"] = int(np.count_nonzero(beyond))
        keep &= ~beyond
    heldout = np.full(len(hashes), LEFT_OUT, np.int32)
    heldout[keep] = _hold_out(hashes[keep], sentences[keep], tokens[keep], options.heldout_fraction)
    ends = np.cumsum([len(table) for table in tables])[:-1]
    return np.split(heldout, ends), why, np.split(np.where(copy & keep, tokens, 0), ends)


def _hold_out(hashes: np.ndarray, sentences: np.ndarray, tokens: np.ndarray, fraction: float) -> np.ndarray:
    """How many of its last sentences each document holds out, see BuildSettings; `sentences` and `tokens` are those of
    each."""
    if not fraction:
        return np.zeros(len(hashes), np.int32)
    sentences = sentences.astype(np.int32)
    whole = (hashes >> np.uint64(11)) * 2.0**-53 < fraction
    tails = np.clip(np.rint(fraction * sentences).astype(np.int32), 2, sentences - 2) * (sentences >= 4)
    distinct, count = np.unique(hashes), len(np.unique(hashes[whole]))
    if len(distinct) >= 4:
        # A pair takes its random half from another document: at least two texts on either side.
        if not 2 <= count <= len(distinct) - 2:
            whole = hashes < distinct[min(max(count, 2), len(distinct) - 2)]
        excess = tokens[whole].sum() / tokens.sum() - fraction
        of_tails = (tokens * tails / sentences).sum() / tokens.sum() - fraction
        if len(distinct) < FEW and excess > TOO_MUCH and abs(of_tails) < excess:
            return tails
    elif tails.any():
        return tails
    elif len(hashes) >= 2 and not whole.any():
        whole[np.argmin(hashes)] = True
    elif whole.all():
        whole[np.argmax(hashes)] = False
    return np.where(whole, sentences, 0)


def _write_tables(out_dir: Path, directory: Path, heldout: list[np.ndarray]) -> dict[str, dict[str, int]]:
    """Writes the tables of both splits; returns the numbers of each. `heldout`: of each shard, see `_select`.

    The first sentences of a document are a document of `train`, the held-out ones after them one of `heldout`.
    """
    totals = {split: dict(documents=0, sentences=0, tokens=0, one_sentence_documents=0) for split in stores.SPLITS}
    with contextlib.ExitStack() as stack:
        files = {
            (split, name): stack.enter_context(stores.atomic_file(out_dir / f"{split}.{name}"))
            for split in stores.SPLITS
            for name in TABLES
        }
        for split in stores.SPLITS:
            files[split, "documents"].write(np.zeros(1, "<i8").tobytes())
        for number, of_shard in enumerate(heldout):
            lengths, documents = read_shard_tables(directory, number)
            tails = np.maximum(of_shard, 0)
            parts = np.stack([documents["sentences"].astype(np.int64) - tails, tails], axis=1)
            codes = np.where(of_shard[:, None] == LEFT_OUT, LEFT_OUT, [0, 1])[parts > 0]  # of stores.SPLITS
            sentences = parts[parts > 0]
            tokens = np.add.reduceat(lengths, np.cumsum(sentences) - sentences, dtype=np.int64)
            token_starts = np.cumsum(tokens) - tokens
            ends = np.cumsum(lengths, dtype=np.int64) - np.repeat(token_starts, sentences)
            for code, split in enumerate(stores.SPLITS):
                chosen, total = codes == code, totals[split]
                firsts = total["sentences"] + np.cumsum(sentences[chosen])
                addresses = (number << ADDRESS_BITS) + token_starts[chosen]
                files[split, "documents"].write(firsts.astype("<i8").tobytes())
                files[split, "addresses"].write(addresses.astype("<i8").tobytes())
                files[split, "sentences"].write(ends[np.repeat(chosen, sentences)].astype("<u4").tobytes())
                total["documents"] += int(np.count_nonzero(chosen))
                total["sentences"] += int(sentences[chosen].sum())
                total["tokens"] += int(tokens[chosen].sum())
                total["one_sentence_documents"] += int(np.count_nonzero(sentences[chosen] == 1))
    return totals


def _measured(out_dir: Path, manifest: dict[str, Any], judged: bool) -> dict[str, Any]:
    """The numbers of the training split; ValueError where one is beyond its limit, if they are judged."""
    store = stores.TokenStore(out_dir, "train", manifest)
    numbers = laws.measure(store, JUDGED_LENGTH)
    found = [
        f"{problem}. To take the corpus as it is, raise --{setting}"
        for setting, problem in laws.problems(numbers, manifest)
    ]
    if found and judged:
        raise ValueError(". Also: ".join(found))
    alone = manifest["splits"]["train"]["one_sentence_documents"] / store.num_documents
    names = ("random_share", "seen_in_epoch", "seen_ever", "longest_line")
    return {"one_sentence_share": round(alone, 6), **{name: numbers[name] for name in names}}


def _by_path(records: Records, paths: list[list[str]], kind: str) -> Counter[str]:
    """One of SOURCE_NUMBERS of each file."""
    found: Counter[str] = Counter()
    for number, record in records.items():
        for path, row in zip(paths[number] if paths else (), record.get("sources", ()), strict=False):
            found[path] += row[SOURCE_NUMBERS.index(kind)]
    return found


def _worst(found: Counter[str]) -> list[tuple[str, float]]:
    """(file, its share) of those that hold most of something."""
    return [(path, round(n / found.total(), 4)) for path, n in found.most_common(NAMED) if n]


def _responsible(records: Records, paths: list[list[str]], copies: list[np.ndarray]) -> dict[str, list[Any]]:
    """Of each kind of loss the files that hold most of it, and the longest line."""
    worst: dict[str, list] = {kind: _worst(_by_path(records, paths, kind)) for kind in ("unknown", "long", "single")}
    duplicate: Counter[str] = Counter()
    for number, of_shard in enumerate(copies):
        documents = [row[0] for row in records[number].get("sources", ())]
        if paths and sum(documents) == len(of_shard) and of_shard.any():
            for path, part in zip(paths[number], np.split(of_shard, np.cumsum(documents)[:-1]), strict=False):
                duplicate[path] += int(part.sum())
    worst["duplicate"] = _worst(duplicate)
    longest = {number: record.get("longest_line", [0, "", 0]) for number, record in records.items()}
    number = max(longest, key=lambda n: longest[n][0])
    tokens, text, source = longest[number]
    if tokens:
        worst["longest"] = [(paths[number][source] if paths else "memory", text)]
    return {kind: found for kind, found in worst.items() if found}
