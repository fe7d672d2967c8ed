"""XNLI: entailment in fifteen languages, from its official files.

In: a folder with xnli.dev.tsv and xnli.test.tsv (XNLI-1.0) and, to train on, MultiNLI translated (XNLI-MT-1.0,
multinli.train.LANGUAGE.tsv); the folders of the two archives may be given as they unpack. Or hf:facebook/xnli. Out:
records of one language or of several, and a score for each. Source: Conneau et al. 2018;
github.com/facebookresearch/XNLI.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bertjax.data.named import is_name
from bertjax.tasks import metrics
from bertjax.tasks.tables import read_table
from bertjax.tasks.task import Outputs, Record, Rows, Split, file_fingerprint
from bertjax.tasks.text_task import TextTask

LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
_LABELS = ("entailment", "neutral", "contradiction")
_TRANSLATED = {"contradictory": "contradiction"}  # as the training files spell it
_ROWS = {"train": 392_702, "dev": 2_490, "test": 5_010}  # of each language
_FOLDERS = ("", "XNLI-1.0", "XNLI-MT-1.0/multinli", "multinli")


# Columns of the label and the two texts, then of the language where a file has several.
_TRAINING = ("label", "premise", "hypo")
NAMED = ("premise", "hypothesis")
_SCORED = ("gold_label", "sentence1", "sentence2", "language")


@dataclass(frozen=True)
class XnliRecord(Record):
    """A pair, and the language that it is in."""

    language: str = ""


class XnliTask(TextTask):
    """Entailment, neutral or contradiction of a premise and a hypothesis; metric accuracy."""

    def __init__(
        self,
        source: str | pathlib.Path,
        language: str | Sequence[str] = "en",
        train_language: str | Sequence[str] | None = None,
    ):
        """`language` is scored; training uses `train_language` (None: the same).

        Each is a language, several ('de,fr', or a list) or 'all'. Training on 'en' and scoring others is the zero-shot
        setting.
        """
        self.languages = _languages(language)
        self.train_languages = _languages(train_language or language)
        name = "all" if self.languages == LANGUAGES else "_".join(self.languages)
        super().__init__(f"xnli_{name}", "classification", _LABELS)
        self.source = pathlib.Path(source)
        train = ",".join(map(_training_file, self.train_languages))
        self.splits = {"train": train, "dev": "xnli.dev.tsv", "test": "xnli.test.tsv"}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """As of every text task; of several languages the accuracy on each, too."""
        return *super().metric_names, *(f"accuracy_{language}" for language in self._several)

    @property
    def _several(self) -> tuple[str, ...]:
        return self.languages if len(self.languages) > 1 else ()

    def read(self, split: str) -> Split:
        """Records in file order. Raises ValueError with file and line for an unknown label."""
        self.check_split(split)
        wanted = self.train_languages if split == "train" else self.languages
        if is_name(self.source):
            named = split.replace("dev", "validation")
            paths, columns = [pathlib.Path(f"{self.source},{name}:{named}") for name in wanted], ("label", *NAMED)
        elif split == "train":
            paths, columns = [self._find(_training_file(language)) for language in wanted], _TRAINING
        else:
            paths, columns = [self._find(self.splits[split])], _SCORED
        # A file for each language, or one whose rows say theirs.
        records = [r for path, name in zip(paths, wanted, strict=False) for r in _records(path, columns, wanted, name)]
        counts = {language: sum(record.language == language for record in records) for language in wanted}
        if empty := [language for language, count in counts.items() if not count]:
            raise ValueError(f"{paths[0]} holds no row of language {', '.join(map(repr, empty))}")
        notes: tuple[str, ...] = ()
        if others := [f"{count:,} rows of {name}" for name, count in counts.items() if count != _ROWS[split]]:
            notes = (f"XNLI {split} has {', '.join(others)}, not the {_ROWS[split]:,} of the published files",)
        return Split(split, records, True, file_fingerprint(*paths), notes)

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> metrics.Scores:
        """The scores of a text task; of several languages the accuracy on each, too.

        The published files have as many rows of each language, so that `accuracy` is their mean.
        """
        scores = super().score(split, rows, outputs)
        right = self.predict(outputs) == [row["labels"] for row in rows]
        spoken = np.array([split.records[row["example"]].language for row in rows])
        values = {f"accuracy_{name}": float(right[spoken == name].mean()) for name in self._several}
        return replace(scores, values={**scores.values, **values})

    def _find(self, name: str) -> pathlib.Path:
        found = [path for folder in _FOLDERS if (path := self.source / folder / name).exists()]
        if not found:
            raise ValueError(
                f"{name} is neither in {self.source} nor in its {', '.join(_FOLDERS[1:])}: unpack XNLI-1.0.zip (dev "
                "and test) and XNLI-MT-1.0.zip (training) into one folder, and name that one; or "
                "--config.task.data=hf:facebook/xnli fetches the data by name (pip install 'bertjax[datasets]')"
            )
        return found[0]


def _languages(given: str | Sequence[str]) -> tuple[str, ...]:
    """'de', 'de,fr', ['de', 'fr'] or 'all' as codes, each once."""
    codes = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
    codes = LANGUAGES if codes == ["all"] else tuple(dict.fromkeys(codes))
    if unknown := [code for code in codes if code not in LANGUAGES]:
        raise ValueError(
            f"XNLI has no language {', '.join(map(repr, unknown))}; one of "
            f"{', '.join(LANGUAGES)}, several of them, or all"
        )
    return codes


def _training_file(language: str) -> str:
    return f"multinli.train.{language}.tsv"


def _records(path: pathlib.Path, columns: Sequence[str], languages: Sequence[str], own: str) -> list[XnliRecord]:
    """The rows of a file, or of a data set by name, that are of these languages (`own` if it does not say)."""
    records = []
    for number, (where, row, texts) in enumerate(read_table(path, columns).texts(columns[1:3])):
        language = row.get("language", own)
        if language not in languages:
            continue
        label = _TRANSLATED.get(row[columns[0]], row[columns[0]])
        if label not in _LABELS:
            raise ValueError(f"{where}: label {label!r} is not one of {', '.join(_LABELS)}")
        key = row.get("pairID") or str(number)  # the pair's number, which the languages share
        key = f"{language}-{key}" if len(languages) > 1 else key
        records.append(XnliRecord(key, *texts, label, where, language))
    return records
