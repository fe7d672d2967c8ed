"""Every room of the package depends only on rooms before it in the list below."""

import ast
import pathlib

import pytest

import bertjax

PACKAGE = pathlib.Path(bertjax.__file__).parent

# The way of the data. A module may import from its own room and from those before it.
ROOMS = (
    "version",
    "interruption",
    "markdown",
    "jax_settings",
    "config",
    "config_checks",
    "command_line",
    "formats",
    "tokenization",
    "data",
    "model",
    "interop",
    "process",
    "log",
    "training",
    "run",
    "tasks",
    "forward",
    "inference",
    "embeddings",
    "prediction",
    "pretraining",
    "given",
    "experiment",
    "tools",
    "main",
    "__main__",
    "__init__",
)


def room(name: str) -> str:
    """'tasks' of 'bertjax.tasks.glue'."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: pathlib.Path) -> set[str]:
    """Rooms that a module imports from, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bertjax":
            names = [f"bertjax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found |= {room(name) for name in names if name.split(".")[0] == "bertjax"}
    return found


def modules() -> dict[str, pathlib.Path]:
    """{'bertjax.tasks.glue': its path, ...}."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "configs" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def wrong_imports() -> set[tuple[str, str]]:
    return {
        (name, other)
        for name, path in modules().items()
        for other in imports(path) - {room(name)}
        if ROOMS.index(other) > ROOMS.index(room(name))
    }


def test_every_module_stands_in_a_room_of_the_list():
    assert {room(name) for name in modules()} <= set(ROOMS)


def test_a_room_depends_only_on_rooms_before_it():
    assert wrong_imports() == set()


@pytest.mark.parametrize(
    "line, rooms",
    [
        ("from bertjax.tasks.glue import GLUE", {"tasks"}),
        ("from bertjax import config, formats", {"config", "formats"}),
        ("def f():\n    import bertjax.data.store", {"data"}),
    ],
)
def test_imports_are_found(tmp_path, line, rooms):
    (tmp_path / "module.py").write_text(line)
    assert imports(tmp_path / "module.py") == rooms


def test_no_module_is_longer_than_400_lines():
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {str(path): count for path, count in lines.items() if count > 400}
