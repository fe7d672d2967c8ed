"""Data sets by name: folders here, and the server that speaks as the Hub does."""

import json
import os
import shutil
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertjax.data.build import build_store
from bertjax.data.documents import read_documents
from bertjax.data.named import HfName, open_pieces
from bertjax.data.shards import make_here
from bertjax.data.sources import Reading, plan_extents, resolve
from bertjax.data.store import TokenStore
from tests.data.conftest import make_documents
from tests.fakes import SPECIALS
from tests.interop.hub_server import HubServer

CONFIGS = """---
configs:
- config_name: de
  data_files:
  - split: train
    path: de/train-*.parquet
  - split: validation
    path: de/validation.parquet
- config_name: hi
  data_files: hi/*.parquet
---
"""


def write_parquet(path, documents, rows=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "id": [f"{path.stem}-{i}" for i in range(len(documents))],
        "title": [f"Title {i}." for i in range(len(documents))],
        "text": ["\n\n".join(document) for document in documents],
    }
    pq.write_table(pa.table(columns), path, row_group_size=rows)


@pytest.fixture
def folder(tmp_path):
    """A data set of two configurations, laid out as at the Hub."""
    documents = make_documents(40)
    folder = tmp_path / "some"
    write_parquet(folder / "de/train-0.parquet", documents[:25])
    write_parquet(folder / "de/train-1.parquet", documents[25:])
    write_parquet(folder / "de/validation.parquet", documents[:3])
    write_parquet(folder / "hi/train.parquet", documents[:1])
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/train.csv").write_text('body\n"Namaste. Again."\n"Two"\n')
    (folder / "README.md").write_text(CONFIGS)
    (tmp_path / "same.jsonl").write_text("".join(json.dumps({"text": "\n".join(d)}) + "\n" for d in documents))
    return folder


def sentences(path, **reading):
    return [document.sentences for document in read_documents(path, **reading)]


def test_a_folder_gives_the_store_of_the_same_text_in_json_lines(folder, tokenizer, tmp_path):
    stores = []
    for number, path in enumerate((f"hf:{folder},de", tmp_path / "same.jsonl")):
        manifest = build_store(path, tokenizer, tmp_path / f"store{number}", shard_bytes=20_000, heldout_fraction=0)
        stores.append(
            [[ids.tolist() for ids in document] for document in TokenStore(tmp_path / f"store{number}").documents()]
        )
    assert stores[0] == stores[1] and manifest["documents"] == 40
    assert sentences(f"hf:{tmp_path}/csv", field="body") == [["Namaste.", "Again."], ["Two"]]
    assert len(sentences(f"hf:{folder},de:validation")) == 3


def test_a_folder_that_the_library_has_saved_is_read_with_its_notes_beside_the_rows(tmp_path):
    datasets.Dataset.from_dict({"text": ["One. Two.", "Three."]}).save_to_disk(tmp_path / "saved")
    assert sentences(f"hf:{tmp_path}/saved") == [["One.", "Two."], ["Three."]]


def test_pieces_are_row_groups_and_the_plan_joins_small_ones(folder):
    path = f"hf:{folder},de"
    pieces = open_pieces(path, "text")
    assert pieces.count == 7 + 4  # of 4 rows each
    assert pieces.size == sum((folder / f"de/train-{i}.parquet").stat().st_size for i in (0, 1))
    assert [row["id"] for _, row in pieces.rows(6, 8)] == [
        "train-0-24",
        "train-1-0",
        "train-1-1",
        "train-1-2",
        "train-1-3",
    ]
    mean = pieces.size // pieces.count
    plan = [extent for group in plan_extents([path], Reading(), 3 * mean) for extent in group]
    assert [(extent.start, extent.end) for extent in plan] == [(0, 3), (3, 6), (6, 9), (9, 11)]


def test_a_build_that_ended_early_goes_on_with_the_parts_that_are_missing(folder, tokenizer, tmp_path):
    path, made = f"hf:{folder},de", []

    def two_shards(tasks, *rest):
        made.extend(task.number for task in tasks)
        for count, found in enumerate(make_here(tasks, *rest, workers=1)):
            if count == 2:
                raise KeyboardInterrupt
            yield found

    settings = dict(make_shards=two_shards, shard_bytes=2_000)
    with pytest.raises(KeyboardInterrupt):
        build_store(path, tokenizer, tmp_path / "store", **settings)
    planned = made.copy()
    assert len(planned) > 4
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        build_store(path, tokenizer, tmp_path / "store", **settings)
    assert len(planned) - 3 <= len(made) < len(planned)
    whole = build_store(path, tokenizer, tmp_path / "store", shard_bytes=2_000)
    assert whole["content_hash"] == build_store(path, tokenizer, tmp_path / "again", shard_bytes=2_000)["content_hash"]
    write_parquet(folder / "de/train-1.parquet", make_documents(3, seed=1))
    with pytest.raises(ValueError, match="holds a token store of other input"):
        build_store(path, tokenizer, tmp_path / "store", shard_bytes=2_000)


def test_several_columns_follow_each_other(folder, tmp_path):
    first = sentences(f"hf:{folder},de", field="title,text", segment=False)[0]
    assert first[0] == "Title 0." and first[1:] == sentences(f"hf:{folder},de", segment=False)[0]
    (tmp_path / "a.jsonl").write_text('{"t": "One.", "b": ["Two.", "Three."], "c,d": "Four."}\n')
    assert sentences(tmp_path / "a.jsonl", field="t,b") == [["One.", "Two.", "Three."]]
    assert sentences(tmp_path / "a.jsonl", field="c,d") == [["Four."]]
    pq.write_table(pa.table({"t": ["One."], "n": [1], "b": ["Two."]}), tmp_path / "a.parquet")
    assert sentences(tmp_path / "a.parquet", field="b, t") == [["Two.", "One."]]
    with pytest.raises(ValueError, match="no field 'b,x' .there is .'b', 'n', 't'"):
        sentences(tmp_path / "a.parquet", field="b,x")


def test_the_comma_before_a_configuration_is_no_end_of_a_pattern(folder, tmp_path):
    name = f"hf:{folder},de"
    assert resolve(f"{tmp_path}/*.jsonl,{name},{name}:validation") == [
        str(tmp_path / "same.jsonl"),
        name,
        f"{name}:validation",
    ]
    parts = HfName.parse("hf:a/b@refs/convert/parquet,20231101.de:train[:10%]")
    assert parts == ("a/b", "refs/convert/parquet", "20231101.de", "train[:10%]")
    assert str(parts) == "hf:a/b@refs/convert/parquet,20231101.de:train[:10%]"


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("hf:{folder}", {}, "which configuration is meant. hf:.*/some,CONFIG has de, hi$"),
        ("hf:{folder},fr", {}, "there is no configuration 'fr' hf:.*/some,CONFIG has de, hi$"),
        ("hf:{folder},de:test", {}, "there is no split 'test'; it has train, validation$"),
        ("hf:{folder},de", {"field": "body"}, "part 0, row 0: no field 'body' .there is .'id', 'text', 'title'"),
        ("hf:{folder}/none", {}, "none"),
        ("hf:{folder}@main,de", {}, "a folder has no revisions; leave @main out"),
        ("hf:,de", {}, "a data set is named hf:NAME, hf:NAME,CONFIG or hf:NAME@REVISION,CONFIG:SPLIT"),
    ],
)
def test_what_is_not_there_is_answered_by_what_is(folder, path, options, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        sentences(path.format(folder=folder), **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("some.py", "x = 1", "Dataset scripts are no longer supported, but found some.py"),
        ("train.parquet", "x" * 100, "Parquet magic bytes not found"),
        ("train.jsonl", '{"text": "One."}\n{"text": \n', "part 0: JSON parse error: Invalid value. in row 1"),
        ("notes.md", "", "hf:.*: ."),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, file, content, reason):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / file).write_text(content)
    with pytest.raises(ValueError, match=reason) as refused:
        sentences(f"hf:{tmp_path}/some")
    assert "\n" not in str(refused.value)


def test_the_package_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'bertjax\[datasets\]'"):
        sentences(f"hf:{folder},de")


@pytest.fixture
def server(folder, monkeypatch, tmp_path):
    server = HubServer(datasets={"someone/docs": {"main": folder}})
    server.serve_this_process(monkeypatch, tmp_path / "home")
    yield server
    server.close()


def test_a_data_set_of_the_hub_is_streamed_at_one_commit(server, folder, tokenizer, tmp_path):
    arguments = ("hf:someone/docs,de", tokenizer, tmp_path / "store")
    manifest = build_store(*arguments, shard_bytes=4000)
    commit = server.commit(folder)
    assert [path for path, _ in manifest["files"]] == [f"hf:someone/docs@{commit},de"]
    assert manifest["documents"] == 40
    read = {path.rpartition("/")[2] for method, path, _ in server.requests if method == "GET" and "resolve" in path}
    assert read >= {"train-0.parquet", "train-1.parquet"}
    moved = shutil.copytree(folder, tmp_path / "moved")
    server.repositories["datasets"]["someone/docs"] = {"main": moved, "old": folder}
    with pytest.raises(ValueError, match=rf"docs@{commit},de.* there, .*docs@{server.commit(moved)},de.* now"):
        build_store(*arguments, shard_bytes=4000)
    pinned = f"hf:someone/docs@{commit},de"
    assert build_store(pinned, *arguments[1:], shard_bytes=4000)["content_hash"] == manifest["content_hash"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "someone/none",
            "hf:someone/none: .* doesn't exist on the Hub or cannot be accessed. .someone/none is not a fold",
        ),
        ("someone/docs@v9,de", "Revision 'v9' doesn't exist for dataset 'someone/docs'"),
        ("someone/docs,fr", "there is no configuration 'fr' hf:someone/docs,CONFIG has de, hi"),
        ("someone/docs,de:test", "there is no split 'test'; it has train, validation"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(server, name, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        sentences(f"hf:{name}")
    assert "\n" not in str(refused.value)


def test_a_data_set_that_is_a_program_names_its_copy_in_parquet(server, folder):
    (folder / "docs.py").write_text("x = 1")
    with pytest.raises(
        ValueError, match="found docs.py; what the Hub made of it may be .*docs@refs/convert/parquet,de$"
    ):
        sentences("hf:someone/docs,de")


def test_a_private_data_set_needs_the_token(server, monkeypatch):
    server.token = "hf_secret"
    with pytest.raises(ValueError, match="doesn't exist on the Hub or cannot be accessed"):
        sentences("hf:someone/docs,de")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert len(sentences("hf:someone/docs,de")) == 40


def test_a_connection_that_is_cut_does_not_end_a_build(server, folder, tokenizer, tmp_path, monkeypatch):
    write_parquet(folder / "de/train-1.parquet", make_documents(300))
    monkeypatch.setattr("datasets.config.STREAMING_READ_RETRY_INTERVAL", 0.1)
    server.cut_after = 50_000
    assert build_store("hf:someone/docs,de", tokenizer, tmp_path / "store")["documents"] == 325
    assert server.cut_after is None  # it was


@pytest.mark.slow
def test_the_builder_streams_with_several_processes(server, tmp_path):
    words = [*SPECIALS, "w", *(f"##{n}" for n in range(10))]
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("\n".join(words))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = f"--input=hf:someone/docs,de --tokenizer={tmp_path}/vocab --output={tmp_path}/store --do_lower_case=true"
    done = subprocess.run(
        [sys.executable, "-m", "bertjax.tools.build_corpus", *command.split(), "--workers=2", "--max_unseen_share=1"],
        env=outside | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert TokenStore(tmp_path / "store").manifest["documents"] == 40
