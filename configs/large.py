"""BERT-large pre-training as in the paper (Devlin et al. 2019, section 3 and appendix A.2).

    python -m bertjax.main --config=configs/large.py --config.data.corpus=STORE --workdir=DIR

Variants, after a colon (large.py:two_phase): two_phase (90 % of the steps at 128 tokens, as the
paper did to save time), packed (several pairs in a row, no work on padding), v5e_16 and
v4_32 (settings that fit those slices of 16 TPU chips).
"""

from bertjax.config import PRETRAINING_VARIANTS, apply_variants, default_config, scan_layers

# 16 TPU chips: 256 x 512 takes at most 9 GiB of a v5e or v4 chip; by the compiler's cycles "dots"
# would be slower, with XLA's attention (docs/plan.md).
SLICES = {"v5e_16": scan_layers("full"), "v4_32": scan_layers("full")}


def get_config(variants=""):
    config = default_config()

    config.model.num_hidden_layers = 24  # section 3: L=24, H=1024, A=16, 340M parameters
    config.model.hidden_size = 1024
    config.model.num_attention_heads = 16
    config.model.intermediate_size = 4096  # section 3: 4H

    config.phases = ((1_000_000, 512),)  # A.2: 1,000,000 steps, about 40 epochs of 3.3B words
    config.batch_size = 256  # A.2: 256 x 512 = 128,000 tokens a batch
    config.optimizer.learning_rate = 1e-4  # A.2
    config.optimizer.warmup_steps = 10_000  # A.2
    config.optimizer.weight_decay = 0.01  # A.2
    config.model.hidden_dropout_prob = 0.1  # A.2
    config.model.attention_probs_dropout_prob = 0.1  # A.2

    config.checkpoint.every_steps = 5_000
    config.eval.every_steps = 10_000
    return apply_variants(config, variants, PRETRAINING_VARIANTS | SLICES)
