"""The network as pure functions of (parameters, inputs): encoder, attention, heads, sizes.

Knows nothing of data or training. `presets` says what a model is (BertConfig) and how it is run
(Execution); `kernels` are the hand-written programs behind the second.
"""
