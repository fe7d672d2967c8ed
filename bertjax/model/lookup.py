"""Reading rows of tables and positions of rows, with gradients that have a fixed order of sums.

The gradient of a gather is a scatter-add. On a GPU it is made of atomic additions, which queue up
where many indices fall on few rows, and whose order, and so the last bits of the sum, changes from
run to run. None is left here: the large table's gradient sorts the ids and adds up runs of equal
ids; small tables and positions use a product with a one-hot matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bertjax.model.mesh import BATCH_AXES, HEADS_AXIS

BLOCK = 32  # sorted rows that are added up by one product


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_lookup(table: jax.Array, ids: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Rows `ids` [B, T] of a large float32 table [V, H] -> [B, T, H].

    The gather and its gradient stay in float32: additions of bfloat16 rows would lose the small
    terms of frequent words.

    Args:
      mesh: of several devices, over which ids are split by rows and the table by the rules of
        training/sharding.py. None: both are on one device.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


def _table_forward(table, ids, mesh):
    return table_lookup(table, ids, mesh), (ids, table)


def _table_backward(mesh, residuals, cotangent):
    ids, table = residuals
    rows, width = table.shape
    ids = jnp.clip(ids, 0, rows - 1)  # as the gather clips
    if mesh is None or mesh.size == 1:
        return _sums_by_id(ids, cotangent, rows), None
    # Each device adds up its own rows of the batch, for its own part of the table.
    split = "fsdp" if mesh.shape["fsdp"] > 1 and width % mesh.shape["fsdp"] == 0 else None
    batch = BATCH_AXES[:1] if split else BATCH_AXES
    parts = mesh.shape[HEADS_AXIS] if rows % mesh.shape[HEADS_AXIS] == 0 else 1

    def own(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(HEADS_AXIS) * (rows // parts) if parts > 1 else 0
        own = ids - first
        own = jnp.where((own >= 0) & (own < rows // parts), own, rows // parts)
        return jax.lax.psum(_sums_by_id(own, cotangent, rows // parts), batch)

    gradient = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(PartitionSpec(batch), PartitionSpec(batch, None, split)),
        out_specs=PartitionSpec(HEADS_AXIS if parts > 1 else None, split),
        check_vma=False,
    )
    return gradient(ids, cotangent), None


table_lookup.defvjp(_table_forward, _table_backward)


def _sums_by_id(ids: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """`sums_by_id` over all tokens: ids [...], x [..., H] -> [size, H], as the platform does best.

    Scatters have a fixed order on CPU and TPU.
    """
    ids, x = ids.reshape(-1), x.reshape(-1, x.shape[-1])
    return jax.lax.platform_dependent(
        ids,
        x,
        cuda=functools.partial(sums_by_id, size=size),
        default=lambda ids, x: jnp.zeros((size, x.shape[1]), x.dtype).at[ids].add(x, mode="drop"),
    )


def sums_by_id(ids: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """The sum of the rows of `x` [N, H] that have the same id -> [size, H] float32.

    The order of additions depends on the ids only. Rows are sorted by id and cut into blocks of
    BLOCK; a product with a one-hot matrix adds up the runs of equal ids within each block. A run
    that begins inside a block is a row of the result. What stands at the beginning of a block may
    belong to the block before: the first runs of all blocks are added up in the same way, until one
    block is left. No step of this depends on how often an id occurs.

    Args:
      ids: int [N], from 0 to `size`; rows with id `size` are left out.
    """
    order = jax.lax.sort((ids, jax.lax.iota(jnp.int32, ids.size)), is_stable=True, num_keys=1)
    ids, x = order[0], jnp.take(x, order[1], axis=0, mode="clip", unique_indices=True)
    total = jnp.zeros((size, x.shape[1]), jnp.float32)
    while True:
        count = ids.size
        fill = -count % BLOCK
        ids = jnp.pad(ids, (0, fill), constant_values=size)
        blocks = jnp.pad(x.astype(jnp.float32), ((0, fill), (0, 0))).reshape(-1, BLOCK, x.shape[1])
        place = jax.lax.iota(jnp.int32, ids.size)
        begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
        within = (begins & (place % BLOCK != 0)).reshape(-1, BLOCK)
        run = jnp.cumsum(within, axis=1, dtype=jnp.int32)  # of each row, among those of its block
        one_hot = run[:, None, :] == jnp.arange(BLOCK)[:, None]  # [block, run, row]
        runs = jnp.einsum("nrb,nbh->nrh", one_hot.astype(jnp.float32), blocks, precision=jax.lax.Precision.HIGHEST)
        last = len(blocks) == 1
        whole = begins if last else within.reshape(-1)  # runs that are rows of the result
        # Where the result finds its rows: every id begins once, all others fall outside.
        found = (
            jnp.full(size, -1, jnp.int32)
            .at[jnp.where(whole, ids, size + 1 + place)]
            .set(place // BLOCK * BLOCK + run.reshape(-1), mode="drop", unique_indices=True)
        )
        runs = runs.reshape(-1, x.shape[1])
        total += jnp.where(found[:, None] >= 0, jnp.take(runs, jnp.maximum(found, 0), axis=0, mode="clip"), 0.0)
        if last:
            return total
        ids, x = ids[::BLOCK], runs[::BLOCK]


@jax.custom_vjp
def small_table_lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [B, T] of a small table [N, H] -> [B, T, H]; the gradient is a product."""
    return jnp.take(table, ids, axis=0, mode="clip")


def _small_table_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
    return small_table_lookup(table, ids), (ids, table)


def _small_table_backward(residuals: tuple, cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, table = residuals
    one_hot = jax.nn.one_hot(ids, table.shape[0], dtype=cotangent.dtype)
    gradient = jnp.einsum(
        "BTN,BTH->NH", one_hot, cotangent, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return gradient.astype(table.dtype), None


small_table_lookup.defvjp(_small_table_forward, _small_table_backward)


def gather_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Vectors at `positions` [B, P] of `hidden` [B, T, H] -> [B, P, H], exactly.

    A product with a one-hot matrix: P is a fraction of T, so it costs little, and its gradient is
    another product that writes [B, T, H] once.
    """
    one_hot = jax.nn.one_hot(positions, hidden.shape[1], dtype=hidden.dtype)
    return jnp.einsum("BPT,BTH->BPH", one_hot, hidden, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def product_float32(table: jax.Array, x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [..., H] times table [V, H] transposed, plus bias [V] -> float32 [..., V].

    The operands are multiplied in x's type and accumulated in float32 without rounding the result,
    for the softmax. The backward products run in x's type: left alone, they would run in float32
    because the logits do. The table is padded to a multiple of 64 rows on the way: a product with
    30,522 columns, rows of odd alignment, takes more than twice the time on a GPU.
    """
    return _product_forward(table, x, bias)[0]


def _padded(table: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.pad(table.astype(x.dtype), ((0, -table.shape[0] % 64), (0, 0)))


def _product_forward(table: jax.Array, x: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple]:
    logits = jnp.einsum("...H,VH->...V", x, _padded(table, x), preferred_element_type=jnp.float32)
    return logits[..., : table.shape[0]] + bias, (table, x)


def _product_backward(residuals: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    table, x = residuals
    rows = table.shape[0]
    widths = [(0, 0)] * (cotangent.ndim - 1) + [(0, -rows % 64)]
    # One array for all three gradients: XLA would compute it again, from the logits, to sum up the bias's.
    g = jax.lax.optimization_barrier(jnp.pad(cotangent.astype(x.dtype), widths))
    dbias = jnp.sum(g.astype(jnp.float32), axis=range(g.ndim - 1))[:rows]
    dx = jnp.einsum("...V,VH->...H", g, _padded(table, x))
    dtable = jnp.einsum(
        "NV,NH->VH", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), preferred_element_type=jnp.float32
    )
    return dtable[:rows].astype(table.dtype), dx, dbias


product_float32.defvjp(_product_forward, _product_backward)


def check_ids(sizes: dict[str, int], inputs: dict[str, Any]) -> None:
    """Raises ValueError for ids that a table does not have, and which its lookup would clamp.

    Args:
      sizes: name of an input -> rows of its table.
      inputs: by name; None and what is traced, whose values nobody knows yet, are passed over.
    """
    for name, size in sizes.items():
        ids = inputs.get(name)
        if ids is None or isinstance(ids, jax.core.Tracer):
            continue
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise ValueError(f"{name} must be integers, not {ids.dtype}")
        if ids.size and not 0 <= ids.min() <= ids.max() < size:
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise ValueError(f"{name} has {wrong}, which is not from 0 to {size - 1}: there are {size} rows for them")
