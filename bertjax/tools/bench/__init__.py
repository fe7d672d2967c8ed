"""Measurements, side by side with transformers: python -m bertjax.tools.bench --help

Benchmarks, and the modules that only they use:

    step        the training step (the default): workloads, jax_step, peer, kernels
    memory, packed, scaling    the same step under remat policies, on real text, on more devices
    numerics    loss curves of the fast mode beside float32
    quality     held-out loss over wall clock: quality_curves, quality_peer
    transfer    what a pre-training is worth on small tasks
    finetune    fine-tuning, scores and times: finetune_work, finetune_ours, finetune_peer
    finetune_startup    where the seconds before the first score go
    predict     inference
    input       text -> token store -> rows -> masks: input_stages, input_original

jobs.py starts the processes that are compared.
"""
