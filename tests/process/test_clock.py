"""A run limited by wall clock: what moves its schedule, and that the trainer follows it."""

import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import Config, OptimizerSettings
from bertjax.process.clock import Budget, Clock, begun, first_step_done, milestones, process_age, reach
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.trainer import Phase, Trainer


class HandClock(Budget):
    """A budget whose time is set by hand."""

    now = 0.0

    def elapsed(self):
        return self._used + self.now


def test_age_is_the_time_since_bertjax_was_imported_and_not_that_of_a_shell_that_became_the_program():
    code = "import bertjax, time; time.sleep(0.3); from bertjax.process.clock import process_age; print(process_age())"
    command = f"sleep 1; exec {sys.executable} -c '{code}'"
    started = time.monotonic()
    age = float(subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout)
    assert 0.3 < age < time.monotonic() - started - 1


def test_the_budget_of_a_run_in_a_process_that_did_other_things_begins_with_the_run():
    time.sleep(0.3)
    before = process_age()
    with begun():
        time.sleep(0.05)
        assert 0.05 <= process_age() < 0.2
        assert Budget(1.0, 100).elapsed() < 0.2
    assert process_age() >= before > 0.3


def test_the_first_run_of_a_process_tells_where_its_start_took_time():
    with begun():
        time.sleep(0.06)
        reach("imports")
        time.sleep(0.1)
        for _ in range(2):  # phases
            reach("compiling")
        line = first_step_done()
        assert re.fullmatch(r"first step done 0\.[23] s .*: imports 0\.1, compiling 0\.1, first step 0\.\d", line)
        assert list(milestones()) == ["imports", "compiling", "first step"]
        assert first_step_done() is None  # of a suite's next run


def test_start_up_uses_time_but_no_schedule():
    clock = HandClock(minutes=1, total=100)
    clock.begin_phase(0, 0)
    clock.now = 20
    assert clock.position(1) == 1  # compiling still; only steps count
    clock.compiled()
    for now, place in ((20, 0), (30, 25), (40, 50), (59, 97), (60, 100), (99, 100)):
        clock.now = now
        assert clock.position(0) == place
    assert clock.position(100) == 100


def test_compiling_the_next_phase_stands_still_and_the_rest_is_stretched_to_the_end():
    clock = HandClock(minutes=1, total=1000)
    clock.begin_phase(0, 0)
    clock.now = 10
    clock.compiled()
    clock.now = 50
    assert clock.position(7) == 800
    clock.begin_phase(1, 7)
    clock.now = 55
    assert clock.position(8) == 800 and clock.phase_start == 7
    clock.compiled()
    clock.now = 57.5
    assert clock.position(9) == 900
    assert clock.last_step(9) == 9 + 2  # two steps since the phase began moved it by 100
    clock.now = 60
    assert clock.position(10) == 1000


def test_a_resumed_run_goes_on_with_the_time_and_the_place_of_the_checkpoint():
    first = HandClock(minutes=1, total=100)
    first.begin_phase(0, 0)
    first.compiled()
    first.now = 30
    saved = first.saved(5)
    second = HandClock(1, 100, saved)
    assert second.position(5) == 50
    second.begin_phase(0, 5)
    assert second.phase_start == 0
    second.now = 10  # its own start-up
    second.compiled()
    second.now = 20
    assert second.position(6) == 75  # half of what was left, in half of the time left
    second.now = 30
    assert second.position(7) == 100


def test_a_run_that_has_ended_goes_on_with_more_minutes_and_only_then():
    first = HandClock(minutes=1, total=100)
    first.begin_phase(0, 0)
    first.compiled()
    first.now = 45
    first.begin_phase(1, 3)
    first.compiled()
    first.now = 61
    saved = first.saved(9)
    assert saved["budget/position"] == 100 and saved["budget/phase_position"] == 75
    assert HandClock(1, 100, saved).position(9) == 100
    longer = HandClock(2, 100, saved)
    assert longer.position(9) == 75 and longer.phase_start == 3  # rows of phase 1 go on
    much_longer = HandClock(61 / 60 / 0.8, 100, saved)
    assert much_longer.position(9) == 80
    much_longer.begin_phase(1, 9)
    much_longer.compiled()
    assert much_longer.phase_start == 3
    much_longer.now = much_longer.seconds - 61
    assert much_longer.position(10) == 100
    assert HandClock(2, 100, {**saved, "budget/position": 100.0}).position(100) == 100  # all steps


def test_the_seconds_of_a_run_are_those_of_all_its_processes():
    first = Clock(10)
    saved = first.saved(3)
    assert 0 <= saved["run/seconds"] < 5
    assert 100 <= Clock(10, {"run/seconds": 100.0}).saved(5)["run/seconds"] < 105
    assert Clock(10, {}).elapsed() < 5  # of a checkpoint of an earlier version


# ----------------------------------------------------------------------------------- the trainer


class Line:
    """Fits y = a x by one parameter; the gradient is never 0."""

    def init(self, key):
        return {"a": jnp.zeros(())}

    def prepare(self, batch, key):
        return batch

    def denominators(self, batch):
        return {}

    def loss(self, params, batch, denominators, dropout_key):
        total = jnp.sum((params["a"] * batch["x"] - 9.0) ** 2)
        return total, {"loss": (total, jnp.float32(len(batch["x"])))}


class Book:
    def __init__(self):
        self.rates, self.steps, self.evaluated, self.losses = [], [], [], []

    def train(self, step, last_step, metrics):
        self.rates.append(metrics["learning_rate"])
        self.steps.append((step, last_step))
        self.losses.append(metrics["loss"])

    def evaluation(self, step, metrics):
        self.evaluated.append(step)

    def flush(self, *text):
        pass

    message = close = flush


def test_rate_phases_evaluations_and_the_end_follow_the_clock(tmp_path):
    clock = HandClock(minutes=100 / 60, total=10_000)
    begun = []

    def batches(phase):
        def stream(first):
            begun.append((phase, first))
            while True:
                clock.now += 10  # every batch takes ten of the hundred seconds
                yield {"x": np.ones(8, np.float32)}

        return stream

    trainer = Trainer(
        make_optimizer(OptimizerSettings(), learning_rate_schedule("linear", 1.0, 0, 10_000)),
        make_mesh(devices=jax.devices()[:1]),
    )
    book, checkpoints = Book(), Checkpoints(tmp_path / "checkpoints")
    objective = Line()
    state = trainer.fit(
        trainer.init(objective),
        [Phase(6_000, objective, batches("short")), Phase(10_000, objective, batches("long"))],
        Config().replace({"log.every_steps": 1, "eval.every_steps": 2_500, "checkpoint.every_steps": 0}),
        logbook=book,
        evaluate=lambda state: {"loss": 1.0},
        checkpoints=checkpoints,
        clock=clock,
    )
    checkpoints.close()
    steps = int(state.step)
    assert 8 <= steps <= 11
    assert [name for name, _ in begun] == ["short", "long"] and begun[1] == ("long", 0)
    assert book.rates[0] == 1 and book.rates[-1] < 0.5
    assert all(a >= b for a, b in zip(book.rates, book.rates[1:], strict=False))
    assert book.steps[-1] == (steps, steps)
    # 2,500 passed, 5,000 or both at once, ...
    assert len(book.evaluated) in (3, 4) and book.evaluated[-1] == steps
    saved = checkpoints.metrics(steps)
    assert saved["budget/position"] == 10_000 and saved["budget/phase"] == 1
    assert HandClock(100 / 60, 10_000, saved).position(steps) == 10_000  # finished


def test_a_line_has_the_means_of_one_phase_also_where_the_clock_ends_it():
    clock, book = HandClock(minutes=100 / 60, total=10_000), Book()

    def batches(x):
        def stream(first):
            while True:
                clock.now += 10
                yield {"x": np.full(8, x, np.float32)}

        return stream

    trainer = Trainer(
        make_optimizer(OptimizerSettings(), learning_rate_schedule("constant", 1.0, 0, 10_000)),
        make_mesh(devices=jax.devices()[:1]),
    )
    phases = [Phase(5_500, Line(), batches(1.0)), Phase(10_000, Line(), batches(0.0))]
    settings = Config().replace({"log.every_steps": 1000})
    trainer.fit(trainer.init(phases[0].objective), phases, settings, logbook=book, clock=clock)
    assert [step for step, _ in book.steps][0] == 1 and len(book.steps) == 2
    assert book.losses[-1] == 81.0  # (0 - 9)**2, with nothing of the phase before
