"""What a setting is: a field of a frozen dataclass with its meaning, unit, source and what it may be."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Range:
    """Which numbers a setting may be, as a test and in words."""

    holds: Callable[[float], bool]  # False for NaN, as every comparison with it
    text: str


AT_LEAST_1 = Range(lambda x: x >= 1, "at least 1")
AT_LEAST_0 = Range(lambda x: x >= 0, "at least 0")
SEED = Range(lambda x: 0 <= x < 2**31, "from 0 to 2,147,483,647")  # fits an int32
POSITIVE = Range(lambda x: x > 0, "positive")
SMALL = Range(lambda x: 0 < x < 1e6, "positive and below a million")
POSITIVE_INTEGER = Range(lambda x: isinstance(x, int) and 0 < x < 2**31, "a positive integer below 2**31")
COUNT = Range(lambda x: isinstance(x, int) and 0 <= x < 2**31, "a whole number from 0 to 2**31 - 1")
SHARE = Range(lambda x: 0 <= x <= 1, "a probability (0 to 1)")
POSITIVE_SHARE = Range(lambda x: 0 < x <= 1, "a share above 0 and up to 1")
BELOW_ONE = Range(lambda x: 0 <= x < 1, "at least 0 and below 1")

Allowed = Range | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting; `allowed`: a Range for numbers, or the names to choose from; None = whatever has the type."""

    default: Any
    help: str
    allowed: Allowed
    source: str  # of the default
    unit: str
    unused: tuple[str, str] | None = None  # a job on which it has no effect, and what that job has instead


def setting(
    default: Any,
    help: str,
    allowed: Allowed = None,
    *,
    source: str = "",
    unit: str = "",
    unused: tuple[str, str] | None = None,
) -> Any:
    """The field of a section; see Setting."""
    metadata = {"setting": Setting(default, help, allowed, source, unit, unused)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, unused: tuple[str, str] | None = None) -> Any:
    """The field of Config that holds a section; `unused` is that of all its settings, see Setting."""
    return dataclasses.field(default_factory=kind, metadata={"section": kind, "unused": unused})


@functools.cache
def walk(kind: type) -> tuple[tuple[str, Setting], ...]:
    """('optimizer.learning_rate', its Setting) of every setting of a dataclass, in order."""
    found = []
    for field in dataclasses.fields(kind):
        if "section" in field.metadata:
            for name, setting in walk(field.metadata["section"]):
                of_section = dataclasses.replace(setting, unused=setting.unused or field.metadata["unused"])
                found.append((f"{field.name}.{name}", of_section))
        elif "setting" in field.metadata:
            found.append((field.name, field.metadata["setting"]))
    return tuple(found)


def check(name: str, value: Any, allowed: Allowed) -> None:
    """Raises ValueError for a value that a setting may not have."""
    if isinstance(allowed, Range):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isinf(value):
            raise ValueError(f"{name}={value!r} must be finite")
        if not number or not allowed.holds(value):
            raise ValueError(f"{name}={value!r:.40} must be {allowed.text}")
    elif allowed and value not in allowed:
        raise ValueError(f"{name}={value!r:.80} is unknown.{nearest(str(value), list(allowed))}")


def check_all(settings: Any) -> None:
    """`check` of every setting of a dataclass; None, as a default, is whatever it means there."""
    for name, field in walk(type(settings)):
        if (value := getattr(settings, name)) is not None:
            check(name, value, field.allowed)


def nearest(name: str, valid: list[str]) -> str:
    """' Did you mean ...?' for an unknown name, or the list of valid ones."""
    return did_you_mean(name, valid) or f" Valid: {', '.join(name or repr(name) for name in valid)}."


def did_you_mean(name: str, valid: list[str]) -> str:
    """' Did you mean ...?' for an unknown name, '' where no valid one is like it."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
