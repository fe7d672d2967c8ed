"""Compiles one step in a process of its own: python -m bertjax.tools.plan.worker REQUEST.

Started by compilation.py, which explains why. Puts the result into the cache. Prints one JSON object
before it compiles: {"error"} for a configuration that cannot work, {"stage", "wanted", "limit"} for a
step that is not compiled since it cannot fit this machine's memory, else {"stage", "key", "cached"}.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import pickle
import sys
import time
from typing import Any

from bertjax.tools.plan import chips
from bertjax.tools.plan.compilation import Cache, Compiled, refused


def main(path: str) -> None:
    """Answers the request in the file `path`."""
    config, topology, number, cache_directory, quick = pickle.loads(pathlib.Path(path).read_bytes())
    local, cache = topology == "local", Cache(cache_directory)
    try:
        if local:
            import jax

            devices = jax.devices()
        else:
            devices = chips.devices(chips.parse(topology))
        from bertjax.tools.plan import stages

        stage = stages.stages(config, devices)[number]
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    message: dict[str, Any] = {"stage": dataclasses.asdict(stages.describe(stage))}
    platform = devices[0].platform
    # A process that takes more than there is makes the machine swap, and then Linux ends it.
    if local and platform == "cpu" and (wanted := stage.expected_bytes()) > (limit := chips.local_device_bytes()):
        print(json.dumps({**message, "wanted": int(wanted), "limit": limit}), flush=True)
        return
    step = stage.trainer.train_step(stage.objective)
    traced = step.trace(stage.trainer.abstract_state(stage.objective), stage.abstract_batch())
    lowered = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    key = cache_key(lowered.as_text(), topology, platform)
    found = cache.load(key)
    # What did not fit this machine may fit now: there may be more memory free.
    cached = found is not None and (found.complete or quick) and not (local and found.limit)
    print(json.dumps({**message, "key": key, "cached": cached}), flush=True)
    if not cached:
        cache.save(key, _compile(stage, lowered, local))


def _compile(stage: Any, lowered: Any, local: bool) -> Compiled:
    """What the compiler says of the step; of local devices also its time."""
    import jax

    from bertjax.tools.plan import stages

    began = time.monotonic()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if compiled := refused(str(error), time.monotonic() - began):
            return compiled
        sys.exit(f"the compiler failed:\n{str(error)[:3000]}")
    memory = executable.memory_analysis()
    compiled = Compiled(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        time.monotonic() - began,
    )
    if not local:
        return compiled
    limit = chips.local_device_bytes()
    if limit and compiled.total > limit:
        return dataclasses.replace(compiled, limit=limit)
    return dataclasses.replace(compiled, measured_s=stages.measure(stage, executable))


def cache_key(program: str, topology: str, platform: str) -> str:
    """Hash of everything that decides what the compiler makes of a program."""
    from bertjax.model.kernels import compiler_options

    packages = ["jax", "jaxlib", *(["libtpu"] if platform == "tpu" else [])]
    versions = map(importlib.metadata.version, packages)
    parts = [program, topology, platform, *versions, repr(compiler_options(platform))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


if __name__ == "__main__":
    main(sys.argv[1])
