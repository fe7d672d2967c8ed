"""The mesh, the table of partition rules, and what must not depend on either."""

import contextlib
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bertjax.config import OptimizerSettings
from bertjax.model.encoder import BertEncoder
from bertjax.model.heads import BertForPreTraining, init_params
from bertjax.model.presets import PRESETS, BertConfig, Execution
from bertjax.pretraining.objective import PretrainingObjective
from bertjax.process import hardware
from bertjax.tools.plan import hlo
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import (
    batch_sharding,
    batch_slice,
    check_batch,
    check_memory,
    choose_fsdp,
    make_mesh,
    partition_spec,
    put_batch,
    tree_shardings,
)
from bertjax.training.trainer import Trainer

MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (2, 1, 1)]


def mesh_of(sizes):
    return make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])


def init(key):
    keys = iter(jax.random.split(key, 4))
    word = jax.random.normal(next(keys), (64, 16))
    return {
        "embeddings": {"word_embeddings": {"embedding": word}},
        "encoder": {
            "layer_0": {
                "attention": {"query": {"kernel": jax.random.normal(next(keys), (16, 16)), "bias": jnp.zeros(16)}},
                "intermediate": {"kernel": jax.random.normal(next(keys), (16, 32))},
            }
        },
    }


def test_mesh_fills_the_axis_that_is_left_open():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 1, 1), (16, 1, 1)])
def test_impossible_mesh_is_refused_with_the_numbers(sizes):
    with pytest.raises(ValueError, match="mesh data="):
        make_mesh(*sizes)


def init_sharded(mesh):
    key = jax.random.key(0)
    return jax.jit(init, out_shardings=tree_shardings(jax.eval_shape(init, key), mesh))(key)


@pytest.mark.parametrize("sizes", MESHES)
def test_initial_parameters_do_not_depend_on_the_mesh(sizes):
    expected = jax.jit(init)(jax.random.key(0))
    params = init_sharded(mesh_of(sizes))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_parameters_are_really_split():
    params = init_sharded(mesh_of((1, 8, 1)))
    word = params["embeddings"]["word_embeddings"]["embedding"]
    assert word.addressable_shards[0].data.shape == (64, 2)


def test_optimizer_state_lies_where_its_parameter_lies():
    mesh = mesh_of((2, 2, 2))
    params = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(make_optimizer(OptimizerSettings(), 1e-3).init, params)
    expected = tree_shardings(params, mesh)
    shardings = tree_shardings(state, mesh)
    assert shardings["mean"] == expected and shardings["variance"] == expected


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("embeddings/word_embeddings/embedding", (64, 16), P("tensor", "fsdp")),
        ("embeddings/word_embeddings/embedding", (63, 16), P(None, "fsdp")),
        ("embeddings/word_embeddings/embedding", (63, 15), P()),
        ("encoder/layer_3/attention/query/kernel", (16, 16), P("fsdp", "tensor")),
        ("encoder/layer_3/attention/output/kernel", (16, 16), P(("tensor", "fsdp"))),
        ("encoder/layer_3/output/kernel", (32, 16), P(("tensor", "fsdp"))),
        ("encoder/layer_3/output/kernel", (30, 16), P("tensor")),  # 30 is not a multiple of 4
        ("encoder/layer_3/output/kernel", (31, 16), P()),
        ("encoder/layer_3/LayerNorm/scale", (16,), P()),
        ("classifier/kernel", (16, 3), P("fsdp")),
        ("step", (), P()),
    ],
)
def test_partition_rules(path, shape, expected):
    assert partition_spec(path, shape, mesh_of((2, 2, 2))) == expected


def test_batch_not_divisible_by_devices_names_numbers_and_next_sizes():
    with pytest.raises(ValueError, match=r"batch_size=10 .* 8 devices .* 8 or 16"):
        check_batch(10, make_mesh())
    with pytest.raises(ValueError, match=r"accumulation=4: .*multiple of 32; next valid: 32"):
        check_batch(16, make_mesh(), accumulation=4)
    check_batch(16, make_mesh(), accumulation=2)
    check_batch(4, make_mesh(2, 2, 2))  # the tensor axis does not split rows


@pytest.mark.parametrize("sizes", MESHES)
def test_put_batch_keeps_the_rows_in_order(sizes):
    rows = np.arange(16, dtype=np.int32).reshape(8, 2)
    if sizes == (1, 1, 8):
        assert put_batch({"x": rows}, mesh_of(sizes))["x"].sharding.is_fully_replicated
    np.testing.assert_array_equal(put_batch({"x": rows}, mesh_of(sizes))["x"], rows)
    assert batch_slice(mesh_of(sizes)) == (0, 1)


def test_mesh_auto_shards_only_as_much_as_memory_asks():
    gib = 2**30
    base, large = 110_000_000, 335_000_000
    assert choose_fsdp(base, 80 * gib, 8)[0] == 1
    # 335e6 x 16 bytes = 5.0 GiB against 40 % of 8 GiB (v3 core) = 3.2 GiB
    assert choose_fsdp(large, 8 * gib, 8)[0] == 2
    assert "fsdp=2" in choose_fsdp(large, 8 * gib, 8)[1]
    assert choose_fsdp(large, None, 8)[0] == 1
    assert "more devices" in choose_fsdp(100 * large, 8 * gib, 4)[1]


class Encoding:
    """Trains an encoder towards zeros."""

    def __init__(self):
        self.encoder = BertEncoder(
            BertConfig(
                vocab_size=8192,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=64,
            ),
            Execution(layers="scan"),
        )

    def init(self, key):
        return init_params(self.encoder, key)

    def prepare(self, batch, key):
        return batch

    def denominators(self, batch):
        return {}

    def loss(self, params, batch, denominators, dropout_key):
        hidden = self.encoder.apply({"params": params}, batch["ids"], batch["ids"])
        return jnp.mean(hidden**2), {}


@functools.cache
def collectives(sizes, rows):
    """(kind, bytes, executions) of the exchanges of a step on 8 devices, rows of 64 tokens."""
    objective, trainer = Encoding(), Trainer(make_optimizer(OptimizerSettings(), 1e-3), mesh_of(sizes))
    batch = {"ids": jax.ShapeDtypeStruct((rows, 64), jnp.int32, sharding=batch_sharding(trainer.mesh))}
    compiled = trainer.train_step(objective).lower(trainer.abstract_state(objective), batch).compile()
    return [
        (i.opcode, sum(hlo.array_bytes(i.shape)), times)
        for i, times in hlo.Program(compiled.as_text()).instructions()
        if i.opcode.removesuffix("-start") in hlo.COLLECTIVES
    ]


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1)])
def test_under_fsdp_devices_exchange_weights_and_not_activations(sizes):
    few, many = (sum(size * times for _, size, times in collectives(sizes, rows)) for rows in (16, 64))
    # Ids, and the looked-up word vectors, there and back, are all that travels with the rows.
    assert many - few < 2.5 * (64 - 16) * 64 * 32 * 4 / 8, (few, many)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (4, 1, 2)])
def test_no_device_gathers_the_vectors_of_all_rows(sizes):
    """Such an all-gather is what XLA warns of as an involuntary full rematerialization."""
    found = collectives(sizes, 16)
    vectors = 16 * 64 * 32 * 4
    assert found
    assert not [size for kind, size, _ in found if "all-gather" in kind and size > vectors / 4]


@pytest.mark.parametrize(
    ("sizes", "sums"),
    [
        ((8, 1, 1), ["all-reduce [8192,32]"]),
        ((1, 8, 1), ["reduce-scatter [8192,4]"]),
        ((2, 4, 1), ["all-reduce [8192,8]", "reduce-scatter [8192,8]"]),
    ],
)
def test_gradients_of_the_word_table_are_added_up_over_devices_once(sizes, sums):
    """It has two uses, the lookup and the MLM decoder."""
    objective = PretrainingObjective(BertForPreTraining(Encoding().encoder.config), masking=None)
    trainer = Trainer(make_optimizer(OptimizerSettings(), 1e-3), mesh_of(sizes))
    tokens, masked, pair = ((8, n) for n in (64, 4, 1))
    shapes = {
        "input_ids": tokens,
        "attention_mask": tokens,
        "token_type_ids": tokens,
        "mlm_positions": masked,
        "mlm_labels": masked,
        "mlm_weights": masked,
        "nsp_labels": pair,
        "nsp_weights": pair,
    }
    batch = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32 if name.endswith("weights") else jnp.int32, sharding=batch_sharding(trainer.mesh)
        )
        for name, shape in shapes.items()
    }
    compiled = trainer.train_step(objective).lower(trainer.abstract_state(objective), batch).compile()
    found = [
        f"{i.opcode.removesuffix('-start')} {shape}"
        for i, _ in hlo.Program(compiled.as_text()).instructions()
        if i.opcode.removesuffix("-start") in hlo.COLLECTIVES
        for shape in re.findall(r"\[8192,\d+\]", i.shape)
    ]  # of combined ones, all
    gathered = ["all-gather [8192,32]"] if sizes[1] > 1 else []
    assert sorted(found) == sorted(gathered + sums)


@pytest.mark.parametrize("rows, refused", [(160, False), (640, True)])
def test_steps_of_a_gpu_are_refused_only_where_half_of_what_the_arithmetic_finds_does_not_fit(
    monkeypatch, rows, refused
):
    """Its kernels keep less than the arithmetic counts: large, 32 rows of 512, takes 18.4 GB, and it finds 27.7."""
    monkeypatch.setattr(hardware, "device_bytes", lambda device: 75e9)
    shape = {"data": 1, "fsdp": 1, "tensor": 1}
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(platform="gpu")], size=1, shape=shape)
    told = "a step of 640 x 512 tokens takes 2.* GiB or more, and this machine has 69.8, .*accumulation=N"
    with pytest.raises(ValueError, match=told) if refused else contextlib.nullcontext():
        assert check_memory(PRESETS["large"], (rows, 512, 77), mesh, 1, "none") == []
