"""A cloud for the launch tests: the scripts run as a user runs them, against fake_gcloud.py."""

import ast
import dataclasses
import marshal
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
REPO = HERE.parents[1]


def make_program(path: pathlib.Path, text: str) -> None:
    """An executable file; the place of a real program on PATH."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@dataclasses.dataclass
class Cloud:
    """The fake's state, and runs of the launch scripts against it."""

    root: pathlib.Path
    environment: dict[str, str]
    repo: pathlib.Path = REPO

    def plays(self, replies: dict[str, list[dict]]) -> None:
        """Scripts the next replies of each verb (see fake_gcloud.py)."""
        (self.root / "plays").write_bytes(marshal.dumps(replies))

    def has_slice(self, state: str, *, setup: bool = False, started: bool = False) -> None:
        (self.root / "slice").write_text(state)
        for name, present in (("setup", setup), ("started", started)):
            if present:
                (self.root / name).touch()

    def run(self, command: str | list[str], stdin: str = "", **environment: str):
        """Runs `launch/<command>`; the text is split as a shell would."""
        words = ["bash", "-c", f"exec launch/{command}"] if isinstance(command, str) else command
        return subprocess.run(
            words,
            cwd=self.repo,
            text=True,
            capture_output=True,
            input=stdin,
            env={**self.environment, **environment},
            timeout=60,
        )

    @property
    def calls(self) -> list[list[str]]:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [ast.literal_eval(line) for line in lines]

    @property
    def story(self) -> list[str]:
        """The calls in short: 'create', 'describe', 'scp', 'delete', or what ssh ran."""
        return [short(words) for words in self.calls]


def short(words: list[str]) -> str:
    if words[3] != "ssh":
        return words[3]
    command = next((word.removeprefix("--command=") for word in words if word.startswith("--command=")), "shell")
    if "tar -xzf" in command:
        return "unpack"
    return command.split()[2] if "host.sh" in command else command.split()[0]


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> Cloud:
    root, programs = tmp_path / "gcloud", tmp_path / "bin"
    root.mkdir()
    programs.mkdir()
    fake = HERE / "fake_gcloud.py"
    make_program(programs / "gcloud", f'#!/bin/sh\nexec "{sys.executable}" -S -I "{fake}" "$@"\n')
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("BERTJAX_", "SLURM_", "CLOUDSDK_"))
    } | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FAKE_GCLOUD": str(root),
        "BERTJAX_BACKOFF": "0",
        "BERTJAX_POLL": "0",
        "BERTJAX_ATTEMPTS": "4",
        "BERTJAX_ZONE": "us-west4-a",
    }
    return Cloud(root, environment)


@pytest.fixture
def small_repo(tmp_path: pathlib.Path) -> pathlib.Path:
    """A git checkout with the launch scripts and one file of each kind that git tells apart."""
    repo = tmp_path / "checkout"
    shutil.copytree(REPO / "launch", repo / "launch", ignore=shutil.ignore_patterns("colab", "__pycache__"))
    for name in ("tracked.py", "deleted.py", "with space.txt"):
        (repo / name).write_text(name)
    (repo / ".gitignore").write_text("runs/\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(repo)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run(git + words, check=True, capture_output=True)
    (repo / "tracked.py").write_text("changed")
    (repo / "untracked.py").write_text("new")
    (repo / "deleted.py").unlink()
    (repo / "runs").mkdir()
    (repo / "runs" / "model.bin").write_text("large")
    return repo
