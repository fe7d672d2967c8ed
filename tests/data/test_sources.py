"""Which files a pattern means."""

import glob
import os

import numpy as np
import pytest

from bertjax.data.sources import Reading, plan_extents, resolve


def test_links_that_lead_back_add_no_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
        for i in range(3):  # glob would go on through all of them for ever
            (tmp_path / name / f"back{i}").symlink_to(tmp_path)
    expected = [str(tmp_path / name / "x.txt") for name in ("a", "b")]
    for pattern in ("**/*.txt", "**", "**/**/x.txt", "a/**/*.txt"):
        assert sorted(map(os.path.realpath, resolve(f"{tmp_path}/{pattern}"))) == expected


def test_a_file_with_several_names_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert resolve("*.txt") == ["a.txt"]
    assert resolve(["b.txt", "a.txt", "./a.txt", f"{tmp_path}/a.txt"]) == ["b.txt"]


@pytest.mark.parametrize("seed", range(3))
def test_patterns_match_as_those_of_glob_where_there_are_no_links(tmp_path, monkeypatch, seed):
    random = np.random.default_rng(seed)
    monkeypatch.chdir(tmp_path)
    folders = ["."]
    for _ in range(8):
        folders.append(os.path.join(random.choice(folders), random.choice(["a", "b", ".h", "x[1]", "c"])))
        os.makedirs(folders[-1], exist_ok=True)
    for _ in range(15):
        name = random.choice(["f.txt", "g.txt", ".k.txt", "h.md"])
        open(os.path.join(random.choice(folders), name), "w").close()
    for pattern in (
        "**",
        "**/*.txt",
        "a/**",
        "./**/*.txt",
        "*/**/*.txt",
        "a/**/b/**/*",
        "**/a/*",
        "**/**/*.txt",
        f"{tmp_path}/**/*.txt",
        f"{tmp_path}//a/**",
        "**/x[[]1]/*",
    ):
        files = sorted({f for f in glob.glob(pattern, recursive=True) if os.path.isfile(f)})
        if files:
            assert resolve(pattern) == files
        else:
            with pytest.raises(ValueError, match="no file matches"):
                resolve(pattern)


@pytest.mark.parametrize("form", ["tfds", "hf"])
def test_a_file_is_no_data_set_by_name(tmp_path, form):
    (tmp_path / "a.txt").write_text("One.\n")
    with pytest.raises(ValueError, match=rf"a\.txt: format {form} reads data sets by name, {form}:NAME"):
        plan_extents([str(tmp_path / "a.txt")], Reading(format=form), 1 << 20)
