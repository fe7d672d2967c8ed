"""Makes report.html of one run, or of several side by side: one file that opens offline.

python -m bertjax.tools.report runs/base runs/large --output=compared.html
"""

from collections.abc import Sequence

from bertjax.log.report import write_report
from bertjax.tools.arguments import make_parser, read, refusals


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=read, metavar="RUN", help="work directory of a run")
    text = "default: in the first directory, report.html, or compared.html of several runs"
    parser.add_argument("--output", metavar="FILE", help=text)
    flags = parser.parse_args(arguments)
    with refusals("report"):
        if flags.output and not flags.output.lower().endswith((".html", ".htm")):  # it may be a file of another kind
            raise ValueError(f"--output={flags.output} must end in .html")
        print(write_report(flags.runs, flags.output))


if __name__ == "__main__":
    main()
