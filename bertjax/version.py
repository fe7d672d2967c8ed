"""Which code made a result: the version and, in a git checkout, the commit."""

from __future__ import annotations

import functools
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
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10",
             "--exclude=*"],
            check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else's
        return bertjax.__version__
    return f"{bertjax.__version__} (commit {commit})"
