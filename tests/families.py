"""Small random models of every model type with their tokenizers, as transformers reads them, and files to train on.

Nothing here needs torch or transformers before `torch_model` or `write_checkpoint` is called.
"""

import csv
import io
import json

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world, it's a test of naïve tokenizers!",
    "Café au lait costs 123 euros; the fox pays.",
] * 5
WORDS = "the quick brown fox jumps over lazy dog hello world naïve café pays costs euros".split()
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


# ---------------------------------------------------------------------------------------- models

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 50,
}
_ROBERTA = SIZES | {"type_vocab_size": 1, "pad_token_id": 1}
FAMILIES = {
    "bert": SIZES,
    "roberta": _ROBERTA | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA | {"pad_token_id": 3},
    "distilbert": {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 50},
    "electra": SIZES | {"embedding_size": 20},
    "electra, no projection": SIZES | {"embedding_size": 48},
    "modernbert": SIZES | {"num_hidden_layers": 5, "local_attention": 14, "pad_token_id": 0},
    "modernbert, biases, mean": SIZES
    | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_pooling": "mean", "pad_token_id": 0}
    | {"global_attn_every_n_layers": 2, "num_attention_heads": 2, "local_attention": 6},
}
MODEL_TYPES = [name for name in FAMILIES if "," not in name]


def torch_model(family, auto, **changes):
    """A random network of FAMILIES; `auto`: the rest of its AutoModel's name."""
    import torch
    import transformers

    torch.manual_seed(sum(map(ord, family)))
    values = {"vocab_size": 101, **FAMILIES[family], **changes}
    config = transformers.AutoConfig.for_model(family.split(",")[0], **values, attn_implementation="eager")
    model = getattr(transformers, f"AutoModel{auto}").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm too: zeros would hide errors
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_checkpoint(directory, family, auto="ForMaskedLM", positions=96, **changes):
    """A directory with the network and the tokenizer of its type; its loaded tokenizer, of transformers."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, {"bert": "bert", "distilbert": "bert", "electra": "bert"}.get(family, family))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    positions += (tokenizer.pad_token_id + 1) * (family in ("roberta", "xlm-roberta", "camembert"))
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": positions}
    torch_model(family, auto, **ids, **changes).save_pretrained(directory)
    return tokenizer


# ------------------------------------------------------------------------------------ tokenizers


def write_json(path, **content):
    path.write_text(json.dumps(content))


def write_bert(directory):
    pieces = [*BERT, *"abcdefghijklmnopqrstuvwxyz.,;:!?'0123456789", *WORDS]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    (directory / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n")
    write_json(directory / "tokenizer_config.json", do_lower_case=True, tokenizer_class="BertTokenizer")
    write_json(directory / "config.json", model_type="bert")


def write_roberta(directory, as_json):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, special_tokens=ROBERTA, initial_alphabet=alphabet, show_progress=False),
    )
    if as_json:
        library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
        library.decoder = decoders.ByteLevel()
        library.save(str(directory / "tokenizer.json"))
        mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
        write_json(
            directory / "tokenizer_config.json",
            tokenizer_class="RobertaTokenizer",
            add_prefix_space=True,
            model_max_length=512,
            mask_token={**mask, "__type": "AddedToken"},
        )
    else:
        library.model.save(str(directory))
    write_json(directory / "config.json", model_type="roberta")


def write_fairseq(directory, kind):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_writer=model,
        vocab_size=70,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    write_json(directory / "config.json", model_type=kind)


def write_unigram(directory):
    library = tokenizers.Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=90, special_tokens=ROBERTA, unk_token="<unk>", show_progress=False)
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library.decoder = decoders.Metaspace()
    library.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names(ROBERTA, 1, 3, 0)
    )


def write_modernbert(directory):
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=BERT, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_tokens([tokenizers.AddedToken("   ", normalized=True), "fox-brown"])
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.decoder = decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names(BERT, 0, 1, 2))


def write_odd(directory):
    """BERT's template around a WordPiece with another normalizer and pre-tokenizer."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    library.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=BERT, show_progress=False)
    )
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.decoder = decoders.WordPiece()
    library.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names(BERT, 0, 1, 2))


def names(tokens, pad, unk, cls):
    sep = tokens[3] if pad == 0 else tokens[2]
    return {
        "pad_token": tokens[pad],
        "unk_token": tokens[unk],
        "cls_token": tokens[cls],
        "sep_token": sep,
        "mask_token": tokens[4],
    }


_WRITE = {
    "bert": write_bert,
    "roberta": lambda directory: write_roberta(directory, False),
    "roberta-json": lambda directory: write_roberta(directory, True),
    "xlm-roberta": lambda directory: write_fairseq(directory, "xlm-roberta"),
    "camembert": lambda directory: write_fairseq(directory, "camembert"),
    "xlm-roberta-json": write_unigram,
    "modernbert": write_modernbert,
    "odd": write_odd,
}


def write_tokenizer(directory, kind):
    _WRITE[kind](directory)


# -------------------------------------------------------------------------------- files to train on


def sentences(count, length=9, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, length)).capitalize() + "." for _ in range(count)]


def write_table(directory, count=24):
    """train.csv and dev.csv: pairs of texts of three classes."""
    directory.mkdir(exist_ok=True)
    for seed, name in enumerate(("train.csv", "dev.csv")):
        with (directory / name).open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "text_b", "label"))
            for a, b in zip(sentences(count, seed=seed), sentences(count, 5, seed=seed + 10), strict=True):
                rows.writerow((a, b, ("none", "one", "more")[min(2, a.count("fox"))]))


def write_conll(directory, count=12):
    """train.conll and dev.conll: foxes are persons, worlds are places of two words."""
    directory.mkdir(exist_ok=True)
    tags = {"fox": "B-PER", "hello": "B-LOC", "world": "I-LOC"}
    for seed, name in enumerate(("train.conll", "dev.conll")):
        lines = []
        for text in sentences(count, seed=seed):
            lines += [f"{word} {tags.get(word, 'O')}" for word in (*text.rstrip(".").split(), ".")] + [""]
        (directory / name).write_text("\n".join(lines) + "\n")


def write_squad(directory, count=8, length=4):
    """train-v1.1.json and dev-v1.1.json: the answer is the word after the first blank behind character 12."""
    directory.mkdir(exist_ok=True)
    for seed, name in enumerate(("train", "dev")):
        paragraphs = []
        for number in range(count):
            context = " ".join(sentences(length, seed=100 * seed + number))
            at = context.index(" ", 12) + 1
            answer = {"text": context[at:].split()[0].strip("."), "answer_start": at}
            question = {"id": f"q{number}", "question": "Who pays?", "answers": [answer]}
            paragraphs.append({"context": context, "qas": [question]})
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (directory / f"{name}-v1.1.json").write_text(json.dumps(content))
