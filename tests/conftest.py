"""Shared test set-up: 8 forced host devices on the CPU, and the place of the real data sets."""

import importlib.metadata
import os
import pathlib
import signal
import threading

# A shell starts background jobs with Ctrl-C ignored, and so would be what the tests start.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

# Before the first jax import of the process. A GPU run (`-m gpu`) sets BERTJAX_TEST_PLATFORM=cuda.
os.environ.setdefault("JAX_PLATFORMS", os.environ.get("BERTJAX_TEST_PLATFORM", "cpu"))
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels; read when triton is first imported
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share a GPU
flags = {
    "xla_force_host_platform_device_count": "8",
    # Tests compile far longer than they compute: let XLA and LLVM optimise less.
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_opt_preset": "fast_compile",
}
if importlib.metadata.version("jax").startswith("0.10."):
    # Its MLIR emitters take twice as long as the LLVM ones, which later releases no longer have.
    flags["xla_cpu_use_fusion_emitters"] = "false"
for flag, value in flags.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()
# Several tests, and the programs that they start, compile the same step: once a checkout is enough.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Directory of the real data sets: $BERTJAX_SHARED_DATA, or shared/data beside the checkout."""
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    path = pathlib.Path(os.environ.get("BERTJAX_SHARED_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"real data sets not found at {path}; set BERTJAX_SHARED_DATA")
    return path


@pytest.fixture
def bucket(monkeypatch):
    """gs://bucket, in memory; as on object storage, there are no directories but names with /."""
    import fsspec
    from etils import epath
    from fsspec.implementations.memory import MemoryFileSystem

    class Storage(MemoryFileSystem):
        store, pseudo_dirs, protocol, cachable = {}, [""], ("gcs", "gs"), False

        def __init__(self, *_, **__):
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + str(path).split("://")[-1].strip("/")

        def mkdir(self, path, create_parents=True, **_):
            pass

        makedirs = mkdir

    filesystem = fsspec.filesystem
    monkeypatch.setattr(
        fsspec,
        "filesystem",
        lambda protocol, **options: Storage() if protocol == "gcs" else filesystem(protocol, **options),
    )
    found = epath.Path("gs://bucket")
    found._backend._get_filesystem.cache_clear()
    yield found
    found._backend._get_filesystem.cache_clear()


@pytest.fixture(scope="session")
def random_store(tmp_path_factory):
    """A token store of 40 documents of the random words w0 to w59, a fifth of it held out."""
    import numpy as np

    from bertjax.data.build import build_store
    from bertjax.tokenization.wordpiece import WordPieceTokenizer
    from tests.fakes import SPECIALS

    random = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    tokenizer = WordPieceTokenizer([*SPECIALS, *words], do_lower_case=True)
    documents = [
        [" ".join(random.choice(words, random.integers(3, 12))) for _ in range(random.integers(4, 12))]
        for _ in range(40)
    ]
    directory = tmp_path_factory.mktemp("random") / "store"
    build_store(None, tokenizer, directory, documents=documents, heldout_fraction=0.2)
    return directory
