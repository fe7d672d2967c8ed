"""Command line: flags and a config file in, one job run in a work directory.

    python -m bertjax.main --config=configs/demo.py --workdir=runs/demo
    bertjax --config=bertjax:large:two_phase ...    configs/large.py, from any directory
    python -m bertjax.main --config=configs/large.py:two_phase --config.data.corpus=STORE \\
        --config.optimizer.learning_rate=2e-4 --workdir=gs://bucket/run1

A setting that cannot work ends the program before anything is compiled, with one line and exit code
2. What goes wrong later (a disk, a loss that is not finite) ends it with one line and exit code 1. A
run that is asked to stop (SIGTERM, Ctrl-C) saves, and exits with code 75 ("try again"). Exit code 76 means that
something hung, 77 that a process of the run did not come or was lost.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bertjax.interruption import (
    EXIT_PREEMPTED,
    ended_by_ctrl_c,
    hush_closed_loops,
    leave,
    leave_without_saving,
    refusals,
)

with ended_by_ctrl_c():
    from bertjax import jax_settings
    from bertjax.tools.arguments import Parser, add_boolean, add_settings, make_parser

if TYPE_CHECKING:  # --help needs no settings
    from bertjax.config import Config


def parser() -> Parser:
    """The command line."""
    parser = make_parser("main", __doc__, "bertjax")
    add_settings(parser)
    add = parser.add_argument
    workdir = "directory of the run: checkpoints, metrics.jsonl, report.html, model/. Local or gs://. Default: "
    add("--workdir", metavar="DIR", help=f"{workdir}runs/NAME of the config file")
    coordinator = "of process 0 of a run over several machines. Not needed on TPU pods and under SLURM, where the "
    add("--coordinator", default="", metavar="HOST:PORT", help=f"{coordinator}processes find each other")
    add("--processes", type=int, least=0, default=0, help="with --coordinator: number of processes")
    add("--process_id", type=int, least=-1, default=-1, help="with --coordinator: which one this is")
    wait = "how long to wait at the start for the other processes of the run (default 300)"
    add("--wait_seconds", type=int, least=0, default=300, help=wait)
    add_boolean(parser, "help_config", False, "print every setting, then exit")
    return parser


def main() -> None:
    """Runs the job that the command line describes."""
    leave_without_saving()
    jax_settings.clear()
    hush_closed_loops()
    flags = parser().parse_args()
    from absl import logging

    from bertjax.command_line import default_workdir, load_config
    from bertjax.config import describe
    from bertjax.config_checks import check_config

    with refusals("bertjax", 2):
        if flags.help_config:
            print(describe())
            return
        if flags.wait_seconds < 1:
            raise ValueError(f"--wait_seconds={flags.wait_seconds} must be at least 1")
        if not flags.files:
            raise ValueError("no experiment given; try --config=configs/demo.py (all settings: --help_config)")
        logging.get_absl_logger().setLevel("CRITICAL")  # orbax: 200 lines of an error that it raises too
        file = flags.files[-1]
        config = check_config(load_config(file, flags.settings))
        workdir = os.path.expanduser(flags.workdir or default_workdir(file))
        # Late: importing jax takes a second that a refused command need not wait for.
        from bertjax.process import cold_disk

        if cold_disk.is_cold():
            cold_disk.read_ahead()
        from bertjax.process import distributed, hardware, runtime

        runtime.start(config, flags.coordinator, flags.processes, flags.process_id, flags.wait_seconds)
    hardware.wake()
    with distributed.not_waiting_after_errors():
        _run(config, workdir)


def _run(config: Config, workdir: str) -> None:
    """The job, with the exit codes of its ends."""
    from bertjax.experiment import prepare
    from bertjax.formats.checkpoint import CheckpointError
    from bertjax.process.distributed import shutdown
    from bertjax.process.preemption import Preempted
    from bertjax.run.run import OutputError
    from bertjax.training.loop import NotFiniteError

    # Checkpoints that cannot be read or written may be there at the next start: code 1.
    with refusals("bertjax", 1, CheckpointError, NotFiniteError, OutputError):
        with refusals("bertjax", 2):
            train = prepare(config, workdir)
        try:
            train()
        except Preempted:
            shutdown()
            leave(EXIT_PREEMPTED)


def run() -> None:
    """Parses the command line and runs its job."""
    try:
        main()
    except SystemExit as end:  # not waiting for a thread that still compiles or writes
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        if end.code:
            leave(end.code if isinstance(end.code, int) else 1)
        raise
    except KeyboardInterrupt:  # a second one in the loop of steps, which saves after the first
        print("bertjax: interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        leave(130)


if __name__ == "__main__":
    run()
