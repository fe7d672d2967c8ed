"""What the tools share of their command lines: the parser, refusals, wildcards, booleans."""

import argparse
import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax.interruption import until_the_reader_leaves


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m bertjax.tools.NAME`, whose help is the docstring of its module."""
    return argparse.ArgumentParser(
        f"python -m bertjax.tools.{name}", description=doc, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """What a user can mend (ValueError, OSError) ends the tool with one line and exit code 1."""
    try:
        with until_the_reader_leaves():
            yield
    except (ValueError, OSError) as error:
        raise SystemExit(f"{name}: {error}") from error


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
          ) -> argparse.Namespace:
    """The flags (of sys.argv by default); SystemExit for what is none, which a wildcard explains.
    """
    flags, left_over = parser.parse_known_args(arguments)
    if left_over:
        positional = [a for a in left_over if not a.startswith("-")]
        raise SystemExit(
            f"left-over arguments: {' '.join(left_over[:5])}{' ...' * (len(left_over) > 5)}\n" + (
                "The shell has expanded a wildcard, so only its first file would be read. Quote "
                "the wildcard: --input='corpus/*.txt'" if positional else
                f"No such option{_meant(parser, left_over[0])}; see --help"))
    return flags


def _meant(parser: argparse.ArgumentParser, unknown: str) -> str:
    """'. Did you mean --input?' where an option has a name like that."""
    known = [name for action in parser._actions for name in action.option_strings]
    close = difflib.get_close_matches(unknown.partition("=")[0], known, n=1, cutoff=0.7)
    return f". Did you mean {close[0]}?" if close else ""


def boolean(text: str) -> bool:
    """'true' or 'false' in the usual spellings; anything else is refused."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def add_boolean(parser: argparse.ArgumentParser, name: str, default: Any, help: str) -> None:
    """Adds `--name`, `--name=true|false` and `--no-name` (and `--noname`, as absl spells it)."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(f"--{name}", type=boolean, nargs="?", const=True, default=default, help=help)
    group.add_argument(f"--no-{name}", f"--no{name}", dest=name, action="store_false",
                       default=default, help=argparse.SUPPRESS)
