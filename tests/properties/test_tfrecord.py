"""TFRecords and their examples: as Google's protocol buffers read them, or refused."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.bert_records import FIELDS, ExampleReader, Records
from bertjax.formats.tfrecord import NO_EXAMPLE, parse_example
from tests.tfrecords import make_example, read_records, write_records

T, P, V = 8, 3, 300
FIRST = make_example(
    {
        "input_ids": [2, 5, 6, 3, 7, 3, 0, 0],
        "input_mask": [1] * 6 + [0] * 2,
        "segment_ids": [0] * 4 + [1] * 2 + [0] * 2,
        "masked_lm_positions": [1, 4, 0],
        "masked_lm_ids": [5, 7, 0],
        "masked_lm_weights": np.array([1, 1, 0], np.float32),
        "next_sentence_labels": [1],
    }
)


class Vocabulary:
    """As much of a tokenizer as the records are checked against."""

    vocab_size, pad_id, cls_id = V, 0, 2


def message_types():
    """tf.train.Example, declared for Google's own runtime."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    F = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name, *fields, parent=file.message_type):
        made = parent.add(name=name)
        for number, field, kind, repeated, type_name in fields:
            made.field.add(
                name=field,
                number=number,
                type=kind,
                type_name=type_name,
                label=F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL,
            )
        return made

    for name, kind in (("BytesList", F.TYPE_BYTES), ("FloatList", F.TYPE_FLOAT), ("Int64List", F.TYPE_INT64)):
        message(name, (1, "value", kind, True, None))
    feature = message(
        "Feature",
        *(
            (i, name.lower(), F.TYPE_MESSAGE, False, f".t.{name}")
            for i, name in enumerate(("BytesList", "FloatList", "Int64List"), 1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
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
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = message_types()


def reference(record):
    """The lists of numbers by name, or None where the bytes are not an example."""
    from google.protobuf.message import DecodeError

    try:
        features = Example.FromString(record).features.feature
    except (DecodeError, UnicodeDecodeError):
        return None
    lists = {}
    for name, feature in features.items():
        if feature.WhichOneof("kind") in ("floatlist", "int64list"):
            kind = feature.WhichOneof("kind")
            lists[name] = np.array(getattr(feature, kind).value, np.float32 if kind == "floatlist" else np.int64)
    return lists


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, content):
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def several(strategy, most=3):
    return st.lists(strategy, max_size=most).map(b"".join)


integers = st.one_of(st.integers(0, 9), st.integers(0, V + 9), st.integers(0, 2**64 - 1))
others = st.one_of(  # fields that nobody asked for
    st.builds(field, st.integers(4, 99), st.one_of(integers, st.binary(max_size=3))),
    st.builds(lambda n, b: varint(n << 3 | 1) + b, st.integers(1, 9), st.binary(min_size=8, max_size=8)),
)
integer_lists = several(
    st.one_of(
        st.builds(field, st.just(1), integers),
        others,
        st.lists(integers, max_size=T).map(lambda v: field(1, b"".join(map(varint, v)))),
    )
)
float_lists = several(
    st.one_of(
        st.lists(st.floats(width=32), max_size=P).map(lambda v: field(1, np.array(v, "<f4").tobytes())),
        st.floats(width=32).map(lambda v: varint(1 << 3 | 5) + np.array(v, "<f4").tobytes()),
        others,
    )
)
features = several(
    st.one_of(
        integer_lists.map(lambda b: field(3, b)),
        float_lists.map(lambda b: field(2, b)),
        st.binary(max_size=4).map(lambda b: field(1, field(1, b))),
        others,
    ),
    2,
)
names = st.sampled_from([*FIELDS, "other", ""]).map(str.encode)
entries = st.one_of(
    st.builds(lambda n, f: field(1, field(1, n) + field(2, f)), names, features),
    st.builds(
        lambda n, f: field(1, n + f), names.map(lambda n: field(1, n)), several(features.map(lambda f: field(2, f)), 2)
    ),
)
examples = st.one_of(
    several(entries).map(lambda b: field(1, b)),
    several(st.one_of(several(entries).map(lambda b: field(1, b)), others), 3),
)


VARIANTS = 20  # of what hypothesis draws, which takes longer than reading one


def broken(data, seed):
    """Copies of the bytes, each with a few others, fewer or more."""
    generator = random.Random(seed)
    for _ in range(VARIANTS):
        changed = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            place = generator.randint(0, len(changed))
            how = generator.randrange(4)
            if how < 2:
                changed[place : place + 1] = generator.choice(
                    [generator.randbytes(1), bytes([generator.randrange(32)])]
                )
            elif how == 2:
                del changed[place : place + generator.randint(1, 9)]
            else:
                changed[place:place] = generator.randbytes(generator.randint(1, 3))
        yield bytes(changed)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert found[name].tobytes() == values.tobytes() or np.array_equal(found[name], values, equal_nan=True)


@given(examples)
def test_whole_examples_are_read_as_protocol_buffers_read_them(record):
    same(parse_example(record), reference(record))


@given(st.one_of(examples, st.binary(max_size=60)), st.integers(0, 2**32))
def test_broken_examples_are_refused_or_read_as_protocol_buffers_read_them(record, seed):
    for changed in broken(record, seed):
        try:
            found = parse_example(changed)
        except ValueError:
            continue
        expected = reference(changed)
        assert expected is not None
        same(found, expected)


@st.composite
def nearly_right(draw):
    """The original's fields with a few values of any size, sometimes also broken otherwise."""
    values = {name: array.copy() for name, array in parse_example(FIRST).items()}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(values)))
        array = values[name]
        if not len(array):
            continue
        place = draw(st.integers(0, len(array) - 1))
        if array.dtype.kind == "f":
            array[place] = draw(st.one_of(st.floats(0, 1, width=32), st.floats(width=32)))
        elif draw(st.integers(0, 9)):
            array[place] = draw(st.one_of(st.integers(0, 1), st.integers(-2, V + 2), st.integers(-(2**63), 2**63 - 1)))
        else:
            values[name] = array[:place]
    names = draw(st.permutations(sorted(values)))
    return make_example({name: values[name] for name in names}) + draw(
        st.sampled_from([b"", b"", field(9, b"x"), field(1, field(1, field(1, b"other")))])
    )


def in_range(example):
    limits = dict(zip(FIELDS, (V, 2, 2, T, V, None, 2), strict=True))
    lengths = dict(zip(FIELDS, (T, T, T, P, P, P, 1), strict=True))
    for name, limit in limits.items():
        values = example.get(name, np.empty(0))
        if len(values) != lengths[name] or (values.dtype.kind == "f") != (limit is None):
            return False
        if not ((values >= 0) & (values <= 1 if limit is None else values < limit)).all():
            return False
    return True


def check_row(record):
    """The reader accepts what protocol buffers read and is in range, as they read it."""
    batch = {
        ours: np.full((1, length), 77, np.float32 if ours == "mlm_weights" else np.int32)
        for ours, length in zip(FIELDS.values(), READER.lengths, strict=True)
    }
    batch["nsp_weights"] = np.zeros((1, 1), np.float32)
    expected = reference(record)
    right = expected is not None and in_range(expected)
    try:
        READER.read(np.frombuffer(record, np.uint8), "FILE, record 3", batch, 0)
    except ValueError as error:
        # Entries with fields that no writer makes are refused, though readers skip them.
        assert not right or NO_EXAMPLE in str(error)
        assert str(error).startswith("FILE, record 3: ")
    else:
        assert right
        for theirs, ours in FIELDS.items():
            assert np.array_equal(batch[ours][0], expected[theirs])


@given(nearly_right())
def test_rows_have_what_protocol_buffers_read_or_the_record_is_refused(record):
    check_row(record)


@given(nearly_right(), st.integers(0, 2**32))
def test_broken_records_are_refused_or_rows_have_what_protocol_buffers_read(record, seed):
    for changed in broken(record, seed):
        check_row(changed)


READER = ExampleReader(FIRST, "FILE", Vocabulary())


@pytest.fixture(scope="module")
def path(folder):
    """Of a file that is written in each example."""
    return folder / "a.tfrecord"


@given(st.lists(st.binary(max_size=40), max_size=4), st.booleans())
def test_records_come_back(path, records, compressed):
    write_records(path, records, compressed)
    assert read_records(path) == records


@given(st.data())
def test_a_damaged_file_is_refused_by_name_or_has_a_part_of_its_records(path, data):
    compressed = data.draw(st.booleans())
    write_records(path, [FIRST] * 3, compressed)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "zero", "append"]))
    if how == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[place:]
    elif how == "zero":
        content[place : place + 20] = bytes(len(content[place : place + 20]))
    else:
        content += data.draw(st.binary(min_size=1, max_size=20))
    path.write_bytes(content)
    try:
        records = Records(path, path.parent / "cache", Vocabulary())
        numbers = range(len(records))
        records.read(numbers, numbers, records.empty(len(records)))
        plain = read_records(path)
    except ValueError as error:
        assert path.name in str(error)
    else:  # cut between two records, or nothing that matters in the head of a GZIP file
        assert plain == [FIRST] * len(records) and 1 <= len(records) <= 3
