"""Times the training step of this checkout and of others in turn, in processes of their own.

    python -m tests.benchmarks.trees base@128x256 --tree=../other

Shapes, configs and settings are those of `bertjax.tools.bench step`, which each checkout runs by itself.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from bertjax.tools.arguments import add_settings, refusals
from bertjax.tools.bench import SHAPES, configurations
from tests.benchmarks import harness

ROOT = pathlib.Path(__file__).parents[2]


def compare_trees(
    trees: Sequence[pathlib.Path], arguments: Sequence[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """{shape or config: {tree: seconds a step, one a round}} of `bench step`; the trees are timed in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    command = [sys.executable, "-m", "bertjax.tools.bench", "step", *arguments, "--rounds=1", "--json"]
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1, rounds + 1):
            for place, tree in enumerate(trees):
                path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
                environment = {**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": f"{scratch}/{place}"}
                done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    raise ValueError(f"the step of {tree} ended with exit code {done.returncode}")
                for name, result in json.loads(done.stdout.splitlines()[-1])["results"].items():
                    found.setdefault(name, {}).setdefault(str(tree), []).append(result["step_seconds"])
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return found


def tree_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Median, fastest and slowest round of every tree, in milliseconds, and the ratio to this tree."""
    lines = []
    for name, trees in found.items():
        lines.append(f"{name}: milliseconds a step (fastest - slowest round)")
        medians = [statistics.median(seconds) for seconds in trees.values()]
        for (tree, seconds), median in zip(trees.items(), medians, strict=True):
            low, high = 1e3 * min(seconds), 1e3 * max(seconds)
            lines.append(f"{1e3 * median:9.2f} ({low:.2f} - {high:.2f})  x {median / medians[0]:.3f}  {tree}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = harness.make_parser("trees", __doc__)
    add = parser.add_argument
    add("shapes", nargs="*", metavar="MODEL@LENGTHxROWS", help=f"steps to time (default: {' '.join(SHAPES)})")
    add("--tree", type=pathlib.Path, action="append", required=True, metavar="DIR", help="another checkout")
    add("--steps", type=int, default=20, help="timed steps of a round (default 20)")
    add("--rounds", type=int, default=3, help="how often each is timed (default 3)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_settings(parser)
    flags = parser.parse_args(arguments)
    with refusals("trees"):
        shapes = flags.shapes or ([] if flags.files else list(SHAPES))
        configurations(shapes, flags.files, flags.settings)  # refuses what no checkout would take
        trees = [ROOT, *(tree.expanduser().absolute() for tree in flags.tree)]
        if missing := [tree for tree in trees if not (tree / "bertjax" / "tools").is_dir()]:
            raise ValueError(f"--tree={missing[0]} is no checkout of bertjax: it has no bertjax/tools")
        files = [f"--config={file}" for file in flags.files]
        found = compare_trees(trees, [*shapes, *files, *flags.settings, f"--steps={flags.steps}"], flags.rounds)
        print(json.dumps(found) if flags.json else tree_table(found))


if __name__ == "__main__":
    main()
