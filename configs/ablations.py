"""The ablations of the paper's section 5 and appendix C, each a change of one thing in BERT-base.

    python -m bertjax.main --config=configs/ablations.py:no_nsp --config.data.corpus=STORE
    python -m tests.benchmarks.ablate --store=STORE ...      several of them, fine-tuned, in a table

    base                 table 5, the first row: BERT-base, with steps kept for figure 5
    no_nsp               table 5: masked language model on contiguous text, no NSP
    ltr                  table 5, "LTR & No NSP": left to right, next-token loss, no NSP; its
                         "+ BiLSTM" is a setting of the fine-tuning: --config.task.bilstm=1
    size=L/H/A           table 6: layers, width and heads, such as 3/768/12
    masking=M/S/R        table 8: shares of [MASK], same and random word in percent, such as 80/20/0

Variants of base.py may follow after a comma: ablations.py:ltr,two_phase.
"""

from bertjax.config import PRETRAINING_VARIANTS, apply_variants, default_config


def no_nsp(config):
    config.data.nsp = False


def ltr(config):
    config.data.nsp = False
    config.model.is_decoder = True


def size(config, text):
    try:
        layers, hidden, heads = map(int, text.split("/"))
    except ValueError:
        raise ValueError(f"size={text} is not LAYERS/WIDTH/HEADS, such as 6/768/12") from None
    config.model.num_hidden_layers = layers
    config.model.hidden_size = hidden
    config.model.num_attention_heads = heads
    config.model.intermediate_size = 4 * hidden


def masking(config, text):
    try:
        mask, same, random = map(float, text.split("/"))
    except ValueError:
        raise ValueError(f"masking={text} is not MASK/SAME/RANDOM, such as 80/10/10") from None
    if mask + same + random != 100:
        raise ValueError(f"masking={text}: the three shares must add up to 100")
    config.masking.mask_prob = mask / 100
    config.masking.random_prob = random / 100


NAMED = {"base": lambda config: None, "no_nsp": no_nsp, "ltr": ltr}
WITH_VALUE = {"size": size, "masking": masking}


def get_config(text="base"):
    config = default_config()
    # Figure 5: every 100,000 steps a checkpoint to fine-tune: --config.init_from=WORKDIR@100000.
    config.checkpoint.every_steps = 10_000
    config.checkpoint.keep_every = 100_000
    config.eval.every_steps = 10_000
    names = []
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name in WITH_VALUE:
            WITH_VALUE[name](config, value)
        else:
            names.append(word)
    return apply_variants(config, ",".join(names), NAMED | PRETRAINING_VARIANTS)
