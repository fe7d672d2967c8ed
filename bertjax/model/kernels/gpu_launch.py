"""Runs a kernel of gpu_programs or gpu_row_programs within a jax program.

    name, grid, arrays, constants  ->  arrays

On a GPU by jax-triton, else by Triton's interpreter, which computes the same with NumPy, slowly. Both
packages come with the extra `cuda`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import threading
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps the number of its program in a global


@functools.cache
def missing() -> str | None:
    """Why the kernels cannot run on this machine, and what to install; None if they can."""
    try:
        if jax.default_backend() == "gpu":
            import jax_triton
            import triton

            if isinstance(getattr(jax_triton.triton_lib, "cb", None), types.SimpleNamespace):  # its stand-in
                raise ImportError(f"this jax-triton needs another triton than {triton.__version__}")
            keep_compiled(jax_triton.triton_lib)
            pass_equation_alone(jax_triton.triton_lib)
        else:
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
            import triton
    except Exception as error:  # of whatever kind: an old jax-triton meets a new triton or jax
        return f"{type(error).__name__}: {error} (pip install 'bertjax[cuda]', or triton and jax-triton)"
    return None


def launch(
    kernel: str,
    grid: tuple[int, ...],
    arrays: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    warps: int = 1,
    stages: int = 1,
    in_place: int | None = None,
    **constants: int | float,
) -> list[jax.Array]:
    """The results of a kernel's programs.

    Args:
      kernel: name of a function of gpu_programs or gpu_row_programs.
      grid: numbers of programs.
      arrays, results: its first arguments; `results` is what it writes.
      warps, stages: of a program.
      in_place: the first result is the array at this index, changed; see `writes_in_place`.
      **constants: its arguments in capitals.

    Raises:
      ValueError: if something is `missing`.
    """
    if reason := missing():
        raise ValueError(f"{kernel} needs triton: {reason}")
    if jax.default_backend() != "gpu":
        run = functools.partial(_interpreted, kernel, grid, results, constants, in_place)
        return jax.pure_callback(run, list(results), *arrays)
    import jax_triton

    given, changed = list(arrays), []
    if in_place is not None and _is_new():
        given[in_place] = jax.new_ref(given[in_place])
        changed = [given[in_place]]
    how: dict[str, Any] = {"grid": grid, "num_warps": warps, "num_stages": stages, "name": kernel}
    how["out_type" if _is_new() else "out_shape"] = list(results[len(changed) :])
    if _is_new():
        # Triton itself would write the newest PTX it knows, which the CUDA that jax finds may not read:
        # 8.7 came with CUDA 12.8. And from 3.10 on it would no longer contract a * b + c.
        how["backend_options"] = {"ptx_version": 87, "enable_fp_fusion": True}
    new = jax_triton.triton_call(*given, kernel=program(kernel), **how, **constants)
    return [*map(jax.freeze, changed), *new]


def keep_compiled(library: Any) -> None:
    """Has jax-triton (`library`) look beside jax's own compiled programs for what it compiled in an earlier
    run: the kernels of a step take it some six seconds. If it has no function of that name, it compiles."""
    compile_now = getattr(library, "compile_ttir_inplace", None)

    def compiled(module, backend, options, *target):
        directory = jax.config.jax_compilation_cache_dir
        if not directory or "://" in directory:
            return compile_now(module, backend, options, *target)
        versions = [importlib.metadata.version(name) for name in ("triton", "jax-triton")]
        key = hashlib.sha256(repr((str(module), options, target, versions)).encode()).hexdigest()
        file = pathlib.Path(directory) / f"jax-triton-{key}.json"
        if file.exists():
            return library.CompilationResult(**json.loads(file.read_text()))
        result = compile_now(module, backend, options, *target)
        partial = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # it is a cache: a full or read-only disk only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(dataclasses.asdict(result) | {"ttgir": "", "llir": ""}))
            partial.replace(file)
        return result

    if compile_now:
        library.compile_ttir_inplace = compiled


def pass_equation_alone(library: Any) -> None:
    """Lets jax 0.12 ask jax-triton (`library`) which arguments a kernel needs: it passes one more than the rule of
    jax-triton 0.4.1 takes. Another jax-triton stays as it is."""
    rules = getattr(getattr(library, "pe", None), "dce_rules", {})
    rule = rules.get(library.triton_kernel_call_p)
    if rule and len(inspect.signature(rule).parameters) == 2:
        rules[library.triton_kernel_call_p] = lambda *arguments: rule(arguments[0], arguments[-1])


@functools.cache
def _is_new() -> bool:
    """Whether jax-triton is 0.4 or newer; 0.3 is for jax 0.10."""
    import jax_triton

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


def writes_in_place() -> bool:
    """Whether `launch` can change an array in place: jax-triton 0.3 hands a kernel the result beside it."""
    return jax.default_backend() != "gpu" or _is_new()


def program(kernel: str) -> Any:
    """The kernel of that name, a function under triton.jit."""
    from bertjax.model.kernels import gpu_programs, gpu_row_programs

    return getattr(gpu_programs, kernel, None) or getattr(gpu_row_programs, kernel)


def _interpreted(kernel: str, grid, results, constants: dict, in_place: int | None, *arrays) -> list[np.ndarray]:
    """bfloat16 is computed as float32, since the interpreter's products do not know it."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def memory(x) -> np.dtype:
        return np.dtype(np.float32) if x.dtype == jnp.bfloat16 else x.dtype

    def pointer(x: np.ndarray) -> tl.tensor:
        kind = tl.pointer_type(getattr(tl, x.dtype.name))
        return tl.tensor(TensorHandle(np.array([x.ctypes.data], np.uint64), kind), kind)

    arrays = [np.array(x, memory(x), order="C") for x in arrays]
    changed = [] if in_place is None else [arrays[in_place]]
    new = [np.zeros(x.shape, memory(x)) for x in results[len(changed) :]]
    with _ONE_AT_A_TIME:
        program(kernel)[grid](*map(pointer, (*arrays, *new)), **constants)
    return [x.astype(result.dtype) for x, result in zip(changed + new, results, strict=True)]
