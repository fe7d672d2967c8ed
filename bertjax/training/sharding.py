"""How arrays lie on devices: the mesh (data, fsdp, tensor), the table from parameter path to axes.

In: device counts, parameter shapes. Out: a Mesh and NamedShardings, which `jax.jit` turns into the collectives. The
batch is split over data and fsdp; parameters and optimizer state over fsdp and tensor. Results do not depend on the
mesh, except for the order of sums.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bertjax.config import MeshSettings
from bertjax.model.mesh import BATCH_AXES
from bertjax.model.presets import BertConfig
from bertjax.model.size import bytes_of
from bertjax.process import hardware
from bertjax.process.clock import reach
from bertjax.process.hardware import GIB

P = PartitionSpec
AXES = ("data", "fsdp", "tensor")

# Ordered (regex over 'a/b/c', axes of the last dimensions); the first match counts. As Megatron-LM (Shoeybi et al.
# 2019, section 3): the first matrix of attention and MLP is split by its outputs (whole heads), the second by its
# inputs, so a layer needs one all-reduce in each direction. fsdp splits the first dimension of every matrix: what
# devices gather then lies in memory as it arrives.
PARTITION_RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"word_embeddings", P("tensor", "fsdp")),  # [V, H], by vocabulary; also the MLM decoder
    (r"(position|token_type)_embeddings", P(None, "fsdp")),
    (r"(query|key|value)/kernel$", P("fsdp", "tensor")),  # [H, A*D]
    (r"(query|key|value)/bias$", P("tensor")),
    (r"attention/output/kernel$", P(("tensor", "fsdp"), None)),  # [A*D, H]
    (r"(intermediate|gate)/kernel$", P("fsdp", "tensor")),  # [H, F]
    (r"(intermediate|gate)/bias$", P("tensor")),
    (r"layer_\d+/output/kernel$", P(("tensor", "fsdp"), None)),  # [F, H]
    (r"/kernel$", P("fsdp", None)),  # pooler, MLM transform, task heads
    (r".*", P()),  # biases and LayerNorm: too small to be worth a collective
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes (data, fsdp, tensor) over all devices, in an order that suits the network.

    One size may be -1 = all devices that are left. Raises ValueError if the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor}: sizes must be at least 1, "
            "and at most one may be -1 (all devices that are left)"
        )
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} does not fit {len(devices)} devices: "
            f"their product must be {len(devices)}; data=-1 takes all that are left"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def choose_fsdp(parameters: int, device_bytes: int | None, devices: int) -> tuple[int, str]:
    """The least fsdp under which the training state takes at most 40 % of a device, and why.

    Pure data parallelism has the fewest collectives, so fsdp grows only when the 16 bytes a parameter (weight, gradient
    and two moments in float32) would leave activations no room.

    Args:
      device_bytes: memory of one device, or None if unknown (CPU).
      devices: in all.
    """
    if not device_bytes:
        return 1, "device memory unknown: data parallel"
    state, budget = 16 * parameters, 0.4 * device_bytes
    fsdp = next((size for size in range(1, devices + 1) if devices % size == 0 and state / size <= budget), devices)
    share = f"{state / fsdp / 2**30:.1f} of {device_bytes / 2**30:.1f} GiB a device"
    if fsdp == 1:
        return fsdp, f"weights, gradients and moments take {share}: data parallel, no sharding needed"
    if state / fsdp <= budget:
        whole = f"{state / 2**30:.1f} GiB"
        return fsdp, f"weights, gradients and moments take {whole}: sharded over fsdp={fsdp} they take {share}"
    return fsdp, (
        f"even sharded over all {devices} devices the state takes {share}, over 40 %: expect to need more devices, or "
        "remat and accumulation"
    )


def mesh_of(
    settings: MeshSettings, parameters: int, devices: Sequence[jax.Device], device_bytes: int | None
) -> tuple[Mesh, str]:
    """The mesh that config.mesh asks for, and the reason of an automatic choice ('' if the sizes were given).

    `parameters` and `device_bytes` are those of choose_fsdp. Raises ValueError as make_mesh.
    """
    reach("devices")  # for which a start waits here
    if not settings.auto:
        return make_mesh(settings.data, settings.fsdp, settings.tensor, devices), ""
    fsdp, reason = choose_fsdp(parameters, device_bytes, len(devices))
    return make_mesh(len(devices) // fsdp, fsdp, 1, devices), reason


def partition_spec(path: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Axes of one parameter by its rule of PARTITION_RULES, which is about its last dimensions.

    A dimension that its axis does not divide is whole on every device; of two axes, the first may divide it alone.
    """
    axes = next((tuple(spec) for pattern, spec in PARTITION_RULES if re.search(pattern, path)), ())
    axes = (None,) * (len(shape) - len(axes)) + axes[max(0, len(axes) - len(shape)) :]
    kept = [_dividing(axis, size, mesh) for axis, size in zip(axes, shape, strict=True)]
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


def _dividing(axis: Any, size: int, mesh: Mesh) -> Any:
    """The axis, axes or None of a rule, as far as they divide a dimension of `size`."""
    if isinstance(axis, tuple):
        first, second = axis
        both = mesh.shape[first] * mesh.shape[second]
        return axis if size % both == 0 else _dividing(first, size, mesh)
    return axis if axis and size % mesh.shape[axis] == 0 else None


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each leaf (array or ShapeDtypeStruct) of parameters, or of any state that mirrors them.

    Optimizer moments end in their parameter's path, so the same rule finds them; scalars are replicated.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, partition_spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def fetch(tree: Any, mesh: Mesh) -> Any:
    """Whole arrays as numpy, on every process; all processes call it."""
    everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    return jax.device_get(everywhere(tree))


def abstract(tree: Any, mesh: Mesh) -> Any:
    """ShapeDtypeStructs with shardings: the target that a checkpoint is restored into."""
    shardings = tree_shardings(tree, mesh)
    return jax.tree.map(lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own), tree, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over data and fsdp; every device of a tensor group has the same rows."""
    return NamedSharding(mesh, P(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows {name: [rows, ...]} as parts of global arrays [all rows, ...]."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, np.asarray(value)) for name, value in batch.items()}


def batch_slice(mesh: Mesh) -> tuple[int, int]:
    """(index, count): this process supplies the index-th of `count` equal slices of the batch.

    (process_index, process_count) unless the tensor axis spans processes: those share their rows. Raises ValueError if
    the mesh scatters a process's rows, so that they are not one slice.
    """
    shards = batch_shards(mesh)
    rows_of: dict[int, set[int]] = {}
    for device, index in batch_sharding(mesh).devices_indices_map((shards,)).items():
        rows_of.setdefault(device.process_index, set()).add(index[0].start or 0)
    mine = rows_of[jax.process_index()]
    count = shards // len(mine)
    first = min(mine)
    if mine != set(range(first, first + len(mine))) or first % len(mine):
        raise ValueError(
            f"the mesh {dict(mesh.shape)} gives process {jax.process_index()} the batch parts {sorted(mine)}, which "
            "are not one slice; put the larger axis over whole hosts (tensor and fsdp within a host)"
        )
    return first // len(mine), count


def check_batch(batch_size: int, mesh: Mesh, accumulation: int = 1, name: str = "batch_size") -> None:
    """Raises ValueError, with the valid sizes on either side, for a global batch that cannot be split evenly."""
    shards = batch_shards(mesh)
    unit = shards * accumulation
    if batch_size < 1 or batch_size % unit:
        below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name}={batch_size} does not divide over {shards} devices "
            f"(data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}) x accumulation="
            f"{accumulation}: it must be a multiple of {unit}; next valid: {nearest}"
        )


def check_memory(
    model: BertConfig, shape: tuple[int, int, int], mesh: Mesh, accumulation: int, remat: str
) -> list[str]:
    """Remarks on steps that take more memory than is free; ValueError for far more than there is.

    On a CPU, where Linux would end the process, XLA takes up to four times what the arithmetic finds; on a GPU, whose
    kernels keep less, half of it or more.

    Args:
      shape: rows of the global batch, T, P, as of bytes_of.
    """
    (rows, length, _), devices = shape, mesh.local_devices
    split = mesh.size, mesh.shape["fsdp"], mesh.shape["tensor"], accumulation
    if cpu := devices[0].platform == "cpu":
        free, there = hardware.host_bytes()
    else:
        free = there = len(devices) * (hardware.device_bytes(devices[0]) or math.inf)
    found = len(devices) * bytes_of(model, shape, split, remat, fused=not cpu)
    least = found if cpu else found / 2
    told = (
        f"a step of {rows} x {length} tokens takes {least / GIB:.1f} GiB or more, and this machine has "
        f"{there / GIB:.1f}, of which {free / GIB:.1f} are free: take fewer rows at once, by --config.accumulation=N "
        "or a smaller --config.batch_size"
    )
    if found > 2 * there:
        raise ValueError(told)
    return [told] * (least > free)
