"""The README's commands, links and file names are those of the code."""

import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every `python -m bertjax...` of the README, in blocks and in running text."""
    text = re.sub(r"\\\n", " ", README)
    return sorted(
        {found.strip() for found in re.findall(r"python -m bertjax[^`\n#]*", text) if "lerning_rate" not in found}
    )  # the example of a mistake


@pytest.mark.parametrize("command", commands())
def test_a_command_names_what_exists(command):
    from bertjax.__main__ import tools
    from bertjax.command_line import check_override_names

    words = shlex.split(command.split("&&")[0])[2:]
    module, flags = words[0].rstrip(":,."), words[1:]
    if module.startswith("bertjax.tools."):
        assert module.removeprefix("bertjax.tools.") in {*tools(), "NAME"}
    else:
        assert module in ("bertjax.main", "bertjax")
    check_override_names(flags)
    for flag in flags:
        if flag.startswith("--config=configs/"):
            assert (ROOT / flag.removeprefix("--config=").split(":")[0]).exists()


def test_settings_named_in_the_text_exist():
    from bertjax.command_line import check_override_names, expand_overrides

    found = set(re.findall(r"--config\.[a-z_.]+=\w*", README))
    check_override_names(
        expand_overrides([each for each in sorted(found) if not each.startswith("--config.lerning_rate")])
    )
    assert len(found) > 15


def test_links_lead_somewhere():
    titles = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in titles, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_first_two_blocks_are_the_two_commands():
    """.ci/run reads them word for word."""
    first, second = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:2]
    assert first.startswith("python -m pip install") and "configs/demo.py" in first
    assert "[test]" in second and second.rstrip().endswith("pytest -q")
