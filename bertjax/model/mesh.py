"""Where the rows of a batch lie: all that the network knows about meshes.

Under fsdp the rows of a batch and the matrices of a layer lie split over the same devices, and a
product can follow either. Left alone, the compiler follows the matrices: every device then holds a
slice of the hidden units of *all* rows, and adds up whole activations with the others. Told where
the rows are, it gathers each layer's matrices instead, which is what fsdp means. For large, 256 x
512 tokens on 16 TPU chips, that is 4 GB exchanged a step instead of 97, and temporaries of 6 GiB a
chip instead of 30. And a kernel, into which the compiler cannot look, must be told the same to run
on each device's own rows and heads.

In: the mesh, from whoever traces a step over one (training/trainer.py). Out: activations that are
held to it, functions that run on each device's share.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH_AXES = ("data", "fsdp")  # of a mesh, over which rows are split
HEADS_AXIS = "tensor"

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def rows_on(mesh: Mesh) -> Iterator[None]:
    """While a step is traced within, its rows are split over BATCH_AXES of `mesh`."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def current_mesh() -> Mesh | None:
    """The mesh of `rows_on`, for kernels; None outside of it."""
    return _MESH.get()


def rows_are_placed() -> bool:
    """Whether it is known where rows lie: within `rows_on`, or since there is one device only."""
    return _MESH.get() is not None or jax.device_count() == 1


def heads_are_split(mesh: Mesh | None) -> bool:
    """Whether a device has some of the heads, or of the columns of a matrix, only."""
    return mesh is not None and mesh.shape[HEADS_AXIS] > 1


def keep_rows(x: jax.Array) -> jax.Array:
    """x [B, ...], its rows where those of the batch are and every row whole, if weights are split
    over the same devices (fsdp)."""
    mesh = _MESH.get()
    if mesh is None or mesh.shape["fsdp"] == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def gathered(kernel: jax.Array) -> jax.Array:
    """A matrix [in, out] whose first dimension is split over fsdp, whole on every device.

    Left alone, the TPU compiler multiplies by one device's part after the other while they go
    round, forward and backward: by its cycles a step of large on 16 chips of v5e takes 528 ms so,
    and 215 with matrices that are gathered first and gradients that are whole until they are added.
    """
    mesh = _MESH.get()
    if mesh is None or mesh.shape["fsdp"] == 1 or mesh.shape["tensor"] > 1:
        return kernel
    return _gathered(mesh, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(mesh: Mesh, kernel: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, PartitionSpec()))


def _gathered_forward(mesh, kernel):
    return _gathered(mesh, kernel), None


def _gathered_backward(mesh, _, gradient):
    split = "fsdp" if gradient.shape[0] % mesh.shape["fsdp"] == 0 else None
    for axes in ((), (split,)):
        gradient = jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, PartitionSpec(*axes)))
    return (gradient,)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def by_columns(
    look_up: Callable[[jax.Array, jax.Array, Mesh | None], jax.Array], table: jax.Array, ids: jax.Array
) -> jax.Array:
    """look_up(table [V, H], ids [B, T], mesh) -> [B, T, H], the table's columns split over fsdp.

    Each device reads its own columns, for the rows of all devices that share the table with it, and
    then they exchange; backward it so adds up the gradient of its own columns only. Not told so,
    the compiler gathers [B, T, H] of the whole batch on every device for that gradient. If the
    table is `copies`, each device looks up its own rows in its own copy.
    """
    if table.ndim == 3:
        return with_copies(lambda own, ids: look_up(own, ids, None), table, ids)
    mesh = _MESH.get()
    if mesh is None or mesh.shape["fsdp"] == 1 or table.shape[1] % mesh.shape["fsdp"]:
        return look_up(table, ids, mesh)

    def hold(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return keep_rows(hold(look_up(table, hold(ids, "data"), mesh), "data", None, "fsdp"))


def copies(table: jax.Array, rows: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A table [V, H] that is used in several places as [n, V, H], a whole copy for each of n
    devices over which `rows` rows are split; the table itself if there is one device, or if its
    rows V are split over the tensor axis.

    Left alone, the compiler adds up the gradient of each use over the devices, and in float32 if it
    is computed so; and of a table whose columns are split (fsdp) it exchanges looked-up vectors for
    one use and gathers the table for the other. The gradients of a copy are added on its device,
    and then over the devices once, in `dtype`. For the word table of base in bfloat16, looked up at
    one end and the MLM decoder at the other, that is 47 MB exchanged a step instead of 188; all
    other gradients are 172.
    """
    mesh = _MESH.get()
    if mesh is None or mesh.size == 1 or mesh.shape["tensor"] > 1 or rows % mesh.size:
        return table
    split = mesh.shape["fsdp"] > 1 and table.shape[1] % mesh.shape["fsdp"] == 0
    return _copies(mesh, split, dtype, table)


def with_copies(function: Callable[..., jax.Array], table: jax.Array, x: jax.Array, *whole: jax.Array) -> jax.Array:
    """function(table [V, H], x [B, ...], *whole) -> [B, ...]; if `table` is `copies`, each device calls it
    with its own copy and rows."""
    if table.ndim == 2:
        return function(table, x, *whole)
    mesh = _MESH.get()
    split = PartitionSpec(mesh.axis_names)
    run = jax.shard_map(
        lambda own, *rest: function(own[0], *rest),
        mesh=mesh,
        in_specs=(split, split, *[PartitionSpec()] * len(whole)),
        out_specs=split,
        check_vma=False,
    )
    return run(table, x, *whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copies(mesh: Mesh, split: bool, dtype: jax.typing.DTypeLike, table: jax.Array) -> jax.Array:
    """split: whether each device of the fsdp axis holds some columns of the table only."""

    def whole(part: jax.Array) -> jax.Array:
        return (jax.lax.all_gather(part, "fsdp", axis=1, tiled=True) if split else part)[None]

    return jax.shard_map(
        whole,
        mesh=mesh,
        in_specs=PartitionSpec(None, "fsdp" if split else None),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )(table)


def _copies_forward(mesh, split, dtype, table):
    return _copies(mesh, split, dtype, table), None


def _copies_backward(mesh, split, dtype, _, gradient):
    def add_up(own: jax.Array) -> jax.Array:
        part = own[0].astype(dtype)
        if split:
            part = jax.lax.psum_scatter(part, "fsdp", scatter_dimension=1, tiled=True)
        others = [axis for axis in BATCH_AXES[: 1 if split else 2] if mesh.shape[axis] > 1]
        return jax.lax.psum(part, others).astype(own.dtype)

    return (
        jax.shard_map(
            add_up,
            mesh=mesh,
            in_specs=PartitionSpec(mesh.axis_names),
            out_specs=PartitionSpec(None, "fsdp" if split else None),
            check_vma=False,
        )(gradient),
    )


_copies.defvjp(_copies_forward, _copies_backward)


def on_each_share(
    function: Callable[..., Sequence[jax.Array]], mesh: Mesh | None, takes: str, gives: str
) -> Callable[..., Sequence[jax.Array]]:
    """`function` made to run on each device's share of rows and heads; as it is on one device.

    Args:
      function: arrays -> sequence of arrays, of whatever sizes the shares have.
      mesh: `current_mesh` as it was in the forward pass: backward is traced after `rows_on` ended.
      takes, gives: axes of the arguments and results, a word each. 'b' are rows, 'a' are heads, or
        hidden units that are split as heads are; all others are whole. 'bt btad': [rows, whole],
        [rows, whole, heads, whole].
    """
    if mesh is None or mesh.size == 1:
        return function
    axis = {"b": BATCH_AXES, "a": HEADS_AXIS}

    def specs(words: str) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*map(axis.get, word)) for word in words.split())

    def run(*args):
        return tuple(function(*args))

    return jax.shard_map(run, mesh=mesh, in_specs=specs(takes), out_specs=specs(gives), check_vma=False)
