"""The TPU attention kernels, imitated on the CPU, against the reference attention."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.model.kernels import attention_reference
from bertjax.model.kernels.attention_pallas_tpu import attention as tpu_attention
from bertjax.model.kernels.choice import attention_kernel, select_attention
from bertjax.model.mesh import rows_on

RATE = 0.1
ROOT = pathlib.Path(__file__).parents[2]


def inputs(batch, length, heads, head):
    drawn = np.random.default_rng(0).normal(size=(4, batch, length, heads, head))
    arrays = [jnp.asarray(x, jnp.float32) for x in drawn]
    half, quarter = length // 2, length // 4
    row = jnp.array([1] * half + [2] * quarter + [0] * (length - half - quarter))
    return arrays, jnp.stack([jnp.ones_like(row), row] * (batch // 2)), jax.random.key(0)


def value_and_gradients(attend, ids, key):
    def run(q, k, v, g):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, ids, RATE, key), q, k, v)
        return (out, *pull(g))

    return run


@pytest.mark.parametrize(
    ("length", "heads", "head"),
    [
        pytest.param(128, 2, 64, marks=pytest.mark.slow),
        (128, 3, 64),  # half a register of heads is left over
        pytest.param(512, 2, 64, marks=pytest.mark.slow),  # two blocks of queries
        pytest.param(128, 5, 32, marks=pytest.mark.slow),
        pytest.param(128, 1, 128, marks=pytest.mark.slow),
    ],
)
def test_value_and_gradients_equal_the_reference_with_dropout(length, heads, head):
    arrays, ids, key = inputs(2, length, heads, head)
    got = jax.jit(value_and_gradients(tpu_attention, ids, key))(*arrays)
    want = jax.jit(value_and_gradients(attention_reference.attention, ids, key))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_a_mesh_of_any_shape_gives_the_same():
    arrays, ids, key = inputs(4, 128, 4, 64)
    run = value_and_gradients(tpu_attention, ids, key)
    want = jax.jit(run)(*arrays)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    place = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))

    def placed(*arguments):  # the backward pass is traced after rows_on ended
        with rows_on(mesh):
            return tpu_attention(*arguments)

    run = value_and_gradients(placed, ids, key)
    got = jax.jit(run)(*(jax.device_put(x, place) for x in arrays))
    assert got[0].sharding.is_equivalent_to(place, 4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_auto_means_the_kernels_where_the_program_is_for_a_tpu():
    (q, *_), ids, _ = inputs(2, 128, 2, 64)

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))

    def chosen(x, platform):
        kernel = attention_kernel(select_attention(x.shape, x.dtype, platform))
        return kernel.attention(x, x, x, ids[:, : x.shape[1]])

    def program(x, platform):
        def run(x):
            with rows_on(mesh):
                return chosen(x, platform)

        return str(jax.make_jaxpr(run)(x))

    half = q.astype(jnp.bfloat16)
    assert "pallas_call" in program(half, "tpu")
    assert "pallas_call" not in program(half, "auto")  # this is a CPU
    assert "pallas_call" not in program(q, "tpu")  # float32 stays exact
    assert "pallas_call" not in program(half[:, :96], "tpu")
    # On several chips XLA cannot split a kernel, so a program of unknown placement has none.
    assert "pallas_call" not in str(jax.make_jaxpr(lambda x: chosen(x, "tpu"))(half))


def test_rows_and_heads_that_the_kernels_do_not_take_are_refused():
    with pytest.raises(ValueError, match="96 tokens.*multiples of 128.*reference"):
        tpu_attention(*[jnp.zeros((1, 96, 1, 64))] * 3, jnp.ones((1, 96)))
    with pytest.raises(ValueError, match="size 48"):
        tpu_attention(*[jnp.zeros((1, 128, 1, 48))] * 3, jnp.ones((1, 128)))


# In a process of its own: the topology must be described before jax picks a backend.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from bertjax.model.kernels.attention_pallas_tpu import attention
from bertjax.model.mesh import rows_on

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
mesh = Mesh(np.array(devices).reshape(-1, 1, 2), ("data", "fsdp", "tensor"))

def array(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

def step(q, k, v, ids, g):
    with rows_on(mesh):
        out, pull = jax.vjp(lambda *x: attention(*x, ids, 0.1, jax.random.key(0)), q, k, v)
        return (out, *pull(g))

x = array((8, 512, 12, 64), jnp.bfloat16, "data", None, "tensor")
ids = array((8, 512), jnp.int32, "data")
compiled = jax.jit(step).trace(x, x, x, ids, x).lower(lowering_platforms=("tpu",)).compile()
print(json.dumps({"kernels": compiled.as_text().count('"tpu_custom_call"'),
                  "temporaries": compiled.memory_analysis().temp_size_in_bytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_tpu_compiler_takes_the_kernels_and_no_scores_reach_memory(topology):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install '.[tpu]'")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] == 2
    assert found["temporaries"] < 8 * 512 * 512 * 2  # one head's scores in bfloat16
