"""Google's checkpoints: a file of TensorFlow's own Saver (make_tf1_golden.py), and broken ones."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax.formats.tensor_bundle import _snappy, read_index
from bertjax.interop import LoadError, load_model
from bertjax.interop.tf1 import find_prefix, read_variables
from tests.interop import tf1_writer

HERE = Path(__file__).resolve().parent
GOLDEN_TF1, GOLDEN = HERE / "golden_tf1", HERE / "golden"


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(GOLDEN_TF1, tmp_path / "copy")
    return tmp_path / "copy"


def test_weights_equal_those_that_tensorflow_was_given():
    ours, theirs = load_model(GOLDEN_TF1), load_model(GOLDEN)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert ours.config == theirs.config
    assert ours.config.hidden_act == "gelu"


def test_a_prefix_an_index_file_and_a_directory_are_all_accepted():
    prefix = GOLDEN_TF1 / "bert_model.ckpt"
    for path in (prefix, f"{prefix}.index", GOLDEN_TF1):
        assert find_prefix(path) == prefix
    assert find_prefix(HERE) is None


def test_of_several_checkpoints_the_one_that_is_read_is_said_or_a_name_is_asked_for(tmp_path, caplog):
    def holding(*names):
        directory = tmp_path / names[0]
        directory.mkdir()
        for name in names:
            (directory / f"{name}.index").write_bytes(b"")
        return directory

    steps = holding("model.ckpt-9", "model.ckpt-10")
    assert find_prefix(steps) == steps / "model.ckpt-10"
    assert "model.ckpt-10 is read" in caplog.text and "model.ckpt-9" in caplog.text
    with pytest.raises(LoadError, match=r"several checkpoints, best\.ckpt, last\.ckpt: name one of them"):
        find_prefix(holding("best.ckpt", "last.ckpt"))


def test_optimizer_slots_and_the_step_are_left_out_by_rule():
    index, shards = read_index(GOLDEN_TF1 / "bert_model.ckpt.index")
    variables = read_variables(GOLDEN_TF1 / "bert_model.ckpt")
    left_out = set(index) - set(variables)
    assert shards == 1
    assert left_out == {"global_step"} | {
        f"bert/encoder/layer_{i}/attention/self/query/kernel/adam_{s}" for i in range(2) for s in "mv"
    }


def test_a_truncated_data_file_is_refused(copy):
    data = copy / "bert_model.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(LoadError, match="incomplete"):
        load_model(copy)


def test_a_flipped_bit_is_refused(copy):
    data = copy / "bert_model.ckpt.data-00000-of-00001"
    raw = bytearray(data.read_bytes())
    raw[1000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(LoadError, match="checksum"):
        load_model(copy)


def test_a_damaged_or_truncated_index_is_refused(copy):
    index = copy / "bert_model.ckpt.index"
    raw = index.read_bytes()
    for broken in (raw[:-1], raw[:40], b"", raw[:100] + b"x" + raw[101:]):
        index.write_bytes(broken)
        with pytest.raises(LoadError, match="not a readable checkpoint index"):
            load_model(copy)


def test_missing_files_are_named(copy):
    (copy / "bert_model.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(LoadError, match="data-00000-of-00001, which is not beside it"):
        load_model(copy)
    (copy / "bert_config.json").unlink()
    with pytest.raises(LoadError, match="bert_config.json is missing"):
        load_model(copy)


def test_a_classifier_is_not_made_from_a_pretraining_checkpoint_without_being_asked():
    with pytest.raises(LoadError, match=r"output_weights \(2, 24\)"):
        load_model(GOLDEN_TF1, task="sequence-classification")
    loaded = load_model(GOLDEN_TF1, task="sequence-classification", reinitialise_head=True)
    assert set(loaded.fresh) == {"classifier/kernel", "classifier/bias"}


def test_an_index_compressed_by_snappy_is_read(tmp_path):
    array = np.arange(6, dtype=np.float32)
    tf1_writer.write(tmp_path / "x", {"abcdabcdabcd": array}, compress=True)
    assert np.array_equal(read_variables(tmp_path / "x")["abcdabcdabcd"], array)


def test_a_damaged_snappy_block_is_refused():
    # By hand from the format description: literal "abcd", copy of 8 at distance 4 (overlapping),
    # and a two-byte-offset copy of 3 at distance 12.
    packed = bytes([15, 3 << 2]) + b"abcd" + bytes([(4 << 2) | 1, 4]) + bytes([(2 << 2) | 2, 12, 0])
    assert _snappy(packed) == b"abcdabcdabcdabc"
    for broken in (packed[:-1], bytes([16]) + packed[1:], bytes([4, (4 << 2) | 1, 4]), b"\xff" * 9):
        with pytest.raises(LoadError):
            _snappy(broken)


@pytest.fixture
def rewritten(tmp_path):
    """A function that writes the golden checkpoint again with more variables, or in slices."""

    def write(more=(), partitioned=None, change=lambda variables: variables):
        variables = read_variables(GOLDEN_TF1 / "bert_model.ckpt") | dict(more)
        shutil.copy(GOLDEN_TF1 / "bert_config.json", tmp_path)
        tf1_writer.write(tmp_path / "bert_model.ckpt", change(variables), partitioned)
        return tmp_path

    return write


def same_as_golden(path):
    jax.tree.map(np.testing.assert_array_equal, load_model(path).params, load_model(GOLDEN_TF1).params)


@pytest.mark.parametrize(
    "slot",
    [
        "BERTAdam",
        "BERTAdam_1",
        "AdamWeightDecayOptimizer_1",
        "Momentum",
        "RMSProp_1",
        "ExponentialMovingAverage",
        "accumulator/0",
    ],
)
def test_whatever_stands_below_a_weight_is_a_slot_of_an_optimizer(rewritten, slot):
    weights = read_variables(GOLDEN_TF1 / "bert_model.ckpt")
    same_as_golden(
        rewritten(
            {f"{name}/{slot}": array * 0 for name, array in weights.items()}
            | {"global_step_7": np.array(3, np.int64), "learning_rate": np.array(0.1, np.float32)}
        )
    )


@pytest.mark.parametrize("rows", [(37,), (13, 12, 12), (1, 36)])
def test_partitioned_variables_are_read_whole(rewritten, rows):
    words = "bert/embeddings/word_embeddings"
    same_as_golden(rewritten({f"{words}/Adam": np.ones((37, 24), np.float32)}, {words: rows, f"{words}/Adam": rows}))


def test_more_rows_than_one_byte_of_a_key_holds_keep_their_order(tmp_path):
    array = np.arange(600, dtype=np.float32).reshape(300, 2)
    tf1_writer.write(tmp_path / "x", {"w": array}, {"w": (63, 1, 136, 100)})
    assert np.array_equal(read_variables(tmp_path / "x")["w"], array)


def test_parts_that_were_saved_as_variables_are_one(rewritten):
    words = "bert/embeddings/word_embeddings"

    def parts(variables):
        whole = variables.pop(words)
        return variables | {f"{words}/part_{i}": whole[i * 13 : (i + 1) * 13] for i in range(3)}

    same_as_golden(rewritten(change=parts))


def test_slices_that_are_missing_are_said(tmp_path):
    array = np.ones((4, 2), np.float32)
    tf1_writer.write(tmp_path / "x", {"w": array}, {"w": (2,)})
    with pytest.raises(LoadError, match="slices of variable w are missing"):
        read_variables(tmp_path / "x")
