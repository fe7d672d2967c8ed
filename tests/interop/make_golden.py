"""Writes tests/interop/golden: a tiny random BERT in Hugging Face's layout and torch's outputs.

Needs torch and transformers (the [parity] extra); run once, the files are committed:

    python tests/interop/make_golden.py

`outputs.npz` holds what transformers computes in float32 on the CPU from `model.safetensors`, so
that the fast tests check parity on machines without torch. `legacy.bin` and `zip.bin` are the same
weights under old names (gamma, beta) by the two formats of torch.save, in bfloat16 to be small.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent / "golden"


def main() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=37,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=16,
        hidden_act="gelu",
    )
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm too: zeros would hide errors
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(HERE)

    rng = np.random.default_rng(0)
    lengths = np.array([16, 9, 3])
    mask = (np.arange(16) < lengths[:, None]).astype(np.int64)
    ids = rng.integers(1, 37, (3, 16)) * mask
    types = (np.arange(16) >= lengths[:, None] // 2) * mask
    with torch.no_grad():
        out = model(torch.tensor(ids), torch.tensor(mask), torch.tensor(types), output_hidden_states=True)
        pooled = model.bert(torch.tensor(ids), torch.tensor(mask), torch.tensor(types))[1]
    np.savez_compressed(
        HERE / "outputs.npz",
        input_ids=ids,
        attention_mask=mask,
        token_type_ids=types,
        hidden=torch.stack(out.hidden_states).numpy(),
        pooled=pooled.numpy(),
        mlm=out.prediction_logits.numpy(),
        nsp=out.seq_relationship_logits.numpy(),
    )
    old = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        name = name.replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = tensor.bfloat16()
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    torch.save(old, HERE / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(old, HERE / "zip.bin")


if __name__ == "__main__":
    main()
