"""--config.mesh=auto of a fine-tuning run."""

import jax

from bertjax.config import finetune_config, frozen
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.process import hardware
from bertjax.run.run import summary
from bertjax.tasks import job
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

VOCAB = [*SPECIALS, "good", "bad", "film"]
CONFIG = BertConfig(
    vocab_size=len(VOCAB),
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=128,
)


def test_the_mesh_follows_the_model_and_the_start_up_screen_says_why(tmp_path, monkeypatch):
    params = jax.jit(lambda key: init_params(BertModel(CONFIG), key))(jax.random.key(0))
    write_directory(tmp_path / "start", CONFIG, params, "BertModel", WordPieceTokenizer(VOCAB, do_lower_case=True))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "film,good\nbad film,bad\n" * 4)
    config = finetune_config()
    config.init_from, config.task.data, config.task.name = str(tmp_path / "start"), str(tmp_path), "table"
    config.task.options = {
        "files": {"train": "train.csv", "dev": "dev.csv"},
        "text": ("text",),
        "label": "label",
        "head": "classification",
    }
    config.task.predict = ("dev",)
    config.mesh.auto = True
    monkeypatch.setattr(hardware, "device_bytes", lambda device=None: 1_500_000)
    prepared = job.prepare(frozen(config), str(tmp_path / "run"))
    # 55 thousand parameters with gradients and moments: 0.9 MB; 40 % of the device are 0.6.
    assert prepared.tuner.mesh.shape["fsdp"] == 2
    assert "sharded over fsdp=2" in summary(prepared, 0)
