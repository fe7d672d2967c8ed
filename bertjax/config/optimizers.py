"""Optimizers of optax by name: which function config.optimizer means, and with which arguments."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from bertjax.config.setting import did_you_mean
from bertjax.config.training import OptimizerSettings

OWN_OPTIMIZERS = ("adamw", "lamb", "stableadamw")
# Arguments that have another place, and which.
ELSEWHERE = {
    "learning_rate": "config.optimizer.learning_rate",
    **dict.fromkeys(("weight_decay", "weight_decay_rate", "adam_weight_decay"), "config.optimizer.weight_decay"),
    **dict.fromkeys(("mask", "weight_decay_mask"), "config.optimizer.no_decay"),
    "muon_weight_dimension_numbers": "Muon trains all matrices but embeddings",
}


def optax_factory(settings: OptimizerSettings) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function optax.NAME (or optax.contrib.NAME) and the arguments that config.optimizer.options give it.

    Raises ValueError for an unknown name or argument, with the nearest one and what there is.
    """
    import optax  # late: it imports jax

    factories = {
        f"{prefix}.{name}": function
        for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib))
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if "learning_rate" in inspect.signature(function).parameters and not name.startswith(("_", "scale_by_"))
    }
    if "schedule_free" in settings.name:
        raise ValueError(
            f"config.optimizer.name={settings.name!r} is not supported: the weights that it evaluates are not those "
            "that it trains"
        )
    if settings.name not in factories:
        names = {name: name for name in OWN_OPTIMIZERS} if "optax" not in settings.name else {}
        names = {name.rsplit(".", 1)[-1]: name for name in factories} | names
        close = difflib.get_close_matches(settings.name.rsplit(".", 1)[-1], names, 3)
        close.sort(key=lambda name: "." in names[name])
        raise ValueError(
            f"config.optimizer.name={settings.name!r} is unknown."
            + (f" Did you mean {' or '.join(repr(names[name]) for name in close)}?" if close else "")
            + f" Valid: {', '.join((*OWN_OPTIMIZERS, *factories))}." * (not close)
        )
    takes = dict(inspect.signature(factories[settings.name]).parameters)
    own = {name: parameter for name, parameter in takes.items() if name not in ELSEWHERE}
    signature = ", ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in own.items()
    )
    for name, value in settings.options.items():
        if name in takes and name in ELSEWHERE:
            raise ValueError(f"config.optimizer.options.{name} is set elsewhere: {ELSEWHERE[name]}")
        if name not in takes:
            raise ValueError(
                f"config.optimizer.options.{name}: {settings.name} has no argument {name!r}."
                f"{did_you_mean(name, list(own))} It takes ({signature})"
            )
        if isinstance(takes[name].default, bool) and not isinstance(value, bool):  # any text would be true
            raise ValueError(f"config.optimizer.options.{name}={value!r} must be true or false")
    missing = [name for name, p in own.items() if p.default is p.empty and name not in settings.options]
    if missing:
        raise ValueError(f"{settings.name} needs --config.optimizer.options.{missing[0]}=VALUE; it takes ({signature})")
    return factories[settings.name], dict(settings.options)


def check_optimizer(settings: OptimizerSettings, job: str) -> None:
    """Raises ValueError for an optimizer that cannot be made, and for settings that it does not have."""
    if settings.name in OWN_OPTIMIZERS:
        if settings.options:
            raise ValueError(
                f"config.optimizer.options.{next(iter(settings.options))} has no effect on config.optimizer.name="
                f"{settings.name!r}: options are the arguments of an optax optimizer; {', '.join(OWN_OPTIMIZERS)} have "
                "b1, b2, eps and bias_correction"
            )
        return
    optax_factory(settings)
    # Fine-tuning's recipe turns bias_correction on, which says nothing about other optimizers.
    for name in ("b1", "b2", "eps", *(["bias_correction"] if job == "pretrain" else [])):
        value, default = getattr(settings, name), getattr(OptimizerSettings, name)
        if value != default:
            raise ValueError(
                f"config.optimizer.{name}={value!r} has no effect on config.optimizer.name={settings.name!r}, whose "
                f"arguments are config.optimizer.options; leave it at {default}"
            )
