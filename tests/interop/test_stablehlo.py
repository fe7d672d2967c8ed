"""The StableHLO export, loaded by the README's own lines in a process without bertjax and flax."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
ROOT = pathlib.Path(__file__).resolve().parents[2]

pytest.importorskip("flatbuffers", reason="jax.export writes its files with flatbuffers")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory with `exported/`, written on the CPU as for any machine."""
    directory = tmp_path_factory.mktemp("stablehlo")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bertjax.tools.convert",
            f"--from={GOLDEN}",
            "--to=stablehlo",
            f"--out={directory / 'exported'}",
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout.split()[-1]) < 1e-5  # the printed comparison
    return directory


def readme_loader():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (loader,) = [block for block in blocks if "export.deserialize" in block]
    assert len(loader.splitlines()) <= 13
    return loader


def outputs_of_loader(directory, platform):
    """(platforms of the file, MLM and NSP logits) on the inputs that torch's were recorded for."""
    load, call = readme_loader().split("ids = np.array")
    program = (
        "import sys\nsys.modules['bertjax'] = sys.modules['flax'] = None\n"
        + load
        + f"x = np.load({str(GOLDEN / 'outputs.npz')!r})\n"
        "ids, mask, types = (x[n].astype(np.int32) for n in\n"
        "                    ('input_ids', 'attention_mask', 'token_type_ids'))\n"
        "mlm, nsp = model.call(weights, ids, mask, types)\n"
        "import jax\nassert jax.default_backend() == sys.argv[1]\n"
        "np.savez('out.npz', mlm=mlm, nsp=nsp, platforms=model.platforms)\n"
        "ids = np.array" + call
    )
    env = {**os.environ, "JAX_PLATFORMS": platform}
    backend = "gpu" if platform == "cuda" else platform
    subprocess.run([sys.executable, "-c", program, backend], cwd=directory, env=env, check=True)
    out = np.load(directory / "out.npz")
    return out["platforms"].tolist(), out["mlm"], out["nsp"]


def check(directory, platform):
    platforms, mlm, nsp = outputs_of_loader(directory, platform)
    recorded = np.load(GOLDEN / "outputs.npz")
    real = recorded["attention_mask"] == 1
    assert platforms == ["cpu", "cuda", "tpu"]
    print("largest difference to torch", np.abs(mlm[real] - recorded["mlm"][real]).max())
    np.testing.assert_allclose(mlm[real], recorded["mlm"][real], atol=1e-4)
    np.testing.assert_allclose(nsp[:, 0], recorded["nsp"], atol=1e-4)


def test_the_lines_of_the_readme_compute_torchs_outputs(exported):
    check(exported, "cpu")


@pytest.mark.gpu
def test_the_same_file_computes_them_on_a_gpu(exported):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process; set BERTJAX_TEST_PLATFORM=cuda")
    check(exported, "cuda")


def test_windows_and_rotary_positions_are_exported_for_rows_of_every_length(tmp_path):
    from bertjax.interop.loaded import LoadedModel
    from bertjax.interop.stablehlo import export_model
    from bertjax.model.heads import BertForMaskedLM, shared_init
    from bertjax.model.presets import modern

    config = modern(2, 64, 96, vocab_size=50, num_attention_heads=2, local_attention=8, global_attn_every_n_layers=2)
    model = BertForMaskedLM(config)
    loaded = LoadedModel(model, shared_init(model, jax.random.key(0)))
    assert export_model(loaded, tmp_path / "out", platforms=["cpu"]) < 1e-5
