"""Comparisons with other programs, and measurements that are too long for a test. See README.md.

Run from the root of a clone: python -m tests.benchmarks.NAME --help
"""

import bertjax.tools as bertjax_tools  # handles signals and settings of jax, as for a tool

__all__ = ["bertjax_tools"]
