"""Named entities or other tags in CoNLL columns (paper section 5.3).

    python -m bertjax.main --config=configs/ner.py --config.init_from=MODEL \\
        --config.task.data=DIR --workdir=DIR

DIR holds train.conll and dev.conll (and test.conll); files with other names are given as
--config.task.options.files="{'train': 'eng.train', 'dev': 'eng.testa', 'test': 'eng.testb'}".
ner.py:tag is for tags that are no entities (parts of speech): scored per token.
"""

from bertjax.config import finetune_config


def get_config(kind="ner"):
    config = finetune_config()
    config.task.name = kind
    config.batch_size = 32
    config.optimizer.learning_rate = 5e-5  # A.3; small sets want the higher end
    config.task.epochs = 4  # A.3
    return config
