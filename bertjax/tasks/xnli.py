"""XNLI: entailment in fifteen languages, from its official files.

In: a folder with xnli.dev.tsv and xnli.test.tsv (XNLI-1.0) and, to train on, MultiNLI translated
(XNLI-MT-1.0, multinli.train.LANGUAGE.tsv); the folders of the two archives may be given as they
unpack. Out: records of one language. Source: Conneau et al. 2018; github.com/facebookresearch/XNLI.
"""

import pathlib

from bertjax.tasks.tables import read_table
from bertjax.tasks.task import Record, Split, file_fingerprint
from bertjax.tasks.text import TextTask

LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi",
             "zh")
_LABELS = ("entailment", "neutral", "contradiction")
_TRANSLATED = {"contradictory": "contradiction"}  # as the training files spell it


class XnliTask(TextTask):
    """Entailment, neutral or contradiction of a premise and a hypothesis; metric accuracy."""

    def __init__(self, source: str | pathlib.Path, language: str = "en",
                 train_language: str | None = None):
        """`language` is scored; training uses `train_language` (None: the same).

        Training on 'en' and scoring another language is the zero-shot setting.
        """
        train_language = train_language or language
        for value in (language, train_language):
            if value not in LANGUAGES:
                raise ValueError(f"XNLI has no language {value!r}; one of {', '.join(LANGUAGES)}")
        super().__init__(f"xnli_{language}", "classification", _LABELS)
        self.source, self.language = pathlib.Path(source), language
        self.splits = {
            "train": f"multinli.train.{train_language}.tsv",
            "dev": "xnli.dev.tsv",
            "test": "xnli.test.tsv",
        }

    def read(self, split: str) -> Split:
        """Records in file order. Raises ValueError with file and line for an unknown label."""
        if split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; one of {', '.join(self.splits)}")
        path = self._find(self.splits[split])
        training = split == "train"
        columns = ("premise", "hypo", "label") if training else (
            "language", "gold_label", "sentence1", "sentence2")
        records = []
        for number, (line, row) in enumerate(read_table(path, columns).rows):
            if not training and row["language"] != self.language:
                continue
            where = f"{path}:{line}"
            label = row["label"] if training else row["gold_label"]
            label = _TRANSLATED.get(label, label)
            if label not in _LABELS:
                raise ValueError(f"{where}: label {label!r} is not one of {', '.join(_LABELS)}")
            texts = (row["premise"], row["hypo"]) if training else (
                row["sentence1"], row["sentence2"])
            records.append(Record(row.get("pairID") or str(number), *texts, label, where))
        if not records:
            raise ValueError(f"{path} holds no row of language {self.language!r}")
        return Split(split, records, True, file_fingerprint(path))

    def _find(self, name: str) -> pathlib.Path:
        for folder in ("", "XNLI-1.0", "XNLI-MT-1.0/multinli", "multinli"):
            if (self.source / folder / name).exists():
                return self.source / folder / name
        return self.source / name  # its absence is the error to show
