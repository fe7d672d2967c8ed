"""GLUE: the nine tasks and the diagnostic set, from their official files or from data sets by name.

In: a directory with the official files (`CoLA/train.tsv` and so on, or the task's own directory), the original MSR
files for MRPC, `hf:nyu-mll/glue,NAME` or `tfds:glue/NAME`. Out: records, the scores that the benchmark reports, and the
submission file of the GLUE site. Sources: gluebenchmark.com (Wang et al. 2019) and its download script; label names and
their order are those of TFDS.
"""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bertjax import markdown
from bertjax.data.named import is_name, read_rows
from bertjax.data.opening import read_lines
from bertjax.formats.files import whole_file
from bertjax.tasks.metrics import Scores, binary_f1
from bertjax.tasks.tables import Table, read_table
from bertjax.tasks.task import Outputs, Record, Rows, Split, all_labelled, file_fingerprint, number_of, texts_of
from bertjax.tasks.text_task import TextTask

_FILES = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
_MNLI_FILES = {
    "train": "train.tsv",
    "dev": "dev_matched.tsv",
    "dev_mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test_mismatched": "test_mismatched.tsv",
}


@dataclass(frozen=True)
class GlueSpec:
    """The official layout of one task."""

    folder: str
    text: tuple[str, ...]  # columns of the one or two texts
    label: str = "label"  # column of the gold label
    names: dict[str, str] = field(default_factory=dict)  # value in the file -> label name, by index
    files: dict[str, str] = field(default_factory=lambda: _FILES)
    submitted: dict[str, str] = field(default_factory=dict)  # split -> its file for the site; {}: FOLDER.tsv
    metric: str = "accuracy"  # picks the best checkpoint
    reported: tuple[str, ...] = ("accuracy",)  # what the benchmark reports
    named_text: tuple[str, ...] = ()  # names of the texts in data sets by name, where they differ
    headerless: tuple[str, ...] | None = None  # columns of labelled files without a header
    skip_short: bool = False  # the official loader leaves short rows out
    skip_label: str | None = None  # rows without a gold majority

    @property
    def submission(self) -> dict[str, str]:
        """Split -> name of the file that the GLUE site expects."""
        return self.submitted or {"test": f"{self.folder}.tsv"}

    @property
    def named(self) -> dict[str, str]:
        """Split -> its name at the Hub and in TFDS."""
        names = {split: name.removesuffix(".tsv") for split, name in self.files.items()}
        return {split: name.replace("dev", "validation").replace("diagnostic", "test") for split, name in names.items()}


_ACCEPTABLE = {"0": "unacceptable", "1": "acceptable"}
_POSITIVE = {"0": "negative", "1": "positive"}
_EQUIVALENT = {"0": "not_equivalent", "1": "equivalent"}
_DUPLICATE = {"0": "not_duplicate", "1": "duplicate"}
_TWO = {"0": "not_entailment", "1": "entailment"}
_NAMED_TWO = {"entailment": "entailment", "not_entailment": "not_entailment"}
_THREE = {name: name for name in ("entailment", "neutral", "contradiction")}
_PAIR = ("sentence1", "sentence2")
_PREMISE = ("premise", "hypothesis")
_MRPC = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_COLA = ("source", "label", "star", "sentence")
_MATTHEWS = {"metric": "matthews", "reported": ("matthews",)}
_F1 = {"metric": "accuracy_f1", "reported": ("f1", "accuracy")}
_CORRELATION = {"metric": "pearson_spearman", "reported": ("pearson", "spearman")}
_MNLI_SUBMITTED = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}

GLUE = {
    "cola": GlueSpec("CoLA", ("sentence",), names=_ACCEPTABLE, headerless=_COLA, **_MATTHEWS),
    "sst2": GlueSpec("SST-2", ("sentence",), names=_POSITIVE, headerless=("sentence", "label")),
    "mrpc": GlueSpec("MRPC", _MRPC[3:], "Quality", _EQUIVALENT, named_text=_PAIR, headerless=_MRPC, **_F1),
    "stsb": GlueSpec("STS-B", _PAIR, "score", {}, **_CORRELATION),
    "qqp": GlueSpec("QQP", ("question1", "question2"), "is_duplicate", _DUPLICATE, skip_short=True, **_F1),
    "mnli": GlueSpec(
        "MNLI", _PAIR, "gold_label", _THREE, _MNLI_FILES, _MNLI_SUBMITTED, named_text=_PREMISE, skip_label="-"
    ),
    "qnli": GlueSpec("QNLI", ("question", "sentence"), names=_NAMED_TWO),
    "rte": GlueSpec("RTE", _PAIR, names=_NAMED_TWO),
    "wnli": GlueSpec("WNLI", _PAIR, names=_TWO),
    # The diagnostic set has no training data: it is answered by a model trained on MNLI.
    "ax": GlueSpec("AX", _PAIR, names=_THREE, files={"test": "diagnostic.tsv"}, named_text=_PREMISE, **_MATTHEWS),
}

_QNLI_ROWS = {"train": 104_743, "dev": 5_463, "test": 5_463}
_WNLI_NOTE = (
    "WNLI's development split is adversarial (its sentences recur in training with the other "
    "label): scores below the majority baseline are expected, not a bug"
)


class GlueTask(TextTask):
    """One GLUE task read from `source`: a directory, hf:nyu-mll/glue,NAME or tfds:glue/NAME."""

    def __init__(self, name: str, source: str | pathlib.Path):
        if name not in GLUE:
            raise ValueError(f"unknown GLUE task {name!r}; one of {', '.join(GLUE)}")
        self.spec = spec = GLUE[name]
        head = "classification" if spec.names else "regression"
        super().__init__(name, head, tuple(spec.names.values()), spec.metric)
        self.splits = dict(spec.files)
        self.source = str(source)
        self.published = f"hf:nyu-mll/glue,{name}"

    # --- reading

    def read(self, split: str) -> Split:
        """Reads 'train', 'dev', 'test' (and 'dev_mismatched', 'test_mismatched' of MNLI)."""
        self.check_split(split)
        if is_name(self.source):
            return self._read_named(split)
        folder = pathlib.Path(self.source)
        if (folder / self.spec.folder).is_dir():
            folder = folder / self.spec.folder
        path = folder / self.spec.files[split]
        if self.name == "mrpc" and any(folder.glob("msr_paraphrase_*")) and not path.exists():
            return self._read_msr(folder, split)
        self.check_file(path)
        headerless = self.spec.headerless
        if headerless is not None and split.startswith("test"):
            headerless = ("index", *self.spec.text)
        table = read_table(path, self.spec.text, headerless, skip_short=self.spec.skip_short, label=self.spec.label)
        notes = [f"{table.skipped} short rows skipped"] if table.skipped else []
        records = self._records(table, notes)
        return self._split(split, records, file_fingerprint(path), notes)

    def _read_msr(self, folder: pathlib.Path, split: str) -> Split:
        """MRPC from Microsoft's files; dev_ids.tsv says which training pairs are the dev split."""
        paths = [folder / ("msr_paraphrase_test.txt" if split == "test" else "msr_paraphrase_train.txt")]
        if split != "test":
            paths.append(folder / "dev_ids.tsv")
        if missing := [path.name for path in paths if not path.exists()]:
            raise ValueError(
                f"{folder} has neither {self.spec.files[split]} nor {missing[0]}; MRPC needs the "
                "GLUE files or the three original ones"
            )
        table = read_table(paths[0], _MRPC, _MRPC)
        if split != "test":
            dev = {tuple(line.split()) for line in read_lines(paths[1]) if line.strip()}
            rows = [row for row in table.rows if ((row[1]["#1 ID"], row[1]["#2 ID"]) in dev) == (split == "dev")]
            table = replace(table, rows=rows)
        return Split(split, self._records(table, []), True, file_fingerprint(*paths))

    def _records(self, table: Table, notes: list[str]) -> list[Record]:
        labelled = self.spec.label in table.columns
        records, dropped = [], 0
        for number, (line, row) in enumerate(table.rows):
            where = f"{table.path}:{line}"
            label = self._label(row[self.spec.label], where) if labelled else None
            if label is not None and label == self.spec.skip_label:
                dropped += 1
                continue
            key = row.get("index") or row.get("id") or str(number)
            records.append(Record(key, *texts_of(row, self.spec.text), label, where))
        if dropped:
            notes.append(f"{dropped} rows without a gold label skipped")
        return records

    def _label(self, value: str, where: str) -> str | float | None:
        if self.head == "regression":
            number = number_of(value, where, self.spec.label)
            return number if number >= 0 else None
        if value in ("-1", self.spec.skip_label):
            return None if value == "-1" else value
        if value not in self.spec.names:
            raise ValueError(f"{where}: {self.spec.label} {value!r} is not one of {', '.join(self.spec.names)}")
        return self.spec.names[value]

    def _split(self, split: str, records: list[Record], fingerprint: str, notes: list[str]) -> Split:
        if self.name == "qnli" and len(records) != _QNLI_ROWS[split]:
            notes.append(
                f"QNLI {split} has {len(records)} rows, not the {_QNLI_ROWS[split]} of version 2; "
                "version 1 is obsolete: its splits overlap and its submissions are refused"
            )
        labelled = all_labelled(records)
        if records and not labelled and split.startswith("test"):
            notes.append("GLUE keeps those of its test sets, and scores the file of a submission at gluebenchmark.com")
        return Split(split, records, labelled, fingerprint, tuple(notes))

    def _read_named(self, split: str) -> Split:
        path = f"{self.source}:{self.spec.named[split]}"
        rows, fingerprint = read_rows(path)
        columns, names = self.spec.named_text or self.spec.text, tuple(self.spec.names.values())
        if missing := [column for column in (*columns, "label", "idx") if rows and column not in rows[0]]:
            raise ValueError(f"{path} is not laid out as {self.published}: no {missing[0]!r} in {', '.join(rows[0])}")
        records = []
        for row in sorted(rows, key=lambda row: row["idx"]):
            where, label = f"{path} row {row['idx']}", row["label"]
            if not names:
                label = float(label) if label >= 0 else None
            elif label is not None and label not in names:
                raise ValueError(f"{where}: label {label!r} is not one of {', '.join(names)}")
            records.append(Record(str(row["idx"]), *texts_of(row, columns), label, where))
        return self._split(split, records, fingerprint, [])

    # --- scores and submissions

    @property
    def metric_names(self) -> tuple[str, ...]:
        """As of every text task; F1 only where the benchmark reports it, and then the mean too."""
        common = tuple(name for name in super().metric_names if name != "f1")
        return (*common, "f1", "accuracy_f1") if "f1" in self.spec.reported else common

    def score(self, split: Split, rows: Rows, outputs: Outputs) -> Scores:
        """The benchmark's scores; `accuracy_f1` and `pearson_spearman` are means of two."""
        scores = super().score(split, rows, outputs)
        values, flags = dict(scores.values), scores.flags
        values.pop("f1", None)
        if "f1" in self.spec.reported:
            # Of the benchmark's second class, wherever the head has it.
            positive = self.labels.index(tuple(self.spec.names.values())[1])
            gold = [row["labels"] for row in rows]
            values["f1"] = binary_f1(gold, self.predict(outputs), positive)
            values["accuracy_f1"] = (values["accuracy"] + values["f1"]) / 2
        if "majority" in values and values["accuracy"] < values["majority"]:
            flags += ("below the majority baseline",)
        details = {**scores.details, **({"note": _WNLI_NOTE} if self.name == "wnli" else {})}
        return replace(scores, values=values, flags=flags, details=details)

    def write(self, split: Split, rows: Rows, outputs: Outputs, directory: pathlib.Path) -> list[pathlib.Path]:
        """predictions_SPLIT.jsonl and, for test splits, the file that the GLUE site expects."""
        paths = super().write(split, rows, outputs, directory)
        if split.name not in self.spec.submission:
            return paths
        in_file = {name: value for value, name in self.spec.names.items()}
        path = directory / self.spec.submission[split.name]
        with whole_file(path) as file:
            file.write("index\tprediction\n")
            for record, value in zip(split.records, self.predict(outputs), strict=True):
                answer = f"{min(max(value, 0.0), 5.0):.3f}" if not self.labels else in_file[self.labels[int(value)]]
                file.write(f"{record.id}\t{answer}\n")
        return [*paths, path]


def glue_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table in percent of {task: scores} as the benchmark reports them.

    A task with two scores counts with their mean, MNLI with the mean of m and mm where both are there ('mnli' and
    'mnli_mm'). WNLI and AX are shown but, as in the paper, left out of the mean.
    """
    cells, counted = {}, {}
    for name, scores in results.items():
        spec = GLUE[name.removesuffix("_mm")]
        values = [100 * scores[metric] for metric in spec.reported]
        cells[name] = "/".join(f"{value:.1f}" for value in values)
        counted.setdefault(name.removesuffix("_mm"), []).append(sum(values) / len(values))
    means = [sum(v) / len(v) for name, v in counted.items() if name not in ("wnli", "ax")]
    mean = f"{sum(means) / len(means):.1f}" if means else "-"
    heads = [f"{name}, {'/'.join(GLUE[name.removesuffix('_mm')].reported)}" for name in cells]
    return markdown.table([*heads, "mean"], [[*cells.values(), mean]]) + "\n"
