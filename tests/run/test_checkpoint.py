"""Checkpoints: bit-equal on any device count, never skipped, never lost, corrupt ones noticed."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import CheckpointSettings
from bertjax.formats import checkpoint as formats
from bertjax.formats.checkpoint import CheckpointError, SavedStates, resolve_directory
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.sharding import abstract, make_mesh, tree_shardings


def mesh_of(*sizes):
    return make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])


def state_of(value, mesh=None, rows=8):
    rng = np.random.default_rng(value)
    tree = {
        "step": np.int32(value),
        "params": {
            "layer_0": {"intermediate": {"kernel": rng.normal(size=(rows, 16)).astype(np.float32)}},
            "half": rng.normal(size=4).astype(jnp.bfloat16),
        },
    }
    return jax.device_put(tree, tree_shardings(tree, mesh or mesh_of(8, 1, 1)))


def assert_same(a, b):
    def check(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, a, b)


def rules(last=3, best=0, every=0, metric="eval/loss"):
    return CheckpointSettings(keep_last=last, keep_best=best, keep_every=every, metric=metric)


def saved(directory, steps, rules=rules(), mode="min"):  # noqa: B008
    checkpoints = Checkpoints(directory, rules, mode)
    for step in steps:
        checkpoints.save(step, state_of(step), {"eval/loss": abs(step - 2.5)})
    checkpoints.wait()
    return checkpoints


# ------------------------------------------------------------------------------- save and restore


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((8, 1, 1), (1, 1, 1)),
        ((8, 1, 1), (1, 2, 1)),
        ((1, 1, 1), (2, 2, 2)),
        ((1, 8, 1), (1, 1, 8)),
        ((2, 2, 2), (1, 4, 1)),
    ],
)
def test_restore_on_other_devices_is_bit_equal(tmp_path, before, after):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state_of(7, mesh_of(*before)))
    target = abstract(state_of(0), mesh_of(*after))
    state, step = checkpoints.restore(target)
    assert step == 7
    assert_same(state, state_of(7))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, target)


def test_restore_to_numpy_needs_no_target_and_keeps_dtypes(tmp_path):
    checkpoints = saved(tmp_path, [4])
    state, step = checkpoints.restore_numpy()
    assert step == 4 and isinstance(state["params"]["half"], np.ndarray)
    assert_same(state, jax.device_get(state_of(4)))


def test_another_dtype_is_refused(tmp_path):
    checkpoints = saved(tmp_path, [1])
    mesh = mesh_of(1, 1, 1)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding) if x.dtype == jnp.float32 else x,
        abstract(state_of(0), mesh),
    )
    with pytest.raises(ValueError, match="kernel is float32 in the checkpoint and bfloat16"):
        checkpoints.restore(target)


def test_another_model_is_refused_by_name_and_shape_and_is_not_called_corrupt(tmp_path):
    checkpoints = saved(tmp_path, [1, 2])
    with pytest.raises(ValueError, match=r"kernel is \(8, 16\) in the checkpoint and \(4, 16\)"):
        checkpoints.restore(abstract(state_of(0, rows=4), mesh_of(1, 1, 1)))
    other = {**state_of(0), "new": jnp.zeros(2)}
    del other["params"]["half"]
    with pytest.raises(ValueError, match="not in the checkpoint: new; only in .*params/half"):
        checkpoints.restore(abstract(other, mesh_of(1, 1, 1)))


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path, rules(20))
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    for step in range(10):
        state = state_of(step)
        checkpoints.save(step, state)
        advance(state)
    for step in range(10):
        assert_same(checkpoints.restore_numpy(step)[0], jax.device_get(state_of(step)))


def test_a_restored_state_may_be_donated(tmp_path):
    checkpoints = saved(tmp_path, [3])
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    target = abstract(state_of(0), mesh_of(1, 1, 1))
    first = jax.device_get(advance(checkpoints.restore(target)[0]))
    assert_same(first, jax.device_get(advance(checkpoints.restore(target)[0])))


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = saved(tmp_path, [3, 5])
    checkpoints.save(5, state_of(50), {"eval/loss": 0.0})
    assert_same(checkpoints.restore_numpy(5)[0], jax.device_get(state_of(50)))
    assert checkpoints.metrics(5) == {"eval/loss": 0.0}
    assert checkpoints.steps() == [3, 5]


# --------------------------------------------------------------------------------------- retention


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = saved(tmp_path, range(1, 9), rules(2, best=1))
    assert checkpoints.steps() == [2, 7, 8]  # |step - 2.5| is least at 2 and 3; the earlier counts
    assert checkpoints.best() == 2


def test_best_may_be_the_largest(tmp_path):
    checkpoints = saved(tmp_path, range(1, 5), rules(1, best=2), "max")
    assert checkpoints.steps() == [1, 4]
    assert [step for step, _ in checkpoints.ranked()] == [1, 4]


def test_nothing_old_is_deleted_when_the_new_one_fails(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1], rules(1))

    def full_disk(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bertjax.formats.checkpoint.write_json", full_disk)
    checkpoints.save(2, state_of(2))
    with pytest.raises(CheckpointError, match=r"step 2 .* No space left .* untouched: \[1\]"):
        checkpoints.wait()
    assert checkpoints.steps() == [1] and not list(tmp_path.glob("tmp.*"))
    assert_same(checkpoints.restore_numpy()[0], jax.device_get(state_of(1)))


def test_an_error_in_the_background_is_raised_by_check(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(Checkpoints, "_retain", lambda self, step: 1 / 0)
    checkpoints.save(2, state_of(2))
    with pytest.raises(CheckpointError, match="division by zero"):
        for _ in range(1000):
            checkpoints.check()
            time.sleep(0.01)


# ---------------------------------------------------------------------------------------- accidents


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(directory):
    path = largest_file(directory)
    os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(directory):
    path = largest_file(directory / "state")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(directory):
    shutil.rmtree(directory)
    directory.mkdir()


def lose_one_file(directory):
    next(p for p in directory.rglob("_METADATA")).unlink()


def break_manifest(directory):
    (directory / "manifest.json").write_text('{"step": ')


@pytest.mark.parametrize("damage", [truncate, flip_one_bit, empty, lose_one_file, break_manifest])
def test_a_corrupt_newest_falls_back_to_the_one_before_loudly(tmp_path, damage, caplog):
    saved(tmp_path, [3, 5])
    damage(tmp_path / "5")
    checkpoints = Checkpoints(tmp_path)
    state, step = checkpoints.restore(abstract(state_of(0), mesh_of(1, 1, 1)))
    assert step == 3
    assert_same(state, state_of(3))
    assert "step 5" in caplog.text and "CORRUPT" in caplog.text and "step 3" in caplog.text
    with pytest.raises(CheckpointError, match="step 5"):
        checkpoints.restore_numpy(5)
    checkpoints.save(5, state_of(5))  # the repeated work replaces it
    assert checkpoints.restore_numpy()[1] == 5


def test_saves_after_a_fall_back_are_not_outlived_by_the_corrupt_one(tmp_path):
    saved(tmp_path, [3, 5])
    truncate(tmp_path / "5")
    checkpoints = Checkpoints(tmp_path, rules(1))
    assert checkpoints.restore_numpy()[1] == 3
    checkpoints.save(4, state_of(4))
    checkpoints.wait()
    assert checkpoints.steps() == [4]


@pytest.mark.parametrize("options", [{}, {"best": 1}, {"every": 3}])
def test_a_corrupt_one_does_not_take_the_place_of_a_good_one(tmp_path, options):
    keep = rules(2, metric="loss", **options)
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step), {"loss": -step})
    checkpoints.close()
    flip_one_bit(tmp_path / "3")
    checkpoints = Checkpoints(tmp_path, keep)
    assert checkpoints.restore(state_of(0))[1] == 2
    checkpoints.save(4, state_of(4), {"loss": 0.0})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4]
    checkpoints.save(5, state_of(5), {"loss": 0.0})
    checkpoints.wait()
    assert checkpoints.steps() == ([2, 4, 5] if "best" in options else [4, 5])
    checkpoints.close()


def test_after_a_roll_back_the_abandoned_steps_are_not_resumed(tmp_path):
    checkpoints = saved(tmp_path, [3, 5, 7])
    checkpoints.restore_numpy(3)
    checkpoints.save(4, state_of(40))
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4] and checkpoints.latest() == 4


@pytest.mark.parametrize("damage", [truncate, empty])
def test_only_corrupt_checkpoints_are_an_error_and_no_fresh_start(tmp_path, damage):
    saved(tmp_path, [3, 5])
    damage(tmp_path / "3")
    damage(tmp_path / "5")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 5
    with pytest.raises(CheckpointError, match="no intact checkpoint.*step 5.*step 3.*--config.resume=overwrite"):
        checkpoints.restore_numpy()


def test_checkpoints_that_vanished_are_an_error_and_no_fresh_start(tmp_path):
    directory = tmp_path / "checkpoints"
    saved(directory, [3])
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match="step 3 was saved.*begin at step 0"):
        Checkpoints(directory).latest()


def test_a_directory_that_never_had_one_is_a_fresh_start(tmp_path):
    assert Checkpoints(tmp_path / "a" / "b").latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        Checkpoints(tmp_path / "a" / "b").restore_numpy()


def test_clear_makes_a_fresh_start(tmp_path):
    checkpoints = saved(tmp_path / "checkpoints", [3])
    checkpoints.clear()
    assert Checkpoints(tmp_path / "checkpoints").latest() is None


def test_leftovers_of_a_killed_save_are_harmless_and_removed(tmp_path):
    saved(tmp_path, [3])
    shutil.copytree(tmp_path / "3", tmp_path / "tmp.5")
    (tmp_path / "tmp.5" / "manifest.json").unlink()
    (tmp_path / "tmp.deleting.1").mkdir()
    reader = SavedStates(tmp_path)
    assert reader.steps() == [3] and (tmp_path / "tmp.5").exists()
    assert Checkpoints(tmp_path).restore_numpy()[1] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3"]


def test_a_replacement_that_was_killed_half_way_is_undone(tmp_path):
    saved(tmp_path, [3])
    shutil.copytree(tmp_path / "3", tmp_path / "tmp.3")
    (tmp_path / "3").rename(tmp_path / "old.3")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [3]
    assert_same(checkpoints.restore_numpy()[0], jax.device_get(state_of(3)))


# ------------------------------------------------------------------------------------------- paths


def test_relative_and_home_paths_are_resolved_and_urls_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert str(resolve_directory("out/run1")) == str(tmp_path / "out/run1")
    assert str(resolve_directory("~/x")) == str(tmp_path / "home/x")
    assert str(resolve_directory("gs://b/x")) == "gs://b/x"
    assert str(resolve_directory("/a/空 ä")) == "/a/空 ä"
    for url in ("file:///a/x", "http://a/x"):
        with pytest.raises(ValueError, match=f"^{url}: .*://.* is not read or written"):
            resolve_directory(url)
    with pytest.raises(ValueError, match="the name of this directory is not UTF-8; choose another"):
        resolve_directory(os.fsdecode(b"out/run\xff"))
    saved("out/run1", [1])
    assert (tmp_path / "out/run1/1/manifest.json").exists()


def test_a_directory_that_cannot_be_written_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints to"):
        Checkpoints(tmp_path / "file" / "checkpoints")


# ------------------------------------------------------------------------------- killed for real

SAVER = """
import sys, jax, numpy as np
from bertjax.config import CheckpointSettings
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.sharding import make_mesh, tree_shardings
checkpoints = Checkpoints(sys.argv[1], CheckpointSettings(keep_last=1))
step = (checkpoints.latest() or 0) + 1
print("ready", flush=True)
while True:
    tree = {"kernel": np.full((256, 1024), step, np.float32), "step": np.int32(step)}
    checkpoints.save(step, jax.device_put(tree))
    print(step, flush=True)
    step += 1
"""


def start_saver(directory):
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(directory)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert line == "ready\n", process.stderr.read()
    return process


def kill_and_check(directory, rng):
    process = start_saver(directory)
    for _ in range(rng.integers(4)):  # not by the clock alone: a busy machine would save nothing
        process.stdout.readline()
    time.sleep(rng.uniform(0.05, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    checkpoints = SavedStates(directory)
    newest = checkpoints.latest()
    if newest is not None:
        steps = checkpoints.steps()
        assert checkpoints.problem(newest) is None
        assert len(steps) <= 2
        state, step = checkpoints.restore_numpy()
        assert step == newest and np.all(state["kernel"] == step)
    return newest or 0


def test_a_kill_at_a_random_moment_leaves_a_restorable_checkpoint(tmp_path):
    rng = np.random.default_rng()
    reached = [kill_and_check(tmp_path / "c", rng) for _ in range(2)]
    assert reached == sorted(reached)


@pytest.mark.slow
def test_twenty_kills_while_keeping_one_never_leave_nothing(tmp_path):
    rng = np.random.default_rng()
    reached = [kill_and_check(tmp_path / "c", rng) for _ in range(20)]
    assert reached == sorted(reached) and reached[-1] > 10


def test_a_second_process_in_the_same_run_is_refused(tmp_path):
    process = start_saver(tmp_path / "c")
    try:
        with pytest.raises(CheckpointError, match=r"another process \(\d+ on .*\) is training"):
            Checkpoints(tmp_path / "c")
        SavedStates(tmp_path / "c").steps()
    finally:
        process.kill()
        process.communicate()
    Checkpoints(tmp_path / "c")


@pytest.mark.parametrize("how", ["deleted", "moved", "emptied"])
@pytest.mark.parametrize("when", ["between saves", "while saving"])
def test_a_run_whose_directory_is_taken_away_ends_with_an_error(tmp_path, how, when, monkeypatch):
    workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoints = saved(workdir / "checkpoints", [1])
    elsewhere.mkdir()

    def take_away():
        if how == "emptied":
            for path in workdir.iterdir():
                path.rename(elsewhere / path.name)
        else:
            shutil.rmtree(workdir) if how == "deleted" else workdir.rename(elsewhere / "run")

    if when == "between saves":
        take_away()
        with pytest.raises(CheckpointError, match="deleted, moved or emptied"):
            checkpoints.check()
    else:
        finished = checkpoints._orbax.wait_until_finished
        monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", lambda: (finished(), take_away()))
        checkpoints.save(2, state_of(2))
        with pytest.raises(CheckpointError, match="deleted, moved or emptied"):
            checkpoints.wait()
        checkpoints._worker.shutdown()  # `wait` may find out before all is taken away
    assert not (workdir / "checkpoints.committed.json").exists()
    assert Checkpoints(workdir / "checkpoints").latest() is None  # another run may begin there


def test_manifest_names_every_file_with_its_size(tmp_path):
    saved(tmp_path, [1])
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    files = {
        str(p.relative_to(tmp_path / "1")): p.stat().st_size
        for p in pathlib.Path(tmp_path / "1").rglob("*")
        if p.is_file()
    }
    del files["manifest.json"]
    assert {name: size for name, (size, _) in manifest["files"].items()} == files


def test_an_object_store_without_the_directory_is_a_fresh_run(bucket):
    checkpoints = Checkpoints(bucket / "run" / "checkpoints")
    assert checkpoints.latest() is None and checkpoints.steps() == []
    (bucket / "run" / "checkpoints" / "5" / "state" / "x").write_text("left by a kill")
    assert checkpoints.latest() is None
    checkpoints.clear()
    assert not (bucket / "run" / "checkpoints").exists()
    checkpoints.close()


def test_a_directory_of_an_object_store_that_vanishes_while_it_is_read_is_empty(bucket, monkeypatch):
    checkpoints = Checkpoints(bucket / "run")
    monkeypatch.setattr(type(bucket), "exists", lambda path: not path.name.endswith(".json"))
    assert checkpoints.latest() is None
    checkpoints.close()


def test_an_object_store_that_refuses_is_told_with_what_to_look_at(bucket, monkeypatch):
    def refuse(*_):
        raise RuntimeError("Forbidden, 403")  # gcsfs has an HttpError that is not an OSError

    monkeypatch.setattr(type(bucket), "write_text", refuse)
    with pytest.raises(CheckpointError, match="gs://bucket/run: Forbidden, 403.*may this machine"):
        Checkpoints(bucket / "run")


# ------------------------------------------------------------------------------------------ time


def test_a_clock_that_is_set_forward_during_a_save_does_not_end_it(tmp_path, monkeypatch):
    checkpoints, clock = Checkpoints(tmp_path / "run", timeout_s=60), time.time
    write = formats.write_manifest

    def late(*arguments):
        monkeypatch.setattr("time.time", clock)
        write(*arguments)

    monkeypatch.setattr(formats, "write_manifest", late)
    checkpoints.save(1, state_of(1))
    monkeypatch.setattr("time.time", lambda: clock() + 1e6)
    checkpoints.close()
    assert checkpoints.steps() == [1]


def test_a_save_that_does_not_end_in_time_is_an_error(tmp_path, monkeypatch):
    checkpoints, stuck = Checkpoints(tmp_path / "run"), threading.Event()
    monkeypatch.setattr(formats, "write_manifest", lambda *_: stuck.wait(20))
    checkpoints.save(1, state_of(1))
    checkpoints._timeout_s = 0.1
    time.sleep(0.2)
    with pytest.raises(CheckpointError, match=r"could not be written to .* in 0.1 s"):
        checkpoints.check()
    stuck.set()
