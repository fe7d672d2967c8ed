"""What has to hold of a corpus before it is worth training on: numbers, each with a limit.

In: one split of a token store and how its pairs will be drawn. Out: `measure`, the numbers; `problems`, a sentence for
each one beyond its limit, with the files responsible. A build checks at 128 tokens (splits.py), training again at the
lengths of its rows, in every store of a mixture.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.config.setting import AT_LEAST_1, SHARE, check_all, setting
from bertjax.data.pairs import NO_ANCHORS, NOTHING, Tables, drawing_of, longest_sentence, tables_of, walk
from bertjax.data.store import TokenStore

EPOCHS = 40  # in which a token should be seen: as many as the original BERT was trained for
SAMPLE = 1 << 19  # tokens of whole documents that stand for a larger corpus
# Copies in a smaller corpus are not judged: it is a trial.
JUDGED_DOCUMENTS, JUDGED_TOKENS = 100, 50_000
TRIAL_LENGTH = 64  # shorter rows lose much of any text, which is then not the text's fault
TRIAL_LIMITS = {"max_unseen_share": 0.5, "max_random_share": 1.0}
UNKNOWN_CAUSES = (
    "Usual causes: the vocabulary is lower-case but the text is not lower-cased (do_lower_case), a vocabulary of "
    "another language, or SentencePiece pieces in a WordPiece vocabulary. Train one on this text (python -m "
    "bertjax.tools.train_vocab; bertjax.train does where it is given no tokenizer)"
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The numbers beyond which a corpus is refused."""

    max_unknown_rate: float = setting(0.05, "refuse a tokenizer for which a larger share of tokens is unknown", SHARE)
    max_random_share: float = setting(0.9, "refuse a corpus whose next-sentence pairs are random more often", SHARE)
    max_unseen_share: float = setting(0.1, "refuse a corpus of which a larger share is in no pair in 40 epochs", SHARE)
    max_duplicate_share: float = setting(0.5, "refuse a corpus of which more is copies of earlier documents", SHARE)
    max_line_tokens: int = setting(100_000, "refuse a longer line", AT_LEAST_1)

    def __post_init__(self) -> None:
        check_all(self)


def measure(
    store: TokenStore, seq_length: int, seed: int = 0, short_seq_prob: float = 0.1, nsp: bool = True
) -> dict[str, Any]:
    """Numbers of one split at a row length; of an even sample where it is large.

    Keys: seq_length; epochs; seen_in_epoch and seen_ever (share of the tokens that are in a pair in one epoch, in
    `epochs`); random_share of the pairs, None without NSP or with one sentence; longest_line in tokens;
    documents; tokens; and what the build recorded: unknown_rate, duplicate_share (of the tokens).
    """
    nsp = nsp and store.num_sentences > 1
    tables = _sample(store)
    seen = np.zeros(int(_tokens(tables).sum()), np.uint8)
    pairs = random = 0
    in_epoch = 0.0
    for epoch in range(EPOCHS):
        drawing = drawing_of(store, seq_length, seed, epoch, short_seq_prob, nsp)
        found = walk(tables, drawing, NO_ANCHORS, NOTHING, seen)
        pairs, random = pairs + found[0], random + found[1]
        in_epoch = in_epoch or float(seen.mean())
        if seen.all() and epoch >= 4 and pairs > 10_000:
            break
    return {
        "seq_length": seq_length,
        "epochs": EPOCHS,
        "seen_in_epoch": round(in_epoch, 6),
        "seen_ever": round(float(seen.mean()), 6),
        "random_share": round(random / pairs, 6) if nsp else None,
        "longest_line": int(longest_sentence(tables_of(store))),
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "unknown_rate": store.manifest["unknown_rate"],
        "duplicate_share": store.manifest["duplicate_share"],
    }


def _tokens(tables: Tables) -> np.ndarray:
    """Tokens of each document, int64 [D]."""
    return tables.sentence_ends[tables.document_sentences[1:] - 1].astype(np.int64)


def _sample(store: TokenStore) -> Tables:
    """Evenly spread documents of about SAMPLE tokens, all where there are no more, end to end."""
    tables, count = tables_of(store), store.num_documents
    if store.num_tokens > SAMPLE:
        chosen = max(count * SAMPLE // store.num_tokens, min(count, 256))
        numbers = np.arange(chosen) * count // chosen
        firsts, ends = tables.document_sentences[numbers], tables.document_sentences[numbers + 1]
        sentences = np.concatenate([[0], np.cumsum(ends - firsts)])
        within = np.arange(sentences[-1]) - np.repeat(sentences[:-1] - firsts, ends - firsts)
        tables = tables._replace(sentence_ends=tables.sentence_ends[within], document_sentences=sentences)
    tokens = _tokens(tables)
    tables = tables._replace(document_addresses=np.cumsum(tokens) - tokens)
    # As those of a store are: for arrays of another kind `walk` would be compiled again.
    for array in (tables.sentence_ends, tables.document_sentences, tables.document_addresses):
        array.flags.writeable = False
    return tables


def problems(numbers: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting of the limit, message) for each number that is beyond its limit.

    Args:
      numbers: of `measure`, of the training split.
      manifest: of the store, as far as it is made: `settings` (of a limit that is missing the default counts), `worst`
        (of each kind the files that hold most of it, as (path, share)), `splits`, `files`.
    """
    limits, worst, in_memory = manifest["settings"], manifest["worst"], not manifest["files"]

    def beyond(name: str, value: float | None) -> bool:
        limit = limits.get(name, getattr(Limits, name))
        if length < TRIAL_LENGTH:
            limit = max(limit, TRIAL_LIMITS.get(name, 0))
        return value is not None and value > limit

    def files(kind: str) -> str:
        named = ", ".join(f"{path} ({share:.0%})" for path, share in worst.get(kind, ()))
        return f" Most of it is in {named}." if named else ""

    length, unseen = numbers["seq_length"], 1 - numbers["seen_ever"]
    cut = (
        "Lines that hold several sentences are split by build_corpus --segment=true (where they are paragraphs, by "
        f"--format=prose or --format=blocks), all long lines by --split_lines={(length - 3) // 2}"
    )
    together = (
        "Most often the input has a blank line after every sentence: blank lines separate documents, sentences go on "
        "lines of their own. If it holds paragraphs, --format=prose or --format=blocks split them into sentences"
    )
    if in_memory:
        cut = "Cut long sentences: in `texts`, a line break ends one"
        together = "Give the sentences of a document together: each of `texts` is a whole document"
    if beyond("max_unseen_share", unseen):
        yield (
            "max_unseen_share",
            f"{unseen:.0%} of the tokens are in no pair of {length} tokens in {EPOCHS} epochs, and "
            f"{1 - numbers['seen_in_epoch']:.0%} are in none in one epoch: of a line longer than a row only the middle "
            f"is ever seen.{files('long')} {cut}",
        )
    if beyond("max_random_share", numbers["random_share"]):
        cause = (
            f"most sentences fill a row of {length} tokens alone, so it has no room for the true next one."
            f"{files('long')} {cut}"
        )
        alone = manifest["splits"]["train"]["one_sentence_documents"] / numbers["documents"]
        if alone > 0.5:
            cause = f"{alone:.0%} of the documents have a single sentence.{files('single')} {together}"
        yield (
            "max_random_share",
            f"{numbers['random_share']:.0%} of the next-sentence pairs would be random (label 1; about half should "
            f"be): {cause}. A corpus of single sentences can be trained on without NSP (config.data.nsp=false)",
        )
    if beyond("max_unknown_rate", numbers["unknown_rate"]):
        yield (
            "max_unknown_rate",
            f"{numbers['unknown_rate']:.1%} of the tokens are unknown to the tokenizer.{files('unknown')} "
            + UNKNOWN_CAUSES,
        )
    documents, tokens = (
        sum(split[name] for split in manifest["splits"].values())  # copies of a text are all in one split
        for name in ("documents", "tokens")
    )
    enough = documents >= JUDGED_DOCUMENTS and tokens >= JUDGED_TOKENS
    if enough and beyond("max_duplicate_share", numbers["duplicate_share"]):
        yield (
            "max_duplicate_share",
            f"{numbers['duplicate_share']:.0%} of the tokens are in documents whose text occurs more than once."
            f"{files('duplicate')} "
            + ("Give each text once" if in_memory else "build_corpus --deduplicate keeps the first of each"),
        )
    if beyond("max_line_tokens", numbers["longest_line"]):
        path, text = (worst.get("longest") or [["", ""]])[0]
        where = f" ({f'{path}: ' * (not in_memory)}{text!r}...)" if path else ""
        yield (
            "max_line_tokens",
            f"the longest {'sentence' if in_memory else 'line'} has {numbers['longest_line']:,} tokens{where}. {cut}",
        )


def describe(numbers: Mapping[str, Any]) -> str:
    """The numbers of `measure` in words."""

    def share(value: float) -> str:
        return f"{value:.2%}" if 0 < value < 0.001 or 0.999 < value < 1 else f"{value:.1%}"

    told = [
        f"in rows of {numbers['seq_length']}, {share(numbers['seen_in_epoch'])} of the tokens are seen in an epoch, "
        f"{share(numbers['seen_ever'])} in {EPOCHS}",
        f"longest line {numbers['longest_line']:,} tokens",
    ]
    if numbers["random_share"] is not None:
        told.insert(1, f"{share(numbers['random_share'])} random pairs")
    told += [f"{share(numbers['unknown_rate'])} unknown", f"{share(numbers['duplicate_share'])} in copies of documents"]
    return ", ".join(told)


def measure_rows(
    batches: Iterable[Mapping[str, np.ndarray]], unk_id: int, special_ids: Sequence[int]
) -> dict[str, Any]:
    """Numbers of masked rows (TFRecords), with the masks undone.

    Keys: rows, random_share (label 1), unknown_rate and duplicate_share (of the rows: those equal to an earlier one).
    """
    rows = random = unknown = tokens = 0
    hashes: set[bytes] = set()
    for batch in batches:
        ids, (row, slot) = batch["input_ids"].copy(), np.nonzero(batch["mlm_weights"])
        ids[row, batch["mlm_positions"][row, slot]] = batch["mlm_labels"][row, slot]
        there = batch["nsp_weights"][:, 0] > 0
        rows += int(there.sum())
        random += int(batch["nsp_labels"][there].sum())
        text = there[:, None] & (batch["attention_mask"] > 0) & (~np.isin(ids, special_ids) | (ids == unk_id))
        tokens += int(text.sum())
        unknown += int((text & (ids == unk_id)).sum())
        hashes.update(hashlib.blake2b(one.tobytes(), digest_size=16).digest() for one in ids[there])
    return {
        "rows": rows,
        "random_share": round(random / max(rows, 1), 6),
        "unknown_rate": round(unknown / max(tokens, 1), 6),
        "duplicate_share": round(1 - len(hashes) / max(rows, 1), 6),
    }


def row_problems(numbers: Mapping[str, Any], nsp: bool) -> Iterator[str]:
    """What is beyond its limit in the numbers of `measure_rows`; nothing if the rows are too few to judge."""
    if numbers["rows"] < JUDGED_DOCUMENTS:
        return
    share, limit = numbers["random_share"], Limits.max_random_share
    if nsp and not 1 - limit <= share <= limit:
        yield (
            f"{share:.0%} of the next-sentence labels are 1 (random; about half should be): train without NSP "
            "(config.data.nsp=false)"
        )
    if (rate := numbers["unknown_rate"]) > Limits.max_unknown_rate:
        yield f"{rate:.1%} of the tokens are unknown ([UNK]) in the vocabulary of the records"
    if (copies := numbers["duplicate_share"]) > Limits.max_duplicate_share:
        yield f"{copies:.0%} of the rows are equal to an earlier one"
