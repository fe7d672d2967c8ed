"""Pre-training and fine-tuning with the tokenizers of RoBERTa and XLM-R, from text to answers."""

import json

import jax
import numpy as np
import pytest

import bertjax
from bertjax.config import finetune_config, frozen
from bertjax.data.build import build_store
from bertjax.pretraining import job as pretraining
from bertjax.tasks import job
from bertjax.tokenization import load_tokenizer
from bertjax.training import sharding

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models, pre_tokenizers, trainers  # noqa: E402

WORDS = "the quick brown fox jumps over lazy dog hello world naïve café pays costs euros".split()
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

pytestmark = pytest.mark.slow


def sentences(count, length=9, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, length)).capitalize() + "." for _ in range(count)]


@pytest.fixture(scope="module", params=["roberta", "xlm-roberta"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "roberta":
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=350,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(sentences(50), trainer)
        library.model.save(str(directory))
    else:
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences(50)),
            model_prefix=str(directory / "sentencepiece.bpe"),
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (directory / "config.json").write_text('{"model_type": "xlm-roberta"}')
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """The model directory of a short run with packed rows, whole words and next sentences."""
    directory = tmp_path_factory.mktemp("run")
    documents = [sentences(8, seed=n) for n in range(40)]
    build_store(None, tokenizer, directory / "store", documents=documents, heldout_fraction=0.2)
    config = bertjax_config(directory / "store")
    pretraining.run(pretraining.prepare(frozen(config), str(directory / "run")))
    return directory / "run" / "model"


def bertjax_config(store):
    from bertjax.config import default_config

    config = default_config()
    config.data.corpus = str(store)
    config.data.corpus_limits = "warn"
    config.data.packed = True
    config.masking.whole_word = True
    config.model.num_hidden_layers = 1
    config.model.hidden_size = 16
    config.model.num_attention_heads = 2
    config.model.intermediate_size = 32
    config.model.max_position_embeddings = 96
    config.phases = ((3, 96),)
    config.batch_size = 8
    config.optimizer.warmup_steps = 1
    config.log.tensorboard = False
    config.log.fill_mask = ("The [MASK] fox.",)
    config.execution.compilation_cache = ""
    return config


def test_the_model_answers_here_and_its_tokenizer_is_read_by_transformers(model, tokenizer, capsys):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    text = "The quick <mask> jumps."
    assert theirs(text)["input_ids"] == tokenizer.layout.join(tokenizer.encode(text, True))[0].tolist()
    assert theirs.mask_token_id == tokenizer.mask_id and theirs.pad_token_id == 1
    assert bertjax.fill_mask(model, text)[0] == bertjax.fill_mask(model, "The quick [MASK] jumps.")[0]
    assert json.loads((model.parent / "examples.json").read_text())[0]["predictions"]
    assert 0 <= bertjax.next_sentence(model, ("The fox.", "Hello world.")) <= 1


def tuned(name, model, data, workdir, **options):
    settings = frozen(finetune_config()).replace(
        {
            "task.max_length": 80,
            "task.buckets": 1,
            "task.eval_batch_size": 8,
            "task.epochs": 1,
            "batch_size": 8,
            "optimizer.learning_rate": 1e-3,
        }
    )
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return job.run(job.prepare_task(job.make_task(name, str(data), options), model, workdir, settings, mesh=mesh))


def test_pairs_of_texts_are_classified(model, tokenizer, tmp_path):
    texts = sentences(16)
    rows = [f"{a}\t{b}\t{'yes' if 'fox' in a else 'no'}" for a, b in zip(texts, reversed(texts), strict=True)]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(["text\ttext_b\tlabel", *rows]) + "\n")
    options = {"files": {"train": "train.tsv", "dev": "dev.tsv"}, "text": ("text", "text_b")}
    tuned("table", model, tmp_path, tmp_path / "run", **options)
    (found,) = bertjax.classify(tmp_path / "run" / "model", [("The fox.", "Hello")])
    assert set(found) == {"yes", "no"}


def test_words_are_tagged(model, tokenizer, tmp_path):
    lines = []
    for text in sentences(12):
        lines += [f"{word} {'B-PER' if word == 'fox' else 'O'}" for word in text.rstrip(".").split()] + [". O", ""]
    for name in ("train.conll", "dev.conll"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    tuned("ner", model, tmp_path, tmp_path / "run")
    words = ["The", "naïve", "\u200b", "fox", "café"]
    assert len(bertjax.tag_words(tmp_path / "run" / "model", [words])[0]) == len(words)


def test_questions_are_answered_with_parts_of_the_passage(model, tokenizer, tmp_path):
    paragraphs = []
    for number in range(8):
        context = " ".join(sentences(3, seed=number))
        at = context.index(" ", 12) + 1
        answer = {"text": context[at:].split()[0].strip("."), "answer_start": at}
        questions = [{"id": f"q{number}", "question": "Who pays?", "answers": [answer]}]
        paragraphs.append({"context": context, "qas": questions})
    content = json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(content)
    tuned("squad1.1", model, tmp_path, tmp_path / "run", max_query_length=16, doc_stride=16)
    context = paragraphs[0]["context"]
    found = bertjax.answer(tmp_path / "run" / "model", "Who pays?", context)
    assert found.text and context[found.start : found.end] == found.text
    assert not found.text.startswith(" ")
