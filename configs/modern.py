"""A modern encoder: ModernBERT, Warner et al. 2024 (arXiv:2412.13663), pre-trained from scratch.

    python -m bertjax.main --config=configs/modern.py:large,v5e_16 --config.data.corpus=STORE

Variants: a size, base (default), large or small (ours, for one GPU); budget trains for minutes of one GPU, not for
2 T tokens; nsp adds next-sentence pairs and segment embeddings; muon trains by that optimizer; v5e_16 and v4_32 fit
those TPU slices. Numbers are those of the paper's tables 3 and 4, section 2.2.2 and its published settings
(AnswerDotAI/ModernBERT, yamls/modernbert); docs/pretraining.md says what differs from the published run. Those of
budget are measured: docs/experiments.md, "What 30 GPU-minutes buy".
"""

from bertjax.config import Architecture, apply_variants, default_config, scan_layers, total_steps, walk
from bertjax.model.presets import PRESETS

SHORT, LONG = 1024, 8192
RECIPES = {  # table 3; large has 616 rows at LONG there, which divide less well
    "base": dict(rows=(768, 4608), long_rows=576, rate=8e-4, micro_batches=48, on_16_chips=12)
    | dict(warmup=3e9, growth=50e9, short=1719e9, long=250e9, decay=50e9),  # tokens
    "large": dict(rows=(448, 4928), long_rows=672, rate=5e-4, micro_batches=112, on_16_chips=14)
    | dict(warmup=2e9, growth=10e9, short=1700e9, long=250e9, decay=50e9),
    "small": dict(rows=(128, 768), long_rows=96, rate=8e-4, micro_batches=4, on_16_chips=2)
    | dict(warmup=0.1e9, growth=0.5e9, short=17e9, long=2.5e9, decay=0.5e9),
}


def get_config(variants=""):
    config, names = default_config(), variants.split(",")
    size = next((name for name in names if name in RECIPES), "base")
    recipe = RECIPES[size]
    for field, _ in walk(Architecture):
        config.model[field] = getattr(PRESETS[f"modernbert-{size}"], field)
    config.model.vocab_size, config.model.vocab_multiple = 0, 64  # the tokenizer's; published 50,368
    config.model.max_position_embeddings = LONG
    config.model.hidden_dropout_prob = config.model.attention_probs_dropout_prob = 0.0
    config.data.packed, config.data.nsp, config.data.short_seq_prob = True, False, 0.0
    config.masking.rate = 0.3

    # Packed rows of SHORT tokens in batches that grow in five steps, then the same tokens a batch in rows of LONG.
    (start, rows), growth, long_rows = recipe["rows"], recipe["growth"], recipe["long_rows"]
    sizes = range(start, rows, (rows - start) // 5)
    grow = [(round(growth / len(sizes) / (size * SHORT)), SHORT, size) for size in sizes]
    stay = (round((recipe["short"] - growth) / (rows * SHORT)), SHORT, rows)
    config.phases = (*grow, stay, (round((recipe["long"] + recipe["decay"]) / (long_rows * LONG)), LONG, long_rows))
    config.batch_size, config.accumulation = start, recipe["micro_batches"]  # for one accelerator of 80 GB

    config.optimizer.name, config.optimizer.bias_correction = "stableadamw", True
    config.optimizer.b2, config.optimizer.eps, config.optimizer.clip_norm = 0.98, 1e-6, 0.0
    config.optimizer.learning_rate = recipe["rate"]
    config.optimizer.weight_decay = 1e-5 / recipe["rate"]  # 1e-5, which its optimizer does not multiply by the rate
    config.optimizer.schedule = "warmup_stable_decay"
    config.optimizer.warmup_steps = round(recipe["warmup"] / (start * SHORT))
    config.optimizer.decay_share = recipe["decay"] / (long_rows * LONG) / total_steps(config)
    # Of all phases, so that their losses compare; published: eval_loader.mlm_probability
    config.eval.seq_length, config.eval.masking_rate = SHORT, 0.15
    config.eval.every_steps = config.checkpoint.every_steps = 4_000  # published

    def budget(config):
        config.budget_minutes = 20
        config.phases = ((90_000, 128), (10_000, 512))  # shares of the time
        config.batch_size, config.accumulation = 128, 1
        config.optimizer.learning_rate, config.optimizer.warmup_steps, config.optimizer.decay_share = 4e-4, 10_000, 0.2
        config.model.classifier_pooling = "cls"
        config.eval.seq_length, config.checkpoint.every_steps = 128, 20_000

    def on_16_chips(config, fsdp=1):
        scan_layers("full")(config)
        config.accumulation, config.mesh.fsdp = recipe["on_16_chips"], fsdp

    def muon(config):  # AdamW's rate suits its updates at a root mean square of 0.2 (Liu et al. 2025, Moonlight)
        own = dict(name="optax.contrib.muon", options={"consistent_rms": 0.2}, b2=0.999, bias_correction=False)
        config.optimizer.update(own)

    # Without segments, pairs are learnt at the cost of all tasks that compare two texts: docs/experiments.md
    pairs = {"data.nsp": True, "model.classifier_pooling": "cls", "model.type_vocab_size": 2}
    variants = {
        "budget": budget,
        "muon": muon,
        "nsp": lambda config: config.update_from_flattened_dict(pairs),
        "v5e_16": lambda config: on_16_chips(config, 16 if size == "large" else 1),  # docs/plan.md
        "v4_32": on_16_chips,
    }
    return apply_variants(config, ",".join(name for name in names if name != size), variants)
