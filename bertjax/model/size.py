"""How large a model is, and how much work a row of it is: parameters, floating-point operations, bytes of a step."""

import functools
import math

from bertjax.model.heads import BertForPreTraining, parameter_shapes
from bertjax.model.paths import flatten
from bertjax.model.presets import BertConfig

PRETRAINING_HEADS = ("pooler", "mlm", "nsp")
# [rows, T, H] arrays of bfloat16 that a layer keeps for its backward pass, as the compiler's buffer assignment lists
# them: "full" the layer's input, once for each of its two uses; "minimal" also the context and the normalised sum
# behind it; "dots" also queries, keys, values, both outputs, and the inner activations, which are four; "none" what
# fits best.
KEPT = {"none": 26, "dots": 12, "minimal": 4, "full": 2}
WORKING = 20  # arrays [rows, T, H] of the one layer at work
# Bytes of an element [A, T, T], where attention is not fused: kept by a layer without remat (scores in float32,
# probabilities in bfloat16), at work in one.
KEPT_MATRICES, WORKING_MATRICES = 6, 10
WORKING_LOGITS = 10  # bytes of an element [P, V]


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


def bytes_of(
    config: BertConfig, shape: tuple[int, int, int], split: tuple[int, int, int, int], remat: str, fused: bool
) -> float:
    """Bytes of a device by arithmetic: state, gradients, kept activations, work at its widest.

    This is what the compiler assigns to buffers, within a tenth; the program that it ends with takes 1.05 to 1.25 times
    as much.

    Args:
      shape: rows of the global batch; T, tokens of a row; P, positions of a row that the MLM head sees.
      split: devices, fsdp, tensor, accumulation.
      fused: whether attention keeps its matrices out of memory.
    """
    (rows, length, predictions), (devices, fsdp, tensor, accumulation) = shape, split
    # Weights and moments in float32, gradients (with accumulation also their sum), weights again in bfloat16, stacked.
    state = parameter_count(config) / (fsdp * tensor) * (4 * 3 + 4 * (1 if accumulation == 1 else 2) + 2)
    here = rows * tensor / devices / accumulation
    hidden = here * length * config.hidden_size * 2
    matrices = 0 if fused else here * config.num_attention_heads / tensor * length * length
    kept = config.num_hidden_layers * (KEPT[remat] * hidden + (remat == "none") * KEPT_MATRICES * matrices)
    logits = here * predictions * config.vocab_size / tensor
    return state + kept + max(WORKING_MATRICES * matrices + WORKING * hidden, WORKING_LOGITS * logits)
