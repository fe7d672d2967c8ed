"""The training run that accidents happen to: a tiny model, the real trainer.

    python -m tests.benchmarks.soak_child DIRECTORY STEPS SAVE_EVERY PAUSE [full_disk]

It resumes where it can, trains to the end with a pause of so many seconds before each step, and
writes DIRECTORY/final.npz. With `full_disk`, files of a checkpoint cannot grow beyond 2 kB.
"""

import dataclasses
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import CheckpointSettings, Config, OptimizerSettings
from bertjax.log.logbook import Logbook
from bertjax.model.paths import flatten
from bertjax.run.checkpoint import Checkpoints
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.trainer import Phase, Trainer

WIDTH, ROWS = 32, 16


@dataclasses.dataclass(frozen=True)
class NoisyRegression:
    """Noise in `prepare` and dropout in `loss`, so that a wrong key shows in the loss."""

    def init(self, key: Any) -> Any:
        return {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 8, "bias": jnp.zeros(WIDTH)}

    def prepare(self, batch: Any, key: Any) -> Any:
        return {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape) / 10}

    def denominators(self, batch: Any) -> Any:
        return {}

    def loss(self, params: Any, batch: Any, denominators: Any, dropout_key: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"])
        if dropout_key is not None:
            hidden *= jax.random.bernoulli(dropout_key, 0.9, hidden.shape)
        total = jnp.sum((hidden.sum(1) - batch["y"]) ** 2)
        return total / ROWS, {"mse": (total, jnp.float32(ROWS))}


class FullDisk(Checkpoints):
    """Checkpoints whose disk is full from the first save on."""

    def save(self, *args: Any, **options: Any) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
        super().save(*args, **options)
        self.wait()


def batches(start: int, pause_s: float) -> Iterator[dict[str, np.ndarray]]:
    """Endless {'x': [ROWS, WIDTH], 'y': [ROWS]}, each a function of its step."""
    step = start
    while True:
        if step == start + 2:  # the step is compiled and runs
            print(f"training from step {start}", flush=True)
        x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.sin(x).sum(1)}
        step += 1
        time.sleep(pause_s)


def train(directory: pathlib.Path, steps: int, save_every: int, pause_s: float, full_disk: bool) -> None:
    """Resumes where it can, trains to the end, writes `final.npz`."""
    objective = NoisyRegression()
    trainer = Trainer(
        make_optimizer(OptimizerSettings(), learning_rate_schedule("linear", 1e-3, 10, steps)),
        make_mesh(devices=jax.devices()[:1]),
    )
    kind = FullDisk if full_disk else Checkpoints
    checkpoints = kind(directory / "checkpoints", CheckpointSettings(keep_last=2, keep_best=0))
    if checkpoints.latest() is None:
        state, step = trainer.init(objective), 0
    else:
        state, step = checkpoints.restore(trainer.abstract_state(objective))
    phase = Phase(steps, objective, lambda start: batches(start, pause_s))
    config = Config().replace({"log.every_steps": 1, "log.tensorboard": False, "checkpoint.every_steps": save_every})
    with Logbook(directory, step, config.log, write=lambda line: None) as logbook:
        state = trainer.fit(state, [phase], config, logbook=logbook, checkpoints=checkpoints)
    checkpoints.close()
    flat = flatten(
        {
            "params": state.params,
            "opt_state": state.opt_state,
            "counters": {"step": state.step, "skipped": state.skipped},
        }
    )
    np.savez(directory / "final.npz", **jax.device_get(flat))


if __name__ == "__main__":
    where, steps, save_every, pause, *disk = sys.argv[1:]
    train(pathlib.Path(where), int(steps), int(save_every), float(pause), disk == ["full_disk"])
