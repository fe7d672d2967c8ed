"""Objective + optimizer + mesh + batches -> a trained state, a logbook, checkpoints, a report.

    pretraining    the job: prepares (corpora, objective, workdir) and runs, then finish
    trainer, loop  the compiled step of any objective, and what happens around it (ahead, meter)
    optimizer, losses, sharding    what the step is made of
    checkpoint, preemption, budget, distributed    how a run begins, stops and goes on
    logbook, sinks, report    what it says of itself
"""
