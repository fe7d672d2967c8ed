"""What hangs is named and ends the process; what is slow, or was stopped itself, does not."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import Config, OptimizerSettings
from bertjax.process.watchdog import EXIT_HUNG, Watchdog
from bertjax.training import loop
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.trainer import Phase, Trainer

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_hung_process_ends_with_what_hangs_and_the_stacks():
    script = (
        "import time\nfrom bertjax.process.watchdog import Watchdog\n"
        "def stuck_in_a_collective():\n    time.sleep(60)\n"
        "Watchdog(0.5).doing('step 7', 'another process')\nstuck_in_a_collective()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, env=ENVIRONMENT)
    assert result.returncode == EXIT_HUNG == 76
    first, *stacks, last = result.stderr.strip().splitlines()
    assert first == "watchdog: step 7 hangs. Stacks of all threads, the main one last:"
    assert "stuck_in_a_collective" in "".join(stacks[-3:])
    assert re.fullmatch(
        r"watchdog: process \d+ on \S+: step 7 has not ended for 1 s \(limit: "
        r"--config.watchdog_seconds=0.5\)\. Suspect another process\. Exit code 76: the same "
        r"command goes on from the newest checkpoint\.",
        last,
    )


def test_the_watchdog_is_quiet_while_things_end_and_after_stop():
    watchdog = Watchdog(0.4)
    for _ in range(6):
        threading.Event().wait(0.1)
        watchdog.doing("the same", "nobody")
    watchdog.stop()
    threading.Event().wait(0.6)
    Watchdog(0).doing("nothing", "nobody")


def test_what_has_no_usual_length_is_given_time():
    watchdog = Watchdog(0.2)
    watchdog.doing("compiling", "the compiler", patiently=True)
    threading.Event().wait(0.8)
    watchdog.stop()


def test_time_in_which_the_process_itself_was_stopped_does_not_count():
    script = (
        "import time\nfrom bertjax.process.watchdog import Watchdog\n"
        "Watchdog(1).doing('step 7', '')\nprint('up', flush=True)\ntime.sleep(0.3)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.6)
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 0
    process.stdout.close()


# ------------------------------------------------------------------------- what the loop says


class Square:
    def init(self, key):
        return {"kernel": jnp.ones((4, 4))}

    def prepare(self, batch, key):
        return batch

    def denominators(self, batch):
        return {}

    def loss(self, params, batch, denominators, dropout_key):
        total = jnp.sum((batch["x"] @ params["kernel"]) ** 2)
        return total, {"mse": (total, jnp.float32(8))}


class Hang(BaseException):
    """Stands for a call that never comes back; no error, after which a save would be finished."""


class Book:
    def message(self, text):
        pass

    close = flush = evaluation = train = lambda self, *_: None


class Storage:
    directory = "gs://bucket/run"

    def __init__(self, hangs):
        self.hangs = hangs

    def save(self, step, state, metrics):
        if step == self.hangs.get("save"):
            raise Hang

    def wait(self):
        if "wait" in self.hangs:
            raise Hang

    def check(self):
        pass


def batch():
    return {"x": np.ones((8, 4), np.float32)}


@pytest.mark.parametrize(
    ("hangs", "expected"),
    [
        ({"data": 3}, ("the batch of step 3", "the disk of config.data.corpus, or a data worker")),
        ({"evaluation": 2}, ("the evaluation at step 2, after 2 batches,", "the disk of")),
        ({"save": 4}, ("saving step 4, or the checkpoint before it", "the storage of gs://bucket/run")),
        ({"wait": 6}, ("writing the checkpoint of step 6", "the storage of gs://bucket/run")),
        ({"step": 5}, ("step 5", "another process of the run")),
    ],
)
def test_the_watchdog_knows_what_the_loop_waits_for(monkeypatch, hangs, expected):
    told = []

    class Listening(Watchdog):
        def doing(self, what, suspects, patiently=False):
            told.append((what, suspects, patiently))

    def rows(start):
        for step in range(start + 1, 9):
            if step == hangs.get("data"):
                raise Hang
            yield batch()

    def heldout():
        for number in range(4):
            if number == hangs.get("evaluation"):
                raise Hang
            yield batch()

    monkeypatch.setattr(loop, "Watchdog", Listening)
    trainer, objective = Trainer(make_optimizer(OptimizerSettings(), 1e-3), make_mesh()), Square()
    if "step" in hangs:
        compiled, done = trainer.train_step(objective), []

        def step(state, rows):
            done.append(1)
            if len(done) == hangs["step"]:
                raise Hang
            return compiled(state, rows)

        monkeypatch.setattr(trainer, "train_step", lambda objective: step)
    with pytest.raises(Hang):
        trainer.fit(
            trainer.init(objective),
            [Phase(6, objective, rows)],
            Config().replace({"checkpoint.every_steps": 2, "eval.every_steps": 2}),
            logbook=Book(),
            checkpoints=Storage(hangs),
            evaluate=lambda state: trainer.evaluate(objective, state.params, heldout()),
        )
    what, suspects, patiently = told[-1]
    assert what == expected[0]
    assert expected[1] in suspects
    assert patiently == ("save" in hangs or "wait" in hangs)
    compiling = {name for name, _, patient in told if patient and name.startswith("step")}
    assert compiling == {"step 1", "step 2"}  # the second is asked for while the first compiles
