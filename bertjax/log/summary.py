"""The start-up screen of a run: what will run, on what, over how much data, from where.

A job makes (name, text) lines, of which every job has the model's and the devices'; `screen` lays them out.
"""

from collections.abc import Sequence

from jax.sharding import Mesh

from bertjax.model.presets import PRETRAINING_HEADS, BertConfig, parameter_count

Line = tuple[str, str]


def model_line(config: BertConfig, heads: tuple[str, ...] = PRETRAINING_HEADS) -> Line:
    """Size of the network; `heads` are those counted among its parameters."""
    return "model", (
        f"L={config.num_hidden_layers} H={config.hidden_size} A={config.num_attention_heads} "
        f"F={config.intermediate_size} V={config.vocab_size:,}: {parameter_count(config, heads) / 1e6:.1f} M parameters"
    )


def devices_lines(mesh: Mesh, dtype: str, reason: str = "") -> list[Line]:
    """The devices and how the run is spread over them; `reason` is why, where it was chosen."""
    devices = mesh.devices
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    lines = [("devices", f"{devices.size} x {devices.flat[0].device_kind} ({shape}), {dtype}")]
    return [*lines, ("mesh", reason)] if reason else lines


def screen(lines: Sequence[Line]) -> str:
    """The lines below each other, their names flush right."""
    return "\n".join(f"{name:>9}  {text}" for name, text in lines)
