"""The command line of a run as text: short forms written out, unknown settings refused.

In: arguments as the shell gave them. Out: those that absl's flags and config_flags understand.
"""

import pathlib
from collections.abc import Sequence

from bertjax.config import check_name, nearest


def expand_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line with its short forms written out.

    --config=bertjax:NAME becomes the file (see config_file), --config.mesh=auto the setting that it
    means. Raises ValueError for an unknown NAME.
    """
    found = list(arguments)
    for i, argument in enumerate(arguments):
        for name in ("--config=", "-config="):
            if argument.startswith(name):
                found[i] = name + config_file(argument.removeprefix(name))
        if i and arguments[i - 1] in ("--config", "-config"):
            found[i] = config_file(argument)
        if argument.lstrip("-") == "config.mesh=auto":
            found[i] = "--config.mesh.auto=True"
    return found


def check_override_names(arguments: list[str]) -> None:
    """Refuses `--config.x.y` for a setting that does not exist, naming the nearest one.

    Args:
      arguments: the command line without the program's name.
    """
    for argument in arguments:
        if argument.startswith("--config."):
            check_name(argument.removeprefix("--config.").split("=", 1)[0])


def config_directory() -> pathlib.Path:
    """Where the experiments are: bertjax/configs in an installed wheel, configs/ in a clone."""
    package = pathlib.Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """The NAMEs of `--config=bertjax:NAME`."""
    return sorted(path.stem for path in config_directory().glob("[!_]*.py"))


def config_file(value: str) -> str:
    """The file, with its variants, that `--config=bertjax:NAME:VARIANTS` means; others unchanged.

    Raises ValueError naming the nearest experiment when NAME is unknown.
    """
    package, _, rest = value.partition(":")
    if package != "bertjax":
        return value
    name, colon, variants = rest.partition(":")
    if name not in config_names():
        raise ValueError(f"no experiment is called bertjax:{name}.{nearest(name, config_names())}")
    return f"{config_directory() / name}.py{colon}{variants}"
