"""What `pip install` gives: contents of the wheel, and its commands away from any checkout."""

import configparser
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import bertjax

ROOT = pathlib.Path(__file__).parents[1]


def setup_lines(section: str, name: str) -> list[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return [line for line in parser[section][name].split("\n") if line.strip()]


def test_setup_cfg_names_every_package():
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "bertjax").rglob("*.py")}
    assert set(setup_lines("options", "packages")) == on_disk | {"bertjax.configs"}, (
        "add the new package to [options] packages, or a wheel lacks it"
    )


def test_every_public_name_is_where_the_package_looks_for_it():
    missing = [name for name in bertjax.__all__ if not hasattr(bertjax, name)]
    assert not missing


def test_constraints_hold_one_version_within_the_range_of_every_dependency():
    requirements = pytest.importorskip("packaging.requirements")
    pinned = {}
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pinned[canonical(name)] = version
    for line in setup_lines("options", "install_requires"):
        if not line.startswith("#"):
            needed = requirements.Requirement(line)
            assert canonical(needed.name) in pinned, f"{needed.name} has no constraint"
            assert needed.specifier.contains(pinned[canonical(needed.name)]), line


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_help_of_the_command_names_every_tool():
    from bertjax import __main__ as command

    runnable = {
        path.parent.name if path.name == "__main__.py" else path.stem
        for path in (ROOT / "bertjax" / "tools").rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
        and (path.parent.name == "tools" or path.name == "__main__.py")
    }
    assert set(command.tools()) == runnable
    assert all(text for text in command.tools().values()), "a tool without a docstring"
    for name in runnable:
        assert f"\n  {name} " in command.usage()


@pytest.mark.parametrize(
    "value, file",
    [
        ("bertjax:large", "large.py"),
        ("bertjax:large:two_phase", "large.py:two_phase"),
        ("bertjax:miniatures:L=4,H=256", "miniatures.py:L=4,H=256"),
    ],
)
def test_a_named_experiment_is_a_file_that_exists(value, file):
    from bertjax.command_line import config_file

    found = config_file(value)
    assert found.endswith(file) and pathlib.Path(found.split(".py")[0] + ".py").is_file()
    assert config_file("configs/large.py:two_phase") == "configs/large.py:two_phase"


def test_a_config_file_may_be_in_the_home_directory(monkeypatch, tmp_path):
    from bertjax.command_line import load_config

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("from bertjax.config import default_config as get_config\n")
    assert load_config("~/mine.py", ["--config.batch_size=7"]).batch_size == 7


def test_an_unknown_experiment_or_tool_is_answered_with_the_nearest(capsys, monkeypatch):
    from bertjax import __main__ as command
    from bertjax.command_line import config_file

    with pytest.raises(ValueError, match="Did you mean 'large'"):
        config_file("bertjax:lagre:two_phase")
    monkeypatch.setattr(sys, "argv", ["bertjax", "biuld_corpus"])
    with pytest.raises(SystemExit, match="2"):
        command.run()
    assert "Did you mean 'build_corpus'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel of this tree, built from a copy, so that no build/ is left behind or taken in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("bertjax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    isolation = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, f"--wheel-dir={source}", str(source)],
        check=True,
    )
    return next(source.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command of a fresh environment that holds the wheel, in an empty directory.

    What bertjax depends on is seen through a path file, bertjax itself is not.
    """
    home = tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    site = next((home / "venv" / "lib").glob("python*")) / "site-packages"
    python = str(home / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    # Only now, or pip would see a bertjax that is installed here, and be content with it.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment["PATH"] = f"{home / 'venv' / 'bin'}:{environment['PATH']}"
    (home / "empty").mkdir()

    def command(*words: str, code: int = 0) -> str:
        done = subprocess.run(words, cwd=home / "empty", env=environment, text=True, capture_output=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    where = command("python", "-c", "import bertjax; print(bertjax.__file__)")
    assert where.startswith(str(site)), where
    return command


@pytest.mark.slow
def test_wheel_holds_every_module_and_experiment_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "bertjax").rglob("*.py")}
    expected |= {f"bertjax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert names == expected | {"bertjax/py.typed", "bertjax/log/report/page.html"}


@pytest.mark.slow
def test_experiments_of_the_wheel_are_found_by_name(installed):
    assert "build_corpus" in installed("bertjax", "--help")
    described = installed("bertjax", "--config=bertjax:large", "--help_config")
    assert "--config.optimizer.learning_rate=0.0001" in described
    # It gets as far as asking for text: the file was read and its variant applied.
    assert "needs a corpus" in installed("bertjax", "--config=bertjax:large:two_phase", code=2)
    assert "two_phase" in installed("bertjax", "--config=bertjax:large:tow_phase", code=2)


@pytest.mark.slow
def test_from_text_to_an_answer_with_the_installed_commands(installed, tmp_path):
    sentences = [
        f"the {a} {b} near the {c} ."
        for a in ("red", "old", "small")
        for b in ("house", "tree", "river")
        for c in ("bridge", "market", "station")
    ]
    text = "\n\n".join("\n".join(sentences[i : i + 9]) for i in range(0, 27, 3))
    (tmp_path / "text.txt").write_text("\n\n".join([text] * 20))
    installed(
        "bertjax", "train_vocab", f"--input={tmp_path}/text.txt", "--vocab_size=100", f"--output={tmp_path}/vocab"
    )
    installed(
        "bertjax",
        "build_corpus",
        f"--input={tmp_path}/text.txt",
        "--workers=2",
        f"--tokenizer={tmp_path}/vocab",
        f"--output={tmp_path}/store",
        "--heldout_fraction=0.2",
    )
    installed(
        "bertjax",
        "--config=bertjax:demo",
        f"--config.data.corpus={tmp_path}/store",
        "--config.phases=((2,32),)",
        "--config.batch_size=8",
        "--config.log.every_steps=1",
        "--config.optimizer.warmup_steps=1",
        "--config.log.fill_mask=()",
        f"--workdir={tmp_path}/run",
    )
    answer = installed(
        "bertjax", "predict", f"--model={tmp_path}/run/model", "--task=fill-mask", "--text=the red [MASK] ."
    )
    assert '"token"' in answer
    assert (tmp_path / "run" / "report.html").exists()
