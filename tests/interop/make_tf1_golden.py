"""Writes tests/interop/golden_tf1: the tiny BERT of `golden` as TensorFlow's own Saver stores it.

Needs tensorflow (any version with tf.compat.v1; tensorflow-cpu 2.x was used) and safetensors; run
once, the files are committed:

    python tests/interop/make_tf1_golden.py

Variable names, orientations and optimizer slots are those of google-research/bert (modeling.py,
run_pretraining.py, optimization.py), written out here by hand and not taken from bertjax.
"""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
OUT = HERE / "golden_tf1"


def google_name(name: str) -> tuple[str, bool]:
    """(variable, whether it is transposed against Hugging Face's) for a state-dict name."""
    if name == "cls.predictions.bias":
        return "cls/predictions/output_bias", False
    if name.startswith("cls.seq_relationship"):
        leaf = "output_weights" if name.endswith("weight") else "output_bias"
        return f"cls/seq_relationship/{leaf}", False
    parts = name.replace(".layer.", ".layer_").split(".")
    if parts[-2] == "LayerNorm":
        parts[-1] = {"weight": "gamma", "bias": "beta"}[parts[-1]]
    elif parts[-2].endswith("_embeddings"):
        parts.pop()
    elif parts[-1] == "weight":
        return "/".join([*parts[:-1], "kernel"]), True
    return "/".join(parts), False


def main() -> None:
    OUT.mkdir(exist_ok=True)
    tf.compat.v1.disable_eager_execution()
    with tf.compat.v1.Session() as session:
        saved = {}
        for name, array in load_file(HERE / "golden" / "model.safetensors").items():
            variable, transposed = google_name(name)
            value = array.T if transposed else array
            saved[variable] = tf.Variable(value, name=variable)
            if variable.endswith("query/kernel"):  # a few of the optimizer's slots
                saved[variable + "/adam_m"] = tf.Variable(np.ones_like(value))
                saved[variable + "/adam_v"] = tf.Variable(np.ones_like(value))
        saved["global_step"] = tf.Variable(1000, dtype=tf.int64)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(saved)
        saver.save(session, str(OUT / "bert_model.ckpt"), write_meta_graph=False, write_state=False)
    theirs = json.loads((HERE / "golden" / "config.json").read_text())
    names = (
        "attention_probs_dropout_prob",
        "hidden_act",
        "hidden_dropout_prob",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "type_vocab_size",
        "vocab_size",
    )
    values = {name: theirs[name] for name in names}
    (OUT / "bert_config.json").write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
