"""Pre-training recipes that came after the paper. None is a default.

    python -m bertjax.main --config=configs/recipes.py:budget --config.data.corpus=STORE

    budget       what fits into 24 hours: Izsak et al. 2021, "How to Train BERT with an Academic
                 Budget"; Geiping & Goldstein 2023, "Cramming". The schedule follows the clock
    roberta      Liu et al. 2019, base at 2,048 rows: no NSP, contiguous text, longer steps
    lamb_phase1  large batches by LAMB, You et al. 2020, with the numbers of NVIDIA's
    lamb_phase2  DeepLearningExamples (PyTorch/LanguageModeling/BERT), whose rate falls as
                 the square root of what is left; phase 2 starts from phase 1:
                 --config.init_from=PHASE1/model (moments start at 0; NVIDIA's go on)

Each is for one accelerator: on n of them divide `accumulation` by n. Variants of base.py may follow
after a comma (recipes.py:budget,packed).
"""

from bertjax.config import PRETRAINING_VARIANTS, apply_variants, default_config
from bertjax.model.presets import PRESETS

DAY = 24 * 60


def _size(config, name):
    preset = PRESETS[name]
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        config.model[field] = getattr(preset, field)


def budget(config):
    _size(config, "base")  # both papers; Izsak et al. prefer large where the day has 8 cards
    config.budget_minutes = DAY
    # 128 tokens throughout: Izsak et al. 3.2, Geiping & Goldstein 4.1. The steps are a scale only.
    config.phases = ((1_000_000, 128),)
    config.data.nsp = False  # both
    config.data.packed = True  # Geiping & Goldstein 4.1: no padding
    config.data.short_seq_prob = 0.0
    config.masking.rate = 0.25  # Geiping & Goldstein, final recipe; MosaicBERT takes 0.3
    config.model.hidden_dropout_prob = 0.0  # Geiping & Goldstein 4.3: an epoch cannot overfit
    config.model.attention_probs_dropout_prob = 0.0
    config.batch_size = 4096  # Izsak et al., table 2
    config.accumulation = 16
    # Both have 1e-3, with LayerNorm before each sub-layer; after it, as here, that would diverge.
    config.optimizer.learning_rate = 5e-4  # RoBERTa's for half this batch
    config.optimizer.warmup_steps = 60_000  # Izsak et al. 4.2: 6 % of the budget
    config.optimizer.schedule = "linear_after_warmup"
    config.optimizer.b2 = 0.98  # both
    config.optimizer.clip_norm = 0.5  # Geiping & Goldstein 4.3
    config.optimizer.bias_correction = True


def roberta(config):
    _size(config, "base")
    config.phases = ((125_000, 512),)  # table 3: 2k rows for 125k steps cost as much as BERT's
    config.batch_size = 2048
    config.accumulation = 32
    # Table 2: text of one document a row (DOC-SENTENCES) did slightly better than rows that cross
    # documents, which the authors took for their even batch size. Packing evens it out here.
    config.data.nsp = False
    config.data.packed = True
    config.data.short_seq_prob = 0.0  # section 3.1: full-length rows only
    config.optimizer.learning_rate = 5e-4  # fairseq, examples/roberta/config/pretraining/base.yaml
    config.optimizer.warmup_steps = 10_000  # base.yaml
    config.optimizer.schedule = "linear_after_warmup"
    config.optimizer.b2 = 0.98  # section 3.1
    config.optimizer.eps = 1e-6
    config.optimizer.clip_norm = 0.0  # table 9
    config.optimizer.bias_correction = True


def _lamb(config, steps, length, rows, rate, warmup):
    _size(config, "large")
    config.phases = ((steps, length),)
    config.batch_size = rows
    config.optimizer.name = "lamb"
    config.optimizer.learning_rate = rate
    config.optimizer.warmup_steps = round(warmup * steps)
    config.optimizer.schedule = "polynomial"
    config.optimizer.bias_correction = True  # You et al., algorithm 2


def lamb_phase1(config):
    _lamb(config, 7038, 128, 65_536, 6e-3, 0.2843)
    config.accumulation = 512


def lamb_phase2(config):
    _lamb(config, 1563, 512, 32_768, 4e-3, 0.128)
    config.accumulation = 1024


RECIPES = {"budget": budget, "roberta": roberta, "lamb_phase1": lamb_phase1, "lamb_phase2": lamb_phase2}


def get_config(names="budget"):
    if len(several := [name for name in names.split(",") if name in RECIPES]) > 1:
        raise ValueError(f"{' and '.join(several)} are different recipes; name one")
    return apply_variants(default_config(), names, RECIPES | PRETRAINING_VARIANTS)
