"""Runs a benchmark: python -m bertjax.tools.bench [NAME] [options of the benchmark].

A benchmark is a module of this package whose `main` takes the arguments after its name; without a
name it is `step`. `python -m bertjax.tools.bench NAME --help` shows the options of one.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys

from bertjax.config import nearest
from bertjax.interruption import refusals

DEFAULT = "step"


def benchmarks() -> dict[str, str]:
    """Name -> first line of the docstring; found without importing anything."""
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        mains = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args
        ]
        if mains and path.stem != "__main__":
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def main(argv: list[str]) -> None:
    known = benchmarks()
    if argv and argv[0] in ("-h", "--help"):
        width = max(map(len, known))
        lines = (f"  {name:{width}}  {line}" for name, line in known.items())
        print(f"{__doc__}\n" + "\n".join(lines))
        return
    # What follows a benchmark's name may be workloads (base-128x256), which are all the words that
    # `step` takes: a word without their hyphen was meant to be a name.
    if argv and argv[0] not in known and "-" not in argv[0]:
        raise SystemExit(
            f"bench: no benchmark is called {argv[0]!r}.{nearest(argv[0], [*known])} "
            "See python -m bertjax.tools.bench --help"
        )
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in known else (DEFAULT, argv)
    importlib.import_module(f"bertjax.tools.bench.{name}").main(rest)


if __name__ == "__main__":
    with refusals("bench"):
        main(sys.argv[1:])
