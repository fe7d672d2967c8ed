"""The program itself as two processes of one machine: from nothing, killed, and in error."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
TINY = [
    "--config.model.num_hidden_layers=1",
    "--config.model.hidden_size=16",
    "--config.model.num_attention_heads=2",
    "--config.model.intermediate_size=16",
    "--config.phases=((6,128),)",
    "--config.batch_size=8",
    "--config.eval.every_steps=0",
    "--config.eval.rows=16",
    "--config.checkpoint.every_steps=1",
    "--config.log.every_steps=1",
    "--config.optimizer.warmup_steps=1",
    "--config.log.tensorboard=False",
    "--config.execution.compilation_cache=",
]
DEMO = ["--config.data.corpus=docstrings", "--config.data.demo_megabytes=0.3", "--config.data.demo_vocab_size=800"]


@pytest.fixture
def pair(tmp_path):
    """Starts both processes of a run; their outputs are files."""
    started = []

    def start(config, workdir, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for number in range(2):
            out = open(tmp_path / f"out.{number}", "w")
            started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-u",
                        "-m",
                        "bertjax.main",
                        f"--config={ROOT}/configs/{config}.py",
                        f"--workdir={workdir}",
                        *flags,
                        f"--coordinator=localhost:{port}",
                        "--processes=2",
                        f"--process_id={number}",
                    ],
                    stdout=out,
                    stderr=out,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(sys.path),
                        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                    },
                )
            )
        return started[-2:]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends(pair_of_processes):
    return [process.wait(timeout=300) for process in pair_of_processes]


def last_lines(tmp_path):
    return [(tmp_path / f"out.{number}").read_text().strip().splitlines()[-1] for number in range(2)]


def test_two_processes_work_from_the_first_command_on_and_after_a_maker_was_killed(pair, tmp_path):
    workdir = tmp_path / "run"
    processes = pair("base", workdir, *TINY, *DEMO)
    lock = workdir / ".corpus.lock"
    while not lock.exists() or not lock.read_text():
        assert processes[0].poll() is None
        time.sleep(0.02)
    maker = int(lock.read_text().split()[1])
    os.kill(maker, signal.SIGKILL)
    codes = ends(processes)
    assert sorted(codes) == [-signal.SIGKILL, 77]
    # Until it learns that its peer is lost, the survivor makes what the killed one has begun.
    gathered_by_survivor = "Gathering the demo corpus" in (tmp_path / f"out.{processes[0].pid == maker:d}").read_text()

    assert ends(pair("base", workdir, *TINY, *DEMO)) == [0, 0]
    said = "".join((tmp_path / f"out.{number}").read_text() for number in range(2))
    if not (gathered_by_survivor and "Gathering" not in said):
        assert said.count("Gathering the demo corpus") == 1
        assert "waiting for process" in said and "which makes the demo corpus" in said
    assert (workdir / "model" / "model.safetensors").exists()
    assert not list(workdir.glob(".corpus*"))
    assert ends(pair("base", workdir, *TINY, *DEMO)) == [0, 0]
    assert "already finished at step 6" in (tmp_path / "out.0").read_text()


def test_an_error_in_the_loop_finishes_the_save_and_is_the_last_line(pair, tmp_path):
    codes = ends(
        pair(
            "base",
            tmp_path / "run",
            *TINY,
            *DEMO,
            "--config.phases=((60,128),)",
            "--config.optimizer.learning_rate=1e30",
            "--config.optimizer.max_skipped_in_row=3",
        )
    )
    assert codes == [1, 1]
    for line in last_lines(tmp_path):
        assert line.startswith("bertjax: 3 steps in a row up to step ")
    steps = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert max(steps) >= 4


def test_two_processes_fine_tune_and_the_time_of_both_starts_is_told(pair, tmp_path):
    words = [*SPECIALS, "good", "bad", "film"]
    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    params = jax.jit(lambda key: init_params(BertModel(config), key))(jax.random.key(0))
    write_directory(tmp_path / "start", config, params, "BertModel", WordPieceTokenizer(words, do_lower_case=True))
    for name in ("train.tsv", "dev.tsv"):
        rows = [f"film {label}\t{label}" for label in ("good", "bad") * 16]
        (tmp_path / name).write_text("\n".join(["text\tlabel", *rows]) + "\n")
    flags = [
        f"--config.init_from={tmp_path / 'start'}",
        f"--config.task.data={tmp_path}",
        "--config.task.name=table",
        "--config.batch_size=8",
        "--config.task.epochs=2",
        "--config.task.max_length=32",
        "--config.log.tensorboard=False",
        "--config.execution.compilation_cache=",
        "--config.task.options={'files': {'train': 'train.tsv', 'dev': 'dev.tsv'}}",
    ]
    seconds = []
    for _ in range(2):
        assert ends(pair("classify", tmp_path / "run", *flags)) == [0, 0], last_lines(tmp_path)
        seconds.append(json.loads((tmp_path / "run" / "result.json").read_text())["seconds"])
    assert seconds[1] > seconds[0]
    assert "accuracy" in (tmp_path / "out.0").read_text()
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"examples.json", "map.json", "report.html"} <= written
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
