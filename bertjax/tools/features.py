"""Writes what the layers of a model compute: token features, or one embedding per sentence.

    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.jsonl --layers=-1,-2,-3,-4
    python -m bertjax.tools.features --model=DIR --file=in.txt --out=out.npz --pooling=mean

The input has one text a line (a tab separates the two of a pair), or is a table (.csv, .tsv,
.jsonl) with a column of texts, or two: those that the model was fine-tuned on, or --columns. JSONL
has the layout of the original's extract_features.py: linex_index, features: [token, layers: [index,
values]]. An npz file has `embeddings` [N, H] with --pooling, else `tokens_i` and `layers_i` [layers,
tokens, H] for line i.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import embeddings
from bertjax.formats.files import whole_file
from bertjax.interop.loading import load_model
from bertjax.interop.sentence_transformers import POOLINGS
from bertjax.interop.source import open_source
from bertjax.model.presets import DTYPES, Execution
from bertjax.tasks.inputs import read_texts
from bertjax.tasks.make import remembered
from bertjax.tools.arguments import file_or_stdin, make_parser, refusals, require_other_file


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("features", __doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a model that bertjax.load_model reads")
    add("--file", type=file_or_stdin, required=True, metavar="FILE", help="lines (- is the standard input), or a table")
    add("--columns", metavar="NAME,NAME", help="of the texts in a table; default: what the model was fine-tuned on")
    add("--out", required=True, metavar="FILE", help=".jsonl or .npz")
    add("--layers", help="list indices, with commas; 0 is the embeddings (default -1)")
    add("--pooling", choices=("model", *POOLINGS), help="one vector a sentence; model: as its files say, or the mean")
    add("--prompt", metavar="NAME", help="with --pooling, of a sentence-transformers model: what precedes each text")
    add("--batch_size", type=int, default=32, help="rows (default 32)")
    add("--dtype", default="float32", choices=DTYPES, help="of the arithmetic (default float32)")
    flags = parser.parse_args(arguments)
    with refusals("features"):
        write_features(flags)


def write_features(flags: Any) -> None:
    """Runs the model over the texts and writes the file."""
    binary = Path(flags.out).suffix == ".npz"
    if Path(flags.out).suffix not in (".jsonl", ".npz"):
        raise ValueError(f"--out={flags.out} must end in .jsonl or .npz")
    if flags.prompt and not flags.pooling:
        raise ValueError(f"--prompt={flags.prompt} has no effect without --pooling")
    if flags.pooling and flags.layers:
        raise ValueError(f"--layers={flags.layers} has no effect with --pooling, which takes the last layer")
    require_other_file(flags.file, flags.out)
    try:
        layers = [int(index) for index in (flags.layers or "-1").split(",")]
    except ValueError:
        raise ValueError(f"--layers={flags.layers}: give numbers separated by commas, such as --layers=-1,-2") from None
    memory = remembered(open_source(flags.model).settings, flags.model)
    texts = read_texts(flags.file, flags.columns, memory)
    with whole_file(Path(flags.out), "wb" if binary else "w") as stream:
        # The pooler is not used here, so a model without one will do.
        loaded = load_model(flags.model, "features", Execution(dtype=flags.dtype), reinitialise_head=True)
        if flags.pooling:
            pooling = None if flags.pooling == "model" else flags.pooling
            size = flags.batch_size
            results = embeddings.sentence_embeddings(loaded, texts, pooling, batch_size=size, prompt=flags.prompt)
        else:
            results = embeddings.layer_outputs(loaded, texts, layers, flags.batch_size)
        if binary:
            np.savez(stream, **_arrays(results))
            return
        for number, result in enumerate(results):
            stream.write(json.dumps({"linex_index": number, **_row(result, layers)}) + "\n")


def _arrays(results: np.ndarray | Iterable[tuple[list[str], np.ndarray]]) -> dict[str, np.ndarray]:
    if isinstance(results, np.ndarray):
        return {"embeddings": results}
    arrays = {}
    for number, (tokens, states) in enumerate(results):
        arrays[f"tokens_{number}"], arrays[f"layers_{number}"] = np.array(tokens), states
    return arrays


def _row(result: np.ndarray | tuple[list[str], np.ndarray], layers: Sequence[int]) -> dict:
    """The object of a JSON line for one text: its embedding, or features in the layout of the original."""
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
