"""The settings of a command line: short forms written out, unknown ones refused, config files read.

In: arguments as the shell gave them. Out: files, settings and the rest, each setting once; and the ConfigDict that they
make, or a refusal that names the setting, or the config file with its line. (The settings themselves are imported where
one is given: --help needs none.)
"""

import ast
import os
import pathlib
import re
import traceback
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags


def load_config(
    file: str | None, settings: Sequence[str] = (), base: ml_collections.ConfigDict | None = None
) -> ml_collections.ConfigDict:
    """The configuration of `--config=FILE[:VARIANT]` with `--config.NAME=VALUE` settings.

    Args:
      base: what the settings change where there is no file.

    Raises ValueError that names the setting, or the config file with its line.
    """
    _, given, others = split_settings(settings)
    given = list(map(_with_one_text, given))
    arguments = ["", *([f"--config={config_file(file)}"] if file is not None else []), *given, *others]
    values = flags.FlagValues()
    # Options of a task or an optimizer may be new names; all others are checked.
    how = dict(flag_values=values, sys_argv=arguments, lock_config=False, accept_new_attributes=True)
    try:
        if file is None:
            config_flags.DEFINE_config_dict("config", base, **how)
        else:
            config_flags.DEFINE_config_file("config", **how)
        values(arguments)
        config = values.config  # a file that cannot be read shows only at its first use
        if not isinstance(config, ml_collections.ConfigDict) or "job" not in config:
            raise ValueError(f"--config={file}: get_config() must return the settings; see configs/base.py")
        return config
    except Exception as error:  # a config file is a program, which may raise anything
        raise ValueError(_complaint(error, arguments)) from error


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


def _with_one_text(setting: str) -> str:
    """The setting; where it is a list, and is given as one text of several words, as absl reads such a list."""
    name, _, value = setting.partition("=")
    name = name.removeprefix("--config.")
    if " " not in value.strip() or value.strip()[0] in "([{'\"":
        return setting
    from bertjax.config import Config, walk

    lists = {one for one, found in walk(Config) if isinstance(found.default, tuple)} | {"task.options.text"}
    if name not in lists:
        return setting
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return f"--config.{name}={(value,)!r}"
    return setting


def _complaint(error: Exception, arguments: Sequence[str]) -> str:
    """What is wrong with a command line that absl or a config file does not take."""
    files = [a.removeprefix("--config=").split(":")[0] for a in arguments if a.startswith("--config=")]
    places = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    if isinstance(error, KeyError) and not places & {*files}:  # a part of an option that the config does not have
        name = str(error.args[0]).strip("'\"")
        whole = next((a.partition(f".{name}.")[0] + f".{name}" for a in arguments if f".{name}." in a), name)
        return f"there is no {name!r} to set a part of; give all of it, as {whole}=\"{{'PART': VALUE}}\""
    if not files:
        return _plainly(error)
    file = files[0]
    if not file:
        return "--config= names no file; try --config=configs/demo.py"
    if not pathlib.Path(file).exists():
        return (
            f"--config={file}: No such file or directory; an experiment that came with the "
            f"package is --config=bertjax:NAME, NAME one of {', '.join(config_names())}"
        )
    causes = [error]  # absl and config_flags wrap what the file has raised
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)
    for cause in reversed(causes):
        if isinstance(cause, SyntaxError) and cause.filename == file:
            return f"{file}, line {cause.lineno}: {cause.msg}"
        lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
        if lines and not isinstance(cause, flags.Error):
            kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
            return f"{file}, line {lines[-1]}: {kind}{cause}"
        if isinstance(cause, OSError) and cause.filename == file:
            return f"--config={file}: {cause.strerror}"
    if isinstance(causes[-1], TypeError) and str(causes[-1]).startswith("get_config() "):  # its variant
        has = " takes 0 " not in str(causes[-1])
        remedy = "needs a variant: FILE:VARIANT" if has else "has no variants: leave out what follows the colon"
        return f"--config={file} {remedy}"
    if "has no attribute 'get_config'" in str(error):
        return f"--config={file} defines no get_config(); see configs/base.py for an example"
    return _plainly(error)


def _plainly(error: Exception) -> str:
    """The message of absl about a value, in plain words where it quotes Python's conversion."""
    text = str(error)
    for words, meaning in (
        (r"\('Non-boolean argument to boolean flag', .*\)", "must be true or false"),
        (r"invalid literal for int\(\) .*", "must be a whole number"),
        (r"could not convert string to float: .*", "must be a number"),
        (
            r"Failed to parse .* as a ConfigDict: .*",
            "must be a dict, \"{'NAME': VALUE}\"; .NAME=VALUE sets one of its entries",
        ),
    ):
        text = re.sub(words, meaning, text)
    return text


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
    return "/".join(("runs", "-".join(filter(None, (name, variants.replace("=", "").replace(",", "-"))))))
