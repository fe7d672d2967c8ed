"""Stores whose files are not those that were built."""

import hashlib
import json
import os
import shutil
import time
import types

import numpy as np
import pytest

from bertjax.data import verification
from bertjax.data.build import build_store
from bertjax.data.store import TokenStore, manifest_hash, to_json
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from tests.fakes import SPECIALS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store of several shards, of a vocabulary that it holds."""
    path = tmp_path_factory.mktemp("verification") / "s"
    words = [f"w{i}" for i in range(500)]
    tokenizer = WordPieceTokenizer([*SPECIALS, *words], do_lower_case=True)
    rng = np.random.default_rng(0)
    docs = [[" ".join(rng.choice(words, rng.integers(1, 30))) for _ in range(rng.integers(2, 12))] for _ in range(60)]
    build_store(None, tokenizer, path, documents=docs, heldout_fraction=0.2, shard_bytes=10_000)
    assert len(list(path.glob("shards/*.tokens"))) >= 3
    return path


@pytest.fixture
def store(built, tmp_path):
    return shutil.copytree(built, tmp_path / "s", ignore=shutil.ignore_patterns(verification.STAMPS))


def change(path, edit):
    """Edits a file's bytes and gives it the time that it had."""
    status, data = path.stat(), bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(data):
    data[len(data) // 2] ^= 1


def zero_tail(data):
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)


NO_HASHES = types.SimpleNamespace(sha256=hashlib.sha256, blake2b=None)  # of contents


@pytest.mark.parametrize(
    "name",
    [
        "shards/00001.tokens",
        "train.documents",
        "train.sentences",
        "train.addresses",
        "heldout.documents",
        "heldout.sentences",
    ],
)
@pytest.mark.parametrize("edit", [flip, zero_tail])
def test_a_damaged_shard_or_table_is_refused_by_name(store, name, edit):
    change(store / name, edit)
    for split in ("train", "heldout"):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            TokenStore(store, split)


def test_ids_beyond_the_vocabulary_are_refused_also_where_the_hashes_fit(store):
    tokens = store / "shards/00000.tokens"
    change(tokens, lambda data: np.frombuffer(data, "<u2")[::4].fill(50_000))
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["shards"][0]["tokens_hash"] = verification.hash_file(tokens).hexdigest()
    manifest["manifest_hash"] = manifest_hash(manifest)
    (store / "manifest.json").write_bytes(to_json(manifest))
    with pytest.raises(ValueError, match=r"00000\.tokens has the id 50000, its vocabulary 505"):
        TokenStore(store)


@pytest.mark.parametrize(
    "name, place, value, problem",
    [
        ("train.documents", 1, 1 << 40, "do not ascend"),
        ("train.documents", 2, 1, "do not ascend"),
        ("train.sentences", 0, 1 << 30, "do not ascend"),
        ("train.addresses", 0, 9 << 40, "3 shards"),
        ("train.addresses", 0, -1, "3 shards"),
        ("train.addresses", 0, 1 << 39, "ends beyond"),
        ("heldout.addresses", 0, 1 << 39, "ends beyond"),
    ],
)
def test_tables_that_lead_out_of_the_store_are_refused_also_where_the_hashes_fit(built, name, place, value, problem):
    split, table = name.split(".")
    store = TokenStore(built, split)
    tables = store._tables(split)
    changed = getattr(tables, table).copy()
    changed[place] = value
    lengths = np.array([len(ids) for ids in store.shards[:3]])
    tables = tables._replace(**{table: changed})
    with pytest.raises(ValueError, match=rf"{split}\.\w+ is damaged: .*{problem}"):
        verification.check_tables(built / split, tables, lengths, store.num_tokens)


@pytest.mark.parametrize("edit", ["swap two lines", "cut", "remove a file", "other options"])
def test_another_tokenizer_than_the_ids_were_made_with_is_refused(store, edit):
    vocabulary = store / "tokenizer/vocab.txt"
    lines = vocabulary.read_text().splitlines(keepends=True)
    if edit == "swap two lines":
        lines[50], lines[60] = lines[60], lines[50]
    elif edit == "cut":
        lines = lines[:250]
    elif edit == "remove a file":
        (store / "tokenizer/tokenizer_config.json").unlink()
        lines[7] = lines[7].upper()  # else the casing is guessed right from the pieces
    else:
        (store / "tokenizer/tokenizer_config.json").write_text('{"do_lower_case": false}')
    vocabulary.write_text("".join(lines))
    with pytest.raises(ValueError, match="tokenizer"):
        TokenStore(store).load_tokenizer()


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["tokenizer"].update(pad_id=7),
        lambda m: m.update(content_hash="00" * 32),
        lambda m: m["splits"]["train"].update(documents=10),
        lambda m: m.pop("shards"),
        lambda m: m["settings"].update(language="de"),
        lambda m: m.pop("manifest_hash"),
        lambda m: m["shards"][0].update(tokens="many"),
        lambda m: m["tokenizer"].update(cls_id=10**30),
    ],
)
def test_an_edited_manifest_is_refused(store, edit):
    manifest = json.loads((store / "manifest.json").read_text())
    edit(manifest)
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        TokenStore(store)


def test_a_manifest_that_was_only_written_in_another_way_is_the_same(store):
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest))
    assert TokenStore(store).manifest == manifest


@pytest.mark.parametrize("name", ["train.addresses", "shards/00002.tokens", "tokenizer/vocab.txt"])
def test_a_missing_file_is_refused_by_name(store, name):
    (store / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        TokenStore(store)


@pytest.mark.parametrize("name", ["parts", "duplicate_share", "seen_in_epoch", "worst"])
def test_a_store_of_an_earlier_version_is_refused_with_the_remedy(store, name):
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest[name], manifest["manifest_hash"]
    (store / "manifest.json").write_bytes(to_json(manifest))
    with pytest.raises(ValueError, match="earlier version.*build the store again"):
        TokenStore(store)


def test_an_unchanged_store_is_read_once(store, monkeypatch):
    monkeypatch.setattr(verification, "_RECENT", -(10**18))  # the files of this test are new
    TokenStore(store)
    assert (store / verification.STAMPS).exists()
    with monkeypatch.context() as patch:
        patch.setattr(verification, "hashlib", NO_HASHES)
        TokenStore(store)
        TokenStore(store, "heldout")
    time.sleep(0.05)  # more than a tick of the clock that files have
    change(store / "shards/00001.tokens", flip)
    with pytest.raises(ValueError, match="00001.tokens"):
        TokenStore(store)


@pytest.mark.parametrize("content", ["", "[]", '{"tables": 7}', "[" * 100_000])
def test_a_damaged_record_of_earlier_checks_only_costs_another_check(store, content):
    (store / verification.STAMPS).write_text(content)
    TokenStore(store)
    change(store / "train.addresses", flip)
    with pytest.raises(ValueError, match="train.addresses"):
        TokenStore(store)


def test_where_the_store_cannot_be_written_the_check_is_remembered_elsewhere(store, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_RECENT", -(10**18))
    monkeypatch.setattr(verification, "CACHE", str(tmp_path / "cache"))
    make = verification.tempfile.mkstemp

    def refuse(suffix, dir):
        if dir == store:
            raise PermissionError(13, "Permission denied", str(dir))
        return make(suffix=suffix, dir=dir)

    monkeypatch.setattr(verification.tempfile, "mkstemp", refuse)
    TokenStore(store)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert not (store / verification.STAMPS).exists()
    monkeypatch.setattr(verification, "hashlib", NO_HASHES)
    TokenStore(store)


def test_a_repeated_build_refuses_a_damaged_store(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, out_dir=tmp_path / "s", shard_bytes=10_000)
    build_store(**arguments)
    change(tmp_path / "s/shards/00001.tokens", zero_tail)
    with pytest.raises(ValueError, match=r"00001\.tokens.*--overwrite"):
        build_store(**arguments)
    build_store(**arguments, overwrite=True)
    TokenStore(tmp_path / "s")


@pytest.mark.parametrize(
    "name",
    [
        "shards/00001.tokens",
        "shards/00001.sentences",
        "shards/00001.documents",
        "shards/00001.json",
        "tokenizer/vocab.txt",
    ],
)
def test_a_build_that_goes_on_makes_damaged_parts_again(tmp_path, tokenizer, documents, text_file, name):
    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, out_dir=tmp_path / "s", shard_bytes=10_000)
    manifest = build_store(**arguments)
    (tmp_path / "s/manifest.json").unlink()
    (tmp_path / "s/tokenizer/vocab.txt").write_text("x\ny\n")
    if not name.startswith("tokenizer"):
        change(tmp_path / "s" / name, flip)
    assert build_store(**arguments) == manifest
    TokenStore(tmp_path / "s")
