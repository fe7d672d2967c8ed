"""The `bertjax` command (also `python -m bertjax`): trains, or runs one of the tools.

    bertjax --config=bertjax:demo --workdir=runs/demo     a run (bertjax/main.py)
    bertjax build_corpus ...       python -m bertjax.tools.build_corpus ...

A tool is any module of `bertjax/tools` that can be run; its line in `bertjax --help` is the first
line of its docstring, read without importing it.
"""

import ast
import importlib.util
import pathlib
import pkgutil
import runpy
import sys

from bertjax.interruption import ended_by_ctrl_c, leave_on_signals, refusals

with ended_by_ctrl_c():
    import bertjax.tools
    from bertjax.command_line import config_names
    from bertjax.config import nearest


def tools() -> dict[str, str]:
    """{name: what it does, in one line} of every tool, in alphabetic order."""
    found = {}
    for module in pkgutil.iter_modules(bertjax.tools.__path__):
        path = pathlib.Path(bertjax.tools.__path__[0]) / module.name
        path = path / "__main__.py" if module.ispkg else path.with_suffix(".py")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if module.ispkg and text or 'if __name__ == "__main__"' in text:
            first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
            found[module.name] = first.removeprefix(f"python -m bertjax.tools.{module.name}: ")
    return dict(sorted(found.items()))


def usage() -> str:
    """The text of `bertjax --help`."""
    from bertjax.main import parser

    known = tools()
    width = max(map(len, known))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, text in known.items())
    return f"""\
Pre-train BERT from scratch and fine-tune it, in JAX/Flax.

  bertjax --config=FILE[:VARIANT] [--workdir=DIR] [--config.NAME=VALUE ...]
  bertjax TOOL [--flag=value ...]

FILE is a file of your own, or bertjax:NAME for one that comes with the package:
  {", ".join(config_names())}

Tools; `bertjax TOOL --help` says more:
{lines}

Flags of a run; --help_config prints every --config.NAME with its meaning and default:
{parser().format_help().partition("options:")[2].strip(chr(10))}"""


def run() -> None:
    """Entry point of the console script."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first in ("--help", "-h", "help"):
        with refusals("bertjax"):
            print(usage())
    elif first.startswith("-"):
        from bertjax import main

        main.run()
    elif first in (known := tools()):
        # As `python -m`: a fresh __main__ which processes that a tool spawns can find again.
        sys.argv = sys.argv[1:]
        leave_on_signals()
        spec = importlib.util.find_spec(f"bertjax.tools.{first}")
        runpy.run_module(spec.name, run_name="__main__", alter_sys=True)
    else:
        print(f"bertjax: no tool is called {first!r}.{nearest(first, list(known))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
