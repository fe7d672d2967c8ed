"""Which attention 'auto' stands for, and what it needs."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from bertjax.model.kernels import attention_reference, choice, compiler_options, gpu_launch
from bertjax.model.kernels.choice import select_attention
from bertjax.model.mesh import rows_on
from bertjax.model.presets import BertConfig, Execution
from bertjax.training.sharding import make_mesh


@pytest.fixture(autouse=True)
def _forget():
    yield
    choice._triton_runs.cache_clear()


def _device(monkeypatch, platform, capability=None):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="TPU v5 lite")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])


@pytest.mark.parametrize(
    ("platform", "capability", "head", "dtype", "name"),
    [
        ("gpu", "9.0", 64, jnp.bfloat16, "triton"),
        ("gpu", "8.0", 64, jnp.float16, "triton"),
        ("gpu", "7.5", 64, jnp.bfloat16, "reference"),
        ("gpu", "9.0", 96, jnp.bfloat16, "reference"),
        ("gpu", "9.0", 64, jnp.float32, "reference"),
        ("tpu", None, 64, jnp.bfloat16, "pallas_tpu"),
        ("tpu", None, 48, jnp.bfloat16, "reference"),
        ("tpu", None, 64, jnp.float32, "reference"),
        ("cpu", None, 64, jnp.bfloat16, "reference"),
    ],
)
def test_fused_kernels_are_chosen_where_they_run(monkeypatch, platform, capability, head, dtype, name):
    _device(monkeypatch, platform, capability)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_launch, "missing", lambda: None)
    assert select_attention((2, 128, 12, head), dtype, platform) == name


def test_a_mesh_that_cuts_through_heads_runs_plain_xla(monkeypatch):
    mesh = make_mesh(data=2, tensor=4)
    _device(monkeypatch, "tpu")
    with rows_on(mesh):
        names = [select_attention((2, 128, heads, 64), jnp.bfloat16, "tpu") for heads in (8, 6)]
    assert names == ["pallas_tpu", "reference"]


def test_a_gpu_without_triton_runs_plain_xla_and_says_once_what_to_install(monkeypatch, caplog):
    _device(monkeypatch, "gpu", "9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_launch, "missing", lambda: "No module named 'jax_triton' (pip install ...)")
    for _ in range(2):
        kernels = choice.choose(BertConfig(), Execution.for_backend("gpu"), 2, 128)
        assert kernels.attention is attention_reference.attention
        assert kernels.add_norm.func is choice.add_norm
        assert kernels.feed_forward.args[0].func is choice.dense_activation
    assert caplog.text.count("pip install") == 1


@pytest.mark.parametrize("capability", ["7.5", "gfx942", None])
def test_other_gpus_run_plain_xla(monkeypatch, caplog, capability):
    _device(monkeypatch, "gpu", capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_launch, "missing", lambda: None)
    kernels = choice.choose(BertConfig(), Execution.for_backend("gpu", dtype="bfloat16"), 2, 128)
    assert kernels.attention is attention_reference.attention and kernels.add_norm.func is choice.add_norm
    assert "from Ampere on" in caplog.text


@pytest.mark.parametrize(
    ("capability", "dtype"), [("7.0", "float32"), ("7.5", "float32"), ("8.0", "bfloat16"), ("gfx942", "bfloat16")]
)
def test_gpus_without_bfloat16_compute_in_float32(monkeypatch, capability, dtype):
    _device(monkeypatch, "gpu", capability)
    assert Execution.for_backend("gpu").dtype == dtype
    assert Execution.for_backend("gpu", dtype="bfloat16").dtype == "bfloat16"


def test_only_gpus_get_compiler_options():
    assert compiler_options("gpu") and not compiler_options("cpu") and not compiler_options("tpu")


def test_what_jax_triton_compiled_is_there_in_a_later_run(monkeypatch, tmp_path, request):
    result = dataclasses.make_dataclass("CompilationResult", ["binary", "name", "ttgir", "llir"])
    compiled = []

    def compile_ttir_inplace(module, *how):
        compiled.append((module, *how))
        return result(f"ptx of {module}", "kernel", "long", "longer")

    monkeypatch.setattr("importlib.metadata.version", lambda _: "1")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    request.addfinalizer(lambda: jax.config.update("jax_compilation_cache_dir", before))
    wanted = [("a", "backend", "stages=2", 90), ("a", "backend", "stages=3", 90), ("b", "backend", "stages=2", 90)]
    for _ in range(2):  # a run
        library = types.SimpleNamespace(CompilationResult=result, compile_ttir_inplace=compile_ttir_inplace)
        gpu_launch.keep_compiled(library)
        for module, *how in wanted:
            got = library.compile_ttir_inplace(module, *how)
            assert (got.binary, got.name) == (f"ptx of {module}", "kernel")
    assert compiled == wanted


def test_jax_triton_is_asked_as_it_expects_by_a_jax_that_passes_more():
    def rule(used, equation):
        return [True, True], equation

    library = types.SimpleNamespace(pe=types.SimpleNamespace(dce_rules={"kernel": rule}), triton_kernel_call_p="kernel")
    gpu_launch.pass_equation_alone(library)
    asked = library.pe.dce_rules["kernel"]
    assert asked([True], "equation") == asked([True], [False], "equation") == ([True, True], "equation")
    gpu_launch.pass_equation_alone(library)  # a newer one, which takes what jax passes
    assert library.pe.dce_rules["kernel"] is asked
    gpu_launch.pass_equation_alone(types.SimpleNamespace(triton_kernel_call_p="kernel"))  # 0.3 has no rule
