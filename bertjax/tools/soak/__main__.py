"""Kills a training run again and again, and shows that nothing is lost.

    python -m bertjax.tools.soak --kills=100
    python -m bertjax.tools.soak --kills=20 -- --config=configs/base.py:packed ...

With a command of bertjax.main after `--`, that run is killed with SIGKILL at random moments, on the
devices that it uses, with an empty compilation cache at every second start, and compared with the
same command left alone (runs.py).

Without one, a tiny model trains on the CPU with the real trainer, checkpoints and logbook in a
child process. Each round one accident happens to it: SIGTERM, SIGKILL at a random moment, SIGKILL
during a save, a disk that is full, a newest checkpoint truncated or emptied, leftovers of a save, a
directory that has lost all its checkpoints (which must be refused; then they come back). Then it is
started again, and must begin at the newest intact checkpoint: never earlier, never afresh. In the
end parameters, optimizer state and every logged loss must equal, bit for bit, those of a run that
was left alone. Exit code 0 = they do.
"""

import contextlib
import math
import pathlib
import tempfile

from bertjax.tools.arguments import make_parser
from bertjax.tools.soak.accidents import Soak
from bertjax.tools.soak.runs import RunSoak


def main() -> None:
    """Command line."""
    parser = make_parser("soak", __doc__)
    parser.add_argument("--kills", type=int, default=100, help="accidents in all")
    parser.add_argument("--seed", type=int, default=0, help="of the accidents")
    parser.add_argument("--directory", type=pathlib.Path, help="default: a temporary one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="with a command: no further kill after so many")
    parser.add_argument(
        "--records", type=int, default=40, help="with a command: a kill comes after up to so many steps of a start"
    )
    parser.add_argument("command", nargs="*", help="after --: arguments of bertjax.main")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.command:
            RunSoak(
                directory, arguments.command, arguments.kills, arguments.minutes, arguments.records, arguments.seed
            ).run()
        else:
            Soak(directory, arguments.kills, arguments.seed).run()


if __name__ == "__main__":
    main()
