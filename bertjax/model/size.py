"""How large a model is, and how much work a row of it is.

In: a BertConfig. Out: numbers of parameters and of floating-point operations.
"""

from bertjax.model.presets import BertConfig

PRETRAINING_HEADS = ("pooler", "mlm", "nsp")


def parameter_count(config: BertConfig, heads: tuple[str, ...] = PRETRAINING_HEADS) -> int:
    """Number of trained parameters of the encoder and of the named heads ('pooler', 'mlm', 'nsp').

    The MLM decoder is tied to the word embeddings and counted once.
    """
    h, f, e = config.hidden_size, config.intermediate_size, config.embedding_width
    norm = h + h * config.norm_bias
    count = (config.vocab_size + config.position_rows + config.type_vocab_size) * e
    count += (e + e * config.norm_bias) * config.embedding_norm + (e * h + h) * (e != h)
    gates = 1 + (config.feed_forward == "gated")
    layer = 4 * (h * h + h * config.attention_bias) + 2 * norm
    layer += (gates + 1) * h * f + (gates * f + h) * config.mlp_bias
    count += config.num_hidden_layers * layer + norm * config.final_norm
    count -= norm * (config.norm == "before" and not config.first_norm)
    modern = config.heads == "modernbert"
    sizes = {
        "pooler": h * h + (norm if modern else h),
        "mlm": h * e + (0 if modern else e) + e + e * config.norm_bias + config.vocab_size,
        "nsp": 2 * h + 2,
    }
    for head in heads:
        if head not in sizes:
            raise ValueError(f"unknown head {head!r}; known: {', '.join(sizes)}")
        count += sizes[head]
    return count


def parameters_text(count: int) -> str:
    """'110.1 M parameters', '48,320 parameters'."""
    return f"{count / 1e6:,.1f} M parameters" if count >= 1e5 else f"{count:,} parameters"


def flops_per_row(config: BertConfig, seq_length: int, predictions: int = 0, nsp: bool = True) -> float:
    """Model FLOPs of forward and backward for one row (backward = 2 x forward).

    6 * (T*(L*(4HH + 2HF) + L*2TH) + P*(HH + HV) + HH + 2H), a multiply-add being two FLOPs; 3HF where the
    feed-forward layer is gated, and for T the tokens in the window in a layer that has one. It
    counts matrix products only: no softmax, normalisation, optimizer or recomputation, so that MFU
    computed from it falls when remat is on.

    Args:
      seq_length: T. For rows that hold several pairs this is an upper bound: attention between
        pairs is counted although it is not needed.
      predictions: P, positions that the MLM head sees; 0 without it.
      nsp: whether the pooler and the NSP head run.
    """
    h, f = config.hidden_size, config.intermediate_size
    layers, products = config.num_hidden_layers, 2 + (config.feed_forward == "gated")
    windows = [config.window(layer) for layer in range(layers)]
    seen = sum(seq_length if side is None else min(seq_length, 2 * side + 1) for side in windows)
    encoder = seq_length * (layers * (4 * h * h + products * h * f) + 2 * seen * h)
    mlm = predictions * (h + config.vocab_size) * config.embedding_width
    return 6.0 * (encoder + mlm + (h * h + 2 * h if nsp else 0))
