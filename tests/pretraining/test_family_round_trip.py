"""transformers' model and tokenizer -> continued pre-training here -> transformers, with equal logits."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from bertjax import load_model
from bertjax.tools.build_corpus import main as build_corpus

pytestmark = [pytest.mark.parity, pytest.mark.slow]
CONTINUED = pathlib.Path(__file__).parents[2] / "configs" / "continued.py"
TEXT = "\n\n".join(
    "\n".join(f"The {colour} {animal} number {n} sees a {other} {animal} and says nothing of it." for n in range(6))
    for colour in ("red", "blue", "green", "old")
    for animal in ("fox", "mouse", "Löwe", "chien")
    for other in ("small", "tall")
)


def byte_level(directory):
    """RoBERTa's tokenizer over a small vocabulary, as `tokenizers` trains and transformers saves it."""
    import tokenizers
    import transformers

    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(TEXT.splitlines(), vocab_size=400, min_frequency=2, special_tokens=special)
    trained.save_model(str(directory))
    transformers.RobertaTokenizer.from_pretrained(str(directory)).save_pretrained(directory)
    config = transformers.RobertaConfig
    return config, transformers.RobertaForMaskedLM


def unigram(directory):
    """XLM-R's: Unigram pieces with Metaspace."""
    import tokenizers
    import transformers

    model = tokenizers.SentencePieceUnigramTokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    model.train_from_iterator(TEXT.splitlines(), vocab_size=300, special_tokens=special, unk_token="<unk>")
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
    )
    fast.save_pretrained(directory)
    return transformers.XLMRobertaConfig, transformers.XLMRobertaForMaskedLM


@pytest.mark.parametrize("family", [byte_level, unigram])
def test_a_masked_lm_goes_through_continued_pre_training_and_back(tmp_path, family):
    import torch
    import transformers

    source, store, workdir = (tmp_path / name for name in ("source", "store", "run"))
    source.mkdir()
    make_config, network = family(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    model = network(
        make_config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=66,
            type_vocab_size=1,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            layer_norm_eps=1e-5,
        )
    )
    model.save_pretrained(source)
    (tmp_path / "text.txt").write_text(TEXT)

    build_corpus([f"--input={tmp_path / 'text.txt'}", f"--tokenizer={source}", f"--output={store}", "--workers=1"])
    settings = {
        "data.corpus": store,
        "data.nsp": False,
        "data.corpus_limits": "warn",
        "phases": "((6,32),)",
        "batch_size": 8,
        "optimizer.warmup_steps": 1,
        "eval.rows": 16,
        "log.every_steps": 1,
        "execution.dtype": "float32",
    }
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "bertjax.main", f"--config={CONTINUED}:{source}", *arguments]
    subprocess.run([*command, f"--workdir={workdir}"], check=True)
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["mlm_loss"] for record in records if "mlm_loss" in record]
    assert losses[-1] < losses[0]

    back = transformers.AutoModelForMaskedLM.from_pretrained(workdir / "model").eval()
    assert type(back) is network
    assert transformers.AutoTokenizer.from_pretrained(workdir / "model")("a red Löwe").input_ids == (
        tokenizer("a red Löwe").input_ids
    )
    ours = load_model(workdir / "model")
    batch = tokenizer(["The red fox sees a <mask>.", "nothing"], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = back(**batch).logits.numpy()
    ids, mask = batch.input_ids.numpy(), batch.attention_mask.numpy()
    logits = np.asarray(ours(ids, mask).mlm_logits if hasattr(ours(ids, mask), "mlm_logits") else ours(ids, mask))
    np.testing.assert_allclose(logits[mask > 0], theirs[mask > 0], atol=1e-4)
    with torch.no_grad():
        before = model.eval()(**batch).logits.numpy()
    assert np.abs(before - theirs).max() > 1e-3
