"""The original's data program, timed: create_pretraining_data.py of google-research/bert.

    python -m tests.benchmarks.input_original DIR TEXT VOCAB SEQ_LENGTH PREDICTIONS DUPES

DIR holds create_pretraining_data.py and tokenization.py. They import tensorflow, for flags and
files only: any package of that name will do, and DIR comes first on the path. Nothing is written
(serialisation is left out, in its favour). Prints one line of JSON with seconds of CPU time.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any


class _KeptTokens:
    """A tokenizer that answers from what was tokenized before: times the instances alone."""

    def __init__(self, tokenizer: Any, tokens: dict[str, list[str]]):
        self.vocab, self._tokens = tokenizer.vocab, tokens

    def tokenize(self, line: str) -> list[str]:
        return self._tokens.get(line, [])


def main() -> None:
    directory, text, vocab, seq_length, predictions, dupes = sys.argv[1:]
    sys.path.insert(0, directory)
    import create_pretraining_data as original  # type: ignore[import-not-found]
    import tokenization  # type: ignore[import-not-found]

    if hasattr(original.FLAGS, "mark_as_parsed"):
        original.FLAGS.mark_as_parsed()
    tokenizer = tokenization.FullTokenizer(vocab_file=vocab, do_lower_case=True)
    with open(text, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    started = time.process_time()
    tokens = {line: tokenizer.tokenize(line) for line in lines if line}
    tokenizing = time.process_time() - started
    count = sum(len(tokens[line]) for line in lines if line)
    started = time.process_time()
    instances = original.create_training_instances(
        [text],
        _KeptTokens(tokenizer, tokens),
        int(seq_length),
        int(dupes),
        0.1,
        0.15,
        int(predictions),
        random.Random(12345),
    )
    print(
        json.dumps(
            {
                "tokens": count,
                "tokenizing_seconds": tokenizing,
                "instances": len(instances),
                "instances_seconds": time.process_time() - started,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
