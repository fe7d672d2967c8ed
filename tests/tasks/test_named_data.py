"""Tasks whose data are named: folders that the library `datasets` reads, and the server that speaks as the Hub does."""

import time

import pytest

from bertjax.data.named import pinned, splits_of
from bertjax.tasks.glue import GlueTask
from bertjax.tasks.inputs import read_inputs
from bertjax.tasks.make import Remembered, make_task
from tests.interop.hub_server import HubServer

datasets = pytest.importorskip("datasets")
CLASSES = datasets.ClassLabel


def write_splits(folder, features, **splits):
    """SPLIT-*.parquet of rows, as the Hub has them, with the names of the classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
        data.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def name_configurations(folder):
    """README.md that makes each folder in it a configuration, and each of its files a split."""
    lines = ["---", "configs:"]
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        lines += [f"- config_name: {each.name}", "  data_files:"]
        for file in sorted(each.iterdir()):
            lines += [f"  - split: {file.name.partition('-')[0]}", f"    path: {each.name}/{file.name}"]
    (folder / "README.md").write_text("\n".join([*lines, "---"]) + "\n")


def pairs(count, labels=2, first="sentence1", second="sentence2"):
    return [{first: f"A {i}.", second: f"B {i}.", "label": i % labels, "idx": i} for i in range(count)]


STRING, NUMBER = datasets.Value("string"), datasets.Value("int32")
PAIR = {"sentence1": STRING, "sentence2": STRING}
EQUIVALENT = CLASSES(names=["not_equivalent", "equivalent"])
THREE = CLASSES(names=["entailment", "neutral", "contradiction"])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def glue(tmp_path):
    """Three configurations of nyu-mll/glue."""
    folder = tmp_path / "glue-at-the-hub"
    unlabelled = [{**row, "label": -1} for row in pairs(3)]
    write_splits(
        folder / "mrpc",
        {**PAIR, "label": EQUIVALENT, "idx": NUMBER},
        train=pairs(8)[::-1],
        validation=pairs(4),
        test=unlabelled,
    )
    scores = [{**row, "label": i / 2} for i, row in enumerate(pairs(4))]
    unscored = [{**row, "label": -1.0} for row in pairs(2)]
    write_splits(
        folder / "stsb",
        {**PAIR, "label": datasets.Value("float32"), "idx": NUMBER},
        train=scores,
        validation=scores,
        test=unscored,
    )
    three = pairs(6, 3, "premise", "hypothesis")
    mnli = {split: three for split in ("train", "validation_matched", "validation_mismatched")}
    write_splits(folder / "mnli", {"premise": STRING, "hypothesis": STRING, "label": THREE, "idx": NUMBER}, **mnli)
    name_configurations(folder)
    return folder


def records(task, split):
    return [(record.text_a, record.text_b, record.label) for record in task.read(split).records]


def test_glue_by_name_gives_the_records_of_its_files(glue, tmp_path):
    server = HubServer(datasets={"nyu-mll/glue": {"main": glue}})
    with pytest.MonkeyPatch.context() as patch:
        server.serve_this_process(patch, tmp_path / "home")
        named = make_task("mrpc", "hf:nyu-mll/glue,mrpc")
        found = {split: records(named, split) for split in ("train", "dev", "test")}
        unlabelled = named.read("test")
    server.close()
    folder = tmp_path / "MRPC"
    folder.mkdir()
    for split, count in (("train", 8), ("dev", 4), ("test", 3)):
        header = (
            "index\t#1 ID\t#2 ID\t#1 String\t#2 String"
            if split == "test"
            else "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        )
        lines = [f"{i if split == 'test' else i % 2}\t1\t2\tA {i}.\tB {i}." for i in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n")
    files = make_task("mrpc", str(folder))
    assert found == {split: records(files, split) for split in ("train", "dev", "test")}
    assert not unlabelled.labelled and [record.id for record in unlabelled.records] == ["0", "1", "2"]


def test_without_a_connection_the_cache_serves_and_what_it_lacks_is_said_within_seconds(glue, tmp_path, monkeypatch):
    server, gone, slept = HubServer(datasets={"nyu-mll/glue": {"main": glue}}), HubServer(), []
    server.serve_this_process(monkeypatch, tmp_path / "home")
    found = splits_of("hf:nyu-mll/glue,mrpc")
    for each in (server, gone):
        each.close()
    gone.serve_this_process(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(time, "sleep", slept.append)  # of any library
    assert splits_of("hf:nyu-mll/glue,mrpc") == found == {"train": "train", "dev": "validation", "test": "test"}
    with pytest.raises(ValueError, match=f"{gone.url} cannot be reached, and the cache .* does not hold it"):
        splits_of("hf:someone/none")
    with pytest.raises(ValueError, match=f"{gone.url} cannot be reached, from where a corpus is read: build its store"):
        pinned("hf:nyu-mll/glue,mrpc")
    assert 0 < sum(slept) < 10  # huggingface_hub may try for half a minute
    assert not datasets.config.HF_HUB_OFFLINE


def test_numbers_and_the_splits_of_mnli_are_those_of_the_benchmark(glue):
    scores = make_task("stsb", f"hf:{glue},stsb")
    assert [label for *_, label in records(scores, "train")] == [0.0, 0.5, 1.0, 1.5]
    assert not scores.read("test").labelled
    task = make_task("mnli", f"hf:{glue},mnli")
    for split in ("train", "dev", "dev_mismatched"):
        assert [label for *_, label in records(task, split)] == ["entailment", "neutral", "contradiction"] * 2


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["cola", "mrpc", "rte", "wnli", "ax"])
def test_the_whole_of_a_glue_task_by_name_is_that_of_its_files(shared_data, tmp_path, name):
    files = make_task(name, str(shared_data / "glue"))
    columns, features = files.spec.named_text or files.spec.text, {"idx": NUMBER}
    features |= dict.fromkeys(columns, STRING) | {"label": CLASSES(names=list(dict.fromkeys(files.labels)))}
    rows = {}
    for split, theirs in files.spec.named.items():
        rows[theirs] = [
            {"idx": i, "label": -1 if label is None else label, **dict(zip(columns, texts, strict=False))}
            for i, (*texts, label) in enumerate(records(files, split))
        ]
    write_splits(tmp_path / name, features, **rows)
    named = make_task(name, f"hf:{tmp_path}/{name}")
    for split in files.splits:
        assert records(named, split) == records(files, split)
        assert named.read(split).labelled == files.read(split).labelled


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("mrpc", "hf:{glue}", "which configuration is meant. hf:.*,CONFIG has mnli, mrpc, stsb"),
        ("cola", "hf:{glue},cola", "there is no configuration 'cola' hf:.*,CONFIG has mnli, mrpc, stsb"),
        ("cola", "hf:{glue},mrpc", "is not laid out as hf:nyu-mll/glue,cola: no 'sentence' in sentence1, sentence2"),
        ("rte", "hf:{glue},mrpc", "label 'not_equivalent' is not one of entailment, not_entailment"),
        (
            "table",
            "hf:{glue},mrpc",
            "mrpc:train:0: expected the keys text; missing text; .*task.options.text and .label name",
        ),
        ("table", "hf:{glue},mrpc:test", "names a split; leave it out"),
    ],
)
def test_what_does_not_fit_a_task_is_one_line(glue, name, data, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        make_task(name, data.format(glue=glue)).read("train")
    assert "\n" not in str(refused.value)


def test_a_table_by_name_has_the_names_of_its_classes_and_the_usual_splits(glue):
    task = make_task("table", f"hf:{glue},mrpc", {"text": ("sentence1", "sentence2")})
    assert task.labels == ("equivalent", "not_equivalent")
    assert task.splits == {"train": "train", "dev": "validation", "test": "test"}
    assert records(task, "dev")[1] == ("A 1.", "B 1.", "equivalent")
    assert not task.read("test").labelled
    assert "files" not in task.options  # another source has others
    first, again = task.read("train").fingerprint, make_task("table", f"hf:{glue},mrpc", task.options).read("train")
    assert first == again.fingerprint != task.read("dev").fingerprint


def test_files_that_do_not_fit_each_other_are_one_line(tmp_path):
    for number, columns in enumerate(("text,label", "text,other")):
        (tmp_path / f"train-{number}.csv").write_text(f"{columns}\na,1\nb,2\n")
    with pytest.raises(ValueError, match="hf:.*: .*column") as refused:
        make_task("table", f"hf:{tmp_path}")
    assert "\n" not in str(refused.value)


def test_a_slice_of_a_split_may_be_the_dev_split(tmp_path):
    (tmp_path / "reviews").mkdir()
    lines = "".join(f"text {i},{i % 3}\n" for i in range(10))
    (tmp_path / "reviews/train.csv").write_text("review,stars\n" + lines)
    name, columns = f"hf:{tmp_path}/reviews", {"text": "review", "label": "stars"}
    task = make_task("table", name, columns)
    assert task.labels == ("0", "1", "2")
    with pytest.raises(ValueError, match=r"no split 'dev'; one of train. .*files={'train': 'train\[:90%\]', 'dev':"):
        task.read("dev")
    files = {"train": "train[:80%]", "dev": "train[80%:]"}
    task = make_task("table", name, {**columns, "files": files})
    assert [len(task.read(split).records) for split in ("train", "dev")] == [8, 2]
    with pytest.raises(ValueError, match="Unknown split .?dev.csv"):
        make_task("table", name, {**columns, "files": {"train": "train", "dev": "dev.csv"}}).read("dev")


def test_words_take_the_tags_that_the_task_is_for(tmp_path):
    tags = {"ner_tags": ["O", "B-LOC", "I-LOC"], "pos_tags": ["NN", "IN"], "chunk_tags": ["O", "B-NP"]}
    rows = [
        {"tokens": ["in", "New", "York"], "ner_tags": [0, 1, 2], "pos_tags": [1, 0, 0], "chunk_tags": [0, 1, 1]}
    ] * 2
    features = {"tokens": datasets.List(STRING)} | {k: datasets.List(CLASSES(names=v)) for k, v in tags.items()}
    write_splits(tmp_path / "conll", features, train=rows, validation=rows)
    entities, parts = (make_task(name, f"hf:{tmp_path}/conll") for name in ("ner", "tag"))
    assert [s.tags for s in entities.read("dev").records] == [("O", "B-LOC", "I-LOC")] * 2
    assert entities.labels == ("O", "B-LOC", "I-LOC")
    assert [s.tags for s in parts.read("train").records] == [("IN", "NN", "NN")] * 2


def test_questions_and_endings_by_name_are_those_of_the_files(tmp_path):
    answers = {"text": datasets.List(STRING), "answer_start": datasets.List(NUMBER)}
    features = {"id": STRING, "title": STRING, "context": STRING, "question": STRING, "answers": answers}
    row = {"id": "1", "title": "T", "context": "in Rome", "question": "x"}
    known = {**row, "answers": {"text": ["Rome"], "answer_start": [3]}}
    unknown = {**row, "id": "2", "answers": {"text": [], "answer_start": []}}
    write_splits(tmp_path / "squad_v2", features, train=[known], validation=[known, unknown])
    task = make_task("squad2.0", f"hf:{tmp_path}/squad_v2")
    assert [question.answers for question in task.read("dev").records] == [(("Rome", 3),), ()]
    with pytest.raises(ValueError, match="squad_v2:validation: question '2' has no answer, .* use version 2.0"):
        make_task("squad1.1", f"hf:{tmp_path}/squad_v2").read("dev")
    write_splits(tmp_path / "twice", features, train=[known, known])
    with pytest.raises(ValueError, match="twice:train: question id '1' occurs twice"):
        make_task("squad1.1", f"hf:{tmp_path}/twice").read("train")
    del row["title"]
    write_splits(tmp_path / "test", dict.fromkeys(row, STRING), validation=[row])
    for version in ("1.1", "2.0"):
        assert not make_task(f"squad{version}", f"hf:{tmp_path}/test").read("dev").labelled
    texts = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3")
    features = dict.fromkeys(texts, STRING) | {"label": CLASSES(names=["0", "1", "2", "3"])}
    write_splits(tmp_path / "swag", features, train=[{**dict.fromkeys(texts, "x"), "label": 2}])
    assert [choice.label for choice in make_task("swag", f"hf:{tmp_path}/swag").read("train").records] == [2]
    with pytest.raises(ValueError, match="swag:train: the column 'context' is missing; there is sent1, sent2"):
        make_task("squad1.1", f"hf:{tmp_path}/swag").read("train")


def test_questions_for_a_model_are_taken_by_name(glue, tmp_path):
    memory = Remembered("table", {"text": ["sentence1", "sentence2"]})
    inputs = read_inputs(f"hf:{glue},mrpc:test", "classify", memory)
    assert inputs.texts == [(f"A {i}.", f"B {i}.") for i in range(3)]
    assert (inputs.kind, inputs.lines) == ("jsonl", [0, 1, 2])
    write_splits(
        tmp_path / "nli", {"premise": STRING, "hypothesis": STRING}, test=[{"premise": "p", "hypothesis": "h"}]
    )
    for name in ("mnli", "xnli"):
        assert read_inputs(f"hf:{tmp_path}/nli:test", "classify", Remembered(name)).texts == [("p", "h")]
    features = {"tokens": datasets.List(STRING), "ner_tags": datasets.List(CLASSES(names=["O", "B-X"]))}
    write_splits(tmp_path / "words", features, train=[{"tokens": ["a", "b"], "ner_tags": [0, 1]}])
    inputs = read_inputs(f"hf:{tmp_path}/words", "ner", Remembered())
    assert inputs.texts == [("a", "b")] and inputs.units[0][0].tags == ("O", "B-X")


def test_languages_of_xnli_are_configurations(tmp_path):
    features = {"premise": STRING, "hypothesis": STRING, "label": THREE}
    rows = [{"premise": "p", "hypothesis": "h", "label": i} for i in range(3)]
    for language in ("de", "hi"):
        write_splits(tmp_path / "xnli" / language, features, train=rows, validation=rows[:2], test=rows)
    name_configurations(tmp_path / "xnli")
    task = make_task("xnli", f"hf:{tmp_path}/xnli", {"language": "de,hi", "train_language": "hi"})
    assert [r.label for r in task.read("train").records] == ["entailment", "neutral", "contradiction"]
    assert [(r.language, r.label) for r in task.read("dev").records] == [
        (language, label) for language in ("de", "hi") for label in ("entailment", "neutral")
    ]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mrpc", "--config.task.data=hf:nyu-mll/glue,mrpc fetches"),
        ("mnli", "--config.task.data=hf:nyu-mll/glue,mnli fetches"),
        ("squad1.1", "train-v1.1.json does not exist; --config.task.data=hf:rajpurkar/squad fetches"),
        ("squad2.0", "--config.task.data=hf:rajpurkar/squad_v2 fetches"),
        ("swag", "--config.task.data=hf:allenai/swag,regular fetches"),
        ("xnli", "--config.task.data=hf:facebook/xnli fetches"),
    ],
)
def test_missing_files_say_the_setting_that_gets_them(tmp_path, name, command):
    with pytest.raises(ValueError, match=command):
        make_task(name, str(tmp_path)).read("train")


def test_a_data_set_that_tfds_has_not_prepared_says_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"python -c .import tensorflow_datasets .*'glue/mrpc', file_format='array_rec"
    ):
        GlueTask("mrpc", "tfds:glue/mrpc").read("train")
