"""What the tools share of their command lines: the parser, refusals, values of flags."""

import argparse
import dataclasses
import difflib
import functools
import logging
import os
import pathlib
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from bertjax.formats.files import on_disk, parse_json
from bertjax.interruption import refusals as refusals
from bertjax.interruption import refuse

if TYPE_CHECKING:
    from bertjax.config import Setting

# Names of one meaning: a flag that a tool does not have is answered by the one that it has.
SYNONYMS = (
    {"out", "output", "output_dir", "to"},
    {"model", "from", "init_from", "model_name_or_path"},
    {"input", "file", "text", "data"},
    {"batch_size", "bs"},
    {"seeds", "seed"},
    {"max_length", "seq_length", "max_seq_length"},
    {"tokenizer", "vocab", "vocab_file"},
    {"vocab_size", "size"},
    {"store", "corpus"},
    {"workdir", "output_dir", "outdir", "logdir", "save_dir"},
    {"config", "cfg"},
    {"topology", "device", "devices"},
)


class Parser(argparse.ArgumentParser):
    """argparse's, whose refusals are one line that names the remedy, with exit code 2."""

    takes_settings = False  # and then: see add_settings
    base: Callable[[], Any] | None = None
    short: Mapping[str, str] = {}

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's; a value is N, X or TEXT in the help unless its name says more. A whole number is at least
        `least`, 1 by default. What is `written` must be on a local disk: --out and --output, unless they say no."""
        takes_value = options.get("action", "store") in ("store", "append") and "choices" not in options
        if takes_value and names[0].startswith("-"):
            kinds = {int: "N", float: "X", boolean: "true|false", json_object: "JSON"}
            options.setdefault("metavar", kinds.get(options.get("type"), "TEXT"))
        if options.get("type") is int:
            options["type"] = functools.partial(_at_least, options.pop("least", 1))
        if options.pop("written", names[0] in ("--out", "--output") or options.get("type") is pathlib.Path):
            options["type"] = functools.partial(_local, options.get("type", str))
        return super().add_argument(*names, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The flags (of sys.argv by default). Of a flag that is given twice the last one counts."""
        ours = logging.getLogger("bertjax")
        if not (ours.handlers or logging.getLogger().handlers):
            ours.addHandler(logging.StreamHandler())  # plain lines, whatever a library sets up for the root later
            ours.propagate = False
        args, files, settings = list(sys.argv[1:] if args is None else args), [], []
        if self.takes_settings and not {"-h", "--help"} & {*args}:
            from bertjax.command_line import split_settings  # late: most tools have no settings

            with refusals(self.name, 2):
                files, settings, args = split_settings(args)
        own = args[: args.index("--")] if "--" in args else args  # what follows belongs to another program
        given = [argument for argument in own if re.match("--?[a-zA-Z][^ =]*(=|$)", argument)]
        unknown = [argument for argument in given if argument.partition("=")[0] not in self._option_string_actions]
        if unknown and not {"-h", "--help"} & {*args}:  # before argparse misses those that it stands for
            self.error(f"no such flag: {unknown[0]}{self._meant(unknown[0])}")
        found, left_over = self.parse_known_args(args, namespace)
        if not left_over:
            if self.takes_settings:
                self._read_settings(found, files, settings)
            return found
        if self.takes_settings and left_over[0].endswith(".py"):
            self.error(f"left-over argument: {left_over[0]}. Did you mean --config={left_over[0]}?")
        remedy = "write settings as --config.NAME=VALUE, and q" if self.takes_settings else "q"
        self.error(
            f"left-over arguments: {' '.join(left_over[:5])}{' ...' * (len(left_over) > 5)}; {remedy}uote wildcards, "
            "which the shell expands: --input='corpus/*.txt'"
        )

    @property
    def name(self) -> str:
        """The program's, as it begins its refusals."""
        name = self.prog.rpartition(".")[2]
        return "bertjax" if name == "main" else name

    def _read_settings(self, found: Any, files: list[str], settings: list[str]) -> None:
        """Adds what `add_settings` promises to the flags."""
        from bertjax.command_line import load_config

        short = {name: getattr(found, flag) for flag, name in self.short.items() if getattr(found, flag) is not None}
        settings = [*settings, *(f"--config.{name}={value}" for name, value in short.items())]
        found.files, found.settings = files, settings
        found.given = {setting.removeprefix("--config.").partition("=")[0] for setting in settings}
        if self.base is not None:
            with refusals(self.name, 2):
                found.config = load_config(files[-1] if files else None, settings, self.base())

    def error(self, message: str) -> NoReturn:
        """Ends the program with this line."""
        hint = "" if "Did you mean" in message or "left-over" in message else "; --help lists the flags"
        refuse(self.name, message + hint, 2)

    def _meant(self, unknown: str) -> str:
        """'. Did you mean --input?' for a flag with a similar name or the same meaning."""
        known = list(self._option_string_actions)
        name = unknown.partition("=")[0]
        alike = [f"--{other}" for names in SYNONYMS if name.lstrip("-") in names for other in sorted(names)]
        close = [flag for flag in alike if flag in known] or difflib.get_close_matches(
            name.replace("-", "_").replace("__", "--", 1), known, 1, 0.7
        )
        if not close and self.takes_settings:
            from bertjax.config_checks import meant

            setting = meant(name.lstrip("-"))
            close = [f"--config.{setting}"] if setting else []
        return f". Did you mean {close[0]}?" if close else ""


def make_parser(name: str, doc: str | None, package: str = "bertjax.tools") -> Parser:
    """The parser of `python -m PACKAGE.NAME`, whose help is the docstring of its module."""
    command = f"python -m {package}.{name}"
    return Parser(
        command,
        f"{command} [flags]",
        doc,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100),
    )


def add_input(parser: Parser, required: bool = False) -> None:
    """Adds --input, the text files of a corpus."""
    text = "files; wildcards in quotes; commas or repetition for several; tfds:NAME/CONFIG:SPLIT; hf:NAME,CONFIG:SPLIT"
    parser.add_argument("--input", type=file_or_stdin, action="append", required=required, metavar="PATTERN", help=text)


def add_settings(parser: Parser, base: Callable[[], Any] | None = None, short: Mapping[str, str] | None = None) -> None:
    """Lets a tool take --config=FILE and --config.NAME=VALUE as bertjax.main does.

    Beside the flags there are then `files` and `settings` as text, and `given`, the names of the settings.

    Args:
      base: makes the ConfigDict of a command line without --config=FILE, and there is the flag `config`, a ConfigDict.
      short: {flag: the setting that it is short for}.
    """
    parser.takes_settings, parser.base, parser.short = True, base, short or {}
    text = (
        "experiment: a file of configs/, with variants after a colon (configs/large.py:two_phase), or bertjax:NAME for "
        "one that came with the package; any setting can be given, as --config.NAME=VALUE"
    )
    parser.add_argument("--config", metavar="FILE", help=text)
    if short:
        from bertjax.config import Config, walk

        known = dict(walk(Config))
        for flag, name in short.items():
            help = f"short for --config.{name}: {known[name].help}"
            _add_flag(parser, flag, known[name], type(known[name].default), None, help)


def require_used(given: Iterable[str], used: Sequence[str], what: str) -> None:
    """Raises ValueError where a given setting has no effect; `used` are the sections and names of those that have."""
    if others := sorted(name for name in given if not name.startswith(tuple(used))):
        known = ", ".join(f"config.{name}".rstrip(".") for name in used)
        raise ValueError(f"--config.{others[0]} has no effect on {what}, which reads {known}")


def require_other_file(file: str | None, out: str | None) -> None:
    """Raises ValueError if --out is the --file that is read, which it would replace."""
    if file and out and os.path.exists(out) and os.path.exists(file) and os.path.samefile(file, out):
        raise ValueError(f"--out={out} is the --file that is read, and would be lost; name another one")


def _add_flag(parser: Parser, flag: str, setting: "Setting", kind: type, default: Any, help: str) -> None:
    """Adds a flag for a setting whose values are of this kind."""
    help = help.replace("%", "%%")
    if kind is bool:
        add_boolean(parser, flag, default, help)
    elif isinstance(setting.allowed, tuple):
        parser.add_argument(f"--{flag}", default=default, choices=setting.allowed, help=help)
    else:
        parser.add_argument(f"--{flag}", default=default, type=json_object if kind is dict else kind, help=help)


def add_fields(parser: Parser, kind: type, *names: str) -> None:
    """Adds a flag for each setting of a dataclass, or for those of these names; see fields_of."""
    from bertjax.config import walk

    for name, setting in walk(kind):
        if not names or name in names:
            hint = typing.get_type_hints(kind)[name]  # int, or int | None
            told = "" if setting.default in (None, False) else f" (default {setting.default})"
            _add_flag(parser, name, setting, (*typing.get_args(hint), hint)[0], setting.default, setting.help + told)


def fields_of(flags: Any, kind: type) -> dict[str, Any]:
    """{name: value} of the flags that `add_fields` has added."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind) if hasattr(flags, field.name)}


def _local(kind: Callable[[str], Any], text: str) -> Any:
    """The value of a flag that names what is written; without this gs://BUCKET would be a directory called gs:."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is not on a local disk; `gcloud storage cp -r` copies from and to a bucket"
        )
    return kind(text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} must be at least {least}")
    return number


def file_or_stdin(text: str) -> str:
    """The value of a flag that names what is read: - is the standard input."""
    return "/dev/stdin" if text == "-" else read(text)


def read(text: str) -> str:
    """The value of a flag that names what is read from a local disk."""
    try:
        return str(on_disk(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_object(text: str) -> dict[str, Any]:
    """A value of a flag that is a JSON object."""
    problem = ""
    try:
        if isinstance(found := parse_json(text, "it"), dict):
            return found
    except ValueError as error:
        problem = f"{error}; "
    raise argparse.ArgumentTypeError(f"{problem}must be a JSON object: '{{\"NAME\": VALUE}}'")


def boolean(text: str) -> bool:
    """'true' or 'false' in the usual spellings; anything else is refused."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def add_boolean(parser: Parser, name: str, default: Any, help: str) -> None:
    """Adds `--name`, `--name=true|false` and `--no-name` (and `--noname`, as absl spells it)."""
    parser.add_argument(f"--{name}", type=boolean, nargs="?", const=True, default=default, help=help)
    parser.add_argument(
        f"--no-{name}", f"--no{name}", dest=name, action="store_false", default=default, help=argparse.SUPPRESS
    )
