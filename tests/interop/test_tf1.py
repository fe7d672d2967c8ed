"""Google's checkpoints: a file of TensorFlow's own Saver (make_tf1_golden.py), and broken ones."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax.interop import LoadError, load_model
from bertjax.interop.tf1 import crc32c, find_prefix, read_index, read_variables, snappy_decompress

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


def test_optimizer_slots_and_the_step_are_left_out_by_rule():
    index, shards = read_index(GOLDEN_TF1 / "bert_model.ckpt.index")
    variables = read_variables(GOLDEN_TF1 / "bert_model.ckpt")
    left_out = set(index) - set(variables)
    assert shards == 1
    assert left_out == {"global_step"} | {
        f"bert/encoder/layer_{i}/attention/self/query/kernel/adam_{s}"
        for i in range(2) for s in "mv"
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


def test_crc32c():
    # RFC 3720, appendix B.4: 32 bytes of zeros, of ones, and ascending.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_snappy():
    # By hand from the format description: literal "abcd", copy of 8 at distance 4 (overlapping),
    # and a two-byte-offset copy of 3 at distance 12.
    packed = bytes([15, 3 << 2]) + b"abcd" + bytes([(4 << 2) | 1, 4]) + bytes([(2 << 2) | 2, 12, 0])
    assert snappy_decompress(packed) == b"abcdabcdabcdabc"
    for broken in (packed[:-1], bytes([16]) + packed[1:], bytes([4, (4 << 2) | 1, 4])):
        with pytest.raises((LoadError, IndexError)):
            snappy_decompress(broken)
