"""Continue the pre-training of a released BERT on your own corpus (biomedical, legal, ...).

    python -m bertjax.main --config=configs/continued.py:CHECKPOINT \\
        --config.data.corpus=STORE --workdir=DIR

CHECKPOINT is a Hugging Face directory, a TF1 checkpoint or a bertjax run; the architecture is its
own. STORE must be built with its vocabulary (build_corpus --tokenizer=CHECKPOINT). New words:
python -m bertjax.tools.convert --add_vocab=FILE makes a checkpoint that knows them.
"""

from bertjax.config import default_config
from bertjax.interop import open_source


def get_config(checkpoint):
    config = default_config()
    config.init_from = checkpoint
    architecture = open_source(checkpoint).config
    for name in config.model:
        if hasattr(architecture, name):
            config.model[name] = getattr(architecture, name)
    config.data.nsp = architecture.heads == "bert"  # no other family was trained on next sentences

    # Our choice, not the paper's: a tenth of its steps, and half its peak rate, since the start is
    # trained already. Shorten to a few epochs of a small corpus.
    config.phases = ((100_000, min(512, architecture.max_position_embeddings)),)
    config.batch_size = 256
    config.optimizer.learning_rate = 5e-5
    config.optimizer.warmup_steps = 5_000
    return config
