"""Documents -> token store, in parallel, in flat memory, restartable.

In: files (or documents in memory) and a tokenizer. Out: a directory for `store.TokenStore`.

The files are cut into shards by their sizes alone; each shard is made by one process in one pass
(shard.py) and becomes visible only when whole, so the bytes written do not depend on the number of
processes, and a build that was killed goes on with the shards that are missing. `finish_store`
(finish.py) then streams over the shards' small tables: removes duplicates, stops at `max_tokens`,
splits by the hash of the text, and writes the manifest last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from bertjax.data import store as stores
from bertjax.data.documents import Document
from bertjax.data.finish import BuildSettings, check_unknown_rate, finish_store
from bertjax.data.shard import build_shard, write_shard
from bertjax.data.sources import Extent, Reading, plan_extents, resolve
from bertjax.tokenization import load_tokenizer

# (arguments of `build_shard`, tokenizer, whether to stop early) -> (number, record) of each shard.
Run = Callable[[list[tuple], Any, Callable[[], bool]], Iterator[tuple[int, dict[str, Any]]]]


class Progress(NamedTuple):
    """State of a build, given to the `progress` callback after each shard."""

    shards_done: int
    shards: int
    bytes_done: int
    bytes: int
    tokens: int
    seconds: float
    tokens_per_second: float  # of the shards made in this run
    eta_seconds: float


def build_store(
    patterns: str | Iterable[str] | None,
    tokenizer: Any,
    out_dir: str | os.PathLike[str],
    *,
    documents: Iterable[Document | Sequence[str]] | None = None,
    workers: int = 1,
    reading: Reading | None = None,
    overwrite: bool = False,
    shard: tuple[int, int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_plan: Callable[[list[str], int], None] | None = None,
    run: Run | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Build a token store; return its manifest.

    Args:
      patterns: files to read, see `sources.resolve`; or None with
      documents: in-memory documents (lists of sentences, or `Document`s), read once, in order.
      tokenizer: a tokenizer, or what `bertjax.tokenization.load_tokenizer` takes.
      workers: processes. Spawned, so a script that calls this needs `if __name__ == "__main__"`.
      reading: format, field, language ... of the files.
      overwrite: throw away what `out_dir` holds, instead of going on with it or refusing.
      shard: (i, n): make every n-th shard from i on and return {} unless all shards are then there;
        for n machines that share a directory. The one that finds all shards whole finishes.
      progress, on_plan: called after each shard, and with (files, bytes) before the first.
      run: makes the missing shards elsewhere (`beam.py`) instead of in `workers` processes here.
      **settings: fields of `BuildSettings`.

    Raises:
      ValueError: no match, not UTF-8, zero examples, unknown rate or share of random pairs over its
        limit, a directory that holds another store or another build.
      OSError: disk full; run again to go on.
    """
    options, reading = BuildSettings(**settings), reading or Reading()
    if (patterns is None) == (documents is None):
        raise ValueError("give either patterns of files or documents, not both or neither")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard[0]}/{shard[1]}: i must be in 0..n-1")
    out_dir = Path(out_dir).expanduser()
    tokenizer = load(tokenizer)
    plan, files = [], []
    if patterns is not None:
        files = resolve(patterns)
        plan = plan_extents(files, reading, options.shard_bytes)
        if on_plan:
            on_plan(files, sum(extent.size for extents in plan for extent in extents))
    build = _describe_build(tokenizer, options, reading, files, plan)
    try:
        done = _open_directory(out_dir, build, overwrite, in_memory=documents is not None)
        if done is not None:
            return done
        _save_tokenizer(tokenizer, out_dir)
        if documents is not None:
            shards = _build_from_memory(documents, tokenizer, out_dir, options)
        else:
            shards = len(plan)
            todo = range(shards)[shard[0] :: shard[1]] if shard else range(shards)
            run = run or functools.partial(run_here, workers=workers)
            complete = _build_shards(plan, todo, tokenizer, out_dir, options, reading, run,
                                     progress)
            if complete is not None:
                shards = complete
            elif shard is not None:
                return {}
        return finish_store(out_dir, shards, build, options, len(files))
    except OSError as error:
        raise (stores.disk_full(error, out_dir) or error) from error


def load(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    return load_tokenizer(tokenizer)


def _describe_build(
    tokenizer: Any, options: BuildSettings, reading: Reading, files: list[str],
    plan: list[list[Extent]],
) -> dict[str, Any]:
    """Everything that decides the bytes of the store; two builds may mix only if this is equal."""
    def stat(path: str) -> tuple[int, int]:
        if path.startswith("tfds:"):
            return 0, 0
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns

    sources = [(path, *stat(path)) for path in files]
    return {
        "format": stores.FORMAT,
        "version": stores.VERSION,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size,
                      "unk_id": tokenizer.unk_id, "pad_id": tokenizer.pad_id,
                      "cls_id": tokenizer.cls_id, "sep_id": tokenizer.sep_id},
        "settings": {**dataclasses.asdict(options), **dataclasses.asdict(reading)},
        "files": [[path, size] for path, size, _ in sources],
        "sources_hash": hashlib.sha256(repr((sources, plan)).encode()).hexdigest(),
    }


def _open_directory(
    out_dir: Path, build: dict[str, Any], overwrite: bool, in_memory: bool
) -> dict[str, Any] | None:
    """Make `out_dir` ready for this build; the manifest if the same build is finished already."""
    ours = json.loads(stores.to_json(build))
    manifest, begun = out_dir / "manifest.json", out_dir / "build.json"
    held = [path for path in (manifest, begun) if path.exists()]
    if in_memory and manifest.exists() and not overwrite:  # no telling whether it is the same text
        raise ValueError(f"{out_dir} holds a token store; choose another directory, or overwrite")
    if held and (overwrite or in_memory):
        manifest.unlink(missing_ok=True)  # first: what follows is no store any more
        for path in out_dir.iterdir():
            if path.name in ("shards", "tokenizer"):
                shutil.rmtree(path)
            elif path.name.startswith(("build.json", "train.", "heldout.")):
                path.unlink()
    elif held:
        theirs = json.loads(held[0].read_bytes())
        differing = [f"{key}: {_brief(theirs.get(key))} there, {_brief(ours[key])} now"
                     for key in ours if theirs.get(key) != ours[key]]
        if differing:
            raise ValueError(
                f"{out_dir} holds {'a token store' if held[0] is manifest else 'a begun build'} "
                "of other input or settings:\n  " + "\n  ".join(differing) +
                "\nChoose another directory, or overwrite it (--overwrite)")
        if held[0] is manifest:
            return theirs
    elif out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(f"{out_dir} is not empty and holds no token store; choose another "
                         "directory")
    (out_dir / "shards").mkdir(parents=True, exist_ok=True)
    if not begun.exists():
        stores.write_atomically(begun, stores.to_json(build))
    return None


def _save_tokenizer(tokenizer: Any, out_dir: Path) -> None:
    if (out_dir / "tokenizer").exists():
        return
    temporary = out_dir / f"tokenizer.{os.getpid()}.tmp"
    tokenizer.save(temporary)
    try:
        os.replace(temporary, out_dir / "tokenizer")
    except OSError:  # another machine of a shared build was first
        shutil.rmtree(temporary)


def _brief(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 300 else f"{text[:280]}... ({len(text):,} characters)"


def _build_shards(
    plan: list[list[Extent]], todo: range, tokenizer: Any, out_dir: Path, options: BuildSettings,
    reading: Reading, run: Run, progress: Callable[[Progress], None] | None,
) -> int | None:
    """Make the missing shards of `todo`; how many shards the store has, None if some are missing.

    Fewer than planned where `max_tokens` is reached before: then only whole shards from the first
    on are counted, so that the answer does not depend on the order in which they were finished.
    """
    dtype = stores.ids_dtype(tokenizer.vocab_size)
    directory = out_dir / "shards"
    started, made_tokens, made_bytes = time.monotonic(), 0, 0
    sizes = [sum(extent.size for extent in extents) for extents in plan]
    records: dict[int, dict[str, Any]] = {}
    for number in range(len(plan)):
        if (record := stores.read_shard_record(directory, number, dtype)) is not None:
            records[number] = record

    def enough() -> int | None:
        """Number of leading shards that hold `max_tokens`."""
        total = 0
        for number in range(len(plan)):
            if options.max_tokens is None or number not in records:
                return None
            total += records[number]["tokens"]
            if total >= options.max_tokens:
                return number + 1
        return None

    def report() -> None:
        check_unknown_rate(records.values(), options, at_least=1_000_000)
        if progress is None:
            return
        seconds = time.monotonic() - started
        done_bytes = sum(sizes[n] for n in records)
        rate = made_bytes / seconds if seconds and made_bytes else 0.0
        left = sum(sizes[n] for n in todo if n not in records)
        progress(Progress(
            len(records), len(plan), done_bytes, sum(sizes),
            sum(r["tokens"] for r in records.values()), seconds,
            made_tokens / seconds if seconds else 0.0, left / rate if rate else float("inf")))

    missing = [number for number in todo if number not in records]
    if records:
        report()
    tasks = [(plan[n], n, directory, dtype, reading) for n in missing]
    for number, record in run(tasks, tokenizer, lambda: enough() is not None):
        records[number] = record
        made_tokens += record["tokens"]
        made_bytes += sizes[number]
        report()
    if (count := enough()) is not None:
        return count
    # Other machines may have finished theirs meanwhile.
    return len(plan) if all(
        n in records or stores.read_shard_record(directory, n, dtype) for n in range(len(plan))
    ) else None


def run_here(
    tasks: list[tuple], tokenizer: Any, stop: Callable[[], bool], workers: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, record) of the shards as they are finished, made here or in spawned processes."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            if stop():
                return
            yield task[1], build_shard(*task, tokenizer=tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,)) as pool:
        waiting: dict[Future, int] = {}
        remaining = iter(tasks)
        try:
            while True:
                while len(waiting) < workers + 1 and not stop():
                    if (task := next(remaining, None)) is None:
                        break
                    with _signals_held():
                        waiting[pool.submit(_work, task)] = task[1]
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            for future in waiting:
                future.cancel()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended, and for processes started in it for ever.

    A process is started whole, and a Ctrl-C is for the build: its workers finish their shards.
    """
    resource_tracker.ensure_running()  # its start, which is due with the first worker, lets them in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_tokenizer: Any = None


def _start_worker(tokenizer: Any) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # by which a broken pool ends it


def _work(task: tuple) -> dict[str, Any]:
    return build_shard(*task, tokenizer=_worker_tokenizer)


def _build_from_memory(
    documents: Iterable[Document | Sequence[str]], tokenizer: Any, out_dir: Path,
    options: BuildSettings,
) -> int:
    """Documents of this process, cut into shards by their characters; the number of shards."""
    dtype = stores.ids_dtype(tokenizer.vocab_size)
    source, shards, tokens = iter(documents), 0, 0
    ended = False

    def some() -> Iterator[Document | Sequence[str]]:
        nonlocal ended
        size = 0
        for document in source:
            yield document
            size += sum(map(len, getattr(document, "sentences", document)))
            if size >= options.shard_bytes:
                return
        ended = True

    while not ended and (options.max_tokens is None or tokens < options.max_tokens):
        record = write_shard(some(), shards, out_dir / "shards", dtype, tokenizer)
        shards, tokens = shards + 1, tokens + record["tokens"]
    return shards
