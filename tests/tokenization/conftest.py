"""Wikipedia lines for the tests of this room that run on real data."""

import tarfile

import pytest


@pytest.fixture(scope="session")
def wikipedia_lines(shared_data) -> list[str]:
    """The first 20,000 paragraphs of the good articles."""
    lines: list[str] = []
    with tarfile.open(shared_data / "corpus" / "wikipedia-good.tar.xz") as tar:
        for member in tar:
            if not member.isfile():
                continue
            text = tar.extractfile(member).read().decode("utf-8")
            lines += [line for line in text.split("\n") if line.strip() and not line.startswith(("<doc ", "</doc>"))]
            if len(lines) >= 20_000:
                return lines[:20_000]
    return lines
