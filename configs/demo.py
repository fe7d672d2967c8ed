"""The embedded default: a small BERT pre-trained on documentation, in five minutes on two cores.

    python -m bertjax.main --config=configs/demo.py

No download: the corpus is the Python language reference and the docstrings of what is installed.
The sizes and rates were tuned for this corpus and this budget; the recipe is otherwise BERT's.
"""

from bertjax.config import default_config


def get_config():
    config = default_config()
    config.data.corpus = "docstrings"
    config.data.demo_vocab_size = 5_000

    config.model.num_hidden_layers = 2
    config.model.hidden_size = 128
    config.model.num_attention_heads = 4
    config.model.intermediate_size = 512
    config.model.max_position_embeddings = 128
    config.model.hidden_dropout_prob = 0.0  # a few epochs of a small model cannot overfit
    config.model.attention_probs_dropout_prob = 0.0

    config.phases = ((800, 64),)
    config.batch_size = 64
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 150

    config.eval.every_steps = 200
    config.eval.rows = 0  # all
    config.checkpoint.every_steps = 200
    config.log.fill_mask = (
        "Return the [MASK] of the array elements over a given axis.",
        "If the file does not [MASK], an error is raised.",
        "The function takes a single [MASK] and returns a string.",
    )
    return config
