"""Text in any form: the documents read are those of a simple reader written here, or it is refused.

The simple reader works on the whole file at once; what it calls `Refused`, ours must refuse naming
the file. Of what is accepted, the tokens in are the tokens in the store and the losses counted.
"""

import bz2
import collections
import gzip
import html
import json
import lzma
import re

import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.documents import read_documents, read_extent
from bertjax.data.shards import ShardTask, build_shard, read_shard_tables
from bertjax.data.sources import Extent, Reading
from tests.fakes import FakeTokenizer

COMPRESS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1),
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".zst": zstandard.compress,
}

words = st.text(st.sampled_from('ab. \t\u200b\x0b\x0c\x01\x1c\x85\xa0\u2028\u3000é中\ufeff<>"\\'), max_size=8)
ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"\n \n", b"\r", b"\n\r\n", b""])
odd = st.sampled_from(
    [
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\x00",
        b"\xef\xbb\xbf",
        b"<doc ",
        b'<doc id="1" title="a">\n',
        b"</doc>",
        b'{"text": "a"}',
    ]
)


@st.composite
def plain(draw):
    parts = draw(st.lists(st.tuples(st.one_of(words.map(str.encode), words.map(str.encode), odd), ends), max_size=8))
    return b"".join(text + end for text, end in parts)


@st.composite
def records(draw):
    texts = st.one_of(
        words,
        words.map(lambda text: f"{text}\n{text}"),
        st.lists(words, max_size=3),
        st.none(),
        st.integers(),
        st.just("\ud800"),
        st.just({"a": []}),
    )
    lines = [
        json.dumps(
            {draw(st.sampled_from(["text", "text", "text", "x"])): draw(texts)}, ensure_ascii=draw(st.booleans())
        ).encode("utf-8", "surrogatepass")
        for _ in range(draw(st.integers(0, 4)))
    ]
    lines += draw(st.lists(st.sampled_from([b"", b" ", b"[]", b"{", b'{"text": "a"} x']), max_size=1))
    return draw(ends).join(lines)


@st.composite
def wiki(draw):
    out = b""
    for number in range(draw(st.integers(0, 3))):
        title = draw(words).replace('"', "").strip()
        body = draw(plain())
        closing = draw(st.sampled_from([b"</doc>\n", b"</doc>\n\n", b"</doc>\n", b""]))
        tag = f'<doc id="{number}" url="u" title="{html.unescape(title)}">\n{title}\n\n'
        out += tag.encode() + body + b"\n" + closing
    return out


class Refused(Exception):
    pass


def lines_of(data, errors):
    """(stripped lines, undecodable lines); a carriage return ends one where nothing else does."""
    if data.count(0) * 200 > len(data[: 1 << 16]) or data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused
    if b"\n" not in data and b"\r" in data[:-1]:
        data = data.replace(b"\r", b"\n")
    lines = data.split(b"\n")
    if data.startswith(b"\xef\xbb\xbf"):
        lines[0] = lines[0][3:]
    bad = 0
    for number, line in enumerate(lines):
        try:
            lines[number] = line.decode()
        except UnicodeDecodeError:
            if errors == "strict":
                raise Refused from None
            lines[number] = line.decode("utf-8", "replace")
            bad += 1
    return [line.strip() for line in lines], bad


def expected(form, data, errors):
    """(documents, counts) as the formats are described in the README."""
    lines, bad = lines_of(data, errors)
    counts = collections.Counter(undecodable_lines=bad)
    if form == "prose":
        documents = [[line for line in lines if line]]
    elif form in ("text", "blocks"):
        documents = [group.split("\n") for group in re.split("\n\n+", "\n".join(lines).strip("\n")) if group]
    elif form == "jsonl":
        documents = []
        for line in filter(None, lines):
            try:
                record = json.loads(line)
            except ValueError:
                raise Refused from None
            if not isinstance(record, dict) or "text" not in record:
                raise Refused
            documents.append(paragraphs(record["text"], errors, counts))
    else:
        documents, opened = [], None
        for line in lines:
            if line.startswith("<doc "):
                counts["unclosed_documents"] += opened is not None
                opened = re.search(' title="([^"]*)', line)[1] if ' title="' in line else ""
                documents.append([])
            elif opened is None:
                counts["lines_outside_documents"] += bool(line)
            elif line.startswith("</doc>"):
                opened = None
            elif line and (documents[-1] or line != opened):
                documents[-1].append(line)
        counts["unclosed_documents"] += opened is not None
    counts["empty_documents"] += sum(not document for document in documents)
    return [document for document in documents if document], +counts


def paragraphs(text, errors, counts):
    """Of one record."""
    if text is None:
        return []
    if isinstance(text, str):
        text = text.split("\n")
    if not isinstance(text, list) or not all(isinstance(part, str) for part in text):
        raise Refused
    if any("\ud800" <= character <= "\udfff" for part in text for character in part):
        if errors == "strict":
            raise Refused
        counts["undecodable_lines"] += 1
        text = [re.sub("[\ud800-\udfff]", "\ufffd", part) for part in text]
    return [part.strip() for part in text if part.strip()]


class Characters(FakeTokenizer):
    """A token for each character that is not a space; 'é' is unknown."""

    vocab_size, unk_id, pad_id, cls_id, sep_id = 1 << 16, 1, 0, 2, 3
    fingerprint = "characters"

    def encode_batch(self, texts):
        return [[1 if c == "é" else 4 + ord(c) % 60_000 for c in text if not c.isspace()] for text in texts]


cases = st.one_of(
    st.tuples(st.sampled_from(["text", "prose", "blocks"]), plain()),
    st.tuples(st.just("jsonl"), records()),
    st.tuples(st.just("wikiextractor"), wiki()),
)


@given(cases, st.sampled_from(sorted(COMPRESS)), st.sampled_from(["strict", "replace"]))
def test_documents_are_those_of_a_simple_reader_or_the_file_is_refused(folder, case, suffix, errors):
    form, data = case
    path = folder / f"in{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    try:
        documents, counts = expected(form, data, errors)
    except Refused:
        documents, counts = None, None
    found_counts = collections.Counter()
    try:
        found = [
            document.sentences
            for document in read_documents(path, form, segment=False, errors=errors, language="en", counts=found_counts)
        ]
    except ValueError as error:
        assert documents is None, (error, documents)
        assert str(path) in str(error)
        return
    assert documents is not None, found
    assert found == documents and found_counts == counts
    if suffix:
        return
    # Cut anywhere, the extents give the same documents, each once.
    middle = len(data) // 2
    reading, parted = Reading(format=form, segment=False, errors=errors, language="en"), []
    for start, end in ((0, middle), (middle, -1)) if middle and form != "prose" else ((0, -1),):
        parted += [document.sentences for document in read_extent(Extent(str(path), form, start, end, 1), reading)]
    assert parted == documents


@given(st.lists(st.lists(words, min_size=1, max_size=4), min_size=1, max_size=4), st.sampled_from([None, 1, 2, 5]))
def test_tokens_in_are_the_tokens_in_the_store_and_the_losses_counted(folder, documents, split_lines):
    path = folder / "tokens.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    reading = Reading(format="jsonl", segment=False, language="en")
    extents = [Extent(str(path), "jsonl", 0, -1, 1)]
    record = build_shard(ShardTask(extents, 0, folder, np.dtype("<u2"), reading, split_lines), Characters())
    sentences, table = read_shard_tables(folder, 0)
    written = np.fromfile(folder / "00000.tokens", "<u2")
    tokens = [Characters().encode_batch(document) for document in documents]
    stripped = [[line for line in map(str.strip, document) if line] for document in documents]
    assert written.tolist() == [i for document in tokens for line in document for i in line]
    assert record["tokens"] == len(written) == sentences.sum() == table["tokens"].sum()
    assert record["unknown_tokens"] == np.count_nonzero(written == 1)
    dropped = collections.Counter(record["noticed"])
    assert record["documents"] == len(table) == len(documents) - dropped["empty_documents"]
    if split_lines is None:
        assert record["sentences"] == sum(map(len, stripped)) - dropped["empty_sentences"]
        assert dropped["long_lines_split"] == 0
    else:
        assert len(sentences) == 0 or sentences.max() <= split_lines
    # Of the source: documents, tokens, unknown, beyond a row, of a single sentence.
    assert record["sources"] == [] or record["sources"][0][:3] == [
        record["documents"],
        record["tokens"],
        record["unknown_tokens"],
    ]
