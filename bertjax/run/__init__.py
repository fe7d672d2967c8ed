"""A corpus or a task -> a trained state in a directory, in pieces: prepare, claim, resume, save, loop, finish."""
