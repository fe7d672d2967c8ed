"""The encoder: golden activations and norms, padding, dropout, every way of running it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bertjax.model.heads import BertForPreTraining, BertForTokenClassification, init_params
from bertjax.model.layers import LayerNorm, activation
from bertjax.model.lookup import gather_positions, small_table_lookup
from bertjax.model.presets import BertConfig, Execution

CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=24,
)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda k: init_params(BertForPreTraining(CONFIG), k))(jax.random.key(0))


def mesh_of(devices):
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


@functools.cache
def compiled(config):
    model = BertForPreTraining(config)
    return jax.jit(lambda params, a, k: model.apply({"params": params}, *a, **k))


def run(params, *args, config=CONFIG, **kwargs):
    return compiled(config)(params, args, kwargs)


LOSS_AND_GRADIENT = functools.cache(
    lambda execution: jax.jit(jax.value_and_grad(functools.partial(loss, execution=execution)))
)


def batch(rows=4, length=16, seed=1):
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[length], rng.integers(3, length, rows - 1)])
    mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
    return {
        "input_ids": jnp.asarray(rng.integers(5, 50, (rows, length)) * mask, jnp.int32),
        "attention_mask": jnp.asarray(mask),
        "token_type_ids": jnp.asarray((np.arange(length) >= lengths[:, None] // 2) * mask),
    }


def loss(params, inputs, key, execution):
    positions = jnp.zeros((inputs["input_ids"].shape[0], 2), jnp.int32).at[:, 1].set(2)
    mlm, nsp = BertForPreTraining(CONFIG, execution).apply(
        {"params": params}, **inputs, masked_positions=positions, dropout_key=key
    )
    return jnp.mean(mlm**2) + jnp.mean(nsp[..., 0] ** 2)


def assert_trees_close(a, b, rtol):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, atol=rtol * scale + 1e-9, err_msg=str(path))


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_silu_under_both_of_its_names(name):
    x = jnp.array([1.0, -3.0])  # x / (1 + exp(-x)) in float64
    np.testing.assert_allclose(activation(name)(x), [0.7310586, -0.1422776], atol=1e-6)
    assert BertConfig(hidden_act=name).hidden_act == name


def test_gelu_forms():
    # Exact: x * Phi(x) from scipy.stats.norm; tanh: the closed formula, both in float64.
    x = jnp.array([1.0, -3.0])
    np.testing.assert_allclose(activation("gelu")(x), [0.8413447, -0.0040497], atol=1e-7)
    # XLA's tanh on the CPU is good to a few ulp: 3e-7 of x.
    np.testing.assert_allclose(activation("gelu_new")(x), [0.8411920, -0.0036373], atol=3e-7)
    wide = jnp.linspace(-6, 6, 20_001)
    gap = jnp.abs(activation("gelu")(wide) - activation("gelu_new")(wide))
    assert float(gap.max()) == pytest.approx(4.735e-4, abs=2e-7)
    assert abs(float(wide[gap.argmax()])) == pytest.approx(2.68, abs=0.01)


def test_layer_norm_epsilon_comes_from_the_config():
    weights = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    x = jnp.array([1e-6, -1e-6])

    def layer_norm(epsilon):
        graph, _ = nnx.split(LayerNorm(2, epsilon))
        return nnx.merge(graph, weights)(x)

    np.testing.assert_allclose(layer_norm(1e-12), [0.7071068, -0.7071068], atol=1e-6)
    np.testing.assert_allclose(layer_norm(1e-6), [0.001, -0.001], atol=1e-8)


def test_initial_values_are_a_normal_cut_at_two_sigma_and_not_rescaled(params):
    kernels = np.concatenate([np.ravel(x) for p, x in jax.tree_util.tree_leaves_with_path(params) if x.ndim == 2])
    assert np.abs(kernels).max() <= 0.04
    # Deviation of a standard normal cut at 2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)) = 0.87962.
    assert kernels.std() == pytest.approx(0.02 * 0.87962, rel=0.02)
    layer = params["encoder"]["layer_0"]
    assert (layer["LayerNorm"]["scale"] == 1).all() and (layer["LayerNorm"]["bias"] == 0).all()
    assert (layer["output"]["bias"] == 0).all()


@pytest.mark.parametrize("head_init, deviation", [("truncated_normal", 0.880), ("normal", 1.0)])
def test_a_head_is_drawn_as_the_original_does_or_as_transformers(head_init, deviation):
    """0.880 is the deviation of a standard normal cut at 2: scipy.stats.truncnorm(-2, 2).std()."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    draw = jax.jit(init_params, static_argnums=0)
    head = draw(BertForTokenClassification(config, head_init=head_init, num_labels=2000), jax.random.key(0))[
        "classifier"
    ]["kernel"]
    assert np.std(head) / config.initializer_range == pytest.approx(deviation, abs=0.01)


def test_initial_values_do_not_depend_on_the_sharding():
    model = BertForPreTraining(dataclasses.replace(CONFIG, num_hidden_layers=1))
    params = jax.jit(lambda k: init_params(model, k))(jax.random.key(0))
    for devices, axes in ((8, ("data",)), (4, ())):
        split = NamedSharding(mesh_of(devices), PartitionSpec(*axes))
        whole = NamedSharding(mesh_of(devices), PartitionSpec())
        sizes = {id(x): x.shape[0] % devices == 0 for x in jax.tree.leaves(params)}
        shardings = jax.tree.map(
            lambda x, split=split, whole=whole, sizes=sizes: split if sizes[id(x)] else whole, params
        )
        other = jax.jit(lambda k: init_params(model, k), out_shardings=shardings)(jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, params, other)


def test_padding_never_changes_a_result(params):
    inputs = batch()
    positions = jnp.ones((4, 1), jnp.int32)
    base = run(params, **inputs, masked_positions=positions)
    padding = inputs["attention_mask"] == 0
    other = dict(inputs)
    other["input_ids"] = jnp.where(padding, 33, inputs["input_ids"])
    other["token_type_ids"] = jnp.where(padding, 1, inputs["token_type_ids"])
    changed = run(params, **other, masked_positions=positions)
    jax.tree.map(np.testing.assert_array_equal, base, changed)
    wider = {k: jnp.pad(v, ((0, 0), (0, 5))) for k, v in inputs.items()}
    padded = run(params, **wider, masked_positions=positions)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), base, padded)


def test_all_padding_row_is_finite_in_value_and_gradient(params):
    inputs = batch()
    inputs = {k: v.at[1].set(0) for k, v in inputs.items()}
    value, gradient = LOSS_AND_GRADIENT(Execution())(params, inputs, jax.random.key(0))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_packed_pairs_give_what_they_give_alone(params):
    rng = np.random.default_rng(0)
    a, b = rng.integers(5, 50, 9), rng.integers(5, 50, 6)
    types_a, types_b = np.arange(9) > 4, np.arange(6) > 2
    packed = run(
        params,
        jnp.asarray([np.concatenate([a, b, [0]])]),
        jnp.asarray([[1] * 9 + [2] * 6 + [0]]),
        jnp.asarray([np.concatenate([types_a, types_b, [0]])]).astype(int),
        position_ids=jnp.asarray([[*range(9), *range(6), 0]]),
        masked_positions=jnp.asarray([[3, 9 + 4]]),
        cls_positions=jnp.asarray([[0, 9]]),
    )
    for i, (ids, types, at) in enumerate(((a, types_a, 3), (b, types_b, 4))):
        mlm, nsp = run(
            params,
            jnp.asarray([ids]),
            jnp.ones((1, len(ids)), int),
            jnp.asarray([types]).astype(int),
            masked_positions=jnp.asarray([[at]]),
        )
        np.testing.assert_allclose(packed[0][0, i], mlm[0, 0], atol=1e-6)
        np.testing.assert_allclose(packed[1][0, i], nsp[0, 0], atol=1e-6)


def test_dropout_changes_with_the_key_and_is_absent_without_one(params):
    inputs = batch()
    function = LOSS_AND_GRADIENT(Execution())
    values = [function(params, inputs, jax.random.key(i))[0] for i in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    assert function(params, inputs, None)[0] == function(params, inputs, None)[0]


EXECUTIONS = [
    Execution(layers="scan", remat="full"),
    Execution(remat="dots", qkv="fused"),
    pytest.param(Execution(layers="scan"), marks=pytest.mark.slow),
    pytest.param(Execution(remat="full"), marks=pytest.mark.slow),
    pytest.param(Execution(remat="dots"), marks=pytest.mark.slow),
    pytest.param(Execution(remat="minimal"), marks=pytest.mark.slow),
    pytest.param(Execution(layers="scan", remat="dots"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("execution", EXECUTIONS, ids=lambda e: f"{e.layers}-{e.remat}-{e.qkv}")
def test_every_execution_gives_the_same_value_and_gradient_sharded_with_dropout(params, execution):
    inputs, key = batch(rows=8), jax.random.key(9)
    want = LOSS_AND_GRADIENT(Execution())(params, inputs, key)
    mesh = mesh_of(4)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    sharded = {k: jax.device_put(v, rows) for k, v in inputs.items()}
    whole = jax.device_put((params, key), NamedSharding(mesh, PartitionSpec()))
    got = LOSS_AND_GRADIENT(execution)(whole[0], sharded, whole[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_trees_close(got[1], want[1], 1e-5)


def test_bfloat16_differs_by_its_own_rounding_only(params):
    inputs, key = batch(), jax.random.key(4)
    exact, exact_gradient = LOSS_AND_GRADIENT(Execution())(params, inputs, key)
    value, gradient = LOSS_AND_GRADIENT(Execution(dtype="bfloat16"))(params, inputs, key)
    assert value == pytest.approx(exact, rel=2**-6)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact_gradient), strict=True):
        assert x.dtype == jnp.float32
        assert np.linalg.norm(x - y) < 2**-4 * np.linalg.norm(y) + 1e-6


def test_rows_longer_than_the_position_table_are_refused(params):
    ids = jnp.ones((1, 25), jnp.int32)
    with pytest.raises(ValueError, match="25 tokens exceed max_position_embeddings=24"):
        BertForPreTraining(CONFIG).apply({"params": params}, ids, ids)


def test_small_table_lookup_has_the_gradient_of_a_gather():
    table = jax.random.normal(jax.random.key(0), (5, 3))
    ids = jnp.array([[0, 4, 4, 1], [4, 2, 0, 0]])
    weight = jax.random.normal(jax.random.key(1), (2, 4, 3))
    got = jax.grad(lambda t: jnp.sum(small_table_lookup(t, ids) * weight))(table)
    want = np.zeros((5, 3), np.float64)
    np.add.at(want, np.asarray(ids), np.asarray(weight))
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_array_equal(small_table_lookup(table, ids), table[ids])


def test_gather_positions_is_exact_in_both_types():
    hidden = jax.random.normal(jax.random.key(0), (2, 6, 8))
    positions = jnp.array([[0, 5, 5], [3, 0, 0]])
    for x in (hidden, hidden.astype(jnp.bfloat16)):
        want = np.take_along_axis(np.asarray(x), np.asarray(positions)[..., None], axis=1)
        np.testing.assert_array_equal(np.asarray(gather_positions(x, positions)), want)


def test_three_segment_types_use_the_table():
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, type_vocab_size=3)
    own = jax.jit(lambda k: init_params(BertForPreTraining(config), k))(jax.random.key(0))
    ids = jnp.full((1, 4), 7)
    out = [run(own, ids, ids * 0 + 1, jnp.full((1, 4), kind), config=config)[0] for kind in range(3)]
    assert not np.allclose(out[0], out[2]) and not np.allclose(out[1], out[2])
