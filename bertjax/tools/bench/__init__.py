"""Measurements, side by side with transformers: python -m bertjax.tools.bench --help

    step       the training step (the default)
    input      text -> token store -> rows -> masks, with:
    input_stages, input_original   our stages; the original's create_pretraining_data.py
    workloads  what is measured: model, length, rows, predictions
    jax_step   bertjax's training step: seconds, memory, kernel profile, parity of data with:
    peer       the same step in transformers + torch.compile, in a process of its own
    kernels    a jax.profiler trace -> time by kind of kernel
"""
