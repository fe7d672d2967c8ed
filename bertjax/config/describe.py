"""All settings as text: what `--help_config` prints, and the page docs/settings.md."""

import dataclasses
from typing import Any

from bertjax.config.config import Config
from bertjax.config.setting import Range, Setting, walk
from bertjax.markdown import table

HEAD = """\
# Settings

Made by `python -m bertjax.config > docs/settings.md`. A config file sets them as `config.NAME = VALUE`; on the
command line they are `--config.NAME=VALUE`. `python -m bertjax.main --help_config` prints the same list.
"""


def describe() -> str:
    """All settings with defaults, meaning and source, as `--help_config` prints them."""
    lines = []
    for path, setting in walk(Config):
        unit = f" ({setting.unit})" if setting.unit else ""
        source = f" [{setting.source}]" if setting.source else ""
        lines.append(f"--config.{path}={setting.default!r}\n    {setting.help}{unit}{source}{_unused(setting)}")
    return "\n".join(lines)


def page() -> str:
    """docs/settings.md: a table a section."""
    parts = [HEAD, *_section("The run", Config)]
    for field in dataclasses.fields(Config):
        if kind := field.metadata.get("section"):
            parts += _section(kind.__doc__.split("\n")[0].rstrip("."), kind, f"{field.name}.")
    return "\n".join(parts)


def _section(title: str, kind: type, prefix: str = "") -> list[str]:
    rows = [
        (
            f"`{prefix}{name}`",
            f"`{setting.default!r}`",
            setting.help + _unused(setting),
            setting.unit,
            _may_be(setting),
            setting.source,
        )
        for name, setting in walk(kind)
        if "." not in name
    ]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"## {title}\n", table(("setting", "default", "meaning", "unit", "may be", "source"), cells), ""]


def _unused(setting: Setting) -> str:
    job, instead = setting.unused or ("", "")  # pre-training has no use for config.task as a whole, as its name says
    return f". Not for job={job}: {instead}" if job == "finetune" else ""


def _may_be(setting: Setting) -> str:
    if isinstance(setting.allowed, Range):
        return setting.allowed.text
    if setting.allowed:
        return ", ".join(value or "''" for value in setting.allowed)
    kinds: dict[type, Any] = {bool: "True, False", int: "whole number", str: "text", tuple: "list", dict: "by name"}
    return kinds.get(type(setting.default), "number")
