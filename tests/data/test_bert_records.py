import struct

import numpy as np
import pytest

from bertjax.data.batches import EndlessBatches, FiniteBatches, Share
from bertjax.data.bert_records import RecordRows, Records, check_lengths, split_records
from bertjax.formats.crc32c import masked_crc32c
from bertjax.formats.tfrecord import parse_example
from tests.tfrecords import make_example, read_records, write_records

T, P = 16, 3


def example(number, seq_length=T, predictions=P):
    n = 5 + number % 9
    pad = [0] * (seq_length - n)
    return make_example(
        {
            "input_ids": [2, *range(1000 + number, 1000 + number + n - 2), 3, *pad],
            "input_mask": [1] * n + pad,
            "segment_ids": [0] * (n - 2) + [1, 1] + pad,
            "masked_lm_positions": [1, 2] + [0] * (predictions - 2),
            "masked_lm_ids": [300 + number, 7] + [0] * (predictions - 2),
            "masked_lm_weights": np.array([1, 1] + [0] * (predictions - 2), np.float32),
            "next_sentence_labels": [number % 2],
        }
    )


def training(records, batch_size, seed=0, numbers=None, **process):
    records = records if isinstance(records, Records) else Records(records)
    numbers = np.arange(len(records)) if numbers is None else numbers
    return EndlessBatches([RecordRows(records, numbers, seed)], Share(batch_size, **process), seed)


def evaluation(records, batch_size, numbers=None, max_rows=None, **process):
    numbers = np.arange(len(records)) if numbers is None else numbers
    return FiniteBatches(RecordRows(records, numbers), Share(batch_size, **process), max_rows)


def test_crc32c_of_published_vectors():
    # RFC 3720, appendix B.4: 32 bytes of zeros, of ones, ascending.
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    # "123456789" is the usual check value of the polynomial; its length is not a multiple of 8.
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_example_bytes_against_protocol_buffers():
    # Message types declared here, so that Google's own runtime is the oracle.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    F = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")

    def message(name, *fields, parent=file.message_type):
        m = parent.add(name=name)
        for number, field, kind, repeated, type_name in fields:
            m.field.add(
                name=field,
                number=number,
                type=kind,
                type_name=type_name,
                label=F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL,
            )
        return m

    message("FloatList", (1, "value", F.TYPE_FLOAT, True, None))
    message("Int64List", (1, "value", F.TYPE_INT64, True, None))
    message(
        "Feature",
        (2, "float_list", F.TYPE_MESSAGE, False, ".t.FloatList"),
        (3, "int64_list", F.TYPE_MESSAGE, False, ".t.Int64List"),
    )
    features = message("Features", (1, "feature", F.TYPE_MESSAGE, True, ".t.Features.Entry"))
    entry = message(
        "Entry",
        (1, "key", F.TYPE_STRING, False, None),
        (2, "value", F.TYPE_MESSAGE, False, ".t.Feature"),
        parent=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", (1, "features", F.TYPE_MESSAGE, False, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    Example = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))

    ours = Example.FromString(make_example({"a": np.array([1, 300, -5, 2**40]), "w": np.array([0.5, 1.0], np.float32)}))
    assert list(ours.features.feature["a"].int64_list.value) == [1, 300, -5, 2**40]
    assert list(ours.features.feature["w"].float_list.value) == [0.5, 1.0]
    theirs = Example()
    theirs.features.feature["ids"].int64_list.value.extend([0, 127, 128, 30521, -1])
    theirs.features.feature["f"].float_list.value.extend([1.5])
    parsed = parse_example(theirs.SerializeToString())
    assert parsed["ids"].tolist() == [0, 127, 128, 30521, -1] and parsed["f"].tolist() == [1.5]


def test_unpacked_lists_are_read():
    # proto2 writers may give each number a field of its own: tag 8, varint.
    values = bytes([8, 5, 8, 0xAC, 2])
    feature = bytes([0x1A, len(values)]) + values
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    group = bytes([0x0A, len(entry)]) + entry
    assert parse_example(bytes([0x0A, len(group)]) + group)["a"].tolist() == [5, 300]


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
def test_records_come_back(tmp_path, name):
    records = [b"", b"x" * 1000, bytes(range(256))]
    write_records(tmp_path / name, records)
    assert read_records(tmp_path / name) == records
    plain = struct.pack("<Q", 0)
    assert (tmp_path / name).read_bytes()[:8] == plain or name.endswith("gz")


def test_damage_is_found(tmp_path):
    write_records(tmp_path / "a", [example(i) for i in range(4)])
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(data[:-3])
    with pytest.raises(ValueError, match="cut off in record 3"):
        training(tmp_path / "b", 2)
    flipped = bytearray(data)
    flipped[40] ^= 1
    (tmp_path / "b").write_bytes(flipped)
    with pytest.raises(ValueError, match="record 0 is damaged"):
        training(tmp_path / "b", 2)
    (tmp_path / "b").write_text("this is text, not a record file")
    with pytest.raises(ValueError, match="is it a TFRecord file"):
        training(tmp_path / "b", 2)


def test_batches_of_plain_and_gzip_files_have_each_example_once_an_epoch(tmp_path):
    write_records(tmp_path / "0.tfrecord", map(example, range(20)))
    write_records(tmp_path / "1.tfrecord.gz", map(example, range(20, 33)))
    batches = training(f"{tmp_path}/*", 11, seed=1)
    assert batches.corpora[0].rows_per_epoch == 33
    first = [batches[s] for s in range(3)]
    assert sorted(np.concatenate([b["mlm_labels"][:, 0] for b in first])) == list(range(300, 333))
    shapes = {k: (v.shape, v.dtype.name) for k, v in first[0].items()}
    assert shapes["mlm_weights"] == ((11, P), "float32")
    assert shapes["input_ids"] == ((11, T), "int32") and shapes["nsp_labels"] == ((11, 1), "int32")
    second = np.concatenate([batches[s]["mlm_labels"][:, 0] for s in range(3, 6)])
    assert sorted(second) == list(range(300, 333))
    assert list(second) != list(np.concatenate([b["mlm_labels"][:, 0] for b in first]))
    thirds = [training(f"{tmp_path}/*", 33, seed=1, process_index=i, process_count=3)[0] for i in range(3)]
    assert np.array_equal(
        np.concatenate([b["input_ids"] for b in thirds]), np.concatenate([b["input_ids"] for b in first])
    )


def test_the_compiled_reader_agrees_with_the_plain_one(tmp_path):
    write_records(tmp_path / "a", map(example, range(40)))
    batches = training(tmp_path / "a", 40)
    got = {row["mlm_labels"][0]: row for row in ({k: v[i] for k, v in batches[0].items()} for i in range(40))}
    for record in read_records(tmp_path / "a"):
        plain = parse_example(record)
        row = got[plain["masked_lm_ids"][0]]
        for ours, theirs in (
            ("input_ids",) * 2,
            ("attention_mask", "input_mask"),
            ("token_type_ids", "segment_ids"),
            ("mlm_positions", "masked_lm_positions"),
            ("mlm_labels", "masked_lm_ids"),
            ("mlm_weights", "masked_lm_weights"),
            ("nsp_labels", "next_sentence_labels"),
        ):
            assert row[ours].tolist() == plain[theirs].tolist()


def test_other_lengths_than_the_files_are_refused_naming_both(tmp_path):
    write_records(tmp_path / "a", [example(0, 128, 20)])
    with pytest.raises(ValueError, match="max_seq_length=128, training is set to 512"):
        check_lengths(Records(tmp_path / "a"), 512, 20)
    with pytest.raises(ValueError, match="max_predictions_per_seq=20, training is set to 76"):
        check_lengths(Records(tmp_path / "a"), 128, 76)
    write_records(tmp_path / "b", [example(0, 128, 20), example(1, 64, 20)])
    with pytest.raises(ValueError, match="a record has .*'input_ids': 64.*first record.*128"):
        training(tmp_path / "b", 2)[0]


def test_no_records_and_foreign_records_are_refused(tmp_path):
    write_records(tmp_path / "a", [])
    with pytest.raises(ValueError, match="0 examples from 1 files"):
        training(tmp_path / "a", 1)
    write_records(tmp_path / "b", [make_example({"image": [1]})])
    with pytest.raises(ValueError, match="no field input_ids.*image"):
        training(tmp_path / "b", 1)


def changed_example(**fields):
    """Example 1, whose fields have other values at some places."""
    values = {name: array.copy() for name, array in parse_example(example(1)).items()}
    for name, (place, value) in fields.items():
        values[name][place] = value
    return make_example(values)


@pytest.mark.parametrize(
    "field, place, value",
    [
        ("input_ids", 3, -5),
        ("input_ids", 3, 2000),
        ("input_ids", 3, 2**32 + 7),
        ("input_mask", 0, 2),
        ("input_mask", 0, -1),
        ("segment_ids", 4, 9),
        ("segment_ids", 4, -1),
        ("masked_lm_positions", 1, T),
        ("masked_lm_positions", 1, -1),
        ("masked_lm_ids", 0, 2**31),
        ("masked_lm_ids", 0, -1),
        ("masked_lm_weights", 0, 2.0),
        ("masked_lm_weights", 0, np.nan),
        ("masked_lm_weights", 0, -1.0),
        ("next_sentence_labels", 0, 7),
        ("next_sentence_labels", 0, -1),
    ],
)
def test_a_value_that_its_field_cannot_have_names_file_record_and_field(tmp_path, field, place, value):
    records = [changed_example(**{field: (place, value)}), example(2)]
    write_records(tmp_path / "a", map(example, range(3)))
    write_records(tmp_path / "b", [example(3), *records])
    records = Records(f"{tmp_path}/a,{tmp_path}/b", tokenizer=Vocabulary(2000))
    with pytest.raises(ValueError, match=rf"/b, record 1: {field} has the .*{value}, "):
        records.check()
    with pytest.raises(ValueError, match=rf"/b, record 1: {field} has the .*{value}, "):
        training(records, 6)[0]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"random bytes, no message",
        bytes(100),
        b"\xff" * 100,
        example(1)[:-1],
        b"\x0a\x80" * 9,
        bytes(np.random.default_rng(1).integers(0, 256, 500, np.uint8)),
    ],
)
def test_records_that_are_no_examples_are_refused(tmp_path, content, first):
    write_records(tmp_path / "a", [content, example(0)] if first else [example(0), content])
    with pytest.raises(ValueError, match="/a(, record 0)?: " if first else "/a, record 1: "):
        Records(tmp_path / "a").check()


def test_fields_of_another_kind_are_refused(tmp_path):
    values = parse_example(example(0))
    for name, kind in (("masked_lm_weights", np.int64), ("input_ids", np.float32)):
        other = make_example(values | {name: values[name].astype(kind)})
        write_records(tmp_path / name, [example(1), other])
        with pytest.raises(ValueError, match=f"record 1: {name} is a list of"):
            Records(tmp_path / name).check()


def test_further_fields_and_unpacked_numbers_are_read_as_protocol_buffers_are(tmp_path):
    values = parse_example(example(1))
    more = make_example(values | {"seen": [1, 2]})
    labels = bytes([8, 1])  # one varint with a field of its own
    feature = bytes([0x1A, len(labels)]) + labels
    name = b"next_sentence_labels"
    entry = bytes([0x0A, len(name)]) + name + bytes([0x12, len(feature)]) + feature
    del values["next_sentence_labels"]
    unpacked = make_example(values) + bytes([0x0A, len(entry) + 2, 0x0A, len(entry)]) + entry
    write_records(tmp_path / "a", [example(1), more, unpacked])
    batch = evaluation(Records(tmp_path / "a"), 3)[0]
    for column in batch.values():
        assert np.array_equal(column, np.repeat(column[:1], 3, axis=0))


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[:-9], lambda d: d[:60] + b"\x00" * 40 + d[100:], lambda d: d[:2] + b"\x07" + d[3:], lambda d: d[:15]],
)
def test_damaged_gzip_files_are_refused_by_name(tmp_path, damage):
    write_records(tmp_path / "a.gz", map(example, range(30)), compressed=True)
    data = (tmp_path / "a.gz").read_bytes()
    (tmp_path / "a.gz").write_bytes(damage(data))
    with pytest.raises(ValueError, match=r"a\.gz: .*(cut off|damaged)"):
        Records(tmp_path / "a.gz")


def test_a_length_of_which_little_is_there_takes_no_memory(tmp_path):
    length = struct.pack("<Q", 1 << 60)
    head = length + struct.pack("<I", masked_crc32c(length))
    (tmp_path / "a").write_bytes(head + b"few")
    with pytest.raises(ValueError, match="cut off in record 0"):
        Records(tmp_path / "a")
    write_records(tmp_path / "b", [example(0)])
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes() + head)
    with pytest.raises(ValueError, match="cut off in record 1"):
        Records(tmp_path / "b")


# --- what a training run needs ------------------------------------------------------------------


class Vocabulary:
    """As much of a tokenizer as the records are checked against."""

    pad_id, cls_id = 0, 2

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


def labels_of(batches):
    return np.concatenate([b["mlm_labels"][b["nsp_weights"][:, 0] > 0, 0] for b in batches])


def test_held_out_records_are_disjoint_from_the_trained_ones_and_spread(tmp_path):
    write_records(tmp_path / "a", map(example, range(50)))
    records = Records(tmp_path / "a")
    trained, heldout = split_records(len(records), 0.1)
    assert heldout.tolist() == [5, 15, 25, 35, 45]
    batches = training(records, 9, numbers=trained)
    assert batches.corpora[0].rows_per_epoch == 45 and batches.epochs(10) == 2
    seen = set(labels_of([batches[s] for s in range(5)]))
    kept_out = set(labels_of(evaluation(records, 2, numbers=heldout)))
    assert len(seen) == 45 and kept_out == {305, 315, 325, 335, 345} and not seen & kept_out
    for few in (2, 3):
        assert [len(part) for part in split_records(few, 0.9)] == [1, few - 1]
    with pytest.raises(ValueError, match="1 record cannot be split"):
        split_records(1, 0.1)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_an_evaluation_has_each_record_once_whatever_the_processes(tmp_path, processes):
    write_records(tmp_path / "a", map(example, range(20)))
    records = Records(tmp_path / "a", tokenizer=Vocabulary(2000))
    parts = [evaluation(records, 6, process_index=i, process_count=processes) for i in range(processes)]
    assert {len(part) for part in parts} == {4}
    batches = [b for part in parts for b in part]
    assert sorted(labels_of(batches)) == list(range(300, 320))
    assert sum(b["nsp_weights"].sum() for b in batches) == 20
    assert sum(b["mlm_weights"].sum() for b in batches) == 40  # none in the rows that fill up
    few = list(evaluation(records, 6, max_rows=7))  # evenly spread, the rest of the last batch empty
    assert sorted(labels_of(few)) == [300 + number * 20 // 7 for number in range(7)]


def test_the_stream_after_a_step_is_that_of_any_number_of_processes(tmp_path):
    # As after a resume with other hosts: global batches 5.. with 1, 2 and 4 readers.
    write_records(tmp_path / "a.gz", map(example, range(30)), compressed=True)
    whole = training(tmp_path / "a.gz", 8, seed=3)
    for processes in (2, 4):
        parts = [
            training(tmp_path / "a.gz", 8, seed=3, process_index=i, process_count=processes) for i in range(processes)
        ]
        for step in (5, 6):
            for name, column in whole[step].items():
                assert np.array_equal(column, np.concatenate([p[step][name] for p in parts])), name


def test_gzip_files_are_unpacked_once_into_a_directory_that_is_kept(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_records(tmp_path / name / "a.gz", map(example, range(4)), compressed=True)
    records = Records(f"{tmp_path}/x/a.gz,{tmp_path}/y/a.gz", tmp_path / "cache")
    assert len(records) == 8  # the same name twice is two files
    unpacked = sorted((tmp_path / "cache").iterdir())
    before = [path.stat().st_mtime_ns for path in unpacked]
    Records(f"{tmp_path}/x/a.gz,{tmp_path}/y/a.gz", tmp_path / "cache")
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").iterdir())] == before
    write_records(tmp_path / "x" / "a.gz", map(example, range(6)), compressed=True)  # changed
    assert len(Records(f"{tmp_path}/x/a.gz", tmp_path / "cache")) == 6
    data = (tmp_path / "y" / "a.gz").read_bytes()
    (tmp_path / "y" / "cut.gz").write_bytes(data[:-20])
    with pytest.raises(ValueError, match=r"cut\.gz: .*cut off"):
        Records(tmp_path / "y" / "cut.gz", tmp_path / "cache")


def test_a_damaged_copy_of_a_gzip_file_is_named_with_the_remedy(tmp_path):
    write_records(tmp_path / "a.gz", map(example, range(4)), compressed=True)
    Records(tmp_path / "a.gz", tmp_path / "cache")
    (copy,) = (tmp_path / "cache").iterdir()
    copy.write_bytes(copy.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{copy} \(unpacked from .*a\.gz; delete it, and .*cut off in record 3"):
        Records(tmp_path / "a.gz", tmp_path / "cache")
    copy.unlink()
    assert len(Records(tmp_path / "a.gz", tmp_path / "cache")) == 4


def test_batches_travel_to_other_processes(tmp_path):
    import pickle

    write_records(tmp_path / "a", map(example, range(20)))
    batches = training(tmp_path / "a", 8, seed=1)
    sent = pickle.dumps(batches)
    assert len(sent) < 5000  # offsets, not the files
    for name, column in batches[7].items():
        assert np.array_equal(column, pickle.loads(sent)[7][name])


def test_another_vocabulary_is_refused(tmp_path):
    write_records(tmp_path / "a", [example(0), example(600)])
    assert len(Records(tmp_path / "a", tokenizer=Vocabulary(2000))) == 2
    smaller = Records(tmp_path / "a", tokenizer=Vocabulary(1400))
    with pytest.raises(ValueError, match="has the id 16.*1400 entries"):
        training(smaller, 2)[0]
    other = Vocabulary(2000)
    other.cls_id = 101
    with pytest.raises(ValueError, match=r"begins with id 2, but \[CLS\] is 101"):
        Records(tmp_path / "a", tokenizer=other)
