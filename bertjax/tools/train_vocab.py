"""Trains a vocabulary on text files, and measures how well it fits.

    python -m bertjax.tools.train_vocab --input='corpus/*.txt' --output=vocab --compare=DIR

--model says what kind: wordpiece (BERT's, the default), bpe (RoBERTa's byte-level BPE) or unigram (XLM-R's).
Writes vocab.txt or tokenizer.json, and tokenizer_config.json, to the output directory, and prints the
unknown rate and the tokens per word on text that was not trained on, beside those of another
vocabulary (--compare). The corpus may have any size; it is read once, in bounded memory. A vocabulary that is there is
kept: the same command measures it again, another one is refused without --overwrite.
"""

import argparse
import contextlib
import itertools
import json
import logging
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax.data.sentences import length_of
from bertjax.data.sources import Reading, described, resolve
from bertjax.formats.files import directory_for_work, read_json, write_json
from bertjax.tokenization.tokenizer import Tokenizer
from bertjax.tokenization.train_subwords import train_subwords
from bertjax.tokenization.train_vocab import VOCAB_SIZE, train_wordpiece
from bertjax.tools.arguments import Parser, add_boolean, add_fields, add_input, fields_of, make_parser, refusals

_KEPT_OUT_EVERY = 100  # without --heldout, every hundredth line is measured on, not trained on
_MEASURED_LINES = 20_000
_RECORD = "train_vocab.json"  # beside a vocabulary: what it was made of
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
_OF_WORDPIECE = ("tokenize_chinese_chars", "num_unused", "min_char_count", "max_chars")


def parser() -> Parser:
    """The command line."""
    parser = make_parser("train_vocab", __doc__)
    add = parser.add_argument
    add_input(parser, required=True)
    add("--output", required=True, help="directory for the vocabulary and tokenizer_config.json")
    add("--model", default="wordpiece", choices=("wordpiece", "bpe", "unigram"), help="the kind (default wordpiece)")
    add("--vocab_size", type=int, default=VOCAB_SIZE, help=f"entries (default {VOCAB_SIZE})")
    add_boolean(parser, "do_lower_case", None, "an uncased vocabulary (default true for wordpiece, else false)")
    add_boolean(
        parser,
        "strip_accents",
        None,
        "drop combining marks (default: as do_lower_case, unless words that differ would become one; then they are "
        "kept and a line says so)",
    )
    add_boolean(parser, "tokenize_chinese_chars", None, "isolate CJK ideographs (default true; wordpiece only)")
    add("--num_unused", type=int, least=0, help="[unusedN] rows (default vocab_size / 30, at most 994; wordpiece only)")
    add(
        "--min_char_count",
        type=int,
        help="rarer characters get no entry (default 2; 1 in under 10000 characters; wordpiece only)",
    )
    add(
        "--max_chars",
        type=int,
        help="characters with entries (default 1000, or as many as cover 99.95 %% of the text, at most a third of "
        "vocab_size; wordpiece only)",
    )
    add("--max_words", type=int, default=2_000_000, help="words held in memory, 250 bytes each (default 2000000)")
    add(
        "--heldout",
        action="append",
        metavar="PATTERN",
        help="text to measure on (default: every 100th line, not trained on)",
    )
    add("--overwrite", action="store_true", help="replace the vocabulary in the output directory")
    add("--compare", metavar="DIR_OR_VOCAB", help="a vocabulary to measure beside the new one")
    add_fields(parser, Reading, "format", "field", "errors", "max_line_mb")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, measure."""
    flags = parser().parse_args(arguments)
    logging.getLogger("bertjax").setLevel(logging.INFO)
    with refusals("train_vocab"), directory_for_work(flags.output):
        train(flags)


def train(flags: argparse.Namespace) -> None:
    from bertjax.interop.huggingface import is_hugging_face
    from bertjax.tokenization import load_tokenizer

    other_kind = flags.model != "wordpiece"
    if unused := [name for name in _OF_WORDPIECE if other_kind and getattr(flags, name) is not None]:
        raise ValueError(f"--{unused[0]} has no effect on --model={flags.model}; leave it out")
    if flags.do_lower_case is None:
        flags.do_lower_case = not other_kind
    out = pathlib.Path(flags.output).expanduser()
    if is_hugging_face(out) or (out / "checkpoints").exists():
        raise ValueError(f"{flags.output} holds a model, which would lose its vocabulary; choose another --output")
    flags.input = resolve(flags.input)
    made_of = describe(flags)
    is_there = not flags.overwrite and holds(out, made_of)
    # What is needed only at the end is opened now: counting may take hours.
    other = load_tokenizer(flags.compare) if flags.compare else None
    measured = list(itertools.islice(lines_of(flags.heldout, flags), _MEASURED_LINES)) if flags.heldout else []
    shown = ("model", "vocab_size", "do_lower_case", "strip_accents", *_OF_WORDPIECE * (not other_kind), "max_words")
    for name in shown:
        value = getattr(flags, name)
        print(f"{name} = {'default' if value is None else value}")
    started = time.monotonic()
    lines = lines_of(flags.input, flags)
    lines = lines if flags.heldout else keep_out(lines, measured)
    if is_there:
        tokenizer, told = load_tokenizer(out), "which this command has made before (--overwrite makes it again)"
        while not flags.heldout and len(measured) < _MEASURED_LINES and next(lines, None) is not None:
            pass  # `keep_out` fills `measured`
    else:
        tokenizer = (train_other if other_kind else train_bert)(lines, flags)
        save(tokenizer, out, made_of)
        told = f"{time.monotonic() - started:.1f} s"
    print(f"{tokenizer.vocab_size} entries in {flags.output}/{tokenizer.VOCABULARY_FILE}, {told}")
    kind = "not " if measured else ""
    if not measured:  # under 51 lines
        measured = list(itertools.islice(lines_of(flags.input, flags), _MEASURED_LINES))
    print(f"on {len(measured)} lines that were {kind}trained on:")
    for name, one in ((flags.output, tokenizer), (flags.compare, other)):
        if one is not None:
            unknown, tokens, unit = fit(one, measured)
            print(f"  {name}: {one.vocab_size} entries, unknown rate {unknown:.4%}, {tokens:.4f} tokens a {unit}")


def describe(flags: argparse.Namespace) -> dict[str, Any]:
    """All that decides the vocabulary: the flags, and the files with their sizes and times."""
    others = ("input", "output", "overwrite", "compare", "heldout")
    found = {name: value for name, value in vars(flags).items() if name not in others}
    found |= {"input": described(flags.input, flags.field), "all lines": bool(flags.heldout)}
    return json.loads(json.dumps(found))  # as `holds` reads it back: lists for tuples


def holds(out: pathlib.Path, made_of: dict[str, Any]) -> bool:
    """Whether the vocabulary in `out` was made of this. FileExistsError where another one would be lost."""
    there = next((out / name for name in _VOCABULARIES if (out / name).exists()), None)
    if there is None:
        return False
    old: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        old = read_json(out / _RECORD, dict)
    differing = [name for name, value in made_of.items() if name not in old or old[name] != value]
    if differing:
        told = f" of another {', '.join(differing)}" if old else ""
        raise FileExistsError(
            f"{there} is a vocabulary{told}, and would be lost; choose another --output, or replace it by --overwrite"
        )
    return True


def save(tokenizer: Tokenizer, out: pathlib.Path, made_of: dict[str, Any]) -> None:
    """Writes the vocabulary and then, since it stands for a whole one, the record."""
    (out / _RECORD).unlink(missing_ok=True)
    tokenizer.save(out)
    for name in _VOCABULARIES:  # of another kind: nothing reads both
        if name != tokenizer.VOCABULARY_FILE:
            (out / name).unlink(missing_ok=True)
    write_json(out / _RECORD, made_of)


def train_bert(lines: Iterator[str], flags: argparse.Namespace) -> Tokenizer:
    return train_wordpiece(
        lines,
        flags.vocab_size,
        flags.do_lower_case,
        "auto" if flags.strip_accents is None else flags.strip_accents,
        flags.tokenize_chinese_chars is not False,
        num_unused=flags.num_unused,
        min_char_count=flags.min_char_count,
        max_chars=flags.max_chars,
        max_words=flags.max_words,
    )


def train_other(lines: Iterator[str], flags: argparse.Namespace) -> Tokenizer:
    return train_subwords(
        lines, flags.model, flags.vocab_size, flags.do_lower_case, flags.strip_accents, flags.max_words
    )


def fit(tokenizer: Tokenizer, texts: list[str]) -> tuple[float, float, str]:
    """(share of unknown tokens, tokens a unit, the unit: that of `length_of`); nan without text."""
    tokens = unknown = 0
    for text in texts:
        ids = tokenizer.encode(text)
        tokens += len(ids)
        unknown += ids.count(tokenizer.unk_id)
    length, unit = length_of(texts)
    return (unknown / tokens, tokens / length, unit) if tokens and length else (float("nan"), float("nan"), unit)


def lines_of(patterns: list[str], flags: argparse.Namespace) -> Iterator[str]:
    """Lines or paragraphs of the files; sentence boundaries do not matter to a vocabulary."""
    from bertjax.data.documents import read_documents

    documents = read_documents(patterns, segment=False, **fields_of(flags, Reading))
    return (line for document in documents for line in document.sentences)


def keep_out(lines: Iterator[str], kept: list[str]) -> Iterator[str]:
    """Yields `lines` except every hundredth, which goes to `kept` (20,000 at most)."""
    for number, line in enumerate(lines):
        if number % _KEPT_OUT_EVERY == _KEPT_OUT_EVERY // 2 and len(kept) < _MEASURED_LINES:
            kept.append(line)
        else:
            yield line


if __name__ == "__main__":
    main()
