"""Compiles one step in a process of its own: python -m bertjax.tools.plan.worker REQUEST.

Started by compilation.py, which explains why. Writes the result into the cache and messages, one
JSON object a line, to stdout: {"error"} for a configuration that cannot work, {"stage", "wanted",
"limit"} for a step that is hopeless for the memory of this machine and not compiled, {"key",
"cached", "stage"} once the program is traced, {"failed"} when the compiler failed.
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
    request = pickle.loads(pathlib.Path(path).read_bytes())
    config, topology, cache = request["config"], request["topology"], Cache(request["cache"])
    try:
        if topology == "local":
            import jax

            devices = jax.devices()
        else:
            devices = chips.devices(chips.parse(topology))
        from bertjax.tools.plan import stages

        stage = stages.stages(config, devices)[request["stage"]]
    except ValueError as error:
        _tell(error=str(error))
        return

    platform = devices[0].platform
    local = topology == "local"
    if local and platform == "cpu":
        # A process that takes more than there is makes the machine swap, and then Linux ends it.
        wanted, limit = stage.expected_bytes(), chips.local_device_bytes()
        if wanted > limit:
            _tell(wanted=int(wanted), limit=limit, stage=dataclasses.asdict(stages.describe(stage)))
            return
    state = stage.trainer.abstract_state(stage.objective)
    lowered = (
        stage.trainer.train_step(stage.objective)
        .trace(state, stage.abstract_batch())
        .lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    )
    key = cache_key(lowered.as_text(), topology, platform)
    found = cache.load(key)
    cached = (
        found is not None and (found.complete or request["quick"]) and not (local and found.limit)
    )  # there may be more memory free by now
    _tell(key=key, cached=cached, stage=dataclasses.asdict(stages.describe(stage)))
    if not cached:
        _compile(stage, lowered, topology, cache, key)


def _compile(stage: Any, lowered: Any, topology: str, cache: Cache, key: str) -> None:
    import jax

    from bertjax.tools.plan import stages

    began = time.monotonic()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        compiled = refused(str(error), time.monotonic() - began)
        if compiled is None:
            _tell(failed=str(error)[:3000])
            return
    else:
        memory = executable.memory_analysis()
        compiled = Compiled(
            executable.as_text(),
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.output_size_in_bytes - memory.alias_size_in_bytes,
            memory.generated_code_size_in_bytes,
            time.monotonic() - began,
        )
        if topology == "local":
            limit = chips.local_device_bytes()
            if limit and compiled.total > limit:
                compiled = dataclasses.replace(compiled, limit=limit)
            else:
                compiled = dataclasses.replace(compiled, measured_s=stages.measure(stage, executable))
    cache.save(key, compiled)


def cache_key(program: str, topology: str, platform: str) -> str:
    """Hash of everything that decides what the compiler makes of a program."""
    from bertjax.model.kernels import compiler_options

    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    if platform == "tpu":
        versions.append(importlib.metadata.version("libtpu"))
    parts = [program, topology, platform, *versions, repr(compiler_options(platform))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
