"""What a run has written down of itself, damaged: file and remedy are named, nothing is guessed."""

import os

import numpy as np
import pytest
from etils import epath

from bertjax.config import Config
from bertjax.formats.checkpoint import CheckpointError
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.workdir import DamagedRecord, delete_run, goes_on_with, step_to_resume, write_records

DAMAGED = [b"", b'{"a": 1,', b"\0" * 40, b"[1]", b"[" * 100_000, b"\xff\xfe{}"]
FACTS = {"content": "the text", "vocabulary": "the words"}


@pytest.fixture
def workdir(tmp_path):
    """A run at step 7."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(7, {"x": np.ones(3)})
    checkpoints.close()
    write_records(tmp_path, Config(), FACTS, numbers={"tokens": 3})
    return epath.Path(tmp_path)


def resumed(resume="auto"):
    return Config().replace({"resume": resume})


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_of_the_settings_is_named_with_the_remedy(workdir, content):
    assert step_to_resume(resumed(), workdir) == 7
    (workdir / "config.json").write_bytes(content)
    with pytest.raises(DamagedRecord, match="config.json .*--config.resume=changed") as refused:
        step_to_resume(resumed(), workdir)
    assert len(str(refused.value).splitlines()) == 1
    assert step_to_resume(resumed("changed"), workdir) == 7
    assert step_to_resume(resumed("overwrite"), workdir) is None


@pytest.mark.parametrize("content", [*DAMAGED, b'{"content": "the text"}', b'{"content": "the text", "vocabulary": 3}'])
def test_a_damaged_record_of_what_a_run_is_made_of_is_named_and_other_words_are_never_meant(workdir, content):
    assert goes_on_with(resumed(), workdir, FACTS)
    (workdir / "corpus.json").write_bytes(content)
    with pytest.raises(DamagedRecord, match="corpus.json .*put a copy of it back"):
        goes_on_with(resumed(), workdir, FACTS)
    assert goes_on_with(resumed("changed"), workdir, FACTS)
    assert not goes_on_with(resumed("overwrite"), workdir, FACTS)
    with pytest.raises(ValueError, match="other words"):
        goes_on_with(resumed("changed"), workdir, FACTS, {"vocabulary": "other words"}, lambda: {"vocabulary": "b"})


def test_other_facts_are_refused_until_the_run_says_what_it_means(workdir):
    other = FACTS | {"content": "another text"}
    with pytest.raises(ValueError, match="(?s)content: 'the text' -> 'another text'.*resume=changed.*resume=overwrite"):
        goes_on_with(resumed(), workdir, other)
    assert goes_on_with(resumed("changed"), workdir, other)
    assert not goes_on_with(resumed("overwrite"), workdir, other)
    assert goes_on_with(resumed("overwrite"), workdir, FACTS)
    (workdir / "corpus.json").unlink()
    with pytest.raises(DamagedRecord, match="No such file"):
        goes_on_with(resumed(), workdir, FACTS)


def test_the_workdir_of_another_job_is_refused_whatever_resume_says(workdir):
    for how in ("auto", "changed", "overwrite", "never"):
        with pytest.raises(ValueError, match="holds a pre-training run; choose another --workdir"):
            step_to_resume(resumed(how).replace({"job": "finetune"}), workdir)


def test_a_damaged_ledger_of_checkpoints_still_tells_that_there_were_some(workdir):
    (workdir / "checkpoints" / "7").rmtree()
    (workdir / "checkpoints.committed.json").write_text("\0")
    with pytest.raises(CheckpointError, match="some were saved. Put the checkpoints back"):
        step_to_resume(resumed(), workdir)


@pytest.mark.parametrize("resumes", ["auto", "overwrite"])
@pytest.mark.parametrize("kept", ["config.json", "model/config.json"])
def test_a_model_that_is_of_no_run_is_not_written_over(tmp_path, kept, resumes):
    file = tmp_path / kept
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"belongs to a model that this run would overwrite"):
        step_to_resume(resumed(resumes), epath.Path(tmp_path))
    assert file.read_text() == '{"model_type": "bert"}'


@pytest.mark.parametrize("start", ["{}", "{}@7", "{}@7/", "{}/model", "{}/link", "{}/link@7"])
def test_the_run_that_a_new_one_starts_from_is_not_deleted_for_it(workdir, start):
    os.symlink(workdir, workdir / "link")
    overwriting = resumed("overwrite").replace({"init_from": start.format(workdir)})
    with pytest.raises(ValueError, match="is of the run that config.resume='overwrite' deletes; choose another"):
        step_to_resume(overwriting, workdir)
    assert step_to_resume(overwriting.replace({"init_from": f"{workdir}/other"}), workdir) is None


def test_a_run_whose_name_ends_like_a_step_is_not_deleted_for_one_that_starts_from_it(workdir):
    named = epath.Path(os.fspath(workdir) + "@7")
    os.rename(workdir, named)
    with pytest.raises(ValueError, match="is of the run that config.resume='overwrite' deletes; choose another"):
        step_to_resume(resumed("overwrite").replace({"init_from": str(named)}), named)


def test_a_run_that_was_ended_before_its_first_checkpoint_starts_afresh(tmp_path):
    (tmp_path / "config.json").write_text(Config().to_json())
    (tmp_path / "model").mkdir()
    assert step_to_resume(resumed(), epath.Path(tmp_path)) is None


def test_a_deleted_run_s_link_to_another_disk_stays(workdir, tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "model").symlink_to("disk/model")
    delete_run(workdir)
    assert (tmp_path / "model").is_symlink() and not (tmp_path / "disk" / "model").exists()
