"""What is set around a process changes none of its numbers, or is told."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from bertjax import jax_settings

OTHER = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_disable_jit": True,
    "jax_random_seed_offset": 7,
    "jax_enable_custom_prng": True,
    "jax_debug_infs": True,
    "jax_softmax_custom_jvp": True,
    "jax_transfer_guard": "disallow",
    "jax_high_dynamic_range_gumbel": True,
    "jax_disable_most_optimizations": True,
}


@pytest.fixture
def others():
    """jax as an environment may have set it; put back afterwards."""
    before = {name: jax.config.values[name] for name in OTHER}
    for name, value in OTHER.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_every_setting_is_one_of_jax_and_has_its_default_value():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import jax; from bertjax.jax_settings import FIXED; "
            "has = jax.config.values; known = [n for n in FIXED if n in has]; "
            "print(len(known), [n for n in known if has[n] != FIXED[n]])",
        ],
        text=True,
        capture_output=True,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    known, differing = done.stdout.split(maxsplit=1)
    assert differing == "[]\n" and int(known) >= len(jax_settings.FIXED) - 2, done.stderr  # two came, two went


def test_programs_fix_them_and_the_library_puts_back_what_its_caller_had(others):
    with jax_settings.fixed():
        assert {name: jax.config.values[name] for name in OTHER} == {name: jax_settings.FIXED[name] for name in OTHER}
        assert np.asarray(jax.numpy.ones(3)).dtype == np.float32
    assert {name: jax.config.values[name] for name in OTHER} == OTHER
    jax_settings.fix()
    assert {name: jax.config.values[name] for name in OTHER} == {name: jax_settings.FIXED[name] for name in OTHER}


def test_programs_forget_the_variables_before_jax_reads_them():
    variables = {"JAX_ENABLE_X64": "banana", "JAX_PLATFORMS": "cpu", "HOME": "/"}
    jax_settings.clear(variables)
    assert variables == {"JAX_PLATFORMS": "cpu", "HOME": "/"}


def test_what_only_compilers_read_is_recorded():
    assert jax_settings.environment(
        {
            "XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_b=2 --xla_a=1",
            "JAX_PLATFORMS": "cpu",
            "NVIDIA_TF32_OVERRIDE": "0",
            "JAX_USE_DIRECT_LINEARIZE": "0",
            "JAX_ENABLE_X64": "1",
            "HOME": "/",
            "LIBTPU_INIT_ARGS": "",
        }
    ) == {"XLA_FLAGS": "--xla_a=1 --xla_b=2", "NVIDIA_TF32_OVERRIDE": "0", "JAX_USE_DIRECT_LINEARIZE": "0"}


@pytest.mark.slow
def test_a_run_is_the_same_whatever_the_environment_says_of_jax(tmp_path, random_store):
    found = []
    for name, variables in (
        ("plain", {}),
        ("other", {variable.upper(): str(value) for variable, value in OTHER.items()}),
    ):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bertjax.main",
                "--config=configs/base.py",
                "--config.model.num_hidden_layers=1",
                "--config.model.hidden_size=16",
                "--config.model.num_attention_heads=2",
                "--config.model.intermediate_size=32",
                f"--config.data.corpus={random_store}",
                "--config.phases=((4,32),)",
                "--config.batch_size=16",
                "--config.optimizer.warmup_steps=2",
                "--config.eval.rows=16",
                "--config.log.every_steps=1",
                "--config.execution.compilation_cache=",
                f"--workdir={tmp_path / name}",
            ],
            text=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        found.append(
            (
                [(r["step"], r.get("loss"), r.get("grad_norm")) for r in records],
                (tmp_path / name / "model" / "model.safetensors").read_bytes(),
            )
        )
    assert found[0] == found[1]
