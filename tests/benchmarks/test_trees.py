"""trees: this checkout and others, timed in turn."""

import json
import os
import pathlib
import subprocess

import pytest

from tests.benchmarks import trees


def test_a_directory_without_the_package_is_refused():
    with pytest.raises(SystemExit, match="no checkout of bertjax"):
        trees.main(["base@128x2", "--tree=/nowhere"])


def test_two_checkouts_are_timed_in_turn(monkeypatch):
    old, seen = pathlib.Path("old"), []

    def run(command, cwd, env, **_):
        seen.append((cwd, command[2:], env["PYTHONPATH"].split(os.pathsep)[0]))
        output = "a line\n" + json.dumps({"results": {"base@128x2": {"step_seconds": 0.2 if cwd == old else 0.1}}})
        return subprocess.CompletedProcess(command, 0, output)

    monkeypatch.setattr(trees.subprocess, "run", run)
    found = trees.compare_trees([trees.ROOT, old], ["base@128x2", "--steps=7"], rounds=2)
    assert [cwd for cwd, *_ in seen] == [trees.ROOT, old] * 2
    assert seen[0][1] == ["bertjax.tools.bench", "step", "base@128x2", "--steps=7", "--rounds=1", "--json"]
    assert [path for *_, path in seen[:2]] == [str(trees.ROOT), "old"]
    text = trees.tree_table(found)
    assert f"100.00 (100.00 - 100.00)  x 1.000  {trees.ROOT}" in text and f"x 2.000  {old}" in text
