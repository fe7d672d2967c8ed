"""Which code made a result: the version and, in a git checkout, the commit; a digest of it all."""

import functools
import pathlib
import time

__version__ = "0.1.0"
IMPORTED = time.monotonic()  # with the package, before everything else of it
_PACKAGE = pathlib.Path(__file__).resolve().parent


@functools.cache
def source_version() -> str:
    """'0.1.0', or '0.1.0 (commit 6771ec9a12)' from a git checkout, '-dirty' if files differ."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return __version__
    import subprocess  # late, as hashlib: `import bertjax` reads this module

    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else's
        return __version__
    return f"{__version__} (commit {commit})"


@functools.cache
def source_digest() -> str:
    """The first digits of a SHA-256 over every Python file of the package, with its name."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
