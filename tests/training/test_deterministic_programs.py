"""No compiled step on a GPU holds an operation whose order of sums changes from call to call.

XLA can be told to avoid such operations (xla_gpu_exclude_nondeterministic_ops). Where the program
then has the same scatters and the same library calls, there were none. (All other operations have a
fixed order; how often they stand in a program depends on how XLA fuses them.) Repeated calls of a
program must also give the same bits.
"""

import collections
import re
import types

import jax
import numpy as np
import pytest

from bertjax.config import OptimizerSettings, default_config, frozen
from bertjax.model.kernels import compiler_options
from bertjax.model.presets import BertConfig, Execution
from bertjax.pretraining import job as pretraining
from bertjax.tasks.kinds import TaskObjective, model_for
from bertjax.training import sharding
from bertjax.training.optimizer import make_optimizer, with_schedule_in_state
from bertjax.training.trainer import Trainer

ROWS, LENGTH = 16, 128
SIZES = dict(
    num_hidden_layers=2, hidden_size=256, num_attention_heads=4, intermediate_size=512, max_position_embeddings=128
)
PRETRAINING = {
    "padded": {},
    "packed": {"data.packed": True},
    "accumulated": {"accumulation": 2},
    "lamb": {"optimizer.name": "lamb"},
    "recomputed": {"execution.remat": "full"},
    "scanned": {"execution.layers": "scan", "execution.remat": "dots"},
}
HEADS = {"classification": 3, "multilabel": 3, "regression": 1, "tagging": 5, "spans": 2, "multiple_choice": 1}


def pretraining_programs(store, workdir, changes):
    """{name: (jitted function, arguments)} of the training and the evaluation step."""
    config = default_config()
    config.data.corpus = str(store)
    config.model.update(SIZES)
    config.phases, config.batch_size, config.optimizer.warmup_steps = ((10, LENGTH),), ROWS, 2
    config.update_from_flattened_dict(changes)
    job = pretraining.prepare(frozen(config), str(workdir))
    trainer, phase = pretraining.make_trainer(frozen(config), job.mesh), job.phases[0]
    state = trainer.init(phase.objective)
    evaluation = job.evaluations[0]
    batch = sharding.put_batch(next(phase.batches(0)), job.mesh)
    held_out = sharding.put_batch(next(iter(evaluation.batches)), job.mesh)
    return {
        "train": (trainer.train_step(phase.objective), (state, batch)),
        "evaluate": (trainer._evaluation(evaluation.objective), (state.params, held_out, np.uint32(0))),
    }


def task_programs(head):
    """The same of fine-tuning one head: training, prediction."""
    rng = np.random.default_rng(0)
    choices = (4,) if head == "multiple_choice" else ()
    shape = (ROWS, *choices, LENGTH)
    batch = {
        "input_ids": rng.integers(5, 1000, shape),
        "token_type_ids": rng.integers(0, 2, shape),
        "attention_mask": np.ones(shape, np.int64),
        "weights": np.ones(ROWS, np.float32),
        "labels": rng.integers(0, 3, ROWS),
        "targets": rng.random(ROWS, np.float32),
        "label_set": rng.integers(0, 2, (ROWS, 3)).astype(np.float32),
        "tags": rng.integers(0, 5, (ROWS, LENGTH)),
        "tag_weights": np.ones((ROWS, LENGTH), np.float32),
        "start_positions": rng.integers(0, LENGTH, ROWS),
        "end_positions": rng.integers(0, LENGTH, ROWS),
    }
    batch = {name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in batch.items()}
    task = types.SimpleNamespace(name="toy", head=head, outputs=HEADS[head])
    execution = Execution.for_backend(jax.default_backend())
    model = model_for(task, BertConfig(vocab_size=1000, **SIZES), execution)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    trainer = Trainer(with_schedule_in_state(make_optimizer(OptimizerSettings(), 1.0), "linear"), mesh)
    objective = TaskObjective(model, head)
    state, batch = trainer.init(objective), sharding.put_batch(batch, mesh)
    predict = jax.jit(
        lambda params, batch: objective.outputs(params, batch), compiler_options=compiler_options(jax.default_backend())
    )
    return {"train": (trainer.train_step(objective), (state, batch)), "predict": (predict, (state.params, batch))}


# The operations of XLA whose sums may come in any order on a GPU.
UNORDERED = ("scatter", "select-and-scatter")
# XLA chooses by timing between the library's matrix product and a kernel of its own. Both add in a
# fixed order, as the repeated calls show.
PRODUCT = "__cublas$lt$matmul"


def operations(compiled):
    """How often each operation that may sum in any order, and each library call but products, occurs."""
    text = compiled.as_text()
    found = re.findall(r"= [^=]*?\s([a-z][a-z0-9-]*)\(", text)
    return (
        collections.Counter(name for name in found if name in UNORDERED),
        collections.Counter(call for call in re.findall(r'custom_call_target="([^"]+)"', text) if call != PRODUCT),
    )


def check(programs):
    for name, (function, arguments) in programs.items():
        lowered = function.lower(*arguments)
        compiled = lowered.compile()
        options = {**compiler_options("gpu"), "xla_gpu_exclude_nondeterministic_ops": True}
        assert operations(compiled) == operations(lowered.compile(options)), name
        results = []
        for _ in range(20):
            copies = jax.tree.map(lambda x: x.copy(), arguments)  # the state is donated
            results.append(jax.device_get(jax.tree.leaves(compiled(*copies))))
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), name


@pytest.mark.gpu
@pytest.mark.parametrize("changes", PRETRAINING.values(), ids=PRETRAINING)
def test_pretraining_steps_have_fixed_orders_of_sums(random_store, tmp_path, changes):
    check(pretraining_programs(random_store, tmp_path / "run", changes))


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
def test_fine_tuning_steps_have_fixed_orders_of_sums(head):
    check(task_programs(head))
