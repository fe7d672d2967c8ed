import pathlib

import pytest

from bertjax.data.build import build_store


def files_of(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(pathlib.Path(path).rglob("*")) if p.is_file()}


def test_beam_gives_the_same_bytes_as_the_local_builder(tmp_path, tokenizer, documents, text_file):
    pytest.importorskip("apache_beam")
    from bertjax.data.shards import beam_maker

    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, shard_bytes=20_000)
    build_store(**arguments, out_dir=tmp_path / "local")
    build_store(**arguments, out_dir=tmp_path / "beam", make_shards=beam_maker(["--runner=DirectRunner"]))
    assert len(list((tmp_path / "beam/shards").glob("*.json"))) > 2
    assert files_of(tmp_path / "local") == files_of(tmp_path / "beam")


def test_without_beam_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "apache_beam", None)
    from bertjax.data.shards import beam_maker

    with pytest.raises(ValueError, match=r"pip install 'bertjax\[beam\]'"):
        beam_maker()
