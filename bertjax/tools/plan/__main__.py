"""Plans a run before a machine is rented: memory, collectives, time, cost. Needs no TPU.

    python -m bertjax.tools.plan --config=configs/large.py:v5e_16 --topology=v5e:4x4
    python -m bertjax.tools.plan --config=configs/large.py --topology=v4-32 --search
    python -m bertjax.tools.plan --config=configs/demo.py --topology=local

The training step of the configuration is compiled for the topology (minutes; --quick stops once
memory is assigned), and the compiler's numbers are printed. For TPUs libtpu must be installed, the
release that belongs to jax. --search compiles other meshes, remat policies and accumulations that
should fit by arithmetic, and ranks them; with --quick it tells what fits, but not which of several
remat policies is the fastest. Exit code 1: it does not fit.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from importlib import metadata

from absl import app, flags, logging
from ml_collections import config_flags

from bertjax.command_line import ARGUMENTS, parse_flags
from bertjax.config_checks import check_config
from bertjax.interruption import refusals

_BEGAN = time.monotonic()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Experiment: a file of configs/, with variants after a colon.", sys_argv=ARGUMENTS
)
_TOPOLOGY = flags.DEFINE_string("topology", "local", "Where it is to run: v5e:4x4, v4-32, ... or local = this machine.")
_QUICK = flags.DEFINE_bool(
    "quick",
    False,
    "Stop the compiler once it has assigned memory: minutes faster, but the time is a roofline. TPU only.",
)
_SEARCH = flags.DEFINE_bool("search", False, "Try meshes, remat policies and accumulations.")
_CANDIDATES = flags.DEFINE_integer("candidates", 6, "With --search: how many are compiled.")
_CACHE = flags.DEFINE_string(
    "cache", "~/.cache/bertjax/plan", "Directory of compiled steps: a plan that was made is not compiled again."
)
_JSON = flags.DEFINE_string("json", "", "File for the numbers of the plan.")


def main(arguments: Sequence[str]) -> None:
    """Prints the plan that the flags ask for; exit code 1 if it does not fit."""
    logging.set_verbosity(logging.WARNING)
    with refusals("plan", 2, RuntimeError):
        if len(arguments) > 1:
            raise ValueError(f"unexpected arguments {' '.join(arguments[1:])}")
        if _CONFIG.value is None:
            raise ValueError("no experiment given; try --config=configs/large.py")
        config = check_config(_CONFIG.value)
        from bertjax.tools.plan import compilation, estimate, plans  # --help needs none of them

        piece = None if _TOPOLOGY.value == "local" else estimate.parse(_TOPOLOGY.value)
        if piece is not None:
            compilation.check_libtpu()
        planner = plans.Planner(piece, pathlib.Path(_CACHE.value).expanduser(), _QUICK.value, _say)
        found = planner.search(config, _CANDIDATES.value) if _SEARCH.value else [planner.plan(config)]
        best = found[0]
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", *(["libtpu"] if piece else [])))
        name = config_flags.get_config_filename(flags.FLAGS["config"])
        print("\n" + plans.heading(name, piece, best.stages[0], versions))
        if best.overrides:
            print(f"best of {len(found)} candidates: {best.overrides}")
        print("\n" + "\n\n".join(plans.stage_text(stage) for stage in best.stages))
        print("\n" + plans.recipe_text(best.stages))
        if _SEARCH.value:
            print("\n" + plans.ranking(found))
        if _JSON.value:
            pathlib.Path(_JSON.value).write_text(json.dumps([*map(plans.numbers, found)], indent=1))
        if best.unfit is not None:
            print("\nit does not fit. Try, in this order (or --search):")
            print("\n".join(f"  {remedy}" for remedy in plans.remedies(best.unfit)))
            sys.exit(1)


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


def _parse_flags(arguments: Sequence[str]) -> list[str]:
    with refusals("plan", 2):
        return parse_flags(arguments)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # This process asks what devices there are; their memory is for the worker.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    app.run(main, flags_parser=_parse_flags)
