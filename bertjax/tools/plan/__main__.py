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

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from importlib import metadata

from bertjax.formats.files import whole_file
from bertjax.tools.arguments import add_boolean, add_settings, make_parser, refusals

# A process that compiles for TPUs that it does not have.
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here holds a chip
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the plan that the flags ask for; exit code 1 if it does not fit."""
    parser = make_parser("plan", __doc__)
    add_settings(parser)
    add = parser.add_argument
    add("--topology", default="local", help="where it is to run: v5e:4x4, v4-32, ... or local = this machine")
    add_boolean(parser, "quick", False, "stop once memory is assigned: minutes faster, but a roofline. TPU only")
    add_boolean(parser, "search", False, "try meshes, remat policies and accumulations")
    add("--candidates", type=int, default=6, help="with --search: how many are compiled (default 6)")
    cache = "directory of compiled steps: a plan that was made is not compiled again"
    add("--cache", type=pathlib.Path, default="~/.cache/bertjax/plan", metavar="DIR", help=cache)
    add("--json", type=pathlib.Path, metavar="FILE", help="file for the numbers of the plan")
    flags = parser.parse_args(arguments)
    with refusals("plan", 2, RuntimeError):
        if not flags.files:
            raise ValueError("no experiment given; try --config=configs/large.py")
        if flags.quick and flags.topology == "local":
            raise ValueError("--quick is for TPUs: a step of this machine's devices is compiled and measured")
        from bertjax.command_line import load_config
        from bertjax.config_checks import check_config

        config = check_config(load_config(flags.files[-1], flags.settings))
        # This process asks what devices there are; their memory is for the worker.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        if flags.topology != "local":
            os.environ.update(WITHOUT_TPU)
        from bertjax.process.hardware import slice_of  # jax reads the environment
        from bertjax.tools.plan import compilation, plans

        piece = None if flags.topology == "local" else slice_of(flags.topology)
        if piece is not None:
            compilation.check_libtpu()
        how = config, piece, flags.cache.expanduser(), flags.quick
        with whole_file(flags.json) if flags.json else contextlib.nullcontext() as numbers:  # minutes before it is full
            found = plans.search(*how, flags.candidates) if flags.search else [plans.make_plan(*how)]
            if numbers:
                json.dump([*map(plans.numbers, found)], numbers, indent=1)
        best = found[0]
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", *(["libtpu"] if piece else [])))
        print("\n" + plans.heading(flags.files[-1], piece, best.stages[0], versions))
        if best.overrides:
            print(f"best of {len(found)} candidates: {best.overrides}")
        print("\n" + "\n\n".join(map(plans.stage_text, best.stages)))
        print("\n" + plans.recipe_text(best.stages, config.budget_minutes))
        if flags.search:
            print("\n" + plans.ranking(found))
        if best.unfit is not None:
            print("\nit does not fit. Try, in this order (or --search):")
            print("\n".join(f"  {remedy}" for remedy in plans.remedies(best.unfit)))
            sys.exit(1)


if __name__ == "__main__":
    main()
