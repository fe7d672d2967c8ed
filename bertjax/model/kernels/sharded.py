"""Runs a kernel on each device's own shard instead of on gathered operands.

XLA cannot look into a custom kernel, so it would gather what the kernel reads. `per_shard` tells it
how the operands may be split; the function then sees one shard of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Specs = Sequence[tuple[str | None, ...]]
# Partition specs of the operands -> those that the kernel wants for its operands and results.
Layout = Callable[[Specs], tuple[Specs, Specs]]


def per_shard(
    function: Callable[..., Sequence[jax.Array]], layout: Layout, rule: str, whole: str
) -> Callable[..., Sequence[jax.Array]]:
    """`function` made to run on shards.

    Args:
      function: arrays -> sequence of arrays, of whatever sizes the shards have.
      layout: which axes may stay split; see Layout.
      rule: Shardy's sharding rule, as 'b t, b t h -> b t h'.
      whole: the letters of `rule` that must not be split.
    """

    @custom_partitioning
    def run(*args):
        return tuple(function(*args))

    def layouts(mesh, args):
        given = [tuple(a.sharding.spec) + (None,) * (a.ndim - len(a.sharding.spec)) for a in args]
        place = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
        return tuple(tuple(map(place, specs)) for specs in layout(given))

    def infer(mesh, args, result):
        return layouts(mesh, args)[1]

    def partition(mesh, args, result):
        operands, results = layouts(mesh, args)
        return mesh, lambda *a: tuple(function(*a)), results, operands

    run.def_partition(
        infer_sharding_from_operands=infer,
        partition=partition,
        sharding_rule=rule,
        # Shardy wants them in the order in which the rule names them.
        need_replication_factors=tuple(sorted({*whole} & {*rule}, key=rule.index)),
    )
    return run
