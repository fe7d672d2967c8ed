"""The trainer with a two-layer regression: what must not depend on mesh, batching or accidents."""

import contextlib
import dataclasses
import functools
import itertools
import json
import signal
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bertjax.config import CheckpointSettings, Config, OptimizerSettings
from bertjax.log.logbook import Logbook
from bertjax.process.preemption import Preempted
from bertjax.run import checkpoint
from bertjax.run.checkpoint import Checkpoints
from bertjax.training import loop
from bertjax.training.loop import DataError, NotFiniteError
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch
from bertjax.training.trainer import Phase, Trainer

ROWS, WIDTH = 32, 8


@dataclasses.dataclass(frozen=True)
class Regression:
    """Mean squared error of a small MLP; `noise` and `dropout` make masks that show in the loss."""

    dropout: float = 0.0
    noise: float = 0.0

    def init(self, key):
        a, b = jax.random.split(key)
        return {
            "layer_0": {
                "intermediate": {"kernel": jax.random.normal(a, (WIDTH, 16)) / 3},
                "output": {"kernel": jax.random.normal(b, (16, 1)) / 3, "bias": jnp.zeros(1)},
            }
        }

    def prepare(self, batch, key):
        return {**batch, "x": batch["x"] + self.noise * jax.random.normal(key, batch["x"].shape)}

    def denominators(self, batch):
        return {"rows": batch["weight"].sum()}

    def loss(self, params, batch, denominators, dropout_key):
        hidden = jnp.tanh(batch["x"] @ params["layer_0"]["intermediate"]["kernel"])
        if dropout_key is not None and self.dropout:
            kept = jax.random.bernoulli(dropout_key, 1 - self.dropout, hidden.shape)
            hidden = hidden * kept / (1 - self.dropout)
        output = params["layer_0"]["output"]
        error = batch["weight"] * ((hidden @ output["kernel"] + output["bias"])[:, 0] - batch["y"])
        total = jnp.sum(error**2)
        loss = total / jnp.maximum(denominators["rows"], 1)
        return loss, {"mse": (total, batch["weight"].sum())}


def batch_of(step, rows=ROWS):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(1), "weight": np.ones(rows, np.float32)}


def batches(start, rows=ROWS):
    while True:
        yield batch_of(start, rows)
        start += 1


@functools.cache  # so that tests share compiled steps
def regression(dropout=0.0, noise=0.0):
    return Regression(dropout, noise)


def trainer_on(sizes=(8, 1, 1), steps=20, **options):
    return cached_trainer(sizes, steps, **options)


@functools.cache
def cached_trainer(sizes, steps, optimizer="adamw", **options):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    optimizer = make_optimizer(OptimizerSettings(optimizer), learning_rate_schedule("linear", 3e-2, 2, steps))
    return Trainer(optimizer, mesh, seed=7, **options)


class Memory:
    """A logbook that keeps what it is told."""

    def __init__(self):
        self.records, self.evaluations, self.messages = [], [], []

    def train(self, step, last_step, metrics):
        self.records.append({"step": step, **metrics})

    def evaluation(self, step, metrics):
        self.evaluations.append({"step": step, **metrics})

    def message(self, text):
        self.messages.append(text)

    def flush(self):
        pass

    close = flush


def config(log=100, evaluate=0, save=0, **others):
    """Settings of the loop; `others` by their names, '.' written as '__'."""
    steps = {"log.every_steps": log, "eval.every_steps": evaluate, "checkpoint.every_steps": save}
    return Config().replace(steps | {name.replace("__", "."): value for name, value in others.items()})


def keep(last):
    return CheckpointSettings(keep_last=last, keep_best=0)


def losses(trainer, objective=None, steps=10, **options):
    objective = objective or regression()
    book = Memory()
    state = trainer.fit(trainer.init(objective), [Phase(steps, objective, batches)], config(1), logbook=book, **options)
    return np.array([record["loss"] for record in book.records]), state


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ------------------------------------------------------------------ independence of mesh and batch


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4)])
def test_losses_do_not_depend_on_the_mesh_even_with_masks_and_dropout(sizes):
    objective = regression(dropout=0.2, noise=0.1)
    expected, one = losses(trainer_on((1, 1, 1)), objective)
    found, many = losses(trainer_on(sizes), objective)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), many.params, one.params)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_equals_the_large_batch(sizes, accumulation):
    expected, one = losses(trainer_on((1, 1, 1)), regression(noise=0.1))
    found, many = losses(trainer_on(sizes, accumulation=accumulation), regression(noise=0.1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), many.params, one.params)


def test_accumulation_with_dropout_does_not_depend_on_the_mesh():
    objective = regression(dropout=0.2)
    expected, _ = losses(trainer_on((1, 1, 1), accumulation=4), objective)
    found, _ = losses(trainer_on((2, 2, 2), accumulation=4), objective)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_micro_batches_are_cut_without_moving_rows_between_devices():
    trainer = trainer_on((8, 1, 1), accumulation=4)
    step = trainer.train_step(regression())
    batch = put_batch(batch_of(0), trainer.mesh)
    text = step.lower(trainer.init(regression()), batch).compile().as_text()
    assert not [op for op in ("all-to-all", "collective-permute", "all-gather") if op in text]


def test_dropout_changes_with_step_and_micro_batch_but_not_with_the_run():
    objective = regression(dropout=0.5)
    same = {
        "x": np.ones((ROWS, WIDTH), np.float32),
        "y": np.ones(ROWS, np.float32),
        "weight": np.ones(ROWS, np.float32),
    }
    trainer = Trainer(make_optimizer(OptimizerSettings(), 0.0), make_mesh(), accumulation=1)
    seen = []
    for _ in range(2):
        state = trainer.init(objective)
        for _ in range(3):
            state, metrics = trainer.train_step(objective)(state, put_batch(same, trainer.mesh))
            seen.append(float(metrics["loss"]))
    assert len(set(seen[:3])) == 3 and seen[:3] == seen[3:]

    halves = Trainer(make_optimizer(OptimizerSettings(), 0.0), make_mesh(), accumulation=2)
    _, gradients_of_two = halves._gradients(
        objective, trainer.init(objective).params, put_batch(same, halves.mesh), jax.random.key(0)
    )
    _, gradients_of_one = trainer._gradients(
        objective, trainer.init(objective).params, put_batch(same, halves.mesh), jax.random.key(0)
    )
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), gradients_of_one, gradients_of_two)
    assert max(jax.tree.leaves(difference)) > 1e-3


# --------------------------------------------------------------------------------- resume and save


def run_with_checkpoints(directory, until, steps=20, sizes=(8, 1, 1)):
    objective = regression(dropout=0.2, noise=0.1)
    trainer = trainer_on(sizes, steps)
    checkpoints = Checkpoints(directory, keep(2))
    state = trainer.init(objective)
    if checkpoints.latest() is not None:
        state, _ = checkpoints.restore(trainer.abstract_state(objective))
    book = Memory()
    state = trainer.fit(
        state, [Phase(until, objective, batches)], config(log=1, save=4), logbook=book, checkpoints=checkpoints
    )
    checkpoints.close()
    return state, book.records


def test_resume_is_bit_identical_to_an_undisturbed_run(tmp_path):
    whole, records = run_with_checkpoints(tmp_path / "a", 20)
    run_with_checkpoints(tmp_path / "b", 9)
    resumed, rest = run_with_checkpoints(tmp_path / "b", 20)
    assert_same(whole, resumed)
    assert [r["step"] for r in rest] == list(range(10, 21))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [r[name] for r in records[9:]] == [r[name] for r in rest]


def test_resume_on_another_mesh_goes_on_within_rounding(tmp_path):
    whole, _ = run_with_checkpoints(tmp_path / "a", 12)
    run_with_checkpoints(tmp_path / "b", 6)
    resumed, _ = run_with_checkpoints(tmp_path / "b", 12, sizes=(1, 2, 1))
    assert int(resumed.step) == 12
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), whole.params, resumed.params)


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path):
    whole, _ = run_with_checkpoints(tmp_path, 6)
    again, records = run_with_checkpoints(tmp_path, 6)
    assert records == []
    assert_same(whole, again)


def test_a_signal_saves_says_so_and_leaves(tmp_path):
    trainer, objective, book = trainer_on(), regression(), Memory()
    checkpoints = Checkpoints(tmp_path, keep(1))

    def interrupted(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield batch

    with pytest.raises(Preempted):
        trainer.fit(trainer.init(objective), [Phase(9, objective, interrupted)], logbook=book, checkpoints=checkpoints)
    assert checkpoints.latest() == 3
    assert book.messages[-1] == "stopped by SIGINT, saved at step 3; start again to go on"
    checkpoints.close()


@pytest.mark.parametrize("moment", ["evaluation", "last save"])
def test_a_signal_is_not_lost_while_no_step_runs(tmp_path, monkeypatch, moment):
    trainer, objective, book = trainer_on(), regression(), Memory()
    checkpoints = Checkpoints(tmp_path, keep(1))
    rows = []

    def heldout():
        for number in range(40):
            if number == 3 and moment == "evaluation":
                signal.raise_signal(signal.SIGTERM)
            rows.append(number)
            yield batch_of(number)

    def wait():
        Checkpoints.wait(checkpoints)
        if checkpoints.latest() == 4:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGTERM)

    if moment == "last save":
        monkeypatch.setattr(checkpoints, "wait", wait)
    with pytest.raises(Preempted):
        trainer.fit(
            trainer.init(objective),
            [Phase(4, objective, batches)],
            config(evaluate=2),
            logbook=book,
            checkpoints=checkpoints,
            evaluate=lambda state: trainer.evaluate(objective, state.params, heldout()),
        )
    assert checkpoints.latest() == (2 if moment == "evaluation" else 4)
    assert len(rows) == (4 if moment == "evaluation" else 80)  # at once, not after the 40
    assert len(book.evaluations) == (0 if moment == "evaluation" else 2)
    checkpoints.close()


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("moment", ["step", "evaluation"])
def test_an_evaluation_that_a_signal_left_out_is_done_by_the_next_start(tmp_path, moment, step):
    trainer, objective = trainer_on(), regression()

    def start(directory, stopped_at=0):
        checkpoints, book = Checkpoints(directory, keep(2)), Memory()
        state = trainer.init(objective)
        if checkpoints.latest() is not None:
            state, _ = checkpoints.restore(trainer.abstract_state(objective))

        def stream(first):
            for number, batch in enumerate(batches(first), first + 1):
                if moment == "step" and number == stopped_at:
                    signal.raise_signal(signal.SIGTERM)
                yield batch

        def evaluate(state):
            if moment == "evaluation" and int(state.step) == stopped_at:
                signal.raise_signal(signal.SIGTERM)
            return trainer.evaluate(objective, state.params, [batch_of(99)])

        settings, outputs = config(evaluate=2, save=2), dict(logbook=book, checkpoints=checkpoints, evaluate=evaluate)
        with pytest.raises(Preempted) if stopped_at else contextlib.nullcontext():
            trainer.fit(state, [Phase(4, objective, stream)], settings, **outputs)
        checkpoints.close()
        return book.evaluations, checkpoints.ranked()

    undisturbed, ranked = start(tmp_path / "a")
    before, _ = start(tmp_path / "b", stopped_at=step)
    after, ranked_after = start(tmp_path / "b")
    assert [one["step"] for one in after] == ([2, 4] if step == 2 else [4])
    assert (before + after, ranked_after) == (undisturbed, ranked)
    assert start(tmp_path / "b") == ([], ranked)  # and once only


def test_a_signal_at_an_early_stop_names_the_step_that_is_saved(tmp_path):
    trainer, objective, book = trainer_on(), regression(), Memory()
    checkpoints = Checkpoints(tmp_path, keep(1))

    def evaluate(state):
        if int(state.step) == 4:
            signal.raise_signal(signal.SIGTERM)
            raise loop.EarlyStop("no better")
        return {"loss": 1.0}

    settings, outputs = config(evaluate=2, save=2), dict(logbook=book, checkpoints=checkpoints, evaluate=evaluate)
    with pytest.raises(Preempted):
        trainer.fit(trainer.init(objective), [Phase(8, objective, batches)], settings, **outputs)
    checkpoints.close()
    assert checkpoints.latest() == 2
    assert book.messages[-1] == "stopped by SIGTERM, saved at step 2; start again to go on"


@pytest.mark.parametrize("phase", [1, 2])
def test_a_signal_while_the_first_batch_is_made_does_not_wait_for_it(tmp_path, phase):
    """Workers that start, and the pairs of a large corpus, take longer than a machine that is pre-empted has left."""
    trainer, objective, book, made = trainer_on(), regression(), Memory(), threading.Event()
    checkpoints = Checkpoints(tmp_path, keep(1))

    def slow(start):
        signal.raise_signal(signal.SIGTERM)
        assert made.wait(60)
        yield from batches(start)

    phases = [Phase(4, objective, batches), Phase(8, objective, slow)] if phase == 2 else [Phase(4, objective, slow)]
    try:
        with pytest.raises(Preempted):
            trainer.fit(trainer.init(objective), phases, logbook=book, checkpoints=checkpoints)
    finally:
        made.set()
    step = 4 if phase == 2 else None
    assert checkpoints.latest() == step
    where = ", saved at step 4" if step else " before the first step"
    assert book.messages[-1] == f"stopped by SIGTERM{where}; start again to go on"
    checkpoints.close()


def test_a_signal_while_a_step_is_compiled_does_not_wait_for_it(tmp_path):
    trainer, objective, book = cached_trainer.__wrapped__((8, 1, 1), 20), regression(), Memory()
    checkpoints = Checkpoints(tmp_path, keep(1))
    trainer.programs._started["train", id(objective)] = Future()  # for ever

    def stream(start):
        signal.raise_signal(signal.SIGTERM)
        yield from batches(start)

    with pytest.raises(Preempted):
        trainer.fit(trainer.init(objective), [Phase(4, objective, stream)], logbook=book, checkpoints=checkpoints)
    assert checkpoints.latest() is None
    assert book.messages[-1] == "stopped by SIGTERM before the first step; start again to go on"
    checkpoints.close()


def test_saving_and_evaluating_between_donated_steps(tmp_path):
    # The state of step s must be on disk as it was, though step s + 1 reuses its memory.
    trainer, objective = trainer_on(), regression()
    states = {}

    def evaluate(state):
        states[int(state.step)] = jax.device_get(state)
        return trainer.evaluate(objective, state.params, [batch_of(99)])

    checkpoints = Checkpoints(tmp_path, keep(10))
    book = Memory()
    trainer.fit(
        trainer.init(objective),
        [Phase(6, objective, batches)],
        config(log=2, evaluate=1, save=1),
        logbook=book,
        checkpoints=checkpoints,
        evaluate=evaluate,
    )
    for step in range(1, 7):
        saved, _ = checkpoints.restore(trainer.abstract_state(objective), step)
        assert_same(saved, states[step])
        assert checkpoints.metrics(step)["eval/mse"] == book.evaluations[step - 1]["eval/mse"]


def test_nan_debugging_turns_donation_off_and_names_the_error():
    class Bad(Regression):
        def loss(self, params, batch, denominators, dropout_key):
            loss, sums = super().loss(params, batch, denominators, dropout_key)
            return loss + jnp.log(batch["y"].min() * 0 - 1), sums

    trainer, objective = trainer_on((1, 1, 1)), Bad()
    state = trainer.init(objective)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        trainer.train_step(objective)(state, put_batch(batch_of(0), trainer.mesh))
    assert np.isfinite(state.params["layer_0"]["output"]["bias"]).all()  # not deleted


# ------------------------------------------------------------------------------------- bad numbers


def poisoned(bad_steps):
    def iterate(start):
        for step, batch in enumerate(batches(start), start):
            if step in bad_steps:
                batch["y"] = np.full_like(batch["y"], np.inf)
            yield batch

    return iterate


@pytest.mark.parametrize("optimizer", ["adamw", "optax.lion", "optax.contrib.muon"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(optimizer):
    trainer, objective = trainer_on(optimizer=optimizer), regression()
    step = trainer.train_step(objective)
    state = trainer.init(objective)
    source = poisoned({2})(0)
    for _ in range(2):
        state, _ = step(state, put_batch(next(source), trainer.mesh))
    before = jax.device_get(state)
    state, metrics = step(state, put_batch(next(source), trainer.mesh))
    assert not np.isfinite(float(metrics["loss"]))
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (3, 1, 1)
    assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    state, metrics = step(state, put_batch(next(source), trainer.mesh))
    assert (int(state.skipped), int(state.skipped_in_row)) == (1, 0)
    assert np.isfinite(float(metrics["loss"]))


def test_too_many_bad_steps_in_a_row_stop_the_run_with_an_explanation():
    trainer, objective = trainer_on(), regression()
    with pytest.raises(NotFiniteError, match="3 steps in a row up to step 7 .* learning"):
        phases = [Phase(20, objective, poisoned({1, *range(4, 20)}))]
        trainer.fit(trainer.init(objective), phases, config(optimizer__max_skipped_in_row=3), logbook=Memory())


@pytest.mark.parametrize(
    ("error", "source"),
    [
        (NotFiniteError, poisoned(range(3, 20))),
        (DataError, lambda start: itertools.chain(itertools.islice(batches(start), 4), damaged())),
    ],
)
def test_an_error_in_the_loop_finishes_the_save_that_has_begun(tmp_path, monkeypatch, error, source):
    write = checkpoint.formats.write_manifest

    def slowly(*arguments):
        time.sleep(0.2)
        write(*arguments)

    monkeypatch.setattr(checkpoint.formats, "write_manifest", slowly)
    trainer, objective = trainer_on(), regression()
    checkpoints = Checkpoints(tmp_path / "run")
    with pytest.raises(error):
        trainer.fit(
            trainer.init(objective),
            [Phase(20, objective, source)],
            config(save=1, optimizer__max_skipped_in_row=2),
            logbook=Memory(),
            checkpoints=checkpoints,
        )
    assert checkpoints._pending is None and checkpoints.steps()[-1] >= 4
    assert not list((tmp_path / "run").glob("tmp.*"))


def test_a_data_worker_that_was_killed_is_told_with_the_remedy():
    def killed(start):
        yield from itertools.islice(batches(start), 2)
        raise RuntimeError("Worker process was terminated unexpectedly with exit code -9.")

    trainer, objective = trainer_on(), regression()
    with pytest.raises(DataError, match="before step 3 .*exit code -9.*memory.*fewer config.data.workers"):
        trainer.fit(trainer.init(objective), [Phase(9, objective, killed)], config(), logbook=Memory())


def damaged():
    raise ValueError("store: the file is damaged")
    yield


def test_a_run_that_ends_in_an_error_is_no_longer_watched():
    trainer, objective = trainer_on(), regression()
    with pytest.raises(ValueError, match="the data ended"):
        phases = [Phase(3, objective, lambda start: iter(()))]
        trainer.fit(trainer.init(objective), phases, config(watchdog_seconds=60.0), logbook=Memory())
    watching = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    for thread in watching:
        thread.join(5)
    assert not any(thread.is_alive() for thread in watching)


def test_a_batch_without_any_target_changes_nothing_but_weight_decay():
    trainer, objective = Trainer(make_optimizer(OptimizerSettings(weight_decay=0), 0.1), make_mesh()), regression()
    state = trainer.init(objective)
    before = jax.device_get(state.params)
    batch = batch_of(0) | {"weight": np.zeros(ROWS, np.float32)}
    state, metrics = trainer.train_step(objective)(state, put_batch(batch, trainer.mesh))
    assert float(metrics["loss"]) == 0 and float(metrics["mse"]) == 0
    assert_same(before, state.params)


# ------------------------------------------------------------------------------------ loop and log


def test_the_logged_learning_rate_is_the_one_used():
    book, trainer = Memory(), trainer_on(steps=20)
    trainer.fit(trainer.init(regression()), [Phase(10, regression(), batches)], config(1), logbook=book)
    schedule = learning_rate_schedule("linear", 3e-2, 2, 20)
    for record in book.records:  # the update that made step s used schedule(s - 1)
        assert record["learning_rate"] == pytest.approx(float(schedule(record["step"] - 1)))


def test_log_evaluation_and_last_step():
    trainer, objective, book = trainer_on(), regression(), Memory()
    trainer.fit(
        trainer.init(objective),
        [Phase(7, objective, batches, 320, 1e6)],
        config(log=3, evaluate=5),
        logbook=book,
        evaluate=lambda state: {"loss": 1.0, "squad/f1": 2.0},
    )
    assert [record["step"] for record in book.records] == [1, 3, 6, 7]
    assert book.evaluations == [{"step": step, "eval/loss": 1.0, "squad/f1": 2.0} for step in (5, 7)]
    assert book.records[1]["tokens_per_second"] == pytest.approx(320 / book.records[1]["step_time"])
    assert book.records[0]["step_time"] is None  # the first step is compilation
    assert book.records[1]["mfu"] is None  # the peak of a CPU is not known
    assert 0 <= book.records[1]["data_wait"] < book.records[1]["step_time"]


def test_a_short_run_logs_every_step_and_a_long_one_every_hundredth():
    book = Memory()
    fit(0, book, steps=6)
    assert [record["step"] for record in book.records] == [1, 2, 3, 4, 5, 6]
    assert [Config().log.interval(steps) for steps in (1, 50, 51, 344, 5000, 1_000_000)] == [1, 1, 2, 7, 100, 100]


def fit(log_every, book, steps=10):
    trainer, objective = trainer_on((1, 1, 1)), regression()
    trainer.fit(trainer.init(objective), [Phase(steps, objective, batches)], config(log_every), logbook=book)
    return {record["step"]: record for record in book.records}


def test_a_line_has_the_means_of_the_steps_since_the_one_before():
    single, some = fit(1, Memory()), fit(4, Memory())
    assert list(some) == [1, 4, 8, 10]
    for before, step in ((0, 1), (1, 4), (4, 8), (8, 10)):
        since = [single[s] for s in range(before + 1, step + 1)]
        for name in ("loss", "mse", "grad_norm"):
            assert some[step][name] == sum(line[name] for line in since) / len(since)
        assert some[step]["learning_rate"] == since[-1]["learning_rate"]


@pytest.mark.parametrize("saved_at", [3, 6, 7])
def test_a_line_after_a_resume_is_the_mean_that_it_would_have_been(tmp_path, saved_at):
    calm = Memory()
    trainer, objective = trainer_on((1, 1, 1)), regression()
    trainer.fit(trainer.init(objective), phases_of(objective, batches), config(4), logbook=calm)

    def broken(start):
        return itertools.chain(itertools.islice(batches(start), saved_at + 1 - start), [None])

    rough, checkpoints = Memory(), Checkpoints(tmp_path)
    with pytest.raises(DataError):
        trainer.fit(
            trainer.init(objective),
            phases_of(objective, broken),
            config(log=4, save=saved_at),
            logbook=rough,
            checkpoints=checkpoints,
        )
    state, step = checkpoints.restore(trainer.abstract_state(objective))
    assert step == saved_at
    rough.records = [record for record in rough.records if record["step"] <= step]
    trainer.fit(state, phases_of(objective, batches), config(4), logbook=rough, checkpoints=checkpoints)
    checkpoints.close()
    lines = [[(r["step"], r["loss"], r["mse"], r["grad_norm"]) for r in book.records] for book in (calm, rough)]
    assert lines[0] == lines[1] and [line[0] for line in lines[0]] == [1, 4, 8, 10]


def phases_of(objective, batches):
    return [Phase(6, objective, batches), Phase(10, objective, lambda start: batches(6 + start))]


def test_a_long_silence_is_ended_by_a_line_that_is_not_recorded(monkeypatch):
    monkeypatch.setattr(loop, "SIGN_OF_LIFE_S", 0.0)
    book = Memory()
    assert list(fit(10, book)) == [1, 10]
    assert book.messages[0] == "compiling the training step ..."
    assert [line.split("  ")[0] for line in book.messages[1:]] == [f"step {step}/10" for step in range(2, 10)]


@pytest.mark.parametrize("known", [True, False])
def test_a_long_evaluation_says_how_far_it_is(monkeypatch, known):
    monkeypatch.setattr(loop, "SIGN_OF_LIFE_S", 0.0)
    trainer, objective, book = trainer_on(), regression(), Memory()
    heldout = [batch_of(number) for number in range(3)]

    def evaluate(state):
        return trainer.evaluate(objective, state.params, heldout if known else (batch for batch in heldout))

    phases = [Phase(1, objective, batches)]
    trainer.fit(trainer.init(objective), phases, config(evaluate=1), logbook=book, evaluate=evaluate)
    lines = [line for line in book.messages if line.startswith("evaluating")]
    of, eta = ("/3", "  ETA 0 s") if known else ("", "")
    assert lines == [f"evaluating at step 1: batch {done}{of}{eta}" for done in (1, 2, 3)]


def test_the_next_step_is_dispatched_before_metrics_are_fetched():
    events = []

    class Watched(Memory):
        def train(self, step, last_step, metrics):
            events.append(f"log {step}")

    def source(start):
        for step, batch in enumerate(batches(start), start + 1):
            events.append(f"batch {step}")
            yield batch

    trainer, objective = trainer_on(), regression()
    trainer.fit(trainer.init(objective), [Phase(4, objective, source)], config(1), logbook=Watched())
    assert events == ["batch 1", "batch 2", "log 1", "batch 3", "log 2", "batch 4", "log 3", "log 4"]


def test_phases_share_one_optimizer_state_and_schedule():
    trainer, book = trainer_on(steps=20), Memory()
    first, second = regression(), Regression()
    starts = []

    def longer(start):
        starts.append(start)
        return batches(start, rows=2 * ROWS)

    state = trainer.fit(
        trainer.init(first), [Phase(5, first, batches), Phase(8, second, longer)], config(1), logbook=book
    )
    assert int(state.step) == 8 and starts == [0]
    schedule = learning_rate_schedule("linear", 3e-2, 2, 20)
    assert [r["learning_rate"] for r in book.records] == pytest.approx([float(schedule(step)) for step in range(8)])


def test_data_that_ends_early_is_an_error():
    trainer, objective = trainer_on(), regression()
    with pytest.raises(ValueError, match="data ended after step 2"):
        trainer.fit(
            trainer.init(objective),
            [Phase(5, objective, lambda start: iter([batch_of(0), batch_of(1)]))],
            logbook=Memory(),
        )


def test_evaluation_counts_each_row_once_and_is_deterministic():
    trainer, objective = trainer_on(), regression(dropout=0.5)
    params = trainer.init(objective).params
    rows = batch_of(3, 40)
    split = [
        {k: v[:32] for k, v in rows.items()},
        {k: np.concatenate([v[32:], np.zeros_like(v[:24])]) for k, v in rows.items()},
    ]
    found = trainer.evaluate(objective, params, split)
    hidden = np.tanh(rows["x"] @ np.asarray(params["layer_0"]["intermediate"]["kernel"]))
    errors = (hidden @ np.asarray(params["layer_0"]["output"]["kernel"]))[:, 0] - rows["y"]
    assert found["mse"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert trainer.evaluate(objective, params, split) == found


def test_evaluation_without_data_is_refused():
    trainer = trainer_on()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        trainer.evaluate(regression(), trainer.init(regression()).params, [])


def test_given_parameters_start_a_fresh_run():
    trainer, objective = trainer_on((2, 2, 2)), regression()
    params = jax.device_get(trainer.init(objective).params)
    params = jax.tree.map(lambda x: x + 1, params)
    state = trainer.init(objective, params)
    assert int(state.step) == 0
    assert_same(state.params, params)
    assert state.params["layer_0"]["intermediate"]["kernel"].sharding.spec == P("fsdp", "tensor")
    trainer.train_step(objective)(state, put_batch(batch_of(0), trainer.mesh))
    assert_same(params, jax.tree.map(lambda x: x, params))


def test_one_compilation_serves_all_steps_and_evaluations():
    trainer, objective = trainer_on(), Regression(noise=0.3)
    step = trainer.train_step(objective)
    state = trainer.init(objective)
    for index in range(3):
        state, _ = step(state, put_batch(batch_of(index), trainer.mesh))
        trainer.evaluate(objective, state.params, [batch_of(7), batch_of(8)])
    assert step._cache_size() == 1
    assert trainer._compiled["evaluate", id(objective)][1]._cache_size() == 1


def test_what_was_compiled_ahead_is_what_runs():
    compiled = []

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(seconds)

    trainer, objective, book = trainer_on(), Regression(noise=0.4), Memory()
    state = trainer.init(objective)
    trainer.compile_ahead("train", objective, batch_of(0))
    trainer.compile_ahead("evaluate", objective, batch_of(0))
    for kind in ("train", "evaluate"):
        trainer.wait_for(kind, objective)
    jax.monitoring.register_event_duration_secs_listener(listen)
    trainer.fit(state, [Phase(3, objective, batches)], config(1), logbook=book)
    trainer.evaluate(objective, trainer.init(objective).params, [batch_of(7)])
    assert len(book.records) == 3 and not compiled


def test_records_of_a_real_logbook_are_the_documented_names(tmp_path):
    trainer, objective = trainer_on(), regression()
    with Logbook(tmp_path, write=lambda line: None) as book:
        trainer.fit(trainer.init(objective), [Phase(4, objective, batches)], config(2), logbook=book)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "step_time", "data_wait"} <= set(
        records[-1]
    )


def test_profile_is_written_on_request(tmp_path):
    trainer, objective, book = trainer_on((1, 1, 1)), regression(), Memory()
    book.directory = tmp_path
    trainer.fit(trainer.init(objective), [Phase(4, objective, batches)], config(profile_steps=(2, 3)), logbook=book)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert "steps 2 to 3" in book.messages[-1]
