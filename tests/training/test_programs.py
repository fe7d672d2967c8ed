"""Executables are kept in a directory, and a later start runs these and no new ones."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from bertjax.training.programs import Programs

MADE_FOR = {"device_kind": "a card", "jax": "1.0"}


@contextlib.contextmanager
def no_cache():
    """Compilations are real ones; yields their list."""
    compiled, before = [], jax.config.jax_compilation_cache_dir

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.config.update("jax_compilation_cache_dir", None)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.monitoring.unregister_event_duration_listener(listen)


def step_of(factor, donate=True):
    def step(state, batch):
        return {"w": state["w"] + factor * batch["x"].sum()}, {"loss": batch["x"].mean()}

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def call(directory, made_for=MADE_FOR, factor=2.0, rows=4):
    """(result, what was told, real compilations) of one start."""
    programs, told = Programs(), []
    programs.keep_in(directory, jax.devices()[:1], made_for, told.append)
    program = programs.wrap("train", step_of(factor))
    state, batch = {"w": jnp.ones(3)}, {"x": jnp.arange(float(rows))}
    with no_cache() as compiled:
        state, metrics = program(state, batch)
        state, metrics = program(state, batch)
    return state["w"].tolist(), told, len(compiled)


def test_a_later_start_runs_the_executable_that_was_kept(tmp_path):
    first = call(tmp_path)
    assert first == ([25.0] * 3, [], 1)
    assert call(tmp_path) == (first[0], [], 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_each_shape_of_a_batch_has_its_own(tmp_path):
    assert call(tmp_path, rows=4)[1:] == ([], 1)
    assert call(tmp_path, rows=5)[1:] == ([], 1)  # nothing to say: it was not there before
    assert call(tmp_path, rows=4)[1:] == call(tmp_path, rows=5)[1:] == ([], 0)


@pytest.mark.parametrize("change", [{"factor": 3.0}, {"made_for": {**MADE_FOR, "jax": "1.1"}}])
def test_another_program_or_another_card_is_compiled_again_and_told(tmp_path, change):
    call(tmp_path)
    _, told, compiled = call(tmp_path, **change)
    assert compiled == 1 and len(told) == 1 and "compiled again" in told[0]
    assert call(tmp_path, **change)[1:] == ([], 0)


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b[:-1] + b"x", lambda b: b""])
def test_a_damaged_executable_is_compiled_again_and_told(tmp_path, damage):
    first = call(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    found, told, compiled = call(tmp_path)
    assert found == first[0] and compiled == 1 and "damaged" in told[0]
    assert call(tmp_path)[1:] == ([], 0)


def test_what_is_compiled_in_the_background_is_what_runs(tmp_path):
    for expected in (1, 0):
        programs = Programs()
        programs.keep_in(tmp_path, jax.devices()[:1], MADE_FOR, print)
        program = programs.wrap("train", step_of(1.0, donate=False))
        state, batch = {"w": jnp.ones(3)}, {"x": jnp.arange(4.0)}
        with no_cache() as compiled:
            programs.start("train", program, state, batch)
            programs.wait("train")
            assert len(compiled) == expected
            program(state, batch)
            assert len(compiled) == expected


def test_a_directory_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    found, told, _ = call(tmp_path / "file" / "programs")
    assert found == [25.0] * 3 and any("could not be kept" in line for line in told)
