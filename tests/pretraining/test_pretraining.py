"""The pre-training job: what it refuses, and that its loss and its resume are exact."""

import contextlib
import copy
import functools
import json
import re
import shutil
import types

import jax
import numpy as np
import pytest

from bertjax.config import LogSettings, OptimizerSettings, decides_bits, default_config, frozen
from bertjax.data.build import build_store
from bertjax.formats import hub
from bertjax.interop.huggingface import write_directory
from bertjax.log.logbook import Logbook
from bertjax.pretraining import corpora, finish
from bertjax.pretraining import job as pretraining
from bertjax.process import hardware
from bertjax.process.clock import Clock
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.run import OutputError, write_results, writing_results
from bertjax.run.starts import Starts
from bertjax.run.workdir import delete_run
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from bertjax.training import sharding
from bertjax.training.loop import NotFiniteError
from bertjax.training.optimizer import make_optimizer
from bertjax.training.trainer import Trainer
from tests.fakes import SPECIALS

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def store(random_store):
    return random_store


def tiny_config(store):
    config = default_config()
    config.data.corpus = str(store)
    config.model.update(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64
    )
    config.phases = ((4, 32),)
    config.batch_size = 16
    config.optimizer.warmup_steps = 2
    config.eval.rows = 32
    config.log.tensorboard = False
    config.execution.compilation_cache = ""
    return config


@pytest.fixture
def config(store):
    return tiny_config(store)


# ------------------------------------------------------------------------------------- refusals


def test_without_a_corpus_the_message_says_how_to_get_one(config, tmp_path):
    config.data.corpus = ""
    with pytest.raises(ValueError, match="build_corpus") as refused:
        pretraining.prepare(frozen(config), str(tmp_path))
    assert len(str(refused.value).splitlines()) < 24  # one screen
    assert "train_vocab" in str(refused.value)


def test_batch_that_the_devices_cannot_split_is_refused_with_valid_sizes(config, tmp_path):
    config.batch_size = 10
    with pytest.raises(ValueError, match=r"batch_size=10 .*8 devices.*8 or 16"):
        pretraining.prepare(frozen(config), str(tmp_path))


@pytest.mark.parametrize("free, there, refused", [(1e9, 1e9, False), (1e5, 1e9, False), (1e5, 1e5, True)])
def test_a_step_that_does_not_fit_the_memory_of_a_cpu_is_told_before_it_is_compiled(
    config, tmp_path, monkeypatch, free, there, refused
):
    monkeypatch.setattr(hardware, "host_bytes", lambda: (free, there))
    told = "a step of 16 x 32 tokens takes .* GiB or more, .*: take fewer rows at once, by --config.accumulation=N"
    with pytest.raises(ValueError, match=told) if refused else contextlib.nullcontext():
        warned = [
            text for name, text in pretraining.prepare(frozen(config), str(tmp_path)).facts() if name == "warning"
        ]
        assert [bool(re.match(told, text)) for text in warned] == [True] * (free < there)


def test_vocabulary_larger_than_the_model_is_refused(config, tmp_path):
    config.model.vocab_size = 50
    with pytest.raises(ValueError, match="65 entries.*50"):
        pretraining.prepare(frozen(config), str(tmp_path))


def test_a_vocabulary_of_the_users_is_not_written_over(config, tmp_path):
    job = pretraining.prepare(frozen(config), str(tmp_path))
    job.tokenizer.save(tmp_path)
    pretraining.prepare(frozen(config), str(tmp_path))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nother\n")
    with pytest.raises(ValueError, match="holds another vocabulary, which this run would write over"):
        pretraining.prepare(frozen(config), str(tmp_path))
    config.resume = "overwrite"  # killed between the deletion of a run and its own record, the same command goes on
    pretraining.prepare(frozen(config), str(tmp_path))


def test_a_model_to_start_from_is_looked_for_before_the_corpus(config, tmp_path):
    config.init_from, config.data.corpus = "/nowhere/model", "/nowhere/store"
    with pytest.raises(ValueError, match="/nowhere/model does not exist"):
        pretraining.prepare(frozen(config), str(tmp_path))


def test_a_sentence_to_fill_in_without_a_mask_is_refused_before_the_training(config, tmp_path):
    config.log.fill_mask = ("w1 [MASK] w2", "w1 w2")
    with pytest.raises(ValueError, match=r"config.log.fill_mask: there is no \[MASK\] in 'w1 w2'"):
        pretraining.prepare(frozen(config), str(tmp_path))


@pytest.mark.parametrize("longest, kept", [(16, None), (32, 32), (48, 48)])
def test_a_model_of_longer_rows_than_its_tokenizer_s_says_so(config, tmp_path, monkeypatch, longest, kept):
    def open_corpus(*arguments):
        corpus = corpora.open_corpus(*arguments)
        corpus.tokenizer.model_max_length = longest
        return corpus

    monkeypatch.setattr(pretraining, "open_corpus", open_corpus)
    assert pretraining.prepare(frozen(config), str(tmp_path)).tokenizer.model_max_length == kept


@pytest.mark.parametrize(
    "kernel, changes, message",
    [
        ("triton", {}, "config.execution.kernels=triton needs heads of a power of two >= 16, not of 8"),
        (
            "pallas_tpu",
            {"model.num_attention_heads": 1, "model.hidden_size": 48},
            "heads of a divisor of 128, not of 48",
        ),
        ("triton", {"model.is_decoder": True}, "triton does not compute models that read left to right"),
        ("cudnn", {}, "config.execution.kernels='cudnn' is not one of auto, xla, reference, triton, pallas_tpu"),
    ],
)
def test_kernels_that_do_not_compute_the_model_are_refused_before_the_corpus_is_opened(
    config, tmp_path, kernel, changes, message
):
    config.model.num_attention_heads, config.model.hidden_size, config.data.corpus = 6, 48, "absent"
    with pytest.raises(ValueError, match=message):
        pretraining.prepare(frozen(config).replace(changes | {"execution.kernels": kernel}), str(tmp_path))


def test_directory_that_is_no_store_is_refused(config, tmp_path):
    config.data.corpus = str(tmp_path)
    with pytest.raises(ValueError, match="no token store"):
        pretraining.prepare(frozen(config), str(tmp_path / "run"))


def test_mixture_with_a_bad_weight_is_refused(config, store, tmp_path):
    config.data.corpus = f"{store}=2,{store}"
    with pytest.raises(ValueError, match="every corpus of the mixture a weight"):
        pretraining.prepare(frozen(config), str(tmp_path))
    config.data.corpus = f"{store}=much"
    with pytest.raises(ValueError, match="'much'.*not a number"):
        pretraining.prepare(frozen(config), str(tmp_path))


def test_every_corpus_of_a_mixture_has_its_held_out_loss(config, store, tmp_path):
    for place in ("more/books", "store"):  # the second is called like the first
        shutil.copytree(store, tmp_path / place)
    config.data.corpus = f"{store}=2,{tmp_path / 'more/books'}=1,{tmp_path / 'store'}=1"
    evaluation = pretraining.prepare(frozen(config), str(tmp_path / "run")).evaluations[0]

    class Counts:
        def evaluate(self, objective, params, batches):
            return {"loss": float(sum(len(batch["input_ids"]) for batch in batches))}

    rows = float(len(list(evaluation.batches)) * config.batch_size)
    assert evaluation(Counts(), None) == {"loss": rows, "eval/books/loss": rows, "eval/store_3/loss": rows}


def test_weights_of_another_vocabulary_are_refused(config, tmp_path):
    job = pretraining.prepare(frozen(config), str(tmp_path / "first"))
    objective = job.phases[0].objective
    params = jax.jit(objective.init)(jax.random.key(0))
    write = functools.partial(
        write_directory, config=job.model_config, params=params, architecture="BertForPreTraining"
    )
    write(tmp_path / "same", tokenizer=job.tokenizer)
    vocabulary = [*SPECIALS, *reversed(WORDS)]
    write(tmp_path / "other", tokenizer=WordPieceTokenizer(vocabulary, do_lower_case=True))

    config.init_from = str(tmp_path / "same")
    pretraining.prepare(frozen(config), str(tmp_path / "second"))
    config.init_from = str(tmp_path / "other")
    with pytest.raises(ValueError, match="another vocabulary or casing"):
        pretraining.prepare(frozen(config), str(tmp_path / "third"))


def test_a_step_that_a_run_has_not_saved_is_refused_before_anything_is_built(config, tmp_path):
    pretraining.prepare(frozen(config), str(tmp_path / "run")).record(tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(2, {"a": jax.numpy.zeros(2)})
    checkpoints.close()
    config.init_from = f"{tmp_path / 'run'}@2"
    pretraining.prepare(frozen(config), str(tmp_path / "second"))
    config.init_from = f"{tmp_path / 'run'}@3"
    with pytest.raises(ValueError, match=r"no checkpoint of step 3 in .*run/checkpoints; there are \[2\]"):
        pretraining.prepare(frozen(config), str(tmp_path / "third"))


# ------------------------------------------------------------------------------------ exactness


def train(config, workdir, mesh=None, steps=3):
    """Losses and parameters after a few steps of the job's first phase."""
    job = pretraining.prepare(frozen(config), str(workdir))
    mesh = mesh or job.mesh
    trainer = Trainer(make_optimizer(OptimizerSettings(), 1e-3), mesh, config.seed, accumulation=config.accumulation)
    phase = job.phases[0]
    state, step = trainer.init(phase.objective), trainer.train_step(phase.objective)
    batches, seen = phase.batches(0), []
    for _ in range(steps):
        state, metrics = step(state, sharding.put_batch(next(batches), mesh))
        seen.append(float(metrics["loss"]))
    return np.array(seen), jax.device_get(state.params)


@pytest.fixture
def without_dropout(config):
    config.model.hidden_dropout_prob = config.model.attention_probs_dropout_prob = 0.0
    return config


def test_loss_with_dropout_is_the_same_on_one_and_on_eight_devices(config, tmp_path):
    one = sharding.make_mesh(devices=jax.devices()[:1])
    alone, _ = train(config, tmp_path / "a", one)
    together, _ = train(config, tmp_path / "b", sharding.make_mesh())
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6 * alone.max())


def test_accumulation_gives_the_update_of_the_large_batch(without_dropout, tmp_path):
    without_dropout.batch_size = 32  # 4 micro-batches with a row for each of the 8 devices
    whole, params = train(without_dropout, tmp_path / "a")
    without_dropout.accumulation = 4
    parts, accumulated = train(without_dropout, tmp_path / "b")
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6 * whole.max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), params, accumulated)


def test_packed_rows_train_too(config, tmp_path):
    config.data.packed = True
    losses, _ = train(config, tmp_path)
    assert np.isfinite(losses).all()


def test_without_nsp_only_the_masked_language_model_is_learnt(without_dropout, tmp_path):
    without_dropout.data.nsp = False
    job = pretraining.prepare(without_dropout, str(tmp_path))
    objective = job.phases[0].objective

    def sums_of(batch, key):
        batch = objective.prepare(batch, key)
        return objective.loss(objective.init(key), batch, objective.denominators(batch), None)[1]

    sums = jax.eval_shape(sums_of, next(job.phases[0].batches(0)), jax.random.key(0))
    assert set(sums) == {"mlm_loss", "mlm_accuracy"}


# --------------------------------------------------------------------------------- run and resume


def read_metrics(workdir):
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "eval/loss" in r]


def weights(workdir, step):
    from bertjax.run.checkpoint import Checkpoints

    return Checkpoints(str(workdir / "checkpoints")).restore_numpy(step)[0]


@pytest.fixture(scope="module")
def finished_run(store, tmp_path_factory):
    """(config, directory) of an undisturbed run with dropout, whose rows grow in number, then in length."""
    config = tiny_config(store)
    config.phases = ((2, 32, 8), (3, 32), (3, 48, 8))
    config.log.every_steps = 1
    config.checkpoint.every_steps = 3
    directory = tmp_path_factory.mktemp("finished")
    pretraining.run(pretraining.prepare(frozen(config), str(directory)))
    return config, directory


@pytest.fixture
def run_copy(finished_run, tmp_path):
    config, directory = finished_run
    shutil.copytree(directory, tmp_path / "run")
    return config.copy_and_resolve_references(), tmp_path / "run"


def test_run_leaves_metrics_checkpoints_and_settings(finished_run):
    _, directory = finished_run
    training, evaluations = read_metrics(directory)
    assert [record["step"] for record in training] == list(range(1, 9))
    assert {
        "mlm_loss",
        "mlm_accuracy",
        "nsp_loss",
        "nsp_accuracy",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "mfu",
        "step_time",
        "data_wait",
    } <= set(training[-1])
    assert evaluations[-1]["step"] == 8
    assert json.loads((directory / "config.json").read_text())["batch_size"] == 16
    assert (directory / "vocab.txt").exists()


def test_stopped_run_resumes_to_the_same_bits(finished_run, run_copy):
    # From within the second phase, whose rows go on where those of the first ended, with dropout and masks on.
    config, directory = run_copy
    for later in ("6", "8"):  # what a kill between steps 3 and 6 would have left
        shutil.rmtree(directory / "checkpoints" / later)
    (directory / "checkpoints.committed.json").unlink()
    job = pretraining.prepare(frozen(config), str(directory))
    assert job.resumed_from == 3
    pretraining.run(job)
    undisturbed = weights(finished_run[1], 8)
    jax.tree.map(np.testing.assert_array_equal, weights(directory, 8), undisturbed)


@pytest.mark.parametrize("entropy, times", [(1.0, 1), (9.0, 0)])
def test_a_run_that_guesses_by_word_frequencies_long_after_its_warm_up_says_so_once(
    config, tmp_path, monkeypatch, caplog, entropy, times
):
    monkeypatch.setattr(pretraining, "LATE", (2, 1))
    monkeypatch.setattr(finish, "token_entropy", lambda counts: entropy)
    job = pretraining.prepare(frozen(config), str(tmp_path))
    job.evaluations = [lambda trainer, params: {"mlm_loss": 4.2}]
    for step in range(1, 5):
        job.evaluate(types.SimpleNamespace(step=step, params=None), step)
    said = [text for text in caplog.messages if text.startswith("after 2 steps the held-out loss, 4.2")]
    assert len(said) == times


@pytest.mark.parametrize("phases", [((2, 32, 8), (3, 32), (1, 32, 24)), ((2, 32), (3, 32))])
def test_rows_of_one_length_go_on_from_phase_to_phase(config, tmp_path, phases):
    config.phases = ((6, 32),)
    (whole,) = pretraining.prepare(frozen(config), str(tmp_path)).batches
    config.phases = (*phases, (1, 48))
    *parts, longer = pretraining.prepare(frozen(config), str(tmp_path)).batches
    counts = [steps for steps, *_ in phases]
    rows = [part[step]["input_ids"] for part, count in zip(parts, counts, strict=True) for step in range(count)]
    expected = np.concatenate([whole[step]["input_ids"] for step in range(6)])
    rows = np.concatenate(rows)
    np.testing.assert_array_equal(rows, expected[: len(rows)])
    assert longer[0]["input_ids"].shape == (16, 48)


def test_rows_of_a_phase_that_the_devices_cannot_split_are_refused(config, tmp_path):
    config.phases = ((4, 32), (4, 32, 12))
    with pytest.raises(ValueError, match=r"config.phases=.*rows=12 does not divide over 8 devices.*8 or 16"):
        pretraining.prepare(frozen(config), str(tmp_path))


def test_second_run_with_other_settings_is_refused_until_it_says_what_it_means(run_copy):
    config, directory = run_copy
    config.optimizer.learning_rate = 5e-4
    with pytest.raises(ValueError, match="learning_rate: 0.0001 -> 0.0005") as refused:
        pretraining.prepare(frozen(config), str(directory))
    assert "overwrite" in str(refused.value) and "changed" in str(refused.value)
    config.resume = "changed"
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from == 8
    config.resume = "overwrite"
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from is None


def test_a_run_that_goes_on_remembers_what_it_was_begun_with(run_copy):
    config, directory = run_copy
    (directory / "config.json").write_text(frozen(config).replace({"init_from": "/models/old"}).to_json())
    for given in ("", "/models/other"):
        config.init_from = given
        job = pretraining.prepare(frozen(config), str(directory))
        assert job.resumed_from == 8 and job.config.init_from == "/models/old"
        assert "pre-trained from the weights of `old`" in finish.card(job, 8, [], [])
    config.resume, config.init_from = "overwrite", ""
    assert pretraining.prepare(frozen(config), str(directory)).config.init_from == ""


def rebuilt(config, tmp_path, words, documents=40):
    """`config` on a store of the same name, built anew of other text."""
    tokenizer = WordPieceTokenizer([*SPECIALS, *words], True)
    text = [[f"{words[i % 60]} {words[j]} {words[0]}" for j in range(9)] for i in range(documents)]
    build_store(None, tokenizer, tmp_path / "store", documents=text, overwrite=True, heldout_fraction=0.2)
    config.data.corpus = str(tmp_path / "store")
    return config


def test_a_corpus_that_was_built_anew_is_refused_until_the_run_says_what_it_means(run_copy):
    config, directory = run_copy
    config = rebuilt(config, directory.parent, [f"w{i}" for i in range(60)])
    config.resume = "changed"  # of the path, and of what lies there
    job = pretraining.prepare(frozen(config), str(directory))
    job.record(directory)
    config.resume = "auto"
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from == 8
    rebuilt(config, directory.parent, [f"w{i}" for i in range(60)], documents=41)
    with pytest.raises(ValueError, match="(?s)other settings or data:\n  content: .*--config.resume=changed"):
        pretraining.prepare(frozen(config), str(directory))
    config.resume = "changed"
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from == 8
    shutil.rmtree(directory / "model")  # not finished
    config.resume = "overwrite"
    (directory / "config.json").write_text(config.to_json())
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from is None


@pytest.mark.parametrize("resume", ["auto", "changed"])
def test_other_words_under_the_same_ids_are_refused(run_copy, resume):
    config, directory = run_copy
    config = rebuilt(config, directory.parent, [f"v{i}" for i in range(60)])
    (directory / "config.json").write_text(config.to_json())
    config.resume = resume
    with pytest.raises(ValueError, match="another vocabulary .* build_corpus --tokenizer="):
        pretraining.prepare(frozen(config), str(directory))


def test_a_run_is_overwritten_once_nothing_more_can_be_refused(run_copy):
    config, directory = run_copy
    config.resume = "overwrite"
    corpus, config.data.corpus = config.data.corpus, "nowhere"
    with pytest.raises(ValueError, match="no token store here"):
        pretraining.prepare(frozen(config), str(directory))
    config.data.corpus = corpus
    job = pretraining.prepare(frozen(config), str(directory))
    assert (directory / "checkpoints" / "8").exists() and (directory / "model").exists()
    delete_run(job.workdir)
    assert not list((directory / "checkpoints").iterdir()) and not (directory / "model").exists()


def test_a_command_that_overwrites_goes_on_with_its_own_unfinished_run(run_copy):
    config, directory = run_copy
    config.resume = "overwrite"
    (directory / "config.json").write_text(config.to_json())
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from is None  # it is finished
    shutil.rmtree(directory / "model")
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from == 8
    config.seed += 1
    assert pretraining.prepare(frozen(config), str(directory)).resumed_from is None


def test_workdirs_of_other_jobs_are_refused(run_copy):
    config, directory = run_copy
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json that says of which run"):
        pretraining.prepare(frozen(config), str(directory))
    (directory / "config.json").write_text('{"job": "finetune"}')
    with pytest.raises(ValueError, match="holds a fine-tuning run"):
        pretraining.prepare(frozen(config), str(directory))


def test_finished_run_is_left_alone(finished_run, run_copy, capsys):
    config, directory = run_copy
    pretraining.run(pretraining.prepare(frozen(config), str(directory)))
    assert "already finished at step 8" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, weights(directory, 8), weights(finished_run[1], 8))


def test_a_finished_run_is_pushed_and_keeps_its_model_where_that_fails(run_copy, monkeypatch, capsys):
    config, directory = run_copy
    config.export.push = "someone/model"
    pushed = []
    monkeypatch.setattr(hub, "check_push", lambda *asked: pushed.append(asked))
    monkeypatch.setattr(hub, "push", lambda *what: pushed.append(what) or "https://hub/someone/model")
    pretraining.run(pretraining.prepare(frozen(config), str(directory)))
    model, report = directory / "model", directory / "report.html"
    assert pushed == [("someone/model", False, "config.export.push"), (model, "someone/model", False, report, model)]
    assert capsys.readouterr().out.splitlines()[-1] == "pushed to https://hub/someone/model"

    def fail(*_):
        raise OSError("the quota is used up")

    monkeypatch.setattr(hub, "push", fail)
    with pytest.raises(OutputError, match="the quota is used up"):
        pretraining.run(pretraining.prepare(frozen(config), str(directory)))
    assert (model / "model.safetensors").is_file() and report.is_file()

    def refuse(*_):
        raise ValueError("no token")

    monkeypatch.setattr(hub, "check_push", refuse)
    with pytest.raises(ValueError, match="no token"):
        pretraining.prepare(frozen(config), str(directory))


def test_model_and_report_of_a_remote_run_are_where_the_run_is(finished_run, run_copy, bucket):
    config, directory = run_copy
    job = pretraining.prepare(frozen(config), str(directory))
    away = copy.copy(job)
    away.workdir = bucket / "run"
    book = Logbook(away.workdir, log=LogSettings(tensorboard=False), write=lambda _: None)
    book.train(8, 8, {"loss": 1.0})
    metrics = {"mlm_loss": 4.0, "mlm_accuracy": 0.1, "nsp_loss": 0.7, "nsp_accuracy": 0.5}
    params = jax.device_put(weights(directory, 8)["params"])
    away._evaluated[8] = metrics
    write_results(away, types.SimpleNamespace(step=8, params=params), book, Clock(8))
    book.close()
    written = (bucket / "run" / "model" / "model.safetensors").read_bytes()
    assert written == (finished_run[1] / "model" / "model.safetensors").read_bytes()
    assert "bertjax" in (bucket / "run" / "model" / "README.md").read_text()
    numbers = json.loads((bucket / "run" / "result.json").read_text())["numbers"]
    assert (numbers["mlm_loss"], numbers["nsp_accuracy"]) == (4.0, 0.5)
    gain = numbers["unigram_entropy"] - 4.0
    kind = "better" if gain > 0 else "worse"
    assert (
        f"predicted {kind} than from their frequencies alone, by {abs(gain):.2f} nats"
        in (bucket / "run" / "report.html").read_text()
    )


def test_the_models_card_tells_data_training_and_results_but_no_path(finished_run, store):
    config, directory = finished_run
    text = (directory / "model" / "README.md").read_text()
    said = json.loads(
        [line for line in (directory / "metrics.jsonl").read_text().splitlines() if "eval/mlm_loss" in line][-1]
    )
    for expected in (
        "1 layer of width 16, 2 heads",
        "random weights to predict masked words and next",
        " tokens. The vocabulary has 65 entries of lower-case text.",
        "| steps | 8 of 8, then 16, then 8 rows",
        "32 for 62% of the steps, then 48 for 38%",
        "8 x cpu, float32",
        "| `optimizer.warmup_steps` | 2 |",
        f"held-out MLM loss {said['eval/mlm_loss']:.3f}",
        "held-out NSP accuracy",
        "pipeline_tag: fill-mask",
    ):
        assert expected in text, expected
    for hidden in (str(store), str(directory), "log.", "execution.", "`model.hidden_size`"):
        assert hidden not in text, hidden

    job = pretraining.prepare(frozen(config), str(directory.parent / "asked"))
    asked = finish.card(job, 5, [], [{"text": "w1 [MASK]", "predictions": [("w2", 0.5)]}])
    assert 'fill("w1 [MASK]")' in asked and "capital" not in asked  # in the language of the run

    config = config.copy_and_resolve_references()
    config.data.nsp, config.model.is_decoder = False, True
    config.budget_minutes = 2.5
    job = pretraining.prepare(frozen(config), str(directory.parent / "other"))
    for step, settings in enumerate((frozen(config), frozen(config).replace({"seed": 3, "data.corpus": "/x/y"}))):
        Starts(job.workdir, decides_bits(settings)).begin(step, Logbook(None))
    text = finish.card(job, 5, [], [{"text": "a [MASK]", "predictions": [("b", 0.5), ("c", 0.25)]}])
    for expected in (
        "the next token of a text. Its pooler and next-sentence head are untrained",
        "| wall clock | 2.5 minutes |",
        "32 for 62% of the time",
        "* a [MASK]\n  b 50%, c 25%\n",
        "| changed at step 1 | seed: 0 -> 3 |",
    ):
        assert expected in text, expected
    assert "/x/y" not in text
    assert "pipeline_tag" not in text


def test_a_model_whose_loss_is_not_a_number_is_not_written(tmp_path):
    job = types.SimpleNamespace(workdir=tmp_path)
    with pytest.raises(NotFiniteError, match="after step 9 is nan.*lower config.optimizer.learning_rate"):
        finish.finish(job, {}, 9, {"mlm_loss": float("nan")}, logbook=None)


def test_a_sentence_that_cannot_be_filled_does_not_end_a_finished_run(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from bertjax import inference
    from bertjax.pretraining import finish

    def fill_mask(model, text, top_k):
        if "[MASK]" not in text:
            raise ValueError("no [MASK] in 'cat'")
        return [[inference.Filling("sat", 0.9, 7)]]

    monkeypatch.setattr(inference, "fill_mask", fill_mask)
    monkeypatch.setattr(finish, "load_model", lambda path: None)
    said = []
    job = SimpleNamespace(config=SimpleNamespace(log=SimpleNamespace(fill_mask=("cat", "the cat [MASK]"))))
    book = SimpleNamespace(message=said.append, directory=tmp_path)
    found = finish.fill_masks(job, tmp_path, book)
    assert [example["text"] for example in found] == ["the cat [MASK]"]
    assert "config.log.fill_mask: no [MASK] in 'cat'" in said[0]


# ------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_results_that_cannot_be_written_are_one_line_and_the_same_command_goes_on(error):
    with pytest.raises(OutputError, match="written to runs/x: .*the same command goes on"):
        with writing_results("runs/x"):
            raise error
    with pytest.raises(ValueError, match="a fault"), writing_results("runs/x"):
        raise ValueError("a fault")
