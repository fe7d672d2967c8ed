"""A start on a disk that was not read before: its files come ahead of the imports that wait for them one by one.

A start imports more than two thousand modules. On a fresh machine, whose disk often lies behind a network, each file
takes milliseconds, and threads that read many at a time are far ahead of the imports. Nothing here imports them: what
is read stays in the memory of the operating system.
"""

import os
import queue
import resource
import sys
import threading
from collections.abc import Iterator, Sequence

# In the order in which a start imports them; of each it needs nearly all.
PACKAGES = """
    numpy ml_dtypes jaxlib jax jax_plugins jax_cuda13_plugin jax_cuda12_plugin opt_einsum etils numba llvmlite flax
    treescope IPython traitlets rich pygments optax jax_triton triton orbax tensorstore absl google grain attr
    prometheus_client tensorboard fsspec
""".split()
_COLD = 1 << 18  # bytes that this process had to wait for so far; it has read several MB
_LARGEST = 400 << 20  # bytes of a library; of larger ones a start needs a small part
_PIECE = 4 << 20  # bytes of a file that one thread reads
_UNUSED = {"tests", "test", "testing", "include", "backends", "doc"}
_THREADS = 16


def is_cold() -> bool:
    """Whether this process has waited for the disk; what the operating system has in memory does not count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512 > _COLD


def read_ahead(packages: Sequence[str] = PACKAGES) -> list[threading.Thread]:
    """Reads the modules of installed packages in the background, in threads that end by themselves."""
    wanted: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()  # folders and files, each from a byte on
    for package in packages:
        for place in sys.path:
            if os.path.isdir(folder := os.path.join(place, package)):
                wanted.put((folder, 0))

    def read() -> None:
        while True:
            try:
                path, begin = wanted.get(timeout=0.2)
                if os.path.isdir(path):
                    for found in _inside(path):
                        wanted.put(found)
                else:
                    with open(path, "rb", buffering=0) as file:
                        os.pread(file.fileno(), _PIECE, begin)
            except queue.Empty:
                return
            except OSError:  # whoever needs it will tell
                continue

    threads = [threading.Thread(target=read, name="read ahead", daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _inside(folder: str) -> Iterator[tuple[str, int]]:
    """The pieces of what is imported from a folder, and the folders in it."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name not in _UNUSED:
                yield entry.path, 0
        elif entry.name.endswith((f"{sys.implementation.cache_tag}.pyc", ".so")):
            size = entry.stat().st_size
            if size <= _LARGEST:
                yield from ((entry.path, begin) for begin in range(0, size, _PIECE))
