"""The 24 BERT miniatures of Turc et al. 2019 ("Well-Read Students Learn Better").

    python -m bertjax.main --config=configs/miniatures.py:L=4,H=256 \\
        --config.data.corpus=STORE --workdir=DIR

L is one of 2, 4, 6, 8, 10, 12 and H one of 128, 256, 512, 768; A = H/64 and F = 4H follow. Tiny is
L=2,H=128; Mini L=4,H=256; Small L=4,H=512; Medium L=8,H=512. Variants as in base.py follow after
another comma: L=4,H=256,two_phase.
"""

from bertjax.config import PRETRAINING_VARIANTS, apply_variants, default_config
from bertjax.model.presets import miniature


def get_config(text="L=4,H=256"):
    words = text.split(",")
    sizes = dict(word.split("=", 1) for word in words if "=" in word)
    if set(sizes) != {"L", "H"} or not all(size.isdigit() for size in sizes.values()):
        raise ValueError(f"miniatures.py:{text} must say both sizes: miniatures.py:L=4,H=256")

    config = default_config()
    model = miniature(int(sizes["L"]), int(sizes["H"]))  # table 1 of the paper
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        config.model[name] = getattr(model, name)

    config.phases = ((1_000_000, 512),)  # section 4.1: the recipe of BERT
    config.batch_size = 256
    config.checkpoint.every_steps = 5_000
    config.eval.every_steps = 10_000
    variants = ",".join(word for word in words if "=" not in word)
    return apply_variants(config, variants, PRETRAINING_VARIANTS)
