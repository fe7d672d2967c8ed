"""Token stores on object storage."""

import pytest

from bertjax.data.remote import local_store
from bertjax.data.store import TokenStore
from bertjax.tools import bench, build_corpus


@pytest.fixture
def remote(random_store, bucket):
    for path in random_store.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(random_store))
            (bucket / "a" / "store" / name).write_bytes(path.read_bytes())
    return bucket / "a" / "store"


def test_a_store_is_copied_whole_and_only_once(remote, random_store, tmp_path, capsys):
    copy = local_store(str(remote), str(tmp_path / "cache"))
    assert "copying gs://bucket/a/store" in capsys.readouterr().out
    here, there = TokenStore(copy), TokenStore(random_store)
    assert here.manifest == there.manifest
    assert [d.tolist() for d in here.document(7)] == [d.tolist() for d in there.document(7)]
    assert (copy / "tokenizer" / "vocab.txt").exists()
    assert local_store(str(remote), str(tmp_path / "cache")) == copy
    assert capsys.readouterr().out == ""


def test_tools_look_into_a_store_and_time_it(remote, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bertjax.data.remote.CACHE", str(tmp_path))
    build_corpus.main([f"--output={remote}", "--inspect", "--examples=0", "--seq_length=32"])
    assert "token store gs://bucket/a/store" in capsys.readouterr().out
    bench.main(["input", f"--store={remote}", "--lengths", "32", "--rows=256"])
    assert "32 packed" in capsys.readouterr().out


def test_a_copy_that_was_interrupted_is_none(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        local_store(str(remote), str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_copy_that_is_not_whole_is_replaced(remote, tmp_path):
    copy = local_store(str(remote), str(tmp_path))
    (copy / "manifest.json").unlink()
    assert local_store(str(remote), str(tmp_path)) == copy
    assert TokenStore(copy).num_documents


def test_a_place_without_a_store_is_refused(bucket, tmp_path):
    with pytest.raises(ValueError, match="gs://bucket/b: no token store here"):
        local_store(f"{bucket}/b", str(tmp_path))


def test_without_the_package_that_reads_it_the_message_says_what_to_install(bucket, monkeypatch):
    import fsspec

    def absent(*_, **__):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", absent)
    bucket._backend._get_filesystem.cache_clear()
    with pytest.raises(ValueError, match="pip install gcsfs"):
        local_store(f"{bucket}/b")
