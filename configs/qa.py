"""Answers in passages, from your own questions in SQuAD's JSON layout.

    python -m bertjax.main --config=configs/qa.py --config.init_from=MODEL \\
        --config.task.data=DIR --workdir=DIR

DIR holds train.json and dev.json. qa.py:2.0 also learns that some questions have no answer
(`is_impossible`), with the threshold that is best on dev. Options: see bertjax/tasks/squad.py.
"""

from bertjax.config import finetune_config


def get_config(version="1.1"):
    if version not in ("1.1", "2.0"):
        raise ValueError(f"configs/qa.py:{version} is unknown; 1.1 or 2.0")
    config = finetune_config()
    config.task.name = f"squad{version}"
    config.task.options = {
        "files": {"train": "train.json", "dev": "dev.json"},
        "doc_stride": 128,  # tokens between the windows of a long passage
        "max_answer_length": 30,  # tokens
    }
    config.batch_size = 32  # paper 4.2
    config.optimizer.learning_rate = 5e-5  # paper 4.2
    config.task.epochs = 3  # paper 4.2
    config.task.max_length = 384  # google-research/bert, README
    return config
