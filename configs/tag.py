"""Tags for words in your own CoNLL columns: entities, parts of speech, anything one a word.

    python -m bertjax.main --config=configs/tag.py --config.init_from=MODEL \\
        --config.task.data=DIR --workdir=DIR

DIR holds train.conll and dev.conll: a word a line, its tag in the last column, a blank line between
sentences. Entities (B-, I- tags) are scored as whole entities; tag.py:tokens scores every word by
itself, for parts of speech. Options: see bertjax/tasks/ner.py.
"""

from bertjax.config import finetune_config


def get_config(kind="entities"):
    if kind not in ("entities", "tokens"):
        raise ValueError(f"configs/tag.py:{kind} is unknown; entities or tokens")
    config = finetune_config()
    config.task.name = {"entities": "ner", "tokens": "tag"}[kind]
    config.task.options = {
        "context": "document"  # or sentence: what a row may show around a word
    }
    config.batch_size = 32
    config.optimizer.learning_rate = 5e-5  # A.3; small sets want the higher end
    config.task.epochs = 4  # A.3
    return config
