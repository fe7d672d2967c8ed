"""Documents -> token store, in parallel, in flat memory, restartable.

In: files (or documents in memory) and a tokenizer. Out: a directory for `store.TokenStore`.

The files are cut into shards by their sizes alone, and each shard is made by one process in one pass (shards.py). So
the bytes do not depend on the number of processes, and a build that was killed goes on with the shards that are
missing. `finish_store` (splits.py) then reads the shards' small tables: removes duplicates, stops at `max_tokens`,
splits by the hash of the text, and writes the manifest last.
"""

import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from bertjax.config import flatten
from bertjax.data import laws
from bertjax.data import store as stores
from bertjax.data.build_directory import BESIDE, clear, is_beginning, is_begun, locked, prepare, replace_by
from bertjax.data.documents import Document, settled
from bertjax.data.shards import ShardMaker, ShardTask, make_here, read_shard_record, write_shard
from bertjax.data.sources import Extent, Reading, described, plan_extents, resolve
from bertjax.data.splits import BuildSettings, check_unknown_rate, finish_store
from bertjax.formats.files import read_json
from bertjax.tokenization import Tokenizer, load_tokenizer


class Progress(NamedTuple):
    """State of a build, given to the `progress` callback after each shard."""

    shards_done: int
    shards: int
    bytes_done: int
    bytes: int
    tokens: int
    tokens_per_second: float  # of the shards made in this run
    eta_seconds: float


def build_store(
    patterns: str | Iterable[str] | None,
    tokenizer: Tokenizer | str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    documents: Iterable[Document | Sequence[str]] | None = None,
    workers: int = 1,
    reading: Reading | None = None,
    overwrite: bool = False,
    shard: tuple[int, int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_plan: Callable[[list[str], int], None] | None = None,
    make_shards: ShardMaker | None = None,
    judged: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Builds a token store; returns its manifest.

    Args:
      patterns: files to read, see `sources.resolve`; or None with
      documents: in-memory documents (lists of sentences, or `Document`s), read once, in order.
      tokenizer: a tokenizer, or what `bertjax.tokenization.load_tokenizer` takes.
      workers: processes. Spawned, so a script that calls this needs `if __name__ == "__main__"`.
      reading: format, field, language ... of the files.
      overwrite: replace what `out_dir` holds, instead of going on with it or refusing. A finished store stays until
        the new one is whole.
      shard: (i, n): make every n-th shard from i on and return {} unless all shards are then there; for n machines that
        share a directory. The one that finds all shards whole finishes.
      progress, on_plan: called after each shard, and with (files, bytes) before the first.
      make_shards: makes the missing shards elsewhere (`beam_maker`) instead of in `workers` processes here.
      judged: False leaves it to the run that takes the store to refuse numbers beyond their limits.
      **settings: fields of `BuildSettings`.

    Raises:
      ValueError: no match, not UTF-8, zero examples, a number of the corpus over its limit (see `laws`), a directory
        that holds another store or another build.
      OSError: disk full; run again to go on.
    """
    options, reading = BuildSettings(**settings), reading or Reading()
    if (patterns is None) == (documents is None):
        raise ValueError("give either patterns of files or documents, not both or neither")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard[0]}/{shard[1]}: i must be in 0..n-1")
    if shard is not None and overwrite:
        raise ValueError(
            f"shard {shard[0]}/{shard[1]} does not go with overwrite, which would delete what the other machines have "
            f"made: delete {out_dir} once, then build without it"
        )
    out_dir = Path(out_dir).expanduser()
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(tokenizer)
    plan, files = [], []
    if patterns is not None:
        files = resolve(patterns)
        reading = settled(files, reading)
        plan = plan_extents(files, reading, options.shard_bytes)
        if on_plan:
            on_plan(files, sum(extent.size for extents in plan for extent in extents))
    build = _describe_build(tokenizer, options, reading, files, plan)
    in_memory = documents is not None
    try:
        if (done := _finished(out_dir, build, overwrite, in_memory)) is not None:
            return done
        with locked(out_dir, shared=shard is not None):
            replaces = overwrite and (out_dir / "manifest.json").exists()
            place = out_dir / BESIDE if replaces else out_dir
            prepare(place, build, tokenizer, in_memory or overwrite and not (replaces and is_begun(place, build)))
            try:
                if documents is not None:
                    shards = _build_from_memory(documents, tokenizer, place, options)
                else:
                    todo = range(len(plan))[shard[0] :: shard[1]] if shard else range(len(plan))
                    make_shards = make_shards or functools.partial(make_here, workers=workers)
                    shards = _build_shards(plan, todo, tokenizer, place, options, reading, make_shards, progress)
                    if shards is None:
                        return {}
                sources = [[extent.path for extent in extents] for extents in plan]
                manifest = finish_store(place, shards, build, options, sources, judged)
                if replaces:
                    replace_by(out_dir, place)
                return manifest
            except ValueError:
                if replaces:
                    shutil.rmtree(place)
                elif shard is None:  # others may be at work on it
                    stores.write_json(out_dir / "build.json", build | {"refused": True})
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"the disk of {out_dir} is full ({os.strerror(error.errno)}). Free some space and run the same command "
            "again: finished shards are kept, the unfinished one is made again"
        ) from error
    except BrokenProcessPool as error:
        raise OSError(
            "a worker process was ended from outside, most often because memory ran out. Run the same command again, "
            "with fewer workers or smaller shards: finished ones are kept"
        ) from error


def _describe_build(
    tokenizer: Tokenizer, options: BuildSettings, reading: Reading, files: list[str], plan: list[list[Extent]]
) -> dict[str, Any]:
    """Everything that decides the bytes of the store; two builds may mix only if this is equal."""
    sources = described(files, reading.field)
    return {
        "format": stores.FORMAT,
        "version": stores.VERSION,
        "tokenizer": stores.tokenizer_record(tokenizer),
        "settings": {**dataclasses.asdict(options), **dataclasses.asdict(reading)},
        "files": [[path, size] for path, size, _ in sources],
        "sources_hash": hashlib.sha256(repr((sources, plan)).encode()).hexdigest(),
    }


def _finished(out_dir: Path, build: dict[str, Any], overwrite: bool, in_memory: bool) -> dict[str, Any] | None:
    """The manifest if the same build is finished already; ValueError where `out_dir` is not ours.

    What was refused gives way to a build of other input or settings, as the refusal asked for.
    """
    ours = json.loads(stores.to_json(build))
    manifest, begun = out_dir / "manifest.json", out_dir / "build.json"
    finished = manifest.exists()
    if not finished and not begun.exists():
        if out_dir.exists() and not all(map(is_beginning, out_dir.iterdir())):
            raise ValueError(f"{out_dir} is not empty and holds no token store; choose another directory")
        return None
    if overwrite:
        return None
    if in_memory:  # no telling whether it is the same text
        if finished:
            raise ValueError(f"{out_dir} holds a token store; choose another directory, or overwrite")
        return None
    theirs = stores.read_manifest(out_dir) if finished else _read_begun(begun)
    # A setting that is newer than the build had its default then.
    defaults = {**dataclasses.asdict(BuildSettings()), **dataclasses.asdict(Reading(language="en"))}
    theirs["settings"] = defaults | theirs.get("settings", {})
    # Limits are looked at when the shards are there, and may have been raised because of what was found.
    free = set() if finished else {f"settings.{field.name}" for field in dataclasses.fields(laws.Limits)}
    old, new = flatten(theirs), flatten(ours)
    keys = [key for key in sorted((old.keys() | new.keys()) - free) if key.split(".")[0] in ours]
    keys = [key for key in keys if old.get(key) != new.get(key)]
    of_tokenizer = [key for key in keys if key.startswith("tokenizer.")]
    shown = [key for key in keys if key not in (*of_tokenizer, "sources_hash")]
    differing = [f"{key}: {_brief(old.get(key))} there, {_brief(new.get(key))} now" for key in shown]
    if of_tokenizer:
        sizes = [found.get("tokenizer.vocab_size") for found in (old, new)]
        differing.append("tokenizer: another one, with {} entries there, {} now".format(*sizes))
    if keys and not differing:
        differing.append("files: of the same names and sizes, but changed since")
    if differing and not finished and theirs.get("refused"):
        clear(out_dir)
    elif differing:
        raise ValueError(
            f"{out_dir} holds {'a token store' if finished else 'a begun build'} of other input or settings:\n  "
            + ";\n  ".join(differing)
            + ".\nChoose another directory, or overwrite it (--overwrite)"
        )
    return stores.TokenStore(out_dir).manifest if finished else None


def _read_begun(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict)
    except ValueError as error:
        raise ValueError(f"{error}; start the build again (--overwrite)") from None


def _brief(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 300 else f"{text[:280]}... ({len(text):,} characters)"


def _build_shards(
    plan: list[list[Extent]],
    todo: range,
    tokenizer: Tokenizer,
    out_dir: Path,
    options: BuildSettings,
    reading: Reading,
    make_shards: ShardMaker,
    progress: Callable[[Progress], None] | None,
) -> int | None:
    """Makes the missing shards of `todo`; returns how many shards the store has, None if some are missing.

    Fewer than planned where `max_tokens` is reached before: then only whole shards from the first on are counted, so
    that the answer does not depend on the order in which they were finished.
    """
    dtype, directory = stores.ids_dtype(tokenizer.vocab_size), out_dir / "shards"
    started = time.monotonic()
    sizes = [sum(extent.size for extent in extents) for extents in plan]
    paths = [[extent.path for extent in extents] for extents in plan]
    records: dict[int, dict[str, Any]] = {}
    for number in range(len(plan)):
        if record := read_shard_record(directory, number, dtype, verified=True):
            records[number] = record
    missing = [number for number in todo if number not in records]

    def report() -> None:
        check_unknown_rate(records, options, paths, at_least=1_000_000)
        if progress is not None:
            progress(_progress(sizes, records, missing, time.monotonic() - started))

    if records:
        report()
    tasks = [ShardTask(plan[n], n, directory, dtype, reading, options.split_lines) for n in missing]
    for number, record in make_shards(tasks, tokenizer, lambda: _enough(records, options.max_tokens) is not None):
        records[number] = record
        report()
    if (count := _enough(records, options.max_tokens)) is not None:
        return count
    # Other machines may have finished theirs meanwhile.
    return len(plan) if all(n in records or read_shard_record(directory, n, dtype) for n in range(len(plan))) else None


def _enough(records: Mapping[int, dict[str, Any]], max_tokens: int | None) -> int | None:
    """Number of leading shards that hold `max_tokens`; None where they do not, or one of them is missing."""
    number, tokens = 0, 0
    while max_tokens is not None and number in records:
        tokens += records[number]["tokens"]
        number += 1
        if tokens >= max_tokens:
            return number
    return None


def _progress(sizes: list[int], records: Mapping[int, dict[str, Any]], todo: list[int], seconds: float) -> Progress:
    """`sizes`: bytes of each shard; `todo`: the shards that are made in this run, of which `seconds` have passed."""
    made = [number for number in todo if number in records]
    left = sum(sizes[number] for number in todo if number not in records)
    rate = sum(sizes[number] for number in made) / seconds if seconds else 0.0
    return Progress(
        shards_done=len(records),
        shards=len(sizes),
        bytes_done=sum(sizes[number] for number in records),
        bytes=sum(sizes),
        tokens=sum(record["tokens"] for record in records.values()),
        tokens_per_second=sum(records[number]["tokens"] for number in made) / seconds if seconds else 0.0,
        eta_seconds=left / rate if rate else float("inf"),
    )


def _build_from_memory(
    documents: Iterable[Document | Sequence[str]], tokenizer: Tokenizer, out_dir: Path, options: BuildSettings
) -> int:
    """Writes documents of this process as shards; returns their number."""
    dtype, shards, tokens = stores.ids_dtype(tokenizer.vocab_size), 0, 0
    source = iter(documents)
    for first in source:
        some = _take(itertools.chain([first], source), options.shard_bytes)
        record = write_shard(some, shards, out_dir / "shards", dtype, tokenizer, options.split_lines)
        shards, tokens = shards + 1, tokens + record["tokens"]
        if options.max_tokens is not None and tokens >= options.max_tokens:
            break
    return shards


def _take(
    documents: Iterable[Document | Sequence[str]], characters: int
) -> Iterator[tuple[int, Document | Sequence[str]]]:
    """(0, document) of the next documents, until they have `characters` together."""
    size = 0
    for document in documents:
        yield 0, document
        size += sum(map(len, getattr(document, "sentences", document)))
        if size >= characters:
            return
