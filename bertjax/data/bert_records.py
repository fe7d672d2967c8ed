"""The original's pre-training files: TFRecords of tf.train.Example, a masked row each.

In: files that `create_pretraining_data.py` of google-research/bert wrote, plain or GZIP. Out: `RecordRows`, of which
batches.py makes batches whose masks are fixed:

    input_ids, token_type_ids, attention_mask   int32 [B, T]    masked already
    mlm_positions, mlm_labels                   int32 [B, P]
    mlm_weights                                 float32 [B, P]  0 in unused slots
    nsp_labels, nsp_weights                     int32, float32 [B, 1]

Records are read in any order through a memory map and an index of their offsets (8 bytes of memory a record). GZIP has
no random access: such files are unpacked once, into a directory that is kept (`cache_dir`) or into a temporary one.
"""

import atexit
import contextlib
import functools
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.pairs import combine, permute
from bertjax.data.rows import Batch
from bertjax.data.sources import resolve
from bertjax.formats.crc32c import masked_crc32c
from bertjax.formats.files import make_once, scratch_directory, whole_file
from bertjax.formats.tfrecord import parse_example, record_offsets
from bertjax.tokenization import Tokenizer

CHECKED = 2_000  # records that a start reads, in 0.1 s; each is checked when it is drawn

# The original's name of each field -> the name in a batch.
FIELDS = {
    "input_ids": "input_ids",
    "input_mask": "attention_mask",
    "segment_ids": "token_type_ids",
    "masked_lm_positions": "mlm_positions",
    "masked_lm_ids": "mlm_labels",
    "masked_lm_weights": "mlm_weights",
    "next_sentence_labels": "nsp_labels",
}


class Records:
    """The examples of the original's files by number: `len()` and `read(numbers, into, batch)`.

    Args:
      patterns: files (see `sources.resolve`); the lengths T and P are those of the first record.
      cache_dir: where GZIP files are unpacked to and found again by later starts and by other processes; None: a
        temporary directory that is removed at exit.
      tokenizer: the vocabulary that the ids are of; None: any.

    Raises:
      ValueError: no records, a missing field, a damaged file, ids of another vocabulary.
    """

    def __init__(
        self,
        patterns: str | Iterable[str],
        cache_dir: str | os.PathLike[str] | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.paths = resolve(patterns)
        self.pad_id = 0 if tokenizer is None else tokenizer.pad_id
        self._plain = [_plain(path, cache_dir) for path in self.paths]
        self._names = [  # in errors
            path if plain == path else f"{plain} (unpacked from {path}; delete it, and it is made again)"
            for path, plain in zip(self.paths, self._plain, strict=True)
        ]
        self._maps = self._map()
        offsets = [
            record_offsets(data, name) if len(data) else np.empty(0, np.int64)
            for data, name in zip(self._maps, self._names, strict=True)
        ]
        self._offsets = np.concatenate(offsets)
        self._ends = np.cumsum([len(o) for o in offsets])
        if not len(self):
            raise ValueError(f"0 examples from {len(self.paths)} files, the first of which is {self.paths[0]}")
        first, where = self._record(0)
        self._reader = ExampleReader(first.tobytes(), where.removesuffix(", record 0"), tokenizer)
        self.seq_length = self._reader.seq_length
        self.max_predictions = self._reader.max_predictions

    def _map(self) -> list[np.ndarray]:
        return [
            np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else np.empty(0, np.uint8)
            for path in self._plain
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_maps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # processes map the files again
        self._maps = self._map()

    def __len__(self) -> int:
        return len(self._offsets)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the sizes and the first 64 KiB of the files, which tells them from other files."""
        digest = hashlib.sha256()
        for data in self._maps:
            digest.update(b"%d:" % len(data))
            digest.update(data[: 1 << 16])
        return digest.hexdigest()

    def empty(self, rows: int) -> Batch:
        """A batch of padding rows with weight 0."""
        batch = {
            ours: np.zeros((rows, length), np.int32)
            for ours, length in zip(FIELDS.values(), self._reader.lengths, strict=True)
        }
        batch["input_ids"][:] = self.pad_id
        batch["mlm_weights"] = batch["mlm_weights"].astype(np.float32)
        batch["nsp_weights"] = np.zeros((rows, 1), np.float32)
        return batch

    def read(self, numbers: Iterable[int], into: Iterable[int], batch: Batch) -> None:
        """Writes records to the rows `into` of a batch that `empty` made; ValueError, with file and record, for one
        that is damaged, of another shape than the first, or has a value that its field cannot have.
        """
        for number, row in zip(numbers, into, strict=True):
            self._reader.read(*self._record(number), batch, row)

    def check(self) -> None:
        """Reads up to CHECKED records, evenly spread, to refuse before training. Raises as `read`."""
        batch = self.empty(1)
        for number in range(0, len(self), -(-len(self) // CHECKED)):
            self.read([number], [0], batch)

    def _record(self, number: int) -> tuple[np.ndarray, str]:
        """(bytes of a record, file and place for errors); ValueError at a wrong checksum."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        where = f"{self._names[file]}, record {number - int(self._ends[file - 1]) * (file > 0)}"
        data, offset = self._maps[file], int(self._offsets[number])
        length = int.from_bytes(data[offset - 12 : offset - 4].tobytes(), "little")
        record = data[offset : offset + length]
        checksum = int.from_bytes(data[offset + length : offset + length + 4].tobytes(), "little")
        if checksum != masked_crc32c(record):
            raise ValueError(f"{where} is damaged (wrong checksum); copy or build the file again")
        return record, where


class ExampleReader:
    """Reads examples that have the fields and the lengths (T, P) of the first one.

    Args:
      first: bytes of a record of the file `path`.
      tokenizer: the vocabulary that the ids are of; None: any.

    Raises:
      ValueError: not the original's data, or of another vocabulary.
    """

    def __init__(self, first: bytes, path: str, tokenizer: Tokenizer | None):
        self._first = path
        example = _parse(first, f"{path}, record 0")
        if missing := [name for name in FIELDS if not len(example.get(name, ()))]:
            raise ValueError(
                f"{path}: no field {', '.join(missing)} (there is "
                f"{', '.join(sorted(example))}); not the original's pre-training data"
            )
        if tokenizer is not None and example["input_ids"][0] != tokenizer.cls_id:
            raise ValueError(
                f"{path}: the first record begins with id {example['input_ids'][0]}, but [CLS] is {tokenizer.cls_id} "
                "in the tokenizer; give the vocabulary that the files were made with"
            )
        self.seq_length = len(example["input_ids"])
        self.max_predictions = len(example["masked_lm_positions"])
        self.lengths = [self.seq_length] * 3 + [self.max_predictions] * 3 + [1]  # in the order of FIELDS
        vocab_size = 1 << 31 if tokenizer is None else tokenizer.vocab_size
        # The largest value that each number of a record can have, weights apart, and where fields end.
        largest = vocab_size - 1, 1, 1, self.seq_length - 1, vocab_size - 1, 1, 1
        self._limits, self._ends = np.repeat(largest, self.lengths), np.cumsum(self.lengths)

    def read(self, record: np.ndarray, where: str, batch: Batch, row: int) -> None:
        """Writes a record, uint8 [n], to a row of a batch; ValueError begins with `where`."""
        example = _parse(record.tobytes(), where)
        expected = dict(zip(FIELDS, self.lengths, strict=True))
        if (found := {name: len(example[name]) for name in FIELDS if name in example}) != expected:
            raise ValueError(
                f"{where}: a record has {found}, the first record of {self._first} has "
                f"{expected}; do not mix such files"
            )
        for name in FIELDS:
            if (example[name].dtype.kind == "f") != (name == "masked_lm_weights"):
                raise ValueError(
                    f"{where}: {name} is a list of {example[name].dtype} numbers; not the original's pre-training data"
                )
        numbers = np.concatenate([example[name] for name in FIELDS])  # float64, which holds every id
        if not (fits := (numbers >= 0) & (numbers <= self._limits)).all():  # nor NaN
            place = int(fits.argmin())
            field = int(np.searchsorted(self._ends, place, side="right"))
            name = list(FIELDS)[field]
            raise ValueError(f"{where}: " + self._problem(name, example[name][place - self._ends[field]]))
        for name, ours in FIELDS.items():
            batch[ours][row] = example[name]
        batch["nsp_weights"][row] = 1.0

    def _problem(self, name: str, value: Any) -> str:
        if name in ("input_ids", "masked_lm_ids"):
            return (
                f"{name} has the id {value}, the tokenizer has {int(self._limits[0]) + 1} entries; give "
                "the vocabulary that the files were made with, or build the file again"
            )
        allowed = {
            "masked_lm_positions": f"a row has {self.seq_length} tokens",
            "masked_lm_weights": "weights are from 0 to 1",
        }.get(name, "it must be 0 or 1")
        return (
            f"{name} has the value {value}, but {allowed}; it is not the original's "
            "pre-training data, or damaged: build the file again"
        )


def _parse(record: bytes, where: str) -> dict[str, np.ndarray]:
    try:
        return parse_example(record)
    except ValueError as error:
        raise ValueError(
            f"{where}: it is not the original's pre-training data, but other bytes ({error}); build the file again"
        ) from None


class RecordRows:
    """The endless rows of the records of these numbers; each epoch has all, in an order of its own (as they are where
    seed is None)."""

    pairs_per_row = 1

    def __init__(self, records: Records, numbers: np.ndarray, seed: int | None = None):
        self.records, self.numbers, self._seed = records, numbers, seed
        self.rows_per_epoch = len(numbers)
        self.empty = records.empty

    def fill(self, numbers: np.ndarray, into: np.ndarray, batch: Batch) -> None:
        self.records.read(map(self._number, numbers.tolist()), into.tolist(), batch)

    def _number(self, row: int) -> int:
        """The record of a row of the endless stream."""
        epoch, place = divmod(row, self.rows_per_epoch)
        if self._seed is not None:
            key = np.uint64(combine(np.uint64(self._seed % 2**64), np.uint64(epoch)))
            place = permute(place, self.rows_per_epoch, key)
        return int(self.numbers[place])


def split_records(count: int, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(numbers to train on, numbers held out), int64: evenly spread, at least one of each."""
    if not heldout_fraction:
        return np.arange(count), np.empty(0, np.int64)
    if count < 2:
        raise ValueError(f"{count} record cannot be split into a training and a held-out part; name held-out files")
    held = min(max(round(count * heldout_fraction), 1), count - 1)
    heldout = (np.arange(held) * 2 + 1) * count // (2 * held)
    training = np.ones(count, bool)
    training[heldout] = False
    return np.flatnonzero(training), heldout


def check_lengths(records: Records, seq_length: int, max_predictions: int | None) -> None:
    """Raises ValueError, with both values, if the files have another T or P than the training; None allows any."""
    for name, stored, wanted in (
        ("max_seq_length", records.seq_length, seq_length),
        ("max_predictions_per_seq", records.max_predictions, max_predictions),
    ):
        if wanted is not None and wanted != stored:
            raise ValueError(
                f"{records.paths[0]} was built with {name}={stored}, training is set to "
                f"{wanted}; set it to {stored}, or build the data with {wanted}"
            )


def _plain(path: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """The file itself, or a plain copy of a GZIP file; the copy is made again only if the file has changed."""
    with open(path, "rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path
    status = os.stat(path)
    identity = f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"
    name = f"{Path(path).stem}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def unpack(out: Path) -> None:
        try:
            with gzip.open(path, "rb") as source, whole_file(out, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the GZIP file is cut off or damaged ({error}); copy it again") from None

    return str(make_once(Path(cache_dir or _temporary_directory()) / name, unpack, f"a plain copy of {path}"))


@functools.cache
def _temporary_directory() -> Path:
    held = contextlib.ExitStack()
    atexit.register(held.close)
    return held.enter_context(scratch_directory())
