"""The programs beside training: `python -m bertjax.tools.NAME`, or `bertjax NAME`."""

import sys

from bertjax import jax_settings
from bertjax.interruption import leave_on_signals

if sys.argv[:1] == ["-m"]:  # a tool is being started: Ctrl-C is one line from its imports on
    leave_on_signals()
    jax_settings.clear()
