"""Shards of a token store made in this process or in several of this machine.

In: the arguments of `shard.build_shard` for each shard. Out: number and record of each as it is
finished. Workers end with the process that started them, however that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import resource_tracker
from typing import Any

from bertjax.data.shard import build_shard
from bertjax.interruption import end_with_parent


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
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # by which a broken pool ends it


def _work(task: tuple) -> dict[str, Any]:
    return build_shard(*task, tokenizer=_worker_tokenizer)
