"""Outputs of torch and transformers, recorded by make_golden.py, without torch."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax.formats.arrays import read_safetensors
from bertjax.formats.torch_pickle import read_torch_pickle, torch_headers
from bertjax.interop import LoadError, load_model
from bertjax.interop.huggingface import normalise_names, read_state_dict

GOLDEN = Path(__file__).resolve().parent / "golden"
TOLERANCE = 1e-4  # absolute, float32 on the CPU against torch's float32


@pytest.fixture(scope="module")
def recorded():
    return dict(np.load(GOLDEN / "outputs.npz"))


def inputs(recorded):
    return [recorded[n].astype(np.int32) for n in ("input_ids", "attention_mask", "token_type_ids")]


def test_logits_equal_transformers(recorded):
    mlm, nsp = load_model(GOLDEN)(*inputs(recorded))
    real = recorded["attention_mask"] == 1
    np.testing.assert_allclose(mlm[real], recorded["mlm"][real], atol=TOLERANCE)
    np.testing.assert_allclose(nsp[:, 0], recorded["nsp"], atol=TOLERANCE)


def test_every_hidden_state_and_the_pooled_output_equal_transformers(recorded):
    hidden, pooled = load_model(GOLDEN, task="features")(*inputs(recorded), all_hidden=True)
    real = recorded["attention_mask"] == 1
    for ours, theirs in zip(hidden, recorded["hidden"], strict=True):
        np.testing.assert_allclose(ours[real], theirs[real], atol=TOLERANCE)
    np.testing.assert_allclose(pooled, recorded["pooled"], atol=TOLERANCE)


@pytest.mark.parametrize("name", ["zip.bin", "legacy.bin"])
def test_both_formats_of_torch_save_are_read_without_torch(name):
    read = normalise_names(read_torch_pickle(GOLDEN / name), name)
    expected = read_state_dict(GOLDEN)
    assert set(read) == set(expected)
    for key, array in expected.items():
        rounded = array.astype(read[key].dtype)
        np.testing.assert_array_equal(read[key].view(np.uint16), rounded.view(np.uint16))


class _Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


def test_a_pickle_that_calls_a_function_is_refused_and_not_run(tmp_path, capsys):
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as stream:
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, _Evil()):
            pickle.dump(value, stream, protocol=2)
    with pytest.raises(LoadError, match="builtin.*print.*not run"):
        read_torch_pickle(path)
    assert "never" not in capsys.readouterr().out


def test_the_state_of_a_training_program_says_how_its_weights_are_saved(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as stream:
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {"model_state_dict": {}, "epoch": 3}, []):
            pickle.dump(value, stream, protocol=2)
    with pytest.raises(LoadError, match=r"torch.save\(torch.load\(FILE\)\['model_state_dict'\]"):
        read_torch_pickle(path)


def test_truncated_files_are_refused(tmp_path):
    for name in ("zip.bin", "legacy.bin"):
        data = (GOLDEN / name).read_bytes()
        for keep in (len(data) - 7, len(data) // 2, 20, 0):
            (tmp_path / name).write_bytes(data[:keep])
            with pytest.raises(LoadError):
                read_torch_pickle(tmp_path / name)
    data = (GOLDEN / "model.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:-3])
    with pytest.raises(LoadError, match="safetensors"):
        read_safetensors(tmp_path / "x.safetensors")


def test_safetensors_of_every_shape_and_type_are_read_as_their_own_library_does(tmp_path):
    from safetensors.numpy import load_file, save_file

    arrays = {
        f"a.{dtype.__name__}": np.arange(6).reshape(3, 2).astype(dtype)
        for dtype in (np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_)
    }
    arrays |= {
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "odd": np.arange(3, dtype=np.int8),
    }  # what follows it is not aligned
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found, expected = (read(tmp_path / "x.safetensors") for read in (read_safetensors, load_file))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_sharded_safetensors_and_a_missing_shard(tmp_path):
    from safetensors.numpy import save_file

    state = read_safetensors(GOLDEN / "model.safetensors")
    names = sorted(state)
    placement = {}
    for i, part in enumerate((names[:20], names[20:])):
        shard = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({n: state[n] for n in part}, tmp_path / shard)
        placement |= dict.fromkeys(part, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placement}))
    shutil.copy(GOLDEN / "config.json", tmp_path)
    whole, parts = load_model(GOLDEN).params, load_model(tmp_path).params
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match="model-00002-of-00002"):
        load_model(tmp_path)


@pytest.mark.parity
def test_a_small_file_cannot_ask_for_much_memory(tmp_path):
    torch = pytest.importorskip("torch")
    for old in (False, True):
        torch.save({"x": torch.zeros(1).expand(10**12)}, tmp_path / "x.bin", _use_new_zipfile_serialization=not old)
        for read in (read_torch_pickle, torch_headers):
            with pytest.raises(LoadError, match=r"x.bin: .*\(1000000000000,\) repeats its 1 elem"):
                read(tmp_path / "x.bin")
    with (
        zipfile.ZipFile(GOLDEN / "zip.bin") as packed,
        zipfile.ZipFile(tmp_path / "deflated.bin", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in packed.namelist():
            deflated.writestr(name, packed.read(name) + bytes(10**6))
    with pytest.raises(LoadError, match="deflated.bin: its entries are larger than the file"):
        read_torch_pickle(tmp_path / "deflated.bin")


@pytest.mark.parametrize("name", ["zip.bin", "legacy.bin"])
def test_headers_are_those_of_the_arrays(name):
    arrays = read_torch_pickle(GOLDEN / name)
    assert torch_headers(GOLDEN / name) == {name: (array.shape, array.dtype) for name, array in arrays.items()}
