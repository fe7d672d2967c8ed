"""Model directories, odd and damaged: what is accepted is what the files hold, the rest is refused.

The files are Hugging Face's layout (with the names of transformers' state dicts, which a parity
test compares), torch's two formats and the index of TF1 checkpoints. No network is run: parameters
are compared array by array.
"""

import functools
import io
import json
import pathlib
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from bertjax.formats.arrays import read_safetensors
from bertjax.formats.torch_pickle import read_torch_pickle, torch_headers
from bertjax.interop import LoadError, open_source
from bertjax.interop.loading import TASKS, stored_parameters
from bertjax.interop.names import HUGGING_FACE
from bertjax.interop.tf1 import read_headers, read_variables
from bertjax.model import heads
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig
from tests.interop import tf1_writer

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "interop" / "golden"
SIZES = [
    dict(
        vocab_size=7,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        max_position_embeddings=5,
        type_vocab_size=2,
    ),
    dict(
        vocab_size=4,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=4,
        max_position_embeddings=4,
        type_vocab_size=1,
    ),
]
KINDS = ["features", "pretraining", "mlm", "next-sentence", "sequence-classification", "question-answering"]


@functools.cache
def names(size, task):
    """{path: (shape, name of transformers, transposed)} of a model."""
    config = BertConfig.from_dict(SIZES[size])
    shapes = flatten(heads.parameter_shapes(TASKS[task](config)))
    return {path: (leaf.shape, *HUGGING_FACE["bert"](path)) for path, leaf in shapes.items()}


@functools.cache
def stored(size, task):
    """A state dict of random arrays, as transformers would save it."""
    rng = np.random.default_rng(size)
    return {
        name: rng.normal(size=shape[::-1] if transposed else shape).astype(np.float32)
        for shape, name, transposed in names(size, task).values()
    }


def _old_layer_norm(state, pick):
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in state.items()
    }


def _one(change):
    """Applies `change(array)` to one array, `pick` says which."""

    def apply(state, pick):
        name = sorted(state)[pick % len(state)]
        return state | {name: change(state[name])}

    return apply


def _nan(array):
    array = array.astype(np.float64)
    array.reshape(-1)[-1:] = np.nan
    return array


def _renamed(old, new):
    def apply(state, pick):
        name = sorted(state)[pick % len(state)]
        return {(k.replace(old, new, 1) if k == name else k): v for k, v in state.items()}

    return apply


def _twice(state, pick):
    name = sorted(k for k in state if k.endswith("LayerNorm.weight"))
    return state | ({name[pick % len(name)].replace("weight", "gamma"): state[name[0]] * 2} if name else {})


def _without(state, pick):
    gone = sorted(state)[pick % len(state)]
    return {name: array for name, array in state.items() if name != gone}


def _tied(factor):
    def apply(state, pick):
        words = state.get("bert.embeddings.word_embeddings.weight")
        return state | ({} if words is None else {"cls.predictions.decoder.weight": words * factor})

    return apply


CHANGES = {
    "old names": _old_layer_norm,
    "parallel": lambda state, _: {f"module.{name}": array for name, array in state.items()},
    "bare": lambda state, _: {name.removeprefix("bert."): array for name, array in state.items()},
    "prefix": lambda state, _: {f"model.{name}": array for name, array in state.items()},
    "buffer": lambda state, _: state | {"bert.embeddings.position_ids": np.arange(5)[None]},
    "head": lambda state, _: state | {"crf.transitions": np.ones((2, 2), np.float32)},
    "part": lambda state, _: state | {"bert.adapter.weight": np.ones(3, np.float32)},
    "other head": lambda state, _: state | {"qa_outputs.bias": np.zeros(2, np.float32)},
    "tied": _tied(1),
    "untied": _tied(2),
    "twice": _twice,
    "without": _without,
    "renamed": _renamed("e", "x"),
    "nvidia": _renamed(".dense.", ".dense_act."),
    "float16": _one(lambda a: a.astype(np.float16)),
    "float64": _one(lambda a: a.astype(float)),
    "int": _one(lambda a: a.astype(np.int32)),
    "bool": _one(lambda a: a > 0),
    "bfloat16": _one(lambda a: a.astype(ml_dtypes.bfloat16)),
    "nan": _one(_nan),
    "transposed": _one(lambda a: np.ascontiguousarray(a.T)),
    "flat": _one(lambda a: a.reshape(-1)),
    "longer": _one(lambda a: np.concatenate([a, a])),
    "shorter": _one(lambda a: a[:-1]),
    "empty": _one(lambda a: a[:0]),
}
# Few numbers: each that is accepted is another network, whose parameters are traced.
JSON = st.recursive(
    st.sampled_from([None, True, False, -1, 0, 1, 2, 4, 2**30, 2**70, 0.5, 1e-5, float("nan"), "1e-5", "2", "gelu"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
KEYS = st.sampled_from(
    [
        *BertConfig.__dataclass_fields__,
        "model_type",
        "id2label",
        "label2id",
        "architectures",
        "tie_word_embeddings",
        "pruned_heads",
        "unknown_option",
        "position_embedding_type",
        "tokenizer_class",
        "torch_dtype",
        "_private",
    ]
)


def written(state):
    """The bytes of a safetensors file, by hand: names may be any, bfloat16 too."""
    types = {
        "float32": "F32",
        "float64": "F64",
        "float16": "F16",
        "bfloat16": "BF16",
        "int32": "I32",
        "int64": "I64",
        "bool": "BOOL",
    }
    header, data = {}, b""
    for name, array in state.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": types[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def meaning(state):
    """What a state dict says of the parameters, under today's names, as transformers takes it."""
    found = {}
    for name, array in state.items():
        name = name.removeprefix("module.")
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = f"bert.{name}"
        for old, new in (
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("dense_act", "dense"),
            ("LayerNorm.beta", "LayerNorm.bias"),
        ):
            name = name.replace(old, new)
        assert name not in found, f"{name} is there twice"
        found[name] = array
    words = "bert.embeddings.word_embeddings.weight"
    return {words: found.get("cls.predictions.decoder.weight")} | found


@given(
    size=st.integers(0, 1),
    saved=st.sampled_from(KINDS),
    asked=st.sampled_from(KINDS),
    changes=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 99)), max_size=2),
    keys=st.dictionaries(KEYS, JSON, max_size=1),
    fresh=st.booleans(),
)
@example(0, "pretraining", "pretraining", [("old names", 0), ("buffer", 0)], {}, False)
@example(0, "features", "question-answering", [("head", 0), ("float16", 3)], {}, True)
@example(1, "mlm", "mlm", [("tied", 0)], {"words": 3}, False)
@example(0, "features", "features", [], {"num_hidden_layers": 2**30}, False)
def test_every_parameter_is_the_files_or_the_directory_is_refused(folder, size, saved, asked, changes, keys, fresh):
    state = stored(size, saved)
    for change, pick in changes:
        state = CHANGES[change](state, pick)
    (folder / "model.safetensors").write_bytes(written(state))
    (folder / "config.json").write_text(json.dumps(SIZES[size] | keys))
    try:
        source = open_source(folder)
        model = TASKS[asked](source.config)
        loaded, drawn = stored_parameters(source, model, reinitialise_head=fresh)
        _ = source.labels
    except ValueError as error:
        assert str(error)
        plain = not keys and all(
            change in ("old names", "buffer", "tied", "float64", "other head") for change, _ in changes
        )
        assert not plain or asked != saved, error  # nothing is wrong with these
        return
    assert fresh or not drawn
    assert not any(path.startswith("encoder/") for path in drawn)
    wanted = names(size, asked)
    assert set(loaded) == set(wanted) - set(drawn)
    said = meaning(state)
    for path, array in loaded.items():
        _, name, transposed = wanted[path]
        expected = said[name].astype(np.float32)
        assert np.array_equal(array, expected.T if transposed else expected), path
        assert array.dtype == np.float32 and np.isfinite(array).all()


@pytest.mark.parity
@pytest.mark.parametrize("task", KINDS)
def test_the_names_are_those_of_transformers(task):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES[0])
    theirs = getattr(transformers, TASKS[task].__name__)(config).state_dict()
    ours = {name: tuple(shape[::-1] if transposed else shape) for shape, name, transposed in names(0, task).values()}
    copies = ("cls.predictions.decoder", "bert.embeddings.position_ids")
    before = "bert." if task == "features" else ""
    kept = {before + name: tuple(array.shape) for name, array in theirs.items() if not name.startswith(copies)}
    unused = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}  # of some classes
    assert {k: v for k, v in kept.items() if k not in unused} == {k: v for k, v in ours.items() if k not in unused}


@given(cut=st.integers(0, 4000), insert=st.binary(max_size=9), at=st.integers(0, 900))
@example(0, b"", 0)
@example(8, b"\xff" * 8, 0)
def test_a_damaged_safetensors_file_is_read_as_its_own_library_does(folder, cut, insert, at):
    data = written(stored(0, "features"))
    (folder / "x.safetensors").write_bytes(data[:at] + insert + data[at + cut % 17 :])
    same(
        lambda path: safetensors.numpy.load_file(path),
        read_safetensors,
        folder / "x.safetensors",
        (safetensors.SafetensorError, KeyError),
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_a_safetensors_file_to_both_or_to_neither(folder, data):
    text = b"{" + data
    (folder / "y.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    same(
        lambda path: safetensors.numpy.load_file(path),
        read_safetensors,
        folder / "y.safetensors",
        (safetensors.SafetensorError, KeyError),
    )


def same(theirs, ours, path, errors):
    try:
        expected = theirs(path)
    except errors:
        with pytest.raises(LoadError):
            ours(path)
        return
    found = ours(path)
    assert found.keys() == expected.keys()
    assert all(
        found[name].tobytes() == expected[name].tobytes() and found[name].shape == expected[name].shape
        for name in found
    )


def refused_or_arrays(read, path):
    """Nothing but LoadError or arrays that are not larger than the file."""
    try:
        arrays = read(path)
    except LoadError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= 2 * path.stat().st_size


@given(
    name=st.sampled_from(["zip.bin", "legacy.bin"]),
    at=st.integers(0, 6000),
    insert=st.binary(max_size=6),
    cut=st.integers(0, 6),
    whole=st.booleans(),
)
def test_a_damaged_torch_file_gives_arrays_or_a_refusal(folder, name, at, insert, cut, whole):
    """Of the archive the pickle is damaged, so that its checksum does not hide the damage."""
    data = golden(name)
    if name == "zip.bin" and not whole:
        pickled = entries()["data.pkl"]
        at %= len(pickled)
        data = archive(pickled[:at] + insert + pickled[at + cut :])
    else:
        data = data[:at] + insert + data[at + cut :]
    (folder / "x.bin").write_bytes(data)
    for read in (read_torch_pickle, lambda path: {} if torch_headers(path) else {}):
        refused_or_arrays(read, folder / "x.bin")


def test_a_torch_file_that_was_copied_in_part_is_refused_in_words(folder):
    (folder / "x.bin").write_bytes(golden("zip.bin")[:-500])
    with pytest.raises(LoadError, match="x.bin: the archive has no end: it was damaged or copied in part"):
        read_torch_pickle(folder / "x.bin")


@given(st.binary(max_size=300), st.booleans())
@example(b"\x80\x02]q\x00h\x00a.", True)
def test_any_bytes_as_a_torch_file_are_refused(folder, data, packed):
    (folder / "x.bin").write_bytes(archive(data) if packed else data)
    refused_or_arrays(read_torch_pickle, folder / "x.bin")


@functools.cache
def golden(name):
    return (GOLDEN / name).read_bytes()


@functools.cache
def entries():
    with zipfile.ZipFile(GOLDEN / "zip.bin") as packed:
        return {name.partition("/")[2]: packed.read(name) for name in packed.namelist()}


def archive(pickled):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, content in (entries() | {"data.pkl": pickled}).items():
            packed.writestr(f"m/{name}", content)
    return out.getvalue()


MESSAGE = st.binary(max_size=30) | st.builds(
    lambda kind, shape, size, more: bytes([8, kind, 18, len(shape)]) + shape + bytes([40, size]) + more,
    st.integers(0, 20),
    st.binary(max_size=8),
    st.integers(0, 127),
    st.binary(max_size=12),
)


@given(
    st.dictionaries(st.text(max_size=6).map(str.encode) | st.binary(max_size=12), MESSAGE, min_size=1, max_size=4),
    st.binary(max_size=40),
)
def test_any_records_in_a_tf1_index_give_arrays_or_a_refusal(folder, records, data):
    """The checksums are right, so that they do not hide what is in the records."""
    (folder / "x.index").write_bytes(tf1_writer.table(list(records.items())))
    (folder / "x.data-00000-of-00001").write_bytes(data)
    try:
        arrays = read_variables(folder / "x")
        headers = read_headers(folder / "x")
    except LoadError:
        return
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == headers
    assert sum(array.nbytes for array in arrays.values()) <= len(data) * max(1, len(records))


@given(st.binary(max_size=120), st.integers(0, 3000), st.integers(0, 8))
def test_any_bytes_as_a_tf1_index_are_refused(folder, data, at, cut):
    whole = tf1_index()
    for content in (data, whole[:at] + data[:8] + whole[at + cut :]):
        (folder / "y.index").write_bytes(content)
        (folder / "y.data-00000-of-00001").write_bytes(b"")
        if content != whole:
            with pytest.raises(LoadError):
                read_variables(folder / "y")


@functools.cache
def tf1_index():
    return (GOLDEN.parent / "golden_tf1" / "bert_model.ckpt.index").read_bytes()
