"""--config.mesh=auto: which mesh a run takes, and that it says why."""

import jax
import numpy as np
import pytest

from bertjax.config import MeshSettings, default_config, frozen
from bertjax.data.build import build_store
from bertjax.pretraining import job as pretraining
from bertjax.process import hardware
from bertjax.run.run import summary
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from bertjax.training import sharding
from tests.fakes import SPECIALS

GIVEN = MeshSettings(data=2, fsdp=4, tensor=1)


def test_given_sizes_are_taken_without_a_reason():
    mesh, reason = sharding.mesh_of(GIVEN, 10**9, jax.devices(), 2**30)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1} and reason == ""


@pytest.mark.parametrize("gib, fsdp", [(16, 1), (12, 2), (4, 4), (None, 1)])
def test_automatic_sizes_follow_memory_and_ignore_the_given_ones(gib, fsdp):
    large = 336_000_000  # 5.0 GiB of weights, gradients and moments
    mesh, reason = sharding.mesh_of(MeshSettings(True, 2, 4, 1), large, jax.devices(), gib and gib * 2**30)
    assert dict(mesh.shape) == {"data": 8 // fsdp, "fsdp": fsdp, "tensor": 1}
    assert reason


def test_a_described_tpu_has_the_published_memory():
    class Described:
        device_kind = "TPU v5 lite"

        def memory_stats(self):
            raise NotImplementedError

    assert hardware.device_bytes(Described()) == 16 * 2**30


def test_a_run_with_an_automatic_mesh_says_why_at_the_start(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    tokenizer = WordPieceTokenizer([*SPECIALS, *words], True)
    documents = [[" ".join(random.choice(words, 8)) for _ in range(8)] for _ in range(30)]
    build_store(None, tokenizer, tmp_path / "store", documents=documents, heldout_fraction=0.2)
    config = default_config()
    config.data.corpus = str(tmp_path / "store")
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    config.phases, config.batch_size, config.optimizer.warmup_steps = ((4, 32),), 16, 2
    config.mesh.auto = True
    # Half a million parameters (an assumed vocabulary included): 8 MB of state.
    monkeypatch.setattr(hardware, "device_bytes", lambda device=None: 12 * 2**20)
    job = pretraining.prepare(frozen(config), str(tmp_path / "run"))
    assert dict(job.mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert "sharded over fsdp=2" in summary(job, 0)
