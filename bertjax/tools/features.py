"""Writes what the layers of a model compute: token features or one embedding a sentence.

    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.jsonl --layers=-1,-2,-3,-4
    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.npz --pooling=mean

The input has one text a line (a tab separates the two of a pair). JSONL has the original's layout
(extract_features.py): linex_index, features: [token, layers: [index, values]]. An npz has
`embeddings` [N, H] with --pooling, else `tokens_i` and `layers_i` [layers, tokens, H] for line i.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertjax import inference
from bertjax.data.opening import read_lines
from bertjax.interop.loading import load_model
from bertjax.model.presets import DTYPES, Execution


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--file", required=True, metavar="FILE", help="texts, one a line")
    parser.add_argument("--out", required=True, metavar="FILE", help=".jsonl or .npz")
    parser.add_argument("--layers", default="-1", help="list indices; 0 is the embeddings")
    parser.add_argument("--pooling", choices=("mean", "cls"), help="one vector a sentence instead")
    parser.add_argument("--batch_size", type=int, default=32, help="rows")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    options = parser.parse_args(arguments)
    out = Path(options.out)
    try:
        if out.suffix not in (".jsonl", ".npz"):
            raise ValueError(f"--out={out} must end in .jsonl or .npz")
        texts = [tuple(line.split("\t", 1)) if "\t" in line else line
                 for line in read_lines(options.file)]
        loaded = load_model(options.model, "features", Execution(dtype=options.dtype),
                            reinitialise_head=True)  # the pooler is not used here
        if options.pooling:
            vectors = inference.sentence_embeddings(loaded, texts, options.pooling,
                                                    batch_size=options.batch_size)
            if out.suffix == ".npz":
                np.savez(out, embeddings=vectors)
            else:
                rows = ({"linex_index": i, "embedding": v.tolist()} for i, v in enumerate(vectors))
                out.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return 0
        layers = [int(index) for index in options.layers.split(",")]
        results = inference.layer_outputs(loaded, texts, layers, options.batch_size)
        if out.suffix == ".npz":
            arrays = {}
            for i, (tokens, states) in enumerate(results):
                arrays[f"tokens_{i}"], arrays[f"layers_{i}"] = np.array(tokens), states
            np.savez(out, **arrays)
            return 0
        with out.open("w", encoding="utf-8") as stream:
            for i, (tokens, states) in enumerate(results):
                features = [
                    {"token": token, "layers": [
                        {"index": index, "values": [round(float(x), 6) for x in states[k, t]]}
                        for k, index in enumerate(layers)]}
                    for t, token in enumerate(tokens)
                ]
                stream.write(json.dumps({"linex_index": i, "features": features}) + "\n")
    except (ValueError, FileNotFoundError) as error:
        print(f"features: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
