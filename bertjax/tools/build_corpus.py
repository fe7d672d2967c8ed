"""Builds a token store for pre-training from text files, or shows what is in one.

    python -m bertjax.tools.build_corpus --input='corpus/*.txt' --tokenizer=DIR --output=DIR
    python -m bertjax.tools.build_corpus --inspect --output=DIR --seq_length=128

The tokenizer is copied into the store; training reads it from there. After a kill or a full disk,
repeat the command: it goes on with what is missing. On several machines give each --shard=i/n and
the same output directory.
"""

import argparse
import datetime
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from bertjax.data.build import Progress, build_store
from bertjax.data.documents import Preview, preview
from bertjax.data.laws import EPOCHS
from bertjax.data.sentences import UNSPACED
from bertjax.data.sources import FORMATS, Reading, resolve
from bertjax.data.splits import BuildSettings
from bertjax.data.store import SPLITS, TokenStore
from bertjax.formats.files import on_disk
from bertjax.interruption import Interrupted
from bertjax.tokenization import Tokenizer, WordPieceTokenizer, load_tokenizer
from bertjax.tools.arguments import (
    Parser,
    add_boolean,
    add_fields,
    add_input,
    add_settings,
    fields_of,
    make_parser,
    refusals,
    require_used,
)


def make(inspecting: bool = False) -> Parser:
    """The command line. Only --inspect reads settings."""
    parser = make_parser("build_corpus", __doc__)
    add = parser.add_argument
    add_input(parser)
    add("--tokenizer", help="directory or file (python -m bertjax.tools.train_vocab makes one)")
    add_boolean(parser, "do_lower_case", None, "only if the tokenizer does not say")
    add("--output", required=True, written=not inspecting, help="directory of the store (to --inspect, at gs:// too)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    add("--shard", metavar="i/n", help="make only every n-th shard from i on, i from 0")
    add("--runner", default="local", choices=("local", "beam"), help="beam: Apache Beam; its options follow after --")
    add("--overwrite", action="store_true", help="replace the store in the output directory")
    add_fields(parser, Reading)
    add_fields(parser, BuildSettings)
    add("--inspect", action="store_true", help="print statistics and decoded examples of the store")
    if inspecting:
        from bertjax.config import default_config  # late: a build has no use for settings

        add_settings(parser, default_config)
    add("--seq_length", type=int, default=128, help="for --inspect (default 128)")
    add("--examples", type=int, least=0, default=4, help="rows that --inspect shows (default 4)")
    add("--packed", action="store_true", help="--inspect shows packed rows")
    add("--split", default="train", choices=SPLITS, help="that --inspect shows")
    add("--seed", type=int, least=0, default=0, help="for --inspect")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, inspect, or both."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = make("--inspect" in arguments[:cut])
    flags = parser.parse_args(arguments[:cut])
    try:
        with refusals("build_corpus"):
            if not flags.input and not flags.inspect:
                raise ValueError("nothing to do: give --input='PATTERN' to build, --inspect to look")
            for name in ("seq_length", "examples", "packed", "split", "seed"):
                if not flags.inspect and getattr(flags, name) != parser.get_default(name):
                    raise ValueError(f"--{name} has no effect without --inspect: a run makes its rows itself")
            if flags.input:
                build(flags, arguments[cut + 1 :])
            if flags.inspect:
                inspect(flags)
    except Interrupted:
        print("the same command goes on with what is missing", file=sys.stderr)
        raise


def build(flags: argparse.Namespace, beam_options: list[str]) -> None:
    """Builds the store; prints how the files are read, progress and the summary."""
    on_disk(flags.output)  # where --inspect is given too
    if not flags.tokenizer:
        raise ValueError("--tokenizer=DIR is missing; python -m bertjax.tools.train_vocab makes one")
    seen = preview(resolve(flags.input), Reading(**fields_of(flags, Reading)))
    tokenizer = load_tokenizer(flags.tokenizer, flags.do_lower_case)
    started, make_shards = time.monotonic(), None
    if flags.runner == "beam":
        from bertjax.data.shards import beam_maker

        make_shards = beam_maker(beam_options)
    manifest = build_store(
        flags.input,
        tokenizer,
        flags.output,
        workers=flags.workers,
        reading=seen.reading,
        overwrite=flags.overwrite,
        shard=parse_shard(flags.shard),
        progress=show_progress,
        on_plan=lambda files, size: show_plan(files, size, reading_lines(seen, flags, tokenizer)),
        make_shards=make_shards,
        **fields_of(flags, BuildSettings),
    )
    print()
    if manifest:
        print(summary(manifest, flags.output, f"  ({clock(time.monotonic() - started)})"))
    else:
        print(f"shards of {flags.shard} are whole; the store is finished when all are")


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """'2/8' -> (2, 8)."""
    if text is None:
        return None
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        raise ValueError(f"--shard={text}: write i/n, for example 0/8 to 7/8") from None
    return index, count


def reading_lines(seen: Preview, flags: argparse.Namespace, tokenizer: Tokenizer) -> list[str]:
    """How the files will be read, with warnings where that is probably not what the user wants."""
    reading, formats = seen.reading, seen.formats
    guessed = "a guess by names and first bytes" if flags.format == "auto" else "as set"
    lines = [
        f"format {form} ({guessed}{f', {n:,} files' if len(formats) > 1 else ''}): {FORMATS[form]}"
        for form, n in formats.items()
    ]
    splits = reading.segment or (reading.segment is None and set(formats) != {"text"})
    unit = "paragraph" if splits else "sentence"
    told = "a guess" if flags.language == "auto" else "as set"
    rules = f", split into sentences by the rules of {reading.language!r} ({told})" if splits else ""
    lines.append(f"{seen.length:.1f} {seen.unit}s a {unit} in the first {seen.lines:,} lines{rules}")
    if not splits and seen.several > 0.15:
        lines.append(
            f"warning: {seen.several:.0%} of the lines hold several sentences, and a line is taken as one. "
            "--format=blocks (a blank line ends a document) or --format=prose (a file is a document) splits them"
        )
    if seen.tabs > 0.5:
        lines.append(
            f"warning: {seen.tabs:.0%} of the lines are two columns with a tab between them, and a line is taken as "
            "one sentence. Put each sentence on a line of its own, with a blank line between documents"
        )
    lines += [f"""{line}: awk 'BEGIN {{RS = ""}} {{gsub("\\n", " "); print}}' FILE""" for line in seen.warnings]
    if flags.language != "auto" and not splits:
        lines.append(
            f"warning: --language={flags.language} has no effect: lines are taken as "
            "sentences (--segment=true, --format=prose and --format=blocks split them)"
        )
    if flags.field != Reading.field and not set(formats) & {"jsonl", "parquet", "tfds", "hf"}:
        lines.append(f"warning: --field={flags.field} has no effect: these files have no fields")
    if isinstance(tokenizer, WordPieceTokenizer) and (name := UNSPACED.get(reading.language)):
        lines.append(
            f"note: {name} is written without spaces between words, and this tokenizer needs them: put them in with a "
            "segmenter first, or use a Unigram tokenizer (train_vocab --model=unigram); otherwise whole clauses are "
            "taken as words"
        )
    return lines


def show_plan(files: list[str], size: int, reading: Sequence[str]) -> None:
    print(f"{len(files):,} file{'s' * (len(files) != 1)}, {size / 1e6:,.1f} MB:")
    for name in files[:10]:
        print(f"  {name}")
    if len(files) > 10:
        print(f"  ... {files[-1]}")
    for line in reading:
        print(line)


def show_progress(state: Progress) -> None:
    share = state.bytes_done / max(state.bytes, 1)
    line = (
        f"shard {state.shards_done}/{state.shards}  {share:4.0%}  {state.tokens / 1e6:,.1f} M "
        f"tokens  {state.tokens_per_second:,.0f} tokens/s  ETA {clock(state.eta_seconds)}"
    )
    if sys.stdout.isatty():
        print(f"\r{line:<78}", end="", flush=True)
    else:
        print(line, flush=True)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return "?" if seconds == math.inf else str(datetime.timedelta(seconds=round(seconds)))


def summary(manifest: dict[str, Any], path: str, duration: str = "") -> str:
    """The table that stands at the end of a build."""

    def counts(key: str) -> str:
        return ", ".join(f"{n:,} {what.replace('_', ' ')}" for what, n in manifest[key].items()) or "nothing"

    lines = [f"token store {path}{duration}", f"{'':10}{'documents':>14}{'sentences':>14}{'tokens':>16}"]
    for split in SPLITS:
        found = manifest["splits"][split]
        lines.append(f"{split:10}{found['documents']:14,}{found['sentences']:14,}{found['tokens']:16,}")
    random, share = "none", manifest["random_share"]
    if share is not None:
        random = f"{share:.1%} at 128 (label 1; 0 = is next)"
        random += ", from the same document, the only one" * (manifest["splits"]["train"]["documents"] == 1)
    lines += [
        f"unknown tokens   {manifest['unknown_rate']:.3%}",
        f"random pairs     {random}",
        f"tokens seen      {manifest['seen_in_epoch']:.2%} in an epoch at 128, {manifest['seen_ever']:.2%} in {EPOCHS}",
        f"longest line     {manifest['longest_line']:,} tokens",
        f"copies           {manifest['duplicate_share']:.2%} of the tokens, in documents whose text occurs before",
    ]
    if cut := sum(manifest["splits"][split]["documents"] for split in SPLITS) - manifest["documents"]:
        lines.append(
            f"held out         the last sentences of {cut:,} document{'s' * (cut > 1)}, which count in both splits"
        )
    if not manifest["splits"]["heldout"]["documents"]:
        lines.append("held out         nothing: a run needs text to be evaluated on")
    tokenizer = manifest["tokenizer"]
    lines += [
        f"dropped          {counts('dropped')}",
        f"repaired         {counts('repaired')}",
        f"tokenizer        {tokenizer['vocab_size']:,} entries, {tokenizer['fingerprint'][:16]}",
        f"content          {manifest['content_hash'][:16]}",
    ]
    return "\n".join(lines)


def inspect(flags: argparse.Namespace) -> None:
    """Prints statistics of the store and decoded rows."""
    from bertjax.config_checks import check_config
    from bertjax.data.inspection import decoded_examples, pair_statistics
    from bertjax.data.remote import local_store

    require_used(flags.given, ["masking."], "--inspect")
    store = TokenStore(local_store(flags.output), flags.split)
    print(summary(store.manifest, flags.output))
    print(f"\nfirst epoch of {flags.split!r} at length {flags.seq_length}")
    for name, value in pair_statistics(store, flags.seq_length, flags.seed).items():
        share = name in ("random", "full", "padded_fill", "packed_fill", "coverage")
        text = f"{value:.1%}" if share else f"{value:,.1f}".removesuffix(".0")
        print(f"  {name:14}{text:>14}")
    if not flags.examples:
        return
    print("\n{what stands there->what is to be predicted}, segment B in another colour")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    rows = (flags.seq_length, flags.examples, flags.seed)
    config, tokenizer = check_config(flags.config), store.load_tokenizer()
    for line in decoded_examples(store, tokenizer, config, *rows, flags.packed, colour):
        print(line)


if __name__ == "__main__":
    main()
