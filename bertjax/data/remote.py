"""Token stores on object storage: training maps a store into memory, so it is copied here first."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

from bertjax.data.store import parse_manifest
from bertjax.formats.checkpoint import files_under, resolve_directory
from bertjax.formats.files import make_once, whole_directory

CACHE = "~/.cache/bertjax/stores"
_AT_ONCE = 16  # files copied side by side: one alone does not fill the network


def local_store(url: str, cache: str = "") -> Path:
    """A copy on this machine of the token store at `url` (gs://...), whole or not there, in the directory `cache` ('' =
    CACHE). It is found again by the store's name and content. The path of a store that is on this machine comes back.

    Raises:
      ValueError: no store there, a damaged one, or the package that reads it is not installed.
    """
    if "://" not in url:
        return Path(url)
    source = resolve_directory(url)
    try:
        content = (source / "manifest.json").read_bytes()
    except ImportError as error:
        raise ValueError(f"{url}: {error} (pip install gcsfs, which bertjax[tpu] brings)") from None
    except FileNotFoundError:
        raise ValueError(
            f"{url}: no token store here (no manifest.json); make one with python -m bertjax.tools.build_corpus, and "
            "copy it there"
        ) from None
    manifest = parse_manifest(content, url)
    target = Path(cache or CACHE).expanduser() / f"{source.name}-{manifest['content_hash'][:16]}"

    def copy_all(target: Path) -> None:
        print(f"copying {url} to {target}: a store is mapped into memory", flush=True)
        with whole_directory(target, overwrite=True) as directory:

            def copy(path: epath.Path) -> None:
                copied = directory / path.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                with path.open("rb") as read, copied.open("wb") as write:
                    shutil.copyfileobj(read, write, 1 << 22)

            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(copy, files_under(source)))

    def is_there(target: Path) -> bool:
        """Also where the same ids were built again with another tokenizer."""
        path = target / "manifest.json"
        return path.exists() and path.read_bytes() == content

    return make_once(target, copy_all, f"a copy of {url}", is_there)
