"""Schedules and optimizers against the original's formulas, recomputed here in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bertjax.config import OptimizerSettings, default_config, walk
from bertjax.config_checks import check_config
from bertjax.training import sharding
from bertjax.training.optimizer import global_norm, layerwise_decay_rules, learning_rate_schedule, make_optimizer


def params_and_gradients(seed=0, steps=1):
    rng = np.random.default_rng(seed)
    shapes = {"encoder": {"dense": {"kernel": (4, 3), "bias": (3,)}, "layer_norm": {"scale": (3,), "bias": (3,)}}}

    def draw(scale):
        return jax.tree.map(
            lambda s: rng.normal(0, scale, s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
        )

    return draw(0.5), [draw(10.0 ** rng.uniform(-2, 1)) for _ in range(steps)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The first two rows: the formulas of google-research/bert optimization.py (polynomial_decay
        # from step 0, warm-up where step < warmup) and of transformers' get_linear_schedule.
        ("linear", [0, 5e-5, 9e-5, 9e-5, 4.5e-5, 0]),
        ("linear_after_warmup", [0, 5e-5, 9e-5, 1e-4, 5e-5, 0]),
        # base_lr * (1 - progress) ** 0.5 of NVIDIA's PolyWarmUpScheduler (which is a step ahead).
        ("polynomial", [0, 5e-5, 9e-5, 9.486833e-5, 6.708204e-5, 0]),
        ("cosine", [0, 5e-5, 9e-5, 1e-4, 5e-5, 0]),
        ("constant", [0, 5e-5, 9e-5, 1e-4, 1e-4, 1e-4]),
    ],
)
def test_schedule_values(name, expected):
    schedule = learning_rate_schedule(name, 1e-4, 10, 100)
    values = [float(schedule(step)) for step in (0, 5, 9, 10, 55, 100)]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-11)


def test_the_rate_stays_at_its_end_beyond_the_last_step():
    for name in ("linear", "linear_after_warmup", "cosine"):
        assert float(learning_rate_schedule(name, 1.0, 10, 100)(5000)) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("name", dict(walk(OptimizerSettings))["schedule"].allowed)
def test_no_warmup_starts_at_the_peak(name):
    schedule = learning_rate_schedule(name, 1e-4, 0, 10)
    assert float(schedule(0)) == pytest.approx(1e-4)
    optimizer = make_optimizer(OptimizerSettings(), schedule)
    params, (gradients,) = params_and_gradients()
    changes, _ = optimizer.update(gradients, optimizer.init(params), params, step=0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(changes))
    config = default_config()
    config.optimizer.schedule = name
    check_config(config)


def test_warmup_stable_decay_is_constant_and_then_one_minus_the_root():
    rate = learning_rate_schedule("warmup_stable_decay", 1.0, 10, 100, decay_share=0.2)
    assert [float(rate(step)) for step in (0, 5, 10, 50, 80)] == [0, 0.5, 1, 1, 1]
    assert [float(rate(step)) for step in (85, 95, 100)] == pytest.approx([0.5, 1 - 0.75**0.5, 0], abs=1e-6)


def test_warmup_of_the_whole_run_is_finite():
    schedule = learning_rate_schedule("linear_after_warmup", 1e-4, 10, 10)
    assert np.isfinite([float(schedule(step)) for step in range(12)]).all()


@pytest.mark.parametrize(("bias_correction", "expected"), [(False, 3.162178), (True, 0.999999)])
def test_first_update_with_and_without_bias_correction(bias_correction, expected):
    # g = 1, b = (0.9, 0.999), eps 1e-6: 0.1 / (sqrt(0.001) + 1e-6), or 1 / (1 + 1e-6).
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0, clip_norm=0, bias_correction=bias_correction), 0.1)
    params = {"w": jnp.zeros(())}
    changes, _ = optimizer.update({"w": jnp.ones(())}, optimizer.init(params), params, step=0)
    assert float(changes["w"]) / -0.1 == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("name", ["adamw", "lamb", "stableadamw"])
def test_hundred_steps_equal_an_independent_float64_version(name, bias_correction):
    params, gradients = params_and_gradients(seed=1, steps=100)
    schedule = learning_rate_schedule("linear", 1e-2, 10, 100)
    optimizer = make_optimizer(OptimizerSettings(name, bias_correction=bias_correction), schedule)

    expected = {path: np.float64(leaf) for path, leaf in leaves(params).items()}
    m = {path: np.zeros_like(p) for path, p in expected.items()}
    v = {path: np.zeros_like(p) for path, p in expected.items()}
    for t, step_gradients in enumerate(gradients):
        g = {path: np.float64(leaf) for path, leaf in leaves(step_gradients).items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        lr = 1e-2 * (t / 10 if t < 10 else 1 - t / 100)
        for path, p in expected.items():
            clipped = g[path] * 1.0 / max(norm, 1.0)
            m[path] = 0.9 * m[path] + 0.1 * clipped
            v[path] = 0.999 * v[path] + 0.001 * clipped**2
            c1, c2 = (1 - 0.9 ** (t + 1), 1 - 0.999 ** (t + 1)) if bias_correction else (1, 1)
            u = m[path] / c1 / (np.sqrt(v[path] / c2) + 1e-6)
            if path.endswith("kernel"):
                u = u + 0.01 * p
                if name == "lamb":
                    u = u * np.linalg.norm(p) / np.linalg.norm(u)
            if name == "stableadamw":  # Wortsman et al. 2023, algorithm 2
                u = u / max(1, np.sqrt(np.mean(clipped**2 / np.maximum(v[path] / c2, 1e-12))))
            expected[path] = p - lr * u

    state = optimizer.init(params)
    step_fn = jax.jit(lambda g, s, p, t: optimizer.update(g, s, p, step=t))
    for t, step_gradients in enumerate(gradients):
        changes, state = step_fn(step_gradients, state, params, t)
        params = jax.tree.map(jnp.add, params, changes)
    for path, value in leaves(params).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-5)


def leaves(tree):
    return {"/".join(str(k.key) for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_state_is_float32_for_bfloat16_parameters():
    params = {"w": jnp.ones((3,), jnp.bfloat16)}
    optimizer = make_optimizer(OptimizerSettings(), 0.1)
    state = optimizer.init(params)
    changes, state = optimizer.update(params, state, params, step=0)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert changes["w"].dtype == jnp.bfloat16


def test_a_frozen_parameter_has_no_state_no_update_and_no_part_in_the_norm():
    optimizer = make_optimizer(OptimizerSettings(), 0.1, learning_rate_rules=[("^encoder/", 0.0)])
    params = {"encoder": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
    gradients = {"encoder": {"w": jnp.full(2, 1e6)}, "head": {"w": jnp.array([3.0, 4.0])}}
    state = optimizer.init(params)
    assert list(state["mean"]) == ["head"]
    assert float(optimizer.gradient_norm(gradients)) == pytest.approx(5)
    changes, _ = optimizer.update(gradients, state, params, step=0)
    assert not np.any(changes["encoder"]["w"])
    assert np.all(changes["head"]["w"] != 0)


def test_the_first_matching_rule_sets_the_learning_rate():
    rules = layerwise_decay_rules(2, 0.5)
    params = {
        "embeddings": {"w": jnp.zeros(1)},
        "layer_0": {"w": jnp.zeros(1)},
        "layer_1": {"w": jnp.zeros(1)},
        "head": {"w": jnp.zeros(1)},
    }
    optimizer = make_optimizer(OptimizerSettings(clip_norm=0), 1.0, rules)
    gradients = jax.tree.map(jnp.ones_like, params)
    changes, _ = optimizer.update(gradients, optimizer.init(params), params, step=0)
    ratio = {name: float(changes[name]["w"][0] / changes["head"]["w"][0]) for name in params}
    # depth counted as in ELECTRA: two below the head, then one for each layer
    assert ratio == pytest.approx({"head": 1, "layer_1": 0.25, "layer_0": 0.125, "embeddings": 0.0625})


def test_a_rule_that_matches_nothing_is_refused():
    optimizer = make_optimizer(OptimizerSettings(), 1.0, learning_rate_rules=[("encodr", 0.0)])
    with pytest.raises(ValueError, match="encodr.*matches no parameter.*encoder/w"):
        optimizer.init({"encoder": {"w": jnp.ones(2)}})


def test_rules_that_leave_nothing_to_train_are_refused():
    optimizer = make_optimizer(OptimizerSettings(), 1.0, learning_rate_rules=[("enc", 0.0), ("head", 0.0)])
    with pytest.raises(ValueError, match="config.task.freeze leaves no parameter to train: 'enc', 'head'"):
        optimizer.init({"encoder": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}})


def run_steps(optimizer, params, gradients):
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients):
        changes, state = optimizer.update(gradient, state, params, step=step)
        params = jax.tree.map(jnp.add, params, changes)
    return params


def test_adamw_with_bias_correction_is_optax_adamw():
    params, gradients = params_and_gradients(steps=20)
    schedule = learning_rate_schedule("linear", 1e-2, 4, 20)
    ours = make_optimizer(OptimizerSettings(bias_correction=True), schedule)
    theirs = make_optimizer(OptimizerSettings("optax.adamw", {"eps": 1e-6}), schedule)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        run_steps(ours, params, gradients),
        run_steps(theirs, params, gradients),
    )


def test_twenty_steps_of_adamw_are_the_originals_formula_in_float32():
    params, gradients = params_and_gradients(steps=20)
    optimizer = make_optimizer(OptimizerSettings(clip_norm=0), 1e-3)
    found = leaves(run_steps(optimizer, params, gradients))
    for path, p in leaves(params).items():
        m, v = np.zeros_like(p), np.zeros_like(p)
        for step_gradients in gradients:
            g = leaves(step_gradients)[path]
            m = np.float32(0.9) * m + np.float32(0.1) * g
            v = np.float32(0.999) * v + np.float32(0.001) * g * g
            u = m / (np.sqrt(v) + np.float32(1e-6))
            p = p - np.float32(1e-3) * (u + np.float32(0.01) * p if path.endswith("kernel") else u)
        np.testing.assert_allclose(found[path], p, rtol=0, atol=1.2e-7)  # two ulp of a number below 1


# ------------------------------------------------------------------------------ optimizers of optax

OTHERS = {
    "optax.lion": {"b1": 0.8},
    "optax.sgd": {"momentum": 0.9, "nesterov": True},
    "optax.adafactor": {"min_dim_size_to_factor": 8, "momentum": 0.5},
    "optax.contrib.muon": {"adam_b1": 0.8},
    "optax.lars": {"momentum": 0.5},
}


def other(name, learning_rate=0.1, rules=(), **values):
    return make_optimizer(OptimizerSettings(name, OTHERS[name], **values), learning_rate, rules)


def small_params():
    random = np.random.default_rng(0)
    return {
        name: {"kernel": np.float32(random.normal(size=(16, 8))), "bias": np.float32(random.normal(size=8))}
        for name in ("embeddings", "layer_0", "head")
    }


@pytest.mark.parametrize("name", OTHERS)
def test_only_what_no_decay_does_not_match_decays(name):
    params, scale = small_params(), {"optax.lars": 0.001}.get(name, 1)  # of its trust ratio: |p| / |decay p|
    optimizer = other(name, weight_decay=0.5, no_decay="bias|^head/")
    still = jax.tree.map(np.zeros_like, params)
    changes, _ = optimizer.update(still, optimizer.init(params), params, step=0)
    for path, change in leaves(changes).items():
        decayed = path.endswith("kernel") and not path.startswith("head")
        expected = -0.1 * (0.5 if name != "optax.lars" else scale) * leaves(params)[path]
        np.testing.assert_allclose(change, expected if decayed else 0, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OTHERS)
def test_frozen_parameters_have_no_state_and_layers_their_own_rate(name):
    params, gradients = small_params(), jax.tree.map(np.sign, small_params())
    rules = [("^embeddings/", 0.0), ("^layer_0/", 0.25)]
    optimizer, plain = other(name, 0.1, rules), other(name, 0.1, [("^embeddings/", 0.0)])
    state = optimizer.init(params)
    assert not any("embeddings" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state))
    gradients["embeddings"]["kernel"][0, 0] = np.inf  # no part in the norm either
    changes, _ = optimizer.update(gradients, state, params, step=0)
    wanted, _ = plain.update(gradients, state, params, step=0)
    for path, change in leaves(changes).items():
        scale = {"embeddings": 0, "layer_0": 0.25, "head": 1}[path.split("/")[0]]
        np.testing.assert_allclose(change, scale * leaves(wanted)[path], rtol=1e-6)
        assert scale == 0 or np.all(change != 0)


def test_gradients_are_clipped_and_the_rate_follows_the_schedule():
    params, gradients = small_params(), jax.tree.map(np.sign, small_params())
    schedule = learning_rate_schedule("linear", 0.1, 0, 10)
    optimizer = make_optimizer(OptimizerSettings("optax.sgd", weight_decay=0, clip_norm=2.0), schedule)
    changes, _ = optimizer.update(gradients, optimizer.init(params), params, step=5)
    assert float(global_norm(changes)) == pytest.approx(0.05 * 2.0, rel=1e-5)


def test_muon_orthogonalises_matrices_and_gives_the_rest_to_adam():
    params = small_params() | {"word_embeddings": np.ones((16, 8), np.float32)}
    gradients = jax.tree.map(np.sign, params)
    optimizer = other("optax.contrib.muon", 1.0, weight_decay=0, clip_norm=0)
    changes, _ = optimizer.update(gradients, optimizer.init(params), params, step=0)
    for name in ("layer_0", "head"):
        singular = np.linalg.svd(changes[name]["kernel"], compute_uv=False)
        assert 0.6 < singular.min() and singular.max() < 1.3  # five steps of Newton and Schulz come so near to 1
    nesterov = 0.8 * 0.2 / (1 - 0.8**2) + 0.2 / (1 - 0.8)  # the first step of its Adam, in units of the sign
    for path in ("head/bias", "layer_0/bias", "word_embeddings"):
        np.testing.assert_allclose(leaves(changes)[path], -nesterov * leaves(gradients)[path], rtol=1e-5)


def test_muon_over_all_layers_at_once_equals_optax_on_each_matrix():
    random = np.random.default_rng(0)
    params = {f"layer_{i}": {"kernel": np.float32(random.normal(size=(16, 8 + i // 10)))} for i in range(12)}
    ours = make_optimizer(OptimizerSettings("optax.contrib.muon", weight_decay=0, clip_norm=0), 1.0)
    theirs = optax.contrib.muon(1.0)
    state, their_state = ours.init(params), theirs.init(params)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        gradients = jax.tree.map(lambda leaf: np.float32(random.normal(size=leaf.shape)), params)
        changes, state = update(gradients, state, params, step=step)
        wanted, their_state = their_update(gradients, their_state, params)
        for path, change in leaves(wanted).items():
            np.testing.assert_allclose(leaves(changes)[path], change, atol=2e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_an_optax_optimizer_is_sharded_like_its_parameters(name):
    mesh = sharding.make_mesh(data=4, fsdp=2)
    params = {"encoder": {"layer_0": {"intermediate": {"kernel": jnp.zeros((16, 32))}}}}
    state = sharding.tree_shardings(jax.eval_shape(other(name).init, params), mesh)
    specs = {leaf.spec[-2:] for leaf in jax.tree.leaves(state) if any(leaf.spec)}  # muon's layers stand before them
    wanted = sharding.tree_shardings(params, mesh)["encoder"]["layer_0"]["intermediate"]["kernel"]
    assert any(wanted.spec) and tuple(wanted.spec) in specs


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("adamv", {}, "'adamv' is unknown. Did you mean 'adamw'"),
        ("lion", {}, "Did you mean 'optax.lion'"),
        ("optax.muon", {}, "Did you mean 'optax.contrib.muon'"),
        ("optax.xyz", {}, "Valid: adamw, lamb, .*optax.lion"),
        ("optax.lion", {"beta": 0.9}, r"no argument 'beta'.* It takes \(b1=0.9, b2=0.99, mu_dtype=None\)"),
        ("optax.sgd", {"momentun": 0.9}, "Did you mean 'momentum'"),
        ("optax.lion", {"mask": 1}, "is set elsewhere: config.optimizer.no_decay"),
        ("optax.lion", {"weight_decay": 1}, "is set elsewhere: config.optimizer.weight_decay"),
        ("optax.contrib.muon", {"muon_weight_dimension_numbers": 1}, "set elsewhere: Muon trains all matrices but"),
        ("optax.contrib.dpsgd", {}, "needs --config.optimizer.options.l2_norm_clip"),
        ("optax.contrib.schedule_free_adamw", {}, "not supported: the weights that it evaluates"),
        ("adamw", {"b1": 0.8}, "options.b1 has no effect on config.optimizer.name='adamw'"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_before_the_run(name, options, words):
    config = default_config()
    config.optimizer.name, config.optimizer.options = name, options
    with pytest.raises(ValueError, match=words):
        check_config(config)


def test_settings_of_adamw_are_refused_beside_another_optimizer():
    config = default_config()
    config.optimizer.update(name="optax.lion", b2=0.98)
    with pytest.raises(ValueError, match="optimizer.b2=0.98 has no effect on .*'optax.lion'.* leave it at 0.999"):
        check_config(config)


@pytest.mark.parametrize(("name", "options"), [("optax.lion", {"b1": "much"}), ("optax.lbfgs", {})])
def test_an_optimizer_that_fails_on_a_small_example_is_refused(name, options):
    with pytest.raises(ValueError, match=f"config.optimizer: {name}.* cannot train here: TypeError"):
        make_optimizer(OptimizerSettings(name, options), 0.1)


def test_an_optimizer_that_draws_has_a_state_that_checkpoints_hold_and_a_seed():
    params = {"kernel": jnp.ones((2, 3))}
    changes = []
    for seed in (0, 1):
        optimizer = make_optimizer(OptimizerSettings("optax.noisy_sgd", {"key": seed}), 0.1)
        state = optimizer.init(params)
        assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32) for leaf in jax.tree.leaves(state))
        changes.append(optimizer.update(params, state, params, step=0, updates=0)[0]["kernel"])
    assert not np.allclose(*changes)


def test_lamb_without_its_bias_correction_is_said_at_the_start():
    from bertjax.pretraining.job import optimizer_text

    assert "bias" not in optimizer_text(OptimizerSettings())
    assert "bias_correction=true" in optimizer_text(OptimizerSettings("lamb"))
    assert "bias" not in optimizer_text(OptimizerSettings("lamb", bias_correction=True))
