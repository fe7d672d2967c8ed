"""Prints launch/constraints.txt: the versions in this environment of all that bertjax depends on.

    python launch/constraints.py > launch/constraints.txt     where the tests have passed

Follows install_requires and the [test] and [notebooks] extras of the installed bertjax. What the
[cuda] and [tpu] extras add is tied to jax's own version by jax; torch is left to its user.
"""

import importlib.metadata
import platform

from packaging.requirements import Requirement


def pinned(name: str, extras: set[str], found: dict[str, str]) -> None:
    """Adds `name`, which is installed, and what it requires for `extras` to `found`."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # of another platform, or optional
    key = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
    if key in found and not extras:
        return
    found[key] = distribution.version
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            pinned(requirement.name, requirement.extras, found)


def main() -> None:
    found: dict[str, str] = {}
    pinned("bertjax", {"test", "notebooks"}, found)
    for name in ("bertjax", "setuptools"):  # itself; the build environment's affair
        found.pop(name, None)
    print(f"# One set of versions that was tested together (Python {platform.python_version()}):")
    print("# pip install -c launch/constraints.txt -e .        made by launch/constraints.py")
    for name, version in sorted(found.items()):
        print(f"{name}=={version.split('+')[0]}")


if __name__ == "__main__":
    main()
