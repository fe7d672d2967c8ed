"""Plans a run before a machine is rented: memory, collectives, time, cost. Needs no TPU.

    python -m bertjax.tools.plan --config=configs/large.py:v5e_16 --topology=v5e:4x4
    python -m bertjax.tools.plan --config=configs/large.py --topology=v4-32 --search
    python -m bertjax.tools.plan --config=configs/demo.py --topology=local

The training step of the configuration is compiled for the topology (minutes; --quick stops once
memory is assigned), and the compiler's numbers are printed. For TPUs libtpu must be installed, the
release that belongs to jax. --search tries other meshes, remat policies and accumulations, prunes
them by arithmetic, and ranks what fits. Exit code 1: it does not fit.
"""

import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from bertjax import config as settings
from bertjax.command_line import check_override_names, expand_overrides
from bertjax.config_checks import check_config
from bertjax.tools.plan import chips, page, search
from bertjax.tools.plan.compilation import Cache, compile_stage
from bertjax.tools.plan.cost import Cost, cost

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Experiment: a file of configs/, with variants after a colon.")
_TOPOLOGY = flags.DEFINE_string(
    "topology", "local", "Where it is to run: v5e:4x4, v4-32, ... or local = this machine.")
_QUICK = flags.DEFINE_bool(
    "quick", False, "Stop the compiler once it has assigned memory: minutes faster, but the time "
    "is a roofline. TPU only.")
_SEARCH = flags.DEFINE_bool("search", False, "Try meshes, remat policies and accumulations.")
_CANDIDATES = flags.DEFINE_integer("candidates", 6, "With --search: how many are compiled.")
_CACHE = flags.DEFINE_string(
    "cache", "~/.cache/bertjax/plan", "Directory of compiled steps: a plan that was made is not "
    "compiled again.")
_JSON = flags.DEFINE_string("json", "", "File for the numbers of the plan.")

Plan = tuple[str, list[Cost]]  # overrides and the costs of the stages


def main(arguments: Sequence[str]) -> None:
    """Prints the plan that the flags ask for."""
    logging.set_verbosity(logging.WARNING)
    if len(arguments) > 1:
        _refuse(f"unexpected arguments {' '.join(arguments[1:])}")
    config = _CONFIG.value
    if config is None:
        _refuse("no experiment given; try --config=configs/large.py")
    try:
        check_config(config)
        piece = None if _TOPOLOGY.value == "local" else chips.parse(_TOPOLOGY.value)
        if piece is not None:
            chips.check_libtpu()
        plans = _search(config, piece) if _SEARCH.value else [("", plan(config, piece))]
    except (ValueError, RuntimeError) as error:
        _refuse(str(error))

    name = config_flags.get_config_filename(flags.FLAGS["config"])
    for overrides, costs in plans[:1]:
        print("\n" + page.heading(name, piece, costs[0].info.device_kind, _versions(piece)))
        if overrides:
            print(f"best of {len(plans)} candidates: {overrides}")
        for each in costs:
            print("\n" + page.stage_text(each))
        print("\n" + page.recipe_text(costs))
    if _SEARCH.value:
        print("\n" + page.ranking(plans))
    unfit = next((each for each in plans[0][1] if not each.fits), None)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(
            [{"overrides": overrides, "stages": [_numbers(each) for each in costs]}
             for overrides, costs in plans], indent=1))
    if unfit is not None:
        print("\nit does not fit. Try, in this order (or --search):")
        print("\n".join(f"  {remedy}" for remedy in page.remedies(unfit)))
        sys.exit(1)


def plan(config: Any, piece: chips.Slice | None, by_roofline: bool = False) -> list[Cost]:
    """Costs of every stage of a configuration; `by_roofline` as of cost()."""
    topology, cache = piece.name if piece else "local", Cache(_CACHE.value)
    count = 1 if config.job == "finetune" else len(config.phases)
    costs = []
    for stage in range(count):
        info, compiled = compile_stage(config, topology, stage, cache, quick=_QUICK.value,
                                       say=_say)
        if piece is None:
            from bertjax.training import hardware

            costs.append(cost(info, compiled, None, hardware.peak_flops(),
                              hardware.device_bytes()))
        else:
            costs.append(cost(info, compiled, piece, by_roofline=by_roofline))
    return costs


def _search(config: Any, piece: chips.Slice | None) -> list[Plan]:
    """Plans of the most promising candidates, the best first: those that fit, by days."""
    if config.job == "finetune":
        raise ValueError("--search is for pre-training; fine-tuning fits almost everywhere")
    if piece is None:
        import jax

        from bertjax.training import hardware

        devices, limit = jax.device_count(), hardware.device_bytes() or 16 * chips.GIB
    else:
        devices, limit = piece.devices, piece.chip.hbm_bytes
    length = max(length for _, length in config.phases)
    model = settings.model_config(config, config.model.vocab_size or 30522)
    worth = search.candidates(model, config.batch_size, length,
                              settings.max_predictions(config, length), devices, limit)
    plans: list[Plan] = []
    for candidate in itertools.islice(worth, _CANDIDATES.value):
        _say(f"candidate {len(plans) + 1}: {candidate}, about "
             f"{candidate.bytes / chips.GIB:.1f} GiB by arithmetic")
        tried = config.copy_and_resolve_references()
        tried.update_from_flattened_dict(candidate.overrides())
        # One method for all: a candidate that was once compiled to the end has cycles, which are
        # more than the roofline of the others.
        plans.append((str(candidate), plan(tried, piece, by_roofline=_QUICK.value)))
    if not plans:
        raise ValueError(f"no candidate should fit {limit / chips.GIB:.0f} GiB a device by "
                         "arithmetic: take more chips, or chips with more memory")

    def order(entry: Plan) -> tuple[bool, float]:
        days = [each.days if each.days is not None else each.total for each in entry[1]]
        return not all(each.fits for each in entry[1]), sum(days)

    return sorted(plans, key=order)


def _numbers(each: Cost) -> dict[str, Any]:
    """A Cost as JSON."""
    import dataclasses

    return {**dataclasses.asdict(each), "total": each.total, "tokens_s": each.tokens_s,
            "days": each.days}


def _versions(piece: chips.Slice | None) -> str:
    names = ["jax", *(["libtpu"] if piece else [])]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


def _refuse(message: str) -> NoReturn:
    print(f"plan: {message}", file=sys.stderr)
    sys.exit(2)


def _parse_flags(arguments: Sequence[str]) -> list[str]:
    """Parses the flags; a bad name, value or config file is one message, not a traceback."""
    try:
        # config_flags finds the overrides in sys.argv, whatever is parsed.
        sys.argv[:] = arguments = expand_overrides(arguments)
        check_override_names(arguments[1:])
        remaining = flags.FLAGS(arguments)
        if _CONFIG.value is not None:
            _ = _CONFIG.value.job  # a config file that cannot be read shows only at its first use
        return remaining
    except (flags.Error, ValueError, TypeError, AttributeError, OSError) as error:
        lines = str(error).strip().splitlines()
        _refuse(lines[-1] if "Traceback" in str(error) else " ".join(map(str.strip, lines)))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    app.run(main, flags_parser=_parse_flags)
