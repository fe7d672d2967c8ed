"""vocab.txt: what is accepted has the ids of the original's load_vocab, the rest is refused."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.tokenization import load_tokenizer
from tests.fakes import SPECIALS

PIECES = st.one_of(
    st.sampled_from(
        [
            *SPECIALS,
            "a",
            "##a",
            "##",
            "the",
            "\u4e2d",
            "caf\u00e9",
            "cafe\u0301",
            "",
            " ",
            "\u2028",
            "\u3000",
            "a b",
            "a\u00a0",
            "\x00",
            "\x85",
            "\ufeff",
            "a\rb",
            "\t",
            "{",
            "A",
        ]
    ),
    st.text(max_size=4),
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\n", "\r\n", "\n\n", " \n", "\t\r\n", "\r", ""])
STARTS = st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"\xff"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


def load_vocab(content: bytes) -> dict[str, int]:
    """`load_vocab` of the original's tokenization.py, after a byte-order mark."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    return {line.decode("utf-8").strip(): i for i, line in enumerate(lines)}


@given(
    start=STARTS,
    pieces=st.lists(st.tuples(PIECES, ENDS), max_size=12),
    complete=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    last=ENDS,
)
def test_accepted_vocabularies_have_the_original_s_ids(directory, start, pieces, complete, end, last):
    lines = [(name, end) for name in SPECIALS] if complete else []
    text = "".join(piece + ending for piece, ending in [*lines, *pieces]) + last
    content = start + text.encode("utf-8", "surrogatepass")
    path = directory / "vocab.txt"
    path.write_bytes(content)
    try:
        tokenizer = load_tokenizer(path, do_lower_case=True)
    except ValueError as error:
        assert str(path) in str(error)
        return
    expected = load_vocab(content)
    assert tokenizer.vocab_size == content.count(b"\n") + (not content.endswith(b"\n"))
    assert tokenizer.special_ids == tuple(expected[name] for name in SPECIALS)
    for piece, i in expected.items():
        assert tokenizer.vocab[i].strip() == piece
        if piece and piece.isascii() and piece.isalpha() and piece == piece.lower():
            assert tokenizer.encode(piece) == [i]
    for text in ("the cafe a", unicodedata.normalize("NFD", "caf\u00e9")):
        assert max(tokenizer.encode(text)) < tokenizer.vocab_size


@given(content=st.binary(max_size=60))
def test_bytes_of_any_kind_are_refused_by_name(directory, content):
    path = directory / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="vocab.txt"):
        load_tokenizer(path)
