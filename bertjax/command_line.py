"""The settings of a command line: short forms written out, unknown ones refused, config files read.

In: arguments as the shell gave them. Out: files, settings and the rest, each setting once; and the ConfigDict that they
make, or a refusal that names the setting, or the config file with its line. (The settings themselves are imported where
one is given: --help needs none.)
"""

import ast
import os
import pathlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict


def load_config(file: str | None, settings: Sequence[str] = (), base: ConfigDict | None = None) -> ConfigDict:
    """The configuration of `--config=FILE[:VARIANT]` with `--config.NAME=VALUE` settings.

    Args:
      base: what the settings change where there is no file.

    Raises ValueError that names the setting, or the config file with its line.
    """
    _, given, _ = split_settings(settings)
    config = base if file is None else _read(config_file(file))
    for setting in given:
        name, _, text = setting.removeprefix("--config.").partition("=")
        _set(config, name, text)
    return config


def _read(file: str) -> ConfigDict:
    """What the get_config of FILE[:VARIANT] returns."""
    path, *variant = file.split(":", 1)
    if not path:
        raise ValueError("--config= names no file; try --config=configs/demo.py")
    names: dict[str, Any] = {"__name__": "config", "__file__": path}
    try:
        exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), names)
        config = names["get_config"](*variant)
    except Exception as error:  # a config file is a program, which may raise anything
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            lines, told = [error.lineno], error.msg
        if lines:
            raise ValueError(f"{path}, line {lines[-1]}: {told}") from error
        if isinstance(error, OSError):
            known = ", ".join(config_names())
            told = f"{error.strerror}; those of the package are --config=bertjax:NAME, NAME one of {known}"
        elif told == "KeyError: 'get_config'":
            told = "it defines no get_config(); see configs/base.py for an example"
        elif told.startswith("TypeError: get_config() "):
            told = "it has no variants: leave out :VARIANT" if variant else "it needs a variant: FILE:VARIANT"
        raise ValueError(f"--config={path}: {told}") from error
    if not isinstance(config, ConfigDict) or "job" not in config:
        raise ValueError(f"--config={file}: get_config() must return the settings; see configs/base.py")
    return config


def group_of(config: ConfigDict, name: str) -> tuple[ConfigDict, str]:
    """The group of settings that holds NAME, and its name there. Raises ValueError for a part of what is no group."""
    *groups, own = name.split(".")
    for part in groups:
        if not isinstance(config := config.get(part), ConfigDict):
            whole = f"{name.partition(f'.{part}.')[0]}.{part}"
            raise ValueError(
                f"there is no {part!r} to set a part of; give all of it, as --config.{whole}=\"{{'PART': VALUE}}\""
            )
    return config, own


def _set(config: ConfigDict, name: str, text: str) -> None:
    """Sets `--config.NAME=TEXT`, read as the type of the value that is there; an option that is new may be anything."""
    group, own = group_of(config, name)
    read, must = _TYPES.get(type(group.get(own)), (_literal, ""))
    try:
        with group.unlocked():
            group[own] = read(text)
    except Exception as error:  # ast has many for what is nested too deeply
        raise ValueError(f"--config.{name}={text}: {must or error}") from None


def _literal(text: str) -> Any:
    """A value as Python writes it, or a text."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def _list(text: str) -> tuple[Any, ...]:
    """A list as Python writes it, or its only entry."""
    value = _literal(text)
    if value == text and text.strip()[:1] in "([{'\"" and ("," in text or " " in text):
        raise ValueError("a list with a mistake")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


_TYPES: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (flags.BooleanParser().parse, "must be true or false"),
    int: (flags.IntegerParser().parse, "must be a whole number"),
    float: (flags.FloatParser().parse, "must be a number"),
    str: (str, ""),
    tuple: (_list, "must be a list, \"('A', 'B')\", or its only entry"),
    ConfigDict: (
        lambda text: ConfigDict(ast.literal_eval(text)),
        "must be a dict, \"{'NAME': VALUE}\"; .NAME=VALUE sets one of its entries",
    ),
}


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """(values of --config, settings as --config.NAME=VALUE, other arguments) of a command line.

    --config.mesh=auto becomes the setting that it means. A setting that is given again, or that what is given later
    contains (task.options of task.options.files), is dropped, as a script's defaults are meant that "$@" follows.

    Raises ValueError for a setting that does not exist or has no value, and a --flagfile that cannot be read.
    """
    try:
        _, *rest = flags.FLAGS.read_flags_from_files(["", *arguments], force_gnu=False)
    except flags.Error as error:
        raise ValueError(str(error)) from None
    files, others = [], []
    given: dict[str, str] = {}  # NAME of config.NAME -> value
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if argument == "--":
            others += [argument, *rest]
            break
        if not argument.startswith("-") or name.split(".")[0] not in ("config", "noconfig"):
            others.append(argument)
            continue
        if name.startswith("noconfig."):
            name, equals, value = name.removeprefix("no"), "=", "false"
        if not equals:
            value = _value_apart(name.removeprefix("config."), rest)
        if (name, value) == ("config.mesh", "auto"):
            name, value = "config.mesh.auto", "true"
        if name != "config":
            from bertjax.config_checks import check_name

            check_name(name.removeprefix("config."))
        if value is None:
            raise ValueError(f"--{name} has no value: write --{name}=VALUE")
        if name == "config":
            files.append(value)
            continue
        given = {old: said for old, said in given.items() if old != name and not old.startswith(f"{name}.")}
        given[name] = value
    return files, [f"--{name}={value}" for name, value in given.items()], others


def _value_apart(name: str, rest: list[str]) -> str | None:
    """The value of a setting without '=': the next argument, which is taken off `rest`; 'true' of
    a switch; None where it is missing.
    """
    from bertjax.config import FREE, Config, walk

    setting = dict(walk(Config)).get(name)
    if setting is not None and isinstance(setting.default, bool):
        said = rest and rest[0].lower() in ("true", "false")
        return rest.pop(0) if said else "true"
    # An option may be a switch; what is made of it is not known here.
    if name.startswith(FREE) and (not rest or rest[0].startswith("--")):
        return "true"
    return rest.pop(0) if rest else None


def config_directory() -> pathlib.Path:
    """Where the experiments are: bertjax/configs in an installed wheel, configs/ in a clone."""
    package = pathlib.Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """The NAMEs of `--config=bertjax:NAME`."""
    return sorted(path.stem for path in config_directory().glob("[!_]*.py"))


def config_file(value: str) -> str:
    """The file, with its variants, that `--config=bertjax:NAME:VARIANTS` means; of others ~ is the home directory.

    Raises ValueError naming the nearest experiment when NAME is unknown.
    """
    package, _, rest = value.partition(":")
    if package != "bertjax":
        return os.path.expanduser(value)
    name, colon, variants = rest.partition(":")
    if name not in config_names():
        from bertjax.config import nearest

        raise ValueError(f"no experiment is called bertjax:{name}.{nearest(name, config_names())}")
    return f"{config_directory() / name}.py{colon}{variants}"


def default_workdir(config: str) -> str:
    """'runs/large-two_phase' for configs/large.py:two_phase."""
    file, _, variants = config.removeprefix("bertjax:").partition(":")
    name = pathlib.Path(file).stem
    return f"runs/{'-'.join(filter(None, (name, variants.replace('=', '').replace(',', '-'))))}"
