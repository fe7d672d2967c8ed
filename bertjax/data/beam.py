"""Shards of a token store made by Apache Beam (the [beam] extra) instead of local processes.

In: options of a Beam pipeline. Out: a `run` for `build.build_store`; same shards, same bytes.
Input and output must be paths that every worker sees under the same name: a network file system,
or a mounted bucket. What was made before is not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bertjax.data import store as stores
from bertjax.data.build import Run
from bertjax.data.shard import build_shard


def beam_run(options: Sequence[str] = ()) -> Run:
    """A `run` for `build_store` on the runner that the options name (default: DirectRunner).

    Raises:
      ValueError: Apache Beam is not installed.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise ValueError("Apache Beam is not installed: pip install 'bertjax[beam]'") from error

    def run(tasks: list[tuple], tokenizer: Any, stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, Any]]]:
        if not tasks or stop():
            return
        with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
            _ = pipeline | beam.Create(tasks) | beam.Reshuffle() | beam.Map(_make, tokenizer=tokenizer)
        for _, number, directory, dtype, *_ in tasks:
            if (record := stores.read_shard_record(directory, number, dtype)) is None:
                raise ValueError(
                    f"{directory}: a Beam worker reported shard {number} as made, but "
                    "it is not here; input and output must be on a file system that "
                    "all workers share"
                )
            yield number, record

    return run


def _make(task: tuple, tokenizer: Any) -> dict[str, Any]:
    return build_shard(*task, tokenizer=tokenizer)
