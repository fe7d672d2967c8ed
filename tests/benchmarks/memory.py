"""What rematerialisation costs and saves: policy, memory and speed of one training step.

    python -m tests.benchmarks.memory large-512x32 large-512x64

The rows of each workload run under every policy of config.execution.remat. Memory is what the
compiler reserves for the step: parameters, optimizer state, batch and temporaries. Prints a table;
writes memory.json into --out.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from bertjax import markdown
from bertjax.model.presets import REMAT_POLICIES, Execution
from tests.benchmarks import harness
from tests.benchmarks.jax_step import prepare, time_step
from tests.benchmarks.workloads import Workload


def measure(works: list[Workload], policies: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """'workload policy' -> numbers of jax_step.time_step, or {'error': ...} when it did not fit."""
    backend = jax.default_backend()
    cases = list(itertools.product(works, policies))

    def compiled(case: tuple[Workload, str]) -> Any:
        try:
            return prepare(case[0], Execution.for_backend(backend, remat=case[1]))
        except jax.errors.JaxRuntimeError as error:
            return error

    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor() as pool:
        ready = list(pool.map(compiled, cases))
    for (work, policy), program in zip(cases, ready, strict=True):
        try:
            if isinstance(program, Exception):
                raise program
            result = time_step(program, steps)
        except jax.errors.JaxRuntimeError as error:
            result = {"error": str(error).splitlines()[0]}
        results[f"{work.name} {policy}"] = result
    return results


def main(argv: list[str]) -> None:
    parser = harness.make_parser("memory", __doc__)
    parser.add_argument(
        "workloads", nargs="*", type=Workload.parse, default=[Workload.parse("large-512x32")], help="MODEL-LENGTHxROWS"
    )
    parser.add_argument("--policies", nargs="+", default=list(REMAT_POLICIES), choices=REMAT_POLICIES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    args = parser.parse_args(argv)

    results = measure(args.workloads, args.policies, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "memory.json").write_text(json.dumps(results, indent=1))
    lines = []
    for work, policy in itertools.product(args.workloads, args.policies):
        result = results[f"{work.name} {policy}"]
        if "error" in result:
            lines.append((work.name, policy, result["error"][:60], "-", "-"))
            continue
        seconds = result["step_seconds"]
        numbers = f"{result['peak_bytes'] / 1e9:.1f}", f"{1e3 * seconds:.2f}", f"{work.batch_size / seconds:,.0f}"
        lines.append((work.name, policy, *numbers))
    print(f"{jax.devices()[0].device_kind}\n")
    print(markdown.table(("step", "`execution.remat`", "GB", "ms", "rows/s"), lines))


if __name__ == "__main__":
    main(sys.argv[1:])
