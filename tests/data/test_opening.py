"""Text and lines of files of every usual sort."""

import gzip
import os

import pytest

from bertjax.data.documents import read_documents
from bertjax.data.opening import read_lines, read_text


def test_only_line_feeds_end_a_line(tmp_path):
    (tmp_path / "in.txt").write_bytes("\ufeffa\u2028b\r\n\nc\x0bd\r\r\n\re\n".encode())
    assert read_lines(tmp_path / "in.txt") == ["a\u2028b", "", "c\x0bd", "\re"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_carriage_returns_end_the_lines_of_a_file_without_line_feeds(tmp_path, pack):
    path = tmp_path / ("in.txt" if pack is bytes else "in.txt.gz")
    path.write_bytes(pack(b"a\rb\r\rc\r"))
    assert read_lines(path) == ["a", "b", "", "c"]
    assert [d.sentences for d in read_documents(path)] == [["a", "b"], ["c"]]


def test_a_return_before_the_last_byte_looked_at_ends_lines_and_one_at_it_may_be_half_an_end(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\rb")
    assert [d.sentences for d in read_documents(path)] == [["a", "b"]]
    long = "w" * ((1 << 16) - 1)  # its return is the last of the 64 KiB that are looked at
    path.write_bytes(f"{long}\r\nb\r\n".encode())
    assert [d.sentences for d in read_documents(path)] == [[long, "b"]]


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_errors_in_a_corpus_name_the_line_however_lines_end(tmp_path, end):
    (tmp_path / "in.txt").write_bytes(end.join([b"a", b"b", b"caf\xe9"]))
    with pytest.raises(ValueError, match=r"in\.txt, line 3: byte 0xe9"):
        list(read_documents(tmp_path / "in.txt"))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_name_file_line_and_byte(tmp_path, mark):
    (tmp_path / "in.txt").write_bytes(mark + b"ok\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"in\.txt, line 2: byte 0xe9 is not valid UTF-8.*iconv"):
        read_text(tmp_path / "in.txt")


def test_an_empty_file_has_no_line(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"")
    assert read_lines(tmp_path / "in.txt") == []


def test_a_pipe_of_the_shell_can_be_read_again():
    for text in ("the first\n", "another\n"):
        reader, writer = os.pipe()
        os.write(writer, text.encode())
        os.close(writer)
        assert [read_text(f"/dev/fd/{reader}") for _ in range(2)] == [text] * 2
        os.close(reader)
