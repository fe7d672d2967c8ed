"""Pre-training as a job of run/: corpus, objective, phases, and what the finished run leaves."""
