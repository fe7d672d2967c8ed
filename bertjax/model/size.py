"""How large a model is, and how much work a row of it is: numbers of parameters and of floating-point operations."""

import functools
import math

from bertjax.model.heads import BertForPreTraining, parameter_shapes
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig

PRETRAINING_HEADS = ("pooler", "mlm", "nsp")


@functools.cache  # a network of 24 layers takes 60 ms to describe
def parameter_count(config: BertConfig, heads: tuple[str, ...] = PRETRAINING_HEADS) -> int:
    """Number of trained parameters of the encoder and of the named heads ('pooler', 'mlm', 'nsp').

    The MLM decoder is tied to the word embeddings and counted once.
    """
    shapes = flatten(parameter_shapes(BertForPreTraining(config)))
    return sum(math.prod(leaf.shape) for path, leaf in shapes.items() if path.startswith(("encoder", *heads)))


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
