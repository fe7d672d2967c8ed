"""Writes what the layers of a model compute: token features or one embedding a sentence.

    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.jsonl --layers=-1,-2,-3,-4
    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.npz --pooling=mean

The input has one text a line (a tab separates the two of a pair), or is a table (.csv, .tsv,
.jsonl) with a column of texts, or two. JSONL has the original's layout
(extract_features.py): linex_index, features: [token, layers: [index, values]]. An npz has
`embeddings` [N, H] with --pooling, else `tokens_i` and `layers_i` [layers, tokens, H] for line i.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bertjax import inference
from bertjax.formats.files import whole_file
from bertjax.interop.loading import load_model
from bertjax.interop.sentence_transformers import POOLINGS
from bertjax.model.presets import DTYPES, Execution
from bertjax.tasks.inputs import read_texts
from bertjax.tools.arguments import make_parser, refusals


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("features", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--file", required=True, metavar="FILE", help="lines, or a table")
    parser.add_argument(
        "--columns", metavar="NAME,NAME", help="of the texts in a .csv, .tsv or .jsonl file (default text)"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help=".jsonl or .npz")
    parser.add_argument("--layers", default="-1", help="list indices; 0 is the embeddings")
    parser.add_argument(
        "--pooling",
        choices=("model", *POOLINGS),
        help="one vector a sentence instead; model: as its sentence-transformers files say (else the mean)",
    )
    parser.add_argument("--batch_size", type=int, default=32, help="rows")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    options = parser.parse_args(arguments)
    out = Path(options.out)
    with refusals("features"):
        if out.suffix not in (".jsonl", ".npz"):
            raise ValueError(f"--out={out} must end in .jsonl or .npz")
        texts = read_texts(options.file, options.columns)
        try:
            layers = [int(index) for index in options.layers.split(",")]
        except ValueError:
            raise ValueError(
                f"--layers={options.layers}: give numbers, separated by commas, such as --layers=-1,-2"
            ) from None
        with whole_file(out, "wb" if out.suffix == ".npz" else "w") as stream:
            loaded = load_model(
                options.model, "features", Execution(dtype=options.dtype), reinitialise_head=True
            )  # the pooler is not used here
            if options.pooling:
                results = inference.sentence_embeddings(
                    loaded,
                    texts,
                    None if options.pooling == "model" else options.pooling,
                    batch_size=options.batch_size,
                )
            else:
                results = inference.layer_outputs(loaded, texts, layers, options.batch_size)
            if out.suffix == ".npz":
                np.savez(stream, **_arrays(results))
            else:
                for number, result in enumerate(results):
                    row = {"linex_index": number, **_row(result, layers)}
                    stream.write(json.dumps(row) + "\n")


def _arrays(results: np.ndarray | Iterable[tuple[list[str], np.ndarray]]) -> dict[str, np.ndarray]:
    if isinstance(results, np.ndarray):
        return {"embeddings": results}
    arrays = {}
    for number, (tokens, states) in enumerate(results):
        arrays[f"tokens_{number}"], arrays[f"layers_{number}"] = np.array(tokens), states
    return arrays


def _row(result: np.ndarray | tuple[list[str], np.ndarray], layers: Sequence[int]) -> dict:
    """What a line of JSON says of one text: its embedding, or the original's features."""
    if isinstance(result, np.ndarray):
        return {"embedding": result.tolist()}
    tokens, states = result
    return {
        "features": [
            {
                "token": token,
                "layers": [
                    {"index": index, "values": [round(float(x), 6) for x in states[k, t]]}
                    for k, index in enumerate(layers)
                ],
            }
            for t, token in enumerate(tokens)
        ]
    }


if __name__ == "__main__":
    main()
