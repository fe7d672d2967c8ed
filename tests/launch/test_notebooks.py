"""The Colab notebooks: committed without outputs, and each runs from top to bottom."""

import ast
import importlib.util
import json
import pathlib
import re
import shutil

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "launch" / "colab").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: pathlib.Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["convert", "finetune", "pretrain"]


@each_notebook
def test_outputs_are_stripped(path):
    """Pictures of an old run would outlive the code that drew them, and swell the repository."""
    for cell in code_cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@each_notebook
def test_only_public_names_and_commands_are_used(path):
    import bertjax

    for cell in code_cells(path):
        for node in ast.walk(ast.parse(as_python("".join(cell["source"])))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("bertjax."), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "bertjax":
                assert node.attr in bertjax.__all__


def as_python(source: str) -> str:
    """The cell with `pass` in place of each shell command, so that it is Python."""
    return re.sub(r"^([ \t]*)!(?:.*\\\n)*.*$", r"\1pass", source, flags=re.MULTILINE)


@each_notebook
def test_commands_name_tools_and_experiments_that_exist(path):
    from bertjax.__main__ import tools
    from bertjax.command_line import config_names, split_settings

    for cell in code_cells(path):
        source = "".join(cell["source"])
        for command in re.findall(r"!(?:JAX_PLATFORMS=cpu )?python -m bertjax ((?:.*\\\n)*.*)", source):
            words = re.sub(r"\\\n", " ", command).split()
            assert words[0].startswith("--") or words[0] in tools(), command
            split_settings(words)  # refuses unknown ones
        for name in re.findall(r"""--config=bertjax:(\w+)|bertjax\.(?:train|finetune)\(\s*"(\w+)""", source):
            name = "".join(name)
            assert name in config_names()


@pytest.mark.slow
@each_notebook
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """On the CPU with a few steps, in an empty directory, as Colab would after the installation."""
    nbclient = pytest.importorskip("nbclient", reason="the [notebooks] extra")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("BERTJAX_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as a free runtime has
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(path, tmp_path)
    notebook = nbformat.read(tmp_path / path.name, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [o for o in outputs if {"image/png", "text/html"} & {*o.get("data", {})}]
    printed = "".join(o.get("text", "") for o in outputs if o.output_type == "stream")
    compared = all(map(importlib.util.find_spec, ("torch", "transformers")))
    # Of each training its curves and its result, and the answers; the comparison's picture.
    assert len(shown) == {"pretrain": 4, "finetune": 7, "convert": 1 + int(compared)}[path.stem]
    # A shell command that fails does not stop a notebook.
    assert not re.search(
        r"^(Traceback \(most recent|usage: |\w+: error: |"
        r"(bertjax|train_vocab|build_corpus|convert|predict|sweep): \w)",
        printed,
        re.MULTILINE,
    ), printed[-3000:]


TRAIN = """
import bertjax

settings = {"phases": ((%d, 64),), "optimizer.warmup_steps": 1}
settings |= {"data.demo_megabytes": 0.3, "data.demo_vocab_size": 1000}
settings |= {"batch_size": 16, "eval.rows": 32, "log.every_steps": 1, "log.fill_mask": (), "resume": "changed"}
bertjax.train("demo", "run", settings)
"""


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_the_next_goes_on_in_one_picture(tmp_path, monkeypatch):
    jupyter_client = pytest.importorskip("jupyter_client", reason="the [notebooks] extra")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()

    def run(code, interrupted=False):
        """What a cell shows: (type, content) of its messages."""
        parent, shown = client.execute(code), []
        while not shown or shown[-1] != ("status", {"execution_state": "idle"}):
            message = client.get_iopub_msg(timeout=300)
            if message["parent_header"].get("msg_id") == parent:
                shown.append((message["msg_type"], message["content"]))
                if interrupted and shown[-1][0] == "update_display_data":
                    interrupted = manager.interrupt_kernel()
        return shown

    try:
        client.wait_for_ready(timeout=120)
        errors = [content for kind, content in run(TRAIN % 100_000, interrupted=True) if kind == "error"]
        assert [error["ename"] for error in errors] == ["KeyboardInterrupt"]
        step = int(re.search(r"stopped by SIGINT, saved at step (\d+)", errors[0]["evalue"])[1])
        shown = run(TRAIN % (step + 2))
        assert [kind for kind, _ in shown].count("display_data") == 1  # the rest replaces it
        [result] = [content["data"] for kind, content in shown if kind == "execute_result"]
        assert f"step={step + 2}," in result["text/plain"] and "report.html" in result["text/html"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
