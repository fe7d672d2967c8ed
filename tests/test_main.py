"""The command line: what it refuses, with which message and exit code."""

import operator
import os
import pathlib
import subprocess
import sys

import pytest

from bertjax.command_line import load_config, split_settings

ROOT = pathlib.Path(__file__).parents[1]


def command_line(*arguments):
    """Runs python -m bertjax.main in the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "bertjax.main", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config=configs/demo.py", "--config.lerning_rate=3"], "optimizer.learning_rate"),
        (["--config=configs/demo.py", "--config.batch_size=many"], "batch_size"),
        (["--config=configs/demo.py", "--config.data.nsp=maybe"], "data.nsp"),
        (["--config=configs/demo.py", "part-1.txt", "part-2.txt"], "quote wildcards"),
        (
            ["--config=configs/base.py", "--config.mesh=tensor"],
            "a group of settings: give one of them, as --config.mesh.auto",
        ),
        (["configs/demo.py"], "Did you mean --config=configs/demo.py?"),
        (["--config=configs/large.py:tow_phase"], "Did you mean 'two_phase'"),
        (["--config=configs/miniatures.py:L=4"], "both sizes"),
        (["--config=configs/absent.py"], "bertjax: --config=configs/absent.py: No such file"),
        (["--confg=configs/demo.py"], "config"),
        ([], "--config=configs/demo.py"),
        (["--config=configs/large.py"], "bertjax build_corpus"),
        (
            ["--config=configs/squad.py", "--config.task.options.files.dev=d.json"],
            "no 'files' to set a part of; give all of it, as --config.task.options.files=",
        ),
        (["--config=configs/glue.py:mrpc"], "Give --config.init_from=DIR"),
    ],
)
def test_wrong_command_is_one_message_and_exit_code_2(arguments, words):
    done = command_line(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 24  # one screen


SAVES = """
import resource
import numpy as np

def save(workdir):
    checkpoints = Checkpoints(workdir)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))  # as a disk that is full
    checkpoints.save(1, {"x": np.random.default_rng(0).random(100_000)})
    checkpoints.wait()

job.run = save
"""


@pytest.mark.parametrize(
    "name, what, message",
    [
        ("file/run", "job.run = Checkpoints", "bertjax: cannot write checkpoints to "),
        ("run", SAVES, "bertjax: checkpoint of step 1 could not be written to "),
    ],
)
def test_workdir_that_cannot_be_written_is_one_message(tmp_path, name, what, message):
    (tmp_path / "file").write_text("")
    program = (
        "from bertjax import main; from bertjax.pretraining import job;"
        "from bertjax.run.checkpoint import Checkpoints;"
        f"job.prepare = lambda config, workdir: workdir\n{what}\nmain.run()"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "--config=configs/base.py",
            "--config.data.corpus=store",
            f"--workdir={tmp_path / name}",
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_jax_is_there_asks_to_be_started_again(tmp_path, name):
    (tmp_path / "config.py").write_text(f"import signal, time\nsignal.raise_signal(signal.{name})\ntime.sleep(9)\n")
    done = command_line(f"--config={tmp_path}/config.py")
    assert done.returncode == 75
    assert f"stopped by {name} while no step was running" in done.stderr


def test_a_stopped_run_does_not_wait_for_what_still_compiles():
    program = """
import jax, jax.numpy as jnp, threading, time
from bertjax import main
from bertjax.pretraining import job
from bertjax.process.preemption import Preempted

def compile_for_ever():
    for number in range(10**9):
        jax.jit(lambda x: sum(jnp.sin(x + i + number) @ x for i in range(40))).lower(
            jnp.ones((8, 8))).compile()

def run(job):
    threading.Thread(target=compile_for_ever).start()
    time.sleep(1)
    raise Preempted(3, "SIGTERM")

job.prepare, job.run = lambda config, workdir: workdir, run
main.run()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--config=configs/base.py", "--config.data.corpus=store"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 75, done.stderr


@pytest.mark.parametrize("text, value", [("false", False), ("0", False), ("true", True)])
def test_switch_that_is_on_by_default_can_be_switched_off(text, value):
    config = load_config(str(ROOT / "configs/base.py"), [f"--config.data.nsp={text}"])
    assert config.data.nsp is value


@pytest.mark.parametrize(
    "setting, value",
    [
        ("task.options.text=Review Text", ("Review Text",)),
        ("task.options.text='Review Text', 'Title'", ("Review Text", "Title")),
        ("task.options.label=Is it good", "Is it good"),
        ("log.fill_mask=Paris, of course, is a [MASK].", ("Paris, of course, is a [MASK].",)),
        ("log.fill_mask=('A [MASK].', 'B [MASK].')", ("A [MASK].", "B [MASK].")),
        ("profile_steps=3, 5", (3, 5)),
    ],
)
def test_a_text_of_several_words_is_one_text_of_a_list(setting, value):
    config = load_config("bertjax:classify", [f"--config.{setting}"])
    assert operator.attrgetter(setting.partition("=")[0])(config) == value


@pytest.mark.parametrize(
    "setting, words",
    [
        ("data.nsp=no", "must be true or false"),
        ("batch_size=1.5", "must be a whole number"),
        ("masking.rate=15%", "must be a number"),
        ("task.options={'text':", "must be a dict, \"{'NAME': VALUE}\"; .NAME=VALUE sets one of its entries"),
    ],
)
def test_a_value_of_another_type_is_told_in_plain_words(setting, words):
    with pytest.raises(ValueError, match=f"--config.{setting}: {words}$"):
        load_config(str(ROOT / "configs/base.py"), [f"--config.{setting}"])


@pytest.mark.parametrize(
    "program, variant, words",
    [
        ("def get_config(name):\n    return {'a': 1}[name]\n", ":b", "line 2: KeyError: 'b'"),
        ("def get_config():\n    pass\n", ":b", "it has no variants: leave out :VARIANT"),
        ("def get_config(name):\n    pass\n", "", " needs a variant: FILE:VARIANT"),
        ("", "", "it defines no get_config()"),
        ("def get_config():\n    pass\n", "", "get_config() must return the settings"),
        ("def get_config():\n    return {'batch_size': 8}\n", "", "get_config() must return the settings"),
    ],
)
def test_mistake_in_a_config_file_is_told_as_one_of_the_file(tmp_path, program, variant, words):
    file = tmp_path / "mine.py"
    file.write_text(program)
    with pytest.raises(ValueError) as raised:
        load_config(f"{file}{variant}")
    assert str(file) in str(raised.value) and words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_of_a_task_need_not_stand_in_its_config_file():
    given = {"doc_stride": "64", "null_threshold": "-1.5", "files": "{'dev': 'd.json'}"}
    settings = [f"--config.task.options.{name}={value}" for name, value in given.items()]
    options = load_config(str(ROOT / "configs/squad.py:2.0"), settings).task.options
    assert (options.doc_stride, options.null_threshold, options.files.dev) == (64, -1.5, "d.json")


def test_help_needs_neither_settings_nor_jax():
    code = "import sys, bertjax.main; sys.exit(bool({'bertjax.config', 'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_config_lists_every_setting():
    done = command_line("--help_config")
    assert done.returncode == 0
    assert "--config.optimizer.learning_rate=0.0001" in done.stdout


# continued.py reads the checkpoint that it continues from.
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem != "continued")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_short_and_passes_the_checks(path):
    from bertjax.config_checks import check_config

    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    check_config(names["get_config"]())
    several = path.stem in ("recipes", "ablations", "modern")  # experiments in one file
    assert len(path.read_text().splitlines()) <= (100 if several else 60)


@pytest.mark.parametrize(
    "given, expected",
    [
        (["--config.phases=((2,32),)", "--config.phases=((3,32),)"], ["--config.phases=((3,32),)"]),
        (["-config.phases", "((2,32),)", "--config.phases=((3,32),)"], ["--config.phases=((3,32),)"]),
        (["--config.task.predict=dev", "--config.task.predict=test"], ["--config.task.predict=test"]),
        (["--config.task.options.a=1", "--config.task.options={'b': 2}"], ["--config.task.options={'b': 2}"]),
        (
            ["--config.task.options={'b': 2}", "--config.task.options.b", "-3"],
            ["--config.task.options={'b': 2}", "--config.task.options.b=-3"],
        ),
        (["--config.data.nsp", "--noconfig.data.nsp"], ["--config.data.nsp=false"]),
        (
            ["--config.data.nsp=false", "--config.data.nsp", "--config.seed", "-1"],
            ["--config.data.nsp=true", "--config.seed=-1"],
        ),
        (["--config.mesh.auto=false", "--config.mesh=auto"], ["--config.mesh.auto=true"]),
    ],
)
def test_the_last_one_of_a_setting_that_is_given_twice_wins(given, expected):
    assert split_settings(given) == ([], expected, [])


def test_files_and_settings_stand_in_any_order():
    found = split_settings(["--config.seed=1", "--config=a.py", "--json", "--config", "b.py"])
    assert found == (["a.py", "b.py"], ["--config.seed=1"], ["--json"])


def test_a_script_s_defaults_in_a_file_of_flags_give_way_to_the_command_line(tmp_path):
    (tmp_path / "flags").write_text("--config.phases=((2,32),)\n--config.seed=3\n")
    arguments = [f"--flagfile={tmp_path / 'flags'}", "--config.phases=((3,32),)"]
    assert split_settings(arguments)[1] == ["--config.seed=3", "--config.phases=((3,32),)"]


def test_a_text_that_begins_like_a_flag_is_a_text():
    from bertjax.tools.arguments import make_parser

    parser = make_parser("tool", "")
    parser.add_argument("--text")
    for text in ("-like this one", "--and this=one"):
        assert parser.parse_args(["--text", text]).text == text


def test_the_last_one_of_a_tool_s_flag_that_is_given_twice_wins():
    from bertjax.tools.arguments import add_boolean, make_parser

    parser = make_parser("tool", "")
    parser.add_argument("--steps", type=int)
    add_boolean(parser, "lower", True, "")
    found = parser.parse_args(["--steps=1", "--lower=true", "--steps=2", "--no-lower"])
    assert (found.steps, found.lower) == (2, False)


def test_what_follows_two_dashes_belongs_to_another_program():
    from bertjax.tools.arguments import make_parser

    parser = make_parser("tool", "")
    parser.add_argument("--steps", type=int)
    parser.add_argument("command", nargs="*")
    found = parser.parse_args(["--steps=1", "--", "--config=configs/demo.py", "-x"])
    assert found.command == ["--config=configs/demo.py", "-x"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--config=configs/demo.py", "--", "-x"])


@pytest.mark.parametrize("program", [["bertjax", "--help"], ["bertjax.main", "--help_config"]])
def test_output_that_cannot_be_written_is_one_line(program):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *program],
            cwd=ROOT,
            text=True,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode in (1, 2)
    assert done.stderr == ("bertjax: No space left on device; make room, then repeat the command\n")


WARNS = """
import logging

def warn(*_):
    logging.getLogger("hub").addHandler(logging.StreamHandler())
    logging.getLogger("hub").warning("trying again")
    logging.error("of a library")  # sets up a format with levels and names for all whose lines reach the root
    logging.getLogger("bertjax.room").warning("the vocabulary was cut off")
    raise ValueError("no more")

"""


@pytest.mark.parametrize(
    "program, arguments",
    [
        (
            "from bertjax import experiment, main\nexperiment.prepare = warn\nmain.run()",
            ["--config=configs/base.py", "--config.data.corpus=store"],
        ),
        (
            "from bertjax.tools import features\nfeatures.write_features = warn\nfeatures.main()",
            ["--model=m", "--file=README.md", "--out=f.npz"],
        ),
    ],
)
def test_a_warning_is_one_plain_line_whatever_a_library_does_to_the_log(program, arguments):
    done = subprocess.run(
        [sys.executable, "-c", WARNS + program, *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    told = ["trying again", "ERROR:root:of a library", "the vocabulary was cut off"]
    assert done.stderr.splitlines()[:3] == told, done.stderr
