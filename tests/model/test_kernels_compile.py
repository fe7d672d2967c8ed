"""Every GPU kernel compiles for Ampere, Ada and Hopper, without a card."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

SHARED_MEMORY = {80: 163, 89: 99, 90: 227}  # KiB that a program may use (CUDA programming guide)
KERNELS = "attention_forward attention_backward gelu_backward".split()
FLOAT8 = "largest quantise gelu_quantise gelu_backward_quantise".split()  # Ampere has no such products
KERNELS += "residual_norm_forward residual_norm_backward gated_gelu_forward gated_gelu_backward turn".split()


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit_into_shared_memory(capability):
    pytest.importorskip("triton", reason="needs triton, which comes with the extras test and cuda")
    # A process of its own: this one may have loaded Triton for its interpreter.
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    how = {"env": env, "capture_output": True, "text": True, "check": False}
    run = subprocess.run([sys.executable, __file__, str(capability)], **how)
    assert run.returncode == 0, run.stderr[-3000:]
    used = [line.split() for line in run.stdout.splitlines()]
    assert {name for name, *_ in used} == {*KERNELS, *(FLOAT8 if capability > 80 else ())}
    assert max(int(size) for _, size, _ in used) <= 1024 * SHARED_MEMORY[capability]
    # Products that wait for each other: ptxas can keep an accumulator in flight over one loop, not from loop to loop.
    assert not [name for name, _, serialized in used if serialized == "True"]


def compile_all(capability: int) -> None:
    """Prints each launch's kernel, bytes of shared memory and whether its products are serialized, for shapes of base
    and of ModernBERT."""
    import jax
    import jax.numpy as jnp
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bertjax.model.kernels import attention_triton, bias_gelu, float8, gated_gelu, gpu_launch, residual_norm, rotary

    types = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "uint32": "u32", "uint8": "u8"}

    def assembled(compiled) -> str:
        """What ptxas says about it."""
        ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        if not ptxas.exists():
            return ""
        ptx = compiled.asm["ptx"]
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
        command = [ptxas, "--verbose", f"--gpu-name={target}", "/dev/stdin", "--output-file", "/dev/null"]
        run = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stderr

    def launch(kernel, grid, arrays, results, warps=1, stages=1, in_place=None, **constants):  # noqa: ARG001
        function = gpu_launch.program(kernel)
        pointers = [f"*{types[str(x.dtype)]}" for x in (*arrays, *results[in_place is not None :])]
        signature = dict(zip(function.arg_names, pointers + ["constexpr"] * len(constants), strict=True))
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "ptx_version": 87}
        source = ASTSource(function, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(kernel, compiled.metadata.shared, "wgmma.mma_async instructions are serialized" in assembled(compiled))
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    for module in (attention_triton, bias_gelu, float8, gated_gelu, residual_norm, rotary):
        module.launch = launch

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def trace(function, *shapes):
        jax.eval_shape(lambda *x: (lambda out, pull: pull(out))(*jax.vjp(function, *x)), *shapes)

    rows = (128, None, False, 0.1), (512, None, False, 0.1), (512, None, True, 0.1), (1024, 64, True, 0.0)
    for length, window, several, rate in (*rows, (8192, None, False, 0.0), (8192, 64, False, 0.0)):
        ids, seeds = jnp.ones((1, length), jnp.int32), jnp.zeros((1, 2, 2), jnp.uint32)
        tiling = attention_triton.Tiling.for_length(length, several, window)
        turn = None if rate else (jnp.ones((1, length, 64), jnp.float32),) * 2
        trace(
            lambda product, bias, how=(ids, seeds, rate, tiling, window), turn=turn: attention_triton.flash_attention(
                (product,), *how, bias, turn
            ),
            shape(1, length, 384),
            shape(3, 2, 64, dtype=jnp.float32),
        )
    wide = [shape(768, dtype=jnp.float32)] * 3
    words = jnp.zeros(2, jnp.uint32)
    norm = residual_norm.residual_layer_norm
    for rate, before in ((0.1, False), (0.0, True)):
        how = {"words": words, "dropout_rate": rate, "before": before}
        trace(lambda h, r, b, s, c, how=how: norm(h, b, r, s, c, **how), *[shape(1, 32, 768)] * 2, *wide)
    trace(lambda h, r, s: norm(h, None, r, s, None, before=True), *[shape(1, 32, 768)] * 2, wide[0])
    trace(bias_gelu.bias_gelu, shape(1, 64, 3072), shape(3072, dtype=jnp.float32))
    for tanh in (True, False):
        trace(functools.partial(gated_gelu.gated_gelu, tanh=tanh), shape(1, 64, 2304))
    if capability > 80:
        kernels = [
            shape(768, 3072, dtype=jnp.float32),
            shape(3072, dtype=jnp.float32),
            shape(3072, 768, dtype=jnp.float32),
        ]
        trace(functools.partial(float8.dense_gelu_dense, None, True), *kernels, shape(1, 128, 768))


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
