"""SQuAD 1.1 or 2.0, fine-tuned as in the original's README.

    python -m bertjax.main --config=configs/squad.py:2.0 --config.init_from=MODEL \\
        --config.task.data=SQUAD_DIR --workdir=DIR

Your own questions work too, if the files have SQuAD's JSON layout.
"""

from bertjax.config import finetune_config


def get_config(version="1.1"):
    config = finetune_config()
    config.task.name = f"squad{version}"
    config.batch_size = {"1.1": 32, "2.0": 48}.get(version, 32)  # paper 4.2 and 4.3
    config.optimizer.learning_rate = 5e-5  # paper 4.2 and 4.3
    config.task.epochs = {"1.1": 3, "2.0": 2}.get(version, 2)  # paper 4.2 and 4.3
    config.task.max_length = 384  # google-research/bert, README; doc_stride 128
    return config
