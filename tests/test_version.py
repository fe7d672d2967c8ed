"""The version that results are signed with."""

import subprocess

import bertjax
from bertjax import version as versions
from bertjax.version import source_version


def _source_version_of(root, monkeypatch):
    monkeypatch.setattr(versions, "_PACKAGE", root / "bertjax")
    return source_version.__wrapped__()


def test_the_commit_is_named_in_a_checkout_and_only_there(tmp_path, monkeypatch):
    assert _source_version_of(tmp_path, monkeypatch) == bertjax.__version__

    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")[:10]
    version = f"{bertjax.__version__} (commit {commit}"
    assert _source_version_of(tmp_path, monkeypatch) == f"{version})"
    (tmp_path / "file").write_text("two")
    assert _source_version_of(tmp_path, monkeypatch) == f"{version}-dirty)"


def test_a_broken_checkout_is_no_reason_to_stop(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    assert _source_version_of(tmp_path, monkeypatch) == bertjax.__version__
