"""The pre-training step compiled by the real TPU compiler, without a TPU (needs libtpu)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# In a process of its own: the topology must be described before jax picks a backend.
PROGRAM = """
import importlib.util, json, sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from bertjax import config as settings
from bertjax.data.masking import MaskingSpec
from bertjax.model.heads import BertForPreTraining
from bertjax.training import sharding
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.pretraining import PretrainingObjective
from bertjax.training.trainer import Trainer

path, topology, data, fsdp, overrides = sys.argv[1:]
spec = importlib.util.spec_from_file_location("experiment", path)
experiment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiment)
config = experiment.get_config()
config.update_from_flattened_dict(json.loads(overrides))
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = Mesh(np.array(devices).reshape(int(data), int(fsdp), 1), ("data", "fsdp", "tensor"))
length = config.phases[-1][1]
objective = PretrainingObjective(
    BertForPreTraining(settings.model_config(config, 30522), settings.execution(config, "tpu")),
    MaskingSpec(103, (0, 100, 101, 102, 103), np.arange(1000, 30522, dtype=np.int32),
                settings.max_predictions(config, length)))
trainer = Trainer(make_optimizer(learning_rate_schedule("linear", 1e-4, 10, 100)), mesh,
                  accumulation=config.accumulation)
rows = sharding.batch_sharding(mesh)
def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
size = config.batch_size
batch = {name: array((size, length), np.int32)
         for name in ("input_ids", "token_type_ids", "attention_mask")}
batch |= {"nsp_labels": array((size, 1), np.int32), "nsp_weights": array((size, 1), np.float32)}
step = trainer.train_step(objective)
compiled = step.trace(trainer.abstract_state(objective), batch).lower(
    lowering_platforms=("tpu",)).compile()
memory = compiled.memory_analysis()
print(json.dumps({"kind": devices[0].device_kind, "arguments": memory.argument_size_in_bytes,
                  "temporaries": memory.temp_size_in_bytes,
                  "aliased": memory.alias_size_in_bytes}))
"""


def compile_for_tpu(config, topology, data, fsdp, **overrides):
    """memory_analysis() of the compiled step, in bytes a chip."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": "",
                   "PYTHONPATH": str(ROOT)}
    overrides = {name.replace("__", "."): value for name, value in overrides.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "configs" / config), topology, str(data),
         str(fsdp), json.dumps(overrides)],
        capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("config, topology, data, fsdp, overrides", [
    ("base.py", "v5e:4x4", 16, 1, {"execution__remat": "dots", "execution__layers": "scan"}),
])
def test_pretraining_step_compiles_for_tpu_and_fits(config, topology, data, fsdp, overrides):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install '.[tpu]'")
    memory = compile_for_tpu(config, topology, data, fsdp, **overrides)
    assert memory["arguments"] + memory["temporaries"] < 16e9, memory  # a v5e has 16 GB
