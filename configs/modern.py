"""A modern encoder: ModernBERT, Warner et al. 2024 (arXiv:2412.13663), pre-trained from scratch.

    python -m bertjax.main --config=configs/modern.py --config.data.corpus=STORE
    python -m bertjax.main --config=configs/modern.py:large,v5e_16 --config.data.corpus=STORE

Rotary positions, GeGLU, LayerNorm before the sub-layers, no biases, windows of 128 tokens with every third layer
global. Packed rows of 1,024 tokens in batches that grow, then the same tokens a batch in rows of 8,192. Sizes: base
(default, 149 M parameters with the published vocabulary), large (395 M) and small (ours, for a single GPU); nsp adds
next-sentence pairs. Exported as modernbert (with nsp in bertjax's own layout). Numbers are those of the paper's tables
3 and 4 and of its published settings (AnswerDotAI/ModernBERT, yamls/modernbert).

The published run is three, this is one. It restarts for 8,192 tokens with base 160,000 of rotary positions in global
layers, 10,000 before, and with a rate of 3e-4 (large 5e-5); here the base is 160,000 and the rate one curve from the
start. Its dropout of 0.1 after attention, its Megatron initialisation, and large's restart from 900 B tokens at a
tenth of the rate are left out.

`accumulation` is for one accelerator of 80 GB: on n of them divide it by n. A smaller run needs other phases:
--config.phases='((STEPS,1024,ROWS),...,(STEPS,8192,ROWS))'. Variants v5e_16 and v4_32 fit those slices of 16 TPU chips.
"""

from bertjax.config import Architecture, apply_variants, default_config, total_steps, walk
from bertjax.model.presets import PRESETS

SHORT, LONG = 1024, 8192


def _size(config, name):
    preset = PRESETS[f"modernbert-{name}"]
    for field, _ in walk(Architecture):
        config.model[field] = getattr(preset, field)
    config.model.vocab_size = 0  # the tokenizer's, in multiples of 64: published 50,368
    config.model.vocab_multiple = 64
    config.model.max_position_embeddings = LONG


def _run(config, first, rows, growth, long_rows, short, long, decay, warmup):
    """Phases and schedule; all but the numbers of rows in tokens.

    first, rows: of a batch of short rows, at the start and after `growth` tokens, over which it grows in five steps.
    """
    sizes = range(first, rows, (rows - first) // 5)
    grow = [(round(growth / len(sizes) / (size * SHORT)), SHORT, size) for size in sizes]
    stay = (round((short - growth) / (rows * SHORT)), SHORT, rows)
    config.phases = (*grow, stay, (round((long + decay) / (long_rows * LONG)), LONG, long_rows))
    config.batch_size = first  # of an evaluation
    config.optimizer.warmup_steps = round(warmup / (first * SHORT))
    config.optimizer.decay_share = decay / (long_rows * LONG) / total_steps(config)


def base(config):
    _size(config, "base")
    # Table 3: 768 to 4,608 rows over 50 B tokens, 1,719 B tokens at 1,024, then 250 B at 8,192 and 50 B of decay in
    # batches of 576 rows; a warm-up of 3 B.
    _run(config, 768, 4608, 50e9, 576, short=1719e9, long=250e9, decay=50e9, warmup=3e9)
    config.accumulation = 48  # micro-batches of 96 rows, as published
    config.optimizer.learning_rate = 8e-4  # table 3
    # Table 3: 1e-5, which its optimizer does not multiply by the rate: 1e-5 / 8e-4.
    config.optimizer.weight_decay = 0.0125


def large(config):
    _size(config, "large")
    # Table 3: 448 to 4,928 rows over 10 B tokens; 616 rows at 8,192, here 672, which divide as the others do.
    _run(config, 448, 4928, 10e9, 672, short=1700e9, long=250e9, decay=50e9, warmup=2e9)
    config.accumulation = 112  # micro-batches of 44 rows (published: 56 on each of 8 GPUs)
    config.optimizer.learning_rate = 5e-4  # table 3
    config.optimizer.weight_decay = 0.02  # 1e-5 / 5e-4


def small(config):
    """Half of base each way, for 20 B tokens."""
    _size(config, "small")
    _run(config, 128, 768, 0.5e9, 96, short=17e9, long=2.5e9, decay=0.5e9, warmup=0.1e9)
    config.accumulation = 4
    config.optimizer.learning_rate = 8e-4
    config.optimizer.weight_decay = 0.0125


def nsp(config):
    config.data.nsp = True  # ModernBERT has none, as RoBERTa


def tpu(remat):
    """Variant for 16 chips: one compiled group of three layers."""

    def variant(config):
        config.execution.layers = "scan"
        config.execution.remat = remat
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = -1, 1, 1
        config.accumulation = {22: 12, 28: 14}.get(config.model.num_hidden_layers, 2)

    return variant


SIZES = {"base": base, "large": large, "small": small}
VARIANTS = {"nsp": nsp, "v5e_16": tpu("full"), "v4_32": tpu("full")}


def get_config(variants=""):
    config = default_config()
    names = [name for name in variants.split(",") if name]
    size = names.pop(0) if names and names[0] in SIZES else "base"

    config.data.packed = True  # published: sequence_packing
    config.data.nsp = False  # section 2.2.2
    config.data.short_seq_prob = 0.0
    config.masking.rate = 0.3  # table 3
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0

    config.optimizer.name = "stableadamw"  # section 2.2.2
    config.optimizer.b2 = 0.98  # table 3
    config.optimizer.eps = 1e-6  # table 3
    config.optimizer.bias_correction = True
    config.optimizer.clip_norm = 0.0  # section 2.2.2: StableAdamW takes its place
    config.optimizer.schedule = "warmup_stable_decay"  # section 2.2.2: warm-up, constant, 1 - sqrt
    SIZES[size](config)

    config.eval.seq_length = SHORT  # of all phases, so that their losses compare
    config.eval.masking_rate = 0.15  # published: eval_loader.mlm_probability
    config.eval.every_steps = 4_000  # published
    config.checkpoint.every_steps = 4_000  # published
    return apply_variants(config, ",".join(names), VARIANTS)
