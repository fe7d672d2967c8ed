"""A GLUE task (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli) as in the paper, section 4.1.

    python -m bertjax.main --config=configs/glue.py:mrpc --config.init_from=MODEL \\
        --config.task.data=GLUE_DIR/MRPC --workdir=DIR

MODEL is a Hugging Face directory, a TF1 checkpoint or a bertjax run. The search over batch size,
learning rate and epochs is python -m bertjax.tools.sweep.

glue.py:all trains every task whose folder is in GLUE_DIR (given as config.task.data) and prints the
benchmark's table. glue.py:xnli reads XNLI's files; config.task.options sets the languages that are
scored (one, several, or all) and trained on.
"""

from bertjax.config import finetune_config


def get_config(task="mrpc"):
    config = finetune_config()
    config.task.name = task
    config.batch_size = 32  # section 4.1
    config.optimizer.learning_rate = 2e-5  # section 4.1: best of 5e-5, 4e-5, 3e-5, 2e-5 on dev
    config.task.epochs = 3  # section 4.1
    config.task.max_length = 128  # google-research/bert, README
    if task == "xnli":
        # Train on one language and score another: the paper's zero-shot setting (README).
        config.task.options = {"language": "en", "train_language": "en"}
    return config
