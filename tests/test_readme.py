"""Commands, links and names of the README and the pages of docs/ are those of the code.

Every block of commands is read: tools, flags, configurations, settings, packages and files that it names
must exist. test_docs_run.py runs the blocks.
"""

import argparse
import configparser
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "launch" / "README.md",
        ROOT / "tests" / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    if not path.is_symlink()
}
# Programs of others. Of their arguments only files of the repository are checked.
OTHERS = {"docker", "kubectl", "sbatch", "hf", "gcloud", "tail", "mkdir", "cat", "export", ".", "ruff", "mkdocs"}
OTHERS |= {"pip", "jupyter", "bash", "cd"}


@dataclass(frozen=True)
class Command:
    """A command of a block of a page, as words; without redirections and the text of here-documents."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def module(self) -> str:
        """'bertjax.tools.convert' of `python -m bertjax.tools.convert ...`; '' for other programs."""
        return self.words[2] if self.words[:2] == ["python", "-m"] else ""

    @property
    def flags(self) -> list[str]:
        return self.words[3:]

    def __str__(self) -> str:
        return f"{self.page}: {self.line[:90]}"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[Command]:
    """The commands of the page's bash blocks, and those in its running text and tables."""
    text = "\n".join(blocks(PAGES[page], "bash"))
    text = re.sub(r"<<'END'\n.*?^END$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:python -m |pip |pytest |launch/\\w+\\.sh |sbatch |docker )[^`\n]+)`", PAGES[page])
    for line in [*text.replace("\\\n", " ").splitlines(), *inline]:
        for part in re.split(r"\s(?:&&|;)\s", line):
            part = re.sub(r"^(\w+=\S+ )+", "", part.split(" > ")[0].strip())
            if part and not part.startswith("#"):
                yield Command(page, part)


ALL = [command for page in PAGES for command in commands(page)]
OURS = [command for command in ALL if command.module.startswith("bertjax")]


class Parsed(Exception):
    """The command line has been read."""


@pytest.fixture
def only_parse(monkeypatch):
    """argparse reads a command line in full, and then leaves the program."""

    def parse_and_leave(parse):
        def parse_args(self, args=None, namespace=None):
            parse(self, args, namespace)
            raise Parsed

        return parse_args

    from bertjax.tools.arguments import Parser

    for parser in (argparse.ArgumentParser, Parser):
        monkeypatch.setattr(parser, "parse_args", parse_and_leave(parser.parse_args))
        monkeypatch.setattr(parser, "parse_intermixed_args", parse_and_leave(parser.parse_intermixed_args))


@pytest.mark.parametrize(
    "command", [each for each in ALL if re.match(r"bertjax\.tools\.|tests\.benchmarks\.", each.module)], ids=str
)
def test_a_tool_takes_the_flags_that_it_is_shown_with(command, only_parse, capsys):
    flags = [flag for flag in command.flags if flag != "..."]
    name = command.module.rpartition(".")[2]
    if name in ("NAME", "TOOL") or not flags:
        return
    if name == "plan":
        told = subprocess.run(
            [sys.executable, "-m", command.module, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        known = re.findall(r"--(?:\[no\])?(\w+)", told.stdout)
        assert {flag.lstrip("-").split("=")[0] for flag in flags if not flag.startswith("--config.")} <= {*known}
        return
    module = importlib.import_module(command.module)
    with pytest.raises((Parsed, SystemExit)) as left:
        module.main(flags)
    refused = capsys.readouterr().err
    if "required" not in refused:  # in running text a command may be named with one of its flags
        assert left.type is Parsed, refused


READS_ALL = """
import json, os, sys
from bertjax import main
for number, words in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["bertjax", *words, "--help_config"]
        main.run()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]):
        print("in", words, file=sys.stderr)
"""


def test_configurations_and_settings_of_all_commands_exist():
    runs = []
    for command in ALL:
        words = command.words
        if "bertjax.main" in words:
            words = words[words.index("bertjax.main") + 1 :]
        flags = [word for word in words if re.match(r"--config[.=]", word)]
        # continued.py reads the checkpoint, which is there when the page is run.
        if flags and "lerning_rate" not in command.line and "continued.py" not in command.line:
            runs.append(flags)
    for text in PAGES.values():
        settings = re.findall(r"`(--config\.[a-z_.]+=[^`\s]*)`", text)
        settings = [flag.replace("'", "").replace('"', "") for flag in settings if "options" not in flag]
        runs.append(
            ["--config=configs/demo.py"]
            + [flag for flag in settings if not re.search("lerning_rate|[A-Z]{2}|NAME|=N$|=$", flag)]
        )
    done = subprocess.run(
        [sys.executable, "-c", READS_ALL, json.dumps(runs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert sum(map(len, runs)) > 100


@pytest.mark.parametrize("command", [each for each in ALL if each not in OURS], ids=str)
def test_other_commands_name_programs_packages_and_files_that_exist(command):
    program, *words = command.words
    if program.startswith("launch/") and program.endswith(".sh"):
        text = (ROOT / program).read_text() + (ROOT / "launch" / "lib.sh").read_text()
        for flag in words[: words.index("--")] if "--" in words else words:
            assert not flag.startswith("--") or flag.split("=")[0] in text, flag
    elif "pip" in (program, command.module):
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        for extra in re.findall(r"\.\[(.*?)\]", command.line):
            assert set(extra.split(",")) <= {*setup["options.extras_require"]}
    elif program == "pytest":
        marks = re.findall(r"^    (\w+): ", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
        for word in re.findall(r"-m (?:'([^']+)'|(\w+))", command.line):
            assert set(" ".join(word).split()) - {"and", "not"} <= {*marks}
    elif not command.module:
        assert program in OTHERS, f"{command}: how is this to be checked?"
    elif command.module != "venv":
        assert importlib.util.find_spec(command.module), command
    for word in words:
        if re.match(r"(launch|tests|configs|docs|bertjax)/", word):
            assert [*ROOT.glob(word.split(":")[0])], word


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_their_language(page):
    assert set(re.findall(r"^```(\w*)\n(?=.*?^```$)", PAGES[page], re.MULTILINE | re.DOTALL)[::1]) <= {
        "bash",
        "python",
        "text",
        "",  # the end of a block
    }
    openings = re.findall(r"^```.*$", PAGES[page], re.MULTILINE)[::2]
    assert all(opening in ("```bash", "```python", "```text") for opening in openings), openings


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_a_page_exist(page):
    for name in re.findall(r"`((?:bertjax|configs|tests|launch|docs)/[\w./]*)(?::[^`]*)?`", PAGES[page]):
        assert (ROOT / name).exists(), name


def titles(path: pathlib.Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)):
        if "://" in target:
            continue
        file, _, title = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not title or title in titles(path), target


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r": (\w+\.md)$", site, re.MULTILINE)) == sorted(
        path.name for path in (ROOT / "docs").glob("*.md")
    )
    home = (ROOT / "docs" / "index.md").read_text()
    assert all(f"({path.name})" in home for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")


def test_the_rooms_are_those_that_the_test_of_their_order_holds():
    order = re.search(r"^ROOMS = \((.*?)^\)", (ROOT / "tests" / "test_walls.py").read_text(), re.DOTALL | re.MULTILINE)
    rooms = [room for room in re.findall(r'"(\w+)"', order.group(1)) if not room.startswith("__")]
    table = re.findall(r"^\| (`.*?) \|", PAGES["docs/design.md"], re.MULTILINE)
    assert [re.sub(r"\.py$|/$", "", name) for row in table for name in re.findall(r"`(.*?)`", row)] == rooms


def test_the_first_two_blocks_are_the_two_commands():
    """.ci/run reads them word for word."""
    first, second = blocks(README, "bash")[:2]
    assert first.startswith("python -m pip install") and "configs/demo.py" in first
    assert "[test]" in second and second.rstrip().endswith("pytest -q")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_name_what_exists(page):
    import bertjax

    for block in blocks(PAGES[page], "python"):
        compile(block, page, "exec")
        for name in re.findall(r"\bbertjax\.(\w+)", block):
            assert name in bertjax.__all__, name


@pytest.fixture
def short_runs(tmp_path, monkeypatch):
    """Trainings in a new directory with a small corpus, of a few steps each."""
    from bertjax import experiment

    read_config = experiment.read_config

    def shortened(config, job, settings=None):
        short = {"log.tensorboard": False}
        if job == "pretrain":
            short |= {"phases": ((2, 64),), "optimizer.warmup_steps": 1, "batch_size": 16, "eval.rows": 32}
            short |= {"data.demo_megabytes": 0.3, "data.demo_vocab_size": 1000, "model.hidden_size": 32}
        elif "task.epochs" not in (settings or {}):
            short |= {"task.epochs": 1}
        return read_config(config, job, {**(settings or {}), **short})

    monkeypatch.setattr(experiment, "read_config", shortened)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for number in range(40):
        lines = (f"Document {number} says {word} {number + i} times." for i, word in enumerate(PAGES))
        (tmp_path / "corpus" / f"{number}.txt").write_text("\n".join(lines))


@pytest.mark.slow
def test_the_python_of_its_page_runs(short_runs, capsys):
    for block in blocks(PAGES["docs/python.md"], "python"):
        if "import pandas" in block and not importlib.util.find_spec("pandas"):
            continue
        exec(compile(block, "docs/python.md", "exec"), {})
    printed = capsys.readouterr().out
    for expected in ("'mlm_loss'", "('bad', 'good') [[0.", "(2, 32)", "Did you mean --config.optimizer.learning_rate?"):
        assert expected in printed, printed
