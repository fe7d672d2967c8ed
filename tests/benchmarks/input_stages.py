"""What the input side costs, in seconds of CPU time: text -> token store -> rows -> masks.

In: files and a tokenizer, or a store. Out: dicts of numbers for input.py. CPU time, so that other
work on the machine changes the numbers little; compilation is paid before the clock starts, except
in `build_command`, which is the whole command as a user starts it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data import shards
from bertjax.data import store as stores
from bertjax.data.batches import PretrainingBatches
from bertjax.data.documents import read_extent
from bertjax.data.sources import Reading, plan_extents, resolve
from bertjax.data.splits import BuildSettings
from bertjax.data.store import TokenStore
from tests.benchmarks import harness

STAGE_BYTES = 16 << 20  # of text that the stages are timed on


def build_command(
    pattern: str, tokenizer: str, output: Path, workers: int = 1, watch: Callable[[int], None] | None = None
) -> dict[str, float]:
    """build_corpus in a process of its own: CPU seconds of it and its workers, wall, tokens.

    `watch` is called with its process id while it runs, and must return when that has ended.
    """
    command = harness.python(
        "bertjax.tools.build_corpus",
        f"--input={pattern}",
        f"--tokenizer={tokenizer}",
        f"--output={output}",
        f"--workers={workers}",
        "--overwrite",
    )
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if watch:
        threading.Thread(target=watch, args=(process.pid,), daemon=True).start()
    printed = process.stdout.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    if process_failed := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"build_corpus ended with code {process_failed}:\n{printed[-2000:]}")
    tokens = stores.read_manifest(output)["tokens"]
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "tokens": tokens,
        "cpu_seconds": cpu,
        "wall_seconds": time.monotonic() - started,
        "tokens_per_cpu_second": tokens / cpu,
    }


def build_stages(pattern: str, tokenizer: Any) -> dict[str, float]:
    """Million tokens a CPU second of each stage of the builder, on the first STAGE_BYTES."""
    reading = Reading()
    extents, size = [], 0
    for extent in (e for group in plan_extents(resolve(pattern), reading, 1 << 20) for e in group):
        if size < STAGE_BYTES:
            extents.append(extent)
            size += extent.size
    tokenizer.encode_flat(["compiles"])

    def timed(function: Callable[[], Any]) -> tuple[float, Any]:
        started = time.process_time()
        result = function()
        return time.process_time() - started, result

    def read(segment: bool) -> list[list[str]]:
        how = Reading(segment=segment)
        return [document.sentences for extent in extents for document in read_extent(extent, how)]

    reading_seconds, _ = timed(lambda: read(False))
    both, documents = timed(lambda: read(True))
    groups: list[list[str]] = [[]]
    for document in documents:
        groups[-1].extend(document)
        if sum(map(len, document)) and sum(map(len, groups[-1])) > 1 << 20:
            groups.append([])
    tokenizing, encoded = timed(lambda: [tokenizer.encode_flat(group) for group in groups])
    tokens = sum(len(ids) for ids, _ in encoded)
    hashing, _ = timed(lambda: [shards.content_hash(document) for document in documents])

    def write() -> None:
        with tempfile.TemporaryDirectory() as directory:
            with stores.atomic_file(Path(directory) / "tokens") as file:
                for ids, _ in encoded:
                    file.write(ids.astype(stores.ids_dtype(tokenizer.vocab_size)).tobytes())

    writing, _ = timed(write)
    seconds = {
        "read": reading_seconds,
        "split into sentences": max(both - reading_seconds, 1e-9),
        "tokenize": tokenizing,
        "hash documents": hashing,
        "write": writing,
    }
    return {name: tokens / value for name, value in seconds.items()}


def masked_epochs(
    store: TokenStore, tokenizer: Any, seq_length: int, predictions: int, epochs: int
) -> dict[str, float]:
    """CPU seconds of `epochs` whole epochs, index included, and of their masks on this CPU.

    In training the masks are a part of the compiled step on the accelerator.
    """
    import jax

    from bertjax.data.masking import MaskingSpec, mask_tokens

    spec = MaskingSpec.from_tokenizer(tokenizer, predictions)
    draw = jax.jit(lambda key, ids, mask: mask_tokens(key, ids, mask, spec))
    _ = PretrainingBatches(store, seq_length, 256, seed=9)[0]
    batch_size = 1024
    zeros = np.zeros((batch_size, seq_length), np.int32)
    jax.block_until_ready(draw(jax.random.key(0), zeros, zeros))
    rows = making = masking = 0.0
    started = time.process_time()
    batches = PretrainingBatches(store, seq_length, batch_size, seed=1)
    steps = -(-batches.corpora[0].rows_per_epoch * epochs // batch_size)
    making += time.process_time() - started
    for step in range(steps):
        started = time.process_time()
        batch = batches[step]
        done = time.process_time()
        masked = draw(jax.random.key(step), batch["input_ids"], batch["attention_mask"])
        jax.block_until_ready(masked)
        making += done - started
        masking += time.process_time() - done
        rows += batch_size
    return {"rows": rows, "rows_seconds": making, "masks_seconds": masking}


def write_text(pattern: str, path: Path, size: int, new_words: bool = False) -> int:
    """Sentences of the files as the original wants them, about `size` bytes; returns the bytes.

    Shorter input is repeated. With `new_words` one word in fifty becomes one that was never seen,
    so that repeated text does not flatter caches and dictionaries.
    """
    import random

    from bertjax.data.documents import read_documents

    rng = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            before = written
            for document in read_documents(pattern):
                text = "\n".join(document.sentences)
                if new_words:
                    lines = [line.split(" ") for line in document.sentences]
                    for words in lines:
                        for i in range(rng.randrange(50), len(words), 50):
                            words[i] += f"{rng.getrandbits(36):x}"
                    text = "\n".join(map(" ".join, lines))
                written += file.write(text + "\n\n")
                if written >= size:
                    break
            if written == before:
                raise ValueError(f"no text in {pattern}")
    return path.stat().st_size


def run_original(
    directory: str, text: Path, vocab: str, seq_length: int, predictions: int, dupes: int
) -> dict[str, float]:
    """input_original.py in a process of its own."""
    try:
        return harness.measure(
            "tests.benchmarks.input_original",
            directory,
            str(text),
            vocab,
            str(seq_length),
            str(predictions),
            str(dupes),
        )
    except ValueError as error:
        raise ValueError(
            f"{directory}: the original program failed (its message is above); it "
            "needs create_pretraining_data.py, tokenization.py and a package that "
            "is called tensorflow"
        ) from error


def memory_of_build(pattern: str, tokenizer: str, output: Path, workers: int) -> dict[str, Any]:
    """`build_command` with its memory over time: [(seconds, MB of it and all its processes)]."""
    curve: list[tuple[float, float]] = []

    def watch(root: int) -> None:
        started = time.monotonic()
        while total := sum(map(_proportional_kb, [root, *_children(root)])):
            curve.append((time.monotonic() - started, total / 1024))
            time.sleep(1.0)

    result = build_command(pattern, tokenizer, output, workers, watch)
    return {
        **result,
        "workers": workers,
        "curve": curve,
        "peak_mb": max(value for _, value in curve),
        "shard_bytes": BuildSettings.shard_bytes,
    }


def _children(process: int) -> list[int]:
    found = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    except OSError:  # it has ended
        pass
    return found


def _proportional_kb(process: int) -> int:
    """Memory of a process, pages that several share counted in part (Linux)."""
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
