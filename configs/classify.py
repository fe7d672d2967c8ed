"""Classification or regression on your own table: CSV, TSV or JSON lines with a header.

    python -m bertjax.main --config=configs/classify.py --config.init_from=MODEL \\
        --config.task.data=DIR --workdir=DIR

DIR holds train.csv and dev.csv (or .tsv, .jsonl); others are named by
--config.task.options.files="{'train': NAME, 'dev': NAME}".
A data set of the Hugging Face Hub is given as --config.task.data=hf:NAME. Columns by name: see
bertjax/tasks/custom.py.
"""

from bertjax.config import finetune_config


def get_config():
    config = finetune_config()
    config.task.name = "table"
    config.task.options = {
        "head": "classification",  # or multilabel, regression
        "text": ("text",),  # one column, or two for pairs
        "label": "label",
    }
    config.optimizer.learning_rate = 3e-5  # A.3
    return config
