"""Export of a model as StableHLO: one compiled-anywhere function, its weights beside it.

A directory holds `model.stablehlo` (jax.export: batch and length are symbols; CPU, CUDA and TPU),
`model.safetensors` (flat names with '/'), `export.json` (with the names of a classifier's outputs as `labels`) and the
tokenizer files. README.md of the repository shows how jax, numpy and flatbuffers alone read and run it.

The three inputs are int32 [batch, length]; length is at most the `max_length` of export.json, the
positions of the model (JAX refuses longer rows with "Error refining shapes"). JAX keeps such
files readable for at least six months and writes the version into them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from bertjax.formats.arrays import read_safetensors, write_safetensors
from bertjax.formats.files import whole_directory, write_json
from bertjax.interop.loaded import LoadedModel, largest_difference
from bertjax.model.paths import flatten, unflatten
from bertjax.model.presets import Execution

PLATFORMS = ("cpu", "cuda", "tpu")


def export_model(
    loaded: LoadedModel, target: str | Path, platforms: Sequence[str] = PLATFORMS, overwrite: bool = False
) -> float:
    """Writes the directory and compares what it computes with the live model.

    Float32 and the reference attention: fused kernels belong to one backend, an export to all. The
    products keep all of float32's bits, which GPUs and TPUs would not by default.

    Returns:
      The largest absolute difference over two batches of different shapes.

    Raises:
      ValueError: the export differs from the live model by more than 1e-4.
      FileExistsError: see files.whole_directory.
    """
    model = loaded.model.clone(execution=Execution(attention="reference"))
    weights = {path: np.asarray(x, np.float32) for path, x in flatten(loaded.params).items()}

    def function(weights: Mapping[str, jax.Array], ids: jax.Array, mask: jax.Array, types: jax.Array) -> Any:
        return model.apply({"params": unflatten(weights)}, ids, mask, types)

    batch, length = export.symbolic_shape(
        "batch, length", constraints=[f"length <= {model.config.max_position_embeddings}"]
    )
    rows = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in weights.items()}
    with jax.default_matmul_precision("highest"):
        exported = export.export(jax.jit(function), platforms=list(platforms))(shapes, rows, rows, rows)
    with whole_directory(target, overwrite) as directory:
        (directory / "model.stablehlo").write_bytes(exported.serialize())
        write_safetensors(directory / "model.safetensors", weights)
        about = {
            "model": type(model).__name__,
            "inputs": ["weights", "input_ids", "attention_mask", "token_type_ids"],
            "max_length": model.config.max_position_embeddings,
            "platforms": list(platforms),
            "jax": jax.__version__,
            "config": dataclasses.asdict(model.config),
            "labels": list((loaded.labels or {}).values()),
        }
        write_json(directory / "export.json", about, indent=2)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(directory, loaded.config.max_position_embeddings)
        function = export.deserialize((directory / "model.stablehlo").read_bytes())
        stored = read_safetensors(directory / "model.safetensors")
        with jax.default_matmul_precision("highest"):
            difference = max(
                largest_difference(
                    dataclasses.replace(loaded, model=model),
                    lambda *inputs: function.call(stored, *inputs),
                    model.config.vocab_size,
                    (rows, min(length, model.config.max_position_embeddings)),
                )
                for rows, length in ((1, 7), (3, 32))
            )
        if not difference < 1e-4:
            raise ValueError(f"the exported function differs from the model by {difference:.2e}")
    return difference
