"""Whole training steps are lowered for CUDA by the jax and jax-triton that are installed, without a card.

    pip install --no-deps jax-triton "jax-cuda13-plugin==$(python -c 'import jax; print(jax.__version__)')"

jax-triton calls parts of jax that change between releases: 0.4.1 alone does not work with jax 0.12.
"""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest

STEPS = {"bert": "bfloat16", "bert in 8 bits": "float8", "modern": "bfloat16"}


@pytest.mark.slow
def test_training_steps_are_lowered_for_a_gpu():
    needed = "triton", "jax_triton", "jax_cuda13_plugin"
    if absent := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(absent)}")
    # A process of its own: it says that it has a GPU.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env["TRITON_INTERPRET"] = "0"
    run = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    launches = dict(line.rsplit(": ", 1) for line in run.stdout.splitlines())
    assert list(launches) == list(STEPS)
    assert all(int(count) >= 6 for count in launches.values())  # attention, GELU and norms, forward and backward


def lower_all() -> None:
    """Prints how many kernels the step of each small model launches."""
    import jax
    import jax_triton
    import numpy as np

    from bertjax.config import OptimizerSettings
    from bertjax.data.masking import MaskingSpec
    from bertjax.model import kernels, presets
    from bertjax.model.heads import BertForPreTraining
    from bertjax.model.kernels import choice
    from bertjax.pretraining.objective import PretrainingObjective
    from bertjax.training import sharding
    from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
    from bertjax.training.trainer import Trainer
    from tests.benchmarks.workloads import MASK_ID, SPECIAL_IDS, Workload, rows

    jax.default_backend = lambda: "gpu"
    jax_triton.triton_lib.triton_kernel_call_lib.get_compute_capability = lambda device: 90
    for module in (kernels, choice, presets):
        module.compute_capability = lambda: 9.0
    masking = MaskingSpec(MASK_ID, SPECIAL_IDS, np.arange(1000, 30522, dtype=np.int32), max_predictions=77)
    mesh = sharding.make_mesh()
    schedule = learning_rate_schedule("linear", 1e-4, 10, 100)
    trainer = Trainer(make_optimizer(OptimizerSettings(), schedule), mesh)
    for name, dtype in STEPS.items():
        config = presets.PRESETS["modernbert-base" if name == "modern" else "base"]
        config = dataclasses.replace(config, num_hidden_layers=3)  # ModernBERT's second and third see a window
        model = BertForPreTraining(config, presets.Execution.for_backend("gpu", dtype=dtype))
        objective = PretrainingObjective(model, masking)
        batch = sharding.put_batch(rows(Workload("base", 2048 if name == "modern" else 512, 2)), mesh)
        step = trainer.train_step(objective).trace(trainer.abstract_state(objective), batch)
        print(f"{name}: {step.lower(lowering_platforms=('cuda',)).as_text().count('triton_kernel_call')}")


if __name__ == "__main__":
    lower_all()
