"""Text to token store with any tokenizer, beside the bare `tokenizers` library on the same sentences.

    python -m tests.benchmarks.subwords --text='wiki/*/*' vocab bpe unigram

CPU time of one core. "ids alone" is what a worker does to sentences once they are read; the library is given the same
ones by `encode_batch_fast`, a megabyte at a time, and its ids are not even looked at. Both take turns, each megabyte.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bertjax import markdown
from tests.benchmarks import harness

COLUMNS = ("", "whole command, tokens/s", "MB/s", "ids alone, tokens/s", "MB/s", "`encode_batch_fast`, MB/s", "ratio")
BATCH = 1 << 20  # characters


def measure(text: str, directory: str, store: Path) -> list[str]:
    """The cells of a tokenizer."""
    import tokenizers

    from bertjax.data.documents import read_documents
    from bertjax.tokenization import load_tokenizer
    from tests.benchmarks.input_stages import build_command

    ours, bare = load_tokenizer(directory), Path(directory) / "tokenizer.json"
    if bare.exists():
        library = tokenizers.Tokenizer.from_file(str(bare))
    else:
        library = tokenizers.BertWordPieceTokenizer(f"{directory}/vocab.txt", lowercase=ours.do_lower_case)
        library = library._tokenizer
    ours.encode_flat(["compiles"])
    library.encode_batch_fast(["begins"])
    tokens = size = 0
    seconds = {"ours": 0.0, "library": 0.0}

    def turn(sentences: list[str]) -> None:
        nonlocal tokens, size
        begin = time.process_time()
        tokens += len(ours.encode_flat(sentences)[0])
        middle = time.process_time()
        library.encode_batch_fast(sentences, add_special_tokens=False)
        seconds["ours"] += middle - begin
        seconds["library"] += time.process_time() - middle
        size += sum(len(sentence.encode()) for sentence in sentences)

    waiting: list[str] = []
    for document in read_documents(text):
        waiting += [ours.word_prefix * (i > 0) + sentence for i, sentence in enumerate(document.sentences)]
        if sum(map(len, waiting)) > BATCH:
            turn(waiting)
            waiting = []
    if waiting:
        turn(waiting)
    built = build_command(text, directory, store)
    cpu = built["cpu_seconds"]
    numbers: list[Any] = [
        f"{built['tokens'] / cpu:,.0f}",
        f"{size / cpu / 1e6:.2f}",
        f"{tokens / seconds['ours']:,.0f}",
        f"{size / seconds['ours'] / 1e6:.2f}",
        f"{size / seconds['library'] / 1e6:.2f}",
        f"{seconds['library'] / seconds['ours']:.2f}",
    ]
    return [Path(directory).name, *numbers]


def main(argv: list[str]) -> None:
    parser = harness.make_parser("subwords", __doc__)
    parser.add_argument("--text", required=True, help="files, as --input of build_corpus")
    parser.add_argument("tokenizers", nargs="+", metavar="DIR", help="directories of tokenizers")
    flags = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each, as a worker has
    rows = []
    for directory in flags.tokenizers:
        with tempfile.TemporaryDirectory(prefix="bertjax-bench-") as scratch:
            rows.append(measure(flags.text, directory, Path(scratch) / "store"))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(markdown.table(COLUMNS, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
