import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import zstandard

from bertjax.data.documents import preview, read_documents, read_extent
from bertjax.data.sentences import split_sentences
from bertjax.data.sources import Extent, Reading, plan_extents, resolve


def sentences(*args, **kwargs):
    return [doc.sentences for doc in read_documents(*args, **kwargs)]


def test_text_is_a_sentence_a_line_with_blank_lines_between_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\na b.\r\nc d. e\n \n\nf\n")
    assert sentences(tmp_path / "a.txt") == [["a b.", "c d. e"], ["f"]]


def test_prose_is_one_document_a_file_and_blocks_one_a_paragraph_group(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two is here.\nThree.\n\nFour.\n")
    assert sentences(tmp_path / "a.txt", "prose") == [["One.", "Two is here.", "Three.", "Four."]]
    assert sentences(tmp_path / "a.txt", "blocks") == [["One.", "Two is here.", "Three."], ["Four."]]


def test_wikiextractor_documents_lose_their_repeated_title(tmp_path):
    (tmp_path / "wiki_00").write_text(
        '<doc id="7" url="u" title="Autism">\nAutism\n\nIt is. It was.\n\nSigns.\n</doc>\n'
        '<doc id="8" url="u" title="B">\nB\n\nB.\n</doc>\n'
    )
    docs = list(read_documents(tmp_path / "wiki_00"))
    assert [d.id for d in docs] == ["7", "8"]
    assert docs[0].sentences == ["It is.", "It was.", "Signs."] and docs[1].sentences == ["B."]


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".GZ": gzip.compress,
}


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path, suffix):
    data = b"".join(
        json.dumps(r).encode() + b"\n"
        for r in [{"body": "One. Two is here.\nThree."}, {"body": ["kept. whole", "b"], "id": 3}]
    )
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    expected = [["One.", "Two is here.", "Three."], ["kept. whole", "b"]]
    assert sentences(path, field="body", segment=None)[0] == expected[0]
    assert sentences(path, field="body", segment=False)[1] == expected[1]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_cut_short_or_damaged_are_refused_by_name(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    whole = COMPRESS[suffix]("".join(f"line {i}\n" for i in range(20_000)).encode())
    for content in (whole[: len(whole) // 2], b"not compressed\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.txt.* is damaged or cut short"):
            sentences(path)
    path.write_bytes(whole + COMPRESS[suffix](b"more\n"))  # several streams in one file
    assert sentences(path)[0][-1] == "more"


def test_half_surrogates_in_json_are_refused_or_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d\\ude00"}\n{"text": "b \\uD800 c"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: an escape"):
        sentences(path)
    counts = Counter()
    found = [d.sentences for d in read_documents(path, errors="replace", counts=counts)]
    assert found == [["a \U0001f600"], ["b \ufffd c"]] and counts == {"undecodable_lines": 1}


@pytest.mark.parametrize("name", ["a.csv", "a.TSV.gz"])
def test_a_table_is_no_corpus_unless_it_is_said(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a b\n") if name.endswith("gz") else b"a b\n")
    with pytest.raises(ValueError, match="is called a table, .* write the column of texts as JSON lines"):
        list(read_documents([str(path)]))
    assert [document.sentences for document in read_documents([str(path)], "text")] == [["a b"]]


@pytest.mark.parametrize("markup", ["<mediawiki x=''>", "\ufeff<?xml version='1.0'?>", "\n<!DOCTYPE HTML>", "<html>"])
def test_a_dump_or_a_web_page_is_no_corpus_unless_it_is_said(tmp_path, markup):
    path = tmp_path / "enwiki.xml.gz"
    path.write_bytes(gzip.compress(f"{markup}\n<title>a b</title>\n".encode()))
    with pytest.raises(ValueError, match=r"enwiki\.xml\.gz is XML or HTML, .*WikiExtractor"):
        list(read_documents([str(path)]))
    assert list(read_documents([str(path)], "text"))


def test_names_with_brackets_and_directories_are_understood(tmp_path):
    (tmp_path / "a[1].txt").write_text("a\n")
    assert sentences(tmp_path / "a[1].txt") == [["a"]]
    with pytest.raises(ValueError, match="it is a directory, write '.*/\\*'"):
        sentences(tmp_path)


def test_damaged_parquet_is_refused_by_name(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        sentences(tmp_path / "a.parquet")


@pytest.mark.parametrize("line", ['{"text": "a b"}', ' { "text" : "a b" }', '\ufeff{\t"text": "a b"}'])
def test_jsonl_is_told_by_its_first_line_however_it_is_spaced(tmp_path, line):
    (tmp_path / "records.txt").write_text(line + "\n")
    assert sentences(tmp_path / "records.txt") == [["a b"]]


def test_jsonl_errors_name_file_line_and_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no field 'text'.*txt"):
        sentences(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text"\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: not JSON"):
        sentences(tmp_path / "b.jsonl")


@pytest.mark.parametrize("text", [{"a": "b"}, 5, ["a", 5], [["a"]], True])
def test_what_is_no_text_names_the_line(tmp_path, text):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' + json.dumps({"text": text}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the text must be a string or a list"):
        sentences(tmp_path / "a.jsonl")


def test_parquet_may_hold_text_as_bytes(tmp_path):
    """As Spark and others write it that do not mark a column as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array(["Née. Again.".encode()], pa.binary())}), tmp_path / "a.parquet")
    assert sentences(tmp_path / "a.parquet") == [["Née.", "Again."]]
    pq.write_table(pa.table({"text": pa.array([b"N\xe9e"], pa.binary())}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: not valid UTF-8"):
        sentences(tmp_path / "b.parquet")


def test_parquet_row_groups_are_extents(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [f"Number {i}. Again." for i in range(10)] + [None]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    assert sentences(tmp_path / "a.parquet")[9] == ["Number 9.", "Again."]
    assert len(sentences(tmp_path / "a.parquet")) == 10
    plan = plan_extents([str(tmp_path / "a.parquet")], Reading(), 1)
    assert [(e.start, e.end) for group in plan for e in group] == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match="no field 'body'.*text"):
        sentences(tmp_path / "a.parquet", field="body")


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("form", ["text", "wikiextractor", "jsonl"])
def test_any_cut_of_a_file_into_extents_gives_every_document_once(tmp_path, form, line_end, documents):
    docs = documents(12, sentences=(1, 4), words=(1, 4))
    if form == "text":
        content = "\n\n\n".join("\n".join(d) for d in docs) + "\n"
    elif form == "jsonl":
        content = "".join(json.dumps({"text": d}) + "\n" for d in docs)
    else:
        content = "".join(f'<doc id="{i}" title="T">\nT\n' + "\n".join(d) + "\n</doc>\n" for i, d in enumerate(docs))
    path = tmp_path / "file"
    content = content.replace("\n", line_end)
    path.write_bytes(content.encode())
    reading = Reading(format=form, segment=False)
    for step in (1, 7, 50, 333, len(content)):
        cuts = [*range(0, len(content), step), len(content)]
        read = [
            d.sentences
            for a, b in zip(cuts, cuts[1:], strict=False)
            for d in read_extent(Extent(str(path), form, a, -1 if b == len(content) else b, 1), reading)
        ]
        assert read == docs, step


def test_bytes_that_are_not_utf8_name_file_line_and_byte(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"ok\ncaf\xe9\nok\n")
    with pytest.raises(ValueError, match=r"latin\.txt, line 2: byte 0xe9 at offset 6 .*UTF-8"):
        sentences(path)
    counts = Counter()
    assert sentences(path, errors="replace", counts=counts) == [["ok", "caf\ufffd", "ok"]]
    assert counts == {"undecodable_lines": 1}


def test_utf8_under_the_c_locale_and_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\n")
    code = (
        "import sys; from bertjax.data.documents import read_documents; "
        "print(ascii([d.sentences for d in read_documents(sys.argv[1])]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        env={
            "LANG": "C",
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert out.stdout.strip() == r"[['caf\xe9']]", out.stderr


def test_a_pattern_without_a_match_is_an_error_and_files_come_once(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x\n")
    with pytest.raises(ValueError, match=r"no file matches .*none-\*"):
        resolve(f"{tmp_path}/*.txt,{tmp_path}/none-*")
    assert resolve([f"{tmp_path}/*.txt", f"{tmp_path}/a.txt"]) == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]


def test_files_that_are_not_on_a_disk_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="gs://bucket/a.txt: .* copy them there first"):
        resolve("gs://bucket/a.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device.* write it to a file"):
        resolve(f"{tmp_path}/pipe")


def test_a_document_without_text_is_left_out_and_counted(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "One."}\n{"text": " "}\n{"text": "Two."}\n')
    counts = Counter()
    found = [document.sentences for document in read_documents(path, counts=counts)]
    assert found == [["One."], ["Two."]] and counts == {"empty_documents": 1}


def test_documents_beyond_the_longest_go_on_as_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("bertjax.data.documents.MAX_SENTENCES", 4)
    (tmp_path / "a.txt").write_text("".join(f"s{i}\n" for i in range(10)))
    counts = Counter()
    read = sentences(tmp_path / "a.txt", counts=counts)
    assert read == [["s0", "s1", "s2", "s3"], ["s4", "s5", "s6", "s7"], ["s8", "s9"]]
    assert counts == {"long_documents_cut": 2}


def test_tfds_that_needs_tensorflow_says_what_to_install(monkeypatch):
    import tensorflow_datasets as tfds

    def refuse(*args, **kwargs):
        raise NotImplementedError("no random access")

    monkeypatch.setattr(tfds, "data_source", refuse)
    with pytest.raises(ValueError, match="pip install tensorflow-cpu"):
        list(read_documents("tfds:wikipedia/20230601.en"))


def test_tfds_records_are_documents(monkeypatch):
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds, "data_source", lambda name, **k: [{"text": b"One. Two is here."}, {"text": "Three."}])
    assert sentences("tfds:some/config:train") == [["One.", "Two is here."], ["Three."]]


def test_sentences_of_several_languages():
    assert split_sentences('Hello Dr. Smith. "What?" he said. 3 of them.') == [
        "Hello Dr. Smith.",
        '"What?" he said.',
        "3 of them.",
    ]
    assert split_sentences("Am 3. Mai z. B. kam er. Dann ging er.", "de") == [
        "Am 3. Mai z. B. kam er.",
        "Dann ging er.",
    ]
    assert split_sentences("他来了。她走了。", "zh") == ["他来了。", "她走了。"]


@pytest.mark.parametrize("stop, language", [("。", "zh"), ("！」", "ja"), ("။", "my"), ("!", "en")])
def test_a_long_text_without_spaces_is_split_as_its_sentences_are_in_linear_time(stop, language):
    sentences = [f"{'字天' * (3 + i % 9)}{stop}" for i in range(20_000)]
    started = time.monotonic()  # sentencex alone: 5 s
    found = split_sentences(f"Two words. {''.join(sentences)} More words. And more.", language)
    assert time.monotonic() - started < 2
    assert found == ["Two words.", *sentences, "More words.", "And more."]
    assert split_sentences("字" * 100_000, language) == ["字" * 100_000]


def test_patterns_may_be_repeated_and_separated_by_commas(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "d,e.txt"):
        (tmp_path / name).write_text("x\n")
    at = str(tmp_path)
    assert [f.removeprefix(at) for f in resolve([f"{at}/b.txt,{at}/a*", f"{at}/c.txt"])] == [
        "/b.txt",
        "/a.txt",
        "/c.txt",
    ]
    assert resolve(f"{at}/a.txt,{at}/a.txt") == [f"{at}/a.txt"]
    for whole in ("d,e.txt", "d,*.txt"):  # a file of that very name
        assert resolve([f"{at}/{whole}"]) == [f"{at}/d,e.txt"]
    (tmp_path / "f,g").mkdir()
    with pytest.raises(ValueError, match="f,g'; it is a directory"):
        resolve(f"{at}/f,g")


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        *(("text", suffix) for suffix in COMPRESS),
        *((form, "") for form in ("prose", "blocks", "jsonl", "wikiextractor")),
    ],
)
def test_a_line_without_end_is_refused_with_file_and_line(tmp_path, suffix, form):
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(COMPRESS[suffix](b'{"text": "a"}\n' + b"ab " * 400_000))
    with pytest.raises(ValueError, match=rf"bomb{suffix}, line 2: longer than 1 MiB.*max_line_mb"):
        sentences(path, form, max_line_mb=1)
    if form != "wikiextractor":
        path.write_bytes(COMPRESS[suffix](b'{"text": "a"}\n{"text": "' + b"ab " * 300_000 + b'"}'))
        assert len(sentences(path, form, max_line_mb=1)[-1][-1]) > 890_000


def test_a_long_line_is_refused_in_every_extent_without_reading_it(tmp_path):
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.write(b"one\n\n")
        file.truncate(1 << 28)
        file.seek(6)
        file.write(b"x" * (1 << 16))  # so that the first bytes are text
    counts = Counter()
    for start in (0, 1 << 27):
        with pytest.raises(ValueError, match="line 3: longer than 16 MiB"):
            list(read_extent(Extent(str(path), "text", start, -1, 1), Reading(), counts))


def test_documents_of_too_many_characters_go_on_as_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("bertjax.data.documents.MAX_CHARACTERS", 10)
    for form, text in (
        ("text", "abcde\n" * 5),
        ("prose", "abcde\n" * 5),
        ("wikiextractor", '<doc id="1" title="t">\n' + "abcde\n" * 5 + "</doc>\n"),
    ):
        (tmp_path / "a").write_text(text)
        counts = Counter()
        assert sentences(tmp_path / "a", form, counts=counts) == [["abcde", "abcde"], ["abcde", "abcde"], ["abcde"]]
        assert counts == {"long_documents_cut": 2}


def test_wikiextractor_documents_without_an_end_are_read_and_counted(tmp_path):
    content = (
        'lost\n<doc id="1" url="u" title="A">\nA\na\n<doc id="2" url="u" title="B">\nB\nb\n'
        '</doc>\nlost too\n<doc id="3" url="u" title="C">\nC\nc\n'
    )
    (tmp_path / "wiki_00").write_text(content)
    counts = Counter()
    docs = list(read_documents(tmp_path / "wiki_00", "wikiextractor", counts=counts))
    assert [(d.id, d.sentences) for d in docs] == [("1", ["a"]), ("2", ["b"]), ("3", ["c"])]
    assert counts == {"unclosed_documents": 2, "lines_outside_documents": 2}
    counts = Counter()
    for start in range(0, len(content), 7):  # the same, whoever reads which part
        end = start + 7 if start + 7 < len(content) else -1
        extent = Extent(str(tmp_path / "wiki_00"), "wikiextractor", start, end, 7)
        for document in read_extent(extent, Reading(), counts):
            assert document == docs.pop(0)
    assert not docs and counts == {"unclosed_documents": 2, "lines_outside_documents": 2}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("text", ["The cat sat.\nIt was here.\n", "Кошка сидела.\nОна тут.\n"])
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_other_encodings_of_unicode_are_refused(tmp_path, encoding, text, errors):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(ValueError, match=r"a\.txt: this is text in UTF-16 or UTF-32.*iconv"):
        sentences(tmp_path / "a.txt", errors=errors)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_compressed_file_whose_name_does_not_say_so_is_refused_with_the_name_that_does(tmp_path, suffix, errors):
    (tmp_path / "a.txt").write_bytes(COMPRESS[suffix](b"The cat sat.\nIt was here.\n"))
    with pytest.raises(ValueError, match=rf"a\.txt begins like a compressed file.*end in \{suffix}"):
        sentences(tmp_path / "a.txt", errors=errors)


@pytest.mark.parametrize("beginning", [b"%PDF-1.4", b"PK\x03\x04", b"{\\rtf1"])
def test_documents_of_other_programs_are_refused_by_what_they_are(tmp_path, beginning):
    (tmp_path / "a.txt").write_bytes(beginning + b"\n%\xe2\xe3\n")
    with pytest.raises(ValueError, match=r"a\.txt is a PDF, an archive or .*word processor: save its text"):
        sentences(tmp_path / "a.txt")


def test_a_pipe_or_a_broken_link_among_the_matches_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"link\.txt matches.*a broken link"):
        resolve(f"{tmp_path}/*.txt")
    (tmp_path / "link.txt").unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt matches.*a pipe"):
        resolve(f"{tmp_path}/*.txt")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"text": ' + "1" * 5000 + "}", "not readable as JSON"),
        ('{"text": 1}', "must be a string"),
        ('"text"', "no JSON object.*jq"),
        ("[1]", "no JSON object.*jq"),
        ("null", "no JSON object.*jq"),
        ('{"text": {"a": 1}}', "must be a string"),
    ],
)
def test_strange_json_is_refused_with_file_and_line(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{problem}"):
        sentences(tmp_path / "a.jsonl")


GERMAN = "Am 3. Oktober kam der Mann mit dem Hund und ging nicht nach Hause. Das war ein Feiertag.\n"
RUSSIAN = "Он родился в 1950 г. в Москве. Потом он уехал.\n"


@pytest.mark.parametrize(
    ("text", "language", "first"),
    [
        (GERMAN, "de", GERMAN.split(" Das")[0]),
        (RUSSIAN, "ru", RUSSIAN.split(" Потом")[0]),
        ("他来了。她走了。\n", "zh", "他来了。"),
        ("彼は来た。ボタンを押した。\n", "ja", "彼は来た。"),
        ("The cat sat on the mat. It was there.\n", "en", "The cat sat on the mat."),
    ],
)
def test_the_language_is_guessed_from_script_and_words(tmp_path, text, language, first):
    (tmp_path / "a.txt").write_text(text * 3)
    seen = preview([str(tmp_path / "a.txt")], Reading(format="prose"))
    assert seen.reading.language == language and seen.several == 1 and seen.lines == 3
    assert sentences(tmp_path / "a.txt", "prose")[0][0] == first


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("german", "de"),
        ("German", "de"),
        ("de-DE", "de"),
        ("deu", "de"),
        ("pt_BR", "pt"),
        ("chinese", "zh"),
        ("rusian", "ru"),
        ("jp", "ja"),
    ],
)
def test_an_unknown_language_is_refused_with_the_nearest(given, nearest):
    with pytest.raises(ValueError, match=f"{given}' is not an ISO 639-1 code.*did you mean '{nearest}'"):
        Reading(language=given)
