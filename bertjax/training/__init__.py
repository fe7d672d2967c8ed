"""Objective + optimizer + mesh + batches -> a trained state, a logbook, checkpoints, a report.

pretraining    the job: prepares (corpora, objective, workdir) and runs, then finish
trainer, loop  the compiled step of any objective, and what happens around it (programs, meter)
optimizer, losses, sharding    what the step is made of
distributed, agreement, claim    how it begins: all processes, of one run, with a directory
checkpoint, preemption, watchdog, budget    how it stops, by whom, and goes on
logbook, sinks, report    what it says of itself
"""
