"""Kills a small training run again and again, and shows that nothing is lost.

    python -m bertjax.tools.soak --kills=100

A tiny model trains with the real trainer, checkpoints and logbook in a child process. Each round
one accident happens to it: SIGTERM, SIGKILL at a random moment, SIGKILL during a save, a disk that
is full, a newest checkpoint truncated or emptied, leftovers of a save, a directory that has lost
all its checkpoints (which must be refused; then they come back). Then it is started again, and must
begin at the newest intact checkpoint: never earlier, never afresh. In the end parameters, optimizer
state and every logged loss must equal, bit for bit, those of a run that nobody disturbed. Exit
code 0 = they do.
"""

import pathlib
import tempfile

from bertjax.tools.arguments import make_parser
from bertjax.tools.soak.accidents import Soak


def main() -> None:
    """Command line."""
    parser = make_parser("soak", __doc__)
    parser.add_argument("--kills", type=int, default=100, help="accidents in all")
    parser.add_argument("--seed", type=int, default=0, help="of the accidents")
    parser.add_argument("--directory", type=pathlib.Path, help="default: a temporary one")
    arguments = parser.parse_args()
    if arguments.directory:
        Soak(arguments.directory, arguments.kills, arguments.seed).run()
    else:
        with tempfile.TemporaryDirectory() as directory:
            Soak(pathlib.Path(directory), arguments.kills, arguments.seed).run()


if __name__ == "__main__":
    main()
