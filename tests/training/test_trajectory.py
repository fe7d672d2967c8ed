"""The losses of a real pre-training run, step by step, on every mesh of eight devices."""

import functools

import jax
import numpy as np
import pytest

from bertjax.config import default_config, frozen
from bertjax.pretraining import job as pretraining
from bertjax.training import sharding

STEPS = 50


@functools.cache  # the run on one device is every other's measure
def losses(store, directory, sizes):
    config = default_config()
    config.data.corpus = store
    config.model.update(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        vocab_multiple=64,
    )
    config.phases, config.batch_size = ((STEPS, 32),), 16
    config.optimizer.update(warmup_steps=5, learning_rate=1e-3)
    config.eval.rows = 16
    job = pretraining.prepare(frozen(config), f"{directory}/{sizes}")
    mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    trainer, phase = pretraining.make_trainer(frozen(config), mesh), job.phases[0]
    state, step = trainer.init(phase.objective), trainer.train_step(phase.objective)
    batches, seen = phase.batches(0), []
    for _ in range(STEPS):
        state, metrics = step(state, sharding.put_batch(next(batches), mesh))
        seen.append(float(metrics["loss"]))
    return np.array(seen)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tmp_path_factory.mktemp("meshes"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 2, 4), (2, 1, 4)]
)
def test_fifty_steps_with_masks_and_dropout_are_the_same_on_every_mesh(random_store, directory, sizes):
    alone = losses(str(random_store), directory, (1, 1, 1))
    assert alone[0] - alone[-1] > 0.1  # it learns, so the updates are in it
    np.testing.assert_allclose(losses(str(random_store), directory, sizes), alone, rtol=0, atol=1e-5 * alone[0])
