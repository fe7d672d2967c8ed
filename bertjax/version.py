"""Which code made a result: the version and, in a git checkout, the commit; a digest of it all."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import subprocess

import bertjax


@functools.cache
def source_version() -> str:
    """'0.1.0', or '0.1.0 (commit 6771ec9a12)' from a git checkout, '-dirty' if files differ."""
    root = pathlib.Path(bertjax.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return bertjax.__version__
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else's
        return bertjax.__version__
    return f"{bertjax.__version__} (commit {commit})"


@functools.cache
def source_digest() -> str:
    """The first digits of a SHA-256 over every Python file of the package, with its name."""
    root = pathlib.Path(bertjax.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
