"""The fine-tuning loop on toy tasks and tiny models."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import OptimizerSettings, finetune_config, frozen, walk
from bertjax.formats import files
from bertjax.model import heads
from bertjax.model.heads import shared_init
from bertjax.model.layers import described
from bertjax.model.presets import BertConfig
from bertjax.tasks import finetune, kinds, metrics, results, sweep
from bertjax.tasks.best import Best
from bertjax.tasks.custom import TableTask
from bertjax.tokenization import WordPieceTokenizer
from bertjax.training import sharding
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer, with_schedule_in_state
from tests.fakes import SPECIALS

VOCAB = [*SPECIALS, "good", "bad", "film", "a", "the", "very"]
CONFIG = BertConfig(
    vocab_size=len(VOCAB),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def write_table(folder, name, rows, seed):
    """Filler words around 'good' or 'bad', which is the class."""
    rng = np.random.default_rng(seed)
    lines = ["text\tlabel"]
    for _ in range(rows):
        words = list(rng.choice(["film", "a", "the", "very"], rng.choice([2, 3, 4, 20])))
        label = str(rng.choice(["good", "bad"]))
        words.insert(rng.integers(0, len(words) + 1), label)
        lines.append(" ".join(words) + "\t" + label)
    (folder / name).write_text("\n".join(lines) + "\n")


SETTINGS = frozen(finetune_config()).replace({"task.max_length": 32, "task.buckets": 2, "task.eval_batch_size": 16})


def run_of(rate, rows, epochs, seed=0):
    """The settings of one run."""
    return SETTINGS.replace({"optimizer.learning_rate": rate, "batch_size": rows, "task.epochs": epochs, "seed": seed})


@pytest.fixture
def tuner(tmp_path):
    write_table(tmp_path, "train.tsv", 192, 0)
    write_table(tmp_path, "dev.tsv", 41, 1)
    task = TableTask(tmp_path, {"train": "train.tsv", "dev": "dev.tsv"})
    tokenizer = WordPieceTokenizer(VOCAB, do_lower_case=True)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return finetune.FineTuner(task, tokenizer, CONFIG, shared_init, SETTINGS, mesh=mesh)


@pytest.mark.parametrize("name", dict(walk(OptimizerSettings))["schedule"].allowed)
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_schedule_in_the_state_equals_the_compiled_one(name, warmup):
    optimizer = with_schedule_in_state(make_optimizer(OptimizerSettings(), 1.0), name)
    state = {"schedule": {"peak": 3e-5, "warmup_steps": warmup, "total_steps": 40}}
    expected = learning_rate_schedule(name, 3e-5, warmup, 40)
    for step in range(42):
        found = optimizer.learning_rate(step, state)
        np.testing.assert_allclose(found, expected(step), rtol=1e-6, atol=1e-12)


@described
class MeanOfTokens(heads.TaskNetwork):
    """A head of one's own, which says nothing of vectors."""

    num_labels: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.classifier = self._dense(self.num_labels, self.head_init)

    def _logits(self, hidden, attention_mask, dropout_key):
        return self.classifier.float32(hidden.mean(1))


def test_a_head_of_ones_own_predicts_and_shows_examples_without_a_map(tuner, monkeypatch, tmp_path):
    kind = type("Mean", (kinds.Classification,), {"network": MeanOfTokens})()
    monkeypatch.setitem(kinds.KINDS, "classification", kind)
    own = finetune.FineTuner(tuner.task, tuner.tokenizer, CONFIG, shared_init, SETTINGS, mesh=tuner.mesh)
    results.write_predictions(own, shared_init(own.model, jax.random.key(0)), ("dev",), tmp_path)
    assert (tmp_path / "examples.json").exists() and not (tmp_path / "map.json").exists()


def test_outputs_that_are_no_numbers_score_nothing(tuner, monkeypatch):
    """As after a learning rate that was too high. An argmax takes NaN for the first class, 'bad'."""
    features = tuner.data("dev")[1]
    for value in (np.nan, -np.inf):
        outputs = [np.array([0.0, 1.0], np.float32)] * (len(features) - 1) + [np.array([value, 0.0], np.float32)]
        monkeypatch.setattr(tuner, "predict", lambda *_, made=outputs: made)
        scores = tuner.evaluate({})
        assert scores["accuracy"] == scores["macro_f1"] == 0.0 and metrics.NOT_FINITE in scores.flags
        assert scores["majority"] > 0  # which is of the gold alone
        assert "confusion" not in scores.details  # nor a table, in which the report would show them
    outcome = sweep.Outcome({}, 0, 0.0, {}, (metrics.NOT_FINITE,), 1, 1.0)
    assert outcome.degenerate


def test_an_evaluation_without_numbers_is_never_the_best():
    """Its scores are 0.0, above a correlation below it and as good as that of a constant answer."""
    broken = metrics.Scores({"matthews": 0.0, "accuracy": 0.0}, (metrics.NOT_FINITE,))
    best = Best(0, None)
    for step in (1, 2):  # which says what the checkpoints are ranked by
        assert np.isnan([*best.update(step, broken, 0.0, {}).values()]).all() and best.params is None
    best.update(3, metrics.Scores({"matthews": -0.5}), -0.5, {})
    best.update(4, broken, 0.0, {})
    assert (best.step, best.value) == (3, -0.5)


def test_result_json_has_null_for_an_evaluation_without_numbers(tuner):
    history = ((1, np.nan), (2, 0.5))
    trained = finetune.Trained(SETTINGS, {}, metrics.Scores({"accuracy": 0.5}), 0.5, 2, 2, history, 1.0)
    found = json.loads(json.dumps(results.result_json(tuner, trained, "none"), allow_nan=False))
    assert found["history"] == [[1, None], [2, 0.5]]


@pytest.mark.slow
def test_a_toy_task_is_learnt_and_runs_share_their_compiled_steps(tuner):
    first = tuner.run(run_of(5e-3, 16, 6))
    assert first.value > 0.9
    assert len(first.history) == 6 and first.best_step in dict(first.history)
    (step,) = (found[1] for key, found in tuner.trainer._compiled.items() if key[0] == "train")
    compiled = step._cache_size()
    assert compiled <= 2  # one a bucket
    tuner.run(run_of(1e-3, 16, 1, 3))
    assert step._cache_size() == compiled
    assert tuner._predict._cache_size() <= 2
    result = results.result_json(tuner, first, "none")
    json.dumps(result, allow_nan=False)
    assert result["rows"] == {"train": 192, "dev": 41} and len(result["data"]["dev"]) == 64


@pytest.mark.slow
def test_training_on_packed_rows_gives_the_losses_and_scores_of_padded_ones(tuner):
    """Without dropout, to rounding: the same examples are in each step. The packed ones on several devices."""
    found = []
    for pack, mesh in (("none", tuner.mesh), ("all", sharding.make_mesh(devices=jax.devices()[:4]))):
        settings = SETTINGS.replace({"task.pack": pack})
        own = finetune.FineTuner(tuner.task, tuner.tokenizer, CONFIG, shared_init, settings, mesh=mesh)
        assert (own.training_shapes(16)[0].slots > 1) == (pack == "all")
        found.append(own.run(settings.replace({"optimizer.learning_rate": 1e-3, "batch_size": 16, "task.epochs": 2})))
    one, other = found
    assert one.steps == other.steps and one.scores.values == pytest.approx(other.scores.values)
    for a, b in zip(*(jax.tree.leaves(trained.params) for trained in found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed(tuner):
    runs = [tuner.run(run_of(1e-3, 16, 1, seed)) for seed in (1, 1, 2)]
    leaves = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(r.params)]) for r in runs]
    np.testing.assert_array_equal(leaves[0], leaves[1])
    assert np.abs(leaves[0] - leaves[2]).max() > 1e-4


@pytest.mark.slow
def test_predictions_do_not_depend_on_bucket_batch_or_devices(tuner):
    """41 rows on one device and on eight, in batches of 16, against each row alone."""
    params = shared_init(tuner.model, jax.random.key(0))
    _, features = tuner.data("dev")
    outputs = tuner.predict(params, features)
    assert len(outputs) == 41
    model = jax.jit(tuner.model.apply)
    for length in {len(row["input_ids"]) for row in features[:6]}:
        i = next(i for i, row in enumerate(features) if len(row["input_ids"]) == length)
        row = features[i]["input_ids"][None]
        alone = model({"params": params}, row, jnp.ones_like(row), jnp.zeros_like(row))
        np.testing.assert_allclose(outputs[i], alone[0], atol=2e-6)
    spread = finetune.FineTuner(
        tuner.task, tuner.tokenizer, CONFIG, shared_init, tuner.settings, mesh=sharding.make_mesh()
    )
    np.testing.assert_allclose(spread.predict(params, features), outputs, atol=2e-6)


def test_a_json_file_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "finetune.json"
    files.write_json(path, {"seed": 1})

    def stopped(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        files.write_json(path, {"seed": 2})
    assert json.loads(path.read_text()) == {"seed": 1}
