"""Converts a model to Hugging Face's layout or StableHLO, and can add words to its vocabulary.

    python -m bertjax.tools.convert --from=runs/base --out=base --add_vocab=words.txt
    python -m bertjax.tools.convert --from=runs/base --push=USER/MODEL
    python -m bertjax.tools.convert --from=runs/base --out=embedder --pooling=mean --normalise

--from is a Hugging Face directory, a TF1 checkpoint (directory or prefix) or a bertjax workdir. What
--to=hf (the default) writes is read by transformers, bertjax.load_model and --config.init_from. The
outputs of the model that was read and of the one that was written are compared. --push uploads what was
written to the Hugging Face Hub. Without --out it uploads the model that --from holds, with the report of
the run if it is one. --pooling writes the encoder as a directory of sentence-transformers, which makes one
vector of a text.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.opening import read_lines
from bertjax.formats import hub
from bertjax.interop import LoadError
from bertjax.interop.card import model_card
from bertjax.interop.huggingface import class_name, is_hugging_face, write_directory
from bertjax.interop.loaded import LoadedModel, largest_difference
from bertjax.interop.loading import ARCHITECTURES, TASKS, load_model
from bertjax.interop.names import part_of
from bertjax.interop.sentence_transformers import POOLINGS, SentenceSettings, normalise
from bertjax.model.heads import OF_WORDS, BertForMaskedLM, BertForPreTraining, TaskNetwork, with_rows
from bertjax.model.paths import flatten, unflatten
from bertjax.model.positions import EXTENSIONS
from bertjax.tokenization import Tokenizer, WordPieceTokenizer
from bertjax.tools.arguments import make_parser, refusals

_PASSED_ON = ("problem_type", "finetuning_task", "finetuned")


def extend_vocabulary(loaded: LoadedModel, words: Sequence[str]) -> tuple[LoadedModel, int]:
    """Adds words at the end of the vocabulary; a new row is the mean of its old pieces' rows.

    Old ids and rows stay as they are, so text without new words gives the same ids. Rows of the table
    beyond the old vocabulary are used before the table grows. A word becomes the entry that the
    tokenizer will look for: in lower case for an uncased model.

    Returns:
      (the larger model, the number of words added). Words that exist already are passed over.

    Raises:
      ValueError: no tokenizer beside the model or one that cannot be given more, words that it would
        split before it looks them up, or nothing to add.
    """
    old = loaded.tokenizer
    if old is None:
        raise ValueError("extending a vocabulary needs the tokenizer beside the model")
    vocabulary = [old.id_to_token(i) for i in range(old.vocab_size)]
    known = set(vocabulary)
    entries = _entries(old, [word for word in map(str.strip, words) if word])
    added = [entry for entry in dict.fromkeys(entries) if entry not in known]
    if not added:
        raise ValueError("every word of --add_vocab is in the vocabulary already")
    larger = old.extended(added)
    pieces = [_pieces(old, word) for word in added]
    size = max(loaded.config.vocab_size, len(vocabulary) + len(added))
    flat = with_rows(flatten(loaded.params), size)
    for path in flat.keys() & {*OF_WORDS}:
        table = flat[path] = np.array(flat[path])  # a copy, to write to
        for i, ids in enumerate(pieces, start=len(vocabulary)):
            table[i] = table[ids].mean(axis=0)
    model = loaded.model.clone(config=dataclasses.replace(loaded.config, vocab_size=size))
    return dataclasses.replace(loaded, model=model, params=unflatten(flat), tokenizer=larger), len(added)


def _entries(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """The words as the tokenizer looks them up, normalised; ValueError for those that it would split."""
    if not isinstance(tokenizer, WordPieceTokenizer):  # they become added tokens, which are looked up as they are
        if continuing := [word for word in words if word.startswith("##")]:
            raise ValueError(f"{continuing[0]!r} continues a word, which only BERT's own vocabularies can list")
        return list(words)
    parts = [tokenizer.normalizer.words(word.removeprefix("##")) for word in words]
    if split := [f"{word!r} ({' '.join(found)})" for word, found in zip(words, parts, strict=True) if len(found) != 1]:
        raise ValueError(
            f"{len(split)} of the words to add are several words to the tokenizer, so they would never be found in a "
            f"text: {', '.join(split[:5])}; give their parts, or leave them out"
        )
    return ["##" * word.startswith("##") + found[0] for word, found in zip(words, parts, strict=True)]


def _pieces(tokenizer: Tokenizer, word: str) -> list[int]:
    """Ids of a word's old pieces. A continuation ('##itis') is spelled by continuations: the
    pieces after those of a letter in front of it."""
    if not word.startswith("##"):
        return min(tokenizer.encode(" " + word), tokenizer.encode(word), key=len) or [tokenizer.unk_id]
    first = tokenizer.encode("a")
    ids = tokenizer.encode("a" + word[2:])
    if ids[: len(first)] == first and len(ids) > len(first):
        return ids[len(first) :]
    return tokenizer.encode(word[2:]) or [tokenizer.unk_id]


def convert(
    source: str | Path,
    target: str,
    out: str | Path,
    add_vocab: str | Path | None = None,
    task: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
    max_positions: int | None = None,
    extend_positions: str = "repeat",
    embeddings: SentenceSettings | None = None,
) -> float:
    """Converts and compares; see the module's docstring.

    Args:
      target: 'hf' or 'stablehlo'.
      add_vocab: file with one new word a line.
      task, max_positions, extend_positions: see load_model.
      say: receives progress, one line at a time.
      embeddings: how the encoder, which alone is written, makes a vector of a text.

    Returns:
      The largest difference between the outputs of what was read and of what was written.
    """
    if target not in ("hf", "stablehlo"):
        raise ValueError(f"--to={target} is not one of hf, stablehlo")
    out = Path(out).expanduser()  # a shell leaves the ~ of --out=~/DIR as it is
    _check_replaceable(out, overwrite)
    started = time.monotonic()
    if embeddings is not None and task is None:
        task = "features"
    before = after = load_model(
        source,
        task,
        reinitialise_head=embeddings is not None and task == "features",  # a pooler, which has no part in embeddings
        max_positions=max_positions,
        extend_positions=extend_positions,
    )
    name = class_name(before.config, architecture(before))[0]
    say(f"read    {source}: {name}, {before.size}, {time.monotonic() - started:.1f} s")
    longest = before.config.max_position_embeddings
    if embeddings and (embeddings.max_length or 0) > longest:
        raise ValueError(f"--max_length={embeddings.max_length} exceeds the {longest} positions of {source}")
    if max_positions is not None:
        say(f"rows    {max_positions:,} positions, extended by {extend_positions} where there were fewer")
    if add_vocab is not None:
        words = list(filter(str.strip, read_lines(add_vocab)))
        if not words:
            raise ValueError(f"--add_vocab={add_vocab} holds no word")
        after, added = extend_vocabulary(before, words)
        say(f"vocab   {added:,} of {len(words):,} words added, {after.config.vocab_size:,} rows")
    if target == "stablehlo":
        from bertjax.interop.stablehlo import export_model

        difference = export_model(after, out, overwrite=overwrite)
    else:
        sentence = embeddings or before.sentence
        passed_on = _PASSED_ON if isinstance(before.model, TaskNetwork) else ()
        settings = {name: before.settings[name] for name in passed_on if name in before.settings}
        if untrained := [head for head in before.settings.get("untrained_heads") or () if head in after.params]:
            settings["untrained_heads"] = untrained
        drawn = {part_of(path) for path in before.fresh}  # the pooler that the file has not
        write_directory(
            out,
            after.config,
            {part: values for part, values in after.params.items() if part not in drawn},
            architecture(after),
            after.tokenizer,
            after.labels,
            card=_card(before, str(source), sentence),
            settings=settings,
            overwrite=overwrite,
            sentence=sentence,
        )
        again = load_model(out, task, reinitialise_head=bool(drawn))
        _check_bits(after.params, again.params)
        vocabulary = min(before.config.vocab_size, again.config.vocab_size)
        if before.tokenizer is not None:
            vocabulary = min(vocabulary, before.tokenizer.vocab_size)
        shape = (2, min(16, before.config.max_position_embeddings))
        difference = largest_difference(before, again, vocabulary, shape)
    size = sum(p.stat().st_size for p in out.iterdir())
    say(f"wrote   {out}: {size / 1e6:,.1f} MB")
    say(f"compare largest difference of the outputs {difference:.2e}")
    return difference


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Before a model is read: FileExistsError where `out` is not empty and must not be replaced; ValueError for a file,
    or a directory that holds more than a model: --overwrite would delete it."""
    held = {path.name for path in out.iterdir()} if out.is_dir() else {""} if out.exists() else set()
    inside = [name for name in held if (out / name).is_dir() and not name[:1].isdigit()]  # 1_Pooling is of a model
    kept = bool(inside) or not held & {"config.json", "export.json"}
    if held and not overwrite:
        instead = "" if kept else ", or replace it by --overwrite"
        raise FileExistsError(f"{out} exists and is not empty; choose another --out{instead}")
    if held and kept:
        what = "a run" if "checkpoints" in held else f"the folder {min(inside)}" if inside else "no model"
        raise ValueError(f"{out} holds {what}, and --overwrite would delete all of it; choose another --out")


def architecture(loaded: LoadedModel) -> str:
    """transformers' class for a model: the one that its config.json names, where that has these
    parameters (BertLMHeadModel), else the class of heads.py."""
    kind, named = type(loaded.model), loaded.settings.get("architectures") or ()
    return next((name for name in named if ARCHITECTURES.get(name) is kind), kind.__name__)


def _check_bits(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    ours, theirs = flatten(written), flatten(read)
    different = [path for path in ours if not np.array_equal(ours[path], theirs.get(path))]
    if different or set(ours) != set(theirs):
        raise LoadError(f"the written model differs from the one that was read: {different[:10]}")


def _card(loaded: LoadedModel, source: str, sentence: SentenceSettings | None) -> str:
    run = loaded.settings if "batch_size" in loaded.settings else {}
    recipe = {k: run[k] for k in ("phases", "batch_size", "seed") if run.get(k)}
    recipe |= {f"optimizer.{k}": v for k, v in (run.get("optimizer") or {}).items()}
    masked = isinstance(loaded.model, BertForPreTraining | BertForMaskedLM) and sentence is None
    name, model_type = class_name(loaded.config, architecture(loaded))
    tokenizer = loaded.tokenizer
    return model_card(
        Path(source).name,
        name,
        f"{loaded.size}, converted from `{Path(source).name}`.",
        recipe=recipe,
        fill_mask=masked and not loaded.config.is_decoder,
        mask_token="[MASK]" if tokenizer is None else tokenizer.id_to_token(tokenizer.mask_id),
        model_type=model_type,
        embeddings=sentence is not None,
    )


def push(source: str, out: str | None, name: str, private: bool) -> str:
    """Pushes the model in `out`, or that of `source` as it is, with the report of the run `source`; see hub.push.

    Raises:
      ValueError: nothing there is in Hugging Face's layout.
    """
    origin = Path(source).expanduser()
    model = Path(out).expanduser() if out else next(filter(is_hugging_face, (origin, origin / "model")), None)
    if model is None:
        raise ValueError(f"{source} holds no model in Hugging Face's layout to push as it is; --out=DIR writes one")
    run = origin.parent if origin.name == "model" else origin
    return hub.push(model, name, private, run / "report.html")


def embeddings_of(flags: argparse.Namespace) -> SentenceSettings | None:
    """What --pooling, --normalise and --max_length ask for. Raises ValueError for an impossible combination."""
    if not flags.pooling:
        if flags.normalise or flags.max_length:
            raise ValueError("--normalise and --max_length are of an embedding model: give --pooling too")
        return None
    if flags.to != "hf":
        raise ValueError(f"--pooling goes with --to=hf, not with --to={flags.to}")
    poolings = tuple(name.strip() for name in flags.pooling.split(","))
    if wrong := [name for name in poolings if name not in POOLINGS]:
        raise ValueError(f"--pooling={flags.pooling}: {wrong[0]!r} is not one of {', '.join(POOLINGS)}")
    if flags.max_length is not None and flags.max_length < 3:
        raise ValueError(f"--max_length={flags.max_length} must be at least 3")
    return SentenceSettings(pooling=poolings, steps=(normalise,) * flags.normalise, max_length=flags.max_length)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("convert", __doc__)
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="DIR", help="the model to read")
    add("--to", default="hf", choices=("hf", "stablehlo"), help="the format to write (default hf)")
    add("--out", metavar="DIR", help="where it goes")
    add("--push", metavar="USER/MODEL", help="upload it to the Hugging Face Hub; without --out, what --from holds")
    add("--private", action="store_true", help="--push makes a private model")
    add("--task", choices=tuple(TASKS), help="which model to make of it (default: as it is stored)")
    add("--add_vocab", metavar="FILE", help="new words, one a line")
    add("--max_positions", type=int, metavar="N", help="extend the table of positions to rows of N tokens")
    add("--extend_positions", choices=EXTENSIONS, help="how (default: repeat, which copies its rows)")
    add("--pooling", metavar="NAME,NAME", help=f"write an embedding model: {', '.join(POOLINGS)}, or several, joined")
    add("--normalise", action="store_true", help="with --pooling: vectors of length 1")
    add("--max_length", type=int, metavar="N", help="with --pooling: tokens of a text (default: all positions)")
    add("--overwrite", action="store_true", help="replace what --out holds")
    flags = parser.parse_args(arguments)
    changes = flags.to != "hf" or any((flags.add_vocab, flags.max_positions, flags.task, flags.pooling))
    if not flags.out and (changes or not flags.push):
        parser.error("--out=DIR is missing: where the model is written (--push alone uploads what --from holds)")
    with refusals("convert"):
        if flags.private and not flags.push:
            raise ValueError("--private has no effect without --push")
        if flags.extend_positions and not flags.max_positions:
            raise ValueError(f"--extend_positions={flags.extend_positions} has no effect without --max_positions=N")
        if flags.push:
            hub.check_push(flags.push, flags.private, "--push")
        if flags.out:
            convert(
                flags.source,
                flags.to,
                flags.out,
                add_vocab=flags.add_vocab,
                task=flags.task,
                overwrite=flags.overwrite,
                say=print,
                max_positions=flags.max_positions,
                extend_positions=flags.extend_positions or "repeat",
                embeddings=embeddings_of(flags),
            )
        if flags.push:
            print(f"pushed  {push(flags.source, flags.out, flags.push, flags.private)}")


if __name__ == "__main__":
    main()
