"""One run of any job in its directory: resume rules, checkpoints, starts, report."""
