"""Command line: flags and a config file in, one job run in a work directory.

    python -m bertjax.main --config=configs/demo.py --workdir=runs/demo
    bertjax --config=bertjax:large:two_phase ...    configs/large.py, from any directory
    python -m bertjax.main --config=configs/large.py:two_phase --config.data.corpus=STORE \\
        --config.optimizer.learning_rate=2e-4 --workdir=gs://bucket/run1

A setting that cannot work stops the program with one line and exit code 2, before anything is
compiled; what goes wrong later (a disk, a loss that is not finite), with one and exit code 1. A run
that was asked to stop (SIGTERM) saves, and exits with code 75 ("try again"); one in which something
hangs ends with 76, one that does not find its other processes, or loses one, with 77.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertjax.interruption import ended_by_ctrl_c, leave, refusals

with ended_by_ctrl_c():
    from absl import app, flags, logging
    from ml_collections import config_flags

    from bertjax import jax_settings
    from bertjax.command_line import ARGUMENTS, UNLOCKED, default_workdir, parse_flags

if TYPE_CHECKING:  # --help needs no settings
    from bertjax.config import Config

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Experiment: a file of configs/, with variants after a colon "
    "(configs/large.py:two_phase), or bertjax:NAME for one that came with the package "
    "(bertjax:large:two_phase). Any setting can be overridden: --config.batch_size=64.",
    sys_argv=ARGUMENTS,
    **UNLOCKED,
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Directory of the run: checkpoints, metrics.jsonl, report.html, model/. "
    "Local or gs://. Default: runs/NAME of the config file.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    "",
    "HOST:PORT of process 0 of a run over several machines. Not needed on TPU "
    "pods and under SLURM, where the processes find each other.",
)
_PROCESSES = flags.DEFINE_integer("processes", 0, "With --coordinator: number of processes.")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "With --coordinator: which one this is.")
_WAIT_SECONDS = flags.DEFINE_integer(
    "wait_seconds", 300, "How long to wait at the start for the other processes of the run.", lower_bound=1
)
_HELP_CONFIG = flags.DEFINE_bool("help_config", False, "Print every setting, then exit.")


def main(arguments: Sequence[str]) -> None:
    """Runs the job that the flags describe."""
    jax_settings.clear()
    logging.set_verbosity(logging.WARNING)  # libraries report every file that they write
    with refusals("bertjax", 2):
        from bertjax.config import describe
        from bertjax.config_checks import check_config

        if _HELP_CONFIG.value:
            print(describe())
            return
        if len(arguments) > 1:
            raise ValueError(
                f"unexpected arguments {' '.join(arguments[1:])}: quote wildcards, "
                "and write settings as --config.NAME=VALUE"
            )
        if _CONFIG.value is None:
            raise ValueError("no experiment given; try --config=configs/demo.py (all settings: --help_config)")
        workdir = _WORKDIR.value or default_workdir(config_flags.get_config_filename(flags.FLAGS["config"]))
        workdir = os.path.expanduser(workdir)
        config = check_config(_CONFIG.value)
        # Late: importing jax takes a second that a refused command need not wait for.
        with ended_by_ctrl_c():
            from bertjax.process import distributed, hardware, runtime

        runtime.start(config, _COORDINATOR.value, _PROCESSES.value, _PROCESS_ID.value, _WAIT_SECONDS.value)
    hardware.wake()
    with distributed.not_waiting_after_errors():
        _run(config, workdir)


def _run(config: Config, workdir: str) -> None:
    """The job, with the exit codes of its ends."""
    from bertjax.experiment import prepare
    from bertjax.formats.checkpoint import CheckpointError
    from bertjax.process.preemption import EXIT_PREEMPTED, Preempted
    from bertjax.run.run import OutputError
    from bertjax.training.loop import NotFiniteError

    # Checkpoints that cannot be read or written may be there at the next start: code 1.
    with refusals("bertjax", 1, CheckpointError, NotFiniteError, OutputError):
        with refusals("bertjax", 2):
            train = prepare(config, workdir)
        try:
            train()
        except Preempted:
            leave(EXIT_PREEMPTED)


def _parse_flags(arguments: Sequence[str]) -> list[str]:
    with refusals("bertjax", 2):
        return parse_flags(arguments)


def run() -> None:
    """Parses the command line and runs its job."""
    try:
        app.run(main, flags_parser=_parse_flags)
    except SystemExit as end:  # not waiting for a thread that still compiles or writes
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        if end.code:
            leave(end.code if isinstance(end.code, int) else 1)
        raise
    except KeyboardInterrupt:  # outside the loop of steps, which saves
        print("bertjax: interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        leave(130)


if __name__ == "__main__":
    run()
