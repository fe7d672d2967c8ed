import json
import os
import subprocess
import sys

import pytest

from bertjax.interruption import Interrupted
from bertjax.tools import build_corpus
from tests.fakes import SPECIALS
from tests.families import write_unigram


@pytest.fixture
def corpus(tmp_path):
    """Three files, and a vocabulary of their words."""
    words = ["the", "cat", "sat", "on", "mat", "."]
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("\n".join(SPECIALS + words) + "\n")
    (tmp_path / "vocab/tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    for i in range(3):
        (tmp_path / f"part-{i}.txt").write_text(
            "\n\n".join("the cat sat .\non the mat .\nthe mat sat ." for _ in range(4 + i))
        )
    return tmp_path


def arguments(corpus, *more):
    return [f"--tokenizer={corpus}/vocab", f"--output={corpus}/store", "--workers=1", *more]


def test_a_quoted_wildcard_reads_every_file_and_prints_them(corpus, capsys):
    build_corpus.main(arguments(corpus, f"--input={corpus}/part-*.txt"))
    out = capsys.readouterr().out
    assert all(f"part-{i}.txt" in out for i in range(3)) and "3 files" in out
    manifest = json.loads((corpus / "store/manifest.json").read_text())
    assert manifest["documents"] == 4 + 5 + 6
    assert "unknown tokens" in out and "random pairs" in out


def test_a_wildcard_that_the_shell_expanded_is_refused(corpus):
    with pytest.raises(SystemExit, match="quote wildcards"):
        build_corpus.main(
            arguments(corpus, f"--input={corpus}/part-0.txt", f"{corpus}/part-1.txt", f"{corpus}/part-2.txt")
        )
    assert not (corpus / "store").exists()
    with pytest.raises(SystemExit, match="no such flag"):
        build_corpus.main(arguments(corpus, "--input=x", "--wrokers=3"))


def test_a_pattern_without_a_match_is_refused(corpus):
    with pytest.raises(SystemExit, match="no file matches"):
        build_corpus.main(arguments(corpus, f"--input={corpus}/none-*.txt"))


def test_inspect_shows_statistics_and_decoded_pairs(corpus, capsys):
    build_corpus.main(
        arguments(corpus, f"--input={corpus}/part-*.txt", "--inspect", "--seq_length=32", "--examples=3", "--packed")
    )
    out = capsys.readouterr().out
    assert "coverage" in out and "packed_fill" in out
    assert "[CLS]" in out and "cat" in out and "->" in out
    assert "0 is next" in out or "1 random" in out
    assert "\x1b[" not in out  # colour is for terminals


def test_inspect_masks_by_the_settings_and_nothing_else_takes_them(corpus, capsys):
    build = arguments(corpus, f"--input={corpus}/part-*.txt")
    with pytest.raises(SystemExit, match="no such flag: --config.masking.rate=0.5"):
        build_corpus.main([*build, "--config.masking.rate=0.5"])
    build_corpus.main(build)
    shown = [f"--output={corpus}/store", "--inspect", "--seq_length=32", "--examples=3"]
    predicted = []
    for rate in ("0.15", "0.6"):
        capsys.readouterr()
        build_corpus.main([*shown, f"--config.masking.rate={rate}"])
        predicted.append(capsys.readouterr().out.count("->"))
    assert predicted[1] > 2 * predicted[0] > 0
    build_corpus.main([*shown, "--examples=0"])
    assert "coverage" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--config.batch_size has no effect on --inspect"):
        build_corpus.main([*shown, "--config.batch_size=7"])


def test_nothing_to_do_and_bad_shards_are_refused(corpus):
    with pytest.raises(SystemExit, match="nothing to do"):
        build_corpus.main([f"--output={corpus}/store"])
    with pytest.raises(SystemExit, match="tokenizer=DIR is missing"):
        build_corpus.main([f"--output={corpus}/store", "--input=x"])
    with pytest.raises(SystemExit, match="--seq_length has no effect without --inspect"):
        build_corpus.main(arguments(corpus, f"--input={corpus}/*.txt", "--seq_length=512"))
    for bad in ("3", "2/2", "a/b"):
        with pytest.raises(SystemExit, match="shard"):
            build_corpus.main(arguments(corpus, f"--input={corpus}/*.txt", f"--shard={bad}"))


def test_the_command_builds_with_two_processes(corpus):
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "bertjax.tools.build_corpus",
            *arguments(corpus, f"--input={corpus}/part-*.txt", "--shard_bytes=100", "--workers=2"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert out.returncode == 0, out.stderr
    assert "15" in out.stdout and "ETA 0:00:00" in out.stdout


def test_an_interrupt_is_one_message(corpus, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise Interrupted(130)

    monkeypatch.setattr(build_corpus, "build_store", interrupted)
    with pytest.raises(SystemExit) as stopped:
        build_corpus.main(arguments(corpus, f"--input={corpus}/part-*.txt"))
    assert stopped.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err


def built(corpus, capsys, text, *more):
    """What the tool prints for a file of this text."""
    (corpus / "in.txt").write_text(text)
    build_corpus.main(
        arguments(
            corpus, f"--input={corpus}/in.txt", "--max_unknown_rate=1", "--max_random_share=1", "--overwrite", *more
        )
    )
    return capsys.readouterr().out


def test_the_way_of_reading_is_printed_with_what_is_hardly_meant(corpus, capsys):
    lines = "".join(f"The cat {i} sat on the mat .\n" for i in range(20))
    out = built(corpus, capsys, lines)
    assert "format text (a guess by names and first bytes): a line is a sentence" in out
    assert "8.0 words a sentence in the first 20 lines" in out and "warning" not in out
    assert "18.0 characters a sentence in the first" in built(
        corpus, capsys, "那个酒店的房间很好，早餐也不错，好。\n" * 20
    )
    out = built(corpus, capsys, "The cat sat here. It was on the mat. Then it left.\n" * 20)
    assert "warning: 100% of the lines hold several sentences" in out and "--format=prose" in out
    out = built(corpus, capsys, lines, "--language=de", "--field=body")
    assert "warning: --language=de has no effect" in out
    assert "warning: --field=body has no effect" in out
    out = built(corpus, capsys, lines.replace(" sat ", "\t"))
    assert "warning: 100% of the lines are two columns with a tab" in out
    out = built(corpus, capsys, "The cat sat here and it\nwas on the mat, and\nthen it left.\n" * 20, "--format=prose")
    assert "warning: 67% of the lines end amid a sentence" in out and "Join the lines" in out
    out = built(corpus, capsys, "The cat sat here. It was on the mat.\n" * 20, "--format=prose")
    assert "format prose (as set)" in out and "rules of 'en' (a guess)" in out
    assert "warning" not in out
    out = built(corpus, capsys, "ボタンを押した。彼は来た。\n" * 20, "--segment=true")
    assert "rules of 'ja'" in out and "note: Japanese is written without spaces" in out and "Unigram" in out
    (corpus / "unigram").mkdir()
    write_unigram(corpus / "unigram")
    out = built(corpus, capsys, "ボタンを押した。彼は来た。\n" * 20, f"--tokenizer={corpus}/unigram")
    assert "sentence in the first 20 lines" in out and "note" not in out
    assert "note" not in built(corpus, capsys, "他们在中国北方的城市生活。\n" * 20)  # a word of each character
    with pytest.raises(SystemExit, match="language 'german' is not an ISO 639-1 code.*'de'"):
        built(corpus, capsys, lines, "--language=german")
