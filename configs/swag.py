"""SWAG, four endings to choose from (paper section 4.4).

    python -m bertjax.main --config=configs/swag.py --config.init_from=MODEL \\
        --config.task.data=SWAG_DIR --workdir=DIR
"""

from bertjax.config import finetune_config


def get_config():
    config = finetune_config()
    config.task.name = "swag"
    config.batch_size = 16  # section 4.4
    config.optimizer.learning_rate = 2e-5  # section 4.4
    config.task.epochs = 3  # section 4.4
    return config
