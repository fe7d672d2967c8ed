"""TPU chips and slices: what a name such as v5e:4x4 or v4-32 stands for, and its compiler.

Peaks, memory and links as the vendor publishes them (cloud.google.com/tpu, "TPU architecture"); the
clock follows from the peak and the number of multiply-accumulate units.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as jax sees it: a chip, except for v2 and v3, where a device is a core."""

    name: str
    peak_flops: float  # bfloat16, FLOP/s
    clock_hz: float  # of the cycles that the compiler estimates
    hbm_bytes: float  # nominal
    hbm_bytes_s: float
    link_bytes_s: float  # of one link, one way
    dimensions: int  # of the torus
    cores_per_chip: int  # as accelerator names count them: v4-32 has 16 chips
    devices_per_chip: int = 1
    wrap: int = 4  # a dimension whose size this divides is closed to a ring

    @property
    def units(self) -> str:
        return "cores" if self.devices_per_chip > 1 else "chips"


GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 23e12, 0.70e9, 8 * GIB, 350e9, 62e9, 2, 2, devices_per_chip=2, wrap=16),
        Chip("v3", 61.5e12, 0.94e9, 16 * GIB, 450e9, 82e9, 2, 2, devices_per_chip=2, wrap=32),
        Chip("v4", 275e12, 1.05e9, 32 * GIB, 1228e9, 45e9, 3, 2),
        Chip("v5e", 197e12, 1.50e9, 16 * GIB, 819e9, 45e9, 2, 1, wrap=16),
        Chip("v5p", 459e12, 1.75e9, 95 * GIB, 2765e9, 90e9, 3, 2),
        Chip("v6e", 918e12, 1.75e9, 32 * GIB, 1638e9, 90e9, 2, 1, wrap=16),
    )
}

# The shapes of slices that accelerator names stand for, by the number of dimensions.
SHAPES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16",
}
VALID = """valid are
  local               this machine's own devices, measured instead of estimated
  GENERATION:SHAPE    v2:4x4 v3:4x4 v4:2x2x4 v5e:4x4 v5p:2x2x2 v6e:4x4 (chips along each axis)
  accelerator names   v2-32 v3-32 v4-32 v5p-16 (cores), v5e-16 v5litepod-16 v6e-16 (chips)"""


@dataclasses.dataclass(frozen=True)
class Slice:
    """So many chips of one kind in one torus."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices_per_chip

    @property
    def accelerator(self) -> str:
        """The name by which such a slice is rented: v4-32, v5litepod-16."""
        name = "v5litepod" if self.chip.name == "v5e" else self.chip.name
        return f"{name}-{self.chips * self.chip.cores_per_chip}"

    def collective_bytes_s(self, group: int) -> float:
        """Bytes a second that a chip can exchange with the others of its group, one way.

        All axes of the torus work at once where the group spans the slice, one axis otherwise. An
        axis closed to a ring carries data in both directions.
        """
        axes = sorted((size * (2 if size % self.chip.wrap == 0 else 1), size) for size in self.shape if size > 1)
        if group < self.devices:
            axes = axes[-1:]
        rings = [2 if size % self.chip.wrap == 0 else 1 for _, size in axes]
        return self.chip.link_bytes_s * (sum(rings) or 1)


def parse(text: str) -> Slice:
    """The slice that a topology or accelerator name stands for; ValueError lists the valid forms."""
    exact = re.fullmatch(r"(v\d\w*):(\d+(?:x\d+)*)", text)
    rented = re.fullmatch(r"(v\d(?:litepod|[ep])?)-(\d+)", text)
    found = exact or rented
    if not found:
        raise ValueError(f"topology {text!r} is not understood; {VALID}")
    chip = CHIPS.get(found[1] if exact else found[1].replace("v5litepod", "v5e"))
    if chip is None:
        raise ValueError(f"topology {text!r}: no TPU is called {found[1]!r}; {VALID}")
    if exact:
        shape = _shape(exact[2])
        if len(shape) != chip.dimensions or min(shape) < 1:
            example = "4x4" if chip.dimensions == 2 else "2x2x4"
            raise ValueError(
                f"topology {text!r}: a {chip.name} slice has {chip.dimensions} axes, "
                f"such as {chip.name}:{example}; {VALID}"
            )
        return Slice(chip, shape)
    shapes = {math.prod(shape): shape for shape in map(_shape, SHAPES[chip.dimensions].split())}
    chips, rest = divmod(int(rented[2]), chip.cores_per_chip)
    if rest or chips not in shapes:
        sizes = ", ".join(f"{chip.name}-{size * chip.cores_per_chip}" for size in shapes)
        raise ValueError(f"topology {text!r}: there is no such slice; {chip.name} has {sizes}")
    return Slice(chip, shapes[chips])


def _shape(text: str) -> tuple[int, ...]:
    """'4x4' -> (4, 4)."""
    return tuple(map(int, text.split("x")))


def local_device_bytes() -> int | None:
    """Memory of a device of this machine, if known: of CPU devices, their share of what is free."""
    import jax

    from bertjax.process import hardware

    if jax.default_backend() == "cpu":
        return free_bytes() // jax.device_count()
    return hardware.device_bytes()


def free_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int:
    """Memory that a process can take before the machine swaps; without these files, all of it."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable: +(\d+) kB", pathlib.Path(meminfo).read_text()):
            free = 1024 * int(found[1])
    with contextlib.suppress(OSError, ValueError):  # it says 'max' where there is no limit
        free = min(free, int(pathlib.Path(limit).read_text()))
    return free


# --------------------------------------------------------------------------------- the compiler

STEP_MODULE = "jit_train_step"  # what the compiler calls Trainer.train_step


def tpu_environment(dump: str | None = None) -> dict[str, str]:
    """Variables under which a process compiles for TPU without having one, and dumps its passes."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # they are meant for this machine's devices
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here holds a chip
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    if dump is not None:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={STEP_MODULE}"
    return environment


def wanted_libtpu() -> str:
    """The release of libtpu that the installed jax belongs to, as pip understands it."""
    for requirement in importlib.metadata.requires("jax") or ():
        if found := re.match(r"libtpu\s*(==\s*[\d.]+\*?).*extra == .tpu.", requirement):
            return "libtpu" + found[1].replace(" ", "")
    return "libtpu"


def check_libtpu() -> str:
    """The version of libtpu; ValueError, which says what to install, if it is missing or of another jax."""
    wanted, jax_version = wanted_libtpu(), importlib.metadata.version("jax")
    install = (
        f"pip install --no-deps --target DIR '{wanted}', and add DIR to PYTHONPATH (a "
        "directory of its own keeps it away from runs on this machine), or install "
        "bertjax's extra 'tpu'"
    )
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"a TPU topology needs the TPU compiler, which is in the package libtpu: {install}") from None
    prefix = wanted.partition("==")[2].rstrip("*")
    if not version.startswith(prefix):
        raise ValueError(f"libtpu {version} does not belong to jax {jax_version}: {install}")
    return version


def devices(piece: Slice) -> list[Any]:
    """The devices of a slice, to compile for; ValueError if libtpu is missing or knows no such slice."""
    check_libtpu()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if piece.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # two cores as one device, as on real machines
    if piece.chips < 4:  # the default host has 2x2 chips
        options["chips_per_host_bounds"] = (*piece.shape, 1, 1)[:3]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=piece.name, **options).devices
    except Exception as error:  # whatever the plug-in raises
        raise ValueError(
            f"the TPU compiler does not know the topology {piece.name}: {str(error).splitlines()[0]}\n{VALID}"
        ) from error
    if len(found) != piece.devices:
        raise ValueError(f"topology {piece.name} has {len(found)} devices, not {piece.devices}")
    return list(found)
