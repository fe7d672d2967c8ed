"""report.html of one run, or of several side by side: one file that opens offline.

    python -m bertjax.tools.report RUN [RUN ...] [--output=report.html]

A RUN is a work directory; what is read of it stands in bertjax/training/report/runs.py.
"""

import argparse

from bertjax.training.report import write_report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--output", help="default: report.html in the first directory")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.runs, arguments.output))
    except ValueError as error:
        raise SystemExit(f"report: {error}") from error


if __name__ == "__main__":
    main()
