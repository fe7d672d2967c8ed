"""What a user does with a model, for every model type: here by the commands, and the same in transformers."""

import csv
import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

import bertjax
from bertjax.config import frozen
from bertjax.config_checks import check_config
from bertjax.tools import convert, evaluate, features, predict
from bertjax.training import sharding
from tests import families
from tests.families import MODEL_TYPES, sentences

torch = pytest.importorskip("torch", reason="parity needs the [parity] extra")
transformers = pytest.importorskip("transformers", reason="parity needs the [parity] extra")
pytestmark = pytest.mark.parity
torch.set_num_threads(1)

ABSOLUTE = 1e-4
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TEXTS = ["The quick brown fox", "hello world, it costs 5 euros!", "naïve Café"]


@pytest.fixture(scope="module", params=MODEL_TYPES)
def checkpoint(request, tmp_path_factory):
    """(directory of a masked language model, its type)."""
    directory = tmp_path_factory.mktemp(request.param)
    families.write_checkpoint(directory, request.param)
    return directory, request.param


@pytest.fixture(scope="module")
def start(checkpoint, tmp_path_factory):
    """What a fine-tuning begins with: of ELECTRA the discriminator."""
    directory, family = checkpoint
    if family == "electra":
        directory = tmp_path_factory.mktemp("discriminator")
        families.write_checkpoint(directory, family, "ForPreTraining")
    return directory


def read_config(file, variant=()):
    spec = importlib.util.spec_from_file_location(file, CONFIGS / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*variant)


def opened(path, auto):
    """transformers' own model and tokenizer, in which nothing was left out or made up."""
    model, report = getattr(transformers, auto).from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


def outputs(model, encoded):
    with torch.no_grad():
        return model(**{name: torch.tensor(np.asarray(array)).long() for name, array in encoded.items()})


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=ABSOLUTE)


# -------------------------------------------------------------------------------- without training


def test_masks_are_filled(checkpoint, tmp_path):
    directory, _ = checkpoint
    theirs = transformers.pipeline("fill-mask", str(directory), top_k=3)
    text = "The quick [MASK] jumps."
    out = tmp_path / "out.jsonl"
    predict.main([f"--model={directory}", "--task=fill-mask", f"--text={text}", "--top_k=3", f"--out={out}"])
    (ours,) = json.loads(out.read_text())["masks"]
    expected = theirs(text.replace("[MASK]", theirs.tokenizer.mask_token))
    assert [one["id"] for one in ours] == [one["token"] for one in expected]
    close([one["probability"] for one in ours], [one["score"] for one in expected])


def test_features(checkpoint, tmp_path):
    directory, _ = checkpoint
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    made = tmp_path / "out.npz"
    features.main([f"--model={directory}", f"--file={tmp_path / 'in.txt'}", f"--out={made}", "--layers=-1,0"])
    ours = np.load(made)
    model, tokenizer = transformers.AutoModel.from_pretrained(directory).eval(), None
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for number, text in enumerate(TEXTS):
        encoded = tokenizer(text, return_tensors="np")
        with torch.no_grad():
            states = model(**{k: torch.tensor(v) for k, v in encoded.items()}, output_hidden_states=True).hidden_states
        assert ours[f"tokens_{number}"].tolist() == tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
        close(ours[f"layers_{number}"], [states[-1][0], states[0][0]])


def exported(directory):
    """(the function, its weights) of an export."""
    function = jax.export.deserialize((directory / "model.stablehlo").read_bytes())
    return function, safetensors.numpy.load_file(directory / "model.safetensors")


def test_the_exported_function_computes_the_model(checkpoint, tmp_path):
    directory, _ = checkpoint
    convert.main([f"--from={directory}", "--to=stablehlo", f"--out={tmp_path / 'out'}"])
    function, weights = exported(tmp_path / "out")
    model, tokenizer = opened(directory, "AutoModelForMaskedLM")
    encoded = tokenizer(TEXTS, padding=True, return_tensors="np")
    ids, mask = (encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask"))
    close(
        np.asarray(function.call(weights, ids, mask, np.zeros_like(ids)))[mask > 0],
        outputs(model, encoded).logits[mask > 0],
    )


def test_words_are_added(checkpoint, tmp_path):
    directory, _ = checkpoint
    (tmp_path / "words.txt").write_text("zebra\nyak\n")
    convert.main([f"--from={directory}", f"--out={tmp_path / 'out'}", f"--add_vocab={tmp_path / 'words.txt'}"])
    model, tokenizer = opened(tmp_path / "out", "AutoModelForMaskedLM")
    before, old = opened(directory, "AutoModelForMaskedLM")
    assert len(tokenizer) == len(old) + 2 == model.config.vocab_size
    encoded = old(TEXTS, padding=True)
    assert tokenizer(TEXTS, padding=True).input_ids == encoded.input_ids
    close(outputs(model, encoded).logits[..., : len(old)], outputs(before, encoded).logits)
    written = tokenizer("the fox", "the dog")
    # No token_type_ids for a network without segments: not every version of transformers passes over them.
    assert ("token_type_ids" in written) == (getattr(model.config, "type_vocab_size", 0) > 1)
    text = "the zebra, a yak"
    ids = tokenizer(text).input_ids
    assert [ids.count(len(old)), ids.count(len(old) + 1)] == [1, 1]
    ours = bertjax.load_model(tmp_path / "out")
    assert ours.tokenizer.layout.join(ours.tokenizer.encode(text))[0].tolist() == ids
    close(ours(np.array([ids]), np.ones((1, len(ids)), int)), outputs(model, tokenizer([text])).logits)


# ------------------------------------------------------------------------------------- fine-tuning


def fine_tuned(start, config, data, workdir, length=64, extend=""):
    from bertjax.tasks import job

    config.init_from, config.task.data = str(start), str(data)
    config.task.epochs, config.task.max_length, config.extend_positions = 2, length, extend
    config.batch_size = config.task.eval_batch_size = 8 if length == 64 else 1
    config.task.buckets, config.optimizer.learning_rate = 1, 3e-3
    config.log.tensorboard, config.execution.compilation_cache = False, ""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    job.run(job.prepare(check_config(frozen(config)), str(workdir), mesh))
    return workdir / "model"


def printed(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_pairs_are_classified(start, tmp_path, capsys):
    families.write_table(tmp_path / "data")
    config = read_config("classify")
    config.task.options.text = ("text", "text_b")
    model = fine_tuned(start, config, tmp_path / "data", tmp_path / "run")
    capsys.readouterr()

    evaluate.main([f"--model={model}", f"--data={tmp_path / 'data'}"])
    scores = printed(capsys)["scores"]
    trained = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    assert scores == pytest.approx(trained)

    out = tmp_path / "answers.csv"
    predict.main([f"--model={model}", f"--file={tmp_path / 'data' / 'dev.csv'}", f"--out={out}"])
    with out.open(newline="") as file:
        ours = list(csv.DictReader(file))
    assert np.mean([row["prediction"] == row["label"] for row in ours]) == pytest.approx(scores["accuracy"])
    opened(model, "AutoModelForSequenceClassification")
    pipeline = transformers.pipeline("text-classification", str(model), top_k=None)
    pairs = [{"text": row["text"], "text_pair": row["text_b"]} for row in ours]
    expected = pipeline(pairs, truncation=True, max_length=config.task.max_length)  # some have more pieces
    found = bertjax.classify(model, [(row["text"], row["text_b"]) for row in ours])
    for mine, theirs, row in zip(found, expected, ours, strict=True):
        assert mine == pytest.approx({one["label"]: one["score"] for one in theirs}, abs=ABSOLUTE)
        assert row["prediction"] == max(mine, key=mine.get)

    convert.main([f"--from={model}", "--to=stablehlo", f"--out={tmp_path / 'exported'}"])
    function, weights = exported(tmp_path / "exported")
    network, tokenizer = opened(model, "AutoModelForSequenceClassification")
    encoded = tokenizer(TEXTS, padding=True, return_tensors="np")
    ids, mask = (encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask"))
    close(function.call(weights, ids, mask, np.zeros_like(ids)), outputs(network, encoded).logits)


@pytest.mark.slow
def test_words_are_tagged(start, tmp_path, capsys):
    families.write_conll(tmp_path / "data")
    model = fine_tuned(start, read_config("ner"), tmp_path / "data", tmp_path / "run")
    capsys.readouterr()
    evaluate.main([f"--model={model}", f"--data={tmp_path / 'data'}"])
    trained = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    assert printed(capsys)["scores"] == pytest.approx(trained)

    out = tmp_path / "out.conll"
    predict.main([f"--model={model}", f"--file={tmp_path / 'data' / 'dev.conll'}", f"--out={out}"])
    tagged = [line.split() for line in out.read_text().splitlines() if line]
    given = [line.split() for line in (tmp_path / "data" / "dev.conll").read_text().splitlines() if line]
    assert [row[0] for row in tagged] == [row[0] for row in given]

    opened(model, "AutoModelForTokenClassification")
    pipeline = transformers.pipeline("token-classification", str(model), ignore_labels=[])
    words = ["the", "naïve", "fox", "hello", "world", "café", ".", "unknownword"]
    (ours,) = bertjax.tag_words(model, [words])
    text = " " + " ".join(words)  # the blank: each word as in the middle of a text
    starts = [text.index(f" {word}") + 1 for word in words]
    theirs = {}
    for one in pipeline(text):
        start = one["start"] + (text[one["start"]] == " ")
        theirs.setdefault(start, one["entity"])
    assert ours == [theirs[start] for start in starts]


@pytest.mark.slow
def test_questions_are_answered(start, tmp_path, capsys):
    families.write_squad(tmp_path / "data")
    config = read_config("squad")
    config.task.options = {"max_query_length": 16, "doc_stride": 16}
    model = fine_tuned(start, config, tmp_path / "data", tmp_path / "run")
    capsys.readouterr()
    evaluate.main([f"--model={model}", f"--data={tmp_path / 'data'}"])
    trained = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    assert printed(capsys)["scores"] == pytest.approx(trained)

    out = tmp_path / "answers.json"
    predict.main([f"--model={model}", f"--file={tmp_path / 'data' / 'dev-v1.1.json'}", f"--out={out}"])
    contexts = {
        f"q{number}": paragraph["context"]
        for number, paragraph in enumerate(
            json.loads((tmp_path / "data" / "dev-v1.1.json").read_text())["data"][0]["paragraphs"]
        )
    }
    answers = json.loads(out.read_text())
    assert answers == json.loads((tmp_path / "run" / "predictions_dev.json").read_text())
    assert all(answers[name] and answers[name] in contexts[name] for name in contexts)

    network, tokenizer = opened(model, "AutoModelForQuestionAnswering")
    context, question = "The naïve fox pays. Hello world.", "Who pays?"
    encoded = tokenizer(question, context, return_offsets_mapping=True)
    offsets, sequence = encoded.pop("offset_mapping"), encoded.sequence_ids()
    logits = outputs(network, {name: [ids] for name, ids in encoded.items()})
    starts, ends = logits.start_logits[0].tolist(), logits.end_logits[0].tolist()
    passage = [i for i, one in enumerate(sequence) if one == 1]
    score, first, last = max((starts[i] + ends[j], i, j) for i in passage for j in passage if 0 <= j - i < 5)
    ours = bertjax.answer(model, question, context, max_answer_tokens=5)
    assert ours.score == pytest.approx(score, abs=ABSOLUTE)
    assert ours.text == context[ours.start : ours.end] == context[offsets[first][0] : offsets[last][1]].strip()
    assert not any(answer.startswith(" ") for answer in answers.values())


# -------------------------------------------------------------------------------------- long rows


@pytest.fixture
def one_device(monkeypatch):
    """Long rows one by one."""
    make = sharding.make_mesh
    monkeypatch.setattr(sharding, "make_mesh", lambda devices=None: make(devices=jax.devices()[:1]))


def longer(config, checkpoint, data, length, how):
    config.init_from, config.task.data = str(checkpoint), str(data)
    config.task.max_length, config.extend_positions = length, how
    return check_config(frozen(config))


def test_rows_beyond_the_table_are_refused_at_the_start_or_the_table_is_extended(tmp_path, caplog):
    from bertjax.tasks import job

    families.write_checkpoint(tmp_path / "bert", "bert")
    families.write_table(tmp_path / "data")
    given = read_config("classify"), tmp_path / "bert", tmp_path / "data", 160
    with pytest.raises(ValueError, match="max_length=160 exceeds the 96 positions .*extend_positions=repeat"):
        job.prepare(longer(*given, ""), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    found = job.prepare(longer(*given, "repeat"), str(tmp_path / "run"))
    assert found.tuner.model_config.max_position_embeddings == 160
    assert "96 positions extended to 160 (repeat)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family, length, how", [("roberta", 2048, "interpolate"), ("modernbert", 8192, "repeat")])
def test_long_texts_are_classified(family, length, how, tmp_path, capsys, one_device):
    tiny = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 16}
    families.write_checkpoint(tmp_path / "in", family, **tiny)
    (tmp_path / "data").mkdir()
    texts = [" ".join(sentences(length // 8, seed=number)) for number in range(2)]  # longer than a row
    for name in ("train.csv", "dev.csv"):
        (tmp_path / "data" / name).write_text("text,label\n" + "".join(f"{t},{i}\n" for i, t in enumerate(texts)))
    model = fine_tuned(tmp_path / "in", read_config("classify"), tmp_path / "data", tmp_path / "run", length, how)
    capsys.readouterr()
    evaluate.main([f"--model={model}", f"--data={tmp_path / 'data'}", "--batch_size=1"])
    assert printed(capsys)["scores"] == json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    network, tokenizer = opened(model, "AutoModelForSequenceClassification")
    encoded = tokenizer(texts[0], truncation=True)
    assert len(encoded.input_ids) == length == tokenizer.model_max_length
    theirs = outputs(network, {name: [ids] for name, ids in encoded.items()}).logits[0].softmax(-1)
    close(list(bertjax.classify(model, texts[0]).values()), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("length, how", [(2048, "repeat"), (8192, "interpolate")])
def test_long_passages_are_answered_from(length, how, tmp_path, capsys, one_device):
    tiny = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 16}
    families.write_checkpoint(tmp_path / "in", "bert", **tiny)
    families.write_squad(tmp_path / "data", count=2, length=length // 8)  # windows of length and a rest
    config = read_config("squad")
    config.task.options = {"max_query_length": 16, "doc_stride": length // 2}
    model = fine_tuned(tmp_path / "in", config, tmp_path / "data", tmp_path / "run", length, how)
    capsys.readouterr()
    evaluate.main([f"--model={model}", f"--data={tmp_path / 'data'}", "--batch_size=1"])
    assert printed(capsys)["scores"] == json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    paragraph = json.loads((tmp_path / "data" / "dev-v1.1.json").read_text())["data"][0]["paragraphs"][0]
    found = bertjax.answer(model, "Who pays?", paragraph["context"], stride=length // 2)
    assert found.text == paragraph["context"][found.start : found.end] != ""


# ------------------------------------------------------------------------- continued pre-training


@pytest.mark.slow
def test_pre_training_goes_on(checkpoint, tmp_path):
    """With packed rows and whole words."""
    from bertjax.pretraining import job
    from bertjax.tools import build_corpus

    directory, family = checkpoint
    texts = "\n\n".join("\n".join(sentences(6, seed=number)) for number in range(40))
    (tmp_path / "text.txt").write_text(texts)
    build_corpus.main(
        [
            f"--input={tmp_path / 'text.txt'}",
            f"--tokenizer={directory}",
            f"--output={tmp_path / 'store'}",
            "--workers=1",
        ]
    )
    config = read_config("continued", (str(directory),))
    config.data.corpus, config.data.corpus_limits = str(tmp_path / "store"), "warn"
    config.reinitialise_head = family == "bert"  # whose next-sentence head this checkpoint lacks
    config.phases, config.batch_size, config.eval.rows = ((8, 64),), 8, 16
    config.optimizer.warmup_steps, config.optimizer.learning_rate, config.log.every_steps = 1, 1e-2, 1
    config.masking.whole_word, config.data.packed = True, True
    config.log.tensorboard, config.execution.compilation_cache = False, ""
    job.run(job.prepare(check_config(frozen(config)), str(tmp_path / "run")))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["mlm_loss"] for record in records if "mlm_loss" in record]
    assert losses[-1] < losses[0]

    before, tokenizer = opened(directory, "AutoModelForMaskedLM")
    # A BERT has its pooler and next-sentence head afterwards.
    after, again = opened(
        tmp_path / "run" / "model", f"AutoModelFor{'PreTraining' if family == 'bert' else 'MaskedLM'}"
    )
    assert type(after) is type(before) or family == "bert"
    encoded = tokenizer(TEXTS, padding=True, return_tensors="np")
    assert again(TEXTS, padding=True).input_ids == encoded["input_ids"].tolist()
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    ours = bertjax.load_model(tmp_path / "run" / "model", "mlm")(ids, mask)
    theirs = outputs(after, encoded)[0]
    close(np.asarray(ours)[mask > 0], theirs[mask > 0])
    assert (theirs - outputs(before, encoded)[0]).abs().max() > 1e-2


# ----------------------------------------------------------------------------------- from scratch


@pytest.mark.slow
@pytest.mark.parametrize("kind, mask", [("bpe", "<mask>"), ("unigram", "<mask>"), ("wordpiece", "[MASK]")])
def test_the_demo_trains_with_every_kind_of_vocabulary(kind, mask, tmp_path, capsys):
    """Next sentences too, packed, whole words; `<s> A </s></s> B </s>` is shown, learnt and read by transformers."""
    from bertjax.pretraining import job
    from bertjax.tools import build_corpus

    config = read_config("demo")
    config.data.demo_megabytes, config.data.demo_vocab_size, config.data.demo_vocab_model = 0.4, 700, kind
    config.data.packed, config.data.corpus_limits, config.masking.whole_word = True, "warn", True
    config.model.update(hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=1)
    config.phases, config.batch_size, config.eval.rows = ((4, 96),), 8, 16
    config.optimizer.warmup_steps, config.eval.every_steps, config.checkpoint.every_steps = 1, 4, 4
    config.log.tensorboard, config.execution.compilation_cache = False, ""
    job.run(job.prepare(check_config(frozen(config)), str(tmp_path / "run")))
    model = tmp_path / "run" / "model"
    assert json.loads((tmp_path / "run" / "examples.json").read_text())[0]["predictions"]
    assert 0 <= bertjax.next_sentence(model, ("The function.", "It returns a string.")) <= 1

    capsys.readouterr()
    build_corpus.main(["--inspect", f"--output={tmp_path / 'run' / 'corpus'}", "--packed", "--seq_length=96"])
    assert f"{{{mask}->" in capsys.readouterr().out

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForPreTraining.from_pretrained(model).eval()
    text = f"It returns the {mask} of an array."
    encoded = tokenizer([text], return_tensors="np")
    logits = outputs(network, encoded).prediction_logits[0]
    (place,) = np.flatnonzero(encoded["input_ids"][0] == tokenizer.mask_token_id)
    best = bertjax.fill_mask(model, text, top_k=3)[0]
    close([one.probability for one in best], logits[place].softmax(-1).topk(3).values)
