"""Training from Python: what the functions take, what they give, and how a notebook goes on after them."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import ml_collections
import pytest

import bertjax
from bertjax import experiment
from bertjax.config import default_config, frozen
from bertjax.log.logbook import Logbook

ROOT = pathlib.Path(__file__).parents[1]
TINY = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 32,
    "model.max_position_embeddings": 64,
    "phases": ((4, 32),),
    "batch_size": 16,
    "optimizer.warmup_steps": 2,
    "eval.rows": 32,
    "log.tensorboard": False,
    "execution.compilation_cache": "",
}


@pytest.fixture
def settings(random_store):
    return {**TINY, "data.corpus": str(random_store)}


def test_a_run_gives_its_numbers_and_its_model_and_a_second_call_goes_on(settings, tmp_path, capsys):
    before = dict(jax.config.values)
    workdir = tmp_path / "run"
    result = bertjax.train(default_config(), workdir, settings)
    assert (result.workdir, result.step) == (str(workdir), 4)
    assert {"mlm_loss", "mlm_accuracy", "nsp_accuracy"} <= result.metrics.keys()
    assert type(result.model.model).__name__ == "BertForPreTraining" and result.model.config.hidden_size == 16
    assert pathlib.Path(result.report).exists() and "mlm_loss" in result._repr_html_()
    assert "random weights" in capsys.readouterr().out
    again = bertjax.train(frozen(default_config()), workdir, settings | {"execution.dtype": "float32"})
    assert "already finished at step 4" in capsys.readouterr().out
    assert again.step == 4 and again == bertjax.Result.of(workdir)
    with pytest.raises(ValueError, match="other settings or data:\n  phases: "):
        bertjax.train(default_config(), workdir, settings | {"phases": ((5, 32),)})
    assert dict(jax.config.values) == before


def test_it_trains_inside_a_running_event_loop_and_in_a_thread(settings, tmp_path):
    async def cell():
        return bertjax.train(default_config(), tmp_path / "loop", settings)

    results = [asyncio.run(cell())]
    thread = threading.Thread(
        target=lambda: results.append(bertjax.train(default_config(), tmp_path / "thread", settings))
    )
    thread.start()
    thread.join()
    assert [result.step for result in results] == [4, 4]
    assert results[0].metrics == results[1].metrics


def test_ctrl_c_saves_and_the_same_call_goes_on(settings, tmp_path, monkeypatch):
    record = Logbook.train

    def interrupted(self, step, *rest):
        record(self, step, *rest)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Logbook, "train", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT, saved at step 2; start again to go on"):
        bertjax.train(default_config(), tmp_path, settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (tmp_path / "checkpoints" / "2").exists()
    assert bertjax.train(default_config(), tmp_path, settings).step == 4


def test_another_process_may_go_on_with_a_run_that_has_ended(settings, tmp_path):
    bertjax.train(default_config(), tmp_path, settings)
    program = "import sys; from bertjax.run.claim import claim; from etils import epath; claim(epath.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (
            "demo",
            {"lerning_rate": 1},
            "unknown setting --config.lerning_rate. Did you mean --config.optimizer.learning",
        ),
        ("demo", {"batch_size": "many"}, "batch_size='many' is a str; it must be a int"),
        ("demo", {"batch_size": 0}, "config.batch_size=0 must be at least 1"),
        ("classify", {}, "config.job='finetune': this experiment is one for bertjax.finetune"),
        ("dmeo", {}, "--config=dmeo: No such file or directory; an experiment that came with the"),
        (5, {}, "config=5 is no name of an experiment, config file, ConfigDict or Config"),
        (ml_collections.ConfigDict({"job": "pretrain", "layers": 2}), {}, "unknown setting --config.layers"),
        (default_config(), {}, "workdir is missing"),
    ],
)
def test_what_cannot_work_is_an_error_of_one_line(config, changes, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        bertjax.train(config, settings=changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config, workdir",
    [
        ("demo", "runs/demo"),
        ("bertjax:large:two_phase", "runs/large-two_phase"),
        (ROOT / "configs" / "demo.py", "runs/demo"),
    ],
)
def test_an_experiment_has_its_own_directory(config, workdir, monkeypatch):
    monkeypatch.setattr(experiment, "_run", lambda config, workdir: workdir)
    assert bertjax.train(config) == workdir


def test_an_error_brings_the_remedy_of_the_command_line(settings, tmp_path, monkeypatch):
    def full(config, workdir):
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr(experiment, "prepare", full)
    with pytest.raises(OSError, match="No space left") as error:
        bertjax.train(default_config(), tmp_path, settings)
    assert error.value.__notes__ == ["/disk/file: No space left on device; make room, then repeat the command"]
