"""Time to quality: the fixed held-out rows are the trainer's own; the table and the crossing."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.command_line import load_config
from bertjax.config import OptimizerSettings, default_config, frozen
from bertjax.config_checks import check_config
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import init_params, pretraining_network
from bertjax.model.presets import PRESETS, modern
from bertjax.pretraining import job as pretraining
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.trainer import Trainer
from tests.benchmarks import quality, quality_curves

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def settings(random_store):
    return quality.Settings(str(random_store), "tiny", 1.0, ((32, 0.8), (64, 0.2)), 16, heldout_rows=24)


def test_the_saved_rows_and_masks_are_those_that_a_run_evaluates(settings, tmp_path):
    config = default_config()
    config.update_from_flattened_dict(settings.overrides("bertjax", tmp_path))
    check_config(config)
    job = pretraining.prepare(frozen(config), str(tmp_path / "run"))
    trainer = Trainer(make_optimizer(OptimizerSettings(), 0.0), job.mesh, config.seed)
    evaluation = job.evaluations[1]  # of the second phase, on rows of the first one's length
    params = jax.jit(evaluation.objective.init)(jax.random.key(3))
    expected = trainer.evaluate(evaluation.objective, params, evaluation.batches)

    @jax.jit
    def sums_of(batch):
        denominators = evaluation.objective.denominators(batch)
        return evaluation.objective.loss(params, batch, denominators, None)[1]

    total = np.zeros((2, 2))
    for batch in quality.heldout(settings, 32):
        assert batch["input_ids"].shape == (16, 32)
        sums = sums_of(batch)
        total += np.array([sums["mlm_loss"], sums["nsp_accuracy"]], np.float64)
    assert total[1, 1] == evaluation.batches.num_pairs > 0
    found = total[:, 0] / total[:, 1]
    np.testing.assert_allclose(found, [expected["mlm_loss"], expected["nsp_accuracy"]], rtol=1e-6)


def test_every_run_has_settings_that_the_program_accepts(settings, tmp_path):
    for name in (*quality_curves.LABELS, "recipe+masking.rate=0.4+execution.dtype=float8"):
        flags = [f"--config.{setting}={value}" for setting, value in settings.overrides(name, tmp_path).items()]
        config = load_config(f"bertjax:{quality.experiment(name)}", flags)
        check_config(config)
        minutes = 0.7 if name == "shorter" else 1.0
        assert config.budget_minutes == pytest.approx(minutes)
        assert config.phases == ((80_000, 32), (20_000, 64))
        rates = {"recipe": 0.25, "modern": 0.3, "muon": 0.3, "recipe+masking.rate=0.4+execution.dtype=float8": 0.4}
        assert config.masking.rate == rates.get(name, 0.15)


def test_settings_survive_their_file_and_are_not_mixed_with_others(settings, tmp_path):
    settings.save(tmp_path)
    assert quality.Settings.load(tmp_path) == settings
    with pytest.raises(ValueError, match="other settings.*choose another --out"):
        quality.prepare(dataclasses.replace(settings, batch_size=8), tmp_path)


def curve(*points):
    return [
        {"seconds": s, "step": 10 * s, "mlm_loss": loss, "mlm_accuracy": 0.5, "nsp_accuracy": 0.9} for s, loss in points
    ]


def test_the_crossing_lies_between_two_evaluations():
    falling = curve((10, 9.0), (20, 7.0), (30, 7.5), (40, 5.0))
    assert quality_curves.time_to(falling, 8.0) == 15
    assert quality_curves.time_to(falling, 6.25) == 35
    assert quality_curves.time_to(falling, 4.0) is None


def test_the_table_says_how_much_of_the_peers_time_was_needed(settings, tmp_path):
    for name, points in (("bertjax", ((10, 9.0), (50, 5.0), (100, 4.0))), ("peer", ((20, 9.0), (100, 6.0)))):
        (tmp_path / name).mkdir()
        quality_curves.write_curve(tmp_path / name, curve(*points))
    text = quality_curves.table(settings, tmp_path)
    assert "| bertjax | 100 | 1,000 | 160 | 4.000 | 50.0% | 90.0% | - | - | 40 s (40%) |" in text
    (tmp_path / "scores.json").write_text(json.dumps({"bertjax": {"64": {"mlm_loss": 3.5, "mlm_loss_beyond": 3.75}}}))
    assert "| 90.0% | 3.500 | 3.750 | 40 s (40%) |" in quality_curves.table(settings, tmp_path)
    quality_curves.draw(settings, tmp_path)
    assert (tmp_path / "quality.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_that_is_still_going_has_the_curve_of_what_it_has_logged(settings, tmp_path):
    assert quality_curves.read_curve(tmp_path / "bertjax") == []
    directory = tmp_path / "bertjax"
    directory.mkdir()
    (directory / "started").write_text("1000.5")
    assert quality_curves.read_curve(directory) == []
    record = {"step": 7, "time": 1030.5, "eval/mlm_loss": 6.0, "eval/mlm_accuracy": 0.1, "eval/nsp_accuracy": 0.5}
    (directory / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "time": 1010.0, "loss": 9.0})
        + "\n"
        + json.dumps(record)
        + "\n"
        + '{"step": 9, "time": 10'
    )
    assert quality_curves.read_curve(directory) == [
        {"seconds": 30.0, "step": 7, "mlm_loss": 6.0, "mlm_accuracy": 0.1, "nsp_accuracy": 0.5}
    ]
    assert "| bertjax | 30 | 7 |" in quality_curves.table(settings, tmp_path)
    quality_curves.draw(settings, tmp_path)


def test_runs_without_next_sentences_are_drawn_and_scored_on_the_same_rows(settings, tmp_path):
    settings = dataclasses.replace(settings, runs=("bertjax", "modern"))
    quality.prepare(settings, tmp_path)
    vocab_size = 5 + len(WORDS)
    for name, config in (("bertjax", PRESETS["tiny"]), ("modern", modern(2, 128, 192))):
        config = dataclasses.replace(config, vocab_size=vocab_size)
        network = pretraining_network(config, name == "bertjax")(config)
        params = init_params(network, jax.random.key(0))
        (tmp_path / name).mkdir()
        write_directory(tmp_path / name / "model", config, params, type(network).__name__)
    (tmp_path / "modern" / "started").write_text("1000.5")
    record = {"step": 7, "time": 1030.5, "eval/mlm_loss": 6.0, "eval/mlm_accuracy": 0.1}
    (tmp_path / "modern" / "metrics.jsonl").write_text(json.dumps(record) + "\n")

    scores = quality.score(tmp_path)
    assert "nsp_accuracy" in scores["bertjax"]["32"] and "nsp_accuracy" not in scores["modern"]["32"]
    assert 3.5 < scores["modern"]["32"]["mlm_loss"] < 4.8  # random weights: about ln(65)
    assert "| bertjax, modern encoder | 30 | 7 | 0 | 6.000 | 10.0% | - |" in quality_curves.table(settings, tmp_path)
    quality_curves.draw(settings, tmp_path)


def test_shares_that_do_not_add_up_are_refused():
    assert quality.parse_phases("128:0.67,512:0.33") == ((128, 0.67), (512, 0.33))
    with pytest.raises(ValueError, match="add up to 1"):
        quality.parse_phases("128:0.85,512:0.2")
    with pytest.raises(ValueError, match="LENGTH:SHARE"):
        quality.parse_phases("128")


@pytest.mark.parity
def test_the_peer_has_the_same_schedule_and_the_same_evaluation(settings, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from bertjax.interop import load_model
    from bertjax.training import losses
    from tests.benchmarks import quality_peer

    ours = learning_rate_schedule("linear_after_warmup", 1.0, 6_000, quality.UNITS)
    for place in (0, 10, 5_999, 6_000, 50_000, quality.UNITS):
        assert quality_peer.schedule(place, 6_000) == pytest.approx(float(ours(place)), abs=1e-6)

    batch = next(quality.heldout(settings, 32))
    config = transformers.BertConfig(
        vocab_size=65,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_act="gelu_new",
    )
    peer = transformers.BertForPreTraining(config).eval()
    rows = {name: torch.from_numpy(np.array(batch[name])) for name in quality.FIELDS}
    found = quality_peer.evaluate(peer, rows, batch_size=5)
    peer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    mlm, nsp = jax.jit(loaded.model.apply)(
        {"params": loaded.params},
        batch["input_ids"],
        batch["attention_mask"],
        batch["token_type_ids"],
        None,
        jnp.asarray(batch["mlm_positions"]),
    )
    loss, correct, count = losses.classification_sums(mlm, batch["mlm_labels"], batch["mlm_weights"])
    _, right, pairs = losses.classification_sums(nsp, batch["nsp_labels"], batch["nsp_weights"])
    assert found["mlm_loss"] == pytest.approx(float(loss / count), rel=1e-5)
    assert found["mlm_accuracy"] == pytest.approx(float(correct / count))
    assert found["nsp_accuracy"] == pytest.approx(float(right / pairs))


@pytest.mark.parity
def test_the_peers_masks_have_the_papers_shares():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.benchmarks import quality_peer

    tokenizer = WordPieceTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], do_lower_case=True)
    torch.manual_seed(0)
    ids = torch.randint(5, 65, (400, 128))
    ids[:, 0] = tokenizer.cls_id
    rows = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "nsp_labels": torch.zeros(len(ids), 1, dtype=torch.long),
    }
    batch = quality_peer.Masking(tokenizer, "cpu")(rows)
    masked, labels = batch["input_ids"], batch["labels"]
    chosen = labels != quality_peer.IGNORED
    assert not chosen[:, 0].any() and (labels[chosen] == ids[chosen]).all()
    assert (masked[~chosen] == ids[~chosen]).all()
    assert chosen.float().mean() == pytest.approx(0.15 * 127 / 128, abs=0.005)
    assert (masked[chosen] == tokenizer.mask_id).float().mean() == pytest.approx(0.8, abs=0.02)
    kept = (masked[chosen] == ids[chosen]).float().mean()
    assert kept == pytest.approx(0.1 + 0.1 / 60, abs=0.02)
