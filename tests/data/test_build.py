import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from bertjax.data import shards
from bertjax.data import store as stores
from bertjax.data.build import build_store
from bertjax.data.sources import Reading
from bertjax.data.splits import BuildSettings
from bertjax.data.store import TokenStore
from bertjax.interruption import one_line


def files_of(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(pathlib.Path(path).rglob("*")) if p.is_file()}


def all_documents(path):
    return [doc for split in stores.SPLITS for doc in TokenStore(path, split).documents()]


def test_every_token_comes_back_in_order(tmp_path, tokenizer, documents):
    docs = documents(30)
    manifest = build_store(None, tokenizer, tmp_path / "s", documents=docs, heldout_fraction=0, shard_bytes=5000)
    store = TokenStore(tmp_path / "s")
    assert len(manifest["shards"]) > 3
    assert [[s.tolist() for s in d] for d in store.documents()] == [[tokenizer.encode(s) for s in d] for d in docs]
    assert store.num_tokens == sum(len(s.split()) for d in docs for s in d)
    assert manifest["nsp_labels"] == {"0": "is next", "1": "random"}


def test_output_is_byte_identical_for_any_number_of_workers(tmp_path, tokenizer, documents, text_file):
    for i in range(3):
        text_file(tmp_path / f"{i}.txt", documents(40, seed=i))
    for workers in (1, 4):
        build_store(f"{tmp_path}/*.txt", tokenizer, tmp_path / f"s{workers}", workers=workers, shard_bytes=20_000)
    assert len(list((tmp_path / "s1/shards").glob("*.json"))) >= 4
    assert files_of(tmp_path / "s1") == files_of(tmp_path / "s4")


def test_a_file_whose_name_is_not_utf_8_gives_the_same_tokens(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(20))
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")
    odd.write_bytes((tmp_path / "a.txt").read_bytes())
    plain = build_store(tmp_path / "a.txt", tokenizer, tmp_path / "plain")
    assert build_store(odd, tokenizer, tmp_path / "s")["content_hash"] == plain["content_hash"]
    again = build_store(odd, tokenizer, tmp_path / "s")  # finished: its manifest is read
    assert again["files"] == [[str(odd), odd.stat().st_size]] and len(all_documents(tmp_path / "s")) == 20


def test_machines_that_share_the_shards_give_the_same_bytes(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(60))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, shard_bytes=10_000)
    build_store(**arguments, out_dir=tmp_path / "whole")
    assert build_store(**arguments, out_dir=tmp_path / "s", shard=(1, 2)) == {}
    assert not (tmp_path / "s/manifest.json").exists()
    assert build_store(**arguments, out_dir=tmp_path / "s", shard=(0, 2))["documents"] == 60
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "s")


_KILLED = """
import sys, time
sys.path.insert(0, {here!r})
import conftest
from bertjax.data import build
tokenizer = conftest.WordTokenizer()
class Slow(conftest.WordTokenizer):
    def encode_batch(self, texts):
        time.sleep(0.2)
        return super().encode_batch(texts)
if __name__ == "__main__":
    build.build_store(sys.argv[1], Slow(), sys.argv[2], shard_bytes=10_000,
                      workers=int(sys.argv[3]))
"""


def start_slow_build(tmp_path, workers):
    (tmp_path / "run.py").write_text(_KILLED.format(here=str(pathlib.Path(__file__).parent)))
    return subprocess.Popen(
        [sys.executable, tmp_path / "run.py", tmp_path / "a.txt", tmp_path / "s", str(workers)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_build_goes_on_without_redoing_finished_shards(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(80))
    process = start_slow_build(tmp_path, workers=1)
    shards = tmp_path / "s/shards"
    wait_for((shards / "00002.json").exists)
    process.kill()  # SIGKILL
    process.wait()
    finished = {p: p.stat().st_mtime_ns for p in shards.iterdir() if ".tmp" not in p.name}
    assert len([p for p in finished if p.suffix == ".json"]) >= 3
    with pytest.raises(ValueError, match="unfinished"):
        TokenStore(tmp_path / "s")
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", shard_bytes=10_000)
    whole = {p for p in finished if p.with_suffix(".json") in finished}
    assert all(p.stat().st_mtime_ns == finished[p] for p in whole)
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "again", shard_bytes=10_000)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "again")


def test_workers_of_a_killed_build_end_with_it_and_the_same_command_goes_on(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(80))
    shards = tmp_path / "s/shards"
    build = start_slow_build(tmp_path, workers=2)
    wait_for(lambda: len(list(shards.glob("*.tmp"))) >= 2)  # both are at work
    workers = [int(pid) for pid in pathlib.Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split()]
    assert len(workers) >= 2
    with pytest.raises(ValueError, match="another build is writing to"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", shard_bytes=10_000)
    build.kill()
    build.wait()
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", shard_bytes=10_000)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), 5)
    assert not list((tmp_path / "s").rglob("*.tmp"))
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "again", shard_bytes=10_000)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "again")


@pytest.mark.parametrize("left", ["nothing", "build.json.7-ab.tmp", "begun"])
def test_a_build_that_was_killed_at_once_goes_on(tmp_path, tokenizer, documents, text_file, left):
    text_file(tmp_path / "a.txt", documents(20))
    (tmp_path / "s/shards").mkdir(parents=True)
    (tmp_path / "s/build.lock").touch()
    if left == "begun":  # with --overwrite, when half of the earlier store was removed
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", overwrite=True, max_tokens=9)
        (tmp_path / "s/manifest.json").unlink()
        (tmp_path / "s/shards/00000.tokens").unlink()
    elif left != "nothing":
        (tmp_path / "s" / left).write_text("{")
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", overwrite=True)
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "t")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "t")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_damaged_record_of_a_begun_build_names_it_and_the_remedy(tmp_path, tokenizer, documents, text_file, content):
    text_file(tmp_path / "a.txt", documents(3))
    arguments = (tmp_path / "a.txt", tokenizer, tmp_path / "s")
    build_store(*arguments)
    (tmp_path / "s/manifest.json").unlink()
    (tmp_path / "s/build.json").write_text(content)
    with pytest.raises(ValueError, match=r"build\.json is not .*--overwrite"):
        build_store(*arguments)
    build_store(*arguments, overwrite=True)


@pytest.mark.parametrize("damaged", ["tokens cut short", "record with another number"])
def test_a_damaged_shard_is_made_again(tmp_path, tokenizer, documents, text_file, damaged):
    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, out_dir=tmp_path / "s", shard_bytes=10_000)
    build_store(**arguments)
    before = files_of(tmp_path / "s")
    (tmp_path / "s/manifest.json").unlink()
    if damaged == "tokens cut short":
        tokens = tmp_path / "s/shards/00001.tokens"
        tokens.write_bytes(tokens.read_bytes()[:-2])
    else:
        record = tmp_path / "s/shards/00001.json"
        record.write_text(record.read_text().replace('"unknown_tokens": 0', '"unknown_tokens": 8'))
    build_store(**arguments)
    assert files_of(tmp_path / "s") == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    "change, told",
    [
        ("setting", "settings.heldout_fraction: 0.01 there, 0.5 now"),
        ("corpus", "files: "),
        ("time of the corpus", "files: of the same names and sizes, but changed since"),
        ("tokenizer", "tokenizer: another one, with [0-9]+ entries there, 999 now"),
    ],
)
def test_a_changed_build_is_refused_never_mixed(tmp_path, make_tokenizer, documents, text_file, change, told, finished):
    text_file(tmp_path / "a.txt", documents(20))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=make_tokenizer(), out_dir=tmp_path / "s")
    build_store(**arguments)
    if not finished:
        (tmp_path / "s/manifest.json").unlink()
    if change == "setting":
        arguments["heldout_fraction"] = 0.5
    elif change == "tokenizer":
        arguments["tokenizer"] = make_tokenizer(vocab_size=999)
    elif change == "time of the corpus":
        os.utime(tmp_path / "a.txt", (1, 1))
    else:
        text_file(tmp_path / "a.txt", documents(21))
    with pytest.raises(ValueError, match=f"other input or settings:\n  {told}.*\nChoose"):
        build_store(**arguments)
    build_store(**arguments, overwrite=True)
    build_store(**(arguments | {"out_dir": tmp_path / "fresh"}))
    assert files_of(tmp_path / "s") == files_of(tmp_path / "fresh")


def test_a_foreign_directory_is_not_touched(tmp_path, tokenizer):
    (tmp_path / "mine.txt").write_text("x\n")
    with pytest.raises(ValueError, match="not empty"):
        build_store(tmp_path / "mine.txt", tokenizer, tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_full_disk_is_a_clear_error_and_can_be_gone_on_from(tmp_path, tokenizer, documents, text_file, monkeypatch):
    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=f"{tmp_path}/a.txt", tokenizer=tokenizer, out_dir=tmp_path / "s", shard_bytes=10_000)
    write = shards.write_json

    def full(path, record):
        if path.name == "00002.json":
            raise OSError(28, "No space left on device")
        write(path, record)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_json", full)
        with pytest.raises(OSError, match="disk of .* is full.*run the same command again") as refused:
            build_store(**arguments)
    assert one_line(refused.value) == str(refused.value)  # which names the remedy already
    assert not list((tmp_path / "s").rglob("*.tmp"))
    assert build_store(**arguments)["documents"] == 40


def test_documents_without_tokens_are_dropped_and_counted(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a b\n\n\n\u200b\n\nc d\n", encoding="utf-8")
    manifest = build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s")
    assert manifest["documents"] == 2
    assert manifest["dropped"] == {"empty_documents": 1, "empty_sentences": 1}


def test_replaced_bytes_are_counted_in_the_manifest(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"ok\ncaf\xe9\nok\n")
    with pytest.raises(ValueError, match="line 2: byte 0xe9"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s")
    manifest = build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", reading=Reading(errors="replace"))
    assert manifest["repaired"] == {"undecodable_lines": 1} and manifest["sentences"] == 3


def test_zero_examples_is_an_error(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n\n")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match="0 examples from 2 files"):
        build_store(f"{tmp_path}/?.txt", tokenizer, tmp_path / "s")
    assert not (tmp_path / "s/manifest.json").exists()
    with pytest.raises(ValueError, match="0 examples from memory"):
        build_store(None, tokenizer, tmp_path / "m", documents=[])


def test_blank_line_after_every_sentence_stops_with_the_explanation(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n\n".join(f"this is sentence {i}" for i in range(20)))
    with pytest.raises(ValueError, match="100% of the next-sentence pairs.*blank line after every"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", heldout_fraction=0)
    manifest = build_store(
        tmp_path / "a.txt", tokenizer, tmp_path / "s", heldout_fraction=0, max_random_share=1.0, overwrite=True
    )
    assert manifest["random_share"] == manifest["one_sentence_share"] == 1.0


def test_lines_that_are_whole_paragraphs_stop_too(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(20, sentences=(2, 5), words=(200, 300)))
    with pytest.raises(ValueError, match="fill a row of 128 tokens.*format=prose"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s")


def test_a_build_over_a_limit_goes_on_with_its_shards_once_the_limit_is_raised(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{i % 90} w{i % 7} w{i}" for i in range(400)))
    arguments = dict(patterns=tmp_path / "a.txt", tokenizer=tokenizer, max_unknown_rate=1.0)
    with pytest.raises(ValueError, match="raise --max_random_share"):
        build_store(**arguments, out_dir=tmp_path / "s", shard=(0, 1))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "s/shards").iterdir()}
    with pytest.raises(ValueError, match=r"input or settings:\n  settings.split_lines: null there, 3 now\.\nChoose"):
        build_store(**arguments, out_dir=tmp_path / "s", max_random_share=1.0, split_lines=3)
    manifest = build_store(**arguments, out_dir=tmp_path / "s", max_random_share=1.0)
    assert manifest["settings"]["max_random_share"] == 1.0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s/shards").iterdir()} == made
    build_store(**arguments, out_dir=tmp_path / "t", max_random_share=1.0)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "t")


def test_a_build_that_was_refused_gives_way_to_other_input_or_settings(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{i % 90} w{i % 7} w{i}" for i in range(400)))
    with pytest.raises(ValueError, match="raise --max_random_share"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", max_unknown_rate=1.0)
    (tmp_path / "a.txt").write_text("\n".join(f"w{i % 90} w{i % 7} w{i}" for i in range(400)))
    again = dict(max_unknown_rate=1.0, split_lines=2, max_unseen_share=1.0)
    for directory in ("s", "t"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / directory, **again)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "t")
    with pytest.raises(ValueError, match="holds a token store of other input or settings"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", max_unknown_rate=1.0)


def test_a_high_unknown_rate_stops(tmp_path, make_tokenizer):
    lower_case_only = make_tokenizer(words=["the", "cat", "sat"])
    (tmp_path / "a.txt").write_text("THE CAT SAT\nTHE CAT\nSAT\n")
    with pytest.raises(ValueError, match=r"100\.0% of 6 tokens are unknown.*do_lower_case"):
        build_store(tmp_path / "a.txt", lower_case_only, tmp_path / "s")
    (tmp_path / "a.txt").write_text("the cat sat\n" * 20 + "dog\n")
    manifest = build_store(tmp_path / "a.txt", lower_case_only, tmp_path / "t")
    assert manifest["unknown_rate"] == pytest.approx(1 / 61)


@pytest.mark.parametrize("wrong", [-1, 1000, 1 << 16])
def test_ids_that_the_vocabulary_does_not_have_are_refused(tmp_path, make_tokenizer, wrong):
    tokenizer = make_tokenizer()
    tokenizer.encode_batch = lambda texts: [[7, wrong] for _ in texts]
    with pytest.raises(ValueError, match=rf"ids from .*{wrong}.* has 1000 entries"):
        build_store(None, tokenizer, tmp_path / "s", documents=[["a b"]])


def test_heldout_documents_are_chosen_by_their_text(tmp_path, tokenizer, make_tokenizer, documents):
    docs = documents(400, sentences=(2, 4), words=(3, 6))

    def heldout(name, docs, tokenizer):
        build_store(None, tokenizer, tmp_path / name, documents=docs, heldout_fraction=0.2)
        return [[len(s) for s in d] for d in TokenStore(tmp_path / name, "heldout").documents()]

    first = heldout("a", docs, tokenizer)
    assert sorted(first) == sorted(heldout("b", docs[::-1], make_tokenizer(vocab_size=70_000)))
    # Binomial(400, 0.2): mean 80, standard deviation 8.
    assert abs(len(first) - 80) < 4 * 8


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_either_split_has_a_document_where_there_are_two_short_ones(tmp_path, tokenizer, fraction):
    documents = [["one sentence", "two", "three"], ["another one", "its next"]]
    manifest = build_store(None, tokenizer, tmp_path / "s", documents=documents, heldout_fraction=fraction)
    assert [manifest["splits"][s]["documents"] for s in stores.SPLITS] == [1, 1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_sentences_of_few_documents_are_held_out(tmp_path, tokenizer, documents, count):
    docs = documents(count, sentences=(30, 40))
    manifest = build_store(None, tokenizer, tmp_path / "s", documents=docs, shard_bytes=1000, heldout_fraction=0.1)
    assert manifest["documents"] == count
    train, heldout = [[*TokenStore(tmp_path / "s", split).documents()] for split in stores.SPLITS]
    for document, first, last in zip(docs, train, heldout, strict=True):
        assert len(last) == round(0.1 * len(document))
        assert [s.tolist() for s in [*first, *last]] == tokenizer.encode_batch(document)


@pytest.mark.parametrize("fraction", [0.01, 0.1])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 20, 49, 60])
def test_about_as_much_is_held_out_as_asked_for_at_any_number_of_documents(
    tmp_path, tokenizer, documents, count, fraction
):
    docs = documents(count, sentences=(100, 120))
    splits = build_store(None, tokenizer, tmp_path / "s", documents=docs, heldout_fraction=fraction)["splits"]
    tokens = [splits[split]["tokens"] for split in stores.SPLITS]
    assert 0.5 * fraction < tokens[1] / sum(tokens) < fraction + 0.05
    assert sum(tokens) == sum(map(len, itertools.chain.from_iterable(map(tokenizer.encode_batch, docs))))
    if fraction * count < 0.2:  # one is too few, and two are far too much
        assert splits["heldout"]["documents"] == count
    elif count > 40:  # whole ones
        assert splits["train"]["documents"] + splits["heldout"]["documents"] == count


def test_a_short_document_beside_a_long_one_is_trained_on(tmp_path, tokenizer, documents):
    docs = [["one sentence", "two", "three"], *documents(1, sentences=(30, 40))]
    splits = build_store(None, tokenizer, tmp_path / "s", documents=docs)["splits"]
    assert [splits[s]["documents"] for s in stores.SPLITS] == [2, 1] and splits["heldout"]["sentences"] == 2


def test_identical_documents_are_removed_on_request(tmp_path, tokenizer, documents):
    docs = documents(10)
    twice = docs + docs[:4]
    manifest = build_store(
        None, tokenizer, tmp_path / "s", documents=twice, heldout_fraction=0, deduplicate=True, shard_bytes=3000
    )
    assert manifest["dropped"] == {"duplicate_documents": 4}
    build_store(None, tokenizer, tmp_path / "once", documents=docs, heldout_fraction=0)
    for got, expected in zip(all_documents(tmp_path / "s"), all_documents(tmp_path / "once"), strict=True):
        assert np.array_equal(np.concatenate(got), np.concatenate(expected))


def test_max_tokens_stops_at_the_same_document_for_any_workers(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(100))
    for workers in (1, 3):
        build_store(
            tmp_path / "a.txt",
            tokenizer,
            tmp_path / f"s{workers}",
            max_tokens=9000,
            shard_bytes=10_000,
            workers=workers,
            heldout_fraction=0,
        )
    manifests = [json.loads((tmp_path / f"s{w}/manifest.json").read_text()) for w in (1, 3)]
    assert manifests[0] == manifests[1]
    lengths = [sum(map(len, d)) for d in TokenStore(tmp_path / "s1").documents()]
    assert sum(lengths[:-1]) < 9000 <= sum(lengths)


def test_large_vocabularies_take_four_bytes(tmp_path, make_tokenizer, documents):
    for size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        tokenizer = make_tokenizer(vocab_size=size)
        docs = documents(3)
        build_store(None, tokenizer, tmp_path / dtype, documents=docs, heldout_fraction=0)
        assert TokenStore(tmp_path / dtype).document(0)[0].dtype == dtype
        assert TokenStore(tmp_path / dtype).document(0)[0].tolist() == tokenizer.encode(docs[0][0])


def test_a_finished_build_is_returned_as_it_is(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(10))
    seen = []
    arguments = (tmp_path / "a.txt", tokenizer, tmp_path / "s")
    first = build_store(*arguments, progress=seen.append)
    assert seen[-1].shards_done == seen[-1].shards and seen[-1].eta_seconds == 0
    before = (tmp_path / "s/manifest.json").stat().st_mtime_ns
    assert build_store(*arguments) == json.loads(json.dumps(first))
    assert (tmp_path / "s/manifest.json").stat().st_mtime_ns == before


def test_in_memory_documents_never_replace_a_store_unasked(tmp_path, tokenizer, documents):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(5))
    with pytest.raises(ValueError, match="holds a token store"):
        build_store(None, tokenizer, tmp_path / "s", documents=documents(6))
    with pytest.raises(ValueError, match="is a string"):
        build_store(None, tokenizer, tmp_path / "t", documents=["not a list of sentences"])


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "0 examples"),
        (b"a sentence .\n\n" * 300, "raise --max_random_share"),
        (b"caf\xe9\n", "not valid UTF-8"),
        (b"\xf0\x9f\x92\xa9\n", "unknown to the tokenizer"),
    ],
)
def test_a_store_stays_whole_where_the_one_to_replace_it_is_refused(tmp_path, make_tokenizer, content, words):
    tokenizer = make_tokenizer(words=["a", "sentence", "."])
    (tmp_path / "a.txt").write_text("a sentence .\na sentence .\n")
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s")
    before = files_of(tmp_path / "s")
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", overwrite=True)
    assert files_of(tmp_path / "s") == before


def test_a_killed_build_that_replaces_a_store_leaves_it_and_goes_on(tmp_path, tokenizer, documents, text_file):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(5))
    before = files_of(tmp_path / "s")
    text_file(tmp_path / "a.txt", documents(40))
    arguments = dict(patterns=tmp_path / "a.txt", tokenizer=tokenizer, shard_bytes=10_000)

    def kill(state):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(**arguments, out_dir=tmp_path / "s", overwrite=True, progress=kill)
    assert files_of(tmp_path / "s").items() >= before.items()
    shard = (tmp_path / "s/new/shards/00000.json").stat().st_mtime_ns
    build_store(**arguments, out_dir=tmp_path / "s", overwrite=True)
    assert (tmp_path / "s/shards/00000.json").stat().st_mtime_ns == shard
    build_store(**arguments, out_dir=tmp_path / "t")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "t") and not (tmp_path / "s/new").exists()


def test_machines_that_share_a_build_do_not_overwrite(tmp_path, tokenizer, documents, text_file):
    text_file(tmp_path / "a.txt", documents(20))
    with pytest.raises(ValueError, match="does not go with overwrite"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", shard=(0, 2), overwrite=True)


def test_a_store_copied_in_part_is_refused(tmp_path, tokenizer, documents):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(5))
    path = tmp_path / "s/shards/00000.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="damaged or was copied in part"):
        TokenStore(tmp_path / "s")


_MEMORY = """
import resource, sys
sys.path.insert(0, {here!r})
import conftest
from bertjax.data.build import build_store
from bertjax.data.splits import BuildSettings
from bertjax.data.sources import Reading
class Fast(conftest.WordTokenizer):
    def encode_batch(self, texts):
        return [[5 + len(w) for w in t.split()] for t in texts]
if __name__ == "__main__":
    build_store(sys.argv[1], Fast(), sys.argv[2], workers=int(sys.argv[3]), heldout_fraction=0, max_duplicate_share=1)
    # Its own ru_maxrss begins with what the process that starts it had.
    own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path, documents):
    block = "\n\n".join("\n".join(d) for d in documents(300)) + "\n\n"
    (tmp_path / "run.py").write_text(_MEMORY.format(here=str(pathlib.Path(__file__).parent)))
    peaks = {}
    for megabytes in (10, 200):
        with open(tmp_path / f"{megabytes}.txt", "w") as file:
            for _ in range(megabytes * 1_000_000 // len(block)):
                file.write(block)
        for workers in (1, 4):
            out = subprocess.run(
                [
                    sys.executable,
                    tmp_path / "run.py",
                    tmp_path / f"{megabytes}.txt",
                    tmp_path / f"s{megabytes}-{workers}",
                    str(workers),
                ],
                env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
                check=True,
                stdout=subprocess.PIPE,  # what it says of an error is shown
                text=True,
            )
            peaks[megabytes, workers] = int(out.stdout)
    assert files_of(tmp_path / "s200-1") == files_of(tmp_path / "s200-4")
    for workers in (1, 4):  # the largest process, MiB
        assert peaks[200, workers] < peaks[10, workers] + 100 < 400, peaks


def test_home_is_understood_and_a_damaged_manifest_is_named(tmp_path, tokenizer, documents, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    build_store(None, tokenizer, "~/s", documents=documents(5))
    assert TokenStore("~/s").num_tokens == TokenStore(tmp_path / "s").num_tokens > 0
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        TokenStore("~/s")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"shard_bytes": 0},
        {"max_unknown_rate": float("nan")},
        {"max_random_share": -0.1},
        {"max_unknown_rate": 5},
        {"heldout_fraction": 1.0},
    ],
)
def test_settings_that_no_build_can_have_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        BuildSettings(**settings)


def test_what_is_no_store_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: no token store here"):
        TokenStore(tmp_path / "file")
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        TokenStore(tmp_path)
