"""The programs beside training: `python -m bertjax.tools.NAME`, or `bertjax NAME`."""

import sys

from bertjax import jax_settings
from bertjax.interruption import leave_on_signals, refuse

# Former tools, and what took their place.
MOVED = {
    "ablate": "ablate is a benchmark now; in a clone: python -m tests.benchmarks.ablate",
    "soak": "soak is a benchmark now; in a clone: python -m tests.benchmarks.soak_run",
}

if sys.argv[:1] == ["-m"]:  # a tool is being started: Ctrl-C is one line from its imports on
    leave_on_signals()
    jax_settings.clear()
    for name, text in MOVED.items():
        if f"bertjax.tools.{name}" in sys.orig_argv:
            refuse("bertjax", text, 2)
